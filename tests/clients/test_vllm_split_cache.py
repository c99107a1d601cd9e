"""Decode context parallelism (`-dcp`) with vLLM's own metadata, exchange and merge. The ranks are
threads of this process, whose messages `ThreadGroup` carries."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import cute_attn
from cute_attn.emulator import Emulator
from tests.integrations import vllm_stand_in
from tests.integrations.test_vllm_split_cache import STEPS, decode_over_ranks, serve
from tests.integrations.vllm_stand_in import ThreadGroup

from . import test_vllm

vllm = test_vllm.vllm  # a fixture
# vLLM's order of layers, blocks, tokens, heads and content in memory.
MEMORY = (0, 1, 3, 2, 4)


def corrected(
    out: Tensor, lses: Tensor, cp_rank: int, ctx: Any, is_lse_base_on_e: bool = True
) -> tuple[Tensor, Tensor]:
    """A rank's part of the combined output, `[tokens, heads, dim]`, and the combined lse, from the
    lse of all ranks."""
    assert is_lse_base_on_e
    lse = lses.logsumexp(0)
    weight = (lses[cp_rank] - lse).exp().nan_to_num(0.0)
    return (out.float() * weight[..., None]).to(out.dtype), lse


@pytest.fixture
def group(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> ThreadGroup:
    """vLLM's group of the ranks of a split cache.

    PyTorch stands in for two of vLLM's Triton kernels, which Triton's interpreter does not run."""
    from vllm.distributed import parallel_state
    from vllm.v1.attention.ops import dcp
    from vllm.v1.attention.ops import merge_attn_states as merge

    found = ThreadGroup(2)
    monkeypatch.setattr(parallel_state, "_DCP", found)
    monkeypatch.setattr(dcp, "correct_attn_out", corrected)
    monkeypatch.setattr(merge, "merge_attn_states", vllm_stand_in.merge_attn_states)
    return found


@pytest.mark.clients("Decode context parallelism (`-dcp`): two ranks' caches, vLLM's exchange")
@pytest.mark.parametrize("interleave", [1, 16])
def test_steps_over_two_ranks(group: ThreadGroup, interleave: int):
    from cute_attn.integrations.vllm_backend import CuteAttnBackend

    emulator = Emulator()
    with cute_attn.emulated("sm_90a", emulator):
        serve(CuteAttnBackend, group, interleave, STEPS, memory=MEMORY)
    assert not [x for x in emulator.report.findings if x.severity == "error"], emulator.report


@pytest.mark.clients("MLA: decode context parallelism, two ranks' caches")
def test_latent_attention_over_two_ranks(vllm: Any):
    from vllm.v1.attention.ops.dcp import _lse_weighted_combine

    from cute_attn.integrations.vllm_mla_backend import CuteAttnMLAImpl

    def combine(o: Tensor, lse: Tensor) -> Tensor:
        found: Tensor = _lse_weighted_combine(o.float(), lse)
        return found.double()

    emulator = Emulator(num_sms=4)
    with cute_attn.emulated("sm_90a", emulator):
        found, one, exact = decode_over_ranks(CuteAttnMLAImpl, combine, 2, 1)
    assert not [x for x in emulator.report.findings if x.severity == "error"], emulator.report
    assert (found - exact).norm() <= 2 * (one.double() - exact).norm()


@pytest.mark.clients("What has no kernel over ranks of `-dcp` is refused by name")
def test_windows_are_refused(group: ThreadGroup):
    from cute_attn.integrations.vllm_backend import CuteAttnImpl

    def make(_: int) -> None:
        with pytest.raises(NotImplementedError, match="parallelism with sliding windows"):
            CuteAttnImpl(4, 64, 0.1, 2, sliding_window=16)

    group.run(make)
