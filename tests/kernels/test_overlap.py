"""Host code refuses overlapping memory; on a warm path it is the only check."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_attn
from cute_attn.ops.kda import decode_operator
from cute_attn.ops.memory import check_memory
from tests.ops import kda_decode_cases
from tests.ops.operators import OPERATORS, values

CHECKED = [name for name, operator in OPERATORS.items() if operator.pools]


def one_after_another(args: dict[str, Any], first: str, second: str, shared: int) -> None:
    """Put both into one piece of memory, with `shared` bytes in common."""
    x, y = args[first], args[second]
    memory = torch.zeros(x.nbytes + y.nbytes, dtype=torch.uint8)
    args[first] = memory[: x.nbytes].view(x.dtype).view(x.shape)
    rest = memory[x.nbytes - shared : x.nbytes - shared + y.nbytes]
    args[second] = rest.view(y.dtype).view(y.shape)
    args[first].copy_(x)
    if not shared:
        args[second].copy_(y)


def rows_apart(args: dict[str, Any], name: str, step: int) -> None:
    x = args[name]
    memory = values(x.shape[0] * x[0].numel() + step, dtype=x.dtype)
    args[name] = memory.as_strided(x.shape, (step, *x.stride()[1:]))


def pages(args: dict[str, Any], names: tuple[str, ...], shared: int) -> None:
    """A slot of each pool in turn; with `shared`, the last one starts so many bytes early."""
    sizes = [args[name][0].nbytes for name in names]
    pitch, slots = sum(sizes), args[names[0]].shape[0]
    memory = torch.zeros(slots * pitch, dtype=torch.uint8)
    start = 0
    for name, size in zip(names, sizes, strict=True):
        x = args[name]
        offset = start - (shared if name == names[-1] else 0)
        item = x.element_size()
        strides = (pitch // item, *x.stride()[1:])
        args[name] = memory.view(x.dtype).as_strided(x.shape, strides, offset // item).copy_(x)
        start += size


Change = Callable[[dict[str, Any]], None]


def layouts(name: str) -> dict[str, Change]:
    operator = OPERATORS[name]
    cases: dict[str, Change] = {}

    def add(label: str, change: Callable[..., None], *arguments: Any) -> None:
        cases[label] = lambda args: change(args, *arguments)

    for written in operator.written:
        for other in operator.tensors:
            if other != written:
                add(f"{written} into {other}", one_after_another, written, other, 16)
        add(f"{written} beside q", one_after_another, written, "q", 0)
        row = operator.arguments()[written][0].numel()
        for step in (0, 64, row - 64, row, row + 64):
            add(f"{written} every {step} of {row}", rows_apart, written, step)
    for shared in (0, 16):
        add(f"pages that share {shared} bytes", pages, operator.pools, shared)
    return cases


def same(x: Tensor, y: Tensor) -> bool:
    """Bits of one dtype may be NaN in the other's."""
    return (
        torch.equal(x.nan_to_num(), y.nan_to_num()) if x.is_floating_point() else torch.equal(x, y)
    )


@pytest.mark.parametrize("name", CHECKED)
def test_host_code_refuses_what_the_operator_does(name: str, monkeypatch: pytest.MonkeyPatch):
    """Both by the same rules, for every argument that is written beside every other."""
    refusals: list[str] = []

    def note(*arguments: Any, **named: Any) -> None:
        try:
            check_memory(*arguments, **named)
        except ValueError as error:
            refusals.append(str(error))

    module = sys.modules[OPERATORS[name].function.__module__]
    if not hasattr(module, "check_memory"):  # both decodes share an operator's class
        module = decode_operator
    monkeypatch.setattr(module, "check_memory", note)
    refused = taken = 0
    with cute_attn.emulated("sm_90a"), torch.no_grad():
        for label, change in layouts(name).items():
            args = OPERATORS[name].arguments()
            change(args)
            if " every 0 of" in label:
                continue  # is refused as expanded, before
            for key in ("state_indices", "num_accepted_tokens"):
                if not args[key].any():  # it lies in memory that was made for it
                    args[key].copy_(torch.tensor([1, 0], dtype=torch.int32))
            before = {key: x.clone() for key, x in args.items() if isinstance(x, Tensor)}
            refusals.clear()
            failure = ""
            try:
                OPERATORS[name].function(**args)
            except Exception as error:
                failure = type(error).__name__
            # The compiler's own error where it is loaded, as here: it built the kernel.
            assert failure in ("", "CUDADialectError"), label
            launched = not failure
            assert launched != bool(refusals), f"{label}: launched is {launched}, {refusals}"
            taken, refused = taken + launched, refused + (not launched)
            if not launched:
                assert all(same(x, args[key]) for key, x in before.items()), label
    assert refused > 15 and taken >= 5


def windows(shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    return torch.zeros(8192, dtype=torch.float16).as_strided(shape, strides)


# Strides of [3, 2, 256, 3]: rows, steps, channels, taps.
WINDOWS = {
    "dense": (1536, 768, 3, 1),
    "dense, channels side by side": (1536, 768, 1, 256),
    "shared inputs": (1024, 1, 4, 1),
    "shared inputs, channels side by side": (1024, 256, 1, 256),
    "steps between taps": (1536, 1, 6, 2),
    "shared inputs of two channels": (1024, 1, 3, 1),
    "shared inputs of two rows": (1000, 1, 4, 1),
    "a step of two taps": (1536, 2, 6, 1),
}
REFUSED = {*list(WINDOWS)[5:]}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WINDOWS, "out", "conv_state", "q"])
def test_windows_of_drafts_may_share_inputs_only(name: str, monkeypatch: pytest.MonkeyPatch):
    """By the same rules in host code and operator."""
    kernel = kda_decode_cases.GATED_DELTA_RULE[-1]
    args = kda_decode_cases.Case(kernel, batch=2, tokens=2, speculated=2).inputs("cpu")
    shape = args["draft_windows"].shape
    assert shape == (3, 2, 256, 3)
    if name in WINDOWS:
        args["draft_windows"] = windows(shape, WINDOWS[name])
    else:
        one_after_another(args, name, "draft_windows", 16)
    refusals: list[str] = []

    def note(check: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            try:
                return check(*arguments, **named)
            except ValueError as error:
                refusals.append(str(error))
                return None

        return noted

    for check in ("check_memory", "check_windows"):
        monkeypatch.setattr(decode_operator, check, note(getattr(decode_operator, check)))
    failure = ""
    with cute_attn.emulated("sm_90a"), torch.no_grad():
        try:
            cute_attn.kda_decode(**args)
        except Exception as error:
            failure = type(error).__name__
    assert failure in ("", "CUDADialectError")
    refused = name in REFUSED or name not in WINDOWS
    assert bool(failure) == bool(refusals) == refused, refusals
    assert all("draft_windows" in refusal for refusal in refusals)
