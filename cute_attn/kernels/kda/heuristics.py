"""Which of the chunked KDA kernels run, and with which tuning."""

from __future__ import annotations

from typing import Any

from .spec import record_elements, smem_bytes


def fused(*, disable_recompute: bool, return_intermediate_states: bool) -> bool:
    """Whether the two kernels of the fused path run, rather than the stages one by one.

    They write half of the bytes, for any shape. What the stages leave behind is asked for by
    `return_intermediate_states`, and is what `disable_recompute` will keep for a backward pass.
    """
    return not (disable_recompute or return_intermediate_states)


def recurrence_config(*, arch: str, head_dim_k: int, head_dim_v: int) -> dict[str, Any]:
    """The tuning fields of a RecurrenceSpec: the widest tile with two chunks in shared memory."""
    available = smem_bytes(arch)
    for tile_v, num_stages in ((64, 2), (32, 2), (64, 1)):
        chunk = 2 * (record_elements(head_dim_k) + 64 * tile_v)  # with its v
        operands = 2 * tile_v * (head_dim_k + 64)  # the state, and v_new
        if num_stages * chunk + operands <= available:
            break
    return {"tile_v": tile_v, "num_stages": num_stages, "products": "mma"}


def delta_h_config(*, arch: str, head_dim_k: int, head_dim_v: int) -> dict[str, Any]:
    """The tuning fields of a DeltaHSpec."""
    config = recurrence_config(arch=arch, head_dim_k=head_dim_k, head_dim_v=head_dim_v)
    return {name: config[name] for name in ("tile_v", "num_stages")}


def output_config(*, arch: str, head_dim_k: int, head_dim_v: int) -> dict[str, Any]:
    """The tuning fields of an OutputSpec."""
    del arch, head_dim_k, head_dim_v
    return {"tile_v": 64}
