"""Cases, byte counts and verdicts of the KDA benchmarks; this module does not need torch.

The byte counts agree with docs/kernels/kda.md, stage by stage.
"""

from __future__ import annotations

import argparse
import operator
import pathlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from ..harness import choosing
from ..harness.choosing import Filter, add_only
from ..harness.report import Row, Verdict
from ..harness.roofline import Roofline, gbps
from ..harness.timing import Timing

CHUNK = 64
TAPS = 4  # of the causal convolution
SEED = 20261121
LOWER_BOUND = -5.0
ELEMENT, FLOAT = 2, 4  # bytes of bfloat16 or float16, and of float32

Path = Literal["fused", "modular"]  # the paths of `chunk_kda`
PATHS: tuple[Path, ...] = ("fused", "modular")
GATES = ("lower_bound", "softplus", "lower_bound-strong", "softplus-strong")
# Gates without A_log and dt_bias, on which the time of few heads depends; see `problem.raw_gates`.
RAW_GATES = ("lower_bound-raw", "lower_bound-weak", "lower_bound-mixed")
LENGTHS = ("uniform", "skewed", "random")
Slots = Literal["batch", "random"]  # values of `DecodeCase.slots`
SLOTS: tuple[Slots, ...] = ("batch", "random")

# Heads of q and k, and heads of v.
HEADS = ((12, 12), (32, 32), (64, 64), (96, 96), (32, 64))
PACKED_HEADS = ((64, 64), (32, 64))
PACKED_TOKENS = (8192, 32768)
SEQUENCES = (8, 20)
JUDGED_TOKENS = 8192  # tokens of the cases that a peer is tuned for

# The share of a GPU's memory that the tensors of our call, and of a peer's call, may take.
MEMORY_SHARE = 0.75


@dataclass(frozen=True)
class Case:
    """The sizes of a call over whole sequences.

    Attributes:
        heads, heads_v: heads of q and k, and heads of v.
        tokens: tokens of one row of the batch; with packed sequences, of all sequences together.
        sequences: packed sequences in the single row; 0 for a dense batch.
        lengths: lengths of packed sequences: "uniform", "skewed" (the last sequence has half of the
            tokens) or "random"; "" for a dense batch.
        gate: one of GATES or RAW_GATES: the kind and its strength, see `problem.gate_parameters`
            and `problem.raw_gates`.
    """

    heads: int
    heads_v: int
    tokens: int
    batch: int = 1
    sequences: int = 0
    lengths: str = ""
    gate: str = "lower_bound"
    head_dim_k: int = 128
    head_dim_v: int = 128

    @property
    def rows(self) -> Row:
        """The columns that identify a case."""
        return {
            "batch": self.batch,
            "heads": self.heads,
            "heads_v": self.heads_v,
            "tokens": self.tokens,
            "sequences": self.sequences or self.batch,
            "lengths": self.lengths or "dense",
            "gate": self.gate,
        }

    @property
    def bounded(self) -> bool:
        """Whether the gate has a lower bound."""
        return self.gate.startswith("lower_bound")

    @property
    def raw(self) -> bool:
        """Whether the gate has no parameters."""
        return self.gate in RAW_GATES

    @property
    def strong(self) -> bool:
        return self.gate.endswith("strong")

    def __str__(self) -> str:
        packed = f" in {self.sequences} {self.lengths} sequences" if self.sequences else ""
        gate = "" if self.gate == GATES[0] else f", gate {self.gate}"
        return f"B={self.batch} H={self.heads} HV={self.heads_v} T={self.tokens}{packed}{gate}"

    # ---- counts

    @property
    def states(self) -> int:
        return self.sequences or self.batch

    @property
    def chunk_heads(self) -> int:
        """Number of chunks of all value heads; packed sequences have slightly more."""
        return self.batch * -(-self.tokens // CHUNK) * self.heads_v

    # ---- bytes of tensors

    @property
    def qk_bytes(self) -> int:
        """q or k."""
        return self.batch * self.tokens * self.heads * self.head_dim_k * ELEMENT

    @property
    def k_wide(self) -> int:
        """Bytes of a tensor [B, T, HV, K] of 16 bits: g as a layer gives it, w, kg or qg."""
        return self.batch * self.tokens * self.heads_v * self.head_dim_k * ELEMENT

    @property
    def v_wide(self) -> int:
        """Bytes of a tensor [B, T, HV, V] of 16 bits: v, o, u or v_new."""
        return self.batch * self.tokens * self.heads_v * self.head_dim_v * ELEMENT

    @property
    def sums(self) -> int:
        """G, float32."""
        return self.k_wide // ELEMENT * FLOAT

    @property
    def scores(self) -> int:
        """Aqk or Akk."""
        return self.batch * self.tokens * self.heads_v * CHUNK * ELEMENT

    @property
    def beta(self) -> int:
        return self.batch * self.tokens * self.heads_v * ELEMENT

    @property
    def state(self) -> int:
        """All states of all sequences, float32."""
        return self.states * self.heads_v * self.head_dim_k * self.head_dim_v * FLOAT

    # ---- bytes of stages

    @property
    def intra_bytes(self) -> int:
        """Bytes of `kda_chunk_intra`, which reads q, k, v, G and beta, and writes Aqk, Akk, w, u
        and kg."""
        read = 2 * self.qk_bytes + self.v_wide + self.sums + 2 * self.beta
        return read + 2 * self.scores + 2 * self.k_wide + self.v_wide

    @property
    def recompute_bytes(self) -> int:
        """Bytes of `kda_recompute_w_u`, which reads k, v, G, beta and Akk, and writes w, u and
        kg."""
        read = self.qk_bytes + self.v_wide + self.sums + 2 * self.beta + self.scores
        return read + 2 * self.k_wide + self.v_wide

    @property
    def one_kernel_bytes(self) -> int:
        """`chunk_kda` as one kernel would move them: inputs, outputs and states only."""
        read = 2 * self.qk_bytes + self.v_wide + self.k_wide + self.beta
        return read + self.v_wide + 2 * self.state

    @property
    def fused_bytes(self) -> int:
        """`chunk_kda` by its fused path, whose kernels write and read records in between."""
        between = 3 * self.k_wide + 2 * self.scores + self.decays
        return self.one_kernel_bytes + 2 * between

    @property
    def modular_bytes(self) -> int:
        """`chunk_kda` stage by stage: gate, intra, delta_h, output."""
        h = self.chunk_states
        gate = self.k_wide + self.sums
        delta_h = 2 * self.k_wide + 2 * self.v_wide + self.decays + h + 2 * self.state
        output = self.qk_bytes + 2 * self.v_wide + self.sums + self.scores + h
        return gate + self.intra_bytes + delta_h + output

    # ---- bytes of the backward's kernels, without states at the ends

    @property
    def decays(self) -> int:
        """The decay of each chunk."""
        return self.chunk_heads * self.head_dim_k * FLOAT

    @property
    def chunk_states(self) -> int:
        """A state of each chunk, or its gradient, in 16 bits."""
        return self.chunk_heads * self.head_dim_k * self.head_dim_v * ELEMENT

    @property
    def norms(self) -> int:
        """The inverse norms of q and k, in float32."""
        return self.chunk_heads // self.heads_v * self.heads * 2 * CHUNK * FLOAT

    @property
    def prepare_bytes(self) -> int:
        """Bytes of `prepare`, which reads q, k, g and beta, and writes the records and the inverse
        norms."""
        read = 2 * self.qk_bytes + self.k_wide + self.beta
        return read + 3 * self.k_wide + 2 * self.scores + self.decays + self.norms

    @property
    def adjoint_pass_bytes(self) -> int:
        """Bytes of `adjoint_pass`, which reads do and the records, and writes the gradients of the
        states, and dv."""
        read = self.v_wide + 3 * self.k_wide + 2 * self.scores + self.decays
        return read + self.chunk_states + self.v_wide

    @property
    def gradients_bytes(self) -> int:
        """Bytes of `gradients`, which reads q, k, norms of q and k, g, beta, do, dv, v_new, states
        and gradients of states, and writes dq, dk, dg and dbeta."""
        tokens = 2 * self.qk_bytes + self.k_wide + self.beta
        return 2 * tokens + self.norms + 3 * self.v_wide + 2 * self.chunk_states

    @property
    def training_bytes(self) -> int:
        """A rough upper bound of the memory of a training step, ours or the peer's. The bound
        counts G, gradients of q, k and g in float32, states and gradients of states, and 12 tensors
        of 16 bits.
        """
        wide = max(self.k_wide, self.v_wide)
        return 4 * self.sums + 2 * self.chunk_states + 12 * wide + 6 * self.scores

    @property
    def layer_bytes(self) -> int:
        """A rough upper bound of the tensors that a layer keeps for its backward, and of the
        layer's gradients."""
        return self.sums + 2 * self.scores + 8 * max(self.k_wide, self.v_wide)

    # ---- memory

    @property
    def peak_bytes(self) -> int:
        """A rough upper bound of a call's memory: the inputs, and the stages' results (h counts as
        much as G)."""
        given = 2 * self.qk_bytes + self.v_wide + self.sums
        kept = 2 * self.qk_bytes + 2 * self.sums + 2 * self.k_wide + 3 * self.v_wide
        return given + kept + 3 * self.scores

    # ---- packed sequences

    def sequence_lengths(self, seed: int = SEED) -> list[int]:
        """Lengths of the packed sequences, at least 1 each."""
        count, tokens = self.sequences, self.tokens
        if self.lengths == "uniform":
            return [tokens // count + (i < tokens % count) for i in range(count)]
        if self.lengths == "skewed":
            rest = tokens - tokens // 2
            return [rest // (count - 1) + (i < rest % (count - 1)) for i in range(count - 1)] + [
                tokens // 2
            ]
        cuts = sorted(random.Random(seed).sample(range(1, tokens), count - 1))
        return [end - start for start, end in zip([0, *cuts], [*cuts, tokens], strict=True)]


@dataclass(frozen=True)
class DecodeCase:
    """A decode step: one token of each sequence of a batch.

    Attributes:
        slots: places of the states. "batch": in the order of the batch, without indices. "random":
            in a pool, with indices in random order, as in a server that has run for a while.
        decays: what has a decay of its own: "channel" (KDA) or "head" (the Gated Delta Net).
        convolution: whether q, k and v go through the causal convolution first.
    """

    batch: int
    heads: int
    heads_v: int
    head_dim_k: int = 128
    head_dim_v: int = 128
    slots: Slots = "random"
    decays: str = "channel"
    convolution: bool = False

    @property
    def gates(self) -> int:
        """Numbers of g of a head."""
        return 1 if self.decays == "head" else self.head_dim_k

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.heads * self.head_dim_k + self.heads_v * self.head_dim_v

    @property
    def min_bytes(self) -> int:
        """The states twice; q, k, v, g, beta, o, A_log, dt_bias and the indices once. With a
        convolution, the windows twice and the weights once."""
        k, v = self.head_dim_k, self.head_dim_v
        state = self.heads_v * k * v * FLOAT
        token = (2 * self.heads * k + self.heads_v * (2 * v + self.gates + 1)) * ELEMENT
        total = self.batch * (2 * state + token + 4) + self.heads_v * (self.gates + 1) * FLOAT
        if self.convolution:
            total += self.channels * ELEMENT * (2 * (TAPS - 1) * self.batch + TAPS)
        return total

    def __str__(self) -> str:
        slots = ", random slots" if self.slots == "random" else ""
        convolution = ", with convolution" if self.convolution else ""
        return f"B={self.batch} H={self.heads} HV={self.heads_v}{slots}{convolution}"


def dense_cases(tokens: Sequence[int]) -> list[Case]:
    return [Case(heads, heads_v, count) for heads, heads_v in HEADS for count in tokens]


def packed_cases(lengths: Sequence[str]) -> list[Case]:
    return [
        Case(heads, heads_v, tokens, sequences=sequences, lengths=how)
        for heads, heads_v in PACKED_HEADS
        for tokens in PACKED_TOKENS
        for sequences in SEQUENCES
        for how in lengths
    ]


# ---- choosing


CHUNK_FILTERS = ("B", "H", "HV", "T", "N", "lengths", "gate")
_FILTERS = {
    "B": "batch",
    "H": "heads",
    "HV": "heads_v",
    "T": "tokens",
    "N": "sequences",
    "lengths": "lengths",
    "gate": "gate",
    "slots": "slots",
}


def add_arguments(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """The options of all KDA benchmarks that time against a peer."""
    known = {name: _FILTERS[name] for name in names}
    add_only(parser, known, "H=64,T=8192")
    parser.add_argument("--no-peer", action="store_true", help="leave flash-linear-attention out")


def add_tuning(parser: argparse.ArgumentParser) -> None:
    """The options of benchmarks that prepare the peer, see `fla_tuning`."""
    parser.add_argument(
        "--peer-jobs",
        type=int,
        default=0,
        metavar="N",
        help="processes that compile the peer's kernels beforehand, so that its autotuner, which "
        "compiles one configuration after the other, finds them in Triton's cache",
    )
    parser.add_argument(
        "--peer-rep",
        type=float,
        metavar="MS",
        help="milliseconds for which the peer's autotuner times a configuration (its default: 100)",
    )
    parser.add_argument(
        "--peer-share",
        action="store_true",
        help="let the peer run packed sequences with what its autotuner chose for dense ones",
    )
    parser.add_argument(
        "--peer-tuning",
        type=pathlib.Path,
        metavar="DIR",
        help="take what the peer's autotuner chose in earlier runs from here, and add to it",
    )


AnyCase = TypeVar("AnyCase", Case, DecodeCase)


def chosen(cases: Sequence[AnyCase], only: Sequence[Filter] | None) -> list[AnyCase]:
    """The cases that pass one of the filters. Dense cases have N=0 and lengths=dense."""
    return choosing.chosen(cases, only, _value_of)


def _value_of(case: Case | DecodeCase, field: str) -> object:
    value: object = getattr(case, field)
    return value or "dense" if field == "lengths" else value


def tuning_cases(cases: Sequence[Case]) -> list[Case]:
    """One case for each set of kernels that the peer compiles, of the size that is judged."""
    found: dict[tuple[object, ...], Case] = {}
    for case in cases:
        kind = (case.heads, case.heads_v, bool(case.sequences), case.bounded, case.raw)
        best = found.get(kind)
        if best is None or abs(case.tokens - JUDGED_TOKENS) < abs(best.tokens - JUDGED_TOKENS):
            found[kind] = case
    return list(found.values())


def that_fit(
    cases: Sequence[Case],
    free_bytes: int,
    need: Callable[[Case], int] = operator.attrgetter("peak_bytes"),
) -> tuple[list[Case], list[str]]:
    """The cases that fit into the GPU's memory, and a note for each case that does not fit."""
    fit = [case for case in cases if need(case) <= MEMORY_SHARE * free_bytes]
    notes = [
        f"left out for want of memory: {case} (about {need(case) / 2**30:.0f} GiB)"
        for case in cases
        if case not in fit
    ]
    return fit, notes


# ---- rows and verdicts


def timing_columns(
    timings: Mapping[str, Timing], floor_bytes: int, roofline: Roofline
) -> dict[str, float | None]:
    """Columns: times of "ours" and, if timed, "fla", and the time of moving the bytes alone."""
    ours, fla = timings["ours"], timings.get("fla")
    floor_us = floor_bytes / roofline.copy_gbps / 1e3
    return {
        "time_us": ours.median_us,
        "p20_us": ours.p20_us,
        "p80_us": ours.p80_us,
        "fla_us": fla.median_us if fla else None,
        "roofline_us": floor_us,
        "gbps": gbps(floor_bytes, ours.median_us),
        "share_of_roofline": floor_us / ours.median_us,
        "share_of_roofline_fla": floor_us / fla.median_us if fla else None,
        "speedup_vs_fla": fla.median_us / ours.median_us if fla else None,
    }


def at_least(what: str, row: Row, column: str, target: float, goal: float | None = None) -> Verdict:
    """Whether a row's column reaches a target; `goal` is only mentioned."""
    value = row[column]
    name = f"{what}: {column} at least {target:g}"
    if value is None:
        return Verdict(name, None, "the peer was not timed")
    assert isinstance(value, (int, float))
    detail = f"{value:.3f}, {row['time_us']:.1f} us"
    if row.get("fla_us") is not None:
        detail += f", FLA {row['fla_us']:.1f} us"
    if goal is not None:
        detail += f"; the goal of {goal:g} is {'met' if value >= goal else 'missed'}"
    return Verdict(name, value >= target, detail)


def label(row: Row) -> str:
    """The part of a verdict's name that identifies the case."""
    packed = "" if row["lengths"] == "dense" else f" in {row['sequences']} {row['lengths']}"
    return f"H={row['heads']} HV={row['heads_v']} T={row['tokens']}{packed}"
