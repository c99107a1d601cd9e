"""Warming up runs in parallel, compiles no kernel twice, and goes on after a failure."""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_processes import Process, python_path
from conftest import ARCH
from hypothesis import given
from hypothesis import strategies as st
from toy_specs import BROKEN, SCALE, ScaleSpec

import cute_attn
from cute_attn import cache
from cute_attn.cache import specfile, warm, workers
from cute_attn.cache.key import spec_items
from cute_attn.cache.store import Store
from cute_attn.cache.warm import WarmupError
from cute_attn.cache.wire import NotPortable, decode_request, encode_request

MANY = [(SCALE, ScaleSpec(float(n))) for n in range(3)]


def test_what_is_missing_is_compiled_and_everything_is_loaded(filled_root: Path) -> None:
    requests = [*MANY, *MANY, (SCALE, ScaleSpec(2.0))]
    report = cache.warmup(iter(requests), arch=ARCH, jobs=1, progress=False)
    assert report.kernels == 3
    assert report.found == 1
    assert [key.spec for key in report.compiled] == [(("factor", "0.0"),), (("factor", "1.0"),)]
    assert report.failures == ()
    assert cache.stats().compiles == 2
    cache.freeze()
    before = cache.stats()
    for kernel, spec in requests:
        cache.get(kernel, spec, ARCH)
    assert cache.stats() == before  # all from memory


@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_one_failure_loses_no_other_kernel(root: Path, jobs: int) -> None:
    requests = [(BROKEN, ScaleSpec(1.0)), (SCALE, ScaleSpec(2.0)), (BROKEN, ScaleSpec(3.0))]
    with pytest.raises(cache.CompileError) as failure:
        cache.warmup(requests, arch=ARCH, jobs=jobs, progress=False)
    message = str(failure.value)
    assert message.startswith("2 of 3 kernels failed:")
    assert message.count("no_such_field") == 2
    assert "broken ScaleSpec(factor=1.0)" in message
    assert "broken ScaleSpec(factor=3.0)" in message
    assert isinstance(failure.value, WarmupError)
    report = failure.value.report
    assert [key.kernel for key in report.compiled] == ["scale"]
    assert {failed.key.spec for failed in report.failures} == {
        (("factor", "1.0"),),
        (("factor", "3.0"),),
    }
    assert cache.stats().compiles == 1
    assert cache.stats().compile_seconds > 0
    cache.freeze()
    cache.get(SCALE, ScaleSpec(2.0), ARCH)


def test_a_process_that_dies_loses_only_its_kernel(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = workers.Worker.ask
    asked: list[Any] = []

    def die_at_the_first(worker: workers.Worker, request: dict[str, Any]) -> Any:
        asked.append(request)
        if len(asked) == 1:
            worker._process.send_signal(signal.SIGKILL)
            worker._process.wait()
        return original(worker, request)

    monkeypatch.setattr(workers.Worker, "ask", die_at_the_first)
    hint = (
        r"ended with status -9 \(SIGKILL\): the system may have run out of memory.*jobs of warmup"
    )
    with pytest.raises(cache.CompileError, match=hint) as e:
        cache.warmup(MANY, arch=ARCH, jobs=2, progress=False)
    assert len(e.value.report.compiled) == 2  # type: ignore[attr-defined]
    assert len(Store(root).digests()) == 2


def test_a_frozen_cache_is_not_warmed_up(root: Path) -> None:
    cache.freeze()
    with pytest.raises(cache.FrozenCacheMiss):
        cache.warmup(MANY, arch=ARCH)


def test_what_only_this_process_can_import_is_compiled_here(root: Path) -> None:
    @dataclass(frozen=True)
    class Inner:
        factor: float

    requests = [(SCALE, Inner(1.0)), (SCALE, Inner(2.0))]
    report = cache.warmup(requests, arch=ARCH, jobs=2, progress=False)
    assert len(report.compiled) == 2
    assert cache.stats().compiles == 2


def test_without_a_directory_everything_is_compiled_into_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache.jit.settings, "cache_directory", lambda: None)
    report = cache.warmup(MANY, arch=ARCH, jobs=2, progress=False)
    assert report.kernels == 3
    assert cache.stats().memory_only == 3


def test_the_progress_bar_shows_on_stderr(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.warmup(MANY[:1], arch=ARCH, jobs=1, progress=True)
    captured = capsys.readouterr()
    assert "1/1" in captured.err
    assert captured.out == ""


def test_a_server_is_not_run_again_by_its_workers(root: Path, tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(
        "from cute_attn import cache\n"
        "from toy_specs import *\n"
        "print('serving')\n"
        "cache.warmup([(SCALE, ScaleSpec(float(n))) for n in range(2)], arch='sm_90a', jobs=2)\n"
        "print(cache.stats().compiles)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": python_path(), "CUTE_ATTN_LOG": "info"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["serving", "2"]
    assert done.stderr.count("INFO: compiled scale") == 2


# -- requests as JSON


class Mask(enum.Enum):
    CAUSAL = 1


@dataclass(frozen=True)
class WireSpec:
    value: Any


values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(),
        st.just(Mask.CAUSAL),
        st.sampled_from([torch.bfloat16, torch.float8_e4m3fn]),
    ),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@given(value=values)
def test_a_request_arrives_as_it_was_sent(value: Any) -> None:
    sys.modules.setdefault(WireSpec.__module__, sys.modules[__name__])
    sent = json.loads(json.dumps(encode_request(SCALE, WireSpec(value))))
    kernel, spec = decode_request(sent)
    assert kernel == SCALE
    assert cache.describe(kernel, spec, ARCH) == cache.describe(SCALE, WireSpec(value), ARCH)


@given(value=values)
def test_a_recorded_specialisation_is_the_same(value: Any) -> None:
    sys.modules.setdefault(WireSpec.__module__, sys.modules[__name__])
    kernel = cache.KernelDef("k", "some.module:Kernel", "--opt", "some", ("other", "ones"))
    recorded = specfile.parse(specfile.kernel_table(kernel, WireSpec(value), ARCH), Path("x.toml"))
    ((found, spec, arch),) = specfile.plan_for(recorded, [ARCH]).requests
    assert (found, arch) == (kernel, ARCH)
    assert spec_items(spec) == spec_items(WireSpec(value))


def test_a_class_that_nobody_else_can_import_is_not_sent() -> None:
    @dataclass(frozen=True)
    class Inner:
        pass

    with pytest.raises(NotPortable, match="Inner"):
        encode_request(SCALE, Inner())
    with pytest.raises(NotPortable, match="__main__"):
        encode_request(cache.KernelDef("k", "__main__:K"), ScaleSpec())


def test_a_worker_ends_with_the_process_that_started_it(
    run: Callable[..., Process], root: Path
) -> None:
    parent = run("""
from cute_attn.cache import specfile, workers
from cute_attn.cache.key import spec_items
worker = workers.Worker()
tell(pid=worker._process.pid)
time.sleep(1000)
""")
    pid = parent.hear()["pid"]
    parent.kill()
    assert ends(pid)


def ends(pid: int) -> bool:
    """Whether a process ends within 10 seconds."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # dead, and nobody has asked for its status yet
            return True
        time.sleep(0.1)
    return False


def test_a_worker_ends_though_a_forked_child_holds_its_stdin(
    run: Callable[..., Process], root: Path
) -> None:
    parent = run("""
from cute_attn.cache import workers
worker = workers.Worker()
answer, question = os.pipe()
child = os.fork()
if child == 0:
    os.close(question)
    os.read(answer, 1)  # until the parent has ended
    os._exit(0)
tell(ending=worker.close())
""")
    assert parent.hear() == {"ending": "its process ended with status 0"}


def test_a_worker_ends_in_the_middle_of_a_compilation(
    run: Callable[..., Process], root: Path, tmp_path: Path
) -> None:
    """When the process that started it has ended: it would keep a CPU and a gigabyte."""
    parent = run(
        """
cache.warmup([(SLOW, ScaleSpec(float(n))) for n in range(2)], arch="sm_90a", jobs=2)
""",
        TOY_SLOW=str(tmp_path),
    )
    began = time.monotonic()
    while len(list(tmp_path.glob("pid-*"))) < 2:
        assert time.monotonic() - began < 60
        time.sleep(0.05)
    os.kill(parent.pid, signal.SIGKILL)
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    try:
        assert all(ends(pid) for pid in pids)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_worker_whose_parent_has_ended_before_it_begins_does_not_begin() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    done = subprocess.run(
        [sys.executable, "-c", f"from cute_attn.cache._worker import main; main({gone.pid})"],
        input="not json\n",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (1, "its process ended with status 1"),
        (-int(signal.SIGSEGV), f"its process ended with status -{int(signal.SIGSEGV)} (SIGSEGV)"),
        (-40, "its process ended with status -40"),
    ],
)
def test_how_a_process_ended_in_words(status: int, text: str) -> None:
    assert workers._ending(status) == text


# -- arguments that make no sense


@pytest.mark.parametrize(
    ("requests", "problem"),
    [
        (3, "requests is 3, must be pairs of KernelDef and specialisation, or the path"),
        ((SCALE, ScaleSpec()), "requests holds KernelDef.*must hold pairs of KernelDef and spec"),
        ([(SCALE,)], "requests holds .*must hold pairs"),
        ([SCALE], "requests holds .*must hold pairs"),
        ({"scale": 1}, "requests holds 'scale', must hold pairs"),
        ([(SCALE, 2.0)], "requests holds .*must hold pairs"),
    ],
)
def test_requests_that_are_none(root: Path, requests: Any, problem: str) -> None:
    for warmup in (cache.warmup, cute_attn.warmup):
        with pytest.raises(TypeError, match=problem):
            warmup(requests, arch=ARCH)


@pytest.mark.parametrize(
    ("jobs", "error", "problem"),
    [
        (0, ValueError, "jobs is 0, must be at least 1"),
        (-1, ValueError, "jobs is -1, must be at least 1"),
        (True, TypeError, "jobs is True, must be an int or None"),
        (2.0, TypeError, r"jobs is 2\.0, must be an int or None"),
    ],
)
def test_no_such_number_of_processes(
    root: Path, jobs: Any, error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        cache.warmup(MANY, arch=ARCH, jobs=jobs)


def test_a_warm_up_of_nothing_says_so(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert cache.warmup([], arch=ARCH).kernels == 0
    assert caplog.messages == ["a warm-up was asked for no kernel: nothing is loaded"]


def test_without_worker_processes_this_process_compiles(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_process(*args: Any, **kwargs: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(workers.subprocess, "Popen", no_process)
    outcome = warm.compile_all(
        warm.unique_jobs((*request, ARCH) for request in MANY[:2]), Store(root), jobs=2
    )
    assert len(outcome.stored) == len(Store(root).digests()) == 2
    assert outcome.failures == ()
    assert caplog.text.count("no process can be started to compile in") == 1


def test_workers_that_end_at_once_are_failures(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WarmupError, match="its process ended with status 1"):
        cache.warmup(MANY[:2], arch=ARCH, jobs=2, progress=False)


def test_a_worker_that_says_something_else_is_a_failure(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nread request\necho what\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(WarmupError, match="JSONDecodeError"):
        cache.warmup(MANY[:2], arch=ARCH, jobs=2, progress=False)
