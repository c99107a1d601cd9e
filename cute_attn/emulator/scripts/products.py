"""Matrix products of emulated CUDA tensors.

Programs compare a kernel's result with torch's, some of them bit for bit. So products of 16-bit
types are summed as the device's tensor cores sum them, in the order of k. Products of block-scaled
types have no kernel for the CPU at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..library import engine

arch = 90
"""The device's architecture, which `tensors.install` sets."""

_HALVES = (torch.float16, torch.bfloat16)
_EXACT = 1 << 29
"""A product with more multiplications is summed in float32 in any order."""
_BLOCK_SCALES = tuple(
    getattr(torch, name) for name in ("float8_e4m3fn", "float8_e8m0fnu") if hasattr(torch, name)
)
_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)
_PRODUCTS = {
    torch.einsum,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.baddbmm,
    torch.addmm,
    torch.Tensor.matmul,
    torch.Tensor.mm,
    torch.Tensor.bmm,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
    torch.nn.functional.linear,
    torch.nn.functional.scaled_dot_product_attention,
}
_FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class TensorCores(TorchDispatchMode):
    """While active, products of 16-bit matrices are computed as a device's tensor cores do.

    Args:
        arch: the device's architecture as a number, such as 90.
    """

    def __init__(self, arch: int) -> None:
        super().__init__()
        self._arch = arch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        product = func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        if not product or any(tensor.dtype not in _HALVES for tensor in args):
            return func(*args, **kwargs or {})
        a, b = args
        if a.numel() * b.shape[-1] > _EXACT:
            return func(a.float(), b.float()).to(a.dtype)
        return self._product(a, b).to(a.dtype)

    def _product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rows, columns = a.float().contiguous(), b.mT.float().contiguous()
        result = torch.empty(*a.shape[:-1], b.shape[-1])
        (m, n), k = result.shape[-2:], a.shape[-1]
        multiply = engine().library.emu_product
        for x, y, z in zip(
            rows.view(-1, m, k), columns.view(-1, n, k), result.view(-1, m, n), strict=True
        ):
            pointers = x.data_ptr(), y.data_ptr(), z.data_ptr()
            multiply(self._arch, int(a.dtype == torch.bfloat16), m, n, k, *pointers)
        return result


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch on tensors of the device."""
    if func is getattr(torch, "_scaled_mm", None):
        scale = kwargs.get("scale_a", args[2] if len(args) > 2 else None)
        if scale is not None and scale.dtype in _BLOCK_SCALES:
            return _scaled_mm(*args, **kwargs)
    if func in _PRODUCTS:
        with TensorCores(arch):
            return func(*args, **kwargs)
    return func(*args, **kwargs)


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
