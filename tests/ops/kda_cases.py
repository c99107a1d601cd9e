"""Chunked KDA: what its tests draw, run on a GPU or in the emulator, and compare.

The rule for errors: no more than twice the error of the same chunks in plain PyTorch float32
arithmetic, which keeps what a stage leaves to the next in the inputs' dtype, as a kernel has to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

import cute_attn
from cute_attn.launch import Request
from cute_attn.ops import gated_delta_rule, operator
from cute_attn.ops.gated_delta_rule import chunk as head_chunk
from cute_attn.ops.gated_delta_rule import chunk_forward
from cute_attn.ops.kda import (
    chunk,
    chunk_backward,
    chunk_passes,
    chunk_pool,
    plan_chunk_kda,
    stages,
    stages_backward,
)
from cute_attn.reference.kda import (
    CHUNK,
    KdaResult,
    KdaStages,
    chunks,
    kda_chunk_reference,
    kda_reference,
    log_decay,
)
from tests.sweeps import FULL

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
SMALLEST_GATE = -128.0  # kernels may take a gate below for this


# -- what is compiled in


@dataclass(frozen=True)
class Kind:
    """All that the kernels are specialised by."""

    dtype: torch.dtype = torch.bfloat16
    dim_k: int = 128
    dim_v: int = 128
    gate_dtype: torch.dtype = torch.bfloat16
    beta_dtype: torch.dtype = torch.bfloat16
    gate: str = "softplus"
    A_log: bool = True
    dt_bias: bool = True
    l2norm: bool = True
    sigmoid: bool = True
    index: torch.dtype | None = None
    initial: bool = True
    final: bool = True
    v_first: bool = False

    def requests(self, arch: str, **options: Any) -> list[Request]:
        return plan_chunk_kda(
            arch,
            dtype=NAMES[self.dtype],
            gate_dtype=NAMES[self.gate_dtype],
            beta_dtype=NAMES[self.beta_dtype],
            head_dim_k=self.dim_k,
            head_dim_v=self.dim_v,
            initial_state=self.initial,
            output_final_state=self.final,
            use_qk_l2norm_in_kernel=self.l2norm,
            use_gate_in_kernel=self.gate != "none",
            use_beta_sigmoid_in_kernel=self.sigmoid,
            lower_bound=self.gate == "lower_bound",
            state_v_first=self.v_first,
            index_dtype="none" if self.index is None else str(self.index).removeprefix("torch."),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            **options,
        )


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN = Kind()
PACKED = Kind(index=torch.int32, v_first=True)
DECAYS = Kind(  # no gate, norm or sigmoid
    gate_dtype=FP32, beta_dtype=FP32, gate="none", l2norm=False, sigmoid=False, index=torch.int64
)
SMALL = Kind(
    dtype=FP16, dim_k=64, dim_v=64, gate_dtype=FP32, beta_dtype=FP16, gate="lower_bound",
    dt_bias=False, v_first=True,
)  # fmt: skip
WIDE_V = Kind(
    dim_k=64, gate_dtype=FP32, gate="lower_bound", A_log=False, sigmoid=False, index=torch.int64,
    initial=False,
)  # fmt: skip
WIDE_K = Kind(
    dtype=FP16, dim_v=64, gate_dtype=FP16, beta_dtype=FP32, dt_bias=False, l2norm=False,
    final=False,
)  # fmt: skip

# The usual sweep draws from these, so that the kernels can be compiled beforehand.
SOME = [PLAIN, PACKED, DECAYS, SMALL, WIDE_V]
SOME_MODULAR = [PACKED, DECAYS, SMALL]  # more kernels to compile for each

VALUES: dict[str, tuple[Any, ...]] = {
    field.name: (False, True) for field in fields(Kind) if field.type == "bool"
} | {
    "dtype": (BF16, FP16),
    "dim_k": (64, 128),
    "dim_v": (64, 128, 192, 256),
    "gate_dtype": (FP32, BF16, FP16),
    "beta_dtype": (FP32, BF16, FP16),
    "gate": ("none", "softplus", "lower_bound"),
    "index": (None, torch.int32, torch.int64),
}


def kinds() -> st.SearchStrategy[Kind]:
    if not FULL:
        return st.sampled_from(SOME)
    return st.builds(
        Kind, **{name: st.sampled_from(values) for name, values in VALUES.items()}
    ).map(lambda kind: replace(kind, A_log=True) if kind.gate == "softplus" else kind)


# -- a problem


@dataclass(frozen=True)
class Case:
    """What hypothesis draws: a problem of some kind.

    Attributes:
        lengths: of the sequences; all the same unless they are packed.
        heads: of q and k; group: value heads for each.
        gates: how large they are, see `_gates`.
        layout: of the tensors in memory, see `_allocate`.
        lead, tail: tokens before and behind all packed sequences that belong to none.
        negative: allow_neg_eigval, where beta is the input of a sigmoid.
        alike: keys are nearly one key, which makes the system that a chunk solves stiff.
    """

    kind: Kind = PLAIN
    lengths: tuple[int, ...] = (100,)
    heads: int = 1
    group: int = 2
    gates: str = "usual"
    layout: str = "contiguous"
    lead: int = 0
    tail: int = 0
    scale: float | None = None
    negative: bool = False
    alike: bool = False
    seed: int = 0

    @property
    def heads_v(self) -> int:
        return self.heads * self.group

    def arguments(self, device: str) -> dict[str, Any]:
        """Arguments of chunk_kda; tokens of no sequence hold NaN."""
        kind = self.kind
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        args: dict[str, Any] = {}
        if kind.index is None:
            batch, tokens = len(self.lengths), self.lengths[0]
        else:
            offsets = list(itertools.accumulate(self.lengths, initial=self.lead))
            batch, tokens = 1, offsets[-1] + self.tail
            args["cu_seqlens"] = torch.tensor(offsets, dtype=kind.index)
        rows = (batch, tokens)
        keys = normal(*rows, self.heads, kind.dim_k)
        if self.alike:
            keys = keys * 0.1 + normal(self.heads, kind.dim_k)
        queries = normal(*rows, self.heads, kind.dim_k)
        if not kind.l2norm:
            keys, queries = (torch.nn.functional.normalize(x, dim=-1) for x in (keys, queries))
        beta = normal(*rows, self.heads_v)
        values = {
            "q": queries,
            "k": keys,
            "v": normal(*rows, self.heads_v, kind.dim_v),
            "g": self._gates((*rows, self.heads_v, kind.dim_k), generator),
            "beta": 2 * beta if kind.sigmoid else beta.sigmoid(),
        }
        dtypes = {"g": kind.gate_dtype, "beta": kind.beta_dtype}
        memory = _allocate(
            {name: (x.shape, dtypes.get(name, kind.dtype)) for name, x in values.items()},
            self.layout,
        )
        if kind.index is None:
            for name, x in values.items():
                memory[name].copy_(x)
        else:
            for name, x in values.items():
                used = slice(self.lead, tokens - self.tail)
                memory[name][:, used].copy_(x[:, used])
        args |= memory
        if kind.gate != "none":
            args["use_gate_in_kernel"] = True
            if kind.A_log:
                args["A_log"] = normal(self.heads_v)
            if kind.dt_bias:
                args["dt_bias"] = normal(self.heads_v * kind.dim_k)
            if kind.gate == "lower_bound":
                args["lower_bound"] = -5.0 if self.gates != "extreme" else -300.0
        if kind.sigmoid:
            args |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": self.negative}
        if kind.l2norm:
            args["use_qk_l2norm_in_kernel"] = True
        if kind.initial:
            matrix = (kind.dim_v, kind.dim_k) if kind.v_first else (kind.dim_k, kind.dim_v)
            args["initial_state"] = normal(len(self.lengths), self.heads_v, *matrix)
        args |= {"output_final_state": kind.final, "state_v_first": kind.v_first}
        if self.scale is not None:
            args["scale"] = self.scale
        return {
            name: x.to(device) if isinstance(x, torch.Tensor) and device != "cpu" else x
            for name, x in args.items()
        }

    def _gates(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """What g is: logarithms of decays, or what becomes of them in the gate."""
        uniform = torch.rand(shape, generator=generator)
        x = torch.randn(shape, generator=generator)
        if self.kind.gate != "none":
            wide = {"usual": 1.0, "weak": 0.1, "strong": 6.0, "mixed": 1.0, "extreme": 30.0}
            x = wide[self.gates] * x - (4.0 if self.gates == "weak" else 0.0)
            return torch.where(uniform < 0.02, 500.0, x) if self.gates == "mixed" else x
        if self.gates == "usual":
            return -torch.nn.functional.softplus(x - 2.0)
        if self.gates == "weak":
            return -0.05 * uniform
        if self.gates == "strong":
            return -5.0 * torch.sigmoid(3 * x)
        if self.gates == "mixed":  # a few that forget all
            forgets = torch.where(uniform < 0.01, -math.inf, -1000.0)
            return torch.where(uniform < 0.02, forgets, -0.5 * uniform)
        return -40.0 * torch.nn.functional.softplus(x)


def _allocate(
    shapes: dict[str, tuple[torch.Size, torch.dtype]], layout: str
) -> dict[str, torch.Tensor]:
    """Tensors of NaN, of these shapes `[B, T, heads, ...]` and dtypes."""
    memory = {}
    for name, (shape, dtype) in shapes.items():
        batch, tokens, heads, *dim = shape
        if layout == "heads_first":
            x = torch.empty(batch, heads, tokens, *dim, dtype=dtype).transpose(1, 2)
        elif layout == "projection":  # a row holds other things besides
            x = torch.empty(batch, tokens, heads + 8, *dim, dtype=dtype)[:, :, 3 : 3 + heads]
        elif layout == "misaligned":
            x = torch.empty(batch, tokens, heads * math.prod(dim) + 5, dtype=dtype)[..., 3:-2]
            x = x.unflatten(-1, (heads, *dim))
        else:
            x = torch.empty(shape, dtype=dtype)
        (x if x._base is None else x._base).fill_(math.nan)
        memory[name] = x
    return memory


GATES = ("usual", "weak", "strong", "mixed", "extreme")
LAYOUTS = ("contiguous", "heads_first", "projection", "misaligned")
EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129)
FEWEST_TOKENS = 32  # of all value heads
MOST_CHUNKS = {
    "cpu": 10 if FULL else 6,
    "cuda": 400,
}  # of all heads: some 10 ms each in the emulator


@st.composite
def cases(draw: st.DrawFn, device: str, of: Sequence[Kind] | None = None) -> Case:
    drawn = of is None or (FULL and of in (SOME, SOME_MODULAR))
    kind = draw(kinds() if drawn else st.sampled_from(of))
    longest = 140 if device == "cpu" else 1000
    length = st.sampled_from(EDGES) | st.integers(1, longest)
    if kind.index is None:
        lengths = (draw(length),) * draw(st.integers(1, 3))
    else:
        lengths = tuple(draw(st.lists(st.just(0) | length, min_size=1, max_size=5)))
    heads, group = draw(
        st.sampled_from([(1, 1), (2, 1), (1, 2), (1, 3), (2, 2)])
        if device == "cpu"
        else st.tuples(st.integers(1, 4), st.sampled_from((1, 2, 3, 4, 8)))
    )
    while heads * group * sum(-(-n // CHUNK) for n in lengths) > MOST_CHUNKS[device]:
        if len(lengths) > 1:
            lengths = lengths[:-1]
        elif group > 2:
            group = 2
        else:
            heads = 1
            lengths = (min(lengths[0], 140),)
    # Tokens of a head share roundings, of Aqk for one: the error rule wants more than a few.
    while 0 < heads * group * sum(lengths) < FEWEST_TOKENS:
        heads *= 2
    packed = kind.index is not None
    return Case(
        kind=kind,
        lengths=lengths,
        heads=heads,
        group=group,
        gates=draw(st.sampled_from(GATES)),
        layout=draw(st.sampled_from(LAYOUTS)),
        lead=draw(st.sampled_from((0, 0, 1, 70))) if packed else 0,
        tail=draw(st.sampled_from((0, 0, 1, 70))) if packed else 0,
        scale=draw(st.sampled_from((None, None, 1.0, 0.3))),
        negative=draw(st.booleans()),
        alike=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def give_one_beta(args: dict[str, Any], beta: float) -> None:
    """Give all tokens this beta, gates near 0 and keys with a mean cosine of 0.9, from a state of
    0: corrections cancel in the state. `args` has no gate, norm or sigmoid in the kernel."""
    generator = torch.Generator().manual_seed(0)
    k = args["k"]
    shared, own = (
        torch.nn.functional.normalize(torch.randn(shape, generator=generator), dim=-1)
        for shape in (k.shape[2:], k.shape)
    )
    k.copy_(torch.nn.functional.normalize(0.9**0.5 * shared + 0.1**0.5 * own, dim=-1))
    args["g"].fill_(-1e-3)
    args["beta"].fill_(beta)
    args["initial_state"].zero_()


# 16 bits do not hold these. The last one is small, which matters for the exponents of float16.
ONE_BETA = [
    (torch.bfloat16, 0.998),
    *(
        pytest.param(*values, marks=pytest.mark.slow)
        for values in (
            (torch.bfloat16, 1.8), (torch.float16, 0.50024), (torch.float16, 1e-4)
        )
    ),
]  # fmt: skip


def examples(few: int) -> settings:
    """How many cases a test draws in the usual sweep, and in the full one twenty times as many."""
    return settings(max_examples=20 * few if FULL else few)


# -- running


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """What an operator allocates, its results and what is between its kernels, holds NaN."""

    def empty(shape: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(shape, math.nan, dtype=dtype, device=device)

    def like(
        x: torch.Tensor, *shape: Any, dtype: torch.dtype | None = None, **_: Any
    ) -> torch.Tensor:
        return torch.full(*shape or (x.shape,), math.nan, dtype=dtype or x.dtype, device=x.device)

    with pytest.MonkeyPatch.context() as patch:
        modules = (
            chunk, chunk_backward, chunk_passes, chunk_pool, stages, stages_backward, head_chunk,
            chunk_forward,
        )  # fmt: skip
        for module in modules:
            for name, poisoned in (("_empty", empty), ("_empty_like", like), ("_new_empty", like)):
                if hasattr(module, name):
                    patch.setattr(module, name, poisoned)
        yield


@contextmanager
def warm() -> Iterator[None]:
    """Loaded kernels are remembered in the emulator, too: it must be one emulator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "may_remember", lambda _: True)
        whole = chunk._chunk, chunk_backward.BACKWARD, chunk_pool._pool
        for one in (*whole, *vars(stages).values(), *vars(head_chunk).values()):
            if isinstance(one, operator.Operator):
                patch.setattr(one, "ready", {})
        yield


def function_of(args: dict[str, Any]) -> Callable[..., Any]:
    """The function that takes these arguments: by the gates, of channels or of heads."""
    if args["g"].dim() == 3:
        return gated_delta_rule.chunk_gated_delta_rule
    return cute_attn.chunk_kda


def run(args: dict[str, Any], **changes: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, final_state)"""
    args = args | changes
    modular = args.get("return_intermediate_states")
    with torch.inference_mode() if modular else torch.no_grad(), poisoned_outputs():
        o, final_state, *_ = function_of(args)(**args)
    return o, final_state


def run_all(args: dict[str, Any], **changes: Any) -> tuple[torch.Tensor, ...]:
    """(o, final_state, h)"""
    args = args | changes | {"output_final_state": True, "return_intermediate_states": True}
    with torch.inference_mode(), poisoned_outputs():
        o, final_state, h = cute_attn.chunk_kda(**args)
    return o, final_state, h


def tokens_of(args: dict[str, Any], rows: slice) -> dict[str, Any]:
    """The call with these tokens only; what else is by token, or by offset, is the caller's."""
    return args | {name: args[name][:, rows] for name in ("q", "k", "v", "g", "beta")}


def spans(args: dict[str, Any]) -> list[tuple[int, slice]]:
    """(batch, tokens) of each sequence."""
    if "cu_seqlens" not in args:
        return [(b, slice(None)) for b in range(args["q"].shape[0])]
    return [
        (0, slice(start, end)) for start, end in itertools.pairwise(args["cu_seqlens"].tolist())
    ]


def valid(args: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """The tokens of x, `[B, T, ...]`, that belong to a sequence, one after another."""
    return torch.cat([x[at] for at in spans(args)])


def same(args: dict[str, Any], one: Any, other: Any) -> bool:
    """Whether two results (o, final_state) are the same bit for bit, where they are defined."""
    pairs = [(valid(args, one[0]), valid(args, other[0])), (one[1], other[1])]
    return all(
        a is b if a is None else torch.equal(a.view(torch.int8), b.view(torch.int8))
        for a, b in pairs
    )


# -- comparing


def definition(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments that the references take."""
    operators = (
        "output_final_state", "disable_recompute", "return_intermediate_states", "cu_seqlens_cpu",
    )  # fmt: skip
    given = {name: x for name, x in args.items() if name not in operators}
    if given["g"].dim() == 3:  # a gate a head is KDA's gate of one channel
        given["g"] = given["g"].unsqueeze(-1)
    return given


def bounded(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with given decays raised to the smallest that counts: chunks have no sums of
    infinite logarithms."""
    if args.get("use_gate_in_kernel"):
        return args
    return args | {"g": args["g"].float().clamp(min=SMALLEST_GATE)}


def reference(args: dict[str, Any]) -> KdaResult:
    """In float64, token by token."""
    return kda_reference(**definition(args))


def plain(args: dict[str, Any]) -> KdaStages:
    """In float32, by chunks."""
    return kda_chunk_reference(
        **definition(bounded(args)), dtype=torch.float32, stage_dtype=args["q"].dtype
    )


def assert_no_worse(
    actual: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, what: str = ""
) -> None:
    """The error rule, on the norm over all elements. A result in 16 bits is one of theirs, too."""
    assert actual.shape == exact.shape
    assert not actual.isnan().any(), f"{what}: NaN"
    theirs = theirs.to(actual.dtype).double()
    error, granted, size = (
        x.norm().item() for x in (actual.double() - exact, theirs - exact, exact)
    )
    # A single float32 rounding of every element is granted where plain arithmetic is exact.
    assert error <= 2 * granted + torch.finfo(torch.float32).eps * size, (
        f"{what}: error {error:.3e}, plain {granted:.3e}, of {size:.3e}"
    )


def assert_agrees(args: dict[str, Any], o: torch.Tensor, state: torch.Tensor | None) -> None:
    exact, theirs = reference(args), plain(args)
    assert o.dtype == args["q"].dtype and o.shape == args["v"].shape and o.is_contiguous()
    assert_no_worse(*(valid(args, x) for x in (o, theirs.o, exact.o)), "o")
    assert (state is not None) == args["output_final_state"]
    if state is not None:
        assert state.dtype == torch.float32
        assert_no_worse(state, theirs.states.final_state, exact.final_state, "final state")


def gates_of(args: dict[str, Any], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The logarithms of decays, as the stages sum them."""
    g = args["g"].to(dtype)
    if args.get("use_gate_in_kernel"):
        names = ("A_log", "dt_bias", "lower_bound")
        g = log_decay(g, *(args.get(name) for name in names), dtype=dtype)
    return g.clamp(min=SMALLEST_GATE)


def chunk_count(args: dict[str, Any]) -> int:
    """How many states h has."""
    return sum(1 for _ in chunks(args["q"][:1], args.get("cu_seqlens")))
