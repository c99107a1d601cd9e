"""Gradients of softmax attention: what their tests draw, run in the emulator, and compare.

The rule for errors is that of the forward: at most twice the error of the same formula in plain
low-precision code, which rounds P and dS where they are operands of a product, o and the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

import cute_attn
from cute_attn.emulator import Emulator
from cute_attn.kernels.attention import table
from cute_attn.ops.attention import backward
from cute_attn.reference.attention import (
    attention_gradients,
    attention_gradients_in_low_precision,
    attention_in_low_precision,
    attention_reference,
    visible,
)

from .attention_cases import (
    CACHE,
    CAPPED,
    CAUSAL,
    FULL,
    LAYOUTS,
    OTHER_ROUNDINGS,
    PLAIN,
    ROUNDINGS_OF_FEW,
    SCORE_ERROR,
    USED,
    VARLEN,
    WINDOW,
    Case,
    Kind,
    Machine,
    allocate,
    assert_no_worse,
    cases,
    covering_pairs,
    is_known,
    reference_arguments,
    rows_of,
    target,
)

INPUTS = ("q", "k", "v", "learnable_sink")
PACKED_KEYS = Kind(window_right=True, softcap=True, varlen_k=True)
FEW = [PLAIN, CAUSAL, WINDOW, VARLEN, CACHE, CAPPED, USED, PACKED_KEYS]
KINDS = [
    replace(kind, lse=True)
    for kind in ([*covering_pairs(), PACKED_KEYS] if FULL else FEW)
    if kind.packed_heads <= 8  # of the forward; the backward does not pack heads
]
MOST_WORK = 6  # pairs of a tile of queries and a tile of keys
FEW_NUMBERS = 16  # of a gradient, such as a sink's
MACHINE = Machine()


# -- a problem


@dataclass(frozen=True)
class Upstream:
    """The gradients that reach o and lse.

    Attributes:
        layout: of do in memory, as of q.
        of_lse: whether the log-sum-exp has a gradient too.
    """

    layout: str = "contiguous"
    of_lse: bool = False
    seed: int = 0

    def gradients(self, args: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """do and dlse, NaN in rows of no sequence; do also in rows that see no key. dlse is 0 in
        rows whose lse is -inf."""
        q = args["q"]
        generator = torch.Generator().manual_seed(self.seed)
        shape = (*q.shape[:-1], args["v"].shape[-1])
        do = allocate(shape, q.dtype, self.layout, "q")
        for at, _ in rows_of(args):
            do[at] = torch.randn(do[at].shape, generator=generator).to(q.dtype)
        set_rows_without_keys(do, args, math.nan)
        if not self.of_lse:
            return do, None
        _, lse = attention_reference(**reference_arguments(args))
        dlse = torch.randn(lse.shape, generator=generator)
        return do, dlse.masked_fill(lse == -math.inf, 0.0).masked_fill(lse.isnan(), math.nan)


def set_rows_without_keys(do: Tensor, args: dict[str, Any], value: float) -> None:
    options = {name: args[name] for name in ("causal", "window_size") if name in args}
    for at_q, at_k in rows_of(args):
        counts = len(args["q"][at_q]), len(args["k"][at_k])
        do[at_q][~visible(*counts, **options).any(dim=1)] = value


UPSTREAMS = st.builds(
    Upstream,
    layout=st.sampled_from(LAYOUTS[:-1]),
    of_lse=st.booleans(),
    seed=st.integers(0, 2**31),
)


@st.composite
def gradient_cases(draw: st.DrawFn, kinds: Sequence[Kind] = tuple(KINDS)) -> Case:
    """Cases of the forward, of at most MOST_WORK pairs of tiles."""
    case = draw(cases(kinds))
    while case.heads_k > 1 and work(case) > MOST_WORK:
        case = replace(case, heads_k=1)
    while len(case.lengths_q) > 1 and work(case) > MOST_WORK:
        case = replace(
            case,
            lengths_q=case.lengths_q[1:],
            lengths_k=case.lengths_k[1:],
            unused_q=case.unused_q[1:],
            unused_k=case.unused_k[1:],
        )
    return case


def work(case: Case) -> int:
    """Pairs of a tile of 128 queries and a tile of 256 keys, of all heads."""
    return case.heads * sum(
        -(-n // 128) * max(1, -(-m // 256))
        for n, m in zip(case.lengths_q, case.lengths_k, strict=True)
    )


# The dK/dV kernel runs in clusters of four. With 16 SMs and more, heads of a group are split.
GRADIENT_MACHINES = st.builds(
    Machine,
    num_sms=st.sampled_from((2, 4, 5, 6, 7, 9, 16, 148)),
    schedule=st.sampled_from(("fair", "random", "adversarial")),
    seed=st.integers(0, 2**31),
    spurious_cancel=st.booleans(),
)


def one_cluster() -> Machine:
    """With room for one cluster of the dK/dV kernel, so that it splits no group of heads. How many
    it splits otherwise depends on the whole batch, and bits of dk and dv on that."""
    kernel = table.find("backward_dkdv", target().arch, target().head_dim, target().head_dim_v)
    return Machine(num_sms=kernel.cluster)


def wanted_on(machine: Machine, *, of: Sequence[str] = INPUTS) -> tuple[str, ...]:
    """The inputs whose gradients that machine can compute, out of those."""
    if machine.num_sms >= 4:
        return tuple(of)
    return tuple(name for name in of if name not in ("k", "v"))


def independent() -> dict[str, bool]:
    """Options with which the bits depend neither on other sequences nor on the number of SMs, where
    splits do not: one kernel of all gradients otherwise chooses its order by both."""
    machine = target()
    if table.has("backward_fused", machine.arch, machine.head_dim, machine.head_dim_v):
        return {"batch_invariant": True}
    return {}


# -- running


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch allocates without a value holds NaN: outputs and workspaces above all."""
    before = torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def gradients(
    args: dict[str, Any],
    do: Tensor | None,
    dlse: Tensor | None = None,
    scheduler: str = "static",
    on: Machine = MACHINE,
    wanted: Sequence[str] = INPUTS,
    **changes: Any,
) -> dict[str, Tensor]:
    """By name of the input, where no check of the emulator finds anything in any kernel."""
    args = args | changes
    leaves = {
        name: args[name].detach().requires_grad_() for name in wanted if args.get(name) is not None
    }
    varlen = any(name.startswith(("cu_", "seqused_")) for name in args)
    function = cute_attn.flash_attn_varlen_func if varlen else cute_attn.flash_attn_func
    emulator = Emulator(
        num_sms=on.num_sms,
        schedule=on.schedule,
        seed=on.seed,
        spurious_cancel=on.spurious_cancel,
    )
    with cute_attn.emulated(target().arch, emulator), poisoned():
        o, lse = function(**args | leaves | {"return_lse": dlse is not None}, scheduler=scheduler)
        given = [(x, g) for x, g in ((o, do), (lse, dlse)) if g is not None]
        torch.autograd.backward(*map(list, zip(*given, strict=True)))
    assert all(map(is_known, emulator.report.findings)), emulator.report
    found = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype
        found[name] = leaf.grad
    return found


@contextmanager
def fused_where_possible() -> Iterator[None]:
    """Within it, calls get the kernels that are not deterministic, although `poisoned` sets torch
    to be, and sequences are short."""

    def in_order(a: Any) -> bool:
        return bool(a.deterministic or a.batch_invariant)

    with mock.patch.object(backward, "adds_in_order", in_order):
        yield


@contextmanager
def workspace(nbytes: int) -> Iterator[None]:
    """Within it, `CUTE_ATTN_WORKSPACE_MIB` is so many bytes."""
    limit = SimpleNamespace(workspace_bytes=nbytes)
    with mock.patch.object(backward, "settings", return_value=limit):
        yield


def same(one: dict[str, Tensor], other: dict[str, Tensor], *names: str) -> bool:
    """Whether gradients, or those of these names, are the same bit for bit."""
    assert one.keys() == other.keys()
    return all(
        torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8))
        for name in names or one
    )


# -- comparing


def _seen(do: Tensor | None, args: dict[str, Any]) -> Tensor | None:
    """do with zeros in rows that see no key. What it holds there does not count, but the definition
    is slow where a value is not finite, and plain code is for finite ones."""
    if do is not None:
        do = do.clone()
        set_rows_without_keys(do, args, 0.0)
    return do


def exact_gradients(
    args: dict[str, Any], do: Tensor | None, dlse: Tensor | None = None
) -> dict[str, Tensor | None]:
    """In float64."""
    found = attention_gradients(do=_seen(do, args), dlse=dlse, **reference_arguments(args))
    return dict(zip(INPUTS, found, strict=True))


def plain_gradients(
    args: dict[str, Any], do: Tensor | None, dlse: Tensor | None = None, seed: int | None = None
) -> dict[str, Tensor | None]:
    """In plain low-precision code; with a seed, other roundings of P and dS."""
    jitter = None if seed is None else torch.Generator().manual_seed(seed)
    found = attention_gradients_in_low_precision(
        do=_seen(do, args), dlse=dlse, jitter=jitter, **reference_arguments(args)
    )
    return dict(zip(INPUTS, found, strict=True))


def assert_gradients_agree(
    args: dict[str, Any], found: dict[str, Tensor], do: Tensor, dlse: Tensor | None = None
) -> None:
    """The error rule for each gradient. The plain error is the largest of a few roundings: one
    alone may happen to be exact, as where a row sees one key, and dP and delta cancel."""
    exact = exact_gradients(args, do, dlse)
    plains = [plain_gradients(args, do, dlse, seed) for seed in (None, *range(OTHER_ROUNDINGS))]
    plains.append(plain_gradients(args, do, _with_float32_sums(args, do, dlse)))
    for name, gradient in found.items():
        true = exact[name]
        assert true is not None and gradient.shape == true.shape
        try:
            try:
                assert_no_worse(gradient, _of(plains, name), true)
            except AssertionError:
                if gradient.numel() > FEW_NUMBERS:
                    raise
                # The error of a few numbers differs much from rounding to rounding.
                seeds = range(OTHER_ROUNDINGS, ROUNDINGS_OF_FEW)
                plains += [plain_gradients(args, do, dlse, seed) for seed in seeds]
                assert_no_worse(gradient, _of(plains, name), true)
        except AssertionError as error:
            raise AssertionError(f"gradient of {name}: {error}") from error
    for name, at in _no_rows(args):
        if name in found:
            assert not found[name][at].any(), f"gradient of {name} in rows of no sequence"


def _of(gradients: Iterable[dict[str, Tensor | None]], name: str) -> list[Tensor]:
    return [x for one in gradients if (x := one[name]) is not None]


def _with_float32_sums(args: dict[str, Any], do: Tensor, dlse: Tensor | None) -> Tensor:
    """dlse, changed by what a tensor core's sums of do * o may differ from another order's."""
    o, lse = attention_in_low_precision(**reference_arguments(args))
    slack = SCORE_ERROR * (_seen(do, args).float() * o.float()).abs().sum(-1).transpose(-1, -2)
    return slack + (torch.zeros_like(lse) if dlse is None else dlse)


def _no_rows(args: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """For q, k and v a mask of the rows that belong to no sequence."""
    masks = {name: torch.ones(args[name].shape[:-2], dtype=torch.bool) for name in INPUTS[:3]}
    for at_q, at_k in rows_of(args):
        masks["q"][at_q] = False
        masks["k"][at_k] = masks["v"][at_k] = False
    yield from masks.items()
