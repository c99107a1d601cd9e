"""What the environment says about how operators run, read once: see docs/environment.md."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

_SCHEDULERS = {"": "static", "0": "static", "1": "clc"}  # FA_CLC -> scheduler
_SPLITS = {"": True, "0": False, "1": True}  # CUTE_ATTN_KDA_SPLIT -> whether

_on_reload: list[Callable[[], None]] = []


@dataclass(frozen=True)
class Settings:
    """The settings in force.

    Attributes:
        scheduler: what `scheduler=None` means to the attention operators: "static", or "clc" where
            `FA_CLC=1`.
        kda_split: whether `chunk_kda` may split a few long sequences to fill the GPU; not where
            `CUTE_ATTN_KDA_SPLIT=0`.
    """

    scheduler: str
    kda_split: bool


@functools.cache
def settings() -> Settings:
    """The settings in force, read from the environment on first use.

    Raises:
        ValueError: a variable has a value that means nothing; the message names it.
    """
    return Settings(
        scheduler=_SCHEDULERS[_switch("FA_CLC")], kda_split=_SPLITS[_switch("CUTE_ATTN_KDA_SPLIT")]
    )


def _switch(name: str) -> str:
    value = os.environ.get(name, "").strip()
    if value not in ("", "0", "1"):
        raise ValueError(f"{name} is {value!r}, must be 0 or 1")
    return value


def reload_settings() -> Settings:
    """Read the environment again, and return what is now in force.

    For a process that has changed `FA_CLC` or `CUTE_ATTN_KDA_SPLIT` in `os.environ` after an
    operator was called.
    """
    settings.cache_clear()
    for forget in _on_reload:
        forget()
    return settings()


def on_reload(forget: Callable[[], None]) -> None:
    """For whoever keeps what follows from the settings: call `forget` when they are read again."""
    _on_reload.append(forget)
