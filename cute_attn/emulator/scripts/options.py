"""Options of `python -m cute_attn.emulator` and of the plugin for pytest."""

from __future__ import annotations

import argparse
import importlib.util
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..library import CHECKS
from . import hook
from .device import DEVICES, Device

DEFAULT_ARCH = "sm_90a"
TIMED = {"sm_90a": "h100", "sm_100a": "b200"}  # the GPU whose rates `--time` takes
ON_FINDINGS = ("collect", "raise", "ignore")


@dataclass(frozen=True)
class Options:
    """How a program is emulated.

    Attributes:
        arch: the architecture, a key of `DEVICES`.
        checks: "all", "none", or names of checks.
        schedules: the number of schedules under which each launch runs.
        seed: seed of the random schedules.
        on_findings: "raise" errors at the launch, "collect" them for the end, or "ignore" them
            in the exit status.
        report: file for a report in JSON.
        num_sms: the number of SMs that the program sees.
        resident: the number of CTAs that are resident at a time.
        time: whether the time of each launch on a GPU is predicted.
        cores: the number of processor cores for a launch; None: as an `Emulator` chooses.
    """

    arch: str = DEFAULT_ARCH
    checks: str | tuple[str, ...] = "all"
    schedules: int = 1
    seed: int = 0
    on_findings: str = "collect"
    report: Path | None = None  # absolute, since a program may change its directory
    num_sms: int | None = None
    resident: int = 4
    time: bool = False
    cores: int | None = None

    @property
    def device(self) -> Device:
        """The device that the program sees."""
        device = DEVICES[self.arch]
        return device if self.num_sms is None else replace(device, num_sms=self.num_sms)


def arch(text: str) -> str:
    """An architecture, as an option's value."""
    if text not in DEVICES:
        hint = f"; did you mean {text}a?" if f"{text}a" in DEVICES else ""
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(DEVICES)}{hint}")
    return text


def checks(text: str) -> str | tuple[str, ...]:
    """Names of checks, as an option's value."""
    if text in ("all", "none"):
        return text
    names = tuple(text.split(","))
    for name in names:
        if name not in CHECKS:
            raise argparse.ArgumentTypeError(
                f"{name!r} is neither all, none nor a check: {', '.join(CHECKS)}"
            )
    return names


def positive(text: str) -> int:
    """A positive integer, as an option's value."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def default_arch() -> str:
    """The architecture where no option names one."""
    return os.environ.get("CUTE_ATTN_ARCH", "").strip() or DEFAULT_ARCH


class _Hook(argparse.Action):
    """Installs or removes the hook of CUTE_ATTN_EMULATE=all, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(hook.install_hook() if self.const == "install" else hook.remove_hook())
        parser.exit()


def parse(arguments: list[str] | None = None) -> tuple[Options, str | None, list[str]]:
    """Options, the module of `-m` if given, and the script or module with its arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m cute_attn.emulator",
        usage="%(prog)s [OPTION ...] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description="Run a CuTe DSL program without a GPU, and check its kernels.",
        epilog="The exit status is the program's, or 3 if the program succeeds but a kernel has "
        "findings of severity error.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--arch",
        type=arch,
        default=default_arch(),
        metavar="ARCH",
        help=f"architecture: {', '.join(DEVICES)} (default: CUTE_ATTN_ARCH, else {DEFAULT_ARCH})",
    )
    parser.add_argument(
        "--checks",
        type=checks,
        default="all",
        help="all, none, or names of checks, separated by commas (default: all)",
    )
    parser.add_argument(
        "--schedules",
        type=positive,
        default=1,
        metavar="N",
        help="run each launch under N schedules: fair, adversarial, then starving and random "
        "ones in turn (default: 1)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the random schedules (default: 0)"
    )
    parser.add_argument(
        "--on-findings",
        choices=ON_FINDINGS,
        default="collect",
        help="raise: a launch with errors raises FindingsError; collect: errors are shown at the "
        "end, and the exit status tells; ignore: the exit status does not (default: collect)",
    )
    parser.add_argument(
        "--num-sms",
        type=positive,
        metavar="N",
        help="number of SMs that the program sees (default: as the GPU has)",
    )
    parser.add_argument(
        "--resident",
        type=positive,
        default=4,
        metavar="N",
        help="number of CTAs that are resident at a time (default: 4)",
    )
    parser.add_argument(
        "--cores",
        type=positive,
        metavar="N",
        help="number of processor cores for a launch whose clusters share nothing (default: "
        "CUTE_ATTN_EMULATOR_CORES, else all, at most 8)",
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write launches and findings to FILE, as JSON"
    )
    parser.add_argument(
        "--time",
        action="store_true",
        help="predict the time of each launch on an H100 (sm_90a) or B200 (sm_100a); in a checkout",
    )
    for what, text in (
        ("install", "let programs that start with CUTE_ATTN_EMULATE=all run in the emulator"),
        ("remove", "undo --install-hook"),
    ):
        parser.add_argument(f"--{what}-hook", action=_Hook, nargs=0, const=what, help=text)
    parser.add_argument("-m", dest="module", action="store_true", help="run a module")
    parser.add_argument("program", metavar="SCRIPT", help="the program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    given = parser.parse_args(arguments)
    if given.time and given.arch not in TIMED:
        known = " and ".join(TIMED)
        parser.error(f"--time is for --arch {known}, and the architecture is {given.arch}")
    if given.time and importlib.util.find_spec("cute_attn.timing") is None:
        parser.error("--time needs a checkout of cute_attn, which has the rates of GPUs")
    options = Options(
        given.arch,
        given.checks,
        given.schedules,
        given.seed,
        given.on_findings,
        given.report and given.report.absolute(),
        given.num_sms,
        given.resident,
        given.time,
        given.cores,
    )
    program = [given.program, *given.arguments]
    return options, given.program if given.module else None, program
