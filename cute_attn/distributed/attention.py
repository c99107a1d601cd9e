"""Softmax attention over the ranks of a plan: checks, the choice of a mode, and the gradient."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import launch
from ..kernels.attention.heuristics import has_fused_dq
from ..ops.attention import flash_attn_func, flash_attn_varlen_func
from ..ops.attention.arguments import Arguments, check_values
from ..ops.checks import check_tensors, is_int
from . import gather, ring
from .calls import Options
from .choose import Shape, choose
from .gather import Route
from .heads import Swap, swapped
from .layout import Window
from .plan import Plan, are_plain, hashable
from .used import Used, takes

MOST_CALLS = 1024  # calls of a plan that are kept, which numbers in keys would let grow forever


class Run:
    """A call over the ranks that split tokens: the plan of the exchange, and the options.

    Attributes:
        whole: whether ranks gather whole sequences.
    """

    def __init__(
        self, plan: Plan, options: Options, mode: str, need_lse: bool, whole: bool
    ) -> None:
        self.plan, self.options, self.mode, self.need_lse = plan, options, mode, need_lse
        self.whole = whole

    @cached_property
    def route(self) -> Route:
        return self.plan.route(self.options.window, whole=self.whole)

    @cached_property
    def hops(self) -> ring.Ring:
        return self.plan.ring(self.options.window.right == 0)

    def returns_by_hops(self, q: Tensor, v: Tensor) -> bool:
        """Whether the backward is by hops, for which a kernel must compute all gradients."""
        return self.mode == "ring" and has_fused_dq(
            launch.arch_for(q.device), q.shape[-1], v.shape[-1],
            softcap=bool(self.options.softcap), dq=True, dkdv=True,
        )  # fmt: skip

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, used: Used | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """o, lse, and gathered keys for the backward."""
        tensors = q, k, v, sink, self.options, self.need_lse
        if self.mode == "ring":
            return *ring.forward(self.hops, self.plan.group, *tensors), None
        return gather.forward(self.route, self.plan.group, *tensors, used)


class Call(NamedTuple):
    """How calls run whose arguments have been checked, and are equal on all ranks.

    Attributes:
        options: as for the kernels.
        swap: the exchange of tokens for heads before and after the call; None: no exchange.
        run: the call over the ranks that split tokens; None: a rank then has all tokens.
        grad: whether a backward follows.
    """

    options: Options
    swap: Swap | None
    run: Run | None
    grad: bool


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, run: Run,
        used_q: Tensor | None, used_k: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        ctx.run, ctx.used = run, used_q is not None or used_k is not None
        o, lse, kept = run.forward(q, k, v, sink, Used(used_q, used_k) if ctx.used else None)
        ctx.save_for_backward(q, k, v, o, lse, sink, kept, used_q, used_k)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, o, lse, sink, kept, *used = ctx.saved_tensors
        run: Run = ctx.run
        if do is None:
            do = torch.zeros_like(o)
        of_sink = sink if ctx.needs_input_grad[3] else None
        tensors = q, k, v, o, lse, do, dlse, of_sink, run.options
        if run.returns_by_hops(q, v):
            found = ring.backward(run.hops, run.plan.group, *tensors)
        else:
            found = gather.backward(
                run.route, run.plan.group, *tensors, Used(*used) if ctx.used else None, kept,
                run.mode == "ring",
            )  # fmt: skip
        return (*found, None, None, None)


def attend(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    packed: bool,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
    learnable_sink: Tensor | None,
    softcap: float,
    deterministic: bool,
    scheduler: str | None,
    return_lse: bool,
    batch_invariant: bool,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    unsupported: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Run a public function that got `cp`. `flash_attn_func` describes the other arguments.

    Args:
        packed: whether `flash_attn_varlen_func` was called, rather than `flash_attn_func`.
        unsupported: by name, arguments that a call with cp does not take; None if not given.

    Returns:
        The pair (o, lse) of this rank's queries; lse is None without `return_lse`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a tensor does not fit the plan, or ranks call with different arguments.
        NotImplementedError: an argument of `unsupported` is given, or the mode takes no such call.
    """
    grad = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in (q, k, v, learnable_sink)
    )
    key = None
    if not unsupported and seqused_q is seqused_k is None:
        key = _key(
            (q, k, v), learnable_sink, packed, softmax_scale, causal, window_size, softcap,
            deterministic, scheduler, return_lse, batch_invariant, grad,
        )  # fmt: skip
        call = plan.calls.get(key)
        if call is not None:
            return _run(plan, call, q, k, v, learnable_sink, return_lse, None)
    for name, value in unsupported.items():
        if value is not None:
            raise NotImplementedError(f"{name} is given with cp, which has no {name}")
    window = _window(causal, window_size)
    _check(plan, q, k, v, packed)
    _check_values(q, k, v, window, softmax_scale, learnable_sink, softcap, scheduler)
    used = _used(plan, q, seqused_q, seqused_k)
    plan.agree(
        (
            ("batch", 1 if packed else q.shape[0]),
            ("heads, heads_k, head_dim, head_dim_v", (*q.shape[-2:], k.shape[-2], v.shape[-1])),
            ("dtype of q", q.dtype),
            ("dtype of k and v", k.dtype),
            ("window_size", tuple(window)),
            ("softmax_scale", softmax_scale),
            ("softcap", softcap),
            ("learnable_sink", learnable_sink is not None),
            ("a gradient", grad),
            ("return_lse", return_lse),
            ("seqused_q, seqused_k", used and tuple(x is not None for x in used)),
            ("seqused_q that is seqused_k", used and used.equal),
        )
    )
    options = Options(window, softmax_scale, softcap, scheduler, deterministic, batch_invariant)
    call = _call(plan, q, k, v, options, return_lse, grad, used)
    if key is not None:
        if len(plan.calls) >= MOST_CALLS:
            plan.calls.clear()
        plan.calls[key] = call
    return _run(plan, call, q, k, v, learnable_sink, return_lse, used)


def _key(tensors: tuple[Any, ...], sink: Any, *options: Any) -> tuple[Any, ...] | None:
    """All that the checks of a call depend on; None for tensors that may intercept a call. Keys are
    compared with ==, and True == 1 == 1.0."""
    given = tensors if sink is None else (*tensors, sink)
    if not are_plain(given):
        return None
    key = (
        *[(x.shape, x.stride(), x.dtype, x.get_device()) for x in given],
        sink is None,
        options,
        *map(type, options),
        *map(type, options[3] if type(options[3]) is tuple else ()),
    )
    return hashable(key)


def _call(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool, grad: bool,
    used: Used | None,
) -> Call:  # fmt: skip
    """Choose the mode of a call with checked arguments."""
    heads, heads_k = q.shape[-2], k.shape[-2]
    batch = 1 if plan.packed else q.shape[0]
    shape = _shape(plan, batch, heads, heads_k, (q.shape[-1], v.shape[-1]), options, grad)
    mode = plan.mode or choose(shape, mesh=plan.by_heads > 1)
    if used is not None and plan.mode is None and not takes(*options.window):
        # With other numbers of heads, or with a mesh, `_over_tokens` refuses the call.
        mode = "gather" if heads % plan.world or heads_k % plan.world else "heads"
    swap = plan.swap if plan.by_heads > 1 else plan.all_heads if mode == "heads" else None
    if swap is None:
        return Call(options, None, _over_tokens(plan, options, mode, return_lse, grad, used), grad)
    ranks = len(swap.rows)
    for name, number in (("q", heads), ("k", heads_k)):
        if number % ranks:
            raise NotImplementedError(
                f"{name} has {number} heads for {ranks} ranks: an exchange of heads needs a "
                f"multiple of {ranks}; take mode 'gather' or 'ring', or another mesh"
            )
    run = None
    if plan.by_heads > 1 and plan.by_tokens > 1:
        run = _over_tokens(plan, options, mode, return_lse, grad, used)
    return Call(options, swap, run, grad)


def _run(
    plan: Plan, call: Call, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
    return_lse: bool, used: Used | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run a call. If the call exchanges tokens for heads, ranks do so before and after."""
    if plan.packed:
        q, k, v = q[None], k[None], v[None]
    swap, run = call.swap, call.run
    if swap is not None:
        if sink is not None:
            sink = sink[swap.heads(swap.rank, q.shape[2])].contiguous()
        q, k, v = swapped(swap, q, k, v, to_heads=True)
    if run is None:
        o, lse = _whole(plan, q, k, v, sink, call.options, return_lse, used)
    elif call.grad:
        o, lse = _Attention.apply(q, k, v, sink, run, *(used or (None, None)))
    else:
        o, lse, _ = run.forward(q, k, v, sink, used)
    if not return_lse:
        lse = None
    if swap is not None:
        if lse is None:
            (o,) = swapped(swap, o, to_heads=False)
        else:
            o, lse = swapped(swap, o, lse.transpose(1, 2)[..., None], to_heads=False)
            lse = lse[..., 0].transpose(1, 2)
    if plan.packed:
        return o[0], None if lse is None else lse[0]
    return o, lse


def _over_tokens(
    plan: Plan, options: Options, mode: str, return_lse: bool, grad: bool, used: Used | None
) -> Run:
    window = options.window
    if used is not None and not takes(*window):
        raise NotImplementedError(
            f"window_size is {tuple(window)} with cp and seqused_q or seqused_k: take causal, no "
            "window, or mode 'heads' without a mesh"
        )
    by_hops = mode == "ring" and window.left is None and window.right in (None, 0) and used is None
    whole = used is not None and not used.equal
    return Run(plan, options, "ring" if by_hops else "gather", return_lse or grad, whole)


def _whole(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, options: Options,
    return_lse: bool, used: Used | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention on all tokens of this rank's heads."""
    shared: dict[str, Any] = options._asdict()
    shared["window_size"] = tuple(shared.pop("window"))
    shared |= {"learnable_sink": sink, "return_lse": return_lse}
    if not plan.packed:
        return flash_attn_func(q, k, v, **shared)
    bounds = torch.tensor(plan.layout.bounds, dtype=torch.int32).to(q.device)
    longest = max(plan.lengths, default=0)
    if used is not None:
        shared |= {"seqused_q": used.queries, "seqused_k": used.keys}
    o, lse = flash_attn_varlen_func(
        q[0], k[0], v[0], cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest,
        max_seqlen_k=longest, **shared,
    )  # fmt: skip
    return o[None], None if lse is None else lse[None]


def _shape(
    plan: Plan, batch: int, heads: int, heads_k: int, dims: tuple[int, int], options: Options,
    grad: bool,
) -> Shape:  # fmt: skip
    """What the choice of a mode depends on. `dims` are head_dim and head_dim_v."""
    window = options.window
    whole = window.left is None and window.right in (None, 0)
    pairs = sum(n * n for n in plan.lengths) // (2 if window.right == 0 else 1)
    return Shape(
        plan.by_tokens,
        -(-plan.layout.total // plan.by_tokens) * batch,
        plan.received(window) * batch if whole else 0,
        pairs // plan.by_tokens * batch,
        heads // plan.by_heads,
        heads_k // plan.by_heads,
        *dims,
        not whole,
        grad,
    )


def _window(causal: bool, window_size: Any) -> Window:
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"window_size is {window_size!r}, must be a pair (left, right)")
    left, right = (None if x == -1 else x for x in window_size)
    for x in (left, right):
        if x is not None and not is_int(x):
            raise TypeError(
                f"window_size holds a {type(x).__name__}, must be ints, or None for no bound"
            )
        if x is not None and x < 0:
            raise NotImplementedError(
                f"window_size is {tuple(window_size)} with cp, which takes no number below -1"
            )
    return Window(left, 0 if causal else right)


def _used(plan: Plan, q: Tensor, seqused_q: Tensor | None, seqused_k: Tensor | None) -> Used | None:
    """The used tokens, None if all are used."""
    sequences = len(plan.lengths)
    for name, x in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {x.dtype}, must be torch.int32")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, must be on {q.device} as q is")
        if list(x.shape) != [sequences]:
            raise ValueError(
                f"{name} has shape {list(x.shape)}, must be [{sequences}], a number for each "
                "sequence of the plan"
            )
    return None if seqused_q is None and seqused_k is None else Used(seqused_q, seqused_k)


def _check_values(
    q: Tensor, k: Tensor, v: Tensor, window: Window, softmax_scale: float | None,
    sink: Tensor | None, softcap: float, scheduler: str | None,
) -> None:  # fmt: skip
    """Raise what a call on one GPU raises, before the first message: other ranks would wait for a
    rank that raises later."""
    q, k, v = (x if x.dim() == 4 else x[None] for x in (q, k, v))
    a = Arguments(
        q, k, v, softmax_scale=softmax_scale, window_left=window.left, window_right=window.right,
        learnable_sink=sink, softcap=softcap, scheduler=scheduler,
    )  # fmt: skip
    check_values(a, check_tensors({"q": q, "k": k, "v": v}, {"learnable_sink": sink}))


def _check(plan: Plan, q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    if packed != plan.packed:
        name, wanted = (
            ("flash_attn_func", "seqlen")
            if not packed
            else ("flash_attn_varlen_func", "cu_seqlens")
        )
        raise ValueError(f"cp is a plan without {wanted}, and {name} needs one with it")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.is_nested:
            raise TypeError(f"{name} is nested, must be a tensor of the tokens of the plan")
        dims = 3 if packed else 4
        if x.dim() != dims or x.shape[dims - 3] != plan.tokens:
            raise ValueError(
                f"{name} has shape {list(x.shape)} on rank {plan.rank}, must have {dims} "
                f"dimensions and {plan.tokens} tokens, which the plan gives to this rank"
            )
