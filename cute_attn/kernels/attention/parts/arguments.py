"""Placeholder arguments that attention kernels are compiled against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common.arguments import fake_contiguous, fake_rows, fake_strided
from ...common.dtypes import DTYPE
from ...common.spec import VECTOR_BYTES
from ..ds_tiles import TILE
from ..statistics import STATS_ROWS

Listed = TypeVar("Listed", bound=tuple[Any, ...])


class FakeArguments:
    """Placeholder tensors for a kernel's Spec; the tensors of one object share symbolic sizes."""

    def __init__(self, spec: Any, head_dim: int, head_dim_v: int | None = None):
        """head_dim_v: head dimension of v and o; head_dim if None."""
        self.spec = spec
        self.head_dim = head_dim
        self.head_dim_v = head_dim if head_dim_v is None else head_dim_v
        self.batch, self.heads, self.kv_heads = (cute.sym_int() for _ in range(3))
        self.seqlen_q, self.seqlen_k, self.bounds = (cute.sym_int() for _ in range(3))
        self.num_pages, self.splits = cute.sym_int(), cute.sym_int()

    def arguments(self, listed: type[Listed], **given: Any) -> Listed:
        """Placeholders for the fields of `listed`. `given` has the placeholders of some fields. The
        other placeholders are made here: tensors by field name, and scalars by type."""
        by_name: dict[str, Callable[[], Any]] = {
            **dict.fromkeys(("q", "dq"), self.q),
            **dict.fromkeys(("o", "do"), self.o),
            "k": self.k,
            "v": self.v,
            "lse": self.lse,
            "stats": self.stats,
            "sink": self.sink,
            "page_table": self.page_table,
            "counter": self.counter,
            "cu_seqlens_q": lambda: self._bounds(self.spec.varlen_q),
            "cu_seqlens_k": lambda: self._bounds(self.spec.varlen_k),
            "seqused_q": lambda: self._used(self.spec.seqused_q),
            "seqused_k": lambda: self._used(self.spec.seqused_k),
        }
        by_type = {Float32: Float32(1.0), Int32: Int32(1)}
        found: dict[str, Any] = dict(given)
        for name, kind in get_type_hints(listed).items():
            if name not in given:
                found[name] = by_type[kind] if kind in by_type else by_name[name]()
        return listed(**found)

    def q(self) -> Any:
        """q or its gradient: `[batch, seqlen, heads, head_dim]`, or packed
        `[tokens, heads, head_dim]`."""
        return self._rows(self.spec.varlen_q, self.seqlen_q, self.heads, self.head_dim)

    def o(self) -> Any:
        """o or its gradient, of q's shape but for head_dim_v."""
        return self._rows(self.spec.varlen_q, self.seqlen_q, self.heads, self.head_dim_v)

    def k(self) -> Any:
        """k or its gradient, with the K/V heads; or pages of k."""
        return self._keys(self.head_dim)

    def v(self) -> Any:
        """v or its gradient, of k's shape but for head_dim_v."""
        return self._keys(self.head_dim_v)

    def k_partial(self) -> Any:
        """Partial sums of k's gradient: float32 `[splits, ...]`, contiguous."""
        return self._partial(self.head_dim)

    def v_partial(self) -> Any:
        """Partial sums of v's gradient, of `k_partial`'s shape but for head_dim_v."""
        return self._partial(self.head_dim_v)

    def lse(self) -> Any:
        """The log-sum-exps, `[batch, heads, seqlen]`, or `[heads, tokens]` of packed sequences."""
        return fake_strided(Float32, self._shape(self.spec.varlen_q, self.heads, self.seqlen_q))

    def o_splits(self) -> Any:
        """o of splits: float32 `[splits, ...]`, contiguous."""
        shape = self._shape(self.spec.varlen_q, self.seqlen_q, self.heads, self.head_dim_v)
        return fake_contiguous(Float32, (self.splits, *shape), VECTOR_BYTES)

    def lse_splits(self) -> Any:
        """lse of splits: `[splits, ...]`."""
        shape = self._shape(self.spec.varlen_q, self.heads, self.seqlen_q)
        return fake_strided(Float32, (self.splits, *shape))

    def stats(self) -> Any:
        """lse and delta of the query rows, `[2, heads, padded rows]`; see `statistics`."""
        return fake_contiguous(Float32, (2, self.heads, cute.sym_int(divisibility=STATS_ROWS)), 16)

    def query_sums(self, *, some_heads: bool = False) -> Any:
        """Sums of dQ, `[heads, padded rows, head_dim]`, of all heads or of some; see
        `query_sums`."""
        heads = cute.sym_int() if some_heads else self.heads
        rows = cute.sym_int(divisibility=STATS_ROWS)
        return fake_contiguous(Float32, (heads, rows, self.head_dim), VECTOR_BYTES)

    def zeroed(self) -> Any:
        """The counters of finished zeros; see `query_zeros`."""
        return fake_contiguous(Int32, (cute.sym_int(),))

    def ds_tiles(self) -> Any:
        """Tiles of dS; see `ds_tiles`."""
        shape = (cute.sym_int(), cute.sym_int(), cute.sym_int(), TILE * TILE)
        return fake_contiguous(DTYPE[self.spec.dtype], shape, VECTOR_BYTES)

    def sink(self) -> Any:
        """The sink of each head, `[heads]`, or None."""
        if self.spec.sink_dtype == "none":
            return None
        return fake_contiguous(DTYPE[self.spec.sink_dtype], (self.heads,))

    def counter(self) -> Any:
        """The next tile of a CounterScheduler, `[1]`."""
        return fake_contiguous(Int32, (1,))

    def pieces(self, rows: int, columns: int) -> dict[str, Any]:
        """`counter` and `parts` of a kernel with pieces."""
        parts = fake_contiguous(Float32, (cute.sym_int(), rows, columns), VECTOR_BYTES)
        return {"counter": fake_contiguous(Int32, (cute.sym_int(),)), "parts": parts}

    def descale(self, given: bool) -> Any:
        """The factor of k or v, `[batch, heads_k]`, or None."""
        if not given:
            return None
        return fake_strided(Float32, (cute.sym_int(), self.kv_heads))

    def tree_mask(self, given: bool) -> Any:
        """Placeholder of tree_mask, int64 `[batch, seqlen_q]` or `[tokens]`; None if not given."""
        if not given:
            return None
        return fake_contiguous(Int64, self._shape(self.spec.varlen_q, self.seqlen_q))

    def page_table(self) -> Any:
        """The page table, `[batch, max_pages]`, or None."""
        if not self.spec.page_rows:
            return None
        return fake_rows(Int32, (self.batch, cute.sym_int()), align=Int32.width // 8)

    def _bounds(self, varlen: bool) -> Any:
        return fake_contiguous(Int32, (self.bounds,)) if varlen else None

    def _used(self, seqused: bool) -> Any:
        return fake_contiguous(Int32, (self.batch,)) if seqused else None

    def _keys(self, columns: int) -> Any:
        if getattr(self.spec, "page_rows", 0):
            shape = (self.num_pages, self.seqlen_k, self.kv_heads, columns)
        else:
            shape = self._shape(self.spec.varlen_k, self.seqlen_k, self.kv_heads, columns)
        return fake_rows(DTYPE[getattr(self.spec, "keys_dtype", self.spec.dtype)], shape)

    def _partial(self, columns: int) -> Any:
        shape = self._shape(self.spec.varlen_k, self.seqlen_k, self.kv_heads, columns)
        return fake_contiguous(Float32, (cute.sym_int(), *shape), VECTOR_BYTES)

    def _rows(self, packed: bool, seqlen: Any, heads: Any, columns: int) -> Any:
        shape = self._shape(packed, seqlen, heads, columns)
        return fake_rows(DTYPE[self.spec.dtype], shape)

    def _shape(self, packed: bool, *of_a_sequence: Any) -> tuple[Any, ...]:
        return of_a_sequence if packed else (self.batch, *of_a_sequence)
