"""The records that `kda.chunk.fused.prepare` writes for `state_pass`, in PyTorch."""

from __future__ import annotations

import torch

from cute_attn.kernels.delta.chunk.spec import CHUNK, record_elements
from cute_attn.reference import kda


def slots(tokens: int, batch: int, cu_seqlens: torch.Tensor | None) -> int:
    """The number of slots for chunks."""
    if cu_seqlens is None:
        return batch * -(-tokens // CHUNK)
    return tokens // CHUNK + len(cu_seqlens) - 1


def slot_of(chunk: kda.Chunk, tokens: int, cu_seqlens: torch.Tensor | None) -> int:
    """The slot of one of the reference's chunks."""
    if cu_seqlens is None:
        return chunk.sequence * -(-tokens // CHUNK) + chunk.rows.start // CHUNK
    first = int(cu_seqlens[chunk.sequence])
    return first // CHUNK + chunk.sequence + (chunk.rows.start - first) // CHUNK


def swizzled(x: torch.Tensor) -> torch.Tensor:
    """`[64, 64]` with the 8 elements of unit u of row r at unit u ^ (r & 7); its own inverse."""
    rows = torch.arange(64).unsqueeze(1)
    units = torch.arange(8).unsqueeze(0) ^ (rows & 7)
    return x.reshape(64, 8, 8)[rows, units].reshape(64, 64)


def pack(
    kd: torch.Tensor, qg: torch.Tensor, kg: torch.Tensor, Akk: torch.Tensor, Aqk: torch.Tensor
) -> torch.Tensor:
    """A record: sub-tiles of 64 columns, one after the other, those of kd and qg in turns."""
    kd_qg = [x for both in zip(kd.split(64, dim=1), qg.split(64, dim=1), strict=True) for x in both]
    return torch.cat([swizzled(x).flatten() for x in (*kd_qg, *kg.split(64, dim=1), Akk, Aqk)])


def unpack(record: torch.Tensor, head_dim_k: int) -> dict[str, torch.Tensor]:
    """The matrices of a chunk and head by name."""
    parts = [swizzled(x) for x in record.reshape(-1, 64, 64)]
    both = head_dim_k // 64 * 2
    return {
        "kd": torch.cat(parts[0:both:2], dim=1),
        "qg": torch.cat(parts[1:both:2], dim=1),
        "kg": torch.cat(parts[both:-2], dim=1),
        "Akk": parts[-2],
        "Aqk": parts[-1],
    }


def split_beta(beta: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, p), beta's factors that multiply columns and rows; see `kda.gates.split_beta`."""
    if dtype is torch.bfloat16:
        return beta, torch.ones_like(beta)
    p = torch.exp2(torch.floor((torch.frexp(beta)[1].to(beta.dtype) - 1) / 2))
    return beta / p, p


def prepared(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    dtype: torch.dtype,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tiles, decay) in `dtype` and float32, of float64 inputs; g in natural logarithms, no beta is
    0. Slots that are nobody's hold NaN."""
    batch, tokens, heads, dim = g.shape
    scale = dim**-0.5 if scale is None else scale
    sums = kda.kda_gate_cumsum_reference(g, cu_seqlens=cu_seqlens)
    v = torch.zeros(batch, tokens, heads, 64, dtype=torch.float64)
    intra = kda.kda_chunk_intra_reference(q, k, v, sums, beta, scale, cu_seqlens=cu_seqlens)
    count = slots(tokens, batch, cu_seqlens)
    tiles = torch.full((count, heads, record_elements(dim)), torch.nan, dtype=torch.float64)
    decay = torch.full((count, heads, dim), torch.nan, dtype=torch.float64)
    k_of_value_heads = kda.per_value_head(k, heads)
    for chunk in kda.chunks(q, cu_seqlens):
        at = (chunk.batch, chunk.rows)
        slot = slot_of(chunk, tokens, cu_seqlens)
        size = chunk.rows.stop - chunk.rows.start
        for head in range(heads):
            m, _ = split_beta(beta[at][:, head], dtype)
            columns, betas = (
                torch.nn.functional.pad(x, (0, 64 - size)) for x in (m, beta[at][:, head])
            )
            matrices = [
                torch.exp2(sums[at][:, head]) * k_of_value_heads[at][:, head],
                scale * intra.qg[at][:, head],
                m.unsqueeze(1) * intra.kg[at][:, head],
                intra.Akk[at][:, head] * betas / m.unsqueeze(1),
                intra.Aqk[at][:, head] * columns,
            ]
            matrices = [torch.nn.functional.pad(m, (0, 0, 0, 64 - size)) for m in matrices]
            tiles[slot, head] = pack(*matrices)
            decay[slot, head] = torch.exp2(sums[at][-1, head])
    return tiles.to(dtype), decay.float()


def matrix_of(elements: torch.Tensor, rows: int) -> torch.Tensor:
    """A chunk's `[rows, columns]` from sub-tiles: for each 64 rows, one for each 64 columns."""
    sub_tiles = elements.reshape(rows // 64, -1, 64, 64)
    return torch.cat([torch.cat([swizzled(x) for x in line], dim=1) for line in sub_tiles])
