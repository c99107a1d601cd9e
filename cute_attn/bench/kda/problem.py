"""Inputs, contenders and agreement checks of the KDA benchmarks.

Imports torch, so the benchmarks' modules import this module only when a benchmark runs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from cute_attn.reference import kda as reference
from cute_attn.reference.convolution import causal_convolution_reference
from cute_attn.reference.gated_delta_rule import gated_delta_rule_decode_reference

from ..harness.agreement import Disagreement, poison, relative_error
from ..harness.timing import Mode, Timing, time_cuda_interleaved
from .cases import LOWER_BOUND, SEED, TAPS, Case, DecodeCase, Path

DEVICE = "cuda"
DTYPE = torch.bfloat16

Call = Callable[[], Any]
Arguments = dict[str, Any]
Results = dict[str, torch.Tensor]

# The input of a weak gate, and the channels of which one is weak in mixed gates.
WEAK_GATE, WEAK_CHANNELS = -5.0, 16

# The error rule (docs/testing.md) holds for our results. A peer only has to compute the same
# operator. Its error is reported, and is a failure only where rounding cannot explain the error.
PEERS = {"fla": "FLA", "cudnn": "cuDNN", "flashinfer": "FlashInfer"}
PEER_MAX_ERROR = 0.05


# ---- inputs


class _Random:
    """A stream of normal and uniform random numbers from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator(device=DEVICE).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=DEVICE, dtype=dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.generator, device=DEVICE)


def gate_parameters(
    random: _Random, heads_v: int, head_dim_k: int, *, strong: bool = False
) -> Arguments:
    """A_log and dt_bias for channels that forget within one token, up to within hundreds of tokens.

    If `strong`, most channels forget within a token or two, as in FLA's own tests.
    """
    if strong:
        return {
            "A_log": torch.log(random.uniform(heads_v, low=1.0, high=16.0)),
            "dt_bias": random.normal(heads_v * head_dim_k, dtype=torch.float32),
        }
    return {
        "A_log": torch.log(random.uniform(heads_v, low=0.5, high=2.0)),
        "dt_bias": random.uniform(heads_v * head_dim_k, low=-6.0, high=0.0),
    }


def raw_gates(gate: str, g: torch.Tensor) -> torch.Tensor:
    """The input of a gate without parameters, -5 sigmoid(g): g as it is (-2.5 a token on average),
    weak (-0.034), or weak in one channel of 16."""
    weak = WEAK_GATE + 0.1 * g
    if gate.endswith("raw"):
        return g
    if gate.endswith("weak"):
        return weak
    g[..., ::WEAK_CHANNELS] = weak[..., ::WEAK_CHANNELS]
    return g


def chunk_arguments(case: Case, seed: int = SEED) -> Arguments:
    """Arguments of our and the peer's `chunk_kda`. The kernels apply gate, norms and sigmoid."""
    random = _Random(seed)
    shape = (case.batch, case.tokens)
    arguments: Arguments = {
        "q": random.normal(*shape, case.heads, case.head_dim_k),
        "k": random.normal(*shape, case.heads, case.head_dim_k),
        "v": random.normal(*shape, case.heads_v, case.head_dim_v),
        "g": random.normal(*shape, case.heads_v, case.head_dim_k),
        "beta": random.normal(*shape, case.heads_v),
        "initial_state": random.normal(
            case.states, case.heads_v, case.head_dim_k, case.head_dim_v, dtype=torch.float32
        ),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    if case.raw:
        arguments["g"] = raw_gates(case.gate, arguments["g"])
    else:
        arguments |= gate_parameters(random, case.heads_v, case.head_dim_k, strong=case.strong)
    if case.bounded:
        arguments |= {"safe_gate": True, "lower_bound": LOWER_BOUND}
    if case.sequences:
        lengths = torch.tensor([0, *case.sequence_lengths(seed)])
        arguments["cu_seqlens_cpu"] = lengths.cumsum(0)
        arguments["cu_seqlens"] = arguments["cu_seqlens_cpu"].to(DEVICE)
    return arguments


def stage_arguments(case: Case, seed: int = SEED) -> Arguments:
    """Arguments of `kda_chunk_intra` and `kda_recompute_w_u`: q and k normalised, G summed.

    Akk is unit lower triangular, with elements of the size that an inverse has.
    """
    random = _Random(seed)
    shape = (case.batch, case.tokens)
    q, k = (
        torch.nn.functional.normalize(
            random.normal(*shape, case.heads, case.head_dim_k, dtype=torch.float32), dim=-1
        ).to(DTYPE)
        for _ in range(2)
    )
    parameters = gate_parameters(random, case.heads_v, case.head_dim_k)
    rate = parameters["A_log"].exp()[:, None]
    bias = parameters["dt_bias"].view(case.heads_v, -1)
    G = torch.empty(*shape, case.heads_v, case.head_dim_k, device=DEVICE)
    Akk = torch.empty(*shape, case.heads_v, reference.CHUNK, device=DEVICE, dtype=DTYPE)
    lower = torch.ones(reference.CHUNK, reference.CHUNK, device=DEVICE).tril(-1)[:, None]
    one = torch.eye(reference.CHUNK, device=DEVICE)[:, None]
    for start in range(0, case.tokens, reference.CHUNK):  # by chunks, as large cases fill memory
        rows = slice(start, min(start + reference.CHUNK, case.tokens))
        raw = random.normal(*G[:, rows].shape, dtype=torch.float32)
        gate = LOWER_BOUND * torch.sigmoid(rate * (raw + bias))
        G[:, rows] = gate.cumsum(1) / math.log(2)
        values = random.normal(*Akk[:, rows].shape, dtype=torch.float32)
        size = G[:, rows].shape[1]
        Akk[:, rows] = (0.1 * values * lower[:size] + one[:size]).to(DTYPE)
    return {
        "q": q,
        "k": k,
        "v": random.normal(*shape, case.heads_v, case.head_dim_v),
        "g": G,
        "beta": random.uniform(*shape, case.heads_v),
        "Akk": Akk,
    }


def decode_arguments(case: DecodeCase, seed: int = SEED) -> Arguments:
    """Arguments of `kda_decode`, or of `gated_delta_rule_decode`; `out` is NaN."""
    random = _Random(seed)
    k, v = case.head_dim_k, case.head_dim_v
    arguments: Arguments = {}
    if case.slots == "random":
        slots = torch.randperm(case.batch, generator=random.generator, device=DEVICE)
        arguments["state_indices"] = slots.to(torch.int32)
    gates = () if case.decays == "head" else (k,)
    if gates:
        arguments["lower_bound"] = LOWER_BOUND
    if case.convolution:
        arguments["conv_state"] = random.normal(case.batch, case.channels, TAPS - 1)
        arguments["conv_weight"] = 0.5 * random.normal(case.channels, TAPS)
    return arguments | {
        "q": random.normal(case.batch, case.heads, k),
        "k": random.normal(case.batch, case.heads, k),
        "v": random.normal(case.batch, case.heads_v, v),
        "g": random.normal(case.batch, case.heads_v, *gates),
        "beta": random.normal(case.batch, case.heads_v),
        "state": random.normal(case.batch, case.heads_v, v, k, dtype=torch.float32),
        "out": torch.full((case.batch, case.heads_v, v), torch.nan, device=DEVICE, dtype=DTYPE),
        **gate_parameters(random, case.heads_v, case.gates),
    }


# ---- contenders


def peer(path: str) -> Callable[..., Any] | None:
    """A function of flash-linear-attention by module and name, or None without the package."""
    module, _, name = path.partition(":")
    try:
        found: Callable[..., Any] = getattr(__import__(module, fromlist=[name]), name)
    except (ImportError, AttributeError):  # missing, or too old
        return None
    return found


# Whether the gate is a head's -> the function of cuDNN's frontend, from version 1.32 on.
CUDNN = {
    False: "cudnn.linear_attention.ops:kimi_delta_attention",
    True: "cudnn.linear_attention.ops:gated_delta_net",
}


def cudnn_calls(arguments: Arguments) -> dict[str, Call]:
    """The call of cuDNN's function with the arguments of `chunk_kda` or `chunk_gated_delta_rule`,
    if cuDNN has this gate and its frontend is installed. The frontend takes packed tokens and
    states with V first; the returned tensors are views in our layout."""
    of_head = arguments["g"].dim() == arguments["beta"].dim()
    theirs = peer(CUDNN[of_head])
    if theirs is None or not (of_head or "lower_bound" in arguments):
        return {}
    v, heads_v = arguments["v"], arguments["v"].shape[2]
    batch, tokens = v.shape[:2]
    offsets = arguments.get("cu_seqlens")
    if offsets is None:
        offsets = torch.arange(batch + 1, device=v.device, dtype=torch.int32) * tokens
    given = {name: arguments[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta")}
    given |= {"cu_seqlens": offsets.to(torch.int32), "safe_gate": True}
    for name in ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "output_final_state"):
        given[name] = arguments[name]
    if "A_log" in arguments:
        bias = arguments["dt_bias"]
        given |= {
            "a_log": arguments["A_log"],
            "dt_bias": bias if of_head else bias.view(heads_v, -1),
        }
    if not of_head:
        given["gate_lower_bound"] = arguments["lower_bound"]
        # cuDNN needs the gate's parameters; these have no effect.
        given.setdefault("a_log", v.new_zeros(heads_v, dtype=torch.float32))
        given.setdefault("dt_bias", v.new_zeros(heads_v, given["g"].shape[-1], dtype=torch.float32))
    if arguments.get("initial_state") is not None:
        given["initial_state"] = arguments["initial_state"].transpose(-1, -2).contiguous()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        o, final_state = theirs(**given)[:2]
        return o.view(v.shape), final_state.transpose(-1, -2)

    return {"cudnn": call}


def chunk_calls(
    arguments: Arguments, *, with_peer: bool, paths: Sequence[Path] = ("fused",)
) -> dict[str, Call]:
    """`chunk_kda` of each contender: (o, final state). "ours" is our fused path, "modular" our
    modular path."""
    from cute_attn import chunk_kda

    calls: dict[str, Call] = {}
    if "fused" in paths:
        calls["ours"] = lambda: chunk_kda(**arguments)
    if "modular" in paths:
        modular = torch.inference_mode()(chunk_kda)
        calls["modular"] = lambda: modular(**arguments, return_intermediate_states=True)[:2]
    theirs = peer("fla.ops.kda:chunk_kda") if with_peer else None
    if theirs is not None:
        calls["fla"] = lambda: theirs(**arguments)
    return calls


def compile_chunk(cases: Sequence[Case], paths: Sequence[Path]) -> None:
    """Compile the kernels of the cases on all cores, instead of one by one when called."""
    from cute_attn import cache, warmup
    from cute_attn.ops.kda import plan_chunk_kda

    kinds = {(case.bounded, case.raw, bool(case.sequences)) for case in cases}
    warmup(
        request
        for path in paths
        for lower_bound, raw, packed in kinds
        for request in plan_chunk_kda(
            cache.current_arch(),
            initial_state=True,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=lower_bound,
            A_log=not raw,
            dt_bias=not raw,
            return_intermediate_states=path == "modular",
            index_dtype="int64" if packed else "none",
        )
    )


INTRA = ("Aqk", "Akk", "w", "u", "qg", "kg")
RECOMPUTE = ("w", "u", "qg", "kg")


def intra_calls(arguments: Arguments, *, with_peer: bool) -> dict[str, Call]:
    """`kda_chunk_intra` of each contender, as `Results`, without qg."""
    from cute_attn.ops.kda import kda_chunk_intra

    given = {name: arguments[name] for name in ("q", "k", "v", "g", "beta")}
    calls: dict[str, Call] = {"ours": lambda: kda_chunk_intra(**given)}
    theirs = peer("fla.ops.kda.chunk_intra:chunk_kda_fwd_intra") if with_peer else None
    if theirs is not None:
        g = given.pop("g")
        calls["ours"] = lambda: kda_chunk_intra(**given, g=g)
        scale = given["k"].shape[-1] ** -0.5
        calls["fla"] = lambda: theirs(**given, gk=g, scale=scale, safe_gate=True)
    return calls


def recompute_calls(arguments: Arguments, *, with_peer: bool) -> dict[str, Call]:
    """`kda_recompute_w_u` of each contender, as `Results`, without qg."""
    from cute_attn.ops.kda import kda_recompute_w_u

    k, v, g, beta, Akk = (arguments[name] for name in ("k", "v", "g", "beta", "Akk"))
    calls: dict[str, Call] = {"ours": lambda: kda_recompute_w_u(None, k, v, g, beta, Akk)}
    theirs = peer("fla.ops.kda.wy_fast:recompute_w_u_fwd") if with_peer else None
    if theirs is not None:
        calls["fla"] = lambda: theirs(k=k, v=v, beta=beta, A=Akk, gk=g)
    return calls


def intra_results(name: str, result: Any) -> Results:
    """The stage's tensors by name; the peer returns the tensors in another order."""
    order = INTRA if name == "ours" else ("w", "u", "qg", "kg", "Aqk", "Akk")
    return _named(order, result)


def recompute_results(name: str, result: Any) -> Results:
    del name  # the order is the same
    return _named(RECOMPUTE, result)


def _named(names: Sequence[str], result: Sequence[Any]) -> Results:
    return {
        name: x
        for name, x in zip(names, result, strict=True)
        if isinstance(x, torch.Tensor) and x.numel()
    }


# Whether the gate is a head's -> flash-linear-attention's function.
DECODE_PEERS = {
    False: "fla.ops.kda:fused_recurrent_kda",
    True: "fla.ops.gated_delta_rule:fused_recurrent_gated_delta_rule",
}


def decode_calls(arguments: Arguments, *, with_peer: bool) -> dict[str, Call]:
    """A decode step of each contender; the peer gets its own state, in its default layout. The peer
    has no convolution."""
    import cute_attn

    given = dict(arguments)
    tensors = [given.pop(name) for name in ("q", "k", "v", "g", "beta", "state")]
    of_head = arguments["g"].dim() == arguments["beta"].dim()
    ours = cute_attn.gated_delta_rule_decode if of_head else cute_attn.kda_decode
    calls: dict[str, Call] = {"ours": lambda: ours(*tensors, **given)}
    theirs = peer(DECODE_PEERS[of_head]) if with_peer else None
    if theirs is not None:
        state = arguments["state"][_order(arguments)].transpose(-1, -2).contiguous()
        tokens = {
            name: x.unsqueeze(1)
            for name, x in zip(("q", "k", "v", "g", "beta"), tensors, strict=False)
        }
        bounds = {name: given[name] for name in ("lower_bound",) if name in given}
        calls["fla"] = lambda: theirs(
            **tokens,
            **bounds,
            A_log=arguments["A_log"],
            dt_bias=arguments["dt_bias"],
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
        )
    return calls


def _order(arguments: Arguments) -> torch.Tensor:
    """The slot of each sequence."""
    slots: torch.Tensor | None = arguments.get("state_indices")
    if slots is None:
        return torch.arange(arguments["state"].shape[0], device=DEVICE)
    return slots.long()


# ---- times


def time_calls(
    calls: Mapping[str, Call], mode: Mode, rep_ms: float
) -> tuple[dict[str, Timing], list[str]]:
    """Times of the contenders, and notes; a peer that cannot be timed in this mode is left out."""
    peers = [who for who in calls if who in PEERS]
    try:
        return time_cuda_interleaved(calls, mode=mode, rep_ms=rep_ms), []
    except (RuntimeError, ValueError):
        if not peers or mode != "graph":
            raise
    kept = {who: call for who, call in calls.items() if who not in peers}
    notes = []
    for who in peers:
        torch.cuda.synchronize()
        try:
            time_cuda_interleaved(kept | {who: calls[who]}, mode=mode, rep_ms=rep_ms)
            kept[who] = calls[who]
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            notes.append(f"{PEERS[who]}'s call cannot be captured in a graph: {reason}")
    torch.cuda.synchronize()
    return time_cuda_interleaved(kept, mode=mode, rep_ms=rep_ms), notes


# ---- agreement


def some_heads(heads: int, heads_v: int) -> tuple[list[int], list[int]]:
    """The first and the last head of q and k, and the value heads that read these heads."""
    few = sorted({0, heads - 1})
    group = heads_v // heads
    return few, [head * group + i for head in few for i in range(group)]


def of_heads(arguments: Arguments, heads: int, heads_v: int, dim: int) -> Arguments:
    """The arguments of a call for `some_heads` alone; `dim` is the dimension of q's heads."""
    few, few_v = some_heads(heads, heads_v)
    cut = dict(arguments)
    for name in ("q", "k", "v", "g", "beta", "Akk"):
        if name in cut:
            cut[name] = cut[name][(slice(None),) * dim + (few if name in "qk" else few_v,)]
    for name in ("initial_state", "state"):
        if cut.get(name) is not None:
            cut[name] = cut[name][:, few_v]
    if "A_log" in cut:
        cut["A_log"] = cut["A_log"][few_v]
        cut["dt_bias"] = cut["dt_bias"].view(heads_v, -1)[few_v]
    return cut


def hold(
    what: str,
    actual: Mapping[str, Results],
    plain: Results,
    exact: Results,
    rough: Sequence[str] = (),
) -> dict[str, float]:
    """Relative errors by contender and tensor ("ours o" and so on), if all are acceptable.

    Args:
        actual: tensors of `some_heads`, by contender.
        plain, exact: results of plain PyTorch, in the dtypes of our results and in float64.
        rough: tensors for which even our error only has to be as small as a peer's.

    Raises:
        Disagreement: one of our tensors breaks the error rule, or a peer computes something else.
    """
    errors: dict[str, float] = {}
    for who, results in actual.items():
        for name, x in results.items():
            error = relative_error(x, exact[name])
            floor = torch.finfo(torch.float32).eps
            allowed = 2 * relative_error(plain[name].to(x.dtype), exact[name]) + floor
            if who in PEERS or name in rough:
                allowed = max(PEER_MAX_ERROR, allowed)
            errors[f"{who} {name}"] = error
            if not error <= allowed:  # so that NaN fails
                raise Disagreement(
                    who,
                    f"{who}, {what}: {name} has a relative error of {error:.2e} against the "
                    f"float64 reference, allowed are {allowed:.2e}",
                )
    return errors


def agreed(
    check: Callable[[Mapping[str, Call]], dict[str, float]], calls: Mapping[str, Call]
) -> tuple[dict[str, float], dict[str, Call], list[str]]:
    """Return (errors, the contenders to time, notes). Peers that disagree are left out.

    Raises:
        Disagreement: our result disagrees.
    """
    try:
        return check(calls), dict(calls), []
    except Disagreement as refusal:
        if refusal.who not in PEERS:
            raise
        rest = {who: call for who, call in calls.items() if who != refusal.who}
        errors, rest, notes = agreed(check, rest)
        return errors, rest, [f"not timed: {refusal}", *notes]


def outcome(who: str, call: Call) -> Any:
    """The result of a call, synchronised, so that a device error is attributed to its contender."""
    try:
        result = call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return result
    except Exception as error:
        if who not in PEERS:
            raise
        reason = str(error).splitlines()[0]
        raise Disagreement(who, f"{who}, which failed: {reason}") from error


def check_chunk(
    case: Case,
    arguments: Arguments,
    calls: Mapping[str, Call],
    *,
    name: str = "chunk_kda",
    run: Callable[..., Any] = reference.kda_chunk_reference,
) -> dict[str, float]:
    """Compare each contender with the float64 reference, on all tokens of a few heads. `run` is the
    reference of the operator `name`."""
    few = some_heads(case.heads, case.heads_v)[1]
    actual: dict[str, Results] = {}
    for who, call in calls.items():
        poison(arguments["v"], arguments["initial_state"])
        o, final_state = outcome(who, call)[:2]
        actual[who] = {"o": o[:, :, few], "final_state": final_state[:, few]}
        del o, final_state
    cut = of_heads(arguments, case.heads, case.heads_v, 2)
    for unused in ("output_final_state", "disable_recompute", "cu_seqlens_cpu"):
        cut.pop(unused, None)
    if "cu_seqlens" in cut:
        cut["cu_seqlens"] = arguments["cu_seqlens_cpu"]

    def results(**how: Any) -> Results:
        stages = run(**cut, **how)
        return {"o": stages.o, "final_state": stages.states.final_state}

    plain = results(dtype=torch.float32, stage_dtype=DTYPE)
    return hold(f"{name} at {case}", actual, plain, results())


def check_stage(
    stage: str, case: Case, arguments: Arguments, calls: Mapping[str, Call]
) -> dict[str, float]:
    """Compare as `check_chunk` does, for the stage "intra" or "recompute"."""
    few = some_heads(case.heads, case.heads_v)[1]
    named = {"intra": intra_results, "recompute": recompute_results}[stage]
    rows = torch.arange(case.tokens, device=DEVICE) % reference.CHUNK
    columns = torch.arange(reference.CHUNK, device=DEVICE)
    later = (columns > rows[:, None])[:, None]
    actual: dict[str, Results] = {}
    for who, call in calls.items():
        poison(arguments["v"], arguments["v"], arguments["Akk"])
        actual[who] = {name: x[:, :, few] for name, x in named(who, outcome(who, call)).items()}
        if who != "ours" and "Aqk" in actual[who]:  # elements that the peer never writes
            actual[who]["Aqk"] = actual[who]["Aqk"].masked_fill(later, 0)
    cut = of_heads(arguments, case.heads, case.heads_v, 2)

    def results(**how: Any) -> Results:
        q, k, v, g, beta = (cut[name] for name in ("q", "k", "v", "g", "beta"))
        if stage == "intra":
            return reference.kda_chunk_intra_reference(q, k, v, g, beta, **how)._asdict()
        found = reference.kda_recompute_w_u_reference(q, k, v, g, beta, cut["Akk"], **how)
        return dict(zip(RECOMPUTE, found, strict=True))

    plain = results(dtype=torch.float32, stage_dtype=DTYPE)
    return hold(f"{stage} at {case}", actual, plain, results())


def check_decode(
    case: DecodeCase, arguments: Arguments, calls: Mapping[str, Call]
) -> dict[str, float]:
    """Compare as `check_chunk` does, for a decode step, which updates the arguments' state."""
    few = some_heads(case.heads, case.heads_v)[1]
    whole = {name: x for name, x in arguments.items() if name != "out"}
    if "state_indices" in whole:
        whole["state_indices"] = whole["state_indices"].cpu()  # read once per sequence
    of_head = case.decays == "head"
    run = gated_delta_rule_decode_reference if of_head else reference.kda_decode_reference

    def results(**how: Any) -> Results:
        given, found = dict(whole), {}
        if case.convolution:
            pool, weight = given.pop("conv_state"), given.pop("conv_weight")
            slots = given.get("state_indices")
            y = causal_convolution_reference(
                given["q"], given["k"], given["v"], pool, weight, state_indices=slots, **how
            )
            given |= {"q": y.q, "k": y.k, "v": y.v}
            found["conv_state"] = y.conv_state
        o, state, *_ = run(**of_heads(given, case.heads, case.heads_v, 1), **how)
        return {"o": o, "state": state} | found

    plain, exact = results(dtype=torch.float32), results()
    order = _order(arguments)
    actual: dict[str, Results] = {}
    for who, call in calls.items():
        result = outcome(who, call)
        if who == "ours":
            actual[who] = {"o": arguments["out"][:, few], "state": arguments["state"][:, few]}
            if case.convolution:
                actual[who]["conv_state"] = arguments["conv_state"]
            continue
        state = torch.empty_like(exact["state"], dtype=torch.float32)
        state[order] = result[1].transpose(-1, -2)[:, few]
        actual[who] = {"o": result[0][:, 0, few], "state": state}
    name = "gated_delta_rule_decode" if of_head else "kda_decode"
    return hold(f"{name} at {case}", actual, plain, exact)


def worst_errors(errors: Sequence[Mapping[str, float]]) -> str:
    """A note on the largest error of each contender's tensors over all cases."""
    worst: dict[str, float] = {}
    for case in errors:
        for name, error in case.items():
            worst[name] = max(worst.get(name, 0.0), error)
    listed = ", ".join(f"{name} {error:.2e}" for name, error in worst.items())
    return (
        "largest relative error against the float64 reference over all cases, on the first and "
        f"last head of q and k and the value heads that share them: {listed}"
    )


# ---- device memory


@contextlib.contextmanager
def freed() -> Iterator[None]:
    """Return the memory that a case allocated to the device afterwards."""
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
