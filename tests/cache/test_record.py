"""What a process uses is recorded in a spec file."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cache_processes import python_path
from conftest import ARCH
from toy_specs import SCALE, SUM, ScaleSpec, SumSpec

from cute_attn import cache
from cute_attn.cache import jit
from cute_attn.cache.recording import add


def test_what_a_process_uses_is_a_spec_file_that_builds_it(
    filled_root: Path, tmp_path: Path
) -> None:
    path = tmp_path / "used.toml"
    path.write_text('[[operator]]\nplan = "toy_specs:plan_scale"\nfactors = [9.0]\n')
    cache.get(SCALE, ScaleSpec(2.0), ARCH)
    cache.record(path)
    cache.get(SUM, SumSpec(3), ARCH)
    cache.get(SCALE, ScaleSpec(2.0), ARCH)
    cache.record(None)
    cache.get(SCALE, ScaleSpec(5.0), ARCH)
    requests = [(SCALE, ScaleSpec(9.0)), (SCALE, ScaleSpec(2.0)), (SUM, SumSpec(3))]
    assert cache.plan_file(path, ARCH) == requests
    assert cache.plan_file(path, "sm_80") == requests[:1]
    assert cache.warmup(cache.plan_file(path, ARCH)[1:], arch=ARCH, progress=False).found == 2


def test_a_kernel_that_is_loaded_meanwhile_is_recorded(
    filled_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another thread may do it: after what is in memory has been listed."""
    path, listed = tmp_path / "used.toml", jit.used

    def used() -> list[Any]:
        found = listed()
        cache.get(SUM, SumSpec(3), ARCH)
        return found

    monkeypatch.setattr(jit, "used", used)
    cache.record(path)
    cache.record(None)
    assert cache.plan_file(path, ARCH) == [(SUM, SumSpec(3))]


def test_a_refused_file_leaves_the_one_before(filled_root: Path, tmp_path: Path) -> None:
    path = tmp_path / "used.toml"
    cache.record(path)
    with pytest.raises(cache.CacheError, match="cannot record kernels in"):
        cache.record(tmp_path)
    cache.get(SCALE, ScaleSpec(2.0), ARCH)
    cache.record(None)
    assert cache.plan_file(path, ARCH) == [(SCALE, ScaleSpec(2.0))]


def test_several_processes_record_in_one_file(
    filled_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "used.toml"
    code = (
        "from cute_attn import cache; from toy_specs import SCALE, ScaleSpec\n"
        f"cache.get(SCALE, ScaleSpec(2.0), {ARCH!r})"
    )
    monkeypatch.setenv("CUTE_ATTN_RECORD", str(path))
    monkeypatch.setenv("PYTHONPATH", python_path())
    ranks = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert cache.plan_file(path, ARCH) == [(SCALE, ScaleSpec(2.0))]
    assert path.read_text().count("[[kernel]]") == 1


def test_a_process_that_the_environment_has_record_can_record_elsewhere(
    filled_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from cute_attn import cache; from toy_specs import SCALE, ScaleSpec\n"
        f"cache.get(SCALE, ScaleSpec(2.0), {ARCH!r}); cache.record({str(tmp_path / 'b.toml')!r})"
    )
    monkeypatch.setenv("CUTE_ATTN_RECORD", str(tmp_path / "a.toml"))
    monkeypatch.setenv("PYTHONPATH", python_path())
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in ("a.toml", "b.toml"):
        assert cache.plan_file(tmp_path / name, ARCH) == [(SCALE, ScaleSpec(2.0))]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[kernel]]\nname = 'x'\ntarget = 'toy_kernels:Scale'", "kernel 1 has no spec"),
        ("[[kernel]]\nname = 'x'\ntarget = 'a:b'\nspec = 'os:system'\narch = 'sm_90a'", "no datac"),
        ("[[kernel]]\nname = 'x'\ntarget = 'a:b'\nspec = 'c:d'\narch = 'h100'", "arch of kernel 1"),
        ("kernel = 1", "kernel is 1"),
        ("[[kernels]]\nname = 'x'", r"kernels: there are only \[\[operator\]\]"),
        (
            "[[kernel]]\nname = 'scale'\ntarget = 'toy_kernels:Scale'\n"
            f"spec = 'toy_specs:ScaleSpec'\narch = '{ARCH}'\n[kernel.fields]\nno_such = 1",
            "ScaleSpec has no field no_such",
        ),
    ],
)
def test_tables_of_kernels_that_make_no_sense(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(text)
    with pytest.raises(cache.CacheError, match=problem):
        cache.plan_file(path, ARCH)


def test_a_spec_file_calls_nothing_but_kernels(root: Path) -> None:
    with pytest.raises(cache.CompileError, match="subprocess:run is no kernel"):
        cache.compile(cache.KernelDef("x", "subprocess:run"), ScaleSpec(), ARCH)


def test_a_file_that_cannot_be_written(
    filled_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(cache.CacheError, match="cannot record kernels in"):
        cache.record(tmp_path)
    path = tmp_path / "other.toml"
    path.write_text("not toml")
    with pytest.raises(cache.CacheError, match=r"other\.toml"):
        cache.record(path)
    assert path.read_text() == "not toml"
    path.write_text("kernel = []")  # to which TOML cannot add a table
    cache.get(SCALE, ScaleSpec(2.0), ARCH)
    with pytest.raises(cache.CacheError, match=r"other\.toml"):
        cache.record(path)
    assert path.read_text() == "kernel = []"
    with pytest.raises(TypeError, match="path is 3, must be a str, a path or None"):
        cache.record(3)  # type: ignore[arg-type]
    monkeypatch.setenv("CUTE_ATTN_RECORD", str(tmp_path))  # a server goes on, after a warning
    assert cache.get(SCALE, ScaleSpec(2.0), ARCH) is not None


def test_a_full_disk_leaves_no_half_of_a_table(small_disk: Path) -> None:
    path = small_disk / "used.toml"
    add(path, [(SCALE, ScaleSpec(1.0), ARCH)])
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    kernels = [(SCALE, ScaleSpec(float(i)), ARCH) for i in range(2, 100)]
    with pytest.raises(cache.CacheError, match=os.strerror(errno.ENOSPC)):
        add(path, kernels)
    assert cache.plan_file(path, ARCH) == [(SCALE, ScaleSpec(1.0))]
    filler.unlink()
    add(path, kernels)
    assert len(cache.plan_file(path, ARCH)) == 99
