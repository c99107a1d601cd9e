"""Cases, counts and verdicts of the benchmark of attention; this module does not need torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...kernels.attention.heuristics import LONG_SEQLEN_Q, has_few_rows
from ..harness.report import Plot, Row, Verdict
from ..harness.roofline import Roofline, gbps
from ..harness.timing import Timing

FA4, CUDNN, FA2 = "fa4", "cudnn", "fa2"  # "fa2" is PyTorch's flash backend
# FlashAttention-3, and in decode also FlashAttention-3 with a schedule that was made beforehand.
FA3, FA3_PLANNED = "fa3", "fa3_planned"
PEERS = (FA4, FA3, FA3_PLANNED, CUDNN, FA2)
PEERS_OF = {
    "forward": (FA4, FA3, CUDNN, FA2),
    "backward": (FA4, CUDNN, FA2),
    "decode": (FA3, FA3_PLANNED, FA4),
    "batches": (FA4, CUDNN, FA2),
    "pages": (FA4, CUDNN, FA2),
}

HEAD_DIMS = (64, 128, 256)
WIDE_HEAD_DIM = 512  # forward alone, on Hopper
TOKENS = 16384  # tokens of a batch, or of one longer sequence
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
GROUPS = (1, 4, 8)
WIDTH = 2048  # heads times head_dim

DECODE_HEADS, DECODE_GROUP = 16, 8
DECODE_BATCHES = (1, 4, 16, 64, 256)
DECODE_KEYS = (1024, 8192, 32768, 131072)
# Keys of each sequence of a cache, by name.
CACHES: Mapping[str, tuple[int, ...]] = {
    "1 of 2k": (2048,),
    "8 of 2k": (2048,) * 8,
    "4 of 8k": (8192,) * 4,
    "32 of 8k": (8192,) * 32,
    "32 of 1k to 8k": tuple(range(1024, 8193, 231))[:32],
    "8 of 4k to 32k": tuple(range(4096, 32769, 4096)),
    "32k among 63 of 512": (*[512] * 63, 32768),
    "32 of 4605": (4605,) * 32,
    "8 of 18432": (18432,) * 8,
    "64 of 1016": (1016,) * 64,
}
# Caches of unequal lengths, each with the cache that has as many keys in equal lengths.
RAGGED = {
    "32 of 1k to 8k": "32 of 4605",
    "8 of 4k to 32k": "8 of 18432",
    "32k among 63 of 512": "64 of 1016",
}
FEW_BYTES = ("1 of 2k", "8 of 2k", "4 of 8k")
SERVED = ("8 of 2k", "32 of 8k", "32 of 1k to 8k")  # caches with pages of 1, and fp8 caches
SERVED_HEADS = {64: (64, 8), 128: (64, 8), 256: (32, 2)}  # query heads and K/V heads by head_dim
SPECULATIVE = (2, 4, 8, 16)  # queries of a sequence
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
RAGGED_TIME = 1.2  # times the time of equal lengths
SPECULATIVE_TIME = 1.06  # times the time of one query
FEW_BYTES_US = {("8 of 2k", 128): 27.0, **{("1 of 2k", head_dim): 8.0 for head_dim in HEAD_DIMS}}
MAX_PAGE_LOSS_PCT, LOSS_PAGE_SIZE = 5.0, 64
WIDE = "bfloat16"  # ours, over the cache in bfloat16 that has the numbers of an fp8 cache
FP8_SPEEDUP, FP8_CACHE = 1.7, "32 of 8k"  # speed over WIDE
SMALL_PAGE_SHARE = 0.85  # of the rate with pages of PAGE_SIZE


@dataclass(frozen=True)
class Case:
    """The sizes of a call.

    Attributes:
        seqlen_q, seqlen_k: of each sequence.
        group: query heads of a K/V head.
        page_size: of K and V in pages; 0: K and V are in one piece.
        part: the benchmark's part: "forward", "backward", "decode", "batches" or "pages".
        lengths: keys of each sequence, at most seqlen_k; empty: all have seqlen_k.
        kind: what a decode case is about.
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
    kind: str = ""

    @property
    def heads_k(self) -> int:
        return self.heads // self.group

    @property
    def cached(self) -> bool:
        """Whether K and V are a cache, with lengths on the device."""
        return self.part in ("decode", "batches", "pages")

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
        times = 10 if self.part == "backward" else 8 if self.kv_dtype else 3
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
            "long": self.seqlen_q >= LONG_SEQLEN_Q,
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
        if self.part == "decode":
            names = {lengths: name for name, lengths in CACHES.items()}
            return (
                common
                | {
                    "kind": self.kind,
                    "keys": names.get(self.lengths, str(self.lengths)),
                    "queries": self.seqlen_q,
                    "page_size": self.page_size,
                    "kv_dtype": self.kv_dtype or self.dtype,
                }
                | heads
            )
        if self.part == "batches":
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
    "kind": "kind",
    "queries": "seqlen_q",
}


def _whole(part: str, head_dim: int, seqlen: int, group: int, causal: bool) -> Case:
    heads = WIDTH // head_dim
    return Case(part, head_dim, max(1, TOKENS // seqlen), seqlen, seqlen, heads, group, causal)


def _batches(head_dim: int, batch: int, keys: int, page_size: int) -> Case:
    heads, group = DECODE_HEADS, DECODE_GROUP
    return Case("batches", head_dim, batch, 1, keys, heads, group, False, page_size)


def _pages(head_dim: int, queries: int, batch: int, keys: int, page_size: int) -> Case:
    heads, group = DECODE_HEADS, DECODE_GROUP
    return Case("pages", head_dim, batch, queries, keys, heads, group, queries > 1, page_size)


def _decode(
    kind: str, head_dim: int, keys: str, *, queries: int = 1, page: int = PAGE_SIZE, fp8: str = ""
) -> Case:
    heads, heads_k = SERVED_HEADS[head_dim]
    lengths = CACHES[keys]
    return Case(
        "decode", head_dim, len(lengths), queries, max(lengths), heads, heads // heads_k,
        queries > 1, page, lengths=lengths, kv_dtype=fp8, kind=kind,
    )  # fmt: skip


def _decode_cases(head_dim: int) -> list[Case]:
    """The cases of the decode table at a head_dim."""
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    case = partial(_decode, head_dim=head_dim)
    return [
        *(case("equal", keys=keys) for keys in ("32 of 8k", *RAGGED.values())),
        *(case("ragged", keys=keys) for keys in RAGGED),
        *(case("few bytes", keys=keys) for keys in FEW_BYTES),
        *(case("speculative", keys="32 of 8k", queries=queries) for queries in SPECULATIVE),
        *(case("page 1", keys=keys, page=1) for keys in SERVED),
        *(case("fp8", keys=keys, fp8=e4m3) for keys in SERVED),
        *([case("fp8", keys=FP8_CACHE, fp8=e5m2)] if head_dim == 128 else []),
    ]


def all_cases() -> list[Case]:
    whole = [
        _whole(part, head_dim, seqlen, group, causal)
        for part in ("forward", "backward")
        for head_dim in HEAD_DIMS
        for group in GROUPS
        for causal in (False, True)
        for seqlen in SEQLENS
    ]
    decode = [case for head_dim in HEAD_DIMS for case in _decode_cases(head_dim)]
    batches = [
        _batches(head_dim, batch, keys, page_size)
        for head_dim in HEAD_DIMS
        for page_size in (0, PAGE_SIZE)
        for keys in DECODE_KEYS
        for batch in DECODE_BATCHES
    ]
    batches += [
        _batches(head_dim, 64, 8192, page_size)
        for head_dim in HEAD_DIMS
        for page_size in SMALL_PAGES
    ]
    pages = [
        _pages(head_dim, *sizes, page_size)
        for head_dim in HEAD_DIMS
        for sizes in ((4096, 4, 4096), (1, 64, 8192))
        for page_size in PAGE_SIZES
    ]
    return [*whole, *decode, *batches, *pages, *_wide()]


def _wide() -> list[Case]:
    """Cases of wide heads: the forward, and decode from so many MB on."""
    return [
        *(
            _whole("forward", WIDE_HEAD_DIM, seqlen, 1, causal)
            for causal in (False, True)
            for seqlen in (1024, 4096, 16384)
        ),
        *(
            _batches(WIDE_HEAD_DIM, batch, keys, page_size)
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
        *(_batches(head_dim, 64, 8192, size) for head_dim in HEAD_DIMS for size in (1, PAGE_SIZE)),
        *(_decode("ragged", head_dim, "32k among 63 of 512") for head_dim in HEAD_DIMS),
        *(_pages(head_dim, 4096, 4, 4096, PAGE_SIZE) for head_dim in HEAD_DIMS),
        *(_decode("fp8", head_dim, FP8_CACHE, fp8="float8_e4m3fn") for head_dim in HEAD_DIMS),
        *(_whole("forward", WIDE_HEAD_DIM, 4096, 1, causal) for causal in (False, True)),
        _batches(WIDE_HEAD_DIM, 64, 8192, PAGE_SIZE),
    ]


# ---- rows


def peer_columns(part: str, timings: Mapping[str, Timing]) -> Row:
    """Columns of the times of a part's peers, of our speed over each peer, and of our speed over
    the fastest."""
    names = PEERS_OF[part]
    us = {who: timing.median_us for who, timing in timings.items()}
    peers = {who: us[who] for who in names if who in us}
    speedup = {who: peer_us / us["ours"] for who, peer_us in peers.items() if "ours" in us}
    return {
        **{f"{who}_us": peers.get(who) for who in names},
        **{f"speedup_vs_{who}": speedup.get(who) for who in names},
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
        **{f"{who}_tflops": tflops.get(who) for who in PEERS_OF[case.part]},
        **peer_columns(case.part, timings),
    }


def decode_row(case: Case, timings: Mapping[str, Timing], roofline: Roofline) -> Row:
    """The row of a decode step over a cache. A row of the decode table also has the time over the
    same cache in bfloat16."""
    ours = timings["ours"].median_us
    speed = gbps(case.min_bytes, ours)
    wide: Row = {}
    if case.part == "decode":
        us = timings[WIDE].median_us if WIDE in timings else None
        wide = {f"{WIDE}_us": us, f"speedup_vs_{WIDE}": us and us / ours}
    return {
        **case.row,
        "kv_mib": case.kv_bytes / 2**20,
        **time_columns(timings),
        "gbps": speed,
        "share_of_copy": speed / roofline.copy_gbps,
        **wide,
        **peer_columns(case.part, timings),
    }


def pages_row(case: Case, timings: Mapping[str, Timing]) -> Row:
    """The row that compares K and V in pages with K and V in one piece, "contiguous"."""
    ours, contiguous = timings["ours"].median_us, timings["contiguous"].median_us
    return {
        **case.row,
        **time_columns(timings),
        "contiguous_us": contiguous,
        "loss_pct": 100 * (ours / contiguous - 1),
        **peer_columns(case.part, timings),
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
        found += _decode_verdicts(row, decode)
    batches = tables.get("batches", ())
    for row in batches:
        if row["page_size"] in SMALL_PAGES:
            found += _small_page_verdicts("batches", row, batches)
        elif _number(row, "kv_mib") * 2**20 > LARGE_CACHE:
            found.append(_at_least("batches", row, "share_of_copy", DECODE_SHARE))
        if row["head_dim"] != WIDE_HEAD_DIM:  # no peer has it
            found.append(_at_least("batches", row, f"speedup_vs_{FA4}", 1.0))
    for row in tables.get("pages", ()):
        if _number(row, "page_size") >= LOSS_PAGE_SIZE:
            loss = _number(row, "loss_pct")
            name = f"pages, {_label(row)}: at most {MAX_PAGE_LOSS_PCT:g} % slower than contiguous"
            found.append(Verdict(name, loss <= MAX_PAGE_LOSS_PCT, f"{loss:+.1f} %"))
    return found


def _decode_verdicts(row: Row, rows: Sequence[Row]) -> list[Verdict]:
    """The verdicts on a row of the decode table. Some compare the row with another row."""
    # FlashAttention-3 takes no pages, so rows with pages of 1 are not compared with it.
    peers = {"fp8": (), "page 1": (FA4,)}.get(str(row["kind"]), PEERS_OF["decode"])
    found = [_at_least("decode", row, f"speedup_vs_{who}", 1.0) for who in peers]
    keys = str(row["keys"])
    if row["kind"] == "ragged":
        nbytes = _number(row, "kv_mib") * 2**20
        shares = [share for least, share in RAGGED_SHARES if nbytes >= least][:1]
        found += [_at_least("decode", row, "share_of_copy", share) for share in shares]
        equal = {"kind": "equal", "keys": RAGGED[keys]}
        found += _at_most_times(row, rows, equal, RAGGED_TIME)
    if row["kind"] == "speculative":
        one = {"kind": "equal", "keys": keys, "queries": 1}
        found += _at_most_times(row, rows, one, SPECULATIVE_TIME)
    if row["kind"] == "page 1":
        found += _small_page_verdicts("decode", row, rows)
    if row["kind"] == "fp8" and keys == FP8_CACHE:
        found.append(_at_least("decode", row, f"speedup_vs_{WIDE}", FP8_SPEEDUP))
    limit = FEW_BYTES_US.get((keys, int(_number(row, "head_dim"))))
    if row["kind"] == "few bytes" and limit:
        us = _number(row, "time_us")
        name = f"decode, {_label(row)}: at most {limit:g} us"
        found.append(Verdict(name, us <= limit, f"{us:.1f} us"))
    return found


def _at_most_times(
    row: Row, rows: Sequence[Row], other: Mapping[str, object], most: float
) -> list[Verdict]:
    """The verdict that a row takes at most `most` times the time of the row with the values of
    `other`, at the same head_dim; none where there is no such row."""
    same = ("head_dim", "mode", "flush")
    return [
        Verdict(
            f"decode, {_label(row)}: at most {most:g} times keys={beside['keys']} queries=1",
            ratio <= most,
            f"{ratio:.3f}, {_number(row, 'time_us'):.1f} us",
        )
        for beside in rows
        if all(beside[x] == value for x, value in other.items())
        and all(beside.get(x) == row.get(x) for x in same)
        for ratio in [_number(row, "time_us") / _number(beside, "time_us")]
    ]


def _small_page_verdicts(part: str, row: Row, rows: Sequence[Row]) -> list[Verdict]:
    """The verdict on a row beside the row with the same sizes and pages of PAGE_SIZE, if there is
    one."""
    same = ("head_dim", "batch", "keys", "queries", "kv_dtype", "mode", "flush")
    return [
        _at_least(
            part, row | {"share_of_large_pages": share}, "share_of_large_pages", SMALL_PAGE_SHARE
        )
        for other in rows
        if other["page_size"] == PAGE_SIZE and all(row.get(x) == other.get(x) for x in same)
        for share in [_number(other, "time_us") / _number(row, "time_us")]
    ]


def _label(row: Row) -> str:
    names = (
        "head_dim", "kind", "batch", "seqlen", "seqlen_q", "keys", "queries", "heads", "heads_k",
        "causal", "page_size", "kv_dtype", "mode", "flush",
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


def batches_plots(rows: Sequence[Row]) -> list[Plot]:
    """Time of a step by batch, for each length of paged caches of the part "batches"."""
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
    return tuple(c for c in columns if any(row.get(c) is not None for row in rows))
