"""What `ops/operator.py` gives every family, shown on one that has a gradient: o = scale a b."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cute_attn import launch
from cute_attn.ops import operator
from cute_attn.ops.operator import Operator


class Arguments(NamedTuple):
    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    return_sum: bool = False


class GradientArguments(NamedTuple):
    do: Tensor
    a: Tensor
    b: Tensor
    total: Tensor
    scale: float
    need_da: bool
    need_db: bool


class ToyBackward(Operator[GradientArguments]):
    name = "toy_product_backward"
    arguments = GradientArguments
    results = (("da", "need_da"), ("db", "need_db"))

    def check(self, a: GradientArguments, given: dict[str, Tensor]) -> None:
        assert given["total"].shape == a.a.shape[:1]

    def key(self, a: GradientArguments) -> tuple[Any, ...]:
        return (a.do.shape,)

    def prepare(self, a: GradientArguments) -> Any:
        return ()

    def launch(self, ready: Any, arguments: GradientArguments) -> Any:
        do, a, b, total, scale, need_da, need_db = arguments
        assert torch.equal(total, (scale * a * b).sum(-1))
        return scale * do * b if need_da else None, scale * do * a if need_db else None

    def outputs(self, a: GradientArguments) -> Any:
        return (
            torch.empty_like(a.a) if a.need_da else None,
            torch.empty_like(a.b) if a.need_db else None,
        )


class Toy(Operator[Arguments]):
    name = "toy_product"
    arguments = Arguments
    results = (("o", ""), ("total", "return_sum"))
    saved = ("a", "b", "total", "scale")
    kept: Mapping[str, Any] = {"return_sum": True}

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.error: Exception | None = None

    def check(self, a: Arguments, given: dict[str, Tensor]) -> None:
        self.log.append("check")
        if a.b.shape != a.a.shape:
            raise ValueError(f"b has shape {list(a.b.shape)}, must be {list(a.a.shape)}")

    def key(self, a: Arguments) -> tuple[Any, ...]:
        return a.a.shape, a.return_sum

    def prepare(self, a: Arguments) -> Any:
        self.log.append("prepare")
        return (2,)

    def readable(self, a: Arguments) -> Arguments:
        return a if a.b.is_contiguous() else a._replace(b=a.b.contiguous())

    def nothing(self, a: Arguments) -> Any:
        return None if a.a.numel() else (a.a, None)

    def launch(self, ready: Any, arguments: Arguments) -> Any:
        a, b, bias, scale, return_sum = arguments
        self.log.append(f"launch sum={return_sum}")
        if self.error is not None:
            raise self.error
        if not b.is_contiguous():
            raise ValueError("the host code refuses b")
        o = scale * a * b + (0 if bias is None else bias)
        return o, o.sum(-1) if return_sum else None

    def outputs(self, a: Arguments) -> Any:
        return torch.empty_like(a.a), a.a.new_empty(a.a.shape[:1]) if a.return_sum else None

    def backward(
        self,
        saved: Mapping[str, Any],
        gradients: Mapping[str, Tensor | None],
        needed: frozenset[str],
    ) -> Mapping[str, Tensor]:
        self.log.append(f"backward {sorted(needed)}")
        do, dtotal = gradients["o"], gradients["total"]
        assert do is not None
        da, db = BACKWARD.routed(
            do if dtotal is None else do + dtotal[:, None],
            saved["a"],
            saved["b"],
            saved["total"],
            saved["scale"],
            "a" in needed,
            "b" in needed,
        )
        found = {"a": da, "b": db}
        return {name: x for name, x in found.items() if x is not None}


BACKWARD, TOY = ToyBackward(), Toy()


def product(a: Any, b: Any, scale: float = 1.0, return_sum: bool = False) -> Any:
    return TOY.routed(a, b, None, scale, return_sum)


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors run, and what is loaded for them is remembered."""
    monkeypatch.setattr(launch, "check_device", lambda *_: None)
    monkeypatch.setattr(operator, "may_remember", lambda _: True)
    monkeypatch.setattr(TOY, "ready", {})
    monkeypatch.setattr(TOY, "log", [])
    monkeypatch.setattr(TOY, "error", None)


def pair(requires: str = "") -> tuple[Tensor, Tensor]:
    a, b = torch.randn(2, 3, 4).unbind()
    return a.clone().requires_grad_("a" in requires), b.clone().requires_grad_("b" in requires)


# -- the ready table, and what is refused


def test_the_second_call_only_launches():
    a, b = pair()
    for _ in range(2):
        o, total = product(a, b, 2.0)
        assert torch.equal(o, 2 * a * b) and total is None
    assert TOY.log == ["check", "prepare", "launch sum=False", "launch sum=False"]


def launch_error(code: int) -> Exception:
    """What a failed launch raises where the compiler is loaded."""
    from cutlass.cutlass_dsl.tvm_ffi_provider import CUDADialectError

    error: Exception = CUDADialectError(f"CUDA Error Code: {code}")
    return error


@pytest.mark.parametrize(
    "made",
    [lambda: RuntimeError("Mismatched b.shape[1] on argument #2"), lambda: launch_error(1)],
    ids=["host code", "launch"],
)
def test_what_host_code_refuses_is_said_in_the_operators_words(made: Callable[[], Exception]):
    error = made()
    a, b = pair()
    product(a, b)
    TOY.error = error
    with pytest.raises(ValueError, match=r"b has shape \[3, 5\], must be \[3, 4\]"):
        product(a, torch.zeros(3, 5))
    with pytest.raises(type(error)) as caught:  # nothing is wrong that is known
        product(a, b)
    assert caught.value is error


def test_what_host_code_refuses_is_mended_where_it_can_be():
    a, b = pair()
    product(a, b)
    turned = b.t().contiguous().t()
    o, _ = product(a, turned)
    assert torch.equal(o, a * b)


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError,
        lambda: NotImplementedError("of another"),
        lambda: type("CacheError", (RuntimeError,), {})("damaged"),
        lambda: launch_error(2),
    ],
    ids=["out of memory", "of the host", "not implemented", "cache", "launch out of memory"],
)
def test_what_is_no_refusal_is_not_diagnosed(made: Callable[[], Exception]):
    error = made()
    a, b = pair()
    product(a, b)
    TOY.log.clear()
    TOY.error = error
    with pytest.raises(type(error)) as caught:
        product(a, b)
    assert caught.value is error
    assert TOY.log == ["launch sum=False"]


def test_the_first_calls_own_launch_is_not_repeated():
    TOY.error = RuntimeError("of the GPU")
    with pytest.raises(RuntimeError, match="of the GPU"):
        product(*pair())
    assert TOY.log.count("launch sum=False") == 1


def test_there_may_be_nothing_to_launch():
    o, _ = product(torch.zeros(0, 4), torch.zeros(0, 4))
    assert o.shape == (0, 4) and TOY.log == ["check"]


# -- registration


def test_the_schema_is_that_of_the_arguments():
    assert str(torch.ops.cute_attn.toy_product.default._schema) == (
        "cute_attn::toy_product(Tensor a, Tensor b, Tensor? bias=None, float scale=1., "
        "bool return_sum=False) -> (Tensor, Tensor)"
    )


def test_the_registered_operator_is_sound():
    op = torch.ops.cute_attn.toy_product.default
    torch.library.opcheck(op, pair())
    torch.library.opcheck(op, (*pair("ab"), None, 2.0, True))
    with pytest.raises(ValueError, match="return_sum is False, must be True for a gradient"):
        op(*pair("ab"))


# -- autograd


@pytest.mark.parametrize("return_sum", [False, True])
@pytest.mark.parametrize("requires", ["a", "b", "ab"])
def test_gradients_of_what_asks_for_them(requires: str, return_sum: bool):
    a, b = pair(requires)
    o, total = product(a, b, 3.0, return_sum)
    assert (total is not None) == return_sum
    assert "launch sum=True" in TOY.log  # kept for the backward, asked for or not
    weights = torch.randn(3, 4)
    (o * weights).sum().backward()
    assert TOY.log[-1] == f"backward {sorted(requires)}"
    for name, x, other in (("a", a, b), ("b", b, a)):
        if name in requires:
            torch.testing.assert_close(x.grad, 3 * weights * other.detach())
        else:
            assert x.grad is None


def test_nothing_is_kept_where_no_gradient_will_be_taken():
    with torch.no_grad():
        o, _ = product(*pair("ab"))
    assert not o.requires_grad and "launch sum=True" not in TOY.log


def test_gradients_of_a_compiled_call():
    a, b = pair("ab")
    compiled = torch.compile(
        lambda a, b: product(a, b, 2.0)[0].sin(), fullgraph=True, backend="aot_eager"
    )
    o = compiled(a, b)
    torch.testing.assert_close(o, (2 * a * b).sin())
    o.sum().backward()
    torch.testing.assert_close(a.grad, (2 * b * (2 * a * b).cos()).detach())
