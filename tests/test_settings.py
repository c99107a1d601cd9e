"""Settings in the environment, and the emulator's switch."""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn import emulation, launch
from cute_attn.cache import arch
from cute_attn.kernels.lightning import table
from cute_attn.settings import settings

from .ops.operators import OPERATORS

SWITCHES = (
    "FA_CLC",
    "CUTE_ATTN_KDA_SPLIT",
    "CUTE_ATTN_EMULATE",
    "CUTE_ATTN_SERVER_KDA",
    "CUTE_ATTN_SERVER_GDN",
)
WORKSPACE = "CUTE_ATTN_WORKSPACE_MIB"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Sets variables of the environment, and makes the package read them again."""

    def forget() -> None:
        for name in (*SWITCHES, WORKSPACE, "CUTE_ATTN_ARCH"):
            monkeypatch.delenv(name, raising=False)
        cute_attn.reload_settings()
        arch.forget()

    forget()
    yield monkeypatch
    forget()


def read_again() -> None:
    """Read the settings again, as in a new process."""
    settings.cache_clear()
    emulation._emulation_of_environment.cache_clear()


def test_a_program_with_all_is_emulated_by_the_hook(environment: pytest.MonkeyPatch):
    environment.setenv("CUTE_ATTN_EMULATE", "all")
    with pytest.raises(ValueError, match="the emulator did not start this process"):
        cute_attn.reload_settings()
    environment.setenv("_CUTE_ATTN_EMULATED_PROCESS", str(os.getpid()))
    assert not cute_attn.reload_settings().emulate


def test_the_workspace_is_a_number_of_mib(environment: pytest.MonkeyPatch):
    assert settings().workspace_bytes == 2**31
    for value, mib in {"": 2048, "0": 0, " 3 ": 3}.items():
        environment.setenv(WORKSPACE, value)
        assert cute_attn.reload_settings().workspace_bytes == mib * 2**20
    for value in ("-1", "2G", "1.5", "²"):
        environment.setenv(WORKSPACE, value)
        with pytest.raises(ValueError, match=f"{WORKSPACE} is '{value}', must be a number of MiB"):
            cute_attn.reload_settings()


@pytest.mark.parametrize("name", SWITCHES)
def test_a_bad_switch_is_named_where_settings_are_read_again(
    environment: pytest.MonkeyPatch, name: str
):
    for value in ("no", "yes", "true", "2", "static"):
        environment.setenv(name, value)
        with pytest.raises(ValueError, match=f"{name} is '{value}', must be 0 or 1"):
            cute_attn.reload_settings()


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("FA_CLC", "flash_attn_func"),
        ("CUTE_ATTN_KDA_SPLIT", ("chunk_kda", "chunk_gated_delta_rule")),
        ("CUTE_ATTN_EMULATE", ""),
        ("CUTE_ATTN_SERVER_KDA", ""),
        ("CUTE_ATTN_SERVER_GDN", ""),
    ],
)
def test_a_bad_switch_concerns_only_who_needs_it(
    environment: pytest.MonkeyPatch, name: str, of: str | tuple[str, ...]
):
    environment.setattr(emulation.Emulation, "function", lambda *_: lambda *arguments: None)
    environment.setenv(name, "no")
    read_again()
    for operator, it in OPERATORS.items():
        with torch.no_grad(), cute_attn.emulated(it.arch):
            if operator.startswith(of) and of:
                with pytest.raises(ValueError, match=f"{name} is 'no', must be 0 or 1"):
                    it.call()
            elif not (name == "FA_CLC" and operator.startswith("flash_attn")):
                it.call()


@pytest.mark.parametrize(("value", "runs"), [("", False), ("0", False), ("1", True), (" 1 ", True)])
def test_the_switch_of_emulation(environment: pytest.MonkeyPatch, value: str, runs: bool):
    environment.setenv("CUTE_ATTN_EMULATE", value)
    cute_attn.reload_settings()
    current = emulation.current_emulation()
    assert (current is not None) == runs
    assert current is None or current.arch == "sm_90a"


def test_a_bad_switch_of_emulation_is_an_error_of_calls_on_the_cpu(
    environment: pytest.MonkeyPatch,
):
    environment.setenv("CUTE_ATTN_EMULATE", "no")
    read_again()
    with pytest.raises(ValueError, match="CUTE_ATTN_EMULATE is 'no', must be 0 or 1"):
        OPERATORS["kda_decode"].call()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("sm_70", NotImplementedError, "compute capability 7.0 is not supported: 8.0"),
        ("sm_75", NotImplementedError, "compute capability 7.5 is not supported: 8.0"),
        ("hopper", ValueError, "'hopper' is not an architecture: write for example sm_90a"),
        ("90", ValueError, "'90' is not an architecture"),
    ],
)
def test_architectures_that_there_are_none_of(
    environment: pytest.MonkeyPatch, name: str, error: type[Exception], message: str
):
    with pytest.raises(error, match=message), cute_attn.emulated(name):
        pass
    environment.setenv("CUTE_ATTN_ARCH", name)
    arch.forget()
    with pytest.raises(error, match=message):
        launch.arch_of(0)
    with pytest.raises(error, match=f"CUTE_ATTN_ARCH is '{name}': {message}"), cute_attn.emulated():
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5,), "arch must be a str such as 'sm_90a', got int"),
        (("sm_90a", 5), "emulator must be an Emulator, got int"),
        ((["sm_90a"],), "arch must be a str such as 'sm_90a', got list"),
    ],
)
def test_what_emulated_cannot_use(arguments: tuple[Any, ...], message: str):
    with pytest.raises(TypeError, match=message), cute_attn.emulated(*arguments):
        pass


def test_threads_see_the_emulator_in_a_copy_of_the_context():
    seen: list[emulation.Emulation | None] = []

    def look() -> None:
        seen.append(emulation.current_emulation())

    with cute_attn.emulated("sm_90a") as emulator:
        context = contextvars.copy_context()
        for target, arguments in ((look, ()), (context.run, (look,))):
            thread = threading.Thread(target=target, args=arguments)
            thread.start()
            thread.join()
    alone, carried = seen
    assert alone is None
    assert carried is not None and carried.emulator is emulator


def test_two_threads_load_a_function_once(monkeypatch: pytest.MonkeyPatch):
    loads: list[Any] = []
    both = threading.Barrier(2)

    class Loader:
        def load(self, entry: Any) -> Any:
            loads.append(entry)
            time.sleep(0.05)
            return lambda: None

    monkeypatch.setattr(emulation.cache, "compile", lambda *_, **__: "entry")
    shared = emulation.Emulation(Loader(), "sm_90a")  # type: ignore[arg-type]
    found: list[Any] = []

    def ask() -> None:
        both.wait()
        found.append(shared.function(table.DECODE, "spec"))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == ["entry"]
    assert found[0] is found[1]


def test_a_call_outside_says_how_to_emulate():
    with pytest.raises(ValueError, match=r"must be on a CUDA device, or .* cute_attn\.emulated"):
        OPERATORS["kda_decode"].call()
