"""Damaged, foreign and unsafe entries: found before anything of them is loaded."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ARCH
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_specs import SCALE, ScaleSpec

from cute_attn import cache
from cute_attn.cache.entry import META
from cute_attn.cache.errors import DamagedEntry, RefusedEntry
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
    """Be an ordinary user for a while."""
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
