"""Whole programs in the emulator: scripts as they are, a test suite, and the stand-ins."""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_attn.emulator.host import Launch
from cute_attn.emulator.scripts import (
    hook,
    launches,
    memory,
    options,
    process,
    products,
    run,
    startup,
)

ROOT = Path(__file__).parents[2]
HEADER = """
import cutlass, cutlass.cute as cute, torch
from cutlass.cute.runtime import from_dlpack
"""
KERNELS = """
@cute.kernel
def shift_kernel(x: cute.Tensor, y: cute.Tensor, by: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    y[thread] = x[thread + by]  # past the end, for a thread

@cute.jit
def shift(x: cute.Tensor, y: cute.Tensor, by: cutlass.Int32):
    shift_kernel(x, y, by).launch(grid=[1, 1, 1], block=[128, 1, 1])

@cute.kernel
def reverse_kernel(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    shared = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, 128), cute.make_layout(128))
    shared[thread] = x[thread]  # before the race
    y[thread] = shared[127 - thread]  # after the race

@cute.jit
def reverse(x: cute.Tensor, y: cute.Tensor):
    reverse_kernel(x, y).launch(grid=[1, 1, 1], block=[128, 1, 1])
"""
PROGRAM = f"""{HEADER}{KERNELS}
import sys
import numpy
from cuda.bindings import driver, runtime

def main(by):
    assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    assert sms == cutlass.utils.HardwareInfo().get_max_active_clusters(1) == 7
    x = torch.arange(128.0).cuda()
    y = torch.full_like(x, float("nan"))
    shift(from_dlpack(x), from_dlpack(y), by)  # compiled by the call
    assert torch.equal(y[: 128 - by], x[by:])

    compiled = cute.compile(reverse, from_dlpack(x), from_dlpack(y), options="--enable-tvm-ffi")
    compiled(x, y)
    try:
        compiled(torch.arange(128.0), y)
    except ValueError as error:
        assert "expected device_type=cuda" in str(error)
    else:
        raise AssertionError("a tensor on the host was taken")

    graph = torch.cuda.CUDAGraph()
    y.zero_()
    with torch.cuda.graph(graph):
        shift(from_dlpack(x), from_dlpack(y), 0)
    assert not y.any()
    graph.replay()
    assert torch.equal(x, y)

    (error, address) = runtime.cudaMalloc(512)
    runtime.cudaMemcpy(address, x.data_ptr(), 512, runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice)
    host = numpy.empty(128, numpy.float32)
    driver.cuMemcpyDtoH(host, address, 512)
    assert (host == x.cpu().numpy()).all()
    runtime.cudaFree(address)
    try:
        driver.cuTexRefCreate()
    except NotImplementedError as error:
        assert "cuTexRefCreate" in str(error)
    else:
        raise AssertionError("a call without a stand-in was taken")
    print("end of", sys.argv[1:])

if __name__ == "__main__":
    main(int(sys.argv[1]))
"""
TENSORS = """
import threading
import torch

x = torch.randn(4, 6, device="cuda", requires_grad=True)
assert x.is_cuda and x.device == torch.device("cuda", 0) and not x.is_cpu
assert [t.is_cuda for t in (x[1:], x.T, x + 1, torch.cat([x, x]), x.half(), x.sum())] == [True] * 6
assert not x.cpu().is_cuda and not torch.zeros(3).is_cuda and not x.to("cpu").is_cuda
assert torch.zeros(0, device="cuda").is_cuda and not torch.zeros(0).is_cuda
assert x.cuda() is x and x.detach().cpu().cuda().is_cuda
host = torch.zeros(4, 6)
device = host.to("cuda")
device += 1
assert not host.any() and not host.copy_(device).is_cuda and host.all()
assert torch.empty_like(device, device="cpu").is_cpu and host.to(device).is_cuda
(x * x).sum().backward()
assert x.grad.is_cuda and torch.equal(x.grad, 2 * x)
with torch.device("cuda"):
    assert torch.ones(3).is_cuda and not torch.ones(3, device="cpu").is_cuda
generator = torch.Generator("cuda").manual_seed(1)
assert torch.rand(2, generator=generator, device="cuda").is_cuda
seen = []
thread = threading.Thread(target=lambda: seen.append(x.is_cuda))
thread.start(), thread.join()
assert seen == [True]
for refused, what in ((device.numpy, "Tensor.cpu"), (lambda: host.to("cuda:1"), "cuda:1")):
    try:
        refused()
    except (TypeError, RuntimeError) as error:
        assert what in str(error)
    else:
        raise AssertionError(what)

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        assert gradient.is_cuda
        return 2 * gradient

Double.apply(x).sum().backward()

@torch.compile(fullgraph=True)
def tripled(x):
    return 3 * x

assert tripled(x.detach()).is_cuda and torch.compile(tripled) is tripled

@torch.library.custom_op("emulated_test::double", mutates_args=(), device_types="cuda")
def double(x: torch.Tensor) -> torch.Tensor:
    assert x.is_cuda and torch.empty_like(x).is_cuda and torch.zeros(2, device=x.device).is_cuda
    return 2 * x

assert double(x.detach()).is_cuda
"""
TESTS = f"""{HEADER}
import pytest
{KERNELS}

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("by", [0, 1])
def test_shift(by):
    x = torch.arange(128.0, device="cuda")
    y = torch.empty_like(x)
    shift(from_dlpack(x), from_dlpack(y), by)
    assert torch.equal(y[: 128 - by], x[by:])
"""


def emulated(
    *arguments: str, directory: Path, module: str = "cute_attn.emulator"
) -> subprocess.CompletedProcess[str]:
    """A process of the command line."""
    return python("-m", module, *arguments, directory=directory)


def python(*arguments: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process of Python, with these variables in its environment."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        # As tests/conftest.py: one engine for all runs of the tests.
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "CUTE_ATTN_CACHE_DIR": str(ROOT / "build"),
            **variables,
        },
    )


def line_of(text: str, part: str) -> int:
    """The line of a program that has a text."""
    return next(i for i, line in enumerate(text.splitlines(), 1) if part in line)


def test_an_unmodified_script_runs_and_its_errors_are_found(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    done = emulated(
        *("--num-sms", "7", "--schedules", "2", "--report", "report.json"),
        *("program.py", "1", "--report"),
        directory=tmp_path,
    )

    assert done.returncode == run.FOUND, done.stderr
    assert done.stdout == "end of ['1', '--report']\n"
    assert f"program.py:{line_of(PROGRAM, 'past the end')}" in done.stderr
    assert f"program.py:{line_of(PROGRAM, 'after the race')}" in done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["options"]["num_sms"] == 7
    assert [s["schedule"] for s in report["schedules"]] == ["adversarial", "fair"]
    assert [len(s["launches"]) for s in report["schedules"]] == [3, 3]
    found = {
        (f["check"], int(f["source"].rsplit(":")[-1]))
        for f in report["findings"]
        if f["severity"] == "error" and f["check"] in ("race", "out-of-bounds")
    }
    assert found == {
        ("out-of-bounds", line_of(PROGRAM, "past the end")),
        ("race", line_of(PROGRAM, "before the race")),
        ("race", line_of(PROGRAM, "after the race")),
    }


PRINTS = f"""{HEADER}
import sys

@cute.kernel
def store_kernel(x: cute.Tensor, at: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        cute.printf("stores at %d", at)
    x[thread + at] = thread

@cute.jit
def store(x: cute.Tensor, at: cutlass.Int32):
    store_kernel(x, at).launch(grid=[1, 1, 1], block=[32, 1, 1])

x = torch.zeros(32, dtype=torch.int32, device="cuda")
store(from_dlpack(x), int(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedules", [[], ["--schedules", "3"]])
def test_text_is_shown_where_a_launch_raises(tmp_path: Path, schedules: list[str]) -> None:
    (tmp_path / "program.py").write_text(PRINTS)
    done = emulated("--on-findings", "raise", *schedules, "program.py", "9", directory=tmp_path)
    assert done.returncode == 1 and "out-of-bounds" in done.stderr
    assert done.stdout.strip() == "stores at 9"


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("python x.py -m 1", "python -m cute_attn.emulator x.py -m 1"),
        ("python -X dev -Werror x.py", "python -X dev -Werror -m cute_attn.emulator x.py"),
        ("python -uBm a.b -c 1", "python -uB -m cute_attn.emulator -m a.b -c 1"),
        ("python --check-hash-based-pycs never -ma", (
            "python --check-hash-based-pycs never -m cute_attn.emulator -m a"
        )),
        ("python -m cute_attn.emulator x.py", None),
        ("python -m pytest tests", None),
        ("python /usr/bin/pytest tests", None),
        ("python -Bc pass", None),
        ("python - x", None),
        ("python -i", None),
        ("python", None),
    ],
)  # fmt: skip
def test_the_command_that_emulates_a_program(arguments: str, command: str | None) -> None:
    assert startup.command_of(arguments.split()) == (command and command.split())


def test_the_hook_is_a_file_that_python_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hook, "hook_path", lambda: tmp_path / "hook.pth")
    started: list[bool] = []
    monkeypatch.setattr(startup, "start", lambda: started.append(True))
    for option, said in (("install", "wrote"), ("remove", "removed"), ("remove", "there is no")):
        with pytest.raises(SystemExit) as ended:
            options.parse([f"--{option}-hook"])
        assert ended.value.code == 0 and said in capsys.readouterr().out
        assert list(tmp_path.iterdir()) == ([tmp_path / "hook.pth"] if option == "install" else [])
    for value in ("1", "all"):
        monkeypatch.setenv("CUTE_ATTN_EMULATE", value)
        exec(hook.HOOK, {})
    assert started == [True]


@pytest.mark.slow
def test_a_variable_emulates_programs_and_the_programs_that_they_start(tmp_path: Path) -> None:
    """The hook's line is in a sitecustomize.py, which Python executes at the same time."""
    (tmp_path / "sitecustomize.py").write_text(hook.HOOK)
    (tmp_path / "program.py").write_text(PRINTS)
    start = (
        "import subprocess, sys; subprocess.run([sys.executable, 'program.py', '0'], check=True)"
    )
    (tmp_path / "starts.py").write_text(
        f"{start}\nimport torch\nprint(torch.cuda.is_available())\n"
    )
    (tmp_path / "test_kernels.py").write_text(TESTS)
    variables = {"CUTE_ATTN_EMULATE": "all", "CUTE_ATTN_ARCH": "sm_100a"}
    path = f"{tmp_path}:{ROOT}"

    done = python("starts.py", directory=tmp_path, **variables, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "stores at 0" and "True" in done.stdout
    assert "emulator: sm_100a: 1 launches" in done.stderr

    tests = "-m", "pytest", "-p", "cute_attn.pytest_emulate", "-p", "no:cacheprovider"
    done = python(*tests, "test_kernels.py", directory=tmp_path, **variables)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "emulator: sm_100a: 2 launches" in done.stdout


@pytest.mark.slow  # the script's process stands for it, except for pytest's hooks
def test_a_test_suite_runs_and_fails_where_a_kernel_has_errors(tmp_path: Path) -> None:
    (tmp_path / "test_kernels.py").write_text(TESTS)

    done = emulated(
        *("-p", "cute_attn.pytest_emulate", "--emulate", "sm_100a", "-p", "no:cacheprovider"),
        "test_kernels.py",
        directory=tmp_path,
        module="pytest",
    )

    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "FindingsError: 1 findings" in done.stdout and "out-of-bounds" in done.stdout
    assert "emulator: sm_100a: 2 launches" in done.stdout


@pytest.mark.slow  # processes of several seconds each
def test_tensors_know_their_device(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TENSORS)
    done = emulated("program.py", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no kernel was launched" in done.stderr


@pytest.mark.slow
def test_a_program_for_another_device_is_told_of_the_option(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text('raise ValueError("CUTE_DSL_ARCH must be sm_100a")\n')
    done = emulated("program.py", directory=tmp_path)
    assert done.returncode == 1
    assert "the GPU is sm_90a; --arch chooses another one" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--on-findings", "raise"], 1), (["--on-findings", "ignore"], 0), (["--checks", "race"], 0)],
)
def test_exit_status(tmp_path: Path, arguments: list[str], status: int) -> None:
    call = "x = torch.zeros(128).cuda()\nshift(from_dlpack(x), from_dlpack(x.clone()), 1)\n"
    (tmp_path / "program.py").write_text(f"{HEADER}{KERNELS}\n{call}")
    done = emulated(*arguments, "program.py", directory=tmp_path)
    assert done.returncode == status, done.stderr
    assert ("FindingsError" in done.stderr) == (status == 1)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "gpu"), [("sm_90a", "NVIDIA H100"), ("sm_100a", "NVIDIA B200")])
def test_times_are_predicted(arch: str, gpu: str, tmp_path: Path) -> None:
    """A line for each launch, a graph's replays included."""
    pytest.importorskip("cute_attn.timing")
    calls = """
x = torch.zeros(128).cuda()
y = x.clone()
reverse(from_dlpack(x), from_dlpack(y))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    reverse(from_dlpack(x), from_dlpack(y))
graph.replay()
"""
    (tmp_path / "program.py").write_text(f"{HEADER}{KERNELS}\n{calls}")
    options = ("--arch", arch, "--time", "--checks", "none")
    done = emulated(*options, "program.py", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.findall(rf"reverse\S*: predicted ([0-9.]+) us on {gpu}", done.stderr)
    assert len(found) == 2 and all(float(us) > 0 for us in found), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [("sys.exit(5)", 5), ("raise ValueError('why')", 1)])
def test_the_program_s_own_exit_status(tmp_path: Path, end: str, status: int) -> None:
    (tmp_path / "program.py").write_text(f"import sys\n{end}\n")
    done = emulated("-m", "program", directory=tmp_path)
    assert done.returncode == status, done.stderr
    assert ("ValueError: why" in done.stderr) == (status == 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arch", "sm_70", "x.py"], "'sm_70' is none of sm_80, sm_86"),
        (["--arch", "sm_100", "x.py"], "did you mean sm_100a?"),
        (["--checks", "race,rase", "x.py"], "'rase' is neither all, none nor a check: deadlock"),
        (["--schedules", "0", "x.py"], "--schedules: '0' is not a positive integer"),
        (["--resident", "many", "x.py"], "--resident: 'many' is not a positive integer"),
        (["--on-findings", "warn", "x.py"], "--on-findings: invalid choice: 'warn'"),
        (["--arch", "sm_80", "--time", "x.py"], "--time is for --arch sm_90a and sm_100a"),
        (["--unknown", "x.py"], "unrecognized arguments: --unknown"),
        (["/nowhere/x.py"], "there is no file /nowhere/x.py"),
        ([], "required: SCRIPT"),
    ],
)
def test_bad_options(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = run.main(arguments)
    except SystemExit as error:
        status = int(error.code or 0)
    assert status == 2
    assert said in capsys.readouterr().err


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_ATTN_ARCH", "sm_100a")
    given, module, program = options.parse(["--checks", "race,tmem", "x.py", "--arch", "sm_80"])
    assert (given.arch, given.checks, module) == ("sm_100a", ("race", "tmem"), None)
    assert program == ["x.py", "--arch", "sm_80"]
    assert given.device.num_sms == 148 and given.device.capability == (10, 0)
    assert options.parse(["-m", "x", "1"])[1:] == ("x", ["x", "1"])


def test_device_memory_is_listed_until_it_is_freed() -> None:
    """The list of allocations against a set, with many collisions in its hash table."""
    draw, alive = random.Random(0), dict[int, int]()
    before = memory.allocations()
    for _ in range(3000):
        if alive and draw.random() < 0.45:
            address = draw.choice(list(alive))
            del alive[address]
            memory.release(address)
            assert not memory.on_device(address)
        else:
            size = draw.randrange(1, 5000)
            address = memory.allocate(size)
            assert address % 512 == 0 and address not in alive
            alive[address] = size
    listed = {base: size for base, size, _ in memory.allocations()}
    assert listed == alive | {base: size for base, size, _ in before}
    address, size = next(iter(alive.items()))
    holds = memory.stand_in().emulated_holds
    assert holds(address) and holds(address + size - 1)
    assert not memory.mark(address + 16, "inside")
    for address in alive:
        memory.release(address)
    assert memory.allocations() == before


def test_products_are_those_of_tensor_cores() -> None:
    """Tensor cores drop what is 2^25 times smaller than the sum; float32 keeps some of it."""
    small = 2.0**-13
    a = torch.full((2, 32), small, dtype=torch.bfloat16)
    a[:, 0] = 1
    cores = products.TensorCores(90)
    assert cores._product(a, a.mT).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert (a.float() @ a.float().mT).tolist() != [[1.0, 1.0], [1.0, 1.0]]
    x, y = torch.randn(2, 3, 5, 40, dtype=torch.float16)[:, :, :, :24].unbind()
    with cores:
        product = torch.einsum("bmk,bnk->bmn", x, y)
    assert product.dtype == torch.float16
    torch.testing.assert_close(product, (x.double() @ y.double().mT).half(), atol=0, rtol=2e-3)


def test_a_long_launch_shows_its_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(launches.time, "monotonic", lambda: now)
    progress = launches.Progress(2)
    one = (1, 1, 1)

    def shown(total: int, *calls: tuple[float, int]) -> list[str]:
        nonlocal now
        now = 100.0
        progress.begin(Launch("kernel_of_a_program", (total, 1, 1), one, one, 0, False, None))
        for when, done in calls:
            now = when
            progress(done, total)
        progress.end()
        progress(total, total)
        return capsys.readouterr().err.splitlines()

    said = "emulator: kernel_of_a_program: {} of {} clusters in {} s, about {} s left"
    # Two CTAs run together, so the rate is known when both have ended, and the launch will be long.
    assert shown(800, (100.5, 1), (101.0, 2)) == [said.format(2, 800, 1, 399)]
    assert shown(8, (100.5, 2), (101.0, 4), (102.0, 7)) == []
    late = shown(8, (101.0, 0), (106.0, 1), (107.0, 3), (140.0, 6))
    assert late[0] == "emulator: kernel_of_a_program: 1 of 8 clusters in 6 s"
    assert late[1:] == [said.format(6, 8, 40, 13)]


def test_the_stand_ins_replace_the_compiler_s_runtime() -> None:
    """Every function of the compiler's runtime that needs a device has a stand-in."""
    from elftools.elf.elffile import ELFFile

    ours = ctypes.CDLL(str(process.library()))
    with Path(process._compiler_libraries()[0]).open("rb") as file:
        symbols = list(ELFFile(file).get_section_by_name(".dynsym").iter_symbols())
    names = {x.name for x in symbols if x["st_shndx"] != "SHN_UNDEF"}
    needed = {x for x in names if x.startswith(("_cu", "cuda_dialect_"))}
    assert len(needed) > 50
    assert {name for name in needed if not hasattr(ours, name)} == set()
