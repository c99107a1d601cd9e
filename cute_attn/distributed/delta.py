"""Delta rules over the ranks of a plan: checks, the exchange of states, and the gradient.

`chunk_kda` and `chunk_gated_delta_rule` share all of this. They differ in their kernels
(`ops.kda.chunk_spans`).
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops.checks import check_dtype, check_tensors
from ..ops.kda.arguments import INITIAL_STATE_DTYPES, readable_state
from ..ops.kda.chunk_backward import BackwardArguments
from ..ops.kda.chunk_spans import ChunkSpans, Spans
from .exchange import Messages
from .plan import Plan, are_plain, hashable
from .spans import Route

_TOKENS = ("q", "k", "v", "g", "beta")
_INPUTS = (*_TOKENS, "A_log", "dt_bias")


class Held:
    """The spans of a plan that one rank holds, and the exchange of their states.

    Attributes:
        forward, backward: the exchanges of states, and of gradients of states.
        checked: calls whose arguments have been checked and are equal on all ranks.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pieces = plan.layout.pieces(plan.rank)
        self.forward = Route(plan.layout, plan.rank, backwards=False)
        self.backward = Route(plan.layout, plan.rank, backwards=True)
        self.checked: set[Any] = set()
        self._tensors: dict[Any, Any] = {}

    @classmethod
    def of(cls, plan: Plan) -> Held:
        """The spans of a plan, which are found once."""
        found: Held | None = plan.kept.get("spans")
        if found is None:
            found = plan.kept["spans"] = cls(plan)
        return found

    @cached_property
    def flat(self) -> bool:
        """Whether the spans are packed sequences of one row, rather than rows of a batch."""
        return self.plan.packed or len(self.pieces) != 1

    def spans(self, batch: int, device: torch.device) -> Spans:
        """The spans of all batch entries."""
        key = "spans", batch, device
        if key not in self._tensors:
            lengths = [p.end - p.start for p in self.pieces] * batch
            offsets = None
            if self.flat:
                bounds = [0, *accumulate(lengths)]
                offsets = torch.tensor(bounds, dtype=torch.int32).to(device)
            self._tensors[key] = Spans(offsets, len(lengths), max(lengths, default=0))
        found: Spans = self._tensors[key]
        return found

    def needed(self, route: Route, batch: int, device: torch.device) -> Tensor | None:
        """For each span, 1 if its transition is needed, otherwise 0, as `[spans, 1, 1]`; None if
        none is needed."""
        if not any(route.needed):
            return None
        key = "needed", route is self.forward, batch, device
        if key not in self._tensors:
            needed = torch.tensor(route.needed * batch, dtype=torch.float32)
            self._tensors[key] = needed.view(-1, 1, 1).to(device)
        found: Tensor = self._tensors[key]
        return found

    def local(self, x: Tensor) -> Tensor:
        """x, `[batch, tokens, ...]`, as the kernels take it."""
        return x.flatten(0, 1)[None] if self.flat and not self.plan.packed else x

    def by_span(self, x: Tensor, batch: int) -> Tensor:
        """x, `[N, ...]`, as `[batch, spans, ...]`."""
        return x.view(batch, len(self.pieces), *x.shape[1:])


class Run:
    """A call over the ranks of a plan. Its kernels take states with V first.

    Attributes:
        batch: the rows of the tensors.
        held: the spans of this rank.
        v_first, final: whether the caller's states have V first, and whether the call returns
            final states.
        options: the operator's arguments that are not tensors.
    """

    def __init__(self, plan: Plan, rule: ChunkSpans, options: dict[str, Any], batch: int) -> None:
        self.plan, self.rule, self.batch = plan, rule, batch
        self.held = Held.of(plan)
        self.v_first = bool(options["state_v_first"])
        self.final = bool(options["output_final_state"])
        self.options = {**options, "state_v_first": True, "output_final_state": True}

    def arguments(self, tensors: tuple[Tensor | None, ...], **options: Any) -> Any:
        """The operator's arguments, with tensors that kernels can read."""
        spans = self.held.spans(self.batch, tensors[0].device)  # type: ignore[union-attr]
        named = dict(zip(_INPUTS, tensors, strict=True))
        for name in _TOKENS:
            named[name] = self.held.local(named[name])  # type: ignore[arg-type]
        a = self.rule.arguments(**named, **(self.options | options), cu_seqlens=spans.cu_seqlens)
        return self.rule.operator.readable(a)

    def shape(self, like: Tensor, dims: tuple[int, int]) -> tuple[int, ...]:
        """The shape of a state of each sequence: `[batch, sequences, HV, V, K]`."""
        return self.batch, len(self.plan.lengths), like.shape[2], *dims

    def matrices(self, x: Tensor | None, like: Tensor, dims: tuple[int, int]) -> Tensor | None:
        """A state of each sequence in float32, with the shape `shape`; None is 0."""
        if x is None:
            return None
        x = x if self.v_first else x.mT
        found = readable_state(x)
        assert found is not None
        return found.reshape(self.shape(like, dims))

    def ends(
        self, route: Route, local: Tensor | None, given: Tensor | None, like: Tensor,
        dims: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        """The matrix at the end of each sequence in the direction of `route`, on the rank that has
        it; other ranks have 0.

        Args:
            local: the matrices at the ends of the rank's spans; None without spans.
            given: the matrices before the sequences. A sequence without tokens ends with these, on
                rank 0.
        """
        found = like.new_zeros(self.shape(like, dims), dtype=torch.float32)
        if local is not None:
            spans, sequences = route.ends
            sequences.put(found, spans.take(self.held.by_span(local, self.batch)))
        if self.plan.rank == 0 and given is not None:
            for sequence, length in enumerate(self.plan.lengths):
                if length == 0:
                    found[:, sequence].copy_(given[:, sequence])
        return found

    def as_given(self, x: Tensor) -> Tensor:
        """The inverse of `matrices`, as a contiguous tensor."""
        x = x.flatten(0, 1)
        return (x if self.v_first else x.mT).contiguous()


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, initial: Tensor | None, *tensors: Any) -> Any:
        o, final, kept = forward(run, tensors, initial, keep=True)
        ctx.run, ctx.initial = run, initial is not None
        ctx.save_for_backward(*tensors, *kept)
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> Any:
        count = len(_INPUTS)
        needs = ctx.needs_input_grad[2:]
        tensors, kept = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        found, dinitial = backward(
            ctx.run, tensors, kept, do, dfinal, needs, ctx.needs_input_grad[1]
        )
        return None, dinitial, *found


def forward(
    run: Run, tensors: tuple[Any, ...], initial: Tensor | None, *, keep: bool
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """(o, final states or None, what the backward needs)."""
    held, batch = run.held, run.batch
    q, v = tensors[0], tensors[2]
    dims = v.shape[-1], q.shape[-1]
    first = run.matrices(initial, v, dims)
    local = None
    if not held.pieces:  # such a rank neither sends nor receives states
        o = torch.empty_like(v)
        kept: list[Tensor | None] = []
    else:
        sent: list[Messages] = []
        a = run.arguments(tensors, keep_states=keep)
        spans = held.spans(batch, v.device)

        def carry(moves: Tensor | None, start: Tensor) -> None:
            by_span = None if moves is None else held.by_span(moves, batch)
            out = held.by_span(start, batch)
            sent.append(held.forward.states(run.plan.all_ranks, by_span, first, out))

        needed = held.needed(held.forward, batch, v.device)
        o, local, *kept = run.rule.run(a, spans, needed, carry)
        sent[0].wait()
        o = o.view(v.shape)
    if not run.final:
        return o, None, kept
    # One rank has the state after a sequence's last token. The other ranks add zeros.
    final = run.ends(held.forward, local, first, v, dims)
    dist.all_reduce(final, group=run.plan.all_ranks)
    return o, run.as_given(final), kept


def backward(
    run: Run, tensors: tuple[Any, ...], kept: tuple[Tensor, ...], do: Tensor | None,
    dfinal: Tensor | None, needs: tuple[bool, ...], need_initial: bool,
) -> tuple[list[Tensor | None], Tensor | None]:  # fmt: skip
    """(the gradients of `tensors`, the gradient of the initial states or None)."""
    held, batch, plan = run.held, run.batch, run.plan
    q, v = tensors[0], tensors[2]
    dims = v.shape[-1], q.shape[-1]
    last = run.matrices(dfinal, v, dims)
    if run.final:  # every rank has a copy of the final states
        if last is None:
            last = v.new_zeros(run.shape(v, dims), dtype=torch.float32)
        parts = [torch.empty_like(last) for _ in range(plan.world)]
        dist.all_gather(parts, last.contiguous(), group=plan.all_ranks)
        last = parts[0]
        for part in parts[1:]:
            last = last + part

    def of_initial(local: Tensor | None) -> Tensor | None:
        if not need_initial:
            return None
        return run.as_given(run.ends(held.backward, local, last, v, dims))

    if not held.pieces:
        found = [torch.zeros_like(x) if x is not None else None for x in tensors]
        return [x if need else None for x, need in zip(found, needs, strict=True)], of_initial(None)
    a = run.arguments(tensors)
    do = torch.zeros_like(v) if do is None else do
    names = [name for name in BackwardArguments._fields if hasattr(a, name)]
    arguments = BackwardArguments(
        **{name: getattr(a, name) for name in names},
        do=held.local(do),
        states=kept[0],
        v_new=kept[1],
        need_inputs=any(needs[:5]),
        need_dA_log=needs[5],
        need_ddt_bias=needs[6],
        need_dinitial_state=True,
    )
    arguments = run.rule.backward.readable(arguments)
    sent: list[Messages] = []

    def carry(moves: Tensor | None, end: Tensor) -> None:
        by_span = None if moves is None else held.by_span(moves, batch)
        out = held.by_span(end, batch)
        sent.append(held.backward.states(plan.all_ranks, by_span, last, out))

    spans = held.spans(batch, v.device)
    needed = held.needed(held.backward, batch, v.device)
    *gradients, local = run.rule.gradients(arguments, spans, needed, carry)
    sent[0].wait()
    found = [
        None if x is None or not need else x.to(given.dtype).view(given.shape)
        for x, given, need in zip(gradients, tensors, needs, strict=True)
    ]
    return found, of_initial(local)


def chunk_delta_rule(
    plan: Plan, rule: ChunkSpans, tensors: dict[str, Any], initial_state: Tensor | None,
    options: dict[str, Any], unsupported: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run `chunk_kda` or `chunk_gated_delta_rule` that got `cp`.

    Args:
        tensors: q, k, v, g, beta, A_log and dt_bias.
        options: the operator's other arguments.
        unsupported: by name, arguments that a call with cp does not take; None or False if not
            given.

    Returns:
        o of this rank's tokens, and the final states of all sequences or None.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a tensor does not fit the plan, or ranks call with different arguments.
        NotImplementedError: an argument of `unsupported` is given.
    """
    for name, value in unsupported.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name} is given with cp, which has no {name}")
    given = tuple(tensors[name] for name in _INPUTS)
    grad = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in (*given, initial_state)
    )
    called = _key(rule, (*given, initial_state), options, grad)
    checked = called is not None and called in Held.of(plan).checked
    if not checked:
        _check(plan, tensors, initial_state)
    q, v = tensors["q"], tensors["v"]
    batch = 1 if plan.packed else q.shape[0]
    run = Run(plan, rule, options, batch)
    if not checked:
        rule.operator._validate(_plain(run, given, options))
        _check_state(run, initial_state, q, v)
        plan.agree(
            (
                ("batch", batch),
                ("the numbers of heads and head dimensions", (*q.shape[2:], *v.shape[2:])),
                ("dtype", q.dtype),
                ("options", tuple(options.items())),
                ("initial_state", initial_state is not None),
                ("a gradient", grad),
            ),
            f"calls {rule.name} with",
        )
        if called is not None:
            run.held.checked.add(called)
    if grad:
        o, final = _DeltaRule.apply(run, initial_state, *given)
        return o, final
    o, final, _ = forward(run, given, initial_state, keep=False)
    return o, final


def _key(
    rule: ChunkSpans, given: tuple[Any, ...], options: dict[str, Any], grad: bool
) -> tuple[Any, ...] | None:
    """All that the checks of a call depend on; None for tensors that may intercept a call. Keys are
    compared with ==, and True == 1 == 1.0."""
    if not are_plain(x for x in given if x is not None):
        return None
    key = (
        rule.name, *((x.shape, x.dtype, x.device) if x is not None else None for x in given),
        *options.values(), *map(type, options.values()), grad,
    )  # fmt: skip
    return hashable(key)


def _plain(run: Run, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The arguments of a call of the rank's spans alone, to check them."""
    named = dict(zip(_INPUTS, given, strict=True))
    for name in _TOKENS:
        named[name] = run.held.local(named[name])
    spans = run.held.spans(run.batch, named["q"].device)
    return run.rule.arguments(**named, **options, cu_seqlens=spans.cu_seqlens)


def _check_state(run: Run, state: Tensor | None, q: Tensor, v: Tensor) -> None:
    if state is None:
        return
    check_dtype("initial_state", state, INITIAL_STATE_DTYPES)
    dims = (v.shape[-1], q.shape[-1])[:: 1 if run.v_first else -1]
    shape = [len(run.plan.lengths) * run.batch, v.shape[2], *dims]
    if list(state.shape) != shape:
        raise ValueError(
            f"initial_state has shape {list(state.shape)}, must be {shape}, the states of all "
            "sequences of the plan"
        )


def _check(plan: Plan, tensors: dict[str, Any], initial_state: Any) -> None:
    tokens = {name: tensors[name] for name in _TOKENS}
    others = {name: x for name, x in tensors.items() if name not in tokens}
    check_tensors(tokens, others | {"initial_state": initial_state})
    for name, x in tokens.items():
        batch = x.shape[:1]
        if x.dim() < 3 or x.shape[1] != plan.tokens or (plan.packed and batch != (1,)):
            first = "1" if plan.packed else "batch"
            raise ValueError(
                f"{name} has shape {list(x.shape)} on rank {plan.rank}, must be [{first}, "
                f"{plan.tokens}, ...], which are the tokens that the plan gives to this rank"
            )
