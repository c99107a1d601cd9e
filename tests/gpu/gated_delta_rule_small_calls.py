"""Small calls of the Gated Delta Net's operators, for `tests.gpu.small_calls`."""

from __future__ import annotations

from collections.abc import Iterator

import cute_attn
from tests.gpu.named_calls import Group, Named, on_device
from tests.ops.gated_delta_rule_calls import OPERATORS
from tests.ops.kda_decode_cases import GATED_DELTA_RULE, Case, function_of


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


CALLS: dict[str, Group] = {"by_tokens": by_tokens}
