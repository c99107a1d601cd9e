"""Calls of `chunk_kda` that need gradients, for the benchmarks: inputs, contenders, agreement,
kernels and memory.

Imports torch, so the benchmarks' modules import this module only when a benchmark runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cute_attn.reference import kda as reference

from ..harness.agreement import Disagreement, relative_error
from . import problem
from .cases import SEED, Case
from .problem import Arguments, Call, Results

LAYERS = 16
PROFILED = 5  # calls whose kernels are profiled
CHECK_TOKENS = 512  # tokens of problems that are compared with float64

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")

# The error of a few numbers says little, and A_log has only one number for each head.
FEW_NUMBERS, FEW_NUMBERS_LIMIT = ("A_log",), 0.2

Function = Callable[..., Any]


def arguments(case: Case, *, disable_recompute: bool = False) -> Arguments:
    """Arguments of a training step: the arguments of `chunk_kda`, without states."""
    given = problem.chunk_arguments(case)
    del given["initial_state"]
    return given | {"output_final_state": False, "disable_recompute": disable_recompute}


def slope(given: Arguments) -> torch.Tensor:
    """A random gradient of o."""
    generator = torch.Generator(device=problem.DEVICE).manual_seed(SEED + 1)
    v = given["v"]
    return torch.randn(v.shape, generator=generator, device=v.device, dtype=v.dtype)


def functions(*, with_peer: bool) -> dict[str, Function]:
    """`chunk_kda` of each contender."""
    from cute_attn import chunk_kda

    found: dict[str, Function] = {"ours": chunk_kda}
    theirs = problem.peer("fla.ops.kda:chunk_kda") if with_peer else None
    if theirs is not None:
        found["fla"] = theirs
    return found


def compile_ours(cases: Sequence[Case], keep: Sequence[bool]) -> None:
    """Compile the kernels of the cases on all cores, instead of one by one when called.

    Args:
        keep: the values of disable_recompute.
    """
    from cute_attn import cache, warmup
    from cute_attn.ops.kda import plan_chunk_kda, plan_chunk_kda_backward

    arch = cache.current_arch()
    kinds = {(bool(case.sequences), case.heads != case.heads_v) for case in cases}
    requests = []
    for packed, grouped in sorted(kinds):
        options: dict[str, Any] = {
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "lower_bound": True,
            "index_dtype": "int64" if packed else "none",
        }
        for gradient in (False, True):
            requests += plan_chunk_kda(arch, gradient=gradient, **options)
        for disable_recompute in {False, *keep}:
            requests += plan_chunk_kda_backward(
                arch, grouped=grouped, disable_recompute=disable_recompute, **options
            )
    warmup(dict.fromkeys(requests))


class Step:
    """A training step of one contender: a call, and the gradients of its arguments."""

    def __init__(self, function: Function, given: Arguments, do: torch.Tensor) -> None:
        self.function, self.given, self.do = function, given, do
        self.leaves = self.fresh()

    def fresh(self) -> dict[str, torch.Tensor]:
        """The arguments that require gradients, on the same memory."""
        return {name: self.given[name].detach().requires_grad_() for name in INPUTS}

    def forward(self) -> torch.Tensor:
        """o, without a gradient."""
        with torch.no_grad():
            o: torch.Tensor = self.function(**self.given)[0]
        return o

    def training_forward(self) -> torch.Tensor:
        """o, for a backward."""
        with torch.enable_grad():
            o: torch.Tensor = self.function(**self.given | self.leaves)[0]
        return o

    def backward(self, o: torch.Tensor) -> dict[str, torch.Tensor]:
        """The gradients by the argument's name, from the o that `training_forward` returned."""
        found = torch.autograd.grad(o, list(self.leaves.values()), self.do, retain_graph=True)
        return dict(zip(self.leaves, found, strict=True))

    def both(self) -> dict[str, torch.Tensor]:
        return self.backward(self.training_forward())

    def layers(self, count: int = LAYERS) -> Call:
        """Forward and backward of `count` layers. Each layer has its own parameters and projections
        (in the same memory), and takes the previous layer's output as v."""
        leaves = [self.fresh() for _ in range(count)]

        def call() -> tuple[torch.Tensor, ...]:
            x = leaves[0]["v"]
            with torch.enable_grad():
                for layer in leaves:
                    x = self.function(**self.given | layer | {"v": x})[0]
            needed = [leaves[0]["v"]]
            needed += [x for layer in leaves for name, x in layer.items() if name != "v"]
            return torch.autograd.grad(x, needed, self.do)

        return call


def steps(given: Arguments, *, with_peer: bool) -> dict[str, Step]:
    do = slope(given)
    return {name: Step(f, given, do) for name, f in functions(with_peer=with_peer).items()}


def calls(given: Arguments, *, with_peer: bool) -> dict[str, Call]:
    """Forward and backward of each contender."""
    return {who: step.both for who, step in steps(given, with_peer=with_peer).items()}


# ---- agreement


def check_case(case: Case) -> Case:
    """The case's heads with few tokens, for a comparison with the float64 reference."""
    return replace(case, tokens=min(case.tokens, CHECK_TOKENS))


def check_gradients(
    case: Case,
    given: Arguments,
    calls: Mapping[str, Callable[[], Results]],
    references: tuple[Function, Function] = (
        reference.kda_gradients,
        reference.kda_chunk_gradients,
    ),
) -> dict[str, float]:
    """Compare the gradients of each contender with the float64 reference, on a few heads.
    `references` are the gradients token by token, and by chunks.

    Raises:
        Disagreement: as `problem.hold`.
    """
    few, few_v = problem.some_heads(case.heads, case.heads_v)
    actual: dict[str, Results] = {}
    for who, call in calls.items():
        found = problem.outcome(who, call)
        actual[who] = {
            name: found[name][:, :, few if name in "qk" else few_v] for name in INPUTS[:5]
        }
        actual[who]["A_log"] = found["A_log"].view(-1)[few_v]
        actual[who]["dt_bias"] = found["dt_bias"].view(case.heads_v, -1)[few_v]
    cut = problem.of_heads(given, case.heads, case.heads_v, 2)
    for name in ("output_final_state", "disable_recompute", "cu_seqlens_cpu"):
        cut.pop(name, None)
    if "cu_seqlens" in cut:
        cut["cu_seqlens"] = given["cu_seqlens_cpu"]
    do = slope(given)[:, :, few_v]
    by_token, by_chunks = references
    exact = _named(by_token(**cut, do=do))
    plain = _named(by_chunks(**cut, do=do, dtype=torch.float32, stage_dtype=problem.DTYPE))
    what = f"gradients at {case}"
    return problem.hold(what, actual, plain, exact, rough=FEW_NUMBERS)


def _named(gradients: reference.KdaGradients) -> Results:
    found = zip(INPUTS, gradients[: len(INPUTS)], strict=True)
    return {name: x for name, x in found if x is not None}


def check_beside(case: Case, ours: Results, calls: Mapping[str, Call]) -> dict[str, float]:
    """Relative differences of the peers' gradients from ours, by gradient.

    Raises:
        Disagreement: a peer fails or computes something else.
    """
    errors: dict[str, float] = {}
    for who, call in calls.items():
        for name, x in problem.outcome(who, call).items():
            error = relative_error(x.view(ours[name].shape), ours[name].double())
            limit = FEW_NUMBERS_LIMIT if name in FEW_NUMBERS else problem.PEER_MAX_ERROR
            if not error <= limit:
                raise Disagreement(
                    who, f"{who}, gradients at {case}: {name} differs by {error:.2e} from ours"
                )
            errors[f"{who} {name}"] = error
    return errors


def repeats(one: Results, other: Results) -> bool:
    """Whether two runs have the same bits."""
    return all(torch.equal(one[name], other[name]) for name in one)


# ---- kernels and memory


def kernel_times(call: Call) -> dict[str, float]:
    """Microseconds of a call by kernel, as CUPTI reports them, with a warm L2."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            call()
        torch.cuda.synchronize()
    averages = {event.key: event.device_time_total for event in profiler.key_averages()}
    return {name: us / PROFILED for name, us in averages.items() if us > 0}


def memory(step: Step) -> dict[str, float]:
    """MiB of a training step: the peak with the step's inputs, and the memory kept between forward
    and backward with o."""
    step.both()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o = step.training_forward()
    kept = torch.cuda.memory_allocated() - before
    gradients = torch.autograd.grad(o, list(step.leaves.values()), step.do)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del o, gradients
    return {"kept_mib": kept / 2**20, "peak_mib": peak / 2**20}


@contextlib.contextmanager
def without_launches(who: str) -> Iterator[None]:
    """Let a peer's tuned kernels neither compile nor run. A call's allocations do not depend on the
    kernels' results."""
    if who not in problem.PEERS:
        yield
        return
    from triton.runtime.autotuner import Autotuner

    run = Autotuner.run
    Autotuner.run = lambda *_, **__: None
    try:
        yield
    finally:
        Autotuner.run = run


def checks(case: Case, *, with_peer: bool) -> tuple[dict[str, float], list[str]]:
    """Errors of the contenders at `check_case` of a case, and notes on peers that disagree.

    Raises:
        Disagreement: ours disagrees.
    """
    small = check_case(case)
    given = arguments(small)
    check = partial(check_gradients, small, given)
    errors, _, notes = problem.agreed(check, calls(given, with_peer=with_peer))
    return errors, notes
