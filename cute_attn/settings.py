"""What the environment says about how operators run, read once: see docs/environment.md."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

_SCHEDULERS = {"": "static", "0": "static", "1": "clc"}  # FA_CLC -> scheduler

_on_reload: list[Callable[[], None]] = []


@dataclass(frozen=True)
class Settings:
    """The settings in force.

    Attributes:
        scheduler: what `scheduler=None` means to the attention operators: "static", or "clc" where
            `FA_CLC=1`.
    """

    scheduler: str


@functools.cache
def settings() -> Settings:
    """The settings in force, read from the environment on first use.

    Raises:
        ValueError: a variable has a value that means nothing; the message names it.
    """
    value = os.environ.get("FA_CLC", "").strip()
    if value not in _SCHEDULERS:
        raise ValueError(f"FA_CLC is {value!r}, must be 0 or 1")
    return Settings(scheduler=_SCHEDULERS[value])


def reload_settings() -> Settings:
    """Read the environment again, and return what is now in force.

    For a process that has changed `os.environ["FA_CLC"]` after an operator was called.
    """
    settings.cache_clear()
    for forget in _on_reload:
        forget()
    return settings()


def on_reload(forget: Callable[[], None]) -> None:
    """For whoever keeps what follows from the settings: call `forget` when they are read again."""
    _on_reload.append(forget)
