"""Softmax attention: what its tests draw, run in the emulator, and compare.

The rule for errors: no more than twice the error of the same formula in plain low-precision code,
whose probabilities and output are rounded to the dtype of q as a kernel has to.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from hypothesis import strategies as st

import cute_attn
from cute_attn.emulator import Emulator
from cute_attn.emulator.report import Finding
from cute_attn.kernels.attention import configs
from cute_attn.launch import Request
from cute_attn.ops.attention import plan_attention
from cute_attn.reference.attention import (
    attention_in_low_precision,
    attention_reference,
    sequences,
)
from tests.sweeps import FULL

ARCH = "sm_100a"
SM90_HEAD_DIMS = configs.head_dims("forward", configs.SM90)
SHORT = 128  # dense calls with so many queries pack heads; packed sequences follow max_seqlen_q
DTYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    None: None,
}

# A kernel computes half of its exponentials by a polynomial of this relative error, and so its sums
# and the logarithm of them: what the polynomial is allowed beside the rounding of float32.
EXP2_ERROR = 8.8e-5

# tanh.approx.f32, relative, by the PTX ISA.
TANH_ERROR = 2.0**-10.987

# A tensor core adds up a score in 16 steps of 16 products, and cuts each sum off at 24 bits.
SCORE_ERROR = 16 * 2.0**-23


# -- where it runs


def head_dim_v_of(head_dim: int) -> int:
    """head_dim_v of the only kernels for this head_dim."""
    return dict(configs.shapes("forward"))[head_dim]


@dataclass(frozen=True)
class Target:
    """The kernel that is tested."""

    arch: str = ARCH
    head_dim: int = 256

    @property
    def most_packed_heads(self) -> int:
        return configs.forward(self.arch, self.head_dim, self.head_dim_v).most_packed_heads

    @property
    def head_dim_v(self) -> int:
        """head_dim_v of the only kernel for this head_dim."""
        return head_dim_v_of(self.head_dim)


_target = Target()


def target() -> Target:
    """The target of all calls, which `on_target` chooses."""
    return _target


@contextmanager
def on_target(chosen: Target) -> Iterator[None]:
    global _target
    before, _target = _target, chosen
    try:
        yield
    finally:
        _target = before


# -- what is compiled in


@dataclass(frozen=True)
class Kind:
    """All that a kernel is specialised by, but for the scheduler.

    window_right stands for a bound to the right: causal is one.
    """

    dtype: torch.dtype = torch.bfloat16
    window_left: bool = False
    window_right: bool = False
    softcap: bool = False
    sink: torch.dtype | None = None
    varlen_q: bool = False
    varlen_k: bool = False
    seqused_q: bool = False
    seqused_k: bool = False
    lse: bool = True
    packed_heads: int = 1

    def request(self, scheduler: str) -> Request:
        (request,) = self.requests(scheduler)
        return request

    def requests(self, scheduler: str, *, num_splits: int = 1) -> list[Request]:
        return plan_attention(
            target().arch,
            head_dim=target().head_dim,
            head_dim_v=target().head_dim_v,
            dtype=DTYPE_NAMES[self.dtype],
            heads=self.packed_heads,
            heads_k=1,
            window_left=self.window_left,
            window_right=self.window_right,
            softcap=self.softcap,
            sink=DTYPE_NAMES[self.sink],
            varlen_q=self.varlen_q,
            varlen_k=self.varlen_k,
            seqused_q=self.seqused_q,
            seqused_k=self.seqused_k,
            scheduler=scheduler,
            return_lse=self.lse,
            short=self.packed_heads > 1,
            long=False,
            few=False,
            num_splits=num_splits,
        )


PLAIN = Kind()
CAUSAL = Kind(window_right=True)
WINDOW = Kind(window_left=True, window_right=True)
PACKED_HEADS = Kind(window_right=True, packed_heads=4)
VARLEN = Kind(window_right=True, varlen_q=True, varlen_k=True)
CACHE = Kind(  # decode with a KV cache
    dtype=torch.float16,
    window_right=True,
    sink=torch.float32,
    varlen_q=True,
    seqused_k=True,
    packed_heads=2,
)
CAPPED = Kind(dtype=torch.float16, window_left=True, softcap=True, sink=torch.bfloat16, lse=False)
USED = Kind(
    window_left=True,
    softcap=True,
    varlen_q=True,
    varlen_k=True,
    seqused_q=True,
    seqused_k=True,
    sink=torch.float16,
)

# The usual sweep draws from these, so that the kernels can be compiled beforehand.
SOME = [PLAIN, CAUSAL, WINDOW, PACKED_HEADS, VARLEN, CACHE, CAPPED, USED]

VALUES: dict[str, tuple[Any, ...]] = {
    field.name: (False, True) for field in fields(Kind) if field.type == "bool"
} | {
    "dtype": (torch.bfloat16, torch.float16),
    "sink": (None, torch.bfloat16, torch.float16, torch.float32),
    "packed_heads": (1, 2, 8, 32, 64),
}


def covering_pairs(seed: int = 0) -> list[Kind]:
    """Kinds among which every pair of values of two fields occurs, if any kind has it."""
    generator = random.Random(seed)
    everything = [
        Kind(**dict(zip(VALUES, values, strict=True)))
        for values in itertools.product(*VALUES.values())
    ]

    def pairs(kind: Kind) -> set[tuple[Any, ...]]:
        items = [(name, getattr(kind, name)) for name in VALUES]
        return set(itertools.combinations(items, 2))

    covered = set().union(*map(pairs, SOME))
    missing = set().union(*map(pairs, everything)) - covered
    chosen = list(SOME)
    while missing:
        best = max(generator.sample(everything, 200), key=lambda kind: len(pairs(kind) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return list(dict.fromkeys(chosen))


KINDS = covering_pairs() if FULL else SOME
BOTH_SCHEDULERS = KINDS if FULL else [CACHE]


# -- a problem


@dataclass(frozen=True)
class Case:
    """What hypothesis draws: a problem of some kind.

    Attributes:
        lengths_q, lengths_k: of each sequence; without cu_seqlens all are the same.
        unused_q, unused_k: how many rows of each do not count, with seqused, which may be more
            than there are, and less than none.
        group: query heads to a head of k.
        left, right: of window_size; right None and the kind having a bound there is causal.
        layout: of q, k and v in memory: see `allocate`.
        tilt: factor by which scores grow from the last keys to the first: running maxima move.
        front, tail: rows in front of the first packed sequence, and behind the last, that belong
            to none.
    """

    kind: Kind = PLAIN
    lengths_q: tuple[int, ...] = (64,)
    lengths_k: tuple[int, ...] = (64,)
    unused_q: tuple[int, ...] = ()
    unused_k: tuple[int, ...] = ()
    heads_k: int = 1
    group: int = 1
    left: int = 0
    right: int | None = None
    scale: float | None = None
    softcap: float = 1.0
    layout: str = "contiguous"
    magnitude: float = 1.0
    tilt: float = 1.0
    front: int = 0
    tail: int = 0
    seed: int = 0

    @property
    def batch(self) -> int:
        return len(self.lengths_q)

    @property
    def heads(self) -> int:
        return self.heads_k * self.group

    def arguments(self) -> dict[str, Any]:
        """Arguments of flash_attn_varlen_func that are not None; rows of no sequence hold NaN."""
        kind, dtype = self.kind, self.kind.dtype
        generator = torch.Generator().manual_seed(self.seed)
        args: dict[str, Any] = {}
        for names, lengths, unused, varlen, used, heads in (
            ("q", self.lengths_q, self.unused_q, kind.varlen_q, kind.seqused_q, self.heads),
            ("kv", self.lengths_k, self.unused_k, kind.varlen_k, kind.seqused_k, self.heads_k),
        ):
            side = names[0]
            unused = unused or (0,) * self.batch
            if varlen:
                offsets = list(itertools.accumulate(lengths, initial=self.front))
                args[f"cu_seqlens_{side}"] = torch.tensor(offsets, dtype=torch.int32)
                shape: tuple[int, ...] = (offsets[-1] + self.tail,)
            else:
                shape = (self.batch, lengths[0])
            if used:
                counts = [n - m for n, m in zip(lengths, unused, strict=True)]
                args[f"seqused_{side}"] = torch.tensor(counts, dtype=torch.int32)
            for name in names:
                columns = target().head_dim_v if name == "v" else target().head_dim
                args[name] = allocate((*shape, heads, columns), dtype, self.layout, side)
        for at_q, at_k in rows_of(args):
            for name, at in (("q", at_q), ("k", at_k), ("v", at_k)):
                view = args[name][at]
                values = torch.randn(view.shape, generator=generator)
                if name == "k" and len(view) > 1:
                    growth = torch.linspace(1.0, self.tilt, len(view)).flip(0)
                    values *= growth.view(-1, 1, 1)
                if name != "v":
                    values *= self.magnitude**0.5
                view.copy_(values)
        right = None if self.right is None else self.right
        args["window_size"] = (
            self.left if kind.window_left else None,
            right if kind.window_right else None,
        )
        args["causal"] = kind.window_right and self.right is None
        if kind.sink is not None:
            args["learnable_sink"] = torch.randn(self.heads, generator=generator).to(kind.sink)
        if kind.softcap:
            args["softcap"] = self.softcap
        if self.scale is not None:
            args["softmax_scale"] = self.scale
        if kind.varlen_q:  # no more than a hint: it says which kernel is wanted
            args["max_seqlen_q"] = 1 if kind.packed_heads > 1 else 10**6
        args["return_lse"] = kind.lse
        return args


def allocate(shape: tuple[int, ...], dtype: torch.dtype, layout: str, side: str) -> torch.Tensor:
    """A tensor of NaNs, `[..., rows, heads, head_dim]`."""
    *outer, rows, heads, dim = shape
    if layout == "contiguous":
        memory = torch.empty(shape, dtype=dtype)
    elif layout == "heads_first":
        memory = torch.empty(*outer, heads, rows, dim, dtype=dtype).transpose(-3, -2)
    elif layout == "fused":  # a row of a projection holds other heads besides
        memory = torch.empty(*outer, rows, heads + 3, dim, dtype=dtype)[..., 2 : 2 + heads, :]
    elif layout == "gapped":
        memory = torch.empty(*outer, rows, heads, dim + 16, dtype=dtype)[..., 8 : 8 + dim]
    elif layout == "expanded" and side == "k" and outer:  # one sequence's keys for all
        memory = torch.empty(1, rows, heads, dim, dtype=dtype).expand(shape)
    else:
        memory = torch.empty(shape, dtype=dtype)
    whole = memory if memory._base is None else memory._base
    whole.fill_(math.nan)
    return memory


def rows_of(args: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """What to index q (and o), and k and v with, to get each sequence's rows that count."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    for s in sequences(args["q"], args["k"], *(args.get(name) for name in names)):
        yield (
            s.rows_q if s.index_q is None else (s.index_q, s.rows_q),
            s.rows_k if s.index_k is None else (s.index_k, s.rows_k),
        )


# -- drawing

EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257)
LAYOUTS = ("contiguous", "heads_first", "fused", "gapped", "expanded")
OTHER_ROUNDINGS = 3  # of the plain implementation, beside the usual ones
ROUNDINGS_OF_FEW = 24  # the same, where the error of a few numbers decides
MOST_WORK = 12  # pairs of a tile of queries and a tile of keys: each takes some 30 ms


@st.composite
def cases(draw: st.DrawFn, kinds: Sequence[Kind] = tuple(KINDS)) -> Case:
    kind = draw(st.sampled_from(kinds))
    varlen = kind.varlen_q or kind.varlen_k
    batch = draw(st.integers(1, 5 if varlen else 3))
    lengths = st.sampled_from(EDGES) | st.integers(1, 400)
    if varlen:
        lengths = st.just(0) | st.integers(0, 20) | lengths
    limit_q = 400
    if kind.packed_heads == 1:
        group = draw(st.sampled_from((1, 1, 3, 2, 4)))
        lengths_q = lengths
        if group % 2 == 0 and not kind.varlen_q:
            lengths_q = st.integers(SHORT + 1, 300)
    else:
        group = kind.packed_heads * (
            draw(st.sampled_from((1, 1, 3))) if kind.packed_heads < 32 else 1
        )
        limit_q = max(1, 600 // kind.packed_heads)
        if not kind.varlen_q:
            limit_q = min(limit_q, SHORT)
        lengths_q = lengths.map(lambda n: min(n, limit_q))

    def side(strategy: st.SearchStrategy[int], ragged: bool) -> tuple[int, ...]:
        if ragged:
            return tuple(draw(strategy) for _ in range(batch))
        return (draw(strategy),) * batch

    sides = side(lengths_q, kind.varlen_q), side(lengths, kind.varlen_k)
    heads_k = draw(st.integers(1, 2))
    while work(heads_k * group, kind.packed_heads, *sides) > MOST_WORK:
        if heads_k > 1:
            heads_k = 1
        elif len(sides[0]) > 1:
            sides = sides[0][1:], sides[1][1:]
        elif sides[1][0] > 130:
            sides = sides[0], (sides[1][0] - 128,)
        else:
            break

    def unused(lengths: tuple[int, ...], some: bool) -> tuple[int, ...]:
        counts = [st.integers(0, n) | st.sampled_from((n, n + 3, -5)) for n in lengths]
        return tuple(draw(count) if some else 0 for count in counts)

    bounds = st.sampled_from((0, 1, 63, 64, 127, 128)) | st.integers(0, 300)
    return Case(
        kind=kind,
        lengths_q=sides[0],
        lengths_k=sides[1],
        unused_q=unused(sides[0], kind.seqused_q),
        unused_k=unused(sides[1], kind.seqused_k),
        heads_k=heads_k,
        group=group,
        left=draw(bounds),
        right=draw(st.none() | bounds),
        scale=draw(st.none() | st.sampled_from((0.01, 0.25))),
        softcap=draw(st.sampled_from((0.5, 5.0, 50.0))),
        layout=draw(st.sampled_from(LAYOUTS)),
        magnitude=draw(st.sampled_from((0.1, 1.0, 4.0))),
        tilt=draw(st.sampled_from((1.0, 1.0, 8.0, 0.1))),
        front=draw(st.sampled_from((0, 0, 1, 70))),
        tail=draw(st.sampled_from((0, 0, 1, 70))),
        seed=draw(st.integers(0, 2**31)),
    )


def work(heads: int, packed: int, lengths_q: Sequence[int], lengths_k: Sequence[int]) -> int:
    """Pairs of a tile of queries and a tile of keys."""
    return sum(
        heads // packed * -(-n * packed // 256) * max(1, -(-m // 128))
        for n, m in zip(lengths_q, lengths_k, strict=True)
    )


# -- running


@dataclass(frozen=True)
class Machine:
    """What the emulator is told."""

    num_sms: int = 4
    schedule: str = "random"
    seed: int = 0
    spurious_cancel: bool = False


MACHINES = st.builds(
    Machine,
    num_sms=st.integers(2, 7),
    schedule=st.sampled_from(("fair", "random", "adversarial")),
    seed=st.integers(0, 2**31),
    spurious_cancel=st.booleans(),
)


def run(
    args: dict[str, Any], scheduler: str = "static", on: Machine = Machine(), **changes: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, lse), where no check of the emulator finds anything but what `is_known` says."""
    args = args | changes
    varlen = any(name.startswith(("cu_", "seqused_")) for name in args)
    function = cute_attn.flash_attn_varlen_func if varlen else cute_attn.flash_attn_func
    emulator = Emulator(
        num_sms=on.num_sms,
        schedule=on.schedule,
        seed=on.seed,
        spurious_cancel=on.spurious_cancel,
    )
    with cute_attn.emulated(target().arch, emulator):
        result = function(**args, scheduler=scheduler)
    assert all(map(is_known, emulator.report.findings)), emulator.report
    return result


def is_known(finding: Finding) -> bool:
    """The compiler moves what tcgen05.ld has loaded to other registers before the wait that the
    kernel has written. The assembler, which tracks those loads, waits there by itself: a note.
    """
    return (
        finding.severity == "note"
        and finding.check == "tcgen05-sync"
        and "without tcgen05.wait::ld" in finding.message
    )


def valid(args: dict[str, Any], *results: torch.Tensor | None) -> list[torch.Tensor]:
    """The rows of o and lse that belong to a sequence, one after another: `[rows, heads, ...]`."""
    return [
        torch.cat(
            [
                (x if x.dim() == args["q"].dim() else x.transpose(-1, -2))[at]
                for at, _ in rows_of(args)
            ]
        )
        for x in results
        if x is not None
    ]


def same(args: dict[str, Any], one: Any, other: Any) -> bool:
    """Whether two results (o, lse) are the same bit for bit, where they are defined."""
    pairs = zip(valid(args, *one), valid(args, *other), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


# -- comparing


def reference_arguments(args: dict[str, Any]) -> dict[str, Any]:
    return {
        name: x
        for name, x in args.items()
        if name not in ("max_seqlen_q", "max_seqlen_k", "return_lse", "batch_invariant")
    }


def assert_no_worse(
    actual: torch.Tensor,
    plains: Sequence[torch.Tensor],
    exact: torch.Tensor,
    floor: float = 0.0,
) -> None:
    """The error rule, on the norm over all elements and on the largest, against the plain
    implementation that errs most in it.

    Where plain arithmetic happens to be exact, so that its error says nothing (a row with one key
    has probability 1), `floor` is granted.
    """
    assert torch.equal(actual.isnan(), exact.isnan())
    if exact.numel() == 0:
        return
    for order in (2.0, math.inf):
        least, ours, *theirs = (
            torch.linalg.vector_norm(x.flatten(), order).item()
            for x in (floor * exact, *(x.double() - exact for x in (actual, *plains)))
        )
        assert ours <= max(2 * max(theirs), least), (
            f"norm {order}: error {ours:.3e}, plain {max(theirs):.3e}, floor {least:.3e}"
        )


def other_roundings(args: dict[str, Any]) -> list[torch.Tensor]:
    """The plain o with P rounded in other ways of the same size, as `valid` returns it."""
    found = []
    for seed in range(ROUNDINGS_OF_FEW):
        jitter = torch.Generator().manual_seed(seed)
        o, _ = attention_in_low_precision(**reference_arguments(args), jitter=jitter)
        found += valid(args, o)
    return found


def assert_agrees(args: dict[str, Any], o: torch.Tensor, lse: torch.Tensor | None) -> None:
    """The error rule for o, and for lse. The largest error may be the error of one of a million
    elements, whose plain error is small by chance. Then other roundings count too. In one row of
    200 keys, 2 of 24 plain roundings have the same largest error as the kernel."""
    dtype = args["q"].dtype
    exact, exact_lse = attention_reference(**reference_arguments(args))
    plain, plain_lse = attention_in_low_precision(**reference_arguments(args))
    assert o.shape == exact.shape and o.dtype == dtype and o.is_contiguous()
    # One rounding of a probability.
    floor = torch.finfo(dtype).eps / 2
    ours, theirs, true = valid(args, o, plain, exact)
    try:
        assert_no_worse(ours, [theirs], true, floor)
    except AssertionError:
        assert_no_worse(ours, [theirs, *other_roundings(args)], true, floor)
    if lse is None:
        return
    assert lse.shape == exact_lse.shape and lse.dtype == torch.float32
    ours, theirs, true = valid(args, lse, plain_lse, exact_lse)
    assert torch.equal(ours.isinf(), true.isinf())
    finite = true.isfinite()
    ours_error, plain_error = (((x - true)[finite]).abs() for x in (ours.double(), theirs.double()))
    if len(ours_error):
        granted = 2 * plain_error.max() + EXP2_ERROR + SCORE_ERROR * true[finite].abs()
        granted += TANH_ERROR * args.get("softcap", 0.0)
        assert (ours_error <= granted).all(), (ours_error / granted).max()
