"""Matrix products of emulated CUDA tensors.

On a GPU, products of 16-bit types are summed in float32; some of torch's kernels for the CPU round
partial sums. Products of block-scaled types have no kernel for the CPU at all.
"""

from __future__ import annotations

from typing import Any

import torch

_PRODUCTS = {
    torch.einsum,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.Tensor.matmul,
    torch.Tensor.mm,
    torch.Tensor.bmm,
    torch.Tensor.__matmul__,
    torch.nn.functional.linear,
}
_HALVES = (torch.float16, torch.bfloat16)
_BLOCK_SCALES = tuple(
    getattr(torch, name) for name in ("float8_e4m3fn", "float8_e8m0fnu") if hasattr(torch, name)
)
_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)
_FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_device: bool) -> Any:
    """Call a function of torch; products of device tensors as a GPU computes them."""
    if not on_device:
        return func(*args, **kwargs)
    if func in _PRODUCTS and "out" not in kwargs:
        tensors = list(_flat(args))
        if tensors and all(tensor.dtype in _HALVES for tensor in tensors):
            return func(*_widened(args), **kwargs).to(tensors[0].dtype)
    if func is getattr(torch, "_scaled_mm", None):
        scale = kwargs.get("scale_a", args[2] if len(args) > 2 else None)
        if scale is not None and scale.dtype in _BLOCK_SCALES:
            return _scaled_mm(*args, **kwargs)
    return func(*args, **kwargs)


def _flat(values: Any) -> Any:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _flat(value)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_widened, value))
    return value


def _scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """`torch._scaled_mm` with a scale for each block of 16 or 32 values of K."""
    block = 16 if scale_a.dtype == torch.float8_e4m3fn else 32
    product = _scaled(a, scale_a, block) @ _scaled(b.mT, scale_b, block).mT
    if bias is not None:
        product = product + bias.float()
    return product.to(out_dtype or torch.bfloat16)


def _scaled(rows: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    values = _values(rows)
    count, k = values.shape
    factors = _unblocked(scales, count, k // block)
    return (values.view(count, -1, block) * factors[..., None]).view(count, k)


def _values(rows: torch.Tensor) -> torch.Tensor:
    if rows.dtype != _FLOAT4:
        return rows.float()
    table = torch.tensor([*_FLOAT4_VALUES, *(-value for value in _FLOAT4_VALUES)])
    pairs = rows.view(torch.uint8).long()
    return torch.stack([table[pairs & 15], table[pairs >> 4]], -1).flatten(-2)


def _unblocked(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales as rows and columns, from cuBLAS's order in tiles of 128 x 4."""
    if scales.dtype == torch.float8_e4m3fn:
        values = scales.float().flatten()
    else:  # exponents
        values = torch.exp2(scales.view(torch.uint8).float() - 127).flatten()
    tiles = -(-rows // 128), -(-columns // 4)
    ordered = values[: tiles[0] * tiles[1] * 512].view(*tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return ordered.reshape(tiles[0] * 128, tiles[1] * 4)[:rows, :columns]
