"""The chunked Gated Delta Net on spans; see `ops.kda.chunk_spans`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import launch
from ...kernels.delta import table
from ..kda.arguments import launch_scalars
from ..kda.chunk_spans import ChunkSpans
from .chunk import BACKWARD, GatedDeltaArguments, _chunk, _plan, parameters
from .chunk_forward import prepare_heads
from .chunk_plan import plan_chunk_gated_delta_rule


class GatedDeltaSpans(ChunkSpans):
    """`chunk_gated_delta_rule` on spans."""

    name = "chunk_gated_delta_rule"
    operator = _chunk
    backward = BACKWARD
    arguments = GatedDeltaArguments

    def plan(self, a: Any) -> dict[str, Any]:
        return _plan(a)

    def requests(self, arch: str, **plan: Any) -> list[launch.Request]:
        found: list[launch.Request] = plan_chunk_gated_delta_rule(arch, **plan)
        return found

    def parameters(self, a: Any) -> tuple[Tensor | None, Tensor | None]:
        return parameters(a)

    def prepared(self, request: launch.Request, a: Any) -> tuple[Tensor, ...]:
        if request[0] is not table.HEAD_PREPARE:
            return super().prepared(request, a)
        inputs = a.q, a.k, a.g, a.beta, *parameters(a), a.cu_seqlens
        scale, _, beta_scale = launch_scalars(a)
        prepare = launch.get_for(a.q.device, *request)
        records = prepare_heads(
            prepare, inputs, a.v, None, scale, beta_scale, launch.num_sms(a.q.device)
        )
        return a.q, a.k, a.v, *records


GATED_DELTA_SPANS = GatedDeltaSpans()
