"""Processes that are the ranks of a group, each with a GPU and NCCL, and a limit for all.

The processes stay for many tests, because each takes seconds to import torch and to make a group.
A test that fails ends its processes, and the next test starts new ones.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cute_attn.bench.attention.context_parallel import free_port

TIMEOUT = 60.0  # seconds of a process group
LIMIT = 240.0  # seconds of a function on all ranks, with the compilation of kernels
# A rank whose group's time is over ends at once, without a record of NCCL's last messages.
ENDS_AT_ONCE = {
    "TORCH_FR_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
}


class Ranks:
    """The processes of a group."""

    def __init__(self, world: int, timeout: float = TIMEOUT) -> None:
        context, port = mp.get_context("spawn"), free_port()
        pairs = [context.Pipe() for _ in range(world)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=_serve, args=(theirs, rank, world, port, timeout), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()  # so that a rank's end is the end of its pipe

    def send(self, function: Callable[..., None], *arguments: Any) -> None:
        for pipe in self.pipes:
            pipe.send((function, arguments))

    def results(self, limit: float) -> list[str | None]:
        """For each rank, None or what it raised. Ends at the first error, or after the limit."""
        found: list[str | None] = [None] * len(self.pipes)
        waiting, end = dict(enumerate(self.pipes)), time.monotonic() + limit
        while waiting:
            ready = wait([*waiting.values()], max(0.0, end - time.monotonic()))
            if not ready:
                for rank in waiting:
                    os.kill(int(self.processes[rank].pid or 0), signal.SIGUSR1)
                time.sleep(1.0)  # the ranks print where they wait
                raise AssertionError(f"ranks {sorted(waiting)} still run after {limit:.0f} s")
            for rank, pipe in [(rank, x) for rank, x in waiting.items() if x in ready]:
                del waiting[rank]
                try:
                    found[rank] = pipe.recv()
                except EOFError:
                    self.processes[rank].join(5.0)
                    found[rank] = f"ended with exit code {self.processes[rank].exitcode}"
                if found[rank] is not None:
                    return found
        return found

    def exit_codes(self, limit: float) -> list[int | None]:
        """The exit code of each rank, each of which ends by itself; None: not within `limit` s."""
        end = time.monotonic() + limit
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


_kept: dict[int, Ranks] = {}


def on_ranks(world: int, function: Callable[..., None], *arguments: Any) -> None:
    """Run a function on every rank.

    Raises:
        AssertionError: a rank raised, or ranks still run after `LIMIT` seconds. Each of these ranks
            has printed where it waits.
    """
    if world not in _kept:
        _kept[world] = Ranks(world)
    ranks = _kept[world]
    try:
        ranks.send(function, *arguments)
        failed = [f"rank {i}: {x}" for i, x in enumerate(ranks.results(LIMIT)) if x is not None]
        assert not failed, "\n".join(failed)
    except BaseException:
        _kept.pop(world).close()
        raise


def close() -> None:
    """End all processes that `on_ranks` has started."""
    while _kept:
        _kept.popitem()[1].close()


def exit_codes(
    world: int, function: Callable[..., None], *, timeout: float, limit: float
) -> list[int | None]:
    """The exit code of each rank of a new group, whose function ends the rank."""
    ranks = Ranks(world, timeout)
    try:
        ranks.send(function)
        return ranks.exit_codes(limit)
    finally:
        ranks.close()


def _serve(pipe: Any, rank: int, world: int, port: int, timeout: float) -> None:
    faulthandler.register(signal.SIGUSR1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **ENDS_AT_ONCE}
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device, timeout=limit)
    while True:
        function, arguments = pipe.recv()
        try:
            function(*arguments)
            torch.cuda.synchronize()
            pipe.send(None)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        gc.collect()  # graphs and groups in circles
        torch.cuda.empty_cache()
