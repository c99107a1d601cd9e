"""The kernels of calls, compiled at once before tests run the calls.

A rank would compile the kernels of its calls one by one. Here every call runs once in a process of
its own, on each rank of a group without messages, and with functions that launch nothing in place
of kernels. So the process learns which kernels the calls take.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import cute_attn
from cute_attn import launch

JOBS = 16


def compiled(function: Callable[[], Any], worlds: tuple[int, ...] = (2,)) -> None:
    """Compile the kernels of all calls that a function makes, in a process of its own."""
    process = mp.get_context("spawn").Process(target=_compile, args=(function, worlds))
    process.start()
    process.join()
    assert process.exitcode == 0, f"the process ended with exit code {process.exitcode}"


def _compile(function: Callable[[], Any], worlds: tuple[int, ...]) -> None:
    jobs = min(JOBS, os.cpu_count() or 1)
    cute_attn.warmup(kernels_of(function, worlds), jobs=jobs, progress=False)


def kernels_of(function: Callable[[], Any], worlds: tuple[int, ...]) -> list[launch.Request]:
    """The kernels of a function's calls, on a GPU or for an H100."""
    found: dict[launch.Request, None] = {}

    def get_for(device: torch.device, kernel: Any, spec: Any) -> Callable[..., None]:
        found[kernel, spec] = None
        return lambda *_: None

    gpu = torch.cuda.is_available()
    emulating: Any = nullcontext() if gpu else cute_attn.emulated("sm_90a", _h100())
    with mock.patch.object(launch, "get_for", get_for), emulating:
        for world in worlds:
            for rank in range(world):
                with without_messages(rank, world):
                    function()
    return list(found)


def _h100() -> Any:
    from cute_attn.emulator import Emulator

    return Emulator(num_sms=132)


@contextmanager
def without_messages(rank: int, world: int) -> Iterator[None]:
    """This process as one rank of a group, in which no messages arrive."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from cute_attn.distributed import api, exchange, few_keys, gather, heads, plan, ring, spans

    def send(*_: Any) -> exchange.Messages:
        return exchange.Messages([], None)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with ExitStack() as patches:
            for module in (gather, heads, plan, ring, spans):
                patches.enter_context(mock.patch.object(module, "send", send))
            patches.enter_context(mock.patch.object(few_keys, "exchange_rows", send))
            for module in (api, plan):
                patches.enter_context(mock.patch.object(module, "compare"))
            yield
    finally:
        dist.destroy_process_group()
