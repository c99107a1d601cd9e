"""Small calls of the Gated Delta Net's operators, for `tests.gpu.small_calls`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

import cute_attn
from cute_attn.ops.gated_delta_rule import chunk_forward
from tests.gpu.kda_small_calls import LONG
from tests.gpu.named_calls import LENGTHS, Group, Named, differentiate, on_device
from tests.ops import gated_delta_rule_cases
from tests.ops.gated_delta_rule_calls import OPERATORS
from tests.ops.kda_decode_cases import GATED_DELTA_RULE, Case, function_of
from tests.ops.test_gated_delta_rule_decode import with_columns
from tests.ops.test_kda_gradients import INPUTS
from tests.ops.test_kda_pool import SERVER, pool_call


def by_tokens(device: str) -> Iterator[Named]:
    for n, kernel in enumerate(GATED_DELTA_RULE):
        given = Case(kernel, tokens=3 if kernel.multi_token else 1).inputs(device)
        function = function_of(given)
        name = f"{function.__name__}, {kernel.slots}, {n}"
        yield name, lambda given=given, function=function: function(**given)
    recurrent = on_device(OPERATORS["fused_recurrent_gated_delta_rule"].arguments(), device)
    yield (
        "fused_recurrent_gated_delta_rule",
        lambda: cute_attn.fused_recurrent_gated_delta_rule(**recurrent),
    )
    columns = with_columns(device, g=True, gk=True, gv=True, beta=True, gate=True)
    yield (
        "fused_recurrent_gated_delta_rule, columns",
        lambda: cute_attn.fused_recurrent_gated_delta_rule(**columns),
    )


CHUNKS = {
    "dense": (gated_delta_rule_cases.PLAIN, (sum(LENGTHS),)),
    "packed": (gated_delta_rule_cases.PACKED, LENGTHS),
    "float16, K = V = 64": (gated_delta_rule_cases.SMALL, (sum(LENGTHS),)),
    "split": (gated_delta_rule_cases.PLAIN, (LONG,)),
}


def by_chunks(device: str) -> Iterator[Named]:
    chunked = cute_attn.chunk_gated_delta_rule
    for name, (kind, lengths) in CHUNKS.items():
        heads = 1 if name == "split" else 2
        case = gated_delta_rule_cases.Case(kind=kind, lengths=lengths, heads=heads)
        given = case.arguments(device)
        yield (
            f"chunk_gated_delta_rule, {name}",
            torch.inference_mode()(lambda given=given: chunked(**given)),
        )
        title = f"gradients of chunk_gated_delta_rule, {name}"
        yield title, differentiate(chunked, given, INPUTS)
    for name, lengths, heads in (("pool", LENGTHS, 2), ("pool, split", (LONG,), 1)):
        served = gated_delta_rule_cases.Case(SERVER, lengths, heads=heads).arguments(device)
        pool = pool_call(served).given
        yield (
            f"chunk_gated_delta_rule, {name}",
            torch.inference_mode()(lambda pool=pool: chunked(**pool)),
        )
        if name == "pool":
            yield f"chunk_gated_delta_rule, {name}, one kernel", in_one_kernel(pool)
    plain = gated_delta_rule_cases.Case(gated_delta_rule_cases.PLAIN, (sum(LENGTHS),), heads=2)
    yield "chunk_gated_delta_rule, one kernel", in_one_kernel(plain.arguments(device))


def in_one_kernel(given: dict[str, Any]) -> Callable[[], Any]:
    """A call so small that two kernels would be faster."""

    @torch.inference_mode()
    def call() -> Any:
        with mock.patch.object(chunk_forward, "in_one_kernel", return_value=True):
            return cute_attn.chunk_gated_delta_rule(**given)

    return call


CALLS: dict[str, Group] = {"by_tokens": by_tokens, "by_chunks": by_chunks}
