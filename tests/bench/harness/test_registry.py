"""The table of benchmarks, and the imports of a command line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cute_attn.bench
from cute_attn.bench.harness.registry import BENCHMARKS, load


def imported_by(*arguments):
    """What `--help` prints, and the modules below cute_attn.bench that it imports; never torch."""
    program = (
        "import contextlib, sys\n"
        "from cute_attn.bench.__main__ import main\n"
        f"with contextlib.suppress(SystemExit): main([*{arguments}, '--help'])\n"
        "assert 'torch' not in sys.modules\n"
        "print(*(name for name in sys.modules if name.startswith('cute_attn.bench.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text, _, names = done.stdout.strip().rpartition("\n")
    return text, {name.removeprefix("cute_attn.bench.") for name in names.split()}


def test_help_lists_the_benchmarks_and_imports_none():
    text, modules = imported_by()
    listed = re.findall(r"^    ([a-z0-9-]+)", text, re.MULTILINE)
    assert listed == [*BENCHMARKS, "pages"]
    assert {"attention", "cache", "kda-decode", "sass"} <= {*listed}
    assert {name for name in modules if not name.startswith("harness")} == {"__main__"}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_naming_one_imports_no_other(name):
    text, modules = imported_by(name)
    assert text.startswith(f"usage: python -m cute_attn.bench {name} ")
    others = {other.module for key, other in BENCHMARKS.items() if key != name}
    assert BENCHMARKS[name].module in modules
    assert modules & others == set()


def test_every_benchmark_is_in_the_table():
    root = Path(cute_attn.bench.__file__).parent
    defined = {
        path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
        for path in root.rglob("*.py")
        if "\nBENCHMARK = " in path.read_text()
    }
    assert defined == {listed.module for listed in BENCHMARKS.values()}
    assert list(BENCHMARKS) == sorted(BENCHMARKS)
    assert all(load(name).run for name in BENCHMARKS)
