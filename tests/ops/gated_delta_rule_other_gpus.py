"""The Gated Delta Net on GPUs other than sm_90 and sm_100, for `test_other_gpus`."""

from __future__ import annotations

from . import gated_delta_rule_cases, kda_cases, kda_decode_cases
from .calls import ArchCall
from .test_gated_delta_rule_decode import assert_recurrent_agrees, case_of
from .test_kda_gradients import assert_agrees as assert_gradients_agree
from .test_kda_gradients import differentiated, weights


def gated_delta_rule_decode() -> None:
    for kernel in kda_decode_cases.GATED_DELTA_RULE[1:3]:
        args = case_of(kernel).inputs("cpu")
        kda_decode_cases.assert_agrees(args, kda_decode_cases.run(args))


def chunk_gated_delta_rule() -> None:
    args = gated_delta_rule_cases.Case(
        gated_delta_rule_cases.PACKED, (70, 0, 130), gates="strong"
    ).arguments("cpu")
    kda_cases.assert_agrees(args, *kda_cases.run(args))


def gradients(dim: int) -> None:
    kind = gated_delta_rule_cases.SMALL if dim == 64 else gated_delta_rule_cases.PACKED
    args = gated_delta_rule_cases.Case(kind, (70,), group=3).arguments("cpu")
    of = weights(args)
    assert_gradients_agree(args, of, differentiated(args, of))


CALLS = {
    "chunk_gated_delta_rule": ArchCall(
        chunk_gated_delta_rule, covers=(("chunk_gated_delta_rule", "forward"),)
    ),
    "gradients of chunk_gated_delta_rule, K = 64": ArchCall(
        lambda: gradients(64), covers=(("chunk_gated_delta_rule", "backward"),)
    ),
    # Refused: the shared memory there is too small.
    "gradients of chunk_gated_delta_rule, K = 128": ArchCall(
        lambda: gradients(128), refused=("sm_86", "sm_89")
    ),
    "gated_delta_rule_decode": ArchCall(
        gated_delta_rule_decode,
        covers=(("gated_delta_rule_decode", "forward"),),
    ),
    "fused_recurrent_gated_delta_rule": ArchCall(
        lambda: assert_recurrent_agrees("cpu", in_kernel=True),
        covers=(("fused_recurrent_gated_delta_rule", "forward"),),
    ),
}
