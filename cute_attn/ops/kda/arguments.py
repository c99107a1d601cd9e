"""Checks of the KDA operators' arguments, and copies of tensors that kernels cannot read in place.

No function here copies device memory to the host.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...kernels.delta.chunk.spec import (
    BETA_DTYPES,
    CHUNK,
    DTYPES,
    GATE_DTYPES,
    HEAD_DIMS,
    HEAD_DIMS_V,
)
from ...kernels.delta.step.spec import DTYPES as STEP_DTYPES
from ...kernels.delta.step.spec import HEAD_DIMS as STEP_HEAD_DIMS
from ...kernels.delta.step.spec import HEAD_DIMS_V as STEP_HEAD_DIMS_V
from ..checks import (
    DTYPE_NAMES,
    check_dtype,
    check_dtypes_are,
    check_int32,
    check_tensor,
    exceeds,
    is_int,
)
from ..operator import is_compiling, plain

STATE_DTYPES = ("float32", "bfloat16")  # of a pool of states
INITIAL_STATE_DTYPES = (*STATE_DTYPES, "float16")  # those in 16 bits are converted to float32
INDEX_DTYPES = ("int32", "int64")
SAFE_LOWER_BOUNDS = (-5.0, 0.0)
MAX_TOKENS = 2**31 - CHUNK  # positions are int32 in a kernel
MAX_GRID_YZ = 65535  # heads and sequences are grid dimensions

_ALIGNMENT = 16  # bytes, for addresses and strides


# -- checks -------------------------------------------------------------------------------------


def check_dtypes(given: dict[str, Tensor], names: Sequence[str]) -> None:
    """Raise TypeError unless the first of `names` has a 16-bit dtype, and all others have its
    dtype."""
    first = given[names[0]]
    check_dtype(names[0], first, DTYPES)
    for name in names[1:]:
        if name in given and given[name].dtype != first.dtype:
            raise TypeError(f"{name} has dtype {given[name].dtype}, must be {first.dtype}")


def check_gate_and_beta_dtypes(given: dict[str, Tensor]) -> None:
    check_dtype("g", given["g"], GATE_DTYPES)
    if "beta" in given:
        check_dtype("beta", given["beta"], BETA_DTYPES)


class Sizes(dict[str, Any]):
    """The sizes of a call's dimensions by letter: B, T, HQK, HV, K, V, N, S."""

    def take(self, name: str, x: Tensor, shape: str) -> None:
        """Match x with a shape such as "B T HQK K": store sizes that are still unknown, and raise
        ValueError if a known size differs."""
        letters = shape.split()
        expected = [int(s) if s.isdecimal() else self.get(s) for s in letters]
        given = list(x.shape)
        if len(given) != len(letters) or any(
            size is not None and size != got for size, got in zip(expected, given, strict=True)
        ):
            known = [
                letter if size is None else size
                for letter, size in zip(letters, expected, strict=True)
            ]
            sizes = "[" + ", ".join(map(str, known)) + "]"
            names = "[" + ", ".join(letters) + "]"
            raise ValueError(
                f"{name} has shape {given}, must be {names}"
                + (f", here {sizes}" if sizes != names else "")
            )
        for letter, got in zip(letters, given, strict=True):
            if not letter.isdecimal():
                self[letter] = got

    def take_queries(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, shape: str) -> None:
        """`take` q and k, which have one shape. Where the two differ, and v or g agrees with k, the
        message names q."""
        tensors = [("q", q), ("k", k)]
        if q.shape != k.shape and len(k.shape) == len(v.shape) == len(shape.split()):
            rows = q.shape[:-2] != k.shape[:-2] == v.shape[:-2]
            dims = q.shape[-1:] != k.shape[-1:] == g.shape[-1:] and g.dim() == k.dim()
            if rows or dims:
                tensors.reverse()
        for name, x in tensors:
            self.take(name, x, shape)

    def check_heads(self) -> None:
        """Raise ValueError unless HV is a multiple of HQK and fits a grid dimension."""
        heads_qk, heads_v = self["HQK"], self["HV"]
        if (heads_qk == 0 and heads_v != 0) or (heads_qk != 0 and heads_v % heads_qk):
            raise ValueError(
                f"the head counts do not fit: {heads_v} value heads (HV) must be a multiple of the "
                f"{heads_qk} query and key heads (HQK)"
            )
        self.check_grid()

    def check_grid(self) -> None:
        if exceeds(self["HV"], MAX_GRID_YZ):
            raise ValueError(f"there are {self['HV']} value heads, must be at most {MAX_GRID_YZ}")

    def check_dims(
        self, dims_k: tuple[int, ...] = HEAD_DIMS, dims_v: tuple[int, ...] = HEAD_DIMS_V
    ) -> None:
        for letter, of, dims in (("K", "queries and keys", dims_k), ("V", "values", dims_v)):
            if letter in self and self[letter] not in dims:
                raise NotImplementedError(
                    f"the head dimension of {of} ({letter}) is {self[letter]}, there are kernels "
                    f"for: {dims}"
                )

    def check_sequences(self, cu_seqlens: Tensor | None) -> None:
        """Check cu_seqlens and the number of tokens, and store the number of sequences as N."""
        tokens = self["T"] if cu_seqlens is not None else self["B"] * self["T"]
        if exceeds(tokens, MAX_TOKENS):
            raise ValueError(f"there are {tokens} tokens, must be at most {MAX_TOKENS} in a call")
        if cu_seqlens is None:
            self["N"] = self["B"]
        else:
            check_dtype("cu_seqlens", cu_seqlens, INDEX_DTYPES)
            if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
                raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}, must be [N + 1]")
            if self["B"] != 1:
                raise ValueError(
                    f"there are {self['B']} batches (B), must be 1 where cu_seqlens is given: its "
                    "sequences are packed one after another in one"
                )
            self["N"] = cu_seqlens.shape[0] - 1
        if exceeds(self["N"], MAX_GRID_YZ):
            raise ValueError(
                f"there are {self['N']} sequences, must be at most {MAX_GRID_YZ} in a call"
            )

    def num_chunks(self, cu_seqlens: Tensor | None) -> Any:
        """Chunks of each sequence of a batch, or an upper bound on the chunks of all packed
        sequences."""
        if cu_seqlens is None:
            return (self["T"] + CHUNK - 1) // CHUNK
        return self["T"] // CHUNK + self["N"]


def count_chunks(cu_seqlens_cpu: Any, cu_seqlens: Any, x: Any) -> int | None:
    """The number of chunks of packed sequences, for a tensor x `[B, T, ...]`; None if
    cu_seqlens_cpu is None or cannot be read.

    Raises:
        TypeError, ValueError: cu_seqlens_cpu cannot be a copy of cu_seqlens.
    """
    if cu_seqlens_cpu is None or is_compiling():
        return None
    if not isinstance(x, Tensor) or x.is_nested or x.dim() != 4:
        return None  # another check refuses x
    return check_offsets_on_the_host(cu_seqlens_cpu, cu_seqlens, x.shape[1])


def check_offsets_on_the_host(cu_seqlens_cpu: Any, cu_seqlens: Any, tokens: Any) -> int | None:
    """Check cu_seqlens_cpu. Return the number of chunks, or None if cu_seqlens_cpu cannot be read.

    Raises:
        TypeError, ValueError: cu_seqlens_cpu cannot be a copy of cu_seqlens.
    """
    if cu_seqlens_cpu is None:
        return None
    check_tensor("cu_seqlens_cpu", cu_seqlens_cpu)
    if cu_seqlens is None:
        raise ValueError("cu_seqlens_cpu is given without cu_seqlens, of which it must be a copy")
    if not isinstance(cu_seqlens, Tensor):
        return None  # another check refuses cu_seqlens_cpu
    check_tensor("cu_seqlens", cu_seqlens)
    check_dtype("cu_seqlens_cpu", cu_seqlens_cpu, INDEX_DTYPES)
    if cu_seqlens_cpu.device.type != "cpu":
        raise ValueError(f"cu_seqlens_cpu is on {cu_seqlens_cpu.device}, must be on cpu")
    if cu_seqlens_cpu.shape != cu_seqlens.shape:
        raise ValueError(
            f"cu_seqlens_cpu has shape {list(cu_seqlens_cpu.shape)}, must be that of cu_seqlens, "
            f"{list(cu_seqlens.shape)}"
        )
    if is_compiling() or isinstance(cu_seqlens_cpu, FakeTensor):
        return None
    offsets = plain(cu_seqlens_cpu).tolist()
    chunks, start = 0, 0
    for i, end in enumerate(offsets):
        if end < start:
            raise ValueError(
                f"cu_seqlens_cpu[{i}] is {end}, must be at least "
                + ("0" if i == 0 else f"the offset before it, {start}")
            )
        if i:
            chunks += (end - start + CHUNK - 1) // CHUNK
        start = end
    if start > tokens:
        raise ValueError(f"cu_seqlens_cpu[{i}] is {start}, must be at most T, {tokens}")
    return chunks


def by_former_name(state_v_first: bool, transpose_state_layout: bool) -> bool:
    """state_v_first, given by the name that it had in flash-linear-attention before 0.6.

    Raises:
        ValueError: both names are given.
    """
    if state_v_first:
        raise ValueError(
            "transpose_state_layout is given with state_v_first, must be left out: it is the "
            "former name"
        )
    warnings.warn(  # flash-linear-attention's text
        "`transpose_state_layout` is deprecated and renamed to `state_v_first`.",
        DeprecationWarning,
        stacklevel=3,
    )
    return transpose_state_layout


def check_state(
    sizes: Sizes, state: Tensor | None, state_v_first: bool, name: str = "initial_state"
) -> None:
    if state is not None:
        check_dtype(name, state, INITIAL_STATE_DTYPES)
        sizes.take(name, state, "N HV V K" if state_v_first else "N HV K V")


def check_lower_bound(lower_bound: float | None) -> None:
    """Raise ValueError for a lower_bound that is not negative."""
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(
            f"lower_bound is {lower_bound}, must be less than 0 with use_gate_in_kernel: a state "
            "must not grow"
        )


def check_has_A_log(given: dict[str, Tensor], lower_bound: float | None) -> None:
    if "A_log" not in given and lower_bound is None:
        raise ValueError(
            "A_log is None, must be given with use_gate_in_kernel unless there is a lower_bound"
        )


def check_gate(
    given: dict[str, Tensor],
    sizes: Sizes,
    use_gate_in_kernel: bool,
    safe_gate: bool,
    lower_bound: float | None,
    head_gate: bool = False,
) -> None:
    """Check A_log, dt_bias and lower_bound, which are used only with use_gate_in_kernel."""
    if not use_gate_in_kernel:
        return
    check_has_A_log(given, lower_bound)
    check_lower_bound(lower_bound)
    if safe_gate:
        low, high = SAFE_LOWER_BOUNDS
        if lower_bound is None or not low <= lower_bound < high:
            raise ValueError(
                f"lower_bound is {lower_bound}, must be in [{low:g}, {high:g}) with safe_gate and "
                "use_gate_in_kernel"
            )
    of_bias = ("HV",) if head_gate else ("HV", "K")
    for name, letters in (("A_log", ("HV",)), ("dt_bias", of_bias)):
        if name not in given:
            continue
        x, count = given[name], math.prod(sizes[letter] for letter in letters)
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name} has dtype {x.dtype}, must be floating point")
        if x.numel() != count:
            raise ValueError(
                f"{name} has shape {list(x.shape)}, must have {' * '.join(letters)} = {count} "
                "elements"
            )


def check_beta_options(use_beta_sigmoid_in_kernel: Any, allow_neg_eigval: Any) -> None:
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval is True, must be False without use_beta_sigmoid_in_kernel: a beta "
            "that is given is used as it is"
        )


# Checks of the operators on a server's pool.


def check_slots(given: dict[str, Tensor], pad_slot_id: Any) -> None:
    """Check state_indices, has_initial_state and pad_slot_id, except for shapes."""
    if not is_int(pad_slot_id):
        raise TypeError(f"pad_slot_id must be an int, got {type(pad_slot_id).__name__}")
    if pad_slot_id > 0:
        raise ValueError(
            f"pad_slot_id is {pad_slot_id}, must be 0, or negative: negative indices are padding "
            "in any case"
        )
    if "state_indices" in given:
        indices = given["state_indices"]
        if indices.dtype != torch.int64:
            check_int32(given, ("state_indices",), "int32 or int64")
        if indices.dim() == 2 and indices.shape[1] > 1 and indices.stride(1) != 1:
            raise ValueError(
                f"state_indices has strides {indices.stride()}, the last dimension must be "
                "contiguous"
            )
    if "has_initial_state" in given and given["has_initial_state"].dtype != torch.bool:
        raise TypeError(
            f"has_initial_state has dtype {given['has_initial_state'].dtype}, must be torch.bool"
        )


# Checks of the operators that work token by token.


def check_step_dtypes(given: dict[str, Tensor]) -> None:
    for name in ("q", "g", "beta"):
        check_dtype(name, given[name], STEP_DTYPES)
    check_dtypes_are(given, ("k", "v", "out"), given["q"].dtype)


def check_step_shapes(
    sizes: Sizes,
    given: dict[str, Tensor],
    step: str,
    head_gate: bool = False,
    beta_columns: bool = False,
) -> None:
    """Check the shapes of q, k, v, g and beta; `step`, "B" or "B T", names their first
    dimensions. With beta_columns, beta has V numbers a head."""
    q, k, v, g = (given[name] for name in "qkvg")
    sizes.take_queries(q, k, v, g, f"{step} HQK K")
    sizes.take("v", given["v"], f"{step} HV V")
    sizes.check_heads()
    sizes.check_dims(STEP_HEAD_DIMS, STEP_HEAD_DIMS_V)
    sizes.take("g", given["g"], f"{step} HV" if head_gate else f"{step} HV K")
    sizes.take("beta", given["beta"], f"{step} HV V" if beta_columns else f"{step} HV")


# -- tensors as kernels read them ---------------------------------------------------------------


def readable(x: Tensor) -> Tensor:
    """x if a kernel can read x in place, else a view or a copy. Rows must be contiguous; the
    address and all other strides must be multiples of 16 bytes."""
    unit = _ALIGNMENT // x.element_size()
    shape, strides = x.shape, x.stride()
    fits = True
    for stride in strides[:-1]:
        fits = fits and stride % unit == 0
    if strides[-1] == 1 and x.data_ptr() % _ALIGNMENT == 0:
        if fits:
            return x
        # The stride of a dimension with one element may be anything.
        if all(n == 1 or s % unit == 0 for n, s in zip(shape[:-1], strides[:-1], strict=True)):
            mended = [0 if n == 1 else s for n, s in zip(shape[:-1], strides[:-1], strict=True)]
            return x.as_strided(shape, (*mended, 1))
    return _copied(x)


def contiguous(x: Tensor) -> Tensor:
    """x if it is contiguous and starts on a 16-byte boundary, else a copy."""
    if x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0:
        return x
    return _copied(x)


def _copied(x: Tensor) -> Tensor:
    if x.is_neg():  # a warm call looks here only: `check` then names the argument
        raise ValueError("a tensor is a negated view: call resolve_neg()")
    return x.clone(memory_format=torch.contiguous_format)


def readable_state(state: Tensor | None) -> Tensor | None:
    return None if state is None else contiguous(state.to(torch.float32))


def readable_parameters(a: Any) -> dict[str, Tensor | None]:
    """A_log and dt_bias of the arguments `a`, float32 and contiguous. The launch reshapes them to
    the kernel's number of dimensions."""
    A_log, dt_bias = (
        None if x is None else contiguous(x.to(torch.float32)) for x in (a.A_log, a.dt_bias)
    )
    dim = a.g.shape[-1]
    if dt_bias is not None and dt_bias.dim() == 2 and dt_bias.shape[1] != dim:
        dt_bias = dt_bias.view(-1, dim)
    return {"A_log": A_log, "dt_bias": dt_bias}


def readable_sequences(a: Any, rows: str) -> Any:
    """The arguments with the tensors named by the letters `rows`, and with A_log, dt_bias and
    cu_seqlens, copied where the kernels cannot read them in place."""
    changed: dict[str, Any] = {name: readable(getattr(a, name)) for name in rows}
    if a.use_gate_in_kernel:
        changed |= readable_parameters(a)
    if a.cu_seqlens is not None:
        changed["cu_seqlens"] = contiguous(a.cu_seqlens)
    return a._replace(**changed)


def unchanged(final_state: Tensor | None, initial_state: Tensor | None) -> Tensor | None:
    """Fill final_state, for sequences without tokens, with the initial state, or with 0."""
    if final_state is None:
        return None
    return final_state.zero_() if initial_state is None else final_state.copy_(initial_state)


def readable_parameter(x: Tensor | None, *shape: int) -> Tensor | None:
    """A_log or dt_bias in float32, contiguous, with the given shape."""
    if x is None:
        return None
    return contiguous(x.to(torch.float32) if x.shape == shape else x.float().reshape(shape))


def index_dtype(cu_seqlens: Tensor | None) -> str:
    return "none" if cu_seqlens is None else DTYPE_NAMES[cu_seqlens.dtype]


def gate_kind(use_gate_in_kernel: bool, lower_bound: Any) -> str:
    """The value of a Spec's field `gate`."""
    if not use_gate_in_kernel:
        return "none"
    return "softplus" if lower_bound is None else "lower_bound"


# -- plans and launches -------------------------------------------------------------------------


def sequence_plan(a: Any) -> dict[str, Any]:
    """The parameters that `plan_chunk_kda` and `plan_fused_recurrent_kda` share, from a call's
    arguments."""
    return {
        "dtype": DTYPE_NAMES[a.q.dtype],
        "gate_dtype": DTYPE_NAMES[a.g.dtype],
        "beta_dtype": DTYPE_NAMES[a.beta.dtype],
        "head_dim_k": a.q.shape[-1],
        "head_dim_v": a.v.shape[-1],
        "initial_state": a.initial_state is not None,
        "output_final_state": bool(a.output_final_state),
        "use_qk_l2norm_in_kernel": bool(a.use_qk_l2norm_in_kernel),
        "use_gate_in_kernel": bool(a.use_gate_in_kernel),
        "use_beta_sigmoid_in_kernel": bool(a.use_beta_sigmoid_in_kernel),
        "lower_bound": a.lower_bound is not None,
        "state_v_first": bool(a.state_v_first),
        "index_dtype": index_dtype(a.cu_seqlens),
        "A_log": a.A_log is not None,
        "dt_bias": a.dt_bias is not None,
    }


def slots_plan(a: Any) -> dict[str, Any]:
    """The parameters of plans that describe how a call reads state_indices."""
    if a.state_indices is None:
        return {}
    return {
        "slot_dtype": "int64" if a.state_indices.dtype == torch.int64 else "int32",
        "strided_slots": not a.state_indices.is_contiguous(),
        "null_slot": a.pad_slot_id == 0,
    }


def launch_scalars(a: Any) -> tuple[float, float, float]:
    """The kernels' scalar arguments: scale, the gate's lower bound, the factor of beta's
    sigmoid."""
    return (
        a.q.shape[-1] ** -0.5 if a.scale is None else float(a.scale),
        0.0 if a.lower_bound is None else float(a.lower_bound),
        2.0 if a.allow_neg_eigval else 1.0,
    )
