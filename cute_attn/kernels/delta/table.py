"""The kernels of KDA and the Gated Delta Net, by name. Importing this loads no compiler."""

from __future__ import annotations

from ...cache import KernelDef

_HERE = __name__.rpartition(".")[0]

# The fused path over chunks; POOL_PASS is for states in a pool, SEGMENTS for split sequences.
PREPARE = KernelDef(name="kda_prepare", target=f"{_HERE}.chunk.fused.prepare:KdaPrepare")
STATE_PASS = KernelDef(name="kda_state_pass", target=f"{_HERE}.chunk.fused.state_pass:KdaStatePass")
POOL_PASS = KernelDef(name="kda_pool_pass", target=f"{_HERE}.chunk.fused.pool_pass:KdaPoolPass")
SEGMENTS = KernelDef(name="kda_segments", target=f"{_HERE}.chunk.fused.segments:KdaSegments")

# With context parallelism, for both paths.
CHAIN = KernelDef(name="delta_chain", target=f"{_HERE}.chunk.chain:TransitionChain")

# The fused path for one decay a head.
HEAD_PREPARE = KernelDef(
    name="delta_head_prepare", target=f"{_HERE}.chunk.per_head.prepare:HeadPrepare"
)
HEAD_STATE_PASS = KernelDef(
    name="delta_head_state_pass", target=f"{_HERE}.chunk.per_head.state_pass:HeadStatePass"
)
HEAD_POOL_PASS = KernelDef(
    name="delta_head_pool_pass", target=f"{_HERE}.chunk.per_head.pool_pass:HeadPoolPass"
)

# The path for whole sequences in one kernel.
HEAD_FORWARD = KernelDef(
    name="delta_head_forward", target=f"{_HERE}.chunk.per_head.forward:HeadForward"
)
HEAD_POOL_FORWARD = KernelDef(
    name="delta_head_pool_forward", target=f"{_HERE}.chunk.per_head.pool_forward:HeadPoolForward"
)

HEAD_ADJOINT_PASS = KernelDef(
    name="delta_head_adjoint_pass", target=f"{_HERE}.chunk.per_head.adjoint_pass:HeadAdjointPass"
)

# The backward of the chunked path. It also runs PREPARE and STATE_PASS.
ADJOINT_PASS = KernelDef(
    name="kda_adjoint_pass",
    target=f"{_HERE}.chunk.backward.adjoint_pass:KdaAdjointPass",
)
GRADIENTS = KernelDef(name="kda_gradients", target=f"{_HERE}.chunk.backward.gradients:KdaGradients")

HEAD_GRADIENTS = KernelDef(
    name="gated_delta_gradients",
    target=f"{_HERE}.chunk.backward.head_gradients:GatedDeltaGradients",
)

# The stages of the modular path.
GATE_CUMSUM = KernelDef(
    name="kda_gate_cumsum", target=f"{_HERE}.chunk.stages.gate_cumsum:KdaGateCumsum"
)
CHUNK_INTRA = KernelDef(
    name="kda_chunk_intra", target=f"{_HERE}.chunk.stages.chunk_intra:KdaChunkIntra"
)
RECOMPUTE_W_U = KernelDef(
    name="kda_recompute_w_u",
    target=f"{_HERE}.chunk.stages.recompute_w_u:KdaRecomputeWU",
)
DELTA_H = KernelDef(name="kda_delta_h", target=f"{_HERE}.chunk.stages.delta_h:KdaDeltaH")
OUTPUT = KernelDef(name="kda_output", target=f"{_HERE}.chunk.stages.output:KdaOutput")

# The backward of the stages.
GATE_CUMSUM_BACKWARD = KernelDef(
    name="kda_gate_cumsum_backward",
    target=f"{_HERE}.chunk.stages.gate_cumsum_backward:KdaGateCumsumBackward",
)
INTRA_BACKWARD = KernelDef(
    name="kda_intra_backward",
    target=f"{_HERE}.chunk.stages.intra_backward:KdaIntraBackward",
)
RECOMPUTE_W_U_BACKWARD = KernelDef(
    name="kda_recompute_w_u_backward",
    target=f"{_HERE}.chunk.stages.recompute_w_u_backward:KdaRecomputeWUBackward",
)
DELTA_H_BACKWARD = KernelDef(
    name="kda_delta_h_backward",
    target=f"{_HERE}.chunk.stages.delta_h_backward:KdaDeltaHBackward",
)
OUTPUT_BACKWARD = KernelDef(
    name="kda_output_backward",
    target=f"{_HERE}.chunk.stages.output_backward:KdaOutputBackward",
)

# Token by token.
DECODE = KernelDef(name="kda_decode", target=f"{_HERE}.step.decode:KdaDecode")
DECODE_RECORDS = KernelDef(
    name="kda_decode_records", target=f"{_HERE}.step.records:KdaDecodeRecords"
)
RECURRENT = KernelDef(name="kda_recurrent", target=f"{_HERE}.step.recurrent:KdaRecurrent")

# These kernels run on sm_90a alone; other architectures take PREPARE and the passes beside it.
_OF_HOPPER = {
    HEAD_PREPARE,
    HEAD_STATE_PASS,
    HEAD_POOL_PASS,
    HEAD_FORWARD,
    HEAD_POOL_FORWARD,
    HEAD_ADJOINT_PASS,
}


def called(arch: str) -> set[KernelDef]:
    """The kernels that operators call on an architecture."""
    kernels = {x for x in globals().values() if isinstance(x, KernelDef)}
    return kernels if arch == "sm_90a" else kernels - _OF_HOPPER
