"""KDA on GPUs other than sm_90 and sm_100, for `test_other_gpus`.

The kernels differ there: `mma.sync` in place of `wgmma`, copies by cp.async before sm_90, and less
shared memory on sm_86, sm_89 and sm_120.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cute_attn import launch
from cute_attn.ops.kda import chunk_passes

from . import kda_cases, kda_decode_cases, test_kda_recurrent
from .calls import ArchCall
from .test_kda_gradients import assert_agrees as assert_gradients_agree
from .test_kda_gradients import differentiated, weights


@contextmanager
def segments_of_a_chunk() -> Iterator[None]:
    """As where few long sequences are to fill a large GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_passes, "chunks_per_segment", lambda *_, **__: 1)
        patch.setattr(launch, "num_sms", lambda _: 10**6)
        yield


def chunk_kda() -> None:
    args = kda_cases.Case(kda_cases.PACKED, (70, 0, 130), gates="strong").arguments("cpu")
    kda_cases.assert_agrees(args, *kda_cases.run(args))


def chunk_kda_in_segments() -> None:
    with segments_of_a_chunk():
        chunk_kda()


def chunk_kda_by_stages() -> None:
    args = kda_cases.Case(kda_cases.SMALL, (70,)).arguments("cpu")
    kda_cases.assert_agrees(args, *kda_cases.run(args, return_intermediate_states=True))


def gradients(dim: int) -> None:
    kind = kda_cases.SMALL if dim == 64 else kda_cases.PACKED
    args = kda_cases.Case(kind, (70,), gates="usual").arguments("cpu")
    of = weights(args)
    assert_gradients_agree(args, of, differentiated(args, of))


def fused_recurrent_kda() -> None:
    for kernel in test_kda_recurrent.EMULATED[:2]:
        args = test_kda_recurrent.Case(kernel).inputs("cpu")
        test_kda_recurrent.assert_agrees(args, test_kda_recurrent.run(args))


def kda_decode() -> None:
    for slots in ("indexed", "records"):
        kernel = kda_decode_cases.Kernel(slots=slots, multi_token=slots == "records")
        args = kda_decode_cases.Case(kernel, padded=1, tokens=2).inputs("cpu")
        kda_decode_cases.assert_agrees(args, kda_decode_cases.run(args))


CALLS = {
    "chunk_kda": ArchCall(chunk_kda, covers=(("chunk_kda", "forward"),), quick=("sm_80",)),
    "chunk_kda in segments": ArchCall(chunk_kda_in_segments),
    "chunk_kda by stages": ArchCall(chunk_kda_by_stages),
    "gradients, K = 64": ArchCall(lambda: gradients(64), covers=(("chunk_kda", "backward"),)),
    # Refused, see test_kda_arguments.py: the shared memory there is too small.
    "gradients, K = 128": ArchCall(lambda: gradients(128), refused=("sm_86", "sm_89")),
    "fused_recurrent_kda": ArchCall(
        fused_recurrent_kda, covers=(("fused_recurrent_kda", "forward"),)
    ),
    "kda_decode": ArchCall(kda_decode, covers=(("kda_decode", "forward"),), quick=("sm_120a",)),
}
