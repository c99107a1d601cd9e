"""Inputs, contenders and agreement checks of the benchmark of attention.

Imports torch, so the benchmark's module imports this module only when the benchmark runs.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...kernels.attention import table
from ...reference.attention import attention_gradients, attention_gradients_in_low_precision
from ..harness.agreement import Disagreement, poison, relative_error
from .agreement import (
    MAX_ERROR_RATIO,
    PEER_MAX_ERROR,
    Expected,
    error_ratio,
    expected_in,
    peer_error,
)
from .cases import CUDNN, FA2, FA3, FA3_PLANNED, FA4, PEERS, SHORT_QUERIES, WIDE, Case

DEVICE = "cuda"
SEED = 20261122
CHECKED_BLOCKS = 3  # blocks of rows of a head
CHECKED_TOKENS = 512  # tokens of gradients that are compared with float64

Call = Callable[[], Any]


@dataclass(frozen=True)
class Inputs:
    """Inputs of a call.

    Attributes:
        k, v: `[B, S, HK, D]`, or `[pages, page_size, HK, D]` with a page table.
        seqused_k: the lengths of a cache's sequences.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seqused_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None

    def in_one_piece(self, batches: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of the sequences, without pages."""
        if self.page_table is None:
            return self.k[batches], self.v[batches]
        pages = self.page_table[batches].long()
        k, v = (x[pages].flatten(1, 2) for x in (self.k, self.v))
        return k, v


def make_inputs(case: Case, seed: int = SEED) -> Inputs:
    """Random inputs; pages are in random order. k and v have the numbers of an fp8 cache if the
    case has one."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)

    q = normal(case.batch, case.seqlen_q, case.heads, case.head_dim)
    rows, page_table = (case.batch, case.seqlen_k), None
    if case.page_size:
        each = -(-case.seqlen_k // case.page_size)
        rows = case.batch * each, case.page_size
        order = torch.randperm(rows[0], generator=generator, device=DEVICE)
        page_table = order.view(case.batch, each).to(torch.int32)
    k, v = (normal(*rows, case.heads_k, case.head_dim) for _ in range(2))
    if case.kv_dtype:
        k, v = (x.to(getattr(torch, case.kv_dtype)).to(dtype) for x in (k, v))
    seqused_k = None
    if case.cached:
        lengths = case.lengths or (case.seqlen_k,) * case.batch
        seqused_k = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return Inputs(q, k, v, seqused_k, page_table)


def compile_all(cases: Sequence[Case]) -> None:
    """Compile the forward's kernels on all cores, instead of one by one when called. A kernel that
    does not compile fails again when it is called."""
    from cute_attn import cache, warmup
    from cute_attn.ops.attention import plan_attention

    arch = cache.current_arch()
    plans = [case.plan for case in cases]
    wide = {"kv_dtype": None, "k_descale": False, "v_descale": False}
    plans += [plan | wide for plan in plans if plan["kv_dtype"]]
    requests = dict.fromkeys(r for plan in plans for r in plan_attention(arch, **plan))
    with contextlib.suppress(cache.CompileError):
        warmup(list(requests))


def with_kernel(cases: Sequence[Case]) -> tuple[list[Case], list[str]]:
    """The cases whose forward has a kernel, and notes on all other cases."""
    missing = {case: reason for case in cases if (reason := _no_kernel(case)) is not None}
    found = [case for case in cases if case not in missing]
    return found, list(dict.fromkeys(missing.values()))


def _no_kernel(case: Case) -> str | None:
    """The reason why no kernel exists."""
    from cute_attn import cache
    from cute_attn.ops.attention import plan_attention

    try:
        plan_attention(cache.current_arch(), **case.plan)
    except NotImplementedError as error:
        return f"{case.part}, head_dim {case.head_dim}: {error}"
    return None


# ---- contenders


def peer_functions() -> tuple[dict[str, Callable[..., Any]], list[str]]:
    """Functions of FlashAttention-4 and FlashAttention-3 by name, and a note on each package that
    cannot be imported."""
    found: dict[str, Callable[..., Any]] = {}
    notes = []
    try:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    except ImportError as error:
        notes.append(f"FlashAttention-4 was left out: {error}")
    else:
        found |= {"dense": flash_attn_func, "varlen": flash_attn_varlen_func}
    try:
        fa3 = _flash_attention_3_module()
    except ImportError as error:
        notes.append(f"FlashAttention-3 was left out: {error}")
    else:
        found |= {
            "fa3_dense": fa3.flash_attn_func,
            "fa3_cache": fa3.flash_attn_with_kvcache,
            "fa3_plan": fa3.get_scheduler_metadata,
        }
    return found, notes


def _flash_attention_3_module() -> Any:
    """FlashAttention-3: built from source, in a package of its own, or the package fa3-fwd.

    Raises:
        ImportError: none of them can be imported.
    """
    for name in ("flash_attn_interface", "flash_attn_3.flash_attn_interface"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    # The package installs its configuration under another name than it imports.
    sys.modules["flash_attn_config"] = importlib.import_module("fa3_fwd_config")
    return importlib.import_module("fa3_fwd_interface")


def calls(
    case: Case, given: Inputs, theirs: Mapping[str, Callable[..., Any]] | None
) -> dict[str, Call]:
    """A forward of each contender; `theirs` are functions of `peer_functions`, None for no
    peer."""
    from cute_attn import flash_attn_func, flash_attn_varlen_func

    found: dict[str, Call] = {}
    options: dict[str, Any] = {"causal": case.causal}
    tensors = given.q, given.k, given.v
    if not case.cached:
        found["ours"] = partial(flash_attn_func, *tensors, **options)
        if theirs and "dense" in theirs:
            found[FA4] = partial(theirs["dense"], *tensors, **options)
        if theirs and "fa3_dense" in theirs and case.part == "forward":
            found[FA3] = partial(theirs["fa3_dense"], *tensors, **options)
    else:
        options["seqused_k"] = given.seqused_k
        pages: dict[str, Any] = {}
        if given.page_table is not None:
            pages["page_table"] = given.page_table
        ours = partial(flash_attn_varlen_func, num_splits=case.num_splits, **options)
        found["ours"] = partial(ours, *tensors, **pages)
        if case.kv_dtype:
            found[WIDE] = found["ours"]
            kv = (x.to(getattr(torch, case.kv_dtype)) for x in (given.k, given.v))
            one = torch.ones((), device=DEVICE)
            found["ours"] = partial(
                ours, given.q, *kv, **pages, k_descale=one, v_descale=one.clone()
            )
        if case.part == "pages":
            whole = given.q, *given.in_one_piece()
            found["contiguous"] = partial(ours, *whole)
        if theirs and "varlen" in theirs and not case.kv_dtype:
            found[FA4] = partial(theirs["varlen"], *tensors, **options, **pages)
        if theirs and "fa3_cache" in theirs and case.part == "decode" and not case.kv_dtype:
            found |= _flash_attention_3(case, given, theirs)
    if theirs is not None and given.page_table is None:
        found |= {who: partial(_sdpa, who, *tensors, case) for who in (CUDNN, FA2)}
    return found


def _flash_attention_3(
    case: Case, given: Inputs, theirs: Mapping[str, Callable[..., Any]]
) -> dict[str, Call]:
    """FlashAttention-3 over the cache in one piece, without and with a schedule made beforehand."""
    k, v = given.in_one_piece()
    sizes = case.batch, case.seqlen_q, k.shape[1], case.heads, case.heads_k, case.head_dim
    plan = theirs["fa3_plan"](*sizes, given.seqused_k, causal=case.causal)
    call = partial(
        theirs["fa3_cache"], given.q, k, v, cache_seqlens=given.seqused_k, causal=case.causal
    )
    return {FA3: call, FA3_PLANNED: partial(call, scheduler_metadata=plan)}


def _sdpa(who: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    backend = {CUDNN: SDPBackend.CUDNN_ATTENTION, FA2: SDPBackend.FLASH_ATTENTION}[who]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        o: torch.Tensor = scaled_dot_product_attention(
            q, k, v, is_causal=case.causal, enable_gqa=case.group > 1
        )
    return o.transpose(1, 2)


def output(result: Any) -> torch.Tensor:
    """o from the value that a contender returns."""
    o: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return o


def backward_calls(
    case: Case, given: Inputs, theirs: Mapping[str, Callable[..., Any]] | None
) -> tuple[dict[str, Call], list[str]]:
    """Calls that return the gradients (dq, dk, dv) of each contender, whose forward has run. Also
    notes on contenders that failed.

    Raises:
        NotImplementedError: there is no kernel of ours.
    """
    leaves = tuple(x.detach().requires_grad_() for x in (given.q, given.k, given.v))
    generator = torch.Generator(DEVICE).manual_seed(SEED + 1)
    do = torch.randn(given.q.shape, generator=generator, device=DEVICE, dtype=given.q.dtype)
    found: dict[str, Call] = {}
    notes = []
    for who, call in calls(case, replace(given, q=leaves[0], k=leaves[1], v=leaves[2]),
                           theirs).items():  # fmt: skip
        try:
            o = output(call())
        except Exception as error:
            if who == "ours":
                raise
            notes.append(_failed(who, case, error))
            continue
        found[who] = partial(torch.autograd.grad, o, leaves, do, retain_graph=True)
    return found, notes


def has_forward(head_dim: int) -> bool:
    """Whether this GPU has a kernel."""
    from cute_attn import cache

    return table.has("forward", cache.current_arch(), head_dim)


def launch_paths(public_name: str, head_dim: int) -> dict[str, Call]:
    """Calls of the operator on small tensors, whose kernel takes less time than its launch. K and V
    are in pages if a kernel for pages exists."""
    from cute_attn import flash_attn_func, flash_attn_varlen_func

    dense = make_inputs(Case("forward", head_dim, 1, 128, 128, 1, 1, False))
    q, k, v = dense.q, dense.k, dense.v
    o = torch.empty_like(q)
    paths: dict[str, Call] = {
        public_name: lambda: flash_attn_func(q, k, v, out=o),
        "flash_attn_func(q, k, v)": lambda: flash_attn_func(q, k, v),
        "the same, causal and with lse": lambda: flash_attn_func(
            q, k, v, causal=True, return_lse=True
        ),
    }
    paged = Case("decode", head_dim, 1, 1, 64, 1, 1, False, 64)
    if with_kernel([paged])[0]:
        cache = make_inputs(paged)
        step = partial(
            flash_attn_varlen_func, cache.q, cache.k, cache.v, seqused_k=cache.seqused_k,
            page_table=cache.page_table, out=torch.empty_like(cache.q),
        )  # fmt: skip
        paths["flash_attn_varlen_func of a paged cache, out=o"] = step
        paths["the same in two splits"] = partial(step, num_splits=2)
    return paths


# ---- agreement


def _failed(who: str, case: Case, error: Exception) -> str:
    reason = (str(error).splitlines() or [""])[0][:200]
    return f"not timed: {who} at {case}: {type(error).__name__}: {reason}"


def expected(case: Case, given: Inputs) -> list[Expected]:
    """The expected output of some heads; for a decode step, all heads of two sequences, since a
    step has few rows."""
    found = []
    ends = sorted({0, case.batch - 1})
    heads = range(case.heads) if case.seqlen_q <= SHORT_QUERIES else {0, case.heads - 1}
    for batch in ends:
        at = slice(batch, batch + 1)
        keys = case.lengths[batch] if case.lengths else case.seqlen_k
        k, v = (x[:, :keys] for x in given.in_one_piece(at))
        of_batch = expected_in(
            given.q[at], k, v, [(0, head) for head in sorted(heads)], causal=case.causal,
            max_blocks=CHECKED_BLOCKS,
        )  # fmt: skip
        found += [replace(head, batch=batch) for head in of_batch]
    return found


def agreeing(
    case: Case, given: Inputs, contenders: Mapping[str, Call]
) -> tuple[dict[str, Call], dict[str, float], list[str]]:
    """Return (the contenders to time, errors by contender, notes on all other contenders). Our
    error is a multiple of plain arithmetic's error; a peer's error is relative.

    Raises:
        Disagreement: ours is wrong.
    """
    wanted = expected(case, given)
    timed: dict[str, Call] = {}
    errors: dict[str, float] = {}
    notes = []
    for who, call in contenders.items():
        try:
            poison(given.q)
            o = output(call())
            if not bool(torch.isfinite(o).all()):
                raise Disagreement(who, "elements that are not finite")
            of, limit = (
                (peer_error, PEER_MAX_ERROR) if who in PEERS else (error_ratio, MAX_ERROR_RATIO)
            )
            errors[who] = of(o, wanted)
            if not errors[who] <= limit:
                raise Disagreement(who, f"an error of {errors[who]:.3g}, at most {limit:g}")
        except Exception as error:
            if who not in PEERS:
                raise
            notes.append(_failed(who, case, error))
            continue
        timed[who] = call
    return timed, errors, notes


GRADIENTS = ("dq", "dk", "dv")


def check_gradients(case: Case) -> dict[str, float]:
    """Our errors on few tokens, in the first K/V head and its query heads, as multiples of plain
    arithmetic's errors.

    Raises:
        NotImplementedError: there is no kernel.
        Disagreement: an error is above MAX_ERROR_RATIO.
    """
    small = replace(case, batch=1, seqlen_q=CHECKED_TOKENS, seqlen_k=CHECKED_TOKENS)
    given = make_inputs(small)
    found, _ = backward_calls(small, given, None)
    poison(given.q, given.k, given.v)
    cut = [slice(case.group), slice(1), slice(1)]
    ours = [x[:, :, heads].cpu() for x, heads in zip(found["ours"](), cut, strict=True)]
    generator = torch.Generator(DEVICE).manual_seed(SEED + 1)
    do = torch.randn(given.q.shape, generator=generator, device=DEVICE, dtype=given.q.dtype)
    tensors = (given.q, given.k, given.v, do)
    rows = [x[:, :, heads].cpu() for x, heads in zip(tensors, [*cut, cut[0]], strict=True)]
    exact = attention_gradients(*rows, causal=case.causal)
    plain = attention_gradients_in_low_precision(*rows, causal=case.causal)
    errors = {}
    for name, actual in zip(GRADIENTS, ours, strict=True):
        right = getattr(exact, name)
        ratio = relative_error(actual, right) / relative_error(getattr(plain, name), right)
        errors[name] = ratio
        if not ratio <= MAX_ERROR_RATIO:
            raise Disagreement("ours", f"{small}: {name} has {ratio:.3g} times plain's error")
    return errors


def agreeing_gradients(
    case: Case, contenders: Mapping[str, Call]
) -> tuple[dict[str, Call], list[str]]:
    """The contenders to time: ours, and peers whose gradients are close to ours. Also notes on all
    other peers."""
    ours = contenders["ours"]()
    timed, notes = {"ours": contenders["ours"]}, []
    if not all(bool(torch.isfinite(x).all()) for x in ours):
        raise Disagreement("ours", f"{case}: elements that are not finite")
    for who, call in contenders.items():
        if who == "ours":
            continue
        try:
            differences = map(relative_error, call(), ours)
            for name, difference in zip(GRADIENTS, differences, strict=True):
                if not difference <= PEER_MAX_ERROR:
                    raise Disagreement(who, f"{name} differs from ours by {difference:.3g}")
        except Exception as error:
            notes.append(_failed(who, case, error))
            continue
        timed[who] = call
    return timed, notes


def capturable(case: Case, contenders: Mapping[str, Call]) -> tuple[dict[str, Call], list[str]]:
    """The contenders that a CUDA graph can capture, and notes on all other contenders."""
    from ..harness.timing import CudaDevice

    timed, notes = {}, []
    for who, call in contenders.items():
        try:
            CudaDevice().capture(call)()
            torch.cuda.synchronize()
        except Exception as error:
            if who not in PEERS:
                raise
            notes.append(_failed(who, case, error))
            continue
        timed[who] = call
    return timed, notes
