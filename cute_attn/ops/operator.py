"""One way to write an operator.

A family writes its arguments, one NamedTuple in the order of the registered operator's schema, and
a subclass of `Operator` with its checks, its plan (which kernels) and its launch. From here come
the table of loaded kernels, the route of a call, the registration with torch.library, the fake
implementation, the diagnosis of what compiled host code refuses, and autograd.

Straight to the kernel go tensors and parameters. Everything else that torch lets have a say in what
happens to a tensor goes through the dispatcher, as with torch's own operators: dispatch modes,
subclasses, objects that are no tensor but have `__torch_function__`, and gradients. The registered
operator's implementation gets what comes out of that, and takes it for the memory that it is.

The public function asks which of the two it is, before anything else and without a call:

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

A wrapper without memory must never get further: its address is 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, NoReturn, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import is_tensor_like

from .. import launch
from ..settings import on_reload
from .checks import check_tangents, check_tensors

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

# Types of tensors that have no say. A buffer is a Tensor too: its class only looks like one.
PLAIN = frozenset({Tensor, Parameter})

is_compiling = torch.compiler.is_compiling
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
is_grad_enabled = torch.is_grad_enabled
dispatch_mode_depth = torch._C._len_torch_dispatch_stack
# An operator that saved the state for its backward must see that it has changed.
increment_version = torch._C._increment_version
_no_function = torch._C._disabled_torch_function_impl

# What most arguments are, none of which has a say.
_SILENT = PLAIN | {type(None), bool, int, float, str}

# What compiled host code raises when it refuses arguments, and Python when they are of another
# type. Subclasses are other errors: out of memory, a damaged cache, what the emulator found.
_REFUSALS = frozenset({AttributeError, IndexError, TypeError, ValueError, RuntimeError})

_MOST_READY = 4096  # kernels of one operator's table: numbers are part of some keys

_library = torch.library.Library("cute_attn", "FRAGMENT")

_T = TypeVar("_T")
_Arguments = TypeVar("_Arguments", bound=tuple[Any, ...])


class Operator(Generic[_Arguments]):
    """An operator: what a family says of it, and all that follows.

    A family says, in class attributes:
        name: of the registered operator, `torch.ops.cute_attn.<name>`.
        public_name: as errors call it, where that is another.
        arguments: the NamedTuple of its arguments. Its annotations and defaults are the schema.
        written: the names of those that it writes. The result of such an operator is its argument
            `out`, which where it is None is allocated like `v`.
        results: of an operator that writes nothing, the names of its results, each with the
            argument that asks for it, or "" where it is given always: ("lse", "return_lse").

    and in methods: `check`, `prepare`, and either `key` and `launch`, or, where the frames of
    Python between them would be felt, `forward` itself, all in one; where they are needed
    `outputs`, `check_memory`, `readable`, `nothing` and `stale`. An operator with a gradient has
    `saved`, `kept` and `backward` too.
    """

    name: ClassVar[str]
    public_name: ClassVar[str] = ""
    arguments: ClassVar[Any]
    written: ClassVar[tuple[str, ...]] = ()
    results: ClassVar[tuple[tuple[str, str], ...]] = ()

    # What `backward` is given, by name: arguments, and results.
    saved: ClassVar[tuple[str, ...]] = ()
    # Arguments that are different where a gradient will be taken, such as {"return_lse": True}.
    kept: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        # All that kernels are chosen by -> what `prepare` gave.
        self.ready: dict[tuple[Any, ...], Any] = {}
        on_reload(self.ready.clear)  # what None in a key means may be another thing from then on
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
        self._first = next(name for name in self._tensors if name in self._required)
        self._register(hints)

    # -- what a family writes

    def check(self, a: _Arguments, given: dict[str, Tensor]) -> None:
        """Raise the documented exception if no kernel can take these arguments, whose tensors are
        `given`. What needs no memory, and so holds for fake tensors too."""
        raise NotImplementedError

    def check_memory(self, a: _Arguments) -> None:
        """The same of addresses."""

    def prepare(self, a: _Arguments) -> Any:
        """Load the kernels for these arguments: what a launch needs besides them."""
        raise NotImplementedError

    def stale(self, ready: Any, a: _Arguments) -> bool:
        """Whether arguments with the key of `ready` are for other kernels than these."""
        return False

    def key(self, *arguments: Any, **_: Any) -> tuple[Any, ...]:
        """All that kernels are chosen by, and all that neither they nor their host code check."""
        raise NotImplementedError

    def launch(self, ready: Any, *arguments: Any, **_: Any) -> Any:
        """Allocate the results, and launch the kernels."""
        raise NotImplementedError

    def outputs(self, a: _Arguments) -> Any:
        """The results, not written: for fake tensors. None for those that are not asked for."""

    def readable(self, a: _Arguments) -> _Arguments:
        """The same call as kernels take it: with copies and views of what they cannot read. `a`
        itself, and its very tensors, where there is nothing to change."""
        return a

    def nothing(self, a: _Arguments) -> Any:
        """The results where there is nothing to launch; None where there is."""
        return None

    def backward(
        self,
        saved: Mapping[str, Any],
        gradients: Mapping[str, Tensor | None],
        needed: frozenset[str],
    ) -> Mapping[str, Tensor]:
        """The gradients of the arguments that are `needed`, by name, through an operator of its
        own, registered in the same way.

        Args:
            saved: the arguments and results that `saved` names.
            gradients: of the results, by name; None where there is none.
            needed: the arguments whose gradient is asked for.
        """
        raise NotImplementedError

    # -- the routes of a call

    def forward(self, *arguments: Any, ready: Any = None) -> Any:
        """The operator on plain memory; with what is loaded, where that is given."""
        key = None
        if is_grad_enabled() and self.takes_gradient(*[arguments[i] for i in self._positions]):
            return self._dispatched(arguments)
        try:
            if ready is None:
                key = self.key(*arguments)
                ready = self.ready[key]
            return self.launch(ready, *arguments)
        except Exception as error:
            return self.failed(error, key, ready, *arguments)

    def routed(self, *arguments: Any) -> Any:
        """The operator where torch may have a say in it."""
        a = self.arguments(*arguments)
        tensors = [a[i] for i in self._positions]
        if not _intercepted(*tensors):
            self._check_tangents(a)
            return self.forward(*a)
        # Where it is traced, the fake implementation checks.
        if not is_compiling() and not _overridden(*tensors):
            self._check(a)
        return self._dispatched(a)

    def failed(self, error: Exception, key: Any, ready: Any, *arguments: Any) -> Any:
        """What to do when the kernel did not run: load it, say why in the operator's words, or mend
        what it refuses.

        Args:
            key: None where arguments have none, or where this was the first call's launch.
            ready: None where there was nothing of that key.
        """
        if ready is None:
            return self._first_call(key, self.arguments(*arguments))
        if key is None or type(error) not in _REFUSALS:
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
        """Whether a gradient of one of these is asked for, in a mode where it can be.

        Raises:
            NotImplementedError: there is none.
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
        """Check, load the kernels and remember them, and launch them."""
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
            if len(self.ready) >= _MOST_READY:
                self.ready.clear()
            self.ready[key] = ready
        results = self.forward(*mended, ready=ready)
        return a.out if self.written else results

    def tensors(self, a: _Arguments) -> dict[str, Tensor | None]:
        """Those arguments that are tensors, by name."""
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
        qualified = f"cute_attn::{self.name}"
        torch.library.register_fake(qualified, self._fake, lib=_library)
        if self._has_backward:
            torch.library.register_autograd(
                qualified, self._backward, setup_context=self._save, lib=_library
            )
        self.registered = getattr(torch.ops.cute_attn, self.name)

    def _dispatched(self, arguments: tuple[Any, ...]) -> Any:
        """Through the registered operator."""
        a = given = self.arguments(*arguments)
        if is_grad_enabled() and self.takes_gradient(*self.tensors(a).values()):
            a = a._replace(**self.kept)
        if self.written:
            a = self._with_out(a, torch.contiguous_format)
            self.registered(*a)
            return a.out
        results = self.registered(*a)
        if len(self.results) == 1:
            return results
        return tuple(
            x if not ask or _is_set(getattr(given, ask)) else None
            for x, (_, ask) in zip(results, self.results, strict=True)
        )

    def _implementation(self, *given: Any, **named: Any) -> Any:
        """The registered operator on memory. Results that are not asked for have no elements."""
        a = self.arguments(*map(plain, given), **{name: plain(x) for name, x in named.items()})
        self._check_tangents(a)
        if self.written:
            if is_grad_enabled():
                self.takes_gradient(*self.tensors(a).values())
            self.forward(*a)
            return None
        with torch.no_grad():  # whoever calls it by its own name gets no gradient but its backward
            return _filled(self.forward(*a))

    def _fake(self, *given: Any, **named: Any) -> Any:
        a = self.arguments(*given, **named)
        self._check(a)
        return _filled(self.outputs(a))

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        names = [name for name, _ in self.results]
        values = self.arguments(*inputs)._asdict() | dict(zip(names, results, strict=True))
        for name, value in self.kept.items():
            if values[name] != value:  # by whoever calls the registered operator by its own name
                raise ValueError(f"{name} is {values[name]}, must be {value} for a gradient")
        kept = {name: values[name] for name in self.saved}
        tensors = [name for name, x in kept.items() if isinstance(x, Tensor)]
        ctx.save_for_backward(*(kept[name] for name in tensors))
        ctx.tensors = tensors
        ctx.rest = {name: x for name, x in kept.items() if name not in tensors}
        ctx.set_materialize_grads(False)

    def _backward(self, ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        fields = self.arguments._fields
        saved = dict(zip(ctx.tensors, ctx.saved_tensors, strict=True)) | ctx.rest
        # The dispatcher leaves out trailing arguments that have their defaults.
        needed = frozenset(
            name for name, need in zip(fields, ctx.needs_input_grad, strict=False) if need
        )
        names = [name for name, _ in self.results]
        found = self.backward(saved, dict(zip(names, gradients, strict=True)), needed)
        return tuple(found.get(name) for name in fields)


def may_remember(x: Tensor) -> bool:
    """Which emulator runs a CPU tensor depends on where the call is made."""
    return x.is_cuda


def plain(x: _T) -> _T:
    """The same memory as a Tensor, where it is a subclass's."""
    if isinstance(x, Tensor) and type(x) not in PLAIN:
        return x.as_subclass(Tensor)  # type: ignore[return-value]
    return x


def _intercepted(*arguments: Any) -> bool:
    """Whether a call with these, tensors or not, is for the registered operator."""
    if is_compiling() or dispatch_mode_depth():
        return True
    return not _SILENT.issuperset(map(type, arguments)) and any(
        type(x) not in PLAIN and is_tensor_like(x) for x in arguments
    )


def _overridden(*arguments: Any) -> bool:
    """Whether one of these has a `__torch_function__`, which is asked before anything is checked:
    what it hands on need not be what it was given."""
    return any(
        type(x) not in PLAIN
        and getattr(type(x), "__torch_function__", _no_function) is not _no_function
        for x in arguments
    )


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(x is y for x, y in zip(a, b, strict=True))


def _is_set(x: Any) -> bool:
    """Whether a flag is set, or an optional tensor given."""
    return x is not None if isinstance(x, Tensor | None) else bool(x)


def _filled(results: Any) -> Any:
    """With tensors without elements for results that are not asked for."""
    if not isinstance(results, tuple):
        return results
    some = next(x for x in results if x is not None)
    return tuple(some.new_empty(0) if x is None else x for x in results)
