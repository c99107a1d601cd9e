"""The command line `python -m cute_attn`: the package's version, environment and files.

`python -m cute_attn.cache` looks after compiled kernels.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from . import __version__, environment
from .settings import Settings, settings

PACKAGE = Path(__file__).parent

# Distributions that may cause a fault, besides the distributions in reports of benchmarks.
OTHERS = (
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "platformdirs",
    "pyelftools",
    "rich",
    "numpy",
    "transformers",
    "vllm",
    "sglang",
)
VARIABLES = ("CUTE_ATTN_", "CUTE_DSL_", "CUDA_VISIBLE_DEVICES", "FA_CLC", "FLA_CUTE_ATTN")
SETTINGS = [name for name, kind in vars(Settings).items() if isinstance(kind, cached_property)]


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if "run" not in options:
        parser.print_help()
        return 0
    status: int = options.run(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cute_attn",
        description="Say what a bug report needs, or where files of this package lie.",
        epilog="See also: python -m cute_attn.cache --help, python -m cute_attn.emulator --help.",
    )
    parser.add_argument("--version", action="version", version=f"cute_attn {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    summary = "print versions, GPUs and settings, for a bug report"
    env = commands.add_parser("env", help=summary, description=summary)
    env.add_argument("--json", action="store_true", help="print JSON")
    env.set_defaults(run=_env)
    summary = "print the paths of the spec files of models, for python -m cute_attn.cache build"
    models = commands.add_parser("models", help=summary, description=summary)
    models.add_argument("name", nargs="?", help="print the path of this one alone, such as vllm")
    models.set_defaults(run=_models)
    summary = "write the package as a kernel of Hugging Face kernels, for get_local_kernel"
    kernel = commands.add_parser("kernel-package", help=summary, description=summary)
    kernel.add_argument("directory", type=Path, help="where to write build/torch-cuda")
    kernel.add_argument("--backend", default="cuda", help="cuda, or cpu for the emulator")
    kernel.set_defaults(run=_kernel_package)
    return parser


def _models(options: argparse.Namespace) -> int:
    paths = {path.stem: path for path in sorted((PACKAGE / "models").glob("*.toml"))}
    chosen = list(paths.values())
    if options.name is not None:
        name = options.name.removesuffix(".toml")
        if name not in paths:
            print(f"error: there is no {name}.toml, only {', '.join(paths)}", file=sys.stderr)
            return 2
        chosen = [paths[name]]
    print(*chosen, sep="\n")
    return 0


def _kernel_package(options: argparse.Namespace) -> int:
    try:
        print(_part("kernel_package").write(options.directory, options.backend))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _env(options: argparse.Namespace) -> int:
    facts = dict(_facts())
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        print(*(f"{name}: {value}" for name, value in facts.items()), sep="\n")
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    """Return (name, value) of each line that `env` prints."""
    yield "cute_attn", f"{__version__}, {PACKAGE}"
    yield "commit", _said(lambda: environment.source_commit() or "not of a checkout")
    yield "Python", f"{platform.python_version()}, {sys.executable}"
    yield "platform", f"{platform.platform()}, {os.cpu_count()} CPUs, {environment.cpu_name()}"
    for name in (*environment.PACKAGES, *environment.PEERS, *OTHERS):
        yield name, environment.version_of(name) or "not installed"
    yield "torch says", _said(_torch)
    releases = environment.nvidia_smi("driver_version")
    yield "driver", releases[0] if releases else "unknown (nvidia-smi does not tell)"
    yield "driver's CUDA", _said(_cuda_of_driver)
    for number, line in enumerate(environment.nvidia_smi("name,compute_cap,memory.total")):
        yield f"GPU {number}", line
    yield "architecture", _said(lambda: _part("cache.arch").current_arch())
    yield "runtime library", _said(lambda: _part("cache.toolchain").runtime_library().path)
    yield "C compiler", _said(lambda: _part("emulator.build").compiler().identity.splitlines()[0])
    yield "cache directory", _said(lambda: _part("cache.settings").cache_directory())
    yield "cache directory's limit", _said(lambda: f"{_part('cache.settings').max_bytes()} bytes")
    for name in SETTINGS:
        yield f"setting {name}", _said(partial(getattr, settings(), name))
    for name in sorted(os.environ):
        if name.startswith(VARIABLES):
            yield f"variable {name}", os.environ[name]


def _said(find: Callable[[], object]) -> str:
    """The result of `find`, or its error as text, because a broken part must not hide the other
    parts."""
    try:
        return str(find())
    except Exception as error:
        return f"unknown ({type(error).__name__}: {' '.join(str(error).split())})"


def _part(name: str) -> Any:
    """A module of this package, which may be missing: cute_attn.cache is missing before an
    install."""
    return importlib.import_module(f".{name}", __package__)


def _torch() -> str:
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"{torch.__version__}, built for CUDA {torch.version.cuda}, GPUs it sees: {devices}"


def _cuda_of_driver() -> str:
    version = int(_part("cache.driver").ask("cuDriverGetVersion"))
    return f"{version // 1000}.{version % 1000 // 10}"


if __name__ == "__main__":
    sys.exit(main())
