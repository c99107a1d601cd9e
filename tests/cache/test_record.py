"""What a process uses is recorded in a spec file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cache_processes import Process, python_path
from conftest import ARCH, publish_copies
from toy_specs import SCALE, SUM, ScaleSpec, SumSpec

from cute_attn import cache
from cute_attn.cache import memory, recording, specfile
from cute_attn.cache.__main__ import main
from cute_attn.cache.recording import add
from cute_attn.ops.lightning import plan_decode

Caplog = pytest.LogCaptureFixture


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
    path, listed = tmp_path / "used.toml", memory.used

    def used() -> list[Any]:
        found = listed()
        cache.get(SUM, SumSpec(3), ARCH)
        return found

    monkeypatch.setattr(memory, "used", used)
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


# -- tables of another version

ANOTHER = """
[[kernel]]
name = "scale"
target = "toy_kernels:Scale"
spec = "toy_specs:ScaleSpec"
arch = "sm_90a"
recorded_by = "toys 0.9"
[kernel.fields]
factor = 4.0
vector = 8

[[kernel]]
name = "scale"
target = "toy_kernels:Scale"
spec = "toy_specs:NoSuchSpec"
arch = "sm_90a"
[kernel.fields]

[[kernel]]
name = "sum"
target = "toy_kernels:Sum"
spec = "toy_specs:NeedsMoreSpec"
arch = "sm_90a"
recorded_by = "toys 0.9"
[kernel.fields]
terms = 3
"""


def test_tables_of_another_version_are_named_and_the_rest_is_loaded(
    filled_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "used.toml"
    add(path, [(SCALE, ScaleSpec(2.0), ARCH)])
    with path.open("a") as file:
        file.write(ANOTHER)
    add(path, [(SUM, SumSpec(3), ARCH)])
    complaints = [
        "the kernel scale for sm_90a is not one of this version (TypeError: ScaleSpec has no field "
        "vector): it was recorded by toys 0.9. Delete its table and record it again",
        "NoSuchSpec'): it was recorded by another version. Delete its table and record it again",
        "(TypeError: NeedsMoreSpec also has the field others, width): it was recorded by toys 0.9",
    ]

    with pytest.raises(cache.CompileError) as error:
        cache.warmup(path, arch=ARCH, jobs=1, progress=False)
    assert str(error.value).startswith(f"3 of 5 kernels failed:\n- {path}: {complaints[0]}\n- ")
    assert all(complaint in str(error.value) for complaint in complaints)
    report = error.value.report  # type: ignore[attr-defined]
    assert (report.kernels, report.found, len(report.compiled)) == (2, 1, 1)
    assert len(report.refusals) == 3
    cache.freeze()
    cache.get(SCALE, ScaleSpec(2.0), ARCH)
    cache.get(SUM, SumSpec(3), ARCH)

    cache.unfreeze()
    out = tmp_path / "image"
    assert main(["build", str(path), "--arch", ARCH, "--out", str(out), "-j", "1"]) == 1
    captured = capsys.readouterr()
    assert "2 of 2 kernels" in captured.out
    assert all(complaint in captured.err for complaint in complaints)
    with pytest.raises(cache.CacheError) as error:
        cache.plan_file(path, ARCH)
    assert all(complaint in str(error.value) for complaint in complaints)


def test_a_table_says_by_what_it_was_recorded_and_is_not_recorded_again_by_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "used.toml"
    for version in ("toys 0.9", "toys 1.0"):
        monkeypatch.setattr(specfile, "installed_version", lambda _, v=version: v)
        add(path, [(SCALE, ScaleSpec(2.0), ARCH)])
    assert path.read_text().count("[[kernel]]") == 1
    assert 'recorded_by = "toys 0.9"' in path.read_text()
    assert cache.plan_file(path, ARCH) == [(SCALE, ScaleSpec(2.0))]


def test_the_version_is_that_of_the_package(tmp_path: Path) -> None:
    arch = "sm_90a"
    ((kernel, spec), *_) = plan_decode(arch, dtype="bfloat16", head_dim_k=128, head_dim_v=128)
    add(tmp_path / "used.toml", [(kernel, spec, arch)])
    recorded = f'recorded_by = "cute_attn {metadata.version("cute-attn")}"'
    assert recorded in (tmp_path / "used.toml").read_text()


# -- files that cannot be recorded in for a while, or for ever


@contextlib.contextmanager
def locked_by_another(path: Path) -> Iterator[None]:
    """Hold the lock of a file, as another process would: locks belong to open files."""
    with path.open("ab") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        yield


def test_a_file_that_another_process_holds_delays_no_call_and_gets_all_kernels_later(
    filled_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Caplog
) -> None:
    path = tmp_path / "used.toml"
    monkeypatch.setenv("CUTE_ATTN_RECORD", str(path))
    waits: list[float] = []
    monkeypatch.setattr(recording, "time", a_clock(waits))
    publish_copies(filled_root, [3.0, 4.0, 5.0])
    with locked_by_another(path):
        for factor in (2.0, 3.0, 4.0):
            cache.get(SCALE, ScaleSpec(factor), ARCH)
        assert 1 <= sum(waits) <= 3  # the first has waited, the others have not
        (warning,) = caplog.messages
        assert f"cannot record kernels in {path}: another process has locked the file" in warning
        assert "Until that is mended nothing is recorded there" in warning
        with pytest.raises(cache.CacheError, match="another process has locked the file"):
            cache.record(path)
        assert path.read_text() == ""
    cache.get(SCALE, ScaleSpec(5.0), ARCH)
    assert cache.plan_file(path, ARCH) == [(SCALE, ScaleSpec(n)) for n in (2.0, 3.0, 4.0, 5.0)]


def a_clock(waits: list[float]) -> Any:
    """The module `time`, in which sleeping takes no time and is noted in `waits`."""

    def sleep(seconds: float) -> None:
        waits.append(seconds)

    return SimpleNamespace(sleep=sleep, monotonic=lambda: sum(waits))


@pytest.mark.parametrize("mended", [True, False])
def test_what_could_not_be_recorded_is_recorded_at_the_end_of_the_process(
    run: Callable[..., Process], filled_root: Path, tmp_path: Path, mended: bool
) -> None:
    path = tmp_path / "used.toml"
    path.write_text("damaged")
    process = run(
        "cache.get(SCALE, ScaleSpec(2.0), 'sm_90a')\ntell()\nsys.stdin.readline()\ntell()",
        CUTE_ATTN_RECORD=str(path),
    )
    process.hear()
    if mended:
        path.write_text("")
    process.tell("end")
    errors = process.result()["stderr"]
    assert f"{path}: Expected" in errors
    assert "Until that is mended nothing is recorded there" in errors
    assert ("1 kernels are not recorded" in errors) == (not mended)
    if mended:
        assert cache.plan_file(path, ARCH) == [(SCALE, ScaleSpec(2.0))]


def test_a_child_forked_while_a_thread_records_does_not_hold_the_lock(
    run: Callable[..., Process], filled_root: Path, tmp_path: Path
) -> None:
    path = tmp_path / "used.toml"
    parent = run(
        """
import signal, threading
from cute_attn.cache import recording
append, reached, go_on = recording._append, threading.Event(), threading.Event()
def stopping(*args):
    reached.set()
    go_on.wait()
    append(*args)
recording._append = stopping
thread = threading.Thread(target=cache.get, args=(SCALE, ScaleSpec(), "sm_90a"))
thread.start()
reached.wait()
answer, question = os.pipe()
child = os.fork()
if child == 0:
    os.close(question)
    signal.alarm(60)
    for fd in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
    recording._append = append
    os.read(answer, 1)
    cache.get(SCALE, ScaleSpec(3.0), "sm_90a")
    os._exit(0)
tell(child=child)
go_on.set()
thread.join()
tell(recorded=True)
sys.stdin.readline()
os.write(question, b".")
tell(status=os.waitpid(child, 0)[1])
""",
        CUTE_ATTN_RECORD=str(path),
    )
    parent.hear()
    parent.hear()
    publish_copies(filled_root, [3.0])
    with path.open("rb") as file:  # the child, which has not gone on, holds nothing
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    parent.tell("go")
    assert parent.hear() == {"status": 0}
    assert cache.plan_file(path, ARCH) == [(SCALE, ScaleSpec(2.0)), (SCALE, ScaleSpec(3.0))]


@pytest.mark.parametrize("device", ["/dev/full", "/dev/zero", "a fifo"])
def test_a_device_or_a_pipe_is_no_file_to_record_in(
    filled_root: Path, tmp_path: Path, in_time: None, device: str
) -> None:
    path = Path(device)
    if device == "a fifo":
        path = tmp_path / "fifo"
        os.mkfifo(path)
    with pytest.raises(cache.CacheError, match=f"in {path}: it is no regular file"):
        cache.record(path)


@pytest.mark.parametrize("device", ["/dev/full", "/dev/zero"])
def test_a_device_is_no_spec_file(device: str, in_time: None) -> None:
    with pytest.raises(cache.CacheError, match=f"{device} is longer than .* it is no spec file"):
        cache.plan_file(device, ARCH)


def test_relative_paths_in_the_environment_are_those_of_the_start(
    run: Callable[..., Process], filled_root: Path, tmp_path: Path
) -> None:
    """A program may change its directory: the paths stay where they were, also for workers."""
    start, later = tmp_path / "start", tmp_path / "later"
    later.mkdir()
    shutil.copytree(filled_root, start / "prebuilt")
    process = run(
        f"""
from cute_attn.cache import settings
os.chdir({str(later)!r})
cache.get(SCALE, ScaleSpec(), "sm_90a")
children, directory = settings.for_children(), str(settings.cache_directory())
os.environ["CUTE_ATTN_RUNTIME_LIBRARY"] = "library.so"
library = str(settings.named_runtime_library())
tell(children=children, directory=directory, library=library, **cache.stats()._asdict())
cache.record("named.toml")
tell()
""",
        cwd=start,
        CUTE_ATTN_RECORD="used.toml",
        CUTE_ATTN_PREBUILT="prebuilt",
        CUTE_ATTN_CACHE_DIR="cache",
    )
    told = process.hear()
    process.hear()
    assert told["prebuilt_hits"] == 1
    assert told["directory"] == told["children"]["CUTE_ATTN_CACHE_DIR"] == str(start / "cache")
    assert told["library"] == str(start / "library.so")
    assert told["children"]["CUTE_ATTN_RECORD"] == str(start / "used.toml")
    assert told["children"]["CUTE_ATTN_PREBUILT"] == str(start / "prebuilt")
    assert cache.plan_file(start / "used.toml", ARCH) == [(SCALE, ScaleSpec(2.0))]
    # What a call names is meant from where the process is now.
    assert [path.name for path in later.iterdir()] == ["named.toml"]


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
