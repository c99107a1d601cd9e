"""KDA's state pass with other copies than its heuristics choose.

The pass reads a record of 64 KiB and 8 KiB of v for each chunk of 64 tokens, K = V = 128.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch

from ... import launch
from ...kernels.delta.chunk.spec import record_elements
from ...ops.kda import plan_chunk_kda
from .cases import has_async_proxy

CHUNK = 64
HEAD_DIM = 128
SEED = 20261122

Call = Callable[[], object]


def choices(arch: str) -> dict[str, dict[str, str]]:
    """The fields of a StatePassSpec that differ, by name; the first is the heuristics' choice."""
    every = {
        "bulk, wgmma": {"copies": "bulk", "products": "wgmma"},
        "bulk, mma.sync": {"copies": "bulk", "products": "mma"},
        "cp.async, mma.sync": {"copies": "cp_async", "products": "mma"},
    }
    if arch != "sm_90a":
        del every["bulk, wgmma"]
    if not has_async_proxy(arch):
        del every["bulk, mma.sync"]
    return every


def requests(arch: str) -> tuple[launch.Request, dict[str, launch.Request]]:
    """The kernel that writes the records, and the state pass with each choice."""
    prepare, (kernel, spec), *_ = plan_chunk_kda(arch, use_qk_l2norm_in_kernel=True, split=False)
    return prepare, {
        name: (kernel, dataclasses.replace(spec, **fields))
        for name, fields in choices(arch).items()
    }


def state_passes(
    arch: str, device: torch.device, tokens: int, heads: int
) -> tuple[dict[str, Call], dict[str, torch.Tensor]]:
    """Calls of each choice on the same records, and the outputs that the calls write."""
    shape = (1, tokens, heads)
    generator = torch.Generator(device=device).manual_seed(SEED)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator)

    q, k, v = (random(*shape, HEAD_DIM) for _ in range(3))
    g = -torch.nn.functional.softplus(random(*shape, HEAD_DIM))
    beta = torch.sigmoid(random(*shape))
    prepare, passes = requests(arch)
    chunks = -(-tokens // CHUNK)
    tiles = q.new_empty(chunks, heads, record_elements(HEAD_DIM))
    decay = torch.empty(chunks, heads, HEAD_DIM, dtype=torch.float32, device=device)
    launch.get_for(device, *prepare)(
        q,
        k,
        g,
        beta,
        None,
        None,
        None,
        tiles,
        decay,
        None,
        HEAD_DIM**-0.5,
        0.0,
        1.0,
        None,
        None,
    )
    calls: dict[str, Call] = {}
    outputs: dict[str, torch.Tensor] = {}
    for name, request in passes.items():
        function = launch.get_for(device, *request)
        o = outputs[name] = torch.full_like(v, torch.nan)
        rest = (None, None, None, None, None, None, None, 0, 1, None, None)
        calls[name] = partial(function, v, tiles, decay, o, *rest)
    return calls, outputs


def differing(outputs: dict[str, torch.Tensor]) -> list[str]:
    """A line for each choice whose bits differ from the first choice with the same products."""
    first: dict[str, torch.Tensor] = {}
    return [
        f"the state pass with {name} differs from that with other copies"
        for name, o in outputs.items()
        if not torch.equal(o, first.setdefault(name.split(", ")[1], o)) or o.isnan().any()
    ]
