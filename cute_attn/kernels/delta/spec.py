"""What the Specs of all KDA kernels share. Importing this loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.spec import Spec

L2NORM_EPSILON = 1e-6  # added to the sum of squares

GATES = ("none", "softplus", "lower_bound")
DECAYS = ("channel", "head")  # what has a decay of its own: KDA, or Gated Delta Net
INDEX_DTYPES = ("none", "int32", "int64")
SLOT_DTYPES = ("int32", "int64")


@dataclass(frozen=True, kw_only=True)
class SlotsSpec(Spec):
    """How a kernel reads state_indices, the slots of a pool.

    Attributes:
        slot_dtype: dtype of state_indices.
        strided_slots: state_indices may have strides. The last dimension of `[B, 1 + S]` is
            contiguous in any case.
        null_slot: slot 0 is padding, as negative indices are.
        fresh: whether has_initial_state is given. Where it is False, a sequence starts from a
            state of 0, whatever its slot holds.
    """

    slot_dtype: str = "int32"
    strided_slots: bool = False
    null_slot: bool = False
    fresh: bool = False
