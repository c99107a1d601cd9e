"""What a warm cache costs, in measures that other processes on the machine do not change.

Times in seconds are in docs/benchmarks. Here processor time is compared with that of a loop in the
same process, and what is executed, imported and opened is counted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cache_processes import start
from conftest import publish_copies


@pytest.fixture
def compiled_python(tmp_path: Path) -> dict[str, str | None]:
    """Have Python keep its bytecode, as an installed package has it, even if told not to."""
    return {"PYTHONDONTWRITEBYTECODE": None, "PYTHONPYCACHEPREFIX": str(tmp_path / "pycache")}


def test_from_torch_to_a_callable_kernel(
    filled_root: Path, compiled_python: dict[str, str | None]
) -> None:
    """In units of a loop: where that takes 22 ms of processor time, 0.4 and 1.9 are usual."""
    # The prelude of the processes imports the cache: do it again, from the beginning.
    program = """
import torch
for name in [name for name in sys.modules if name.split(".")[0] in ("cute_attn", "toy_specs")]:
    del sys.modules[name]
def loop():
    begun, x = time.process_time(), 0
    for i in range(400_000):
        x = (31 * x + i) % 1_000_003
    return time.process_time() - begun
unit = loop()
begun = time.process_time()
from cute_attn import cache
imported = time.process_time()
from toy_specs import SCALE, ScaleSpec
function = cache.get(SCALE, ScaleSpec(), "sm_90a")
ready = time.process_time()
unit = (unit + loop()) / 2
assert cache.stats().disk_hits == 1
assert "cutlass" not in sys.modules
tell(imported=(imported - begun) / unit, ready=(ready - begun) / unit)
"""
    environment = {"CUTE_ATTN_CACHE_DIR": str(filled_root), **compiled_python}
    limits = {"imported": 0.9, "ready": 3.0}
    least: dict[str, float] = {}
    for _ in range(5):
        facts = start(program, environment, torch=True).result()
        least = {name: min(facts[name], least.get(name, facts[name])) for name in limits}
        if all(least[name] < limit for name, limit in limits.items()):
            return
    raise AssertionError(f"{least}, with limits of {limits}")


def test_a_hit_calls_few_functions_and_imports_nothing_slow(filled_root: Path) -> None:
    """As many in every run, but for the depth of the directory's path."""
    publish_copies(filled_root, [3.0])
    program = """
import tvm_ffi  # brings much along
calls, before = 0, set(sys.modules)
def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
def calls_of_get(factor):
    global calls
    calls = 0
    sys.setprofile(count)
    cache.get(SCALE, ScaleSpec(factor), "sm_90a")
    sys.setprofile(None)
    return calls
first, second, warm = map(calls_of_get, (2.0, 3.0, 3.0))
slow = {"cutlass", "elftools", "numpy", "platformdirs", "rich", "subprocess"}
tell(first=first, second=second, warm=warm, slow=sorted(slow & sys.modules.keys() - before),
     **cache.stats()._asdict())
"""
    told = start(program, {"CUTE_ATTN_CACHE_DIR": str(filled_root)}).result()
    assert told["disk_hits"] == 2
    assert told["first"] < 22_000  # of which sources are parsed for
    assert told["second"] < 2_400
    assert told["warm"] < 30
    assert told["slow"] == []


def test_a_hit_needs_few_system_calls(filled_root: Path) -> None:
    """A network file system makes each one slow: no directory is listed, no entry but one read."""
    program = """
opened = []
files = ("meta.json", "kernel.so", "kernel.o", "kernel.ptx", "uses")
sys.addaudithook(lambda event, args: opened.append((event, str(args[0])))
                 if event in ("open", "os.listdir", "os.scandir") else None)
root = os.environ["CUTE_ATTN_CACHE_DIR"]
cache.get(SCALE, ScaleSpec(), "sm_90a")
tell(events=[(event, os.path.basename(path)) for event, path in opened
             # Directories are opened by name from the one above, and would be listed by number.
             if path in files or (event != "open" and (path.startswith(root) or path.isdigit()))],
     walks=sum(path == "v1" for _, path in opened))
"""
    told = start(program, {"CUTE_ATTN_CACHE_DIR": str(filled_root)}).result()
    assert told["events"] == [["open", "meta.json"], ["open", "kernel.so"], ["open", "uses"]]
    assert told["walks"] == 3
