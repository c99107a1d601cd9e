"""The table of benchmarks, and the imports of a command line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import cute_attn.bench
from cute_attn.bench.harness.registry import BENCHMARKS, load

# Forks for each command line, so that one process imports the command.
PROGRAM = """
import contextlib, io, json, os, sys
from cute_attn.bench.__main__ import main
for arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            main([*arguments, "--help"])
        print(json.dumps([text.getvalue(), [*sys.modules]]), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, arguments
"""


def imported_by(*command_lines):
    """Of each command line, what `--help` prints, and the modules below cute_attn.bench that the
    command imports; never torch."""
    program = [sys.executable, "-c", PROGRAM, json.dumps(command_lines)]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(command_lines)
    for text, names in map(json.loads, lines):
        assert "torch" not in names
        ours = (name for name in names if name.startswith("cute_attn.bench."))
        yield text, {name.removeprefix("cute_attn.bench.") for name in ours}


def test_help_lists_the_benchmarks_and_imports_none():
    ((text, modules),) = imported_by([])
    listed = re.findall(r"^    ([a-z0-9-]+)", text, re.MULTILINE)
    assert listed == [*BENCHMARKS, "pages"]
    assert {"attention", "cache", "kda-decode", "sass"} <= {*listed}
    assert {name for name in modules if not name.startswith("harness")} == {"__main__"}


def test_naming_one_imports_no_other():
    results = imported_by(*([name] for name in BENCHMARKS))
    for name, (text, modules) in zip(BENCHMARKS, results, strict=True):
        assert text.startswith(f"usage: python -m cute_attn.bench {name} ")
        others = {other.module for key, other in BENCHMARKS.items() if key != name}
        assert BENCHMARKS[name].module in modules
        assert modules & others == set(), name


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
