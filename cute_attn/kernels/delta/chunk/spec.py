"""Specs of the chunked KDA kernels. Importing this loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...common.spec import Spec
from ..spec import DECAYS, GATES, INDEX_DTYPES, SLOT_DTYPES, SlotsSpec

CHUNK = 64  # tokens
HALVES = 2  # bounds of a chunk, each of half of its tokens (see `starts`)
SUB_TILE = 64 * 64  # elements of a sub-tile: 64 rows of 128 bytes, swizzled as TMA does

DTYPES = ("bfloat16", "float16")
GATE_DTYPES = ("float32", "bfloat16", "float16")
BETA_DTYPES = ("float32", "bfloat16", "float16")
HEAD_DIMS = (64, 128)  # K; 256 would need 128 registers a thread for the state, 112 KiB a record
HEAD_DIMS_V = (64, 128, 192, 256)  # tiles of 64 columns

ALLOWED: dict[str, tuple[object, ...]] = {
    "dtype": DTYPES,
    "gate_dtype": GATE_DTYPES,
    "beta_dtype": BETA_DTYPES,
    "head_dim_k": HEAD_DIMS,
    "head_dim_v": HEAD_DIMS_V,
    "gate": GATES,
    "decays": DECAYS,
    "index_dtype": INDEX_DTYPES,
    "copies": ("cp_async", "bulk"),
    "products": ("mma", "wgmma"),
    "segments": ("none", "transitions", "outputs", "spans"),
    "cluster": (1, 2),
}


@dataclass(frozen=True)
class CheckedSpec(Spec):
    """Base of the specs of chunked kernels."""

    ALLOWED = ALLOWED


@dataclass(frozen=True)
class ChunkSpec(CheckedSpec):
    """The compile-time parameters that all chunked kernels share.

    Attributes:
        dtype: dtype of q, k, v and o, and of intermediate results between kernels.
        head_dim_k, head_dim_v: K and V.
        index_dtype: dtype of cu_seqlens; "none" where sequences are not packed.

    Raises:
        TypeError: a field has another type than its annotation.
        ValueError: a field's value is not supported; the message names the field.
    """

    dtype: str
    head_dim_k: int
    head_dim_v: int
    index_dtype: str

    @property
    def varlen(self) -> bool:
        return self.index_dtype != "none"


@dataclass(frozen=True)
class InputsSpec(ChunkSpec):
    """The parameters of kernels that read the inputs of `chunk_kda`.

    Attributes:
        gate_dtype: dtype of g.
        beta_dtype: dtype of beta.
        gate: "none" (g is the logarithm of the decay), "softplus" or "lower_bound" (g is the input
            of this gate, see `gates`).
        has_A_log, has_dt_bias: whether the gate has A_log, dt_bias.
        l2norm: q and k are normalised.
        beta_sigmoid: beta is the input of a sigmoid.
        decays: "channel" (g is [B, T, HV, K], dt_bias [HV, K]) or "head" (g is [B, T, HV] with any
            strides, dt_bias [HV]): what has a decay of its own.
    """

    gate_dtype: str
    beta_dtype: str
    gate: str
    has_A_log: bool
    has_dt_bias: bool
    l2norm: bool
    beta_sigmoid: bool
    decays: str = field(default="channel", kw_only=True)


def check_bounds(spec: PrepareSpec | HeadPrepareSpec) -> None:
    if spec.bounds and not spec.l2norm:
        raise ValueError("bounds is True, must be False without l2norm: keys may be long")


@dataclass(frozen=True)
class PrepareSpec(InputsSpec):
    """The fused path's preparation of chunks (`prepare`).

    Attributes:
        for_backward: a backward will use the records. A beta too near 0 to divide by is replaced
            (`gates.nonzero_beta`). With l2norm, the inverse norms of q and k are a result.
        bounds: whether `prepare` also writes bounds of the transitions (see `starts`).
        starts_next: whether the next kernel of the stream may start before the end of `prepare`.
    """

    for_backward: bool = False
    bounds: bool = False
    starts_next: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self)

    @property
    def store_norms(self) -> bool:
        return self.for_backward and self.l2norm

    @property
    def elements(self) -> int:
        """Elements of a chunk's record, see `record_elements`."""
        return record_elements(self.head_dim_k)


def record_elements(head_dim_k: int) -> int:
    """Elements that `prepare` writes for a chunk and head: kd, qg, kg, Akk, Aqk."""
    return (3 * (head_dim_k // 64) + 2) * SUB_TILE


@dataclass(frozen=True)
class PassSpec(ChunkSpec):
    """A pass that carries a K by V matrix through chunks (`chunk_pass`).

    Attributes:
        state_v_first: states are [N, HV, V, K] rather than [N, HV, K, V].
        has_initial_state, has_final_state: whether the call has these tensors, or their gradients.
        tile_v: columns of V per CTA.
        num_stages: stages of the ring in shared memory; a stage holds one chunk.
        copies: "cp_async" (any architecture) or "bulk" (sm_90 and newer).
        products: "mma" (mma.sync, any architecture) or "wgmma" (sm_90a, with bulk copies).
        segments: "none", one of the two passes over split sequences ("transitions", "outputs"), or
            "spans", which computes the whole transition of each sequence (see `chunk_pass`).
        short_starts: whether segments may start from a state of zero (see `starts`); without
            segments it has no effect.
        cluster: 1, or 2 CTAs of a value head that share copies of what both read.
        dependent: whether the pass starts before the end of the stream's previous kernel, and waits
            for this end (programmatic dependent launch, sm_90 and newer). A pass of transitions
            then lets the next kernel start as early.
    """

    state_v_first: bool
    has_initial_state: bool
    has_final_state: bool
    tile_v: int
    num_stages: int
    copies: str
    products: str
    segments: str
    short_starts: bool = field(default=False, kw_only=True)
    cluster: int = field(default=1, kw_only=True)
    dependent: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster > 1 and (self.head_dim_k % 128 or self.head_dim_v % 128):
            raise ValueError(
                f"cluster is {self.cluster}, must be 1 at head_dim_k={self.head_dim_k}, "
                f"head_dim_v={self.head_dim_v}"
            )
        if self.cluster > 1 and (self.copies != "bulk" or self.tile_v != 64):
            raise ValueError(
                f"cluster is {self.cluster}, must be 1 with copies={self.copies!r}, "
                f"tile_v={self.tile_v}"
            )
        if self.of_transitions and self.head_dim_k % self.tile_v:
            raise ValueError(
                f"tile_v is {self.tile_v}, must divide head_dim_k={self.head_dim_k} too"
            )
        if self.products == "wgmma" and self.copies != "bulk":
            raise ValueError("wgmma needs bulk copies: it reads what the async proxy wrote")
        unit = 64 if self.products == "wgmma" else 16
        if self.tile_v % unit or self.head_dim_v % self.tile_v:
            raise ValueError(
                f"tile_v is {self.tile_v}, must be a multiple of {unit} that divides "
                f"head_dim_v={self.head_dim_v}"
            )

    @property
    def of_transitions(self) -> bool:
        """Whether the pass computes transitions, and no results of chunks."""
        return self.segments in ("transitions", "spans")


@dataclass(frozen=True)
class StatePassSpec(PassSpec):
    """The fused path's pass of the state through chunks (`state_pass`).

    Attributes:
        store_states: whether the states at the chunks' starts and v_new are results.
    """

    store_states: bool = False


@dataclass(frozen=True)
class PoolPassSpec(StatePassSpec, SlotsSpec):
    """The pass of states that are in a pool (`pool_pass`).

    Attributes:
        state_dtype: dtype of the pool.
        checkpoints: whether the pool also takes states between the chunks of a sequence.
    """

    state_dtype: str = "float32"
    checkpoints: bool = False

    ALLOWED = ALLOWED | {"state_dtype": ("float32", "bfloat16"), "slot_dtype": SLOT_DTYPES}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.store_states or not (self.has_initial_state and self.has_final_state):
            raise ValueError("a pool has the initial and the final states, and no backward")
        if self.segments == "spans":
            raise ValueError('segments is "spans", must be another value with a pool')


@dataclass(frozen=True)
class HeadPrepareSpec(InputsSpec):
    """The preparation of chunks for one decay a head (`per_head.prepare`).

    Attributes:
        for_backward: as in `PrepareSpec`.
        bounds: as in `PrepareSpec`.
        starts_next: as in `PrepareSpec`.
        ctas_per_sm: CTAs that share an SM. With three, a thread has 80 registers.
        last_first: whether the last chunks come first, so that L2 has the chunks with which the
            pass begins.
    """

    for_backward: bool = False
    bounds: bool = False
    starts_next: bool = False
    ctas_per_sm: int = 3
    last_first: bool = True

    ALLOWED = ALLOWED | {"ctas_per_sm": (2, 3)}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self)

    @property
    def store_norms(self) -> bool:
        return self.for_backward and self.l2norm

    @property
    def elements(self) -> int:
        """Elements of a chunk's tiles: the inverse, and the decayed scores."""
        return 2 * SUB_TILE


FORWARD_STAGES = 5  # stages of T and Aqk of `per_head.forward`: no more fit
MOST_HEADS_PER_CTA = 8  # value heads of a CTA of `per_head.prepare`: a warp has the gates of one

# float32 that `per_head.prepare` writes for a chunk and value head: 4 factors of each token, the
# decay of the chunk, and two bounds (see `starts`); a multiple of 16 bytes.
FACTORS = 4 * CHUNK + 4
BOUNDS = slice(4 * CHUNK + 1, 4 * CHUNK + 1 + HALVES)


@dataclass(frozen=True)
class HeadPassSpec(StatePassSpec):
    """The pass of the state through chunks for one decay a head (`per_head.state_pass`)."""

    ALLOWED = PoolPassSpec.ALLOWED

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.copies != "bulk":
            raise ValueError(f'copies is "{self.copies}", must be "bulk" with one decay a head')
        if self.tile_v != 64:
            # With 8 warps of 240 registers, TMA's warp would need a warpgroup of its own.
            raise ValueError(f"tile_v is {self.tile_v}, must be 64 with one decay a head")


@dataclass(frozen=True)
class HeadPoolPassSpec(HeadPassSpec, PoolPassSpec):
    """The pass of states that are in a pool, for one decay a head (`per_head.pool_pass`)."""


@dataclass(frozen=True)
class HeadForwardSpec(HeadPassSpec, InputsSpec):
    """The whole forward for one decay a head in one kernel (`per_head.forward`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decays != "head":
            raise ValueError(f"decays is {self.decays}, must be head: each head has one decay")
        if self.segments != "none" or self.dependent:
            raise ValueError(
                f"segments is {self.segments}, dependent is {self.dependent}, must be none and "
                "False: the kernel takes whole sequences, and reads no other kernel's results"
            )
        if not 2 <= self.num_stages <= FORWARD_STAGES:
            raise ValueError(f"num_stages is {self.num_stages}, must be 2 to {FORWARD_STAGES}")


@dataclass(frozen=True)
class HeadPoolForwardSpec(HeadForwardSpec, HeadPoolPassSpec):
    """`HeadForwardSpec` for states in a pool (`per_head.pool_forward`)."""


@dataclass(frozen=True)
class AdjointPassSpec(PassSpec):
    """The pass of the state's gradient backwards through chunks (`adjoint_pass`)."""


@dataclass(frozen=True)
class GradientsSpec(InputsSpec):
    """The backward's gradients of q, k, g and beta (`backward.gradients`).

    Attributes:
        grouped: whether a head of q and k has several value heads.
        cluster: 1, or 2 CTAs that share a chunk and a head of q and k, and have half of K each.
        copies: as in `PassSpec`.
    """

    grouped: bool
    cluster: int
    copies: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim_k // self.cluster % 64:
            raise ValueError(
                f"cluster is {self.cluster}, must be 1 at head_dim_k={self.head_dim_k}"
            )

    @property
    def exchanges(self) -> bool:
        """Whether a norm's gradient needs sums over the channels of both CTAs."""
        return self.l2norm and self.cluster > 1


@dataclass(frozen=True)
class HeadAdjointSpec(HeadPassSpec):
    """The pass of the state's gradient for one decay a head (`per_head.adjoint_pass`).

    Attributes:
        has_initial_state: whether the gradient of the initial state is a result.
        has_final_state: whether the call has the gradient of the final state.
        store_states: whether the gradients of the states after chunks are a result.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype != "bfloat16":
            raise ValueError(f'dtype is "{self.dtype}", must be "bfloat16": Aqk has factors beta')


@dataclass(frozen=True)
class HeadGradientsSpec(GradientsSpec):
    """`GradientsSpec` for one decay a head (`backward.head_gradients`).

    Attributes:
        keeps_sums: whether the sums of dq and dk over a group lie in shared memory.
    """

    keeps_sums: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decays != "head":
            raise ValueError(f"decays is {self.decays}, must be head: each head has one decay")
        if self.keeps_sums and not self.grouped:
            raise ValueError("keeps_sums is True, must be False without groups")


@dataclass(frozen=True)
class GateSpec(CheckedSpec):
    """The gate and its sums within chunks (`gate_cumsum`): fields as in `PrepareSpec`."""

    head_dim_k: int
    gate_dtype: str
    gate: str
    has_A_log: bool
    has_dt_bias: bool
    index_dtype: str


@dataclass(frozen=True)
class IntraSpec(ChunkSpec):
    """The products within chunks (`chunk_intra`).

    Attributes:
        beta_dtype: dtype of beta.
        l2norm: q and k are normalised.
        store_qg: qg is an output too; it uses q as given, so l2norm excludes it.
    """

    beta_dtype: str
    l2norm: bool
    store_qg: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.l2norm and self.store_qg:
            raise ValueError("store_qg is True, must be False with l2norm")


@dataclass(frozen=True)
class RecomputeSpec(ChunkSpec):
    """w and u from Akk (`recompute_w_u`); with store_qg and store_kg also qg and kg."""

    beta_dtype: str
    store_qg: bool
    store_kg: bool


@dataclass(frozen=True)
class DeltaHSpec(ChunkSpec):
    """The states at the start of chunks (`delta_h`); fields as in `StatePassSpec`."""

    state_v_first: bool
    has_initial_state: bool
    has_final_state: bool
    store_v_new: bool
    tile_v: int
    num_stages: int
    products: str = "mma"


@dataclass(frozen=True)
class OutputSpec(ChunkSpec):
    """The output of chunks from the states at their starts (`output`).

    Attributes:
        l2norm: q is normalised.
        state_v_first, tile_v: as in `StatePassSpec`.
    """

    l2norm: bool
    state_v_first: bool
    tile_v: int


@dataclass(frozen=True)
class IntraBackwardSpec(CheckedSpec):
    """The gradients through the products within chunks (`intra_backward`).

    Attributes:
        dtype, head_dim_k, index_dtype: as in `ChunkSpec`.
        beta_dtype: dtype of beta.
        grouped: whether a head of q and k has several value heads.
    """

    dtype: str
    head_dim_k: int
    index_dtype: str
    beta_dtype: str
    grouped: bool


@dataclass(frozen=True)
class RecomputeBackwardSpec(ChunkSpec):
    """The gradients through products with the state (`recompute_w_u_backward`).

    Attributes:
        beta_dtype: dtype of beta.
        state_v_first: h and dh are [..., V, K] rather than [..., K, V].
    """

    beta_dtype: str
    state_v_first: bool


@dataclass(frozen=True)
class DeltaHBackwardSpec(ChunkSpec):
    """The gradients of the states after chunks (`delta_h_backward`).

    Attributes:
        state_v_first: as in `StatePassSpec`.
        has_initial_state: whether dinitial_state is a result.
        has_final_state: whether the call has dfinal_state.
        tile_v, num_stages, products: as in `DeltaHSpec`.
    """

    state_v_first: bool
    has_initial_state: bool
    has_final_state: bool
    tile_v: int
    num_stages: int
    products: str = "mma"


@dataclass(frozen=True)
class OutputBackwardSpec(CheckedSpec):
    """The gradients of Aqk and v_new (`output_backward`): fields as in `ChunkSpec`."""

    dtype: str
    head_dim_v: int
    index_dtype: str


@dataclass(frozen=True)
class SegmentsSpec(CheckedSpec):
    """The states at the start of segments (`segments`).

    Attributes:
        tile_v: columns of V of a CTA.
        num_stages: stages of the ring in shared memory, each of one transition matrix.
        short_starts: as in `PassSpec`.
        dependent: as in `PassSpec`, for a pass of transitions.
    """

    head_dim_k: int
    head_dim_v: int
    index_dtype: str
    tile_v: int
    num_stages: int
    short_starts: bool = False
    dependent: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tile_v % 16 or self.head_dim_v % self.tile_v:
            raise ValueError(
                f"tile_v is {self.tile_v}, must be a multiple of 16 that divides "
                f"head_dim_v={self.head_dim_v}"
            )


@dataclass(frozen=True)
class ChainSpec(CheckedSpec):
    """Chains of transitions of spans (`chain`).

    Attributes:
        has_start: whether chains start from given matrices, rather than from 0.
    """

    head_dim_k: int
    head_dim_v: int
    has_start: bool
