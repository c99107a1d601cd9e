"""Lightning Attention on GPUs other than sm_90 and sm_100, for `test_other_gpus`."""

from __future__ import annotations

from . import lightning_cases
from .calls import ArchCall


def lightning_attn_decode() -> None:
    for tokens, records in ((None, None), (3, 2)):
        case = lightning_cases.Case(tokens=tokens, records=records, slots=5, padded=1)
        args = case.inputs("cpu")
        lightning_cases.assert_agrees(args, *lightning_cases.run(args))


CALLS = {
    "lightning_attn_decode": ArchCall(
        lightning_attn_decode, covers=(("lightning_attn_decode", "forward"),), quick=("sm_89",)
    ),
}
