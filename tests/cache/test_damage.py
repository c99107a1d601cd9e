"""Damaged, foreign and unsafe entries are found before any part of them is loaded."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_processes import Process
from conftest import ARCH
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_specs import SCALE, ScaleSpec

from cute_attn import cache
from cute_attn.cache import entry as entry_module
from cute_attn.cache import store as store_module
from cute_attn.cache.__main__ import main
from cute_attn.cache.entry import META
from cute_attn.cache.errors import DamagedEntry, RefusedEntry
from cute_attn.cache.ownership import Directory
from cute_attn.cache.store import Store

FILES = ["kernel.so", "kernel.o", "kernel.ptx", META]


def verify(entry_path: Path) -> None:
    """What ``python -m cute_attn.cache verify`` does with one entry."""
    entry = Store(entry_path.parents[2]).open(entry_path.name)
    assert entry is not None
    try:
        entry.verify()
    finally:
        entry.close()


def flip_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position // 8] ^= 1 << position % 8
    path.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_found(entry_path: Path, name: str, data: st.DataObject) -> None:
    path = entry_path / name
    intact = path.read_bytes()
    position = data.draw(st.integers(0, 8 * len(intact) - 1))
    flip_bit(path, position)
    try:
        with pytest.raises(DamagedEntry, match=str(entry_path)):
            verify(entry_path)
    finally:
        path.write_bytes(intact)
    verify(entry_path)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_any_truncation_is_found(entry_path: Path, name: str, share: float) -> None:
    path = entry_path / name
    intact = path.read_bytes()
    path.write_bytes(intact[: int(share * len(intact))])
    try:
        with pytest.raises(DamagedEntry):
            verify(entry_path)
    finally:
        path.write_bytes(intact)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(entry_path: Path, name: str) -> None:
    (entry_path / name).unlink()
    with pytest.raises(DamagedEntry):
        verify(entry_path)


def flip_middle(path: Path) -> None:
    flip_bit(path, 4 * path.stat().st_size)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def swap_in_foreign_file(path: Path) -> None:
    shutil.copy("/bin/true", path)


@pytest.mark.parametrize("name", ["kernel.so", META])
@pytest.mark.parametrize("damage", [flip_middle, truncate, swap_in_foreign_file, Path.unlink])
def test_damage_is_reported_once_quarantined_and_compiled_anew(
    entry_path: Path,
    filled_root: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: Callable[[Path], None],
) -> None:
    damage(entry_path / name)
    function = cache.get(SCALE, ScaleSpec(), ARCH)
    assert callable(function)
    assert cache.stats().quarantined == cache.stats().compiles == 1
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert str(entry_path) in warnings[0].getMessage()
    (moved,) = (filled_root / "v1" / "quarantine").iterdir()
    assert moved.name.startswith(entry_path.name)

    caplog.clear()
    cache.clear_memory()
    cache.get(SCALE, ScaleSpec(), ARCH)
    assert cache.stats().disk_hits == 1
    assert cache.stats().compiles == 1
    assert not caplog.records


def test_an_entry_copied_to_another_key_is_found(filled_root: Path, entry_path: Path) -> None:
    key = cache.describe(SCALE, ScaleSpec(9.0), ARCH)
    foreign = Store(filled_root).entry_path(key.digest)
    shutil.copytree(entry_path, foreign)
    with pytest.raises(DamagedEntry, match=f"belongs at {entry_path.name}"):
        Store(filled_root).open(key.digest)
    cache.get(SCALE, ScaleSpec(9.0), ARCH)
    assert cache.stats().quarantined == 1


def test_an_entry_of_an_unknown_schema_is_not_used(entry_path: Path) -> None:
    meta = json.loads((entry_path / META).read_text())
    meta["schema"] = 999
    (entry_path / META).write_text(json.dumps(meta))
    with pytest.raises(DamagedEntry):
        verify(entry_path)


def test_damage_in_a_prebuilt_directory_is_reported_and_passed_over(
    root: Path,
    compiled_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prebuilt = tmp_path / "prebuilt"
    shutil.copytree(compiled_root, prebuilt)
    (library,) = prebuilt.glob("v1/??/*/kernel.so")
    flip_middle(library)
    monkeypatch.setenv("CUTE_ATTN_PREBUILT", str(prebuilt))
    for _ in range(2):
        cache.clear_memory()
        cache.get(SCALE, ScaleSpec(), ARCH)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert str(library) in caplog.text
    assert library.exists()
    assert (
        cache.stats().compiles == 1
    )  # into the user's directory, where the second look-up finds it
    assert cache.stats().disk_hits == 1
    assert cache.stats().prebuilt_hits == 0


# -- what somebody else may have written


def chmod_writable(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


def chown_to_nobody(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize("spoil", [chmod_writable, chown_to_nobody])
@pytest.mark.parametrize(
    "what", ["", "v1", "v1/??", "v1/??/*", "v1/??/*/kernel.so", f"v1/??/*/{META}"]
)
def test_what_others_can_write_to_is_refused_with_path_owner_and_mode(
    filled_root: Path, entry_path: Path, what: str, spoil: Callable[[Path], None]
) -> None:
    (spoiled,) = filled_root.glob(what) if what else (filled_root,)
    spoil(spoiled)
    status = spoiled.stat()
    with pytest.raises(RefusedEntry) as refusal:
        verify(entry_path)
    message = str(refusal.value)
    assert str(spoiled) in message
    assert f"owner uid {status.st_uid}, mode {status.st_mode & 0o7777:04o}" in message


@pytest.mark.parametrize("name", ["kernel.so", META])
def test_a_link_in_place_of_a_file_is_refused(entry_path: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "elsewhere"
    (entry_path / name).rename(target)
    (entry_path / name).symlink_to(target)
    with pytest.raises(RefusedEntry, match="symbolic link"):
        verify(entry_path)
    cache.get(SCALE, ScaleSpec(), ARCH)
    assert cache.stats().compiles == 1


def test_an_unsafe_root_is_not_used_and_the_kernel_runs_from_memory(
    filled_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled_root.chmod(0o777)
    before = sorted(filled_root.rglob("*"))
    for factor in (2.0, 3.0):
        assert callable(cache.get(SCALE, ScaleSpec(factor), ARCH))
    assert cache.stats().memory_only == 2
    assert sorted(filled_root.rglob("*")) == before
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert (
        f"{filled_root} can be written by others (owner uid {os.geteuid()}, mode 0777)"
        in warnings[0]
    )


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Run as an ordinary user within the block."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public_copy(compiled_root: Path) -> Iterator[Path]:
    """The compiled entry in a directory of root that every user can read."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        copy = Path(directory) / "prebuilt"
        shutil.copytree(compiled_root, copy)
        for path in [copy, *copy.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield copy


def test_a_prebuilt_directory_may_belong_to_root(public_copy: Path) -> None:
    (digest,) = Store(public_copy).digests()
    with as_nobody():
        entry = Store(public_copy, read_only=True).open(digest)
        assert entry is not None
        entry.verify()
        entry.close()
        with pytest.raises(RefusedEntry, match="belongs to uid 0, not to 65534"):
            Store(public_copy).open(digest)
    public_copy.chmod(0o775)
    with as_nobody(), pytest.raises(RefusedEntry, match="mode 0775"):
        Store(public_copy, read_only=True).open(digest)


def test_a_prebuilt_directory_of_another_user_is_refused(public_copy: Path) -> None:
    (digest,) = Store(public_copy).digests()
    chown_to_nobody(public_copy)
    with pytest.raises(RefusedEntry, match="belongs to uid 65534, not to 0"):
        Store(public_copy, read_only=True).open(digest)


# -- what takes the place of a file or directory, and is healed


def with_fifo(name: str) -> Callable[[Path], None]:
    def spoil(entry: Path) -> None:
        (entry / name).unlink(missing_ok=True)
        os.mkfifo(entry / name, 0o600)

    return spoil


def with_meta(text: str) -> Callable[[Path], None]:
    return lambda entry: (entry / META).write_text(text) and None


def sparse(name: str) -> Callable[[Path], None]:
    return lambda entry: os.truncate(entry / name, 2**40)


def signed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A changed `meta.json` with the right checksum."""

    def spoil(entry: Path) -> None:
        meta = json.loads((entry / META).read_text())
        del meta["checksum"]
        change(meta)
        (entry / META).write_text(json.dumps({**meta, "checksum": entry_module._checksum(meta)}))

    return spoil


def huge_and_sparse(entry: Path) -> None:
    sparse("kernel.so")(entry)
    signed(lambda meta: meta["files"]["kernel.so"].update(size=2**40))(entry)


def meta_is_a_directory(entry: Path) -> None:
    (entry / META).unlink()
    (entry / META).mkdir(0o700)


def replaced(how: Callable[[Path], object], what: str) -> Callable[[Path], None]:
    """Something else in the place of the entry (``""``), or of a directory of the cache."""

    def spoil(entry: Path) -> None:
        shutil.rmtree(entry.parent if what else entry)
        path = entry.parents[1] / what.replace("shard", entry.parent.name) if what else entry
        how(path)

    return spoil


def a_file(path: Path) -> None:
    path.write_text("a file")


def a_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


SPOILED = {
    "meta.json is a fifo": with_fifo(META),
    "kernel.so is a fifo": with_fifo("kernel.so"),
    "meta.json is a directory": meta_is_a_directory,
    "meta.json is nested": with_meta("[" * 100_000 + "]" * 100_000),
    "meta.json is sparse": sparse(META),
    "kernel.so is sparse": sparse("kernel.so"),
    "kernel.so is sparse, and said to be": huge_and_sparse,
    "files is a list": signed(lambda meta: meta.update(files=[1])),
    "a size is a text": signed(lambda meta: meta["files"]["kernel.so"].update(size="1")),
    "another file": signed(lambda meta: meta["files"].update({"../x": {"size": 1, "sha256": ""}})),
    "a lone surrogate": signed(lambda meta: meta["key"].update(arch="\ud800")),
    "the entry is a file": replaced(a_file, ""),
    "the entry is a fifo": replaced(os.mkfifo, ""),
    "the entry is a dangling link": replaced(a_dangling_link, ""),
    "the shard is a file": replaced(a_file, "shard"),
    "the shard is a dangling link": replaced(a_dangling_link, "shard"),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_whatever_takes_the_place_of_an_entry_is_reported_and_healed(
    entry_path: Path,
    instant_compiler: None,
    in_time: None,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], None],
) -> None:
    spoil(entry_path)
    assert main(["ls"]) in (0, 1)
    assert main(["verify"]) == 1
    assert callable(cache.get(SCALE, ScaleSpec(), ARCH))
    assert cache.stats().quarantined == cache.stats().compiles == 1
    assert cache.stats().memory_only == 0
    (warning,) = caplog.messages
    assert str(entry_path.parent) in warning
    cache.clear_memory()
    cache.get(SCALE, ScaleSpec(), ARCH)
    assert cache.stats().disk_hits == 1
    assert main(["verify"]) == 0


@pytest.mark.parametrize("name", ["quarantine", "locks", "staging"])
@pytest.mark.parametrize("how", [a_file, a_dangling_link])
def test_a_file_in_place_of_the_caches_own_directories_is_replaced(
    entry_path: Path, instant_compiler: None, name: str, how: Callable[[Path], None]
) -> None:
    with_meta("")(entry_path)  # so that all of them are needed
    path = entry_path.parents[1] / name
    shutil.rmtree(path, ignore_errors=True)
    how(path)
    cache.get(SCALE, ScaleSpec(), ARCH)
    assert (cache.stats().quarantined, cache.stats().memory_only) == (1, 0)
    assert path.is_dir()
    assert not path.is_symlink()


def test_a_fifo_in_place_of_the_uses_does_no_harm(entry_path: Path, in_time: None) -> None:
    with_fifo("uses")(entry_path)
    cache.get(SCALE, ScaleSpec(), ARCH)
    assert cache.stats().disk_hits == 1


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_clear_leaves_nothing_of_it(
    entry_path: Path, in_time: None, spoil: Callable[[Path], None]
) -> None:
    spoil(entry_path)
    base = entry_path.parents[1]
    a_file(entry_path.parent / "junk" if entry_path.parent.is_dir() else base / "00")
    a_file(base / "quarantine")
    assert main(["clear"]) == 0
    assert [path for path in base.rglob("*") if not (path.is_dir() and len(path.name) == 2)] == []
    assert main(["verify"]) == 0


def test_clear_says_what_it_cannot_remove(
    entry_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Directory.remove

    def remove(self: Directory, name: str) -> None:
        if name == "removed":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.path / name))
        real(self, name)

    monkeypatch.setattr(Directory, "remove", remove)
    assert main(["clear"]) == 1
    assert "Input/output error" in capsys.readouterr().err


# Root may read everything, until it gives up the capability to.
WITHOUT_PRIVILEGES = """
import ctypes
ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
"""
HEAL = """
for path in {paths}:
    try:
        os.listdir(path) if os.path.isdir(path) else open(path)
    except PermissionError:
        continue
    sys.exit(f"{{path}} can be read")
cache.get(SCALE, ScaleSpec(), "sm_90a")
cache.clear_memory()
cache.get(SCALE, ScaleSpec(), "sm_90a")
tell(**cache.stats()._asdict())
"""


@pytest.mark.parametrize("what", ["", META, ".."])
def test_what_cannot_be_read_is_healed(
    run: Callable[..., Process], entry_path: Path, what: str
) -> None:
    path = Path(os.path.normpath(entry_path / what))
    path.chmod(0)
    try:
        result = run(WITHOUT_PRIVILEGES + HEAL.format(paths=[str(path)])).result()
    finally:
        if path.exists():
            path.chmod(0o700)
    assert (result["compiles"], result["quarantined"], result["disk_hits"]) == (1, 1, 1)


def test_unreadable_entries_are_cleared(run: Callable[..., Process], entry_path: Path) -> None:
    (entry_path / "nested").mkdir()
    (entry_path / "nested" / "file").touch()
    for path in (entry_path / "nested", entry_path, entry_path.parent):
        path.chmod(0)
    result = run(
        WITHOUT_PRIVILEGES
        + "from cute_attn.cache.__main__ import main\ntell(status=main(['clear']))"
    ).result()
    assert result["status"] == 0
    assert not entry_path.exists()


@pytest.fixture
def overlay(entry_path: Path, tmp_path: Path, root: Path) -> Iterator[None]:
    """The cache as the lower layer of an overlay, as in a container's image."""
    upper, work, lower = (tmp_path / name for name in ("upper", "work", "lower"))
    root.rename(lower)
    for path in (root, upper, work):
        path.mkdir(mode=0o700)
    command = f"mount -t overlay -o lowerdir={lower},upperdir={upper},workdir={work} none {root}"
    if os.geteuid() != 0 or os.system(f"{command} 2>/dev/null") != 0:
        pytest.skip("cannot mount an overlay here")
    yield
    os.system(f"umount -l {root}")


def test_damage_in_a_lower_layer_is_healed(
    overlay: None, entry_path: Path, instant_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    (entry_path / "kernel.so").write_bytes(b"damaged")
    for _ in range(2):
        cache.get(SCALE, ScaleSpec(), ARCH)
        cache.clear_memory()
    assert (cache.stats().compiles, cache.stats().disk_hits) == (1, 1)
    (warning,) = caplog.messages
    assert "deleted, since it cannot be moved" in warning


def test_entries_of_a_lower_layer_are_cleared(overlay: None, entry_path: Path) -> None:
    assert main(["clear"]) == 0
    assert not entry_path.exists()


# -- who may decide where the cache is


@pytest.fixture
def victim(filled_root: Path, tmp_path: Path) -> Path:
    """A directory of the user, with all that a cache has, which nobody is to touch."""
    path = tmp_path / "victim"
    shutil.copytree(filled_root, path)
    for name in ("staging", "quarantine", "locks"):
        (path / "v1" / name).mkdir(exist_ok=True, mode=0o700)
        (path / "v1" / name / "precious.lock").touch(0o600)
        (path / "v1" / name / "precious").touch(0o600)
    return path


def content(root: Path) -> list[Path]:
    return sorted(root.rglob("*"))


def link_all(root: Path, victim: Path) -> None:
    shutil.rmtree(root / "v1")
    (root / "v1").symlink_to(victim / "v1")


def link_own_directories(root: Path, victim: Path) -> None:
    for name in ("staging", "quarantine", "locks"):
        shutil.rmtree(root / "v1" / name, ignore_errors=True)
        (root / "v1" / name).symlink_to(victim / "v1" / name)


def link_shards(root: Path, victim: Path) -> None:
    for shard in root.glob("v1/??"):
        shutil.rmtree(shard)
        shard.symlink_to(victim / "v1" / shard.name)


@pytest.mark.parametrize("command", ["clear", "prune"])
@pytest.mark.parametrize("link", [link_all, link_own_directories, link_shards])
@pytest.mark.parametrize("foreign", [True, False])
def test_no_link_in_a_cache_leads_to_what_is_deleted(
    filled_root: Path, victim: Path, link: Callable[[Path, Path], None], command: str, foreign: bool
) -> None:
    link(filled_root, victim)
    before = content(victim)
    if foreign:
        chown_to_nobody(filled_root)
    status = main([command] if command == "clear" else [command, "--max-bytes", "0"])
    assert content(victim) == before
    assert status == 1 or not foreign


@pytest.mark.parametrize("command", [["clear"], ["prune"], ["prune", "--max-bytes", "0"]])
@pytest.mark.parametrize("spoil", [chmod_writable, chown_to_nobody])
@pytest.mark.parametrize("what", ["", "v1"])
def test_nothing_is_deleted_in_a_directory_of_others(
    entry_path: Path,
    filled_root: Path,
    capsys: pytest.CaptureFixture[str],
    what: str,
    spoil: Callable[[Path], None],
    command: list[str],
) -> None:
    before = content(filled_root)
    spoil(filled_root / what)
    assert main(command) == 1
    assert content(filled_root) == before
    assert str(filled_root / what) in capsys.readouterr().err


@pytest.mark.parametrize("above", [False, True])
def test_a_link_of_others_on_the_way_is_not_followed(
    entry_path: Path, filled_root: Path, tmp_path: Path, above: bool
) -> None:
    link = tmp_path / "link"
    link.symlink_to(filled_root.parent if above else filled_root)
    store = Store(link / filled_root.name if above else link)
    found = store.open(entry_path.name)
    assert found is not None
    found.close()
    if os.geteuid() != 0:
        pytest.skip("only root can give links away")
    os.lchown(link, 65534, 65534)
    for use in (lambda: store.open(entry_path.name), store.clear, store.sweep):
        with pytest.raises(RefusedEntry, match=f"{link} is a symbolic link of uid 65534"):
            use()


def test_links_that_lead_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        Store(tmp_path / "a").clear()


def test_a_directory_swapped_after_the_check_is_out_of_reach(
    filled_root: Path, entry_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who may write to the parent directory replaces the cache at the worst moment."""
    before = content(victim)
    real = store_module._candidates

    def swap(base: Directory, problems: list[str]) -> Any:
        filled_root.rename(filled_root.with_name("aside"))
        filled_root.symlink_to(victim)
        return real(base, problems)

    monkeypatch.setattr(store_module, "_candidates", swap)
    Store(filled_root).evict(0)
    assert content(victim) == before
    assert not filled_root.with_name("aside").joinpath("v1", *entry_path.parts[-2:]).exists()


def test_a_compilation_stays_in_the_directory_that_was_checked(
    filled_root: Path, tmp_path: Path
) -> None:
    store = Store(filled_root)
    with store.staging() as staging:
        filled_root.rename(tmp_path / "aside")
        (filled_root / "v1" / "staging" / staging.resolve().name).mkdir(parents=True)
        (staging / "kernel.o").write_bytes(b"compiled")
        assert list(filled_root.rglob("kernel.o")) == []
        assert len(list((tmp_path / "aside" / "v1" / "staging").rglob("kernel.o"))) == 1
