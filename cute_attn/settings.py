"""Settings of the operators from environment variables, read once: see docs/environment.md."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

_SCHEDULER_OF_FA_CLC = {"": "static", "0": "static", "1": "clc"}

WORKSPACE_MIB = 2048

_on_reload: list[Callable[[], None]] = []


class Settings:
    """The settings in force. Each setting is read from the environment at its first use.

    Attributes:
        scheduler: the meaning of `scheduler=None` in the attention operators: "clc" with
            `FA_CLC=1`, else "static".
        kda_split: whether `chunk_kda` may split a few long sequences to fill the GPU; False with
            `CUTE_ATTN_KDA_SPLIT=0`.
        workspace_bytes: upper limit of a workspace whose only use is to make a call faster;
            `CUTE_ATTN_WORKSPACE_MIB` in MiB.
        emulate: whether operators run CPU tensors in the emulator; True with `CUTE_ATTN_EMULATE=1`.
            With `all` the whole process runs there, and its CUDA tensors.
        server_kda: whether the plugins for vLLM and SGLang replace KDA in layers; True with
            `CUTE_ATTN_SERVER_KDA=1`.
        server_gdn: likewise for the Gated Delta Net; True with `CUTE_ATTN_SERVER_GDN=1`.

    Raises:
        ValueError: at the first use of a setting whose variable has an invalid value; the message
            names the variable and the valid values.
    """

    @functools.cached_property
    def scheduler(self) -> str:
        return _SCHEDULER_OF_FA_CLC[_switch("FA_CLC")]

    @functools.cached_property
    def kda_split(self) -> bool:
        return _switch("CUTE_ATTN_KDA_SPLIT") != "0"

    @functools.cached_property
    def workspace_bytes(self) -> int:
        name = "CUTE_ATTN_WORKSPACE_MIB"
        value = os.environ.get(name, "").strip()
        if value and not (value.isascii() and value.isdecimal()):
            raise ValueError(f"{name} is {value!r}, must be a number of MiB, at least 0")
        return int(value or WORKSPACE_MIB) * 2**20

    @functools.cached_property
    def emulate(self) -> bool:
        name = "CUTE_ATTN_EMULATE"
        if os.environ.get(name, "").strip() != "all":
            return _switch(name) == "1"
        if os.environ.get("_CUTE_ATTN_EMULATED_PROCESS") != str(os.getpid()):
            raise ValueError(
                f"{name} is 'all', but the emulator did not start this process: install its hook "
                "by python -m cute_attn.emulator --install-hook, or run the program by "
                "python -m cute_attn.emulator"
            )
        return False  # tensors on the emulated device are CUDA tensors

    @functools.cached_property
    def server_kda(self) -> bool:
        return _switch("CUTE_ATTN_SERVER_KDA") == "1"

    @functools.cached_property
    def server_gdn(self) -> bool:
        return _switch("CUTE_ATTN_SERVER_GDN") == "1"

    def __repr__(self) -> str:
        return (
            f"Settings(scheduler={self.scheduler!r}, kda_split={self.kda_split}, "
            f"workspace_bytes={self.workspace_bytes}, emulate={self.emulate}, "
            f"server_kda={self.server_kda}, server_gdn={self.server_gdn})"
        )


@functools.cache
def settings() -> Settings:
    """The settings in force."""
    return Settings()


def _switch(name: str) -> str:
    value = os.environ.get(name, "").strip()
    if value not in ("", "0", "1"):
        raise ValueError(f"{name} is {value!r}, must be 0 or 1")
    return value


def reload_settings() -> Settings:
    """Read the environment again, and return the settings now in force.

    Call this after changing `FA_CLC`, `CUTE_ATTN_KDA_SPLIT`, `CUTE_ATTN_WORKSPACE_MIB`,
    `CUTE_ATTN_EMULATE`, `CUTE_ATTN_SERVER_KDA` or `CUTE_ATTN_SERVER_GDN` in `os.environ`, if an
    operator was called before.

    Raises:
        ValueError: a variable has an invalid value; the message names the variable.
    """
    settings.cache_clear()
    for forget in _on_reload:
        forget()
    now = settings()
    # An invalid value raises.
    _ = now.scheduler, now.kda_split, now.workspace_bytes, now.emulate
    _ = now.server_kda, now.server_gdn
    return now


def on_reload(forget: Callable[[], None]) -> None:
    """Call `forget`, which drops values derived from the settings, at each reload."""
    _on_reload.append(forget)
