"""Small calls of Lightning Attention's operator, for `tests.gpu.small_calls`."""

from __future__ import annotations

from collections.abc import Iterator

import cute_attn
from tests.gpu.named_calls import Group, Named
from tests.ops import lightning_cases

LIGHTNING = {
    "slots": lightning_cases.Case(slots=5, padded=1),
    "several tokens": lightning_cases.Case(tokens=3),
    "drafts": lightning_cases.Case(tokens=3, slots=5, records=4),
}


def by_tokens(device: str) -> Iterator[Named]:
    for name, lightning in LIGHTNING.items():
        given = lightning.inputs(device)
        call = cute_attn.lightning_attn_decode
        yield f"Lightning decode, {name}", lambda given=given, call=call: call(**given)


CALLS: dict[str, Group] = {"by_tokens": by_tokens}
