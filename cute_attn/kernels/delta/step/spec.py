"""Specs of the token-by-token kernels, of KDA and the Gated Delta Net. Importing this loads no
compiler."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...common.spec import VECTOR_BYTES, WARP_SIZE, Spec
from ..spec import DECAYS, GATES, INDEX_DTYPES, SLOT_DTYPES, SlotsSpec

DTYPES = ("bfloat16", "float16", "float32")
STATE_DTYPES = ("float32", "bfloat16")
PARAMETER_DTYPES = ("float32", "bfloat16")
HEAD_DIMS = (64, 128, 256)  # K
HEAD_DIMS_V = (64, 128, 192, 256)
SLOTS = ("batch", "indexed", "positions", "records", "drafts")
HINTS = ("none", "hold")
CONV_TAPS = 4  # of the causal convolution

ALLOWED: dict[str, tuple[object, ...]] = {
    "dtype": DTYPES,
    "gate_dtype": DTYPES,
    "beta_dtype": DTYPES,
    "state_dtype": STATE_DTYPES,
    "A_log_dtype": ("none", *PARAMETER_DTYPES),
    "dt_bias_dtype": ("none", *PARAMETER_DTYPES),
    "dt_bias_dims": (0, 1, 2),
    "head_dim_k": HEAD_DIMS,
    "head_dim_v": HEAD_DIMS_V,
    "gate": GATES,
    "decays": DECAYS,
    "slots": SLOTS,
    "hints": HINTS,
    "index_dtype": INDEX_DTYPES,
    "slot_dtype": SLOT_DTYPES,
    "conv_dtype": ("none", *DTYPES),
    "gk_dtype": ("none", *DTYPES),
    "gv_dtype": ("none", *DTYPES),
}

MAX_REGISTERS = 160  # of a thread's 255 registers, the most for its part of the state


@dataclass(frozen=True)
class StepSpec(Spec):
    """The compile-time parameters that all token-by-token kernels share.

    The first group of fields describes the caller's tensors. The second group is the tuning that
    `heuristics` picks; any legal choice computes the same function.

    Attributes:
        dtype: dtype of q, k, v and o.
        gate_dtype, beta_dtype: dtypes of g and beta.
        state_dtype: dtype of the state in memory; arithmetic is always float32.
        A_log_dtype, dt_bias_dtype: dtypes of the gate's parameters; "none" for an absent parameter.
        dt_bias_dims: 1 for [HV * K], 2 for [HV, K], 0 without dt_bias.
        decays: what has a decay of its own: "channel" (g has K numbers a head, as in KDA), or
            "head" (g has one number a head, as in the Gated Delta Net, and dt_bias is [HV]).
        gk_dtype: dtype of gk, which adds a gate for each channel to a head's gate (decays="head");
            "none" without gk.
        gv_dtype: dtype of gv, a gate for each column of V; "none" without gv.
        beta_columns: beta has V numbers a head, one for each column.
        head_dim_k, head_dim_v: K and V.
        state_v_first: states are [N, HV, V, K] (K contiguous) rather than [N, HV, K, V].
        gate: "none" (g is the logarithm of the decay), "softplus" or "lower_bound" (g is the input
            of this gate, see `gates`).
        l2norm: q and k are normalised.
        beta_sigmoid: beta is the input of a sigmoid.
        tile_v: columns of V per CTA.
        num_warps: warps of a CTA. A warp has some of the tile's columns of V and all of K, so no
            sum crosses warps.
        lanes_per_row: lanes of a warp along the contiguous dimension of the state.
        blocks_per_sm: CTAs per SM for which the compiler limits registers; 0 for no limit.
        hints: cache hints of the state's loads and stores. "hold": L2 keeps a line from its load
            (evict_last) to its store (evict_normal), for states that are updated in place.

    Raises:
        TypeError: a field has another type than its annotation.
        ValueError: a combination of fields is not supported; the message names the field.
    """

    ALLOWED = ALLOWED

    dtype: str
    gate_dtype: str
    beta_dtype: str
    state_dtype: str
    A_log_dtype: str
    dt_bias_dtype: str
    dt_bias_dims: int
    head_dim_k: int
    head_dim_v: int
    state_v_first: bool
    gate: str
    l2norm: bool
    beta_sigmoid: bool

    tile_v: int
    num_warps: int
    lanes_per_row: int
    blocks_per_sm: int
    hints: str

    decays: str = field(default="channel", kw_only=True)
    gk_dtype: str = field(default="none", kw_only=True)
    gv_dtype: str = field(default="none", kw_only=True)
    beta_columns: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_gate and self.dt_bias_dims == 2:
            raise ValueError("dt_bias_dims is 2, must be 0 or 1 with decays='head'")
        if self.gk_dtype != "none" and not self.head_gate:
            raise ValueError(f"gk_dtype is {self.gk_dtype!r}, must be 'none' with decays='channel'")
        if self.gate == "none" and (self.A_log_dtype, self.dt_bias_dtype) != ("none", "none"):
            raise ValueError("A_log_dtype and dt_bias_dtype must be 'none' where gate is 'none'")
        if self.gate == "softplus" and self.A_log_dtype == "none":
            raise ValueError("A_log_dtype is 'none', which gate='softplus' has no formula for")
        if (self.dt_bias_dims == 0) != (self.dt_bias_dtype == "none"):
            raise ValueError(
                f"dt_bias_dims is {self.dt_bias_dims} with dt_bias_dtype={self.dt_bias_dtype!r}"
            )
        if self.head_dim_v % self.tile_v:
            raise ValueError(f"tile_v is {self.tile_v}, must divide head_dim_v={self.head_dim_v}")
        if self.lanes_per_row not in (1, 2, 4, 8, 16, 32) or self.lanes_of_k < 2:
            raise ValueError(
                f"lanes_per_row is {self.lanes_per_row}, must be a power of two that leaves at "
                "least 2 lanes along K"
            )
        row = self.vector * self.lanes_per_row
        if self.state_v_first:
            fits = self.head_dim_k % row == 0 and (
                self.tile_v % (self.num_warps * self.rows_per_step) == 0
            )
        else:
            fits = self.tile_v == self.num_warps * row and self.head_dim_k % self.rows_per_step == 0
        if not fits:
            raise ValueError(
                f"a tile of {self.tile_v} columns of V does not divide over {self.num_warps} warps "
                f"with {self.lanes_per_row} lanes a row"
            )
        if self.values_of_v & (self.values_of_v - 1):
            raise ValueError(f"{self.values_of_v} rows of V a thread, must be a power of two")
        if self.values_of_k * self.values_of_v > MAX_REGISTERS:
            raise ValueError(
                f"tile_v={self.tile_v} over {self.num_warps} warps needs "
                f"{self.values_of_k * self.values_of_v} registers a thread for the state, more "
                f"than {MAX_REGISTERS}: use more warps or a smaller tile"
            )

    @property
    def carveout(self) -> int | None:
        """Percent of an SM's memory that is to be shared memory; None leaves it to the driver.

        A number for several CTAs per SM, for which the compiler would ask a CUDA driver.
        """
        return 25 if self.blocks_per_sm > 1 else None

    @property
    def vector(self) -> int:
        """State elements of a 16-byte access."""
        return VECTOR_BYTES // (4 if self.state_dtype == "float32" else 2)

    @property
    def rows_per_step(self) -> int:
        """Rows of the state that a warp covers with one access."""
        return WARP_SIZE // self.lanes_per_row

    @property
    def lanes_of_k(self) -> int:
        """Lanes that share a column of V, and reduce over K."""
        return self.lanes_per_row if self.state_v_first else self.rows_per_step

    @property
    def values_of_k(self) -> int:
        """Indices of K that a thread holds."""
        return self.head_dim_k // self.lanes_of_k

    @property
    def values_of_v(self) -> int:
        """Indices of V that a thread holds."""
        if self.state_v_first:
            return self.tile_v // (self.num_warps * self.rows_per_step)
        return self.vector

    @property
    def head_gate(self) -> bool:
        return self.decays == "head"

    @property
    def gates_of_head(self) -> int:
        """Numbers of g of a head."""
        return 1 if self.head_gate else self.head_dim_k

    @property
    def one_decay(self) -> bool:
        """Whether a token has one decay for all of the state."""
        return self.head_gate and self.gk_dtype == "none"

    @property
    def num_threads(self) -> int:
        return self.num_warps * WARP_SIZE


@dataclass(frozen=True)
class DecodeSpec(StepSpec, SlotsSpec):
    """The compile-time parameters of `decode`.

    Attributes:
        multi_token: tensors are [B, T, H, D] and T is an argument; otherwise [B, H, D].
        slots: how states are found: "batch" (sequence b has slot b), "indexed" (an index per
            sequence), "positions" (an index per position of each sequence), "records" (records of
            drafted tokens), or "drafts" (the state after each token goes to another tensor). The
            last two are "batch" or "indexed", as `indexed` says.
        indexed: whether state_indices is given; only "records" and "drafts" leave the choice.
        accepted: whether num_accepted is given; only "positions" leaves the choice.
        index_dtype: dtype of cu_seqlens; "none" where sequences are not packed.
        conv_dtype: dtype of conv_weight; "none" for q, k and v that are used as they are.
        conv_bias: whether conv_bias is given.
    """

    multi_token: bool
    slots: str
    indexed: bool
    accepted: bool
    index_dtype: str = "none"
    conv_dtype: str = "none"
    conv_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.gk_dtype, self.gv_dtype, self.beta_columns) != ("none", "none", False):
            raise ValueError("gk_dtype, gv_dtype and beta_columns are for RecurrentSpec only")
        if self.slots in ("positions", "records", "drafts") and not self.multi_token:
            raise ValueError(f"slots={self.slots!r} needs multi_token: tokens as [B, T, H, D]")
        if self.index_dtype != "none" and (self.slots == "records" or not self.multi_token):
            raise ValueError(
                f"index_dtype is {self.index_dtype!r}, must be 'none' with slots='records' or "
                "without multi_token"
            )
        if self.slots not in ("records", "drafts") and self.indexed != (self.slots != "batch"):
            raise ValueError(f"indexed is {self.indexed} with slots={self.slots!r}")
        if self.accepted != (self.slots == "records") and self.slots != "positions":
            raise ValueError(f"accepted is {self.accepted} with slots={self.slots!r}")
        if self.conv_dtype == "none" and self.conv_bias:
            raise ValueError("conv_bias is True, must be False where conv_dtype is 'none'")


@dataclass(frozen=True)
class RecordsSpec(SlotsSpec):
    """The copy of drafted k and g into the records (`records`)."""

    ALLOWED = ALLOWED

    dtype: str
    gate_dtype: str
    head_dim_k: int
    indexed: bool
    decays: str = "channel"

    @property
    def head_gate(self) -> bool:
        return self.decays == "head"


@dataclass(frozen=True)
class RecurrentSpec(StepSpec):
    """The compile-time parameters of `recurrent`.

    Attributes:
        index_dtype: dtype of cu_seqlens; "none" where sequences are not packed.
        has_initial_state, has_final_state: whether the call has these tensors.
    """

    index_dtype: str
    has_initial_state: bool
    has_final_state: bool
