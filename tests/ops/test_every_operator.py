"""What holds for every operator and each of its tensor arguments, whatever the operator computes.

Kernels are stood in for, except in the last tests, which run them.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import Parameter

import cute_attn
from cute_attn.emulation import Emulation
from cute_attn.emulator import build
from cute_attn.ops import operator as base
from cute_attn.ops.attention import forward

from .operators import DIFFERENTIABLE, OPERATORS, Operator, tensors_in

each_operator = pytest.mark.parametrize("name", OPERATORS)


class Plain(Tensor):
    """A subclass that says nothing of its own."""


class Dispatching(Tensor):
    """A subclass with memory that the dispatcher asks, and Python does not."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs or {})


class Wrapper(Tensor):
    """A subclass without memory, as a distributed tensor is; it hands on what it wraps."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inner: Tensor
    seen: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, x: Tensor) -> Wrapper:  # noqa: PYI034
        wrapper = Tensor._make_wrapper_subclass(
            cls, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device
        )
        wrapper.inner = x
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))

        def inner(x: Any) -> Any:
            return x.inner if isinstance(x, Wrapper) else x

        named = {name: inner(x) for name, x in (kwargs or {}).items()}
        return func(*map(inner, args), **named)


class Handled(Exception):
    """What a Handler answers: that the call was not the operator's any more."""


class Handler:
    """No tensor, but torch's functions ask it what they are to do."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in [*args, *(kwargs or {}).values()]:
            if isinstance(x, Handler):
                x.asked.append(func)
        raise Handled


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the kernels are given, which do nothing."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Emulation, "function", lambda *_: lambda *arguments: seen.append(arguments))
    return seen


@pytest.fixture(autouse=True)
def emulated(request: pytest.FixtureRequest) -> Iterator[None]:
    """On the architecture of the operator that the test names."""
    if "name" not in request.fixturenames:
        yield
        return
    with cute_attn.emulated(OPERATORS[request.getfixturevalue("name")].arch):
        yield


def addresses(launches: list[tuple[Any, ...]], args: dict[str, Any]) -> list[list[Any]]:
    """What kernels were given, as far as it can be told again: tensors by which argument's memory
    they are, and numbers."""
    names = {x.data_ptr(): name for name, x in args.items() if isinstance(x, Tensor)}
    return [
        [names.get(x.data_ptr(), "new") if isinstance(x, Tensor) else x for x in given]
        for given in launches
    ]


def launched(
    operator: Operator, launches: list[tuple[Any, ...]], args: dict[str, Any]
) -> tuple[list[list[Any]], list[Tensor]]:
    launches.clear()
    with torch.no_grad():
        results = operator.function(**args)
    return addresses(launches, args), tensors_in(results)


# -- parameters, subclasses, and objects that take part ------------------------------------------


WRAPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "parameter": lambda x: Parameter(x, requires_grad=False),
    "parameter that requires a gradient": lambda x: Parameter(x, x.is_floating_point()),
    "subclass": lambda x: x.as_subclass(Plain),
    "dispatching": lambda x: Tensor._make_subclass(Dispatching, x),
}


@pytest.mark.parametrize("wrap", WRAPPED)
@each_operator
def test_parameters_and_subclasses_are_taken_for_what_they_hold(
    launches: list[tuple[Any, ...]], name: str, wrap: str
):
    operator = OPERATORS[name]
    args = operator.arguments()
    expected, results = launched(operator, launches, args)
    for argument in operator.tensors:
        wrapped = args | {argument: WRAPPED[wrap](args[argument])}
        given, again = launched(operator, launches, wrapped)
        assert given == expected
        assert [x.shape for x in again] == [x.shape for x in results]


@each_operator
def test_all_arguments_may_be_parameters(launches: list[tuple[Any, ...]], name: str):
    operator = OPERATORS[name]
    args = operator.arguments()
    expected, _ = launched(operator, launches, args)
    parameters = {
        key: Parameter(x, requires_grad=False) if isinstance(x, Tensor) else x
        for key, x in args.items()
    }
    with torch.inference_mode():
        assert launched(operator, launches, parameters)[0] == expected


@each_operator
def test_the_registered_operator_takes_parameters_and_subclasses(
    launches: list[tuple[Any, ...]], name: str
):
    op = getattr(torch.ops.cute_attn, OPERATORS[name].registered or name)
    args = OPERATORS[name].arguments()
    args.pop("cu_seqlens_cpu", None)
    for argument in op.default._schema.arguments:
        if argument.name == "out" and "out" not in args:
            args["out"] = torch.zeros_like(args["v"])
        if argument.name not in args and not argument.has_default_value():
            args[argument.name] = argument.type.kind() == "BoolType" or None
    for key, x in args.items():
        if isinstance(x, Tensor):
            for wrap in WRAPPED.values():
                launches.clear()
                with torch.no_grad():
                    op(**args | {key: wrap(x)})
                assert launches


@each_operator
def test_subclasses_are_asked_by_the_dispatcher(launches: list[tuple[Any, ...]], name: str):
    """Subclasses with memory, and subclasses without, whose address a kernel must never see."""
    operator = OPERATORS[name]
    args = operator.arguments()
    expected, _ = launched(operator, launches, args)
    for argument in operator.tensors_of_kernels:
        Dispatching.seen.clear()
        launched(operator, launches, args | {argument: WRAPPED["dispatching"](args[argument])})
        assert any("cute_attn" in func for func in Dispatching.seen)
        Wrapper.seen.clear()
        launches.clear()
        with torch.no_grad():
            operator.function(**args | {argument: Wrapper(args[argument])})
        assert any("cute_attn" in func for func in Wrapper.seen)
        assert addresses(launches, args) == expected


@each_operator
def test_objects_with_a_torch_function_handle_the_call(launches: list[tuple[Any, ...]], name: str):
    for argument in OPERATORS[name].tensors_of_kernels:
        handler = Handler()
        with contextlib.suppress(Handled):
            OPERATORS[name].call(**{argument: handler})
        assert any("cute_attn" in str(func) for func in handler.asked), argument
    assert not launches


@each_operator
def test_a_default_subclass_comes_back(launches: list[tuple[Any, ...]], name: str):
    """As from torch's functions, which give what they were given."""
    operator = OPERATORS[name]
    wrapped = {
        key: x.as_subclass(Plain) if isinstance(x, Tensor) else x
        for key, x in operator.arguments().items()
    }
    with torch.no_grad():
        results = tensors_in(operator.function(**wrapped))
    assert results and all(type(x) is Plain for x in results)


# -- what is no plain memory ---------------------------------------------------------------------


STRANGE: dict[str, Callable[[Tensor], Any]] = {
    "no dimensions": lambda x: x.flatten()[0],
    "another dimension": lambda x: x[None, None],
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.reshape(x.shape[0], -1).to_sparse_csr(),
    "mkldnn": lambda x: x.float().to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x.flatten(), x.flatten()]),
    "meta": lambda x: x.to("meta"),
    "quantised": lambda x: torch.quantize_per_tensor(x.float(), 1.0, 0, torch.qint32),
    "complex": lambda x: x.to(torch.complex64).conj(),
    "negated": lambda x: torch._neg_view(x),
    "zero without memory": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "of 8 bits": lambda x: x.to(torch.int8),
    "list": lambda x: [1.0],
    "array": lambda x: x.float().numpy(),
}


@pytest.mark.filterwarnings("ignore")  # of torch's prototypes
@pytest.mark.parametrize("kind", STRANGE)
@each_operator
def test_what_kernels_cannot_read_is_refused_by_name(
    launches: list[tuple[Any, ...]], name: str, kind: str
):
    operator = OPERATORS[name]
    args = operator.arguments()
    for argument in operator.tensors:
        if kind == "another dimension" and argument in ("A_log", "dt_bias"):
            continue  # which may have any shape
        if kind == "zero without memory" and argument == "cu_seqlens_cpu":
            continue  # which torch reads
        strange = STRANGE[kind](args[argument])
        with (
            torch.no_grad(),
            pytest.raises((TypeError, ValueError, NotImplementedError), match=argument),
        ):
            operator.function(**args | {argument: strange})
    assert not launches


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_it_is_refused_by_name_where_another_argument_requires_a_gradient(
    launches: list[tuple[Any, ...]], name: str, kind: str
):
    operator = OPERATORS[name]
    for argument in operator.tensors:
        if kind == "another dimension" and argument in ("A_log", "dt_bias"):
            continue
        if kind == "zero without memory" and argument == "cu_seqlens_cpu":
            continue
        args = operator.arguments()
        args[argument] = STRANGE[kind](args[argument])
        args["k" if argument == "q" else "q"].requires_grad_()
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=argument):
            operator.function(**args)
    assert not launches


# -- derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in DIFFERENTIABLE])
def test_gradients_are_refused(launches: list[tuple[Any, ...]], name: str):
    """Gradients of arguments and of written tensors are refused before anything is written."""
    for argument in OPERATORS[name].floats:
        args = OPERATORS[name].arguments()
        args[argument].requires_grad_()
        with pytest.raises(NotImplementedError, match="no backward"):
            OPERATORS[name].function(**args)
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            pytest.raises(NotImplementedError, match="no backward"),
        ):
            OPERATORS[name].function(**args)
    assert not launches


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_gradient_of_each_argument_is_taken(launches: list[tuple[Any, ...]], name: str):
    """On memory, and by the fake implementation."""
    for argument in OPERATORS[name].floats:
        args = OPERATORS[name].arguments()
        args[argument].requires_grad_()
        results = tensors_in(OPERATORS[name].function(**args))
        assert launches and all(x.requires_grad for x in results)
        sum(x.float().sum() for x in results).backward()
        assert args[argument].grad.shape == args[argument].shape
        launches.clear()
        with FakeTensorMode(allow_non_fake_inputs=True):
            results = tensors_in(OPERATORS[name].function(**args))
            assert all(x.requires_grad for x in results)
        assert not launches


@pytest.mark.parametrize("gradients", [True, False])
@each_operator
def test_tangents_are_refused(launches: list[tuple[Any, ...]], name: str, gradients: bool):
    operator = OPERATORS[name]
    args = operator.arguments()
    with forward_ad.dual_level(), torch.set_grad_enabled(gradients):
        operator.function(**args)
        assert launches
        launches.clear()
        for argument in operator.floats:
            x = args[argument]
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            for given in (dual, dual.as_subclass(Plain)):  # called, and through the dispatcher
                with pytest.raises(NotImplementedError, match=f"{argument} has a tangent"):
                    operator.function(**args | {argument: given})
    assert not launches


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "vmap": lambda f, x: torch.vmap(f)(x[None]),
    "grad": lambda f, x: torch.func.grad(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "vjp": lambda f, x: torch.func.vjp(f, x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@each_operator
def test_transforms_are_refused(launches: list[tuple[Any, ...]], name: str, transform: str):
    operator = OPERATORS[name]
    args = operator.arguments()
    for argument in operator.tensors if transform == "vmap" else operator.floats:

        def f(x: Tensor, argument: str = argument) -> Tensor:
            return tensors_in(operator.function(**args | {argument: x}))[0].float().sum()

        with pytest.raises(NotImplementedError, match=r"transform|no backward|has a tangent"):
            TRANSFORMS[transform](f, args[argument])
    assert not launches


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_batches_of_gradients_are_refused(launches: list[tuple[Any, ...]], name: str):
    """Batches come from is_grads_batched, which uses another vmap than torch.func's."""
    args = OPERATORS[name].arguments()
    args["q"].requires_grad_()
    o = tensors_in(OPERATORS[name].function(**args))[0]
    launches.clear()
    with pytest.raises(NotImplementedError, match="do is a batch of tensors"):
        torch.autograd.grad(o, args["q"], torch.ones(3, *o.shape).to(o), is_grads_batched=True)
    assert not launches


# -- memory that is written ----------------------------------------------------------------------


WRITERS = [name for name, operator in OPERATORS.items() if operator.written]


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_shares_no_memory_with_an_argument(
    launches: list[tuple[Any, ...]], name: str
):
    operator = OPERATORS[name]
    for written in operator.written:
        for other in operator.tensors:
            if other == written:
                continue
            args = operator.arguments()
            x, y = args[written], args[other]
            # In one piece of memory, where the second starts in the last 16 bytes of the first.
            memory = torch.zeros(x.nbytes + y.nbytes, dtype=torch.uint8)
            args[written] = memory[: x.nbytes].view(x.dtype).view(x.shape)
            rest = memory[x.nbytes - 16 : x.nbytes - 16 + y.nbytes]
            args[other] = rest.view(y.dtype).view(y.shape)
            with pytest.raises(ValueError, match=r"overlaps .* in memory") as caught:
                operator.function(**args)
            assert written in str(caught.value) and other in str(caught.value)
    assert not launches


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_has_a_new_version(launches: list[tuple[Any, ...]], name: str, mode: Any):
    """So that autograd does not use what it has saved and a kernel has written over: in all modes,
    as torch's functions do."""
    operator = OPERATORS[name]
    for _ in range(3):  # cold and warm
        args = operator.arguments()
        with cute_attn.emulated(operator.arch), mode():
            operator.function(**args)
        versions = {name: args[name]._version for name in operator.tensors}
        assert {name for name, version in versions.items() if version} == {*operator.written}
    assert launches


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WRITERS)
def test_tensors_of_inference_mode_are_written(
    launches: list[tuple[Any, ...]], name: str, mode: Any
):
    """They have no version."""
    operator = OPERATORS[name]
    with torch.inference_mode():
        args = operator.arguments()
    with mode():
        operator.function(**args)
    assert launches


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_does_not_overlap_itself(launches: list[tuple[Any, ...]], name: str):
    operator = OPERATORS[name]
    for argument in operator.written:
        args = operator.arguments()
        x = args[argument]
        if len(x) == 1:
            continue  # one row does not overlap itself
        rows = [64, *x.stride()[1:]]  # or slots, each of which starts in the one before
        args[argument] = torch.zeros_like(x).as_strided(x.shape, rows)
        with pytest.raises(ValueError, match=rf"{argument} has shape .* elements overlap in mem"):
            operator.function(**args)
        args[argument] = x[:1].expand(x.shape)
        with pytest.raises(ValueError, match=f"{argument} is expanded"):
            operator.function(**args)
    assert not launches


def test_slots_of_pools_may_lie_between_one_anothers(launches: list[tuple[Any, ...]]):
    """A page of a server's memory holds a state and its records."""
    args = OPERATORS["kda_decode"].arguments()
    pools = ("state", "record_k", "record_g", "record_u")
    sizes = [args[name][0].nbytes for name in pools]
    memory = torch.zeros(4, sum(sizes), dtype=torch.uint8)
    for name, page in zip(pools, memory.split(sizes, dim=1), strict=True):
        x = args[name]
        args[name] = page.view(x.dtype).unflatten(1, x.shape[1:])
    with cute_attn.emulated("sm_90a"), torch.no_grad():
        cute_attn.kda_decode(**args)
        assert launches
        x = args["record_u"]
        page = memory.flatten()[:-64].view(torch.float32)
        args["record_u"] = page.as_strided(x.shape, x.stride(), x.storage_offset() - 16)
        with pytest.raises(ValueError, match="record_g overlaps record_u"):
            cute_attn.kda_decode(**args)


# -- numbers -------------------------------------------------------------------------------------


NUMBERS = [(name, number) for name, it in OPERATORS.items() for number in it.numbers]


@pytest.mark.parametrize(("name", "number"), NUMBERS)
def test_numbers_that_float32_does_not_hold_are_refused(
    launches: list[tuple[Any, ...]], name: str, number: str
):
    for value in (math.nan, math.inf, -math.inf, 1e39, -1e39, 1e-40, 10**40):
        with pytest.raises(ValueError, match=rf"{number} is .*, must be"):
            OPERATORS[name].call(**{number: value})
    assert not launches


@pytest.mark.parametrize(("name", "number"), NUMBERS)
def test_what_is_no_number_is_refused(launches: list[tuple[Any, ...]], name: str, number: str):
    for value in (True, False, "1", torch.tensor(1.0), 1j, [1.0]):
        with pytest.raises(
            TypeError, match=f"{number} must be a float, got {type(value).__name__}"
        ):
            OPERATORS[name].call(**{number: value})
    assert not launches


@pytest.mark.parametrize("name", [name for name, x in NUMBERS if x == "lower_bound"])
def test_a_lower_bound_that_is_none_is_refused(launches: list[tuple[Any, ...]], name: str):
    """With a gate of 0 nothing decays, and with one above it states grow without end."""
    for value in (0, 0.0, -0.0, 3.0, 7):
        with pytest.raises(ValueError, match=r"lower_bound is .*, must be less than 0"):
            OPERATORS[name].call(lower_bound=value)
        assert not launches
    OPERATORS[name].call(lower_bound=3.0, use_gate_in_kernel=False)  # is not looked at
    count = len(launches)
    OPERATORS[name].call(lower_bound=-5)
    assert len(launches) > count > 0


# -- warm calls ----------------------------------------------------------------------------------


@pytest.fixture
def remembered(
    launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[tuple[Any, ...]]]:
    """The launches, where calls with CPU tensors are remembered, as those on a GPU."""
    for module in (base, forward):
        monkeypatch.setattr(module, "may_remember", lambda _: True)
    yield launches
    cute_attn.reload_settings()  # forgets them


class One(enum.IntEnum):
    ONE = 1


def forms(x: Any) -> list[Any]:
    """What is equal to x, of other types; of a pair, with each of its elements in another form."""
    if isinstance(x, tuple):
        return [(form, x[1]) for form in forms(x[0])] + [(x[0], form) for form in forms(x[1])]
    found = [float(x), np.float32(x), np.float64(x), Fraction(x), complex(x), torch.tensor(x)]
    if x == int(x):
        found += [int(x), np.int64(x)]
    if x in (0, 1):
        found += [bool(x), np.bool_(x)]
    return [*found, One.ONE] if x == 1 else found


VALUES: dict[str, list[Any]] = {
    "bool": [True, False],
    "int": [1, 2, 64],
    "float": [1.0, 2.0],
    "float | None": [1.0, 2.0, -1.0],
    "int | Tensor | None": [1, 0],
    "Window": [(1, 0), (0, 1)],
}


@each_operator
def test_a_warm_call_refuses_what_a_cold_one_refuses(remembered: list[tuple[Any, ...]], name: str):
    """Keys are compared with ==, and True == 1 == 1.0."""
    operator = OPERATORS[name]
    args = operator.arguments()

    def refusal(**changed: Any) -> type[Exception] | None:
        try:
            operator.function(**args | changed)
        except (TypeError, ValueError, NotImplementedError) as error:
            return type(error)
        return None

    warmed = 0
    parameters = inspect.signature(operator.function).parameters.values()
    with torch.inference_mode():
        for parameter in parameters:
            for value in VALUES.get(parameter.annotation, []):
                for form in forms(value):
                    cute_attn.reload_settings()
                    cold = refusal(**{parameter.name: form})
                    cute_attn.reload_settings()
                    if any(refusal(**{parameter.name: value}) for _ in range(3)):
                        break  # no good value of this operator
                    warmed += 1
                    warm = refusal(**{parameter.name: form})
                    assert warm is cold, (parameter.name, form)
    assert warmed or VALUES.keys().isdisjoint(x.annotation for x in parameters)


@each_operator
def test_a_warm_call_refuses_the_imaginary_part_of_a_conjugate(
    remembered: list[tuple[Any, ...]], name: str
):
    """Such a view is negated: a kernel would read it without its sign. Its elements are two
    numbers apart, so only arguments with any strides can be such views."""
    operator = OPERATORS[name]
    args = operator.arguments()

    def refusal(**changed: Any) -> type[Exception] | None:
        try:
            operator.function(**args | changed)
        except (TypeError, ValueError, NotImplementedError) as error:
            return type(error)
        return None

    with torch.inference_mode():
        for argument, x in args.items():
            if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
                continue
            z = torch.complex(torch.zeros_like(x, dtype=torch.float32), x.float())
            assert z.conj().imag.is_neg()
            cute_attn.reload_settings()
            if not any(refusal(**{argument: z.imag}) for _ in range(3)):
                assert refusal(**{argument: z.conj().imag}) is ValueError, argument


@pytest.mark.parametrize("name", ["flash_attn_varlen_func", "flash_attn_out"])
@pytest.mark.parametrize("length", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("splits", [0, 1])
def test_lengths_are_checked_in_every_call(
    remembered: list[tuple[Any, ...]], name: str, length: str, splits: int
):
    for value in (4, 4, 4, -1, -1):
        with pytest.raises(ValueError, match=f"{length} is -1") if value < 0 else nullcontext():
            OPERATORS[name].call(**{length: value}, num_splits=splits)
    assert remembered


@each_operator
def test_unsigned_lengths_and_indices_are_read_as_signed_in_every_call(
    remembered: list[tuple[Any, ...]], name: str
):
    """As compiled host code does not tell them apart. One kind of indices may be int64."""
    operator = OPERATORS[name]
    unsigned = {torch.int32: torch.uint32, torch.int64: torch.uint64}
    indices = [x for x in operator.tensors if operator.arguments()[x].dtype in unsigned]
    for argument in indices:
        for good_calls in (0, 3):
            cute_attn.reload_settings()
            args = operator.arguments()
            with torch.inference_mode():
                for _ in range(good_calls):
                    operator.function(**args)
                dtype = args[argument].dtype
                args[argument] = args[argument].view(unsigned[dtype])
                if dtype == torch.int64:
                    with pytest.raises(TypeError, match=argument):
                        operator.function(**args)
                    continue
                remembered.clear()
                operator.function(**args)
                assert any(args[argument] is x for given in remembered for x in given)


# -- with the kernel -----------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", WRAPPED)
def test_the_kernel_gives_what_it_gives_for_plain_tensors(wrap: str):
    """Here of one operator; of all of them on a GPU."""
    operator = OPERATORS["lightning_attn_decode"]
    with cute_attn.emulated("sm_90a"), torch.no_grad():
        plain = operator.arguments()
        expected = operator.function(**plain)
        for argument in operator.tensors:
            args = operator.arguments()
            args[argument] = WRAPPED[wrap](args[argument])
            o = operator.function(**args)
            assert torch.equal(o.as_subclass(Tensor), expected)
            assert torch.equal(args["state"].as_subclass(Tensor), plain["state"])


def test_the_kernel_reads_unsigned_indices_as_signed():
    """-1, and so 2**32 - 1, marks padding."""
    operator = OPERATORS["lightning_attn_decode"]
    args, unsigned = operator.arguments(), operator.arguments()
    args["state_indices"] = torch.tensor([-1, 0], dtype=torch.int32)
    unsigned["state_indices"] = args["state_indices"].view(torch.uint32)
    unsigned["num_accepted_tokens"] = args["num_accepted_tokens"].view(torch.uint32)
    with cute_attn.emulated("sm_90a"), torch.no_grad():
        assert torch.equal(operator.function(**args), operator.function(**unsigned))
    assert torch.equal(args["state"], unsigned["state"])
    assert torch.equal(args["state"][1:], operator.arguments()["state"][1:])


@pytest.mark.slow  # tests of each operator compile calls too
@each_operator
def test_compiled_code_gives_what_eager_code_gives(name: str):
    operator = OPERATORS[name]
    torch.compiler.reset()  # the cases are versions of one piece of code, of which few are kept
    compiled = torch.compile(
        lambda args: operator.function(**args), fullgraph=True, backend="aot_eager"
    )
    found = []
    with cute_attn.emulated(operator.arch), torch.no_grad():
        for function in (lambda args: operator.function(**args), compiled):
            args = operator.arguments()
            if "seqused_q" in args:  # all rows, so that none is undefined
                args["seqused_q"] = args["cu_seqlens_q"].diff()
            found.append([*tensors_in(function(args)), *(args[x] for x in operator.written)])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


LOAD = """
import pathlib
import sys
import torch
import cute_attn
from cute_attn.emulator import build

build.directory = pathlib.Path(sys.argv[4])  # where the engine is built already
cute_attn.register_operators()
program = torch.export.load(sys.argv[1])
args = torch.load(sys.argv[2])
torch.save(program.module()(*args.values()), sys.argv[3])
print(*(x.name for x in torch._C._jit_get_all_schemas() if x.name.startswith("cute_attn::")))
"""


def test_an_exported_program_runs_in_a_fresh_process(tmp_path: Path):
    """Which knows the operators of all families, though it names none of our functions."""

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
            return cute_attn.flash_attn_func(q, k, v, causal=True, learnable_sink=sink)[0]

    args = OPERATORS["flash_attn_func"].arguments()
    del args["return_lse"]
    files = [str(tmp_path / name) for name in ("program.pt2", "args.pt", "result.pt")]
    torch.export.save(torch.export.export(Layer(), tuple(args.values())), files[0])
    torch.save(args, files[1])
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *files, str(build.directory)],
        env={**os.environ, "CUTE_ATTN_EMULATE": "1", "CUTE_ATTN_ARCH": "sm_100a"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with cute_attn.emulated("sm_100a"), torch.no_grad():
        expected = Layer()(*args.values())
    assert torch.equal(torch.load(files[2]), expected)
    ours = {x.name for x in torch._C._jit_get_all_schemas() if x.name.startswith("cute_attn::")}
    ours = {name for name in ours if not name.startswith("cute_attn::toy_")}  # of other tests
    assert "cute_attn::flash_attn" in ours and set(done.stdout.split()) >= ours
