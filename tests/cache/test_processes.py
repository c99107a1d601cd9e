"""Concurrent processes, and processes killed at the worst moments."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from cache_processes import Process
from conftest import ARCH, fill, publish_copies, space
from toy_specs import SCALE, ScaleSpec

from cute_attn import cache
from cute_attn.cache import store as store_module
from cute_attn.cache.store import Store
from tests.sweeps import FULL

Run = Callable[..., Process]

# To others a process that compiles, which takes its lock and imports no compiler.
HOLD = """
from cute_attn.cache import compiler
stop_at(compiler, "compile_kernel")
cache.get(SCALE, ScaleSpec(), "sm_90a")
"""
GET = "cache.get(SCALE, ScaleSpec(), 'sm_90a')\ntell(**cache.stats()._asdict())\n"


def check_nothing_is_left(root: Path) -> None:
    """The next process gets its kernel at once, and afterwards only intact entries remain."""

    def sleep(_: float) -> None:
        pytest.fail("it waits for a dead process")

    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=sleep)
        patch.setattr(store_module, "time", clock)
        cache.get(SCALE, ScaleSpec(), ARCH)
    store = Store(root)
    for digest in store.digests():
        entry = store.open(digest)
        assert entry is not None
        entry.verify()
        entry.close()
    store.sweep()
    for directory in ("staging", "quarantine"):
        leftovers = root / "v1" / directory
        assert not leftovers.exists() or list(leftovers.iterdir()) == []


def test_eight_processes_compile_a_kernel_once(run: Run, root: Path, tmp_path: Path) -> None:
    program = f"""
while not pathlib.Path({str(tmp_path / "go")!r}).exists():
    time.sleep(0.05)
cache.get(SCALE, ScaleSpec(), "sm_90a")
tell(cutlass="cutlass" in sys.modules, **cache.stats()._asdict())
"""
    processes = [run(program) for _ in range(8)]
    (tmp_path / "go").touch()
    results = [process.result() for process in processes]
    assert sum(result["compiles"] for result in results) == 1
    assert sum(result["disk_hits"] for result in results) == 7
    assert (
        sum(result["cutlass"] for result in results) == 1
    )  # who waits does not import the compiler
    assert all(result["memory_only"] == result["quarantined"] == 0 for result in results)
    (digest,) = Store(root).digests()
    assert (Store(root).entry_path(digest) / "uses").stat().st_size == 7


def test_different_kernels_compile_at_the_same_time(run: Run) -> None:
    first = run(HOLD)
    assert first.hear() == {"reached": "compile_kernel"}
    second = run("cache.get(SCALE, ScaleSpec(3.0), 'sm_90a')\ntell(**cache.stats()._asdict())")
    assert second.result()["compiles"] == 1


COMPILE_AND_STOP = """
from cute_attn.cache import compiler, entry, loader, store
stop_at({module}, {name!r}, call={call})
cache.get(SCALE, ScaleSpec(), "sm_90a")
"""


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        pytest.param("compiler", "_options", 1, marks=pytest.mark.slow),
        ("compiler", "_export", 1),
        pytest.param("store", "_write_synced", 1, marks=pytest.mark.slow),
        # test_a_process_killed_in_the_middle_of_a_file_leaves_nothing is quick
        pytest.param("store", "_write_synced", 3, marks=pytest.mark.slow),
        ("store", "_sync_directory", 1),  # written, not yet renamed
        ("store", "_sync_directory", 2),  # renamed, not yet synced
        ("loader", "_file_in_memory", 1),
    ],
)
def test_a_process_killed_while_it_compiles_stores_or_loads_leaves_nothing(
    run: Run, root: Path, module: str, name: str, call: int
) -> None:
    victim = run(COMPILE_AND_STOP.format(module=module, name=name, call=call))
    assert victim.hear() == {"reached": name}
    victim.kill()
    check_nothing_is_left(root)


def test_a_waiting_process_takes_over_from_one_that_is_killed(run: Run, root: Path) -> None:
    victim = run(HOLD)
    victim.hear()
    waiter = run(GET, CUTE_ATTN_LOG="info")
    time.sleep(1.5)  # it has begun to wait, or will find the lock free
    victim.kill()
    result = waiter.result()
    assert result["compiles"] == 1
    check_nothing_is_left(root)


def test_a_process_killed_in_the_middle_of_a_file_leaves_nothing(run: Run, root: Path) -> None:
    victim = run("""
from cute_attn.cache import store
def write_half(path, data, mode):
    path.write_bytes(data[: len(data) // 2])
    if path.name == "kernel.so":
        tell(reached="half")
        time.sleep(1000)
store._write_synced = write_half
cache.get(SCALE, ScaleSpec(), "sm_90a")
""")
    victim.hear()
    assert len(list((root / "v1" / "staging").rglob("kernel.so"))) == 1
    victim.kill()
    check_nothing_is_left(root)


@pytest.mark.parametrize("method", ["evict(0)", "clear()"])
def test_a_process_killed_while_it_removes_an_entry_leaves_nothing(
    run: Run, filled_root: Path, entry_path: Path, method: str
) -> None:
    victim = run(f"""
from cute_attn.cache import ownership, store
stop_at(ownership.shutil, "rmtree")
store.Store(pathlib.Path({str(filled_root)!r})).{method}
""")
    assert victim.hear() == {"reached": "rmtree"}
    victim.kill()
    assert not entry_path.exists()
    check_nothing_is_left(filled_root)


def test_a_process_killed_during_quarantine_leaves_nothing_that_is_loaded(
    run: Run, filled_root: Path, entry_path: Path
) -> None:
    (entry_path / "kernel.so").write_bytes(b"damaged")
    victim = run(HOLD)
    victim.hear()
    victim.kill()
    cache.get(SCALE, ScaleSpec(), ARCH)
    assert cache.stats().compiles == 1
    assert cache.stats().quarantined == 0  # the victim had done that already
    assert len(list((filled_root / "v1" / "quarantine").iterdir())) == 1


CHURN = """
import os
import random
import signal
from cute_attn.cache.entry import Built
from cute_attn.cache.store import Store

store = Store(pathlib.Path(os.environ["CUTE_ATTN_CACHE_DIR"]))
keys = [cache.describe(SCALE, ScaleSpec(float(n)), "sm_90a") for n in range(4)]
files = {"kernel.o": b"o" * 300_000, "kernel.ptx": b"p" * 100_000}

def publish():
    key = random.choice(keys)
    with store.compiling(key.digest, lambda: store.entry_path(key.digest).is_dir()):
        store.publish(Built(key, files, (), 0.0))

def read():
    entry = store.open(random.choice(keys).digest)
    if entry is not None:
        entry.verify()
        entry.record_use()
        entry.close()

def churn(actions, seconds, least=0):
    # so many at least, however busy the machine is
    end = time.monotonic() + seconds
    done = 0
    while time.monotonic() < end or done < least:
        random.choice(actions)()
        done += 1
    return done
"""


def test_reading_publishing_and_evicting_at_once_never_shows_a_damaged_entry(
    run: Run, root: Path
) -> None:
    evict = "[lambda: store.evict(900_000), store.sweep]"
    programs = ["[read]", "[read]", "[publish]", "[publish, read]", evict]
    processes = [
        run(f"{CHURN}tell(ready=True)\nsys.stdin.readline()\ntell(done=churn({actions}, 1.0, 50))")
        for actions in programs
    ]
    for process in processes:
        process.hear()
    for process in processes:
        process.tell("go")
    for process in processes:
        result = process.result()
        assert result["done"] >= 50
        assert result["stderr"] == ""


def test_processes_killed_at_random_leave_nothing(run: Run, root: Path) -> None:
    """Every entry is complete, no lock is stuck, and no leftover survives a sweep."""
    chance = random.Random(0)
    program = (
        CHURN + "tell(started=True)\nchurn([publish, publish, read, lambda: store.evict(0)], 60)"
    )
    for _ in range(4 if FULL else 2):
        victims = [run(program) for _ in range(4)]
        for victim in victims:
            victim.hear()
        for victim in victims:
            time.sleep(chance.uniform(0.0, 0.1))
            victim.kill()
        store = Store(root)
        for digest in store.digests():
            entry = store.open(digest)
            assert entry is not None
            entry.verify()
            entry.close()
            with store.compiling(digest, lambda: pytest.fail("waited for a dead process")):
                pass
        store.sweep()
        assert list((root / "v1" / "staging").iterdir()) == []


# A thread that has begun to compile, and stops in a function of it until `go_on` is set.
COMPILE_IN_A_THREAD = """
import threading
from cute_attn.cache import compiler
go_further, reached, go_on = compiler.{name}, threading.Event(), threading.Event()
def stopping(*args):
    reached.set()
    go_on.wait()
    return go_further(*args)
compiler.{name} = stopping
thread = threading.Thread(target=cache.get, args=(SCALE, ScaleSpec(), "sm_90a"), daemon=True)
thread.start()
reached.wait()
"""


def test_a_child_forked_while_a_thread_compiles_gets_its_kernels(run: Run) -> None:
    parent = run(f"""{COMPILE_IN_A_THREAD.format(name="_export")}
from dataclasses import dataclass
@dataclass(frozen=True)
class OnlyHere:
    factor: float = 4.0
answer, question = os.pipe()
child = os.fork()
if child == 0:
    cache.get(SCALE, ScaleSpec(3.0), "sm_90a")
    try:
        cache.get(SCALE, OnlyHere(), "sm_90a")
    except cache.CompileError as error:
        tell(error=str(error))
    os.write(question, b".")
    cache.get(SCALE, ScaleSpec(), "sm_90a")
    tell(**cache.stats()._asdict())
    os._exit(0)
os.read(answer, 1)
go_on.set()
tell(status=os.waitpid(child, 0)[1])
""")
    refusal = parent.hear()["error"]
    assert "forked while another thread was compiling" in refusal
    assert "__main__.OnlyHere" in refusal  # which no new process can import
    child = parent.hear()
    assert (child["compiles"], child["disk_hits"], child["failures"]) == (1, 1, 1)
    assert parent.hear() == {"status": 0}


def test_nobody_waits_for_the_forked_child_of_a_killed_process(run: Run, root: Path) -> None:
    victim = run(f"""{COMPILE_IN_A_THREAD.format(name="_import")}
child = os.fork()
if child == 0:
    for fd in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
    time.sleep(60)
    os._exit(0)
tell(child=child)
thread.join()
""")
    child = victim.hear()["child"]
    victim.kill()
    try:
        check_nothing_is_left(root)
    finally:
        os.kill(child, signal.SIGKILL)


EVICT = """
import errno, fcntl, os
from cute_attn.cache.store import Store

def no_locks(fd, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

if {without_locks}:
    fcntl.flock = no_locks
store = Store(pathlib.Path(os.environ["CUTE_ATTN_CACHE_DIR"]))
tell(ready=True)
sys.stdin.readline()
tell(removed=store.evict({limit}).entries)
"""


@pytest.mark.parametrize("without_locks", [False, True])
def test_many_who_evict_at_once_leave_what_one_would(
    run: Run, root: Path, without_locks: bool
) -> None:
    paths = fill(root, 200)
    # The ledger and the directory of locks do not count.
    program = EVICT.format(limit=100 * space(paths[0]), without_locks=without_locks)
    processes = [run(program) for _ in range(4)]
    for process in processes:
        assert process.hear() == {"ready": True}
    for process in processes:
        process.tell("go")
    removed = sum(process.result()["removed"] for process in processes)
    assert [path.exists() for path in paths] == [False] * 100 + [True] * 100
    assert removed == 100


def test_a_loaded_kernel_keeps_no_descriptor(run: Run, filled_root: Path) -> None:
    kernels = 200
    publish_copies(filled_root, map(float, range(3, kernels)))
    result = run(f"""
import resource
import tvm_ffi
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
for n in range(2, {kernels}):
    cache.get(SCALE, ScaleSpec(float(n)), "sm_90a")
maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
images = {{line.split()[4] for line in maps if "/memfd:scale" in line}}
tell(images=len(images), files=len(os.listdir("/proc/self/fd")), **cache.stats()._asdict())
""").result()
    assert result["disk_hits"] == result["images"] == kernels - 2  # none is taken for another
    assert result["files"] < 20


def test_who_waits_says_whom_for(run: Run, root: Path) -> None:
    holder = run(HOLD)
    holder.hear()
    holder.stop()
    waiter = run(f"from cute_attn.cache import store\nstore._SILENT_WAIT_SECONDS = 0.2\n{GET}")
    assert waiter.error_line() == (
        f"waited 0 s so far for process {holder.pid} (it is stopped: kill -CONT lets it go on), "
        f"which compiles {cache.describe(SCALE, ScaleSpec(), ARCH).digest[:12]}\n"
    )
    holder.kill()
    assert waiter.result()["compiles"] == 1


def test_who_waits_to_evict_says_whom_for(run: Run, filled_root: Path) -> None:
    with Store(filled_root)._evicting():
        waiter = run(f"""
from cute_attn.cache import store
store._SILENT_WAIT_SECONDS = 0.2
tell(removed=store.Store(pathlib.Path({str(filled_root)!r})).evict(0).entries)
""")
        assert waiter.error_line() == (
            f"waited 0 s so far for process {os.getpid()}, which evicts entries of {filled_root}\n"
        )
    assert waiter.result()["removed"] == 1
