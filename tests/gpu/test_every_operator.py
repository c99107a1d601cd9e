"""Every operator on a GPU with parameters and subclasses, cold and warm, and what the warm path
refuses. tests/ops/test_every_operator.py has the rest, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import cute_attn
from tests.ops.operators import OPERATORS, tensors_in

WRAPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "parameter": lambda x: Parameter(x, requires_grad=False),
    "parameter that requires a gradient": lambda x: Parameter(x, x.is_floating_point()),
    "subclass": lambda x: x.as_subclass(Plain),
}


class Plain(Tensor):
    """A subclass that overrides nothing."""


def arguments(name: str) -> dict[str, Any]:
    major = torch.cuda.get_device_capability()[0]
    if major not in (OPERATORS[name].majors or (major,)):
        pytest.skip(f"there is no kernel for compute capability {major}.x")
    given = OPERATORS[name].arguments()
    if "seqused_q" in given:  # all rows, so that none is undefined
        given["seqused_q"] = given["cu_seqlens_q"].diff()
    return {
        key: x.cuda() if isinstance(x, Tensor) and key != "cu_seqlens_cpu" else x
        for key, x in given.items()
    }


def call(name: str, args: dict[str, Any]) -> list[Tensor]:
    """The results of a call and the tensors that it writes, as plain tensors."""
    with torch.no_grad():
        results = tensors_in(OPERATORS[name].function(**args))
    written = [args[key] for key in OPERATORS[name].written]
    return [x.detach().as_subclass(Tensor).clone() for x in (*results, *written)]


@pytest.mark.parametrize("name", OPERATORS)
def test_a_graph_gives_what_eager_calls_give(name: str):
    """A replay reads its tensors anew, and writes results and states as an eager call does."""
    operator = OPERATORS[name]
    first, second = arguments(name), arguments(name)
    for key in operator.floats:
        second[key] *= 0.5
    expected = [call(name, copied(args)) for args in (first, second)]
    static = copied(first)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        results = tensors_in(operator.function(**static))
    for args, true in zip((first, second), expected, strict=True):
        for x in results:
            x.fill_(torch.nan if x.is_floating_point() else -1)
        for key in operator.tensors_of_kernels:  # after the results, which may be arguments
            static[key].copy_(args[key])
        graph.replay()
        found = [*results, *(static[key] for key in operator.written)]
        assert len(found) == len(true)
        for x, y in zip(found, true, strict=True):
            assert torch.equal(x.nan_to_num(), y.nan_to_num())
    assert not all(map(torch.equal, *expected))


def copied(args: dict[str, Any]) -> dict[str, Any]:
    return {key: x.clone() if isinstance(x, Tensor) else x for key, x in args.items()}


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize("name", OPERATORS)
def test_parameters_and_subclasses_give_what_plain_tensors_give(name: str, wrap: str):
    expected = call(name, arguments(name))
    for argument in OPERATORS[name].tensors:
        for _ in range(2):  # the kernel is there from the first call on
            args = arguments(name)
            args[argument] = WRAPPED[wrap](args[argument])
            for got, x in zip(call(name, args), expected, strict=True):
                assert torch.equal(got.nan_to_num(), x.nan_to_num()), argument


@pytest.mark.parametrize("name", [name for name, it in OPERATORS.items() if it.written])
def test_the_warm_path_refuses_shared_memory_and_gradients(name: str):
    for written in OPERATORS[name].written:
        for other in OPERATORS[name].tensors:
            if other == written:
                continue
            call(name, arguments(name))
            args = arguments(name)
            x, y = args[written], args[other]
            memory = torch.zeros(x.nbytes + y.nbytes, dtype=torch.uint8, device="cuda")
            args[written] = memory[: x.nbytes].view(x.dtype).view(x.shape)
            rest = memory[x.nbytes - 16 : x.nbytes - 16 + y.nbytes]
            args[other] = rest.view(y.dtype).view(y.shape)
            with pytest.raises(ValueError, match=r"overlaps .* in memory"):
                call(name, args)
        args = arguments(name)
        x = args[written]
        several = next(dim for dim, size in enumerate(x.shape) if size > 1)
        strides = [64 if dim == several else step for dim, step in enumerate(x.stride())]
        args[written] = torch.zeros_like(x).as_strided(x.shape, strides)
        with pytest.raises(ValueError, match=r"elements overlap in memory|must be contiguous"):
            call(name, args)
        args = arguments(name)
        args[written].requires_grad_()
        with pytest.raises(NotImplementedError, match="no backward"):
            OPERATORS[name].function(**args)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, it in OPERATORS.items() for number in it.numbers]
)
def test_the_warm_path_looks_at_numbers(name: str, number: str):
    good = -2.0 if number == "lower_bound" else 0.5
    call(name, arguments(name) | {number: good})
    for bad, error in ((float("nan"), ValueError), (1e39, ValueError), (True, TypeError)):
        with pytest.raises(error, match=number):
            call(name, arguments(name) | {number: bad})


def test_transforms_are_refused_on_the_warm_path():
    args = arguments("kda_decode")
    call("kda_decode", args)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="k comes from a transform"):
        torch.vmap(lambda k: cute_attn.kda_decode(**args | {"k": k}))(args["k"][None])
