"""The base class of all operators.

An operator is written as two classes. A NamedTuple has the arguments, in the order of the
registered operator's schema. A subclass of `Operator` has the checks, the choice of kernels and the
launch. The base class adds the table of loaded kernels, the route of a call, the registration with
torch.library, the fake implementation, autograd, and error messages for calls that compiled host
code refuses.

A call takes one of two routes. Plain tensors and parameters go straight to the kernel (`forward`),
through a torch.autograd.Function if a gradient is needed (`recorded`). If torch may intercept the
call, the call goes through torch's dispatcher, as with torch's own operators (`routed`). Torch may
intercept a call under torch.compile or a dispatch mode, with a tensor subclass, or with an object
that has `__torch_function__`. The dispatcher then calls the registered operator's implementation,
which treats every tensor that it gets as plain memory.

The public function chooses the route first, with inline tests because a call would cost time:

    call = (
        _forward  # _operator.forward, bound once
        if not is_dynamo_compiling()
        and type(q) is type(k) is ... is Tensor
        and (A_log is None or type(A_log) in PLAIN) and ...
        and forward_ad._current_level < 0
        and not dispatch_mode_depth()
        else _operator.routed
    )
    return call(q, k, ...)

A wrapper subclass that has no memory must not reach a kernel, because its data pointer is 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Generic, NoReturn, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import is_tensor_like

from .. import launch
from ..settings import on_reload
from .checks import check_tangents, check_tensors, check_transforms

__all__ = [
    "PLAIN",
    "Operator",
    "dispatch_mode_depth",
    "forward_ad",
    "is_compiling",
    "is_dynamo_compiling",
    "is_grad_enabled",
    "plain",
]

# Tensor types that cannot intercept a call; torch.nn.Buffer has type Tensor.
PLAIN = frozenset({Tensor, Parameter})

is_compiling = torch.compiler.is_compiling
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
is_grad_enabled = torch.is_grad_enabled
dispatch_mode_depth = torch._C._len_torch_dispatch_stack
# Autograd does not see what kernels write; it detects changed saved tensors by their version. So
# the version is increased in every mode, because a gradient that saved the tensor may be taken
# later.
increment_version = torch._C._increment_version
_disabled_torch_function = torch._C._disabled_torch_function_impl

# Usual types of arguments that cannot intercept a call.
_NEVER_INTERCEPT = PLAIN | {type(None), bool, int, float, str}

# Compiled host code raises these exceptions when it refuses arguments, and Python raises them for
# wrong types. Subclasses stand for other errors: out of memory, a damaged cache, a finding of the
# emulator.
_REFUSALS = frozenset({AttributeError, IndexError, TypeError, ValueError, RuntimeError})

# A kernel refuses overlapping tensors by a launch without CTAs, which returns
# cudaErrorInvalidValue.
_INVALID_VALUE = 1

MOST_READY = 4096  # entries of a table, which floats in keys would let grow forever

NAMESPACE = __name__.partition(".")[0]  # "cute_attn", unless the package has another name
_library = torch.library.Library(NAMESPACE, "FRAGMENT")

_T = TypeVar("_T")
_Arguments = TypeVar("_Arguments", bound=tuple[Any, ...])


class Operator(Generic[_Arguments]):
    """Base class of an operator; instantiate a subclass once, which registers it.

    Class attributes of a subclass:
        name: the registered operator's name, `torch.ops.cute_attn.<name>`.
        public_name: the name in error messages, if different from `name`.
        arguments: the NamedTuple of the operator's arguments. Its annotations and defaults are the
            schema.
        written: names of the arguments written in place. An operator with such arguments returns
            its argument `out`; if `out` is None, the result is allocated like the argument `v`.
        results: only if `written` is empty: pairs such as ("lse", "return_lse") of a result's name
            and the argument that requests it, a flag or an optional tensor; "" for a result that is
            always computed.
        saved, kept: only with a gradient, see below.

    Methods that every subclass defines: `check`, `prepare`, and either `key` and `launch`, or
    `forward`. Decode and prefill of linear attention define `forward`, which does the work of both
    methods in one Python frame, without the NamedTuple, and so costs less per call. Such a
    `forward` must hand a call that `takes_gradient` to `recorded`, and exceptions to `failed`.
    `outputs` is required if `written` is empty. `check_memory`, `readable`, `nothing` and `stale`
    have defaults. An operator with a gradient also defines `saved`, `kept` and `backward`, and
    `check_gradient` if some of the operator's calls have no gradient.
    """

    name: ClassVar[str]
    public_name: ClassVar[str] = ""
    arguments: ClassVar[Any]
    written: ClassVar[tuple[str, ...]] = ()
    results: ClassVar[tuple[tuple[str, str], ...]] = ()

    # Names of the arguments and results that `backward` gets.
    saved: ClassVar[tuple[str, ...]] = ()
    # Values that replace a call's arguments if a gradient is needed, such as {"return_lse": True}.
    kept: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        # `key` of a call -> result of `prepare` for this key.
        self.ready: dict[tuple[Any, ...], Any] = {}
        # A None in a key may stand for the value of a setting, so a reload makes the prepared
        # results stale.
        on_reload(self.ready.clear)
        hints = get_type_hints(self.arguments)
        self._tensors = {
            name: position
            for position, name in enumerate(self.arguments._fields)
            if hints[name] in (Tensor, Tensor | None)
        }
        self._positions = tuple(self._tensors.values())
        self._required = {name for name in self._tensors if hints[name] is Tensor}
        if self.written:
            self._required.discard("out")
        names = (*self.arguments._fields, *(name for name, _ in self.results))
        self._saved_positions = [(name, names.index(name)) for name in self.saved]
        self._first = next(name for name in self._tensors if name in self._required)
        self._register(hints)

    # -- methods of a subclass

    def check(self, a: _Arguments, given: dict[str, Tensor]) -> None:
        """Raise the documented exception if no kernel can take these arguments.

        The check also runs on fake tensors, so it must not look at addresses or contents.

        Args:
            a: the call's arguments.
            given: the arguments that are tensors, by name; all are strided and on one device.
        """
        raise NotImplementedError

    def check_memory(self, a: _Arguments) -> None:
        """Raise the documented exception for wrong alignment or overlap of the tensors' memory."""

    def prepare(self, a: _Arguments) -> Any:
        """Load the kernels for these arguments. Return the kernels with all other values that a
        launch needs and that calls with this key share, such as a default scale."""
        raise NotImplementedError

    def stale(self, ready: Any, a: _Arguments) -> bool:
        """Whether `a` needs other kernels than `ready`, although the key of `a` is unchanged.

        Called only after a kernel has refused `a`. Define this method if the choice of kernels
        depends on something that `key` leaves out, such as alignment.
        """
        return False

    def key(self, a: _Arguments) -> tuple[Any, ...]:
        """Everything that the choice of kernels depends on, and everything that must be checked
        but that neither the kernels nor their compiled host code check. Keys are compared with ==,
        and True == 1 == 1.0, so the types of numbers and flags belong to the key."""
        raise NotImplementedError

    def launch(self, ready: Any, a: _Arguments) -> Any:
        """Allocate the results, launch the kernels of `ready`, and return the results."""
        raise NotImplementedError

    def outputs(self, a: _Arguments) -> Any:
        """Allocate the results without computing them, None for a result not requested. The fake
        implementation returns these tensors."""

    def readable(self, a: _Arguments) -> _Arguments:
        """The call's arguments, with a copy or a view of each tensor that kernels cannot read in
        place.

        A tensor that needs no change must be returned itself, not as a copy.
        """
        return a

    def nothing(self, a: _Arguments) -> Any:
        """The results of a call that needs no launch, such as one with empty tensors, else None."""
        return None

    def backward(
        self,
        saved: Mapping[str, Any],
        gradients: Mapping[str, Tensor | None],
        needed: frozenset[str],
    ) -> Mapping[str, Tensor]:
        """Compute the gradients of the arguments in `needed`, by name.

        The backward's kernels belong to a separate `Operator`. Call that operator through `routed`,
        so that the backward can be traced. tests/ops/test_operator.py has an example.

        Args:
            saved: the arguments and results that the attribute `saved` names. A result that was
                not requested is a tensor without elements.
            gradients: the results' gradients, by name; None for a result that no gradient reaches.
            needed: names of the arguments whose gradient autograd needs.
        """
        raise NotImplementedError

    def check_gradient(self, a: _Arguments) -> None:
        """Raise NotImplementedError for a call that needs a gradient but has no backward.

        The check runs before the forward and before `check`, on fake tensors too.
        """

    # -- the routes of a call

    def forward(self, *arguments: Any, ready: Any = None) -> Any:
        """Run the operator on plain tensors.

        Args:
            ready: the result of `prepare` for the call's key; with None, the call looks up this
                result in the table.
        """
        key = None
        if is_grad_enabled() and self.takes_gradient(*[arguments[i] for i in self._positions]):
            return self.recorded(*arguments)
        try:
            a = self.arguments(*arguments)
            if ready is None:
                key = self.key(a)
                ready = self.ready[key]
            return self.launch(ready, a)
        except Exception as error:
            return self.failed(error, key, ready, *arguments)

    def routed(self, *arguments: Any) -> Any:
        """Run the operator if torch may intercept the call. This is the slower of the two
        routes."""
        a = self.arguments(*arguments)
        tensors = [a[i] for i in self._positions]
        if not _intercepted(*tensors):
            self._check_tangents(a)
            return self.forward(*a)
        # While tracing, the fake implementation checks the arguments.
        if not is_compiling() and not _overridden(*tensors):
            self._check(a)
        return self._dispatched(a)

    def refuse(self, a: _Arguments) -> None:
        """Raise what a call with these arguments raises before its launch, and load its kernels.

        A function that writes memory in front of the call calls this method first.
        """
        if is_compiling():  # the fake implementation checks the arguments, and nothing is written
            return
        tensors = [a[i] for i in self._positions]
        if _intercepted(*tensors):
            if not _overridden(*tensors):
                self._check(a)
            return
        self._validate(a)
        if self.nothing(a) is None and self.key(a) not in self.ready:
            self.prepare(a)

    def failed(self, error: Exception, key: Any, ready: Any, *arguments: Any) -> Any:
        """Handle an exception of `forward`: load the kernels on a cold call; otherwise raise the
        documented exception, or call again with copies of tensors that the kernel refused.

        Args:
            error: what `forward` caught.
            key: the call's key; None if `key` itself raised, or for the launch of a cold call.
            ready: the loaded kernels; None if the table has none for the key.
        """
        if ready is None:
            return self._first_call(key, self.arguments(*arguments))
        if key is None or not _is_refusal(error):
            raise error
        a = self.arguments(*arguments)
        self._validate(a)
        if self.written:
            a = self._with_out(a, torch.preserve_format)
        mended = self.readable(a)
        if self.nothing(a) is None and _same(mended, a) and not self.stale(ready, a):
            raise error
        return self._first_call(key, a)

    def takes_gradient(self, *tensors: Any) -> bool:
        """Whether one of these tensors requires a gradient. Call this only in grad mode.

        Raises:
            NotImplementedError: a tensor requires a gradient, and the operator has no backward.
        """
        for x in tensors:
            if x is not None and getattr(x, "requires_grad", False):
                if not self._has_backward:
                    self.refuse_gradient()
                return True
        return False

    def refuse_gradient(self) -> NoReturn:
        raise NotImplementedError(
            f"{self.public_name or self.name} has no backward yet: call it under torch.no_grad() "
            "or torch.inference_mode(), or detach its arguments"
        )

    def _first_call(self, key: Any, a: Any) -> Any:
        """A cold call: check the arguments, load the kernels, store them in the table, launch."""
        self._validate(a)
        if is_grad_enabled():
            self.takes_gradient(*self.tensors(a).values())
        if self.written:
            a = self._with_out(a, torch.preserve_format)
        results = self.nothing(a)
        if results is not None:
            return results
        mended = self.readable(a)
        ready = self.prepare(mended)
        if key is not None and _same(mended, a) and may_remember(getattr(a, self._first)):
            if len(self.ready) >= MOST_READY:
                self.ready.clear()
            self.ready[key] = ready
        results = self.forward(*mended, ready=ready)
        return a.out if self.written else results

    def tensors(self, a: _Arguments) -> dict[str, Tensor | None]:
        """The arguments that are declared as tensors, by name; None for a tensor not given."""
        return {name: a[i] for name, i in self._tensors.items()}

    def _check(self, a: Any) -> None:
        tensors = self.tensors(a)
        required = {name: x for name, x in tensors.items() if name in self._required}
        self.check(a, check_tensors(required, tensors))

    def _validate(self, a: Any) -> None:
        self._check(a)
        launch.check_device(self._first, getattr(a, self._first).device)
        self.check_memory(a)

    def _with_out(self, a: Any, memory_format: torch.memory_format) -> Any:
        if a.out is not None:
            return a
        return a._replace(out=torch.empty_like(a.v, memory_format=memory_format))

    def _check_tangents(self, a: Any) -> None:
        if forward_ad._current_level >= 0:
            check_tangents(**self.tensors(a))

    # -- the registered operator

    @property
    def _has_backward(self) -> bool:
        return type(self).backward is not Operator.backward

    def _register(self, hints: dict[str, Any]) -> None:
        signature = inspect.signature(self.arguments)
        count = len(self.results)
        several: Any = tuple[(Tensor,) * count]  # type: ignore[misc]
        returned = None if not count else Tensor if count == 1 else several
        typed = [x.replace(annotation=hints[name]) for name, x in signature.parameters.items()]

        def prototype() -> None: ...

        prototype.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            typed, return_annotation=returned
        )
        schema = torch.library.infer_schema(prototype, mutates_args=self.written)
        _library.define(self.name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(self.name, self._implementation, "CompositeExplicitAutograd")
        qualified = f"{NAMESPACE}::{self.name}"
        torch.library.register_fake(qualified, self._fake_implementation, lib=_library)
        self.registered = getattr(getattr(torch.ops, NAMESPACE), self.name)
        if self._has_backward:
            self._register_autograd()

    def _register_autograd(self) -> None:
        """Replace torch.library.register_autograd, which reads the schema's list of arguments again
        for each argument. This took most of the time of a call in training."""
        operator, overload = self, self.registered.default

        def below(keyset: Any, *arguments: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return overload.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, compute: Callable[..., Any], *arguments: Any) -> Any:
                a = operator.arguments(*arguments)
                operator.check_gradient(a)
                results = compute(*arguments)
                operator._save(ctx, a, results)
                return results

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
                return None, *operator._backward(ctx, *gradients)

        def implementation(keyset: Any, *arguments: Any) -> Any:
            if is_grad_enabled() and torch._C._any_requires_grad(*arguments):
                return Function.apply(partial(below, keyset), *arguments)
            return below(keyset, *arguments)

        _library.impl(self.name, implementation, "Autograd", with_keyset=True)
        self._function = Function

    def recorded(self, *arguments: Any) -> Any:
        """Run the operator on plain tensors of which one requires a gradient, as the dispatcher
        would. This saves the dispatcher's two conversions of the arguments."""
        given = self.arguments(*arguments)
        check_transforms(**self.tensors(given))
        a = given._replace(**self.kept)
        return self._requested(given, self._function.apply(self._compute, *a))

    def _compute(self, *arguments: Any) -> Any:
        return _filled(self.forward(*arguments))

    def _dispatched(self, arguments: tuple[Any, ...]) -> Any:
        """Call the registered operator, so that the dispatcher sees the call."""
        a = given = self.arguments(*arguments)
        if is_grad_enabled() and self.takes_gradient(*self.tensors(a).values()):
            if not is_compiling():
                check_transforms(**self.tensors(a))
            a = a._replace(**self.kept)
        if self.written:
            a = self._with_out(a, torch.contiguous_format)
            self.registered(*a)
            return a.out
        return self._requested(given, self.registered(*a))

    def _requested(self, given: Any, results: Any) -> Any:
        """The results, None for a result that the call's arguments do not request."""
        if len(self.results) == 1:
            return results
        return tuple(
            x if not ask or _is_set(getattr(given, ask)) else None
            for x, (_, ask) in zip(results, self.results, strict=True)
        )

    def _implementation(self, *given: Any, **named: Any) -> Any:
        """The registered operator's implementation on memory. A result not requested is a tensor
        without elements."""
        a = self.arguments(*map(plain, given), **{name: plain(x) for name, x in named.items()})
        self._check_tangents(a)
        if self.written:
            self.forward(*a)
            return None
        with torch.no_grad():  # only `backward` computes gradients
            return _filled(self.forward(*a))

    def _fake_implementation(self, *given: Any, **named: Any) -> Any:
        a = self.arguments(*given, **named)
        self._check(a)
        return _filled(self.outputs(a))

    def _save(self, ctx: Any, a: Any, output: Any) -> None:
        for name, value in self.kept.items():
            found = getattr(a, name)
            if found != value:  # a direct call of torch.ops.cute_attn.<name>
                raise ValueError(f"{name} is {found}, must be {value} for a gradient")
        values = (*a, *output) if isinstance(output, tuple) else (*a, output)
        tensors: dict[str, Tensor] = {}
        rest: dict[str, Any] = {}
        for name, position in self._saved_positions:
            x = values[position]
            (tensors if isinstance(x, Tensor) else rest)[name] = x
        ctx.save_for_backward(*tensors.values())
        ctx.tensors = tuple(tensors)
        ctx.rest = rest
        ctx.set_materialize_grads(False)

    def _backward(self, ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        fields = self.arguments._fields
        saved = dict(zip(ctx.tensors, ctx.saved_tensors, strict=True)) | ctx.rest
        # The dispatcher leaves out trailing arguments that have their defaults.
        needed = frozenset(
            name for name, need in zip(fields, ctx.needs_input_grad[1:], strict=False) if need
        )
        names = [name for name, _ in self.results]
        given = (None if x is None else _in_memory(x) for x in gradients)
        found = self.backward(saved, dict(zip(names, given, strict=True)), needed)
        return tuple(found.get(name) for name in fields)


def may_remember(x: Tensor) -> bool:
    """Whether later calls may reuse the kernels for x. Not on the CPU: the emulator that runs the
    kernels depends on the context of the call."""
    return x.is_cuda


def plain(x: _T) -> _T:
    """x as a plain Tensor; for a tensor subclass, a Tensor on its memory."""
    if isinstance(x, Tensor) and type(x) not in PLAIN:
        return x.as_subclass(Tensor)  # type: ignore[return-value]
    return x


def _in_memory(gradient: Tensor) -> Tensor:
    """A gradient for kernels: strided, and with its values in memory. The gradient comes from
    another function's backward, so the caller could not convert it."""
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient._is_zerotensor():
        gradient = gradient.clone()
    return gradient.resolve_neg() if gradient.is_neg() else gradient


def _is_refusal(error: Exception) -> bool:
    """Whether compiled host code refused the arguments, rather than failed for another reason."""
    if type(error).__name__ == "CUDADialectError":  # only with the compiler loaded
        return getattr(error, "_error_code", None) == _INVALID_VALUE
    return type(error) in _REFUSALS


def _intercepted(*arguments: Any) -> bool:
    """Whether torch may intercept a call with these arguments, tensors or not."""
    if is_compiling() or dispatch_mode_depth():
        return True
    return not _NEVER_INTERCEPT.issuperset(map(type, arguments)) and any(
        type(x) not in PLAIN and is_tensor_like(x) for x in arguments
    )


def _overridden(*arguments: Any) -> bool:
    """Whether one of these objects has a `__torch_function__`. Such a function runs before all
    checks, since it may replace tensors."""
    return any(
        type(x) not in PLAIN
        and getattr(type(x), "__torch_function__", _disabled_torch_function)
        is not _disabled_torch_function
        for x in arguments
    )


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether a and b hold identical objects."""
    return all(x is y for x, y in zip(a, b, strict=True))


def _is_set(x: Any) -> bool:
    """Whether a flag is true, or an optional tensor is given."""
    return x is not None if isinstance(x, Tensor | None) else bool(x)


def _filled(results: Any) -> Any:
    """The results, with a tensor without elements for each None, because the schema has only
    Tensors."""
    if not isinstance(results, tuple):
        return results
    some = next(x for x in results if x is not None)
    return tuple(some.new_empty(0) if x is None else x for x in results)
