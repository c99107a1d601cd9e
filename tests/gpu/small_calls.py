"""A few small calls of every operator that runs on this GPU, for `test_sanitizers`.

`python -m tests.gpu.small_calls GROUP` makes those of a group. With `compile` in place of it,
kernels do nothing, and those that all calls ask for are compiled by all cores.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import cute_attn
from cute_attn import launch
from cute_attn.families import FAMILIES
from cute_attn.launch import Request
from tests.gpu.named_calls import Group

_BY_FAMILY: list[dict[str, Group]] = [pkgutil.resolve_name(f.small_calls) for f in FAMILIES]
# The calls of a process. Families may share one: most of a process's time is spent starting.
GROUPS = {
    name: [groups[name] for groups in _BY_FAMILY if name in groups]
    for name in dict.fromkeys(name for groups in _BY_FAMILY for name in groups)
}


@contextmanager
def idle_kernels() -> Iterator[list[Request]]:
    """Within it kernels do nothing; the list gets those that were asked for."""
    wanted: dict[Request, None] = {}
    found: list[Request] = []

    def get_for(_: torch.device, *request: Any) -> Callable[..., None]:
        wanted[request] = None  # type: ignore[index]
        return lambda *_: None

    with mock.patch.object(launch, "get_for", get_for):
        yield found
    found += wanted


def make_calls(group: str, device: str) -> None:
    for calls in GROUPS[group]:
        for title, call in calls(device):
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            print(title, flush=True)
    print(f"done: {group}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    (group,) = sys.argv[1:]
    if group != "compile":
        make_calls(group, "cuda")
        return
    with idle_kernels() as wanted:
        for each in GROUPS:
            make_calls(each, "cuda")
    cute_attn.warmup(wanted)


if __name__ == "__main__":
    main()
