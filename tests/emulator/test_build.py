"""The cache of built engines."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cute_attn.cache import settings
from cute_attn.cache.store import Store
from cute_attn.emulator import Emulator, EmulatorUnavailable, build, library, machine

DAY = 24 * 60 * 60


def a_build(root: Path, number: int, days: float, *files: str) -> Path:
    """A directory like those of builds, last used some days ago."""
    directory = root / f"{number:032x}"
    directory.mkdir()
    for name in files:
        (directory / name).touch()
    when = time.time() - days * DAY
    os.utime(directory, (when, when))
    return directory


def test_old_engines_go_with_their_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_root", lambda: tmp_path)
    engines = [a_build(tmp_path, i, 2 * i, "engine.so") for i in range(6)]
    newest_dropped = 2 * build._KEPT - 1  # an object of the last engine that stays is as new
    kept = a_build(tmp_path, 10, newest_dropped - 1.5, "copy.o")
    dropped = a_build(tmp_path, 11, newest_dropped, "copy.o")
    others = [tmp_path / "lock", tmp_path / "notes"]
    others[0].touch()
    others[1].mkdir()
    os.utime(others[1], (0, 0))

    build._evict(engines[0] / "engine.so")

    assert [path.exists() for path in engines] == [i < build._KEPT for i in range(6)]
    assert kept.exists()
    assert not dropped.exists()
    assert all(path.exists() for path in others)


@pytest.mark.parametrize(
    "days",
    [
        [0.9 - 0.1 * i for i in range(8)],  # many, all of them used within a day
        [10.0 * i for i in range(build._KEPT)],  # old, but few
    ],
)
def test_what_may_be_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: list[float]
) -> None:
    monkeypatch.setattr(build, "_root", lambda: tmp_path)
    engines = [a_build(tmp_path, i, d, "engine.so") for i, d in enumerate(days)]
    build._evict(engines[0] / "engine.so")
    assert all(path.exists() for path in engines)


@pytest.fixture
def chosen_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of builds is that of the environment, as in a new process."""
    monkeypatch.setattr(build, "directory", None)
    monkeypatch.setattr(build, "_chosen_root", {})


@pytest.mark.usefixtures("chosen_anew")
def test_the_kernel_cache_takes_the_directory_that_a_build_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the umask of most Linux desktops, under which a new directory is the group's too."""
    cache = tmp_path / "above" / "cache"
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(cache))
    umask = os.umask(0o002)
    try:
        assert build._root() == cache / "emulator"
        with Store(cache).staging() as staging:
            assert staging.is_dir()
    finally:
        os.umask(umask)


@pytest.mark.usefixtures("chosen_anew")
def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", "~/cache")
    assert build._root() == tmp_path / "cache" / "emulator"
    assert settings.cache_directory() == tmp_path / "cache"


def test_an_engine_that_is_loaded_counts_as_used() -> None:
    library = build.engine_library()
    os.utime(library.parent, (0, 0))
    assert build.engine_library() == library
    assert time.time() - library.parent.stat().st_mtime < DAY


def test_a_long_build_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sources = tmp_path / "engine"
    sources.mkdir()
    (sources / "one.c").write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr(build, "ENGINE", sources)
    monkeypatch.setattr(build, "_root", lambda: tmp_path)
    build.engine_library()
    (record,) = caplog.records
    assert record.levelname == "WARNING"  # shown on stderr where nobody has set up logging
    assert "emulator's engine (1 C files" in record.getMessage()
    caplog.clear()
    build.engine_library()
    assert not caplog.records


def test_without_pyelftools_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "elftools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "elftools", None)
    monkeypatch.setattr(build, "engine_library", lambda: pytest.fail("it builds"))
    monkeypatch.setattr(machine, "engine", library.engine.__wrapped__)
    with pytest.raises(EmulatorUnavailable, match=r"pip install 'pyelftools>="):
        Emulator()


def test_the_engine_compiles_without_warnings() -> None:
    found = build.compiler()
    if "Free Software Foundation" not in found.identity:
        pytest.skip("the warnings are those of gcc")
    sources = [*build.ENGINE.glob("*.c"), build.ENGINE.parent / "runtime" / "cuda.c"]
    flags = ("-Wall", "-Wextra", "-fsyntax-only")
    done = build._run([*found.command, *found.flags, *flags, *map(str, sources)])
    assert (done.returncode, done.stderr) == (0, "")


def test_a_library_loads_from_where_nothing_may_be_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a file system mounted noexec, whose files the dynamic loader refuses."""
    source = tmp_path / "numbers.c"
    source.write_text("int one(void) { return 1; }\n")
    made = build.link(tmp_path / "numbers.so", [source])
    load = ctypes.CDLL

    def refusing(path: str, **options: int) -> ctypes.CDLL:
        if Path(path).is_relative_to(tmp_path):
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path, **options)

    monkeypatch.setattr(ctypes, "CDLL", refusing)
    with pytest.raises(OSError, match="failed to map"):  # for another reason
        build.load(made)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert [build.load(made).one() for _ in range(2)] == [1, 1]
