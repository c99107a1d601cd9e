"""Processes that are the ranks of a group, each with a GPU and NCCL, and a limit for all."""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, spawn

from cute_attn.bench.attention.context_parallel import free_port

TIMEOUT = 60.0  # seconds of a process group
LIMIT = 240.0  # seconds of all ranks, with the compilation of kernels


def on_ranks(
    world: int, function: Callable[..., None], *arguments: Any, timeout: float = TIMEOUT
) -> None:
    """Run a function on every rank; raises what a rank raises, with the rank's number.

    Raises:
        AssertionError: ranks still run after `LIMIT` seconds. Each of these ranks has printed where
            it waits.
    """
    ranks = started(world, function, *arguments, timeout=timeout)
    end = time.monotonic() + LIMIT
    try:
        while not ranks.join(timeout=1.0):
            running = [rank for rank, x in enumerate(ranks.processes) if x.is_alive()]
            assert time.monotonic() < end, f"ranks {running} still run after {LIMIT:.0f} s"
    finally:
        end_all(ranks)


def exit_codes(
    world: int, function: Callable[..., None], *arguments: Any, timeout: float, limit: float
) -> list[int | None]:
    """The exit code of each rank, each of which ends by itself; None: not within `limit` s."""
    ranks = started(world, function, *arguments, timeout=timeout)
    end = time.monotonic() + limit
    try:
        for process in ranks.processes:
            process.join(max(0.0, end - time.monotonic()))
        return [process.exitcode for process in ranks.processes]
    finally:
        end_all(ranks)


def started(
    world: int, function: Callable[..., None], *arguments: Any, timeout: float
) -> ProcessContext:
    """Processes that run a function; the caller waits for them."""
    given = world, free_port(), timeout, function, arguments
    found: ProcessContext = spawn(_rank, given, nprocs=world, join=False)
    return found


def end_all(ranks: ProcessContext) -> None:
    for process in ranks.processes:
        process.kill()
        process.join()


def _rank(
    rank: int, world: int, port: int, timeout: float, function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    faulthandler.dump_traceback_later(LIMIT - 10.0)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device, timeout=limit)
    function(*arguments)
    torch.cuda.synchronize()
    dist.destroy_process_group()
