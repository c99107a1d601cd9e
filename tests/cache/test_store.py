"""The store: publication, eviction and leftovers."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cache_processes import Process
from conftest import ARCH, fill, space
from toy_specs import BROKEN, SCALE, ScaleSpec

from cute_attn import cache
from cute_attn.cache import compiler, settings
from cute_attn.cache import store as store_module
from cute_attn.cache.entry import Built, Entry
from cute_attn.cache.locks import LockState, try_lock, try_lock_file
from cute_attn.cache.ownership import Directory
from cute_attn.cache.store import Store


@pytest.fixture
def builds(compiled_root: Path) -> Iterator[list[Built]]:
    """Six kernels to publish: the compiled one under different keys."""
    store = Store(compiled_root)
    (digest,) = store.digests()
    entry = store.open(digest)
    assert entry is not None
    files = {name: entry.read(name) for name in entry.meta["files"]}
    keys = [cache.describe(SCALE, ScaleSpec(float(n)), ARCH) for n in range(6)]
    yield [Built(key, files, entry.kernels, 0.5) for key in keys]
    entry.close()


def opened(store: Store, built: Built) -> Entry:
    entry = store.open(built.key.digest)
    assert entry is not None
    return entry


def test_a_published_entry_reads_back(root: Path, builds: list[Built]) -> None:
    store = Store(root)
    path = store.publish(builds[0])
    assert path == root / "v1" / builds[0].key.digest[:2] / builds[0].key.digest
    entry = opened(store, builds[0])
    entry.verify()
    assert entry.key == builds[0].key
    assert entry.kernels == builds[0].kernels
    assert entry.meta["compile_seconds"] == 0.5
    assert {name: entry.read(name) for name in entry.meta["files"]} == builds[0].files
    entry.close()


def test_everything_in_the_users_directory_is_private(root: Path, builds: list[Built]) -> None:
    os.umask(os.umask(0o000))
    Store(root).publish(builds[0])
    for path in [root, *root.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("umask", [0o077, 0o022])
def test_a_built_directory_can_be_read_by_every_user(
    root: Path, builds: list[Built], umask: int
) -> None:
    before = os.umask(umask)
    try:
        store = Store(root, public=True)
        store.publish(builds[0])
        store.tidy()
    finally:
        os.umask(before)
    for path in [root, *root.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def test_the_first_of_two_publishers_wins(root: Path, builds: list[Built]) -> None:
    store = Store(root)
    store.publish(builds[0])
    second = Built(builds[0].key, {"kernel.o": b"other"}, (), 9.0)
    store.publish(second)
    entry = opened(store, builds[0])
    assert entry.meta["compile_seconds"] == 0.5
    entry.close()
    assert list((root / "v1" / "staging").iterdir()) == []


def test_an_entry_appears_complete(
    root: Path, builds: list[Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(root)
    final = store.entry_path(builds[0].key.digest)
    seen: list[bool] = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        """Look at the entry before each operation on a file."""
        if event.startswith(("open", "os.")) and watching and final.exists():
            watching.clear()
            seen.append(sorted(os.listdir(final)) == sorted([*builds[0].files, "meta.json"]))

    watching = [True]
    sys.addaudithook(watch)  # it cannot be removed: ``watching`` ends it
    store.publish(builds[0])
    watching.clear()
    assert seen == [True]


def test_a_link_to_the_root_is_followed(root: Path, tmp_path: Path, builds: list[Built]) -> None:
    (tmp_path / "link").symlink_to(root)
    Store(root).publish(builds[0])
    opened(Store(tmp_path / "link"), builds[0]).close()


# -- eviction


def use_at(store: Store, built: Built, moment: float) -> None:
    """Make ``moment`` the last use of an entry."""
    path = store.entry_path(built.key.digest)
    for item in [*path.iterdir(), path]:
        os.utime(item, (moment, moment))


def test_the_least_recently_used_go_first(root: Path, builds: list[Built]) -> None:
    store = Store(root)
    now = time.time()
    for age, built in enumerate(builds):
        store.publish(built)
        use_at(store, built, now - age)
    size = space(store.entry_path(builds[0].key.digest))
    evicted = store.evict(max_bytes=int(2.5 * size))
    assert evicted.entries == 4
    assert set(store.digests()) == {built.key.digest for built in builds[:2]}
    assert list((root / "v1" / "staging").iterdir()) == []


def test_using_an_entry_makes_it_recent(root: Path, builds: list[Built]) -> None:
    store = Store(root)
    for built in builds[:2]:
        store.publish(built)
        use_at(store, built, time.time() - 1000)
    entry = opened(store, builds[1])
    entry.record_use()
    hits, last_use = entry.uses()
    assert hits == 1
    assert last_use > time.time() - 100
    entry.close()
    size = space(store.entry_path(builds[0].key.digest))
    store.evict(max_bytes=int(1.5 * size))
    assert store.digests() == [builds[1].key.digest]


def test_hits_are_counted_by_get(filled_root: Path, entry_path: Path) -> None:
    for _ in range(3):
        cache.clear_memory()
        cache.get(SCALE, ScaleSpec(), ARCH)
    assert (entry_path / "uses").stat().st_size == 3


def test_an_entry_in_use_is_never_evicted(root: Path, builds: list[Built]) -> None:
    store = Store(root)
    for built in builds[:3]:
        store.publish(built)
        use_at(store, built, 0.0)
    used = opened(store, builds[1])
    evicted = store.evict(max_bytes=0)
    assert evicted.entries == 2
    assert store.digests() == [builds[1].key.digest]
    used.verify()
    used.close()
    assert store.evict(max_bytes=0).entries == 1


def test_what_this_process_has_loaded_is_in_use_until_it_ends(
    filled_root: Path, entry_path: Path
) -> None:
    function = cache.get(SCALE, ScaleSpec(), ARCH)
    cache.clear_memory()
    del function
    gc.collect()
    assert Store(filled_root).evict(max_bytes=0).entries == 0


def test_an_entry_that_nobody_refers_to_is_not_in_use(filled_root: Path, entry_path: Path) -> None:
    entry = cache.compile(SCALE, ScaleSpec(), ARCH)
    assert Store(filled_root).evict(max_bytes=0).entries == 0
    del entry
    gc.collect()
    assert Store(filled_root).evict(max_bytes=0).entries == 1


@pytest.mark.parametrize("skewed", [0.0, time.time() + 1e8], ids=["1970", "future"])
def test_a_skewed_clock_costs_at_most_an_eviction(
    root: Path, builds: list[Built], skewed: float
) -> None:
    store = Store(root)
    for built in builds[:3]:
        store.publish(built)
    use_at(store, builds[0], skewed)
    size = space(store.entry_path(builds[0].key.digest))
    store.evict(max_bytes=int(2.5 * size))
    assert set(store.digests()) == {built.key.digest for built in builds[1:3]}
    store.publish(builds[0])
    use_at(store, builds[0], skewed)
    entry = opened(store, builds[0])
    entry.record_use()  # by a process whose clock is right
    entry.close()
    for built in builds[1:3]:
        use_at(store, built, time.time() - 100)
    store.evict(max_bytes=int(1.5 * size))
    assert store.digests() == [builds[0].key.digest]


def test_publishing_evicts(
    filled_root: Path, entry_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTE_ATTN_CACHE_MAX_BYTES", "40K")
    cache.get(SCALE, ScaleSpec(3.0), ARCH)
    assert cache.stats().evicted == 1
    assert not entry_path.exists()
    cache.clear_memory()
    cache.get(SCALE, ScaleSpec(3.0), ARCH)
    assert cache.stats().compiles == 1


def test_quarantined_entries_are_evicted_before_useful_ones(
    root: Path, builds: list[Built]
) -> None:
    store = Store(root)
    for built in builds[:3]:
        store.publish(built)
    size = space(store.entry_path(builds[0].key.digest))
    store.quarantine(builds[0].key.digest)
    store.evict(max_bytes=int(2.5 * size))
    assert len(store.digests()) == 2
    assert list((root / "v1" / "quarantine").iterdir()) == []


def test_clear_leaves_nothing_but_what_is_in_use(root: Path, builds: list[Built]) -> None:
    store = Store(root)
    for built in builds[:3]:
        store.publish(built)
    store.quarantine(builds[0].key.digest)
    with store.compiling(builds[4].key.digest, lambda: False):
        pass
    used = opened(store, builds[1])
    assert store.clear().entries == 1
    assert store.digests() == [builds[1].key.digest]
    assert all(len(path.name) == 2 for path in (root / "v1").iterdir())
    used.close()


def test_what_lies_in_staging_counts(root: Path) -> None:
    (old, new) = fill(root, 2)
    with Store(root).staging() as staging:
        (staging / "scratch").write_bytes(b"s" * 2 * space(old))
        Store(root).evict(max_bytes=int(3.5 * space(old)))
    assert not old.exists()
    assert new.exists()


def test_what_another_process_is_removing_does_not_count(root: Path) -> None:
    """Neither the entry being removed nor the directories that it passes through are counted."""
    paths = fill(root, 4)
    limit = 4 * space(paths[0])
    for _ in range(3):
        with Store(root).staging() as staging:
            removing = staging.resolve()
        (removing / "removed").mkdir(parents=True, mode=0o700)
        removing.chmod(0o700)
        (removing / "removed" / "kernel.o").write_bytes(b"o" * 8192)
    assert Store(root).evict(limit).entries == 0
    assert all(path.exists() for path in paths)


def test_space_is_what_is_allocated(root: Path) -> None:
    """A sparse file takes nothing, and a small one a whole block."""
    paths = fill(root, 20, size=1)
    (paths[0] / "kernel.o").open("r+b").truncate(2**40)
    limit = sum(space(path) for path in paths[10:])
    assert Store(root).evict(limit).remaining <= limit
    assert [path.exists() for path in paths] == [False] * 10 + [True] * 10


def test_entries_used_before_the_clock_was_set_back_are_the_last_to_go(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = fill(root, 6)
    now, a_year = time.time(), 365 * 24 * 3600
    for path in paths[:3]:
        os.utime(path, (now - 2 * a_year,) * 2)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - a_year)
    store = Store(root)
    store.evict(max_bytes=int(2.5 * space(paths[0])))
    assert [path.exists() for path in paths] == [False] * 4 + [True] * 2
    os.utime(paths[0].parent, None)
    # From now on they age: what is used after that outlives them.
    late = fill(root / "late", 1)[0]
    os.utime(late, (real() - a_year + 60,) * 2)
    monkeypatch.setattr(time, "time", lambda: real() - a_year + 120)
    late.rename(paths[0])
    store.evict(max_bytes=int(1.5 * space(paths[0])))
    assert [path.exists() for path in paths] == [True] + [False] * 5


def test_the_excess_that_is_in_use_is_reported(
    root: Path, builds: list[Built], caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(root)
    for built in builds[:2]:
        store.publish(built)
    entries = [opened(store, built) for built in builds[:2]]
    size = space(store.entry_path(builds[0].digest))
    for _ in range(2):
        evicted = store.make_room(size, builds[1].digest)
    assert (evicted.entries, evicted.in_use) == (0, 1)
    assert evicted.remaining >= 2 * size
    (warning,) = caplog.messages
    assert "1 entries remain because processes have loaded them" in warning
    for entry in entries:
        entry.close()


def published(store: Store, built: Built, limit: int = 2**40) -> None:
    store.publish(built)
    store.make_room(limit, built.digest)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of entries found, each time that all are looked at."""
    found: list[int] = []
    real = store_module._candidates

    def count(base: Directory, problems: list[str]) -> list[store_module._Candidate]:
        candidates = real(base, problems)
        found.append(len(candidates))
        return candidates

    monkeypatch.setattr(store_module, "_candidates", count)
    return found


def test_publishing_looks_at_all_entries_only_now_and_then(
    root: Path, builds: list[Built], counts: list[int]
) -> None:
    fill(root, 100)
    store = Store(root)
    for _ in range(3):
        for built in builds:
            published(store, built)
            shutil.rmtree(store.entry_path(built.digest))
    assert counts == [101]
    for _ in range(60):
        published(store, builds[0])
    assert len(counts) == 2


def test_a_full_store_is_not_looked_through_at_each_entry(
    root: Path, builds: list[Built], counts: list[int]
) -> None:
    store = Store(root)
    store.publish(builds[0])
    size = space(store.entry_path(builds[0].digest))
    limit = size + sum(space(path) for path in fill(root, 200))
    for built in builds[1:]:
        published(store, built, limit)
    assert sum(space(path) for path in root.glob("v1/??/*")) <= limit
    assert len(counts) < 5


@pytest.mark.parametrize(
    "lie", [b"=0\n", b"", b"garbage", b"=0\n=0\n", b"\xff" * 100_000, "directory", "fifo"]
)
def test_a_wrong_ledger_is_corrected(
    root: Path, builds: list[Built], lie: bytes | str, in_time: None
) -> None:
    store = Store(root)
    paths = fill(root, 40)
    ledger = root / "v1" / "ledger"
    if isinstance(lie, bytes):
        ledger.write_bytes(lie)
        ledger.chmod(0o600)
    elif lie == "fifo":
        os.mkfifo(ledger, 0o600)
    else:
        ledger.mkdir(0o700)
    limit = 20 * space(paths[0])
    for _ in range(store_module._ENTRIES_BETWEEN_COUNTS + 1):
        published(store, builds[0], limit)
    assert sum(space(path) for path in paths if path.exists()) <= limit
    assert ledger.read_text().count("=") == 1


def test_entries_that_nobody_noted_are_found_in_the_end(root: Path, builds: list[Built]) -> None:
    """This happens if a process is killed between publishing an entry and recording it."""
    store = Store(root)
    published(store, builds[0])
    paths = fill(root, 40)
    limit = 20 * space(paths[0])
    for _ in range(store_module._ENTRIES_BETWEEN_COUNTS):
        published(store, builds[0], limit)
    assert sum(space(path) for path in paths if path.exists()) <= limit


def test_a_full_disk_can_be_cleared(small_disk: Path) -> None:
    root = small_disk / "cache"
    paths = fill(root, 4, size=4096)
    os.system(f"cat /dev/zero > {small_disk}/filler 2>/dev/null")
    with pytest.raises(OSError, match="No space"):
        (small_disk / "more").write_bytes(b"m" * 4096)
    evicted = Store(root).clear()
    assert (evicted.entries, evicted.problems) == (4, ())
    assert not any(path.exists() for path in paths)


# -- no room


def stays_in_memory(
    caplog: pytest.LogCaptureFixture, factor: float, problem: str = "No space left"
) -> None:
    assert callable(cache.get(SCALE, ScaleSpec(factor), ARCH))
    stats = cache.stats()
    assert (stats.compiles, stats.memory_only, stats.failures) == (1, 1, 0)
    assert [problem in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("options", ["size=28k", "size=1m,nr_inodes=8", "size=1m,nr_inodes=10"])
def test_a_disk_that_fills_up_in_the_middle_of_a_compilation(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: str,
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    assert os.system(f"mount -t tmpfs -o {options},mode=700 none {tmp_path}") == 0
    try:
        monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path / "cache"))
        # There is room until the compilation begins.
        real, calls = compiler._has_room, iter([True])
        monkeypatch.setattr(compiler, "_has_room", lambda d: next(calls, False) or real(d))
        stays_in_memory(caplog, 11.0)
    finally:
        os.system(f"umount -l {tmp_path}")


def test_a_file_size_limit_set_in_the_middle_of_a_compilation(
    root: Path, run: Callable[..., Process]
) -> None:
    """The linker is killed by it; the object file, which is smaller, can be loaded."""
    result = run("""
import resource
from cute_attn.cache import compiler
export = compiler._export
def limited(*args):
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, resource.RLIM_INFINITY))
    return export(*args)
compiler._export = limited
function = cache.get(SCALE, ScaleSpec(), "sm_90a")
tell(callable=callable(function), **cache.stats()._asdict())
""").result()
    assert (result["callable"], result["compiles"], result["memory_only"]) == (True, 1, 1)
    assert "no linker" not in result["stderr"]
    assert "no directory has room to compile in" in result["stderr"]
    assert Store(root).digests() == []


def test_a_kernel_that_does_not_compile_is_tried_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = compiler._options
    monkeypatch.setattr(compiler, "_options", lambda *args: calls.append(1) or real(*args))
    with pytest.raises(cache.CompileError, match="no_such_field"):
        cache.get(BROKEN, ScaleSpec(), ARCH)
    assert calls == [1]


# -- settings


@pytest.mark.parametrize("size", ["lots", "9" * 400, "-1"])
def test_a_limit_that_is_none_says_what_is_in_force(
    root: Path,
    instant_compiler: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    size: str,
) -> None:
    monkeypatch.setenv("CUTE_ATTN_CACHE_MAX_BYTES", size)
    for factor in (1.0, 2.0):
        cache.get(SCALE, ScaleSpec(factor), ARCH)
    (warning,) = caplog.messages
    assert size in warning
    assert "The default of 5 GiB is in force" in warning
    assert cache.stats().memory_only == 0
    assert len(Store(root).digests()) == 2


def test_what_is_no_prebuilt_directory_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "good" / "v1").mkdir(parents=True)
    (tmp_path / "file").touch()
    names = ["mistyped", "empty", "good", "file"]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUTE_ATTN_PREBUILT", ":".join(f"~/{name}" for name in names))
    for _ in range(2):
        assert settings.prebuilt_directories() == [tmp_path / name for name in names]
    assert [str(tmp_path / name) in caplog.text for name in names] == [True, True, False, True]
    assert len(caplog.messages) == 3
    assert all(message.startswith("CUTE_ATTN_PREBUILT: ") for message in caplog.messages)


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", "~/kernels")
    assert settings.cache_directory() == tmp_path / "kernels"


# -- leftovers


def test_leftovers_of_the_dead_are_swept_whatever_their_age(root: Path) -> None:
    store = Store(root)
    with store.staging() as path:
        staging = path.resolve().parent
    for name, moment in (("dead", 0.0), ("from-the-future", time.time() + 1e8)):
        (staging / name).mkdir()
        (staging / name / "half").write_bytes(b"half a file")
        (staging / f"{name}.lock").touch()
        os.utime(staging / name, (moment, moment))
    (staging / "without-a-lock").mkdir()
    (staging / "lock-only.lock").touch()
    with store.staging() as through_descriptor:
        alive = through_descriptor.resolve()
        os.utime(alive, (0.0, 0.0))
        assert store.sweep() == 4
        assert sorted(item.name for item in staging.iterdir()) == [
            alive.name,
            f"{alive.name}.lock",
        ]
    assert list(staging.iterdir()) == []


# -- locks


def test_a_lock_excludes_others_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with try_lock_file(path) as first, try_lock_file(path) as second:
        assert first is LockState.TAKEN
        assert second is LockState.HELD_ELSEWHERE
    with try_lock_file(path) as third:
        assert third is LockState.TAKEN


def test_the_lock_of_a_file_deleted_meanwhile_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    real = fcntl.flock

    def delete_first(fd: int, operation: int) -> None:
        path.unlink()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    with try_lock_file(path) as state:
        assert state is LockState.HELD_ELSEWHERE


@pytest.mark.parametrize("code", [errno.EWOULDBLOCK, errno.EACCES])
def test_a_lock_that_can_never_be_taken_is_done_without(
    root: Path, monkeypatch: pytest.MonkeyPatch, in_time: None, instant_compiler: None, code: int
) -> None:
    def fail(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)
    cache.get(SCALE, ScaleSpec(), ARCH)
    assert cache.stats().compiles == 1
    assert Store(root).digests()
    assert list((root / "v1" / "staging").iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_locks_do_not_work_kernels_are_compiled_and_stored_all_the_same(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def unsupported(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with (root.parent / "file").open("w") as file:
        assert try_lock(file.fileno()) is LockState.UNSUPPORTED
    cache.get(SCALE, ScaleSpec(), ARCH)
    cache.clear_memory()
    cache.get(SCALE, ScaleSpec(), ARCH)
    assert cache.stats().compiles == cache.stats().disk_hits == 1
    staging = root / "v1" / "staging"
    (staging / "young").mkdir()
    (staging / "old").mkdir()
    os.utime(staging / "old", (0.0, 0.0))
    Store(root).sweep()
    assert [item.name for item in staging.iterdir() if item.is_dir()] == ["young"]
    shutil.rmtree(staging)
