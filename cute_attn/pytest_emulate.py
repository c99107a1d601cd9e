"""A plugin for pytest: `pytest --emulate sm_90a` runs tests of CuTe DSL kernels without a GPU.
`CUTE_ATTN_EMULATE=all` in the environment does the same for `CUTE_ATTN_ARCH`.

Every start of pytest imports this module, so that it imports nothing but pytest.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .emulator.scripts.launches import Launches
    from .emulator.scripts.options import Options

_launches = pytest.StashKey[Any]()
_mode = pytest.StashKey[Any]()


def _arch(text: str) -> str:
    from .emulator.scripts.options import arch

    return arch(text)


def _default_arch() -> str:
    from .emulator.scripts.options import arch, default_arch

    try:
        return arch(default_arch())
    except argparse.ArgumentTypeError as error:
        raise pytest.UsageError(f"CUTE_ATTN_ARCH: {error}") from None


def _checks(text: str) -> str | tuple[str, ...]:
    from .emulator.scripts.options import checks

    return checks(text)


def _positive(text: str) -> int:
    from .emulator.scripts.options import positive

    return positive(text)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, which differ from those of `python -m cute_attn.emulator` in their prefix."""
    add = parser.getgroup("emulate", "CuTe DSL kernels without a GPU").addoption
    add("--emulate", type=_arch, metavar="ARCH", help="emulate a GPU, such as sm_90a or sm_100a")
    add("--emulate-checks", type=_checks, default="all", help="all, none, or names of checks")
    add("--emulate-schedules", type=_positive, default=1, help="schedules of each launch")
    add("--emulate-seed", type=int, default=0, help="seed of the random schedules")
    add(
        "--emulate-on-findings",
        choices=("collect", "raise", "ignore"),
        default="collect",
        help="a test whose kernels have errors fails at its end, fails at the launch, or passes",
    )
    add("--emulate-report", type=Path, help="file for launches and findings, as JSON")
    add("--emulate-num-sms", type=_positive, help="number of SMs that tests see")
    add("--emulate-resident", type=_positive, default=4, help="number of resident CTAs")
    add("--emulate-cores", type=_positive, help="number of processor cores for a launch")


def _options(given: argparse.Namespace) -> Options:
    from .emulator.scripts.options import Options

    return Options(
        given.emulate,
        given.emulate_checks,
        given.emulate_schedules,
        given.emulate_seed,
        given.emulate_on_findings,
        given.emulate_report and given.emulate_report.absolute(),
        given.emulate_num_sms,
        given.emulate_resident,
        cores=given.emulate_cores,
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, None, None]:
    """Emulate a device before pytest captures output, and before it imports any test."""
    given = early_config.known_args_namespace
    if given.emulate is None and os.environ.get("CUTE_ATTN_EMULATE", "").strip() == "all":
        given.emulate = _default_arch()
    if given.emulate is None:
        return (yield)
    from .emulator import EmulatorUnavailable
    from .emulator.scripts import process
    from .emulator.scripts.install import install

    try:
        if not process.is_prepared():
            process.restart()
        early_config.stash[_launches] = install(_options(given))
    except EmulatorUnavailable as error:
        raise pytest.UsageError(f"--emulate: {error}") from None
    from .emulator.scripts.tensors import CudaTensors

    early_config.stash[_mode] = CudaTensors().__enter__()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """A test whose kernels have errors fails."""
    launches: Launches | None = item.config.stash.get(_launches, None)
    before = launches.marks() if launches is not None else []
    result = yield
    if launches is None or launches.options.on_findings != "collect":
        return result
    found = launches.errors_since(before)
    if found:
        from .emulator import FindingsError

        raise FindingsError(found)
    return result


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A line that counts launches and findings."""
    launches: Launches | None = config.stash.get(_launches, None)
    if launches is not None and launches.count:
        terminalreporter.write_line(launches.counts())


def pytest_unconfigure(config: pytest.Config) -> None:
    """Write the report; a worker of pytest-xdist writes its own."""
    launches: Launches | None = config.stash.get(_launches, None)
    if launches is None:
        return
    path = launches.options.report
    if path is not None:
        worker = getattr(config, "workerinput", {}).get("workerid")
        launches.write(path if worker is None else path.with_suffix(f".{worker}{path.suffix}"))
    config.stash[_mode].__exit__(None, None, None)
