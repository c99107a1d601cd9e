"""A module of another package without what its packages import, for programs beside this file."""

import importlib
import sys
import types
from pathlib import Path


def bare_package(name: str, folder: Path) -> None:
    """Let modules of a package be imported although its `__init__` is not run."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


def module_of(folder: Path, name: str) -> types.ModuleType:
    """The module of this name, whose outermost package lies in `folder`. Its packages are bare."""
    packages = name.split(".")[:-1]
    for depth in range(1, len(packages) + 1):
        bare_package(".".join(packages[:depth]), folder.joinpath(*packages[1:depth]))
    return importlib.import_module(name)
