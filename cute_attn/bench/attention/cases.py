"""Cases, counts and verdicts of the benchmark of attention; this module does not need torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...kernels.attention.heuristics import has_few_rows
from ..harness.report import Plot, Row, Verdict
from ..harness.roofline import Roofline, gbps
from ..harness.timing import Timing

FA4, CUDNN, FA2 = "fa4", "cudnn", "fa2"  # "fa2" is PyTorch's flash backend
PEERS = (FA4, CUDNN, FA2)

HEAD_DIMS = (64, 128, 256)
WIDE_HEAD_DIM = 512  # forward alone, on Hopper
TOKENS = 16384  # tokens of a batch, or of one longer sequence
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
GROUPS = (1, 4, 8)
WIDTH = 2048  # heads times head_dim

DECODE_HEADS, DECODE_GROUP = 16, 8
DECODE_BATCHES = (1, 4, 16, 64, 256)
DECODE_KEYS = (1024, 8192, 32768, 131072)
# Keys of each sequence, and (query heads, K/V heads) by head_dim, of caches of unequal lengths.
RAGGED: Mapping[str, tuple[int, ...]] = {
    "8 of 2k": (2048,) * 8,
    "32 of 8k": (8192,) * 32,
    "32 of 1k to 8k": tuple(range(1024, 8193, 231))[:32],
    "8 of 4k to 32k": tuple(range(4096, 32769, 4096)),
    "32k among 63 of 512": (*[512] * 63, 32768),
}
RAGGED_HEADS = {64: (64, 8), 128: (64, 8), 256: (32, 2)}
PAGE_SIZE = 64
PAGE_SIZES = (16, 64, 128, 256)
SMALL_PAGES = (1, 16, 48)  # of decode steps, whose rows are gathered
SHORT_QUERIES = 128  # heads share tiles up to this many queries

ELEMENT = 2  # bytes

# Targets: from these lengths on, as a multiple of a peer's speed.
FORWARD_TARGETS: Mapping[int, Mapping[str, float]] = {
    64: {"best": 1.0}, 128: {"best": 1.0}, 256: {FA4: 1.05, CUDNN: 1.15}, WIDE_HEAD_DIM: {},
}  # fmt: skip
BACKWARD_TARGETS: Mapping[int, Mapping[str, float]] = {
    64: {FA4: 1.0}, 128: {FA4: 1.0}, 256: {"best": 1.5},
}  # fmt: skip
TARGET_SEQLEN = 4096
WIDE_SHARE = 0.75  # of the rate of a matmul, of the forward at WIDE_HEAD_DIM
BACKWARD_TFLOPS = 560.0  # at head_dim 256, dense
LARGE_CACHE = 64 * 10**6  # bytes of K and V, above which decode is held to the copy bandwidth
DECODE_SHARE = 0.9
# Share of the copy bandwidth that ragged caches are held to, from so many bytes of K and V on.
RAGGED_SHARES = ((256 * 2**20, 0.9), (128 * 2**20, 0.85))
MAX_PAGE_LOSS_PCT, LOSS_PAGE_SIZE = 5.0, 64
WIDE = "bfloat16"  # ours, over the cache in bfloat16 that has the numbers of an fp8 cache
# Speed over WIDE, from so many bytes of fp8 K and V on.
FP8_SPEEDUP, FP8_BYTES = 1.7, 128 * 2**20
FP8_CACHES = ("8 of 2k", "32 of 8k", "32 of 1k to 8k")
SMALL_PAGE_SHARE = 0.85  # of the rate with pages of PAGE_SIZE


@dataclass(frozen=True)
class Case:
    """The sizes of a call.

    Attributes:
        seqlen_q, seqlen_k: of each sequence.
        group: query heads of a K/V head.
        page_size: of K and V in pages; 0: K and V are in one piece.
        part: of the benchmark: "forward", "backward", "decode", "ragged", "pages" or "fp8".
        lengths: keys of each sequence, at most seqlen_k; empty: all have seqlen_k.
        kv_dtype: dtype of fp8 k and v; empty: k and v have `dtype`.
    """

    part: str
    head_dim: int
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    group: int
    causal: bool
    page_size: int = 0
    dtype: str = "bfloat16"
    lengths: tuple[int, ...] = ()
    kv_dtype: str = ""

    @property
    def heads_k(self) -> int:
        return self.heads // self.group

    @property
    def cached(self) -> bool:
        """Whether K and V are a cache, with lengths on the device."""
        return self.part in ("decode", "ragged", "pages", "fp8")

    @property
    def flops(self) -> float:
        """Floating-point operations of the products. With a causal mask, half of a square's pairs
        count."""
        pairs = self.seqlen_q * self.seqlen_k / (2 if self.causal else 1)
        forward = 4.0 * self.batch * self.heads * pairs * self.head_dim
        return 2.5 * forward if self.part == "backward" else forward

    @property
    def kv_bytes(self) -> int:
        keys = sum(self.lengths) or self.batch * self.seqlen_k
        return 2 * keys * self.heads_k * self.head_dim * (1 if self.kv_dtype else ELEMENT)

    @property
    def min_bytes(self) -> int:
        """Bytes of K, V, q and o, each moved once."""
        return self.kv_bytes + 2 * self.batch * self.seqlen_q * self.heads * self.head_dim * ELEMENT

    @property
    def memory_bytes(self) -> int:
        """A rough upper bound of the memory of all contenders. If K and V are timed in pages and in
        one piece, both copies count. A backward has gradients, in float32 too, and tensors that
        autograd keeps."""
        times = {"backward": 10, "fp8": 8}.get(self.part, 3)
        allocated = self.batch * self.seqlen_k / (sum(self.lengths) or self.batch * self.seqlen_k)
        return int(self.min_bytes * times * allocated)

    @property
    def num_splits(self) -> int:
        """The call's num_splits: for a decode step the operator chooses."""
        return 0 if self.cached and self.seqlen_q <= SHORT_QUERIES else 1

    @property
    def plan(self) -> dict[str, Any]:
        """Arguments of `cute_attn.ops.attention.plan_attention`."""
        return {
            "head_dim": self.head_dim, "dtype": self.dtype, "heads": self.heads,
            "heads_k": self.heads_k, "causal": self.causal, "seqused_k": self.cached,
            "page_size": self.page_size or None, "short": self.seqlen_q <= SHORT_QUERIES,
            "few": has_few_rows(
                heads=self.heads, heads_k=self.heads_k, most_queries=self.seqlen_q
            ),
            "num_splits": self.num_splits, "return_lse": self.part == "backward",
            "kv_dtype": self.kv_dtype or None, "k_descale": bool(self.kv_dtype),
            "v_descale": bool(self.kv_dtype),
        }  # fmt: skip

    @property
    def row(self) -> Row:
        """The columns that identify a case."""
        common: Row = {"head_dim": self.head_dim, "batch": self.batch}
        heads: Row = {"heads": self.heads, "heads_k": self.heads_k}
        if self.part in ("ragged", "fp8"):
            names = {lengths: name for name, lengths in RAGGED.items()}
            keys: Row = {"keys": names.get(self.lengths, str(self.lengths))}
            return common | keys | heads | ({"kv_dtype": self.kv_dtype} if self.kv_dtype else {})
        if self.part == "decode":
            return common | {"keys": self.seqlen_k, "page_size": self.page_size} | heads
        lengths: Row = {"seqlen_q": self.seqlen_q, "seqlen_k": self.seqlen_k}
        if self.part == "pages":
            return common | lengths | heads | {"causal": self.causal, "page_size": self.page_size}
        return common | {"seqlen": self.seqlen_q} | heads | {"causal": self.causal}

    def __str__(self) -> str:
        return f"{self.part}: {', '.join(f'{name}={value}' for name, value in self.row.items())}"


FILTERS = {
    "D": "head_dim",
    "B": "batch",
    "S": "seqlen_k",
    "group": "group",
    "causal": "causal",
    "page": "page_size",
}


def _whole(part: str, head_dim: int, seqlen: int, group: int, causal: bool) -> Case:
    heads = WIDTH // head_dim
    return Case(part, head_dim, max(1, TOKENS // seqlen), seqlen, seqlen, heads, group, causal)


def _decode(head_dim: int, batch: int, keys: int, page_size: int) -> Case:
    heads, group = DECODE_HEADS, DECODE_GROUP
    return Case("decode", head_dim, batch, 1, keys, heads, group, False, page_size)


def _pages(head_dim: int, queries: int, batch: int, keys: int, page_size: int) -> Case:
    heads, group = DECODE_HEADS, DECODE_GROUP
    return Case("pages", head_dim, batch, queries, keys, heads, group, queries > 1, page_size)


def _ragged(head_dim: int, lengths: tuple[int, ...]) -> Case:
    heads, heads_k = RAGGED_HEADS[head_dim]
    return Case(
        "ragged", head_dim, len(lengths), 1, max(lengths), heads, heads // heads_k, False,
        PAGE_SIZE, lengths=lengths,
    )  # fmt: skip


def _fp8(head_dim: int, keys: str, kv_dtype: str = "float8_e4m3fn") -> Case:
    return replace(_ragged(head_dim, RAGGED[keys]), part="fp8", kv_dtype=kv_dtype)


def all_cases() -> list[Case]:
    whole = [
        _whole(part, head_dim, seqlen, group, causal)
        for part in ("forward", "backward")
        for head_dim in HEAD_DIMS
        for group in GROUPS
        for causal in (False, True)
        for seqlen in SEQLENS
    ]
    decode = [
        _decode(head_dim, batch, keys, page_size)
        for head_dim in HEAD_DIMS
        for page_size in (0, PAGE_SIZE)
        for keys in DECODE_KEYS
        for batch in DECODE_BATCHES
    ]
    decode += [
        _decode(head_dim, 64, 8192, page_size)
        for head_dim in HEAD_DIMS
        for page_size in SMALL_PAGES
    ]
    pages = [
        _pages(head_dim, *sizes, page_size)
        for head_dim in HEAD_DIMS
        for sizes in ((4096, 4, 4096), (1, 64, 8192))
        for page_size in PAGE_SIZES
    ]
    ragged = [_ragged(head_dim, lengths) for head_dim in HEAD_DIMS for lengths in RAGGED.values()]
    fp8 = [_fp8(head_dim, keys) for head_dim in HEAD_DIMS for keys in FP8_CACHES]
    fp8.append(_fp8(128, "32 of 8k", "float8_e5m2"))
    return [*whole, *decode, *ragged, *pages, *fp8, *_wide()]


def _wide() -> list[Case]:
    """Cases of wide heads: the forward, and decode from so many MB on."""
    return [
        *(
            _whole("forward", WIDE_HEAD_DIM, seqlen, 1, causal)
            for causal in (False, True)
            for seqlen in (1024, 4096, 16384)
        ),
        *(
            _decode(WIDE_HEAD_DIM, batch, keys, page_size)
            for page_size in (0, 16, PAGE_SIZE)
            for batch, keys in ((16, 2048), (4, 32768), (64, 8192))
        ),
    ]


def short_cases() -> list[Case]:
    return [
        *(
            _whole("forward", head_dim, 4096, 1, causal)
            for head_dim in HEAD_DIMS
            for causal in (False, True)
        ),
        *(_whole("backward", head_dim, 4096, 1, True) for head_dim in HEAD_DIMS),
        *(_decode(head_dim, 64, 8192, size) for head_dim in HEAD_DIMS for size in (1, PAGE_SIZE)),
        *(_ragged(head_dim, RAGGED["32k among 63 of 512"]) for head_dim in HEAD_DIMS),
        *(_pages(head_dim, 4096, 4, 4096, PAGE_SIZE) for head_dim in HEAD_DIMS),
        *(_fp8(head_dim, "32 of 8k") for head_dim in HEAD_DIMS),
        *(_whole("forward", WIDE_HEAD_DIM, 4096, 1, causal) for causal in (False, True)),
        _decode(WIDE_HEAD_DIM, 64, 8192, PAGE_SIZE),
    ]


# ---- rows


def peer_columns(timings: Mapping[str, Timing]) -> Row:
    """Columns of the peers' times, of our speed over each peer, and of our speed over the
    fastest."""
    us = {who: timing.median_us for who, timing in timings.items()}
    peers = {who: us[who] for who in PEERS if who in us}
    speedup = {who: peer_us / us["ours"] for who, peer_us in peers.items() if "ours" in us}
    return {
        **{f"{who}_us": peers.get(who) for who in PEERS},
        **{f"speedup_vs_{who}": speedup.get(who) for who in PEERS},
        "speedup_vs_best": min(speedup.values()) if speedup else None,
    }


def time_columns(timings: Mapping[str, Timing]) -> Row:
    ours = timings.get("ours")
    names = ("median_us", "p20_us", "p80_us")
    median, p20, p80 = (getattr(ours, name) if ours else None for name in names)
    return {"time_us": median, "p20_us": p20, "p80_us": p80}


def whole_row(case: Case, timings: Mapping[str, Timing], roofline: Roofline) -> Row:
    """The row of a forward or a backward, with its rate of products. Without timings we have no
    kernel."""
    tflops = {who: case.flops / timing.median_us / 1e6 for who, timing in timings.items()}
    limit = roofline.matmul_tflops
    judged = "ours" in tflops and limit is not None
    return {
        **case.row,
        **time_columns(timings),
        "tflops": tflops.get("ours"),
        "share_of_matmul": tflops["ours"] / limit if judged and limit else None,
        **{f"{who}_tflops": tflops.get(who) for who in PEERS},
        **peer_columns(timings),
    }


def decode_row(case: Case, timings: Mapping[str, Timing], roofline: Roofline) -> Row:
    speed = gbps(case.min_bytes, timings["ours"].median_us)
    return {
        **case.row,
        "kv_mib": case.kv_bytes / 2**20,
        **time_columns(timings),
        "gbps": speed,
        "share_of_copy": speed / roofline.copy_gbps,
        **peer_columns(timings),
    }


def pages_row(case: Case, timings: Mapping[str, Timing]) -> Row:
    """The row that compares K and V in pages with K and V in one piece, "contiguous"."""
    ours, contiguous = timings["ours"].median_us, timings["contiguous"].median_us
    return {
        **case.row,
        **time_columns(timings),
        "contiguous_us": contiguous,
        "loss_pct": 100 * (ours / contiguous - 1),
        **peer_columns(timings),
    }


def fp8_row(case: Case, timings: Mapping[str, Timing], roofline: Roofline) -> Row:
    """The row that compares an fp8 cache with the cache in bfloat16."""
    ours, wide = timings["ours"].median_us, timings[WIDE].median_us
    speed = gbps(case.min_bytes, ours)
    return {
        **case.row,
        "kv_mib": case.kv_bytes / 2**20,
        **time_columns(timings),
        "gbps": speed,
        "share_of_copy": speed / roofline.copy_gbps,
        f"{WIDE}_us": wide,
        f"speedup_vs_{WIDE}": wide / ours,
        **peer_columns(timings),
    }


# ---- verdicts


def verdicts(tables: Mapping[str, Sequence[Row]]) -> list[Verdict]:
    """The targets, for every row that has a target; `tables` are rows by part."""
    found: list[Verdict] = []
    for part, targets in (("forward", FORWARD_TARGETS), ("backward", BACKWARD_TARGETS)):
        for row in tables.get(part, ()):
            if _number(row, "seqlen") < TARGET_SEQLEN:
                continue
            for who, target in targets[int(_number(row, "head_dim"))].items():
                found.append(_at_least(part, row, f"speedup_vs_{who}", target))
            if row["head_dim"] == WIDE_HEAD_DIM:
                found.append(_at_least(part, row, "share_of_matmul", WIDE_SHARE))
            judged = (row["head_dim"], row["seqlen"], row["causal"]) == (256, TOKENS, False)
            if part == "backward" and judged:
                found.append(_at_least(part, row, "tflops", BACKWARD_TFLOPS))
    decode = tables.get("decode", ())
    for row in decode:
        if row["page_size"] in SMALL_PAGES:
            found += _small_page_verdicts(row, decode)
        elif _number(row, "kv_mib") * 2**20 > LARGE_CACHE:
            found.append(_at_least("decode", row, "share_of_copy", DECODE_SHARE))
        if row["head_dim"] != WIDE_HEAD_DIM:  # no peer has it
            found.append(_at_least("decode", row, f"speedup_vs_{FA4}", 1.0))
    for row in tables.get("ragged", ()):
        nbytes = _number(row, "kv_mib") * 2**20
        for least, share in RAGGED_SHARES:
            if nbytes >= least:
                found.append(_at_least("ragged", row, "share_of_copy", share))
                break
    found += [
        _at_least("fp8", row, f"speedup_vs_{WIDE}", FP8_SPEEDUP)
        for row in tables.get("fp8", ())
        if _number(row, "kv_mib") * 2**20 >= FP8_BYTES
    ]
    for row in tables.get("pages", ()):
        if _number(row, "page_size") >= LOSS_PAGE_SIZE:
            loss = _number(row, "loss_pct")
            name = f"pages, {_label(row)}: at most {MAX_PAGE_LOSS_PCT:g} % slower than contiguous"
            found.append(Verdict(name, loss <= MAX_PAGE_LOSS_PCT, f"{loss:+.1f} %"))
    return found


def _small_page_verdicts(row: Row, rows: Sequence[Row]) -> list[Verdict]:
    """The verdict on a row beside the row with the same sizes and pages of PAGE_SIZE, if there is
    one."""
    same = ("head_dim", "batch", "keys", "mode", "flush")
    return [
        _at_least(
            "decode", row | {"share_of_large_pages": share}, "share_of_large_pages",
            SMALL_PAGE_SHARE,
        )
        for other in rows
        if other["page_size"] == PAGE_SIZE and all(row.get(x) == other.get(x) for x in same)
        for share in [_number(other, "time_us") / _number(row, "time_us")]
    ]  # fmt: skip


def _label(row: Row) -> str:
    names = (
        "head_dim", "batch", "seqlen", "seqlen_q", "keys", "heads", "heads_k", "causal",
        "page_size", "mode", "flush",
    )  # fmt: skip
    return " ".join(f"{name}={row[name]}" for name in names if name in row)


def _number(row: Row, column: str) -> float:
    value = row[column]
    assert isinstance(value, (int, float)), column
    return value


def _at_least(part: str, row: Row, column: str, target: float) -> Verdict:
    name = f"{part}, {_label(row)}: {column} at least {target:g}"
    if row["time_us"] is None:
        return Verdict(name, None, "there is no kernel")
    if row[column] is None:
        return Verdict(name, None, "the peer was not timed")
    value = _number(row, column)
    return Verdict(name, value >= target, f"{value:.3f}, {_number(row, 'time_us'):.1f} us")


# ---- plots


def whole_plots(rows: Sequence[Row], roofline: Roofline) -> list[Plot]:
    """Speed by length, of one query head a K/V head."""
    found = []
    limit = roofline.matmul_tflops
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            heads = WIDTH // head_dim
            where: Row = {"head_dim": head_dim, "causal": causal, "heads_k": heads}
            of_plot = [row for row in rows if all(row[k] == v for k, v in where.items())]
            ys = _measured(of_plot, ("tflops", *(f"{who}_tflops" for who in PEERS)))
            if len(of_plot) > 1 and ys:
                mode = of_plot[0]["mode"]
                title = f"head_dim {head_dim}, {'causal' if causal else 'dense'} ({mode})"
                found.append(
                    Plot("seqlen", ys, title, "TFLOP/s", where | {"mode": mode}, log_x=True,
                         lines={} if limit is None else {"matmul 8192": limit})
                )  # fmt: skip
    return found


def decode_plots(rows: Sequence[Row]) -> list[Plot]:
    """Time of a step by batch, for each length of paged caches."""
    found = []
    for head_dim in HEAD_DIMS:
        for keys in DECODE_KEYS:
            where: Row = {"head_dim": head_dim, "keys": keys, "page_size": PAGE_SIZE}
            of_plot = [row for row in rows if all(row[k] == v for k, v in where.items())]
            ys = _measured(of_plot, ("time_us", f"{FA4}_us"))
            if len(of_plot) > 1 and ys:
                mode = of_plot[0]["mode"]
                title = f"decode, head_dim {head_dim}, {keys} keys ({mode})"
                where["mode"] = mode
                found.append(Plot("batch", ys, title, "us", where, log_x=True, log_y=True))
    return found


def _measured(rows: Sequence[Row], columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(c for c in columns if any(row[c] is not None for row in rows))
