"""What every test shares: a kernel cache apart, hypothesis profiles, and skips without a GPU."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Compiling a kernel inside an example takes seconds, hence no deadline.
settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("full", deadline=None, max_examples=500, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

GPU_TESTS = Path(__file__).parent / "gpu"

# What a user may have set, and what would change the outcome of a test.
CACHE_SETTINGS = (
    "CUTE_ATTN_ARCH",
    "CUTE_ATTN_CACHE_MAX_BYTES",
    "CUTE_ATTN_LOG",
    "CUTE_ATTN_PREBUILT",
)

_cache_directory = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Point the kernel cache to a directory of this test run, before any test module is imported.

    The workers of pytest-xdist inherit it from the process that starts them, so that they share
    compiled kernels with one another, and with nobody else.
    """
    if hasattr(config, "workerinput"):
        return
    for name in CACHE_SETTINGS:
        os.environ.pop(name, None)
    directory = tempfile.mkdtemp(prefix="cute-attn-tests-")  # created 0700, as the cache demands
    config.stash[_cache_directory] = directory
    os.environ["CUTE_ATTN_CACHE_DIR"] = directory


@pytest.fixture(scope="session", autouse=True)
def engine_directory() -> None:
    """The emulator's engine is built once for all test runs: its file is named for its sources."""
    from cute_attn.emulator import build

    build.directory = Path(__file__).parents[1] / "build" / "emulator"


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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`@pytest.mark.everywhere`: once a GPU, and once an architecture in the emulator."""
    if metafunc.definition.get_closest_marker("everywhere"):
        emulated = [pytest.param("cpu", id=arch) for arch in EMULATED_ARCHS]
        metafunc.parametrize("device", [*emulated, pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Where a test that runs everywhere is given "cpu", its operators run in the emulator."""
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    with contextlib.ExitStack() as stack:
        if item.get_closest_marker("everywhere") and parameters["device"] == "cpu":
            import cute_attn
            from cute_attn.emulator import Emulator

            arch = next(arch for arch in EMULATED_ARCHS if arch in item.callspec.id.split("-"))
            emulator = Emulator(schedule="random", seed=0)
            stack.enter_context(cute_attn.emulated(arch, emulator))
            stack.callback(assert_no_race, emulator)
        return (yield)


def assert_no_race(emulator: Any) -> None:
    """Of our own kernels not even those that are notes, as between lanes of a warp."""
    races = [str(found) for found in emulator.report.findings if found.check == "race"]
    assert not races, "\n".join(races)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory for one test, already set in the environment."""
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(directory))
    return directory
