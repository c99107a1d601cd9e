"""Set-up of all tests: a separate kernel cache, hypothesis profiles, and skips without a GPU."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import durations

# Compiling a kernel inside an example takes seconds, hence no deadline.
settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("full", deadline=None, max_examples=500, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

GPU_TESTS = Path(__file__).parent / "gpu"
KEPT_KERNELS = Path(__file__).parents[1] / "build" / "kernels"

# Variables that a user may have set, and that would change the outcome of a test.
CACHE_SETTINGS = (
    "CUTE_ATTN_ARCH",
    "CUTE_ATTN_CACHE_MAX_BYTES",
    "CUTE_ATTN_LOG",
    "CUTE_ATTN_PREBUILT",
)

VARIABLES = re.compile(r"^\s*(\.(visible|weak|extern)\s+)?\.(global|const)\b", re.MULTILINE)

_cache_directory = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations", action="store_true", help="write CPU seconds to tests/durations.json"
    )
    parser.addoption(
        "--keep-kernels",
        action="store_true",
        help="share compiled kernels with the next run that has this option, in build/kernels",
    )


class FailuresAtOnce:
    """Names each failed test when it fails, so that a run that is cut short has told it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal: Any = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write(f"\nfailed: {report.nodeid}\n", flush=True)


def pytest_configure(config: pytest.Config) -> None:
    """Point the kernel cache to a directory of this test run, before any test module is imported.

    The workers of pytest-xdist inherit the directory from their parent process, so that they share
    compiled kernels.
    """
    if config.getoption("record_durations"):
        config.pluginmanager.register(durations.Recorder(config))
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(FailuresAtOnce(config))
    for name in CACHE_SETTINGS:
        os.environ.pop(name, None)
    if config.getoption("keep_kernels"):  # safe: the cache's keys cover the kernels' sources
        directory = str(KEPT_KERNELS)
        KEPT_KERNELS.mkdir(mode=0o700, parents=True, exist_ok=True)
    else:
        directory = tempfile.mkdtemp(prefix="cute-attn-tests-")  # 0700, as the cache demands
        config.stash[_cache_directory] = directory
    os.environ["CUTE_ATTN_CACHE_DIR"] = directory
    # Tests start many processes, most of whose time would go into compiling the same sources anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Tensors are small: torch's threads would wait for one another most of the time.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is there when the tests begin stays: ten thousand tests, and all modules. The garbage
    collector would take a second to look at it, again and again. Tracing a kernel makes a million
    objects that are no garbage: the collector runs less often, which saves 4 % of a compilation."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def engine_directory() -> None:
    """Build the emulator's engine once for all test runs: its path has a digest of its sources."""
    from cute_attn.emulator import build

    build.directory = Path(__file__).parents[1] / "build" / "emulator"


@pytest.fixture(scope="session", autouse=True)
def programs() -> Iterator[None]:
    """Lower a compiled kernel once for all emulators, unless its module has variables, whose memory
    they would share. What is only text, as tests of the emulator write it, seldom comes again."""
    from cute_attn.emulator import machine

    lower = machine.programs
    kept = lru_cache(maxsize=128)(lower)

    def once(text: str, object_file: bytes = b"") -> Any:
        return (kept if object_file and not VARIABLES.search(text) else lower)(text, object_file)

    machine.programs = once
    yield
    machine.programs = lower


def pytest_unconfigure(config: pytest.Config) -> None:
    directory = config.stash.get(_cache_directory, None)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


@cache
def why_no_gpu() -> str | None:
    """The reason for skipping tests that need a GPU, or None where there is one."""
    try:
        import torch
    except ImportError:
        return "needs torch, which is not installed"
    if torch.version.cuda is None:
        return "needs a GPU, and this is a CPU build of torch"
    return None if torch.cuda.is_available() else "needs a GPU, and torch finds none"


EMULATED_ARCHS = ("sm_90a", "sm_100a")
QUICK_ARCH = "sm_100a"  # `make gpu-check` covers sm_90a


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`@pytest.mark.everywhere`: run on a GPU, and in the emulator for each architecture."""
    if metafunc.definition.get_closest_marker("everywhere"):
        emulated = [pytest.param("cpu", id=arch) for arch in EMULATED_ARCHS]
        metafunc.parametrize("device", [*emulated, pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """`@pytest.mark.everywhere` with device "cpu": the operators run in the emulator."""
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    with contextlib.ExitStack() as stack:
        if item.get_closest_marker("everywhere") and parameters["device"] == "cpu":
            import cute_attn
            from cute_attn.emulator import Emulator

            arch = emulated_arch(item)
            emulator = Emulator(schedule="random", seed=0)
            stack.enter_context(cute_attn.emulated(arch, emulator))
            stack.callback(assert_no_race, emulator)
        return (yield)


def assert_no_race(emulator: Any) -> None:
    """Our own kernels must have no race, not even a note such as one between lanes of a warp."""
    races = [str(found) for found in emulator.report.findings if found.check == "race"]
    assert not races, "\n".join(races)


def emulated_arch(item: pytest.Item) -> str | None:
    """The architecture of a case of `everywhere`, or None if it runs on a GPU."""
    parameters = item.name.rstrip("]").replace("[", "-").split("-")
    return next((arch for arch in EMULATED_ARCHS if arch in parameters), None)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Iterator[None]:
    """`@pytest.mark.in_turn(name)` and `everywhere`: mark repetitions as slow."""
    made: Any = yield
    for position, item in enumerate(made if isinstance(made, list) else ()):
        if isinstance(item, pytest.Function) and is_repetition(item, position):
            item.add_marker(pytest.mark.slow)
    return made


def is_repetition(item: pytest.Function, position: int) -> bool:
    """Whether a case repeats others: with the slow architecture, or out of its value's turn.

    Cases of `everywhere` keep a single architecture, so that they share compiled kernels. The turns
    of an `in_turn` parameter cover its pairs of values with each of two other parameters. They
    start at a digest of the test's name, so that tests with few cases differ in their values.
    """
    everywhere, in_turn = (item.get_closest_marker(name) for name in ("everywhere", "in_turn"))
    one_arch = everywhere and not everywhere.kwargs.get("each")
    if one_arch and emulated_arch(item) not in (None, QUICK_ARCH):
        return True
    if everywhere and not everywhere.kwargs.get("quick", True) and emulated_arch(item):
        return True
    if in_turn is None:
        return False
    turn, index, count = zlib.crc32(item.originalname.encode()), None, 1
    for marker in reversed(list(item.iter_markers("parametrize"))):  # the last one varies fastest
        names, values = marker.args[:2]
        position, at = divmod(position, len(values))
        if in_turn.args[0] in (names.split(",") if isinstance(names, str) else names):
            index, count = at, len(values)
        else:
            turn += at
    assert index is not None, f"{item.nodeid} has no parameter {in_turn.args[0]}"
    return index != turn % count


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory for one test, set in the environment."""
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(directory))
    return directory
