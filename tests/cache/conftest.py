"""Fixtures of the cache's tests: a separate directory, entries to damage, processes to kill."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))  # the toy kernels, importable by name in every process

from cache_processes import Process, start  # noqa: E402
from toy_specs import SCALE, ScaleSpec  # noqa: E402

from cute_attn import cache  # noqa: E402
from cute_attn.cache import arch, compiler, log  # noqa: E402
from cute_attn.cache.entry import Built  # noqa: E402
from cute_attn.cache.key import KeyDescription  # noqa: E402
from cute_attn.cache.store import Store  # noqa: E402

ARCH = "sm_90a"


def forget_everything() -> None:
    """Reset the cache's state in this process to that of a new process."""
    cache.clear_memory()
    cache.unfreeze()
    cache.reset_stats()
    log.forget_reports()
    arch.forget()


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    """Every test starts, and leaves the process, as if no kernel had been loaded."""
    forget_everything()
    yield
    forget_everything()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache directory, set in the environment."""
    path = tmp_path / "cache"
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(path))
    return path


@pytest.fixture(scope="session")
def compiled_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory that holds the kernel ``SCALE`` for ``ScaleSpec()`` and ``ARCH``."""
    path = tmp_path_factory.mktemp("compiled") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTE_ATTN_CACHE_DIR", str(path))
        cache.compile(SCALE, ScaleSpec(), ARCH)
    return path


@pytest.fixture
def filled_root(root: Path, compiled_root: Path) -> Path:
    """A user cache directory, set in the environment, with a copy of the compiled entry."""
    shutil.copytree(compiled_root, root)
    return root


@pytest.fixture
def entry_path(filled_root: Path) -> Path:
    """The one entry of ``filled_root``."""
    store = Store(filled_root)
    (digest,) = store.digests()
    return store.entry_path(digest)


@pytest.fixture
def instant_compiler(compiled_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every compilation return at once the kernel that was compiled first."""
    store = Store(compiled_root)
    (digest,) = store.digests()
    entry = store.open(digest)
    assert entry is not None
    files, uses = {name: entry.read(name) for name in entry.meta["files"]}, entry.kernels
    entry.close()

    def compile_kernel(kernel: object, spec: object, key: KeyDescription, _: object) -> Built:
        return Built(key, files, uses, 0.5)

    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)


@pytest.fixture
def without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New processes, of which those that warm up are some, find no torch: see `cache_processes`."""
    folder = tmp_path / "without_torch"
    folder.mkdir()
    (folder / "torch.py").write_text("raise ImportError('not in this test')\n")
    monkeypatch.syspath_prepend(str(folder))  # here torch is imported already
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


@pytest.fixture
def in_time() -> Iterator[None]:
    """Interrupt a test that hangs."""

    def interrupt(*_: object) -> None:
        pytest.fail("it hangs")  # no OSError, which might be taken for one of the file's

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 20, 5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def fill(root: Path, number: int, size: int = 8192) -> list[Path]:
    """Directories in the place of entries, all of one size, used one second after another."""
    now = time.time()
    paths = []
    for i in range(number):
        digest = hashlib.sha256(str(i).encode()).hexdigest()
        path = root / "v1" / digest[:2] / digest
        path.mkdir(mode=0o700, parents=True)
        (path / "kernel.o").write_bytes(b"o" * size)
        (path / "meta.json").write_bytes(b"{}")
        os.utime(path, (now - number + i,) * 2)
        paths.append(path)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    return paths


def space(path: Path) -> int:
    """The bytes allocated to a file, or to a directory and what is in it."""
    return sum(512 * item.lstat().st_blocks for item in [path, *path.rglob("*")])


@pytest.fixture
def run(root: Path) -> Iterator[Callable[..., Process]]:
    """Start a Python process that uses ``root``; killed at the end of the test if it still runs."""
    started: list[Process] = []

    def start_and_keep(
        program: str, *, cwd: Path | None = None, **environment: str | None
    ) -> Process:
        process = start(program, {"CUTE_ATTN_CACHE_DIR": str(root), **environment}, cwd=cwd)
        started.append(process)
        return process

    yield start_and_keep
    for process in started:
        process.kill()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 64 KiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=64k,mode=700 tmpfs {mount}") != 0:
        pytest.skip("cannot mount a tmpfs here")
    yield mount
    os.system(f"umount -l {mount}")


def publish_copies(root: Path, factors: Iterable[float], arch: str = ARCH) -> None:
    """Publish the one entry of ``root`` again, for ``ScaleSpec(factor)`` of each factor."""
    store = Store(root)
    (digest,) = store.digests()
    entry = store.open(digest)
    assert entry is not None
    files = {name: entry.read(name) for name in entry.meta["files"]}
    for factor in factors:
        key = cache.describe(SCALE, ScaleSpec(factor), arch)
        store.publish(Built(key, files, entry.kernels, 0.0))
    entry.close()
