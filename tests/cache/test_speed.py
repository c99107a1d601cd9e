"""What a warm cache costs, in measures that other processes on the machine do not change.

Times in seconds are in docs/benchmarks. Here calls of functions, imports and system calls are
counted.
"""

from __future__ import annotations

from pathlib import Path

from cache_processes import start
from conftest import publish_copies

COUNT = """
calls = 0
def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
"""


def test_from_torch_to_a_callable_kernel(filled_root: Path) -> None:
    """Where torch is imported already, as it is in a server."""
    # The prelude of the processes imports the cache: do it again, from the beginning.
    program = (
        COUNT
        + """
import torch
for name in [name for name in sys.modules if name.split(".")[0] in ("cute_attn", "toy_specs")]:
    del sys.modules[name]
sys.setprofile(count)
from cute_attn import cache
imported = calls
from toy_specs import SCALE, ScaleSpec
function = cache.get(SCALE, ScaleSpec(), "sm_90a")
sys.setprofile(None)
assert cache.stats().disk_hits == 1
assert "cutlass" not in sys.modules
tell(imported=imported, ready=calls)
"""
    )
    told = start(program, {"CUTE_ATTN_CACHE_DIR": str(filled_root)}, torch=True).result()
    assert told["imported"] < 15_000
    assert told["ready"] < 65_000


def test_a_hit_calls_few_functions_and_imports_nothing_slow(filled_root: Path) -> None:
    """As many in every run, but for the depth of the directory's path."""
    publish_copies(filled_root, [3.0])
    program = (
        COUNT
        + """
import tvm_ffi  # brings much along
before = set(sys.modules)
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
    )
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
