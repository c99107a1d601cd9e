"""The Gated Delta Net on GPUs other than sm_90 and sm_100, for `test_other_gpus`."""

from __future__ import annotations

from . import kda_decode_cases
from .calls import ArchCall
from .test_gated_delta_rule_decode import assert_recurrent_agrees, case_of


def gated_delta_rule_decode() -> None:
    for kernel in kda_decode_cases.GATED_DELTA_RULE[1:3]:
        args = case_of(kernel).inputs("cpu")
        kda_decode_cases.assert_agrees(args, kda_decode_cases.run(args))


CALLS = {
    "gated_delta_rule_decode": ArchCall(
        gated_delta_rule_decode,
        covers=(("gated_delta_rule_decode", "forward"),),
        quick=("sm_80",),
    ),
    "fused_recurrent_gated_delta_rule": ArchCall(
        lambda: assert_recurrent_agrees("cpu", in_kernel=True),
        covers=(("fused_recurrent_gated_delta_rule", "forward"),),
    ),
}
