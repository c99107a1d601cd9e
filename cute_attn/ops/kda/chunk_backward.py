"""Kimi Delta Attention over whole sequences: the operator of the backward.

Three kernels, and sums of partial results. No sum has an order that depends on timing, so every run
gives the same bits:

    prepare        the records of the chunks, again
    adjoint_pass   the gradient of the state after each chunk; dinitial_state
    gradients      dq, dk, dv, dg, dbeta; partial sums of dA_log and ddt_bias
    sum_partials   dA_log, ddt_bias
    zero_unused    tokens of no sequence, which the other kernels do not write

The forward keeps its arguments, the state at the start of each chunk and the corrections v_new.
With disable_recompute the forward also keeps the records, and prepare does not run. If only
initial_state requires a gradient, the kernel `gradients` does not run.

Memory in bytes, allocated through torch. C is HV times the number of chunks of all sequences;
packed sequences count as T // 64 + N chunks:

    states, v_new        C (2 K V + 128 V)            kept
    records              C (128 (3 K + 128) + 4 K)    kept with disable_recompute, else a workspace
    inverse_norms        512 C HQK / HV               as records, with use_qk_l2norm_in_kernel
    adjoints             2 C K V                      a workspace
    parts of dA_log      4 C, 8 C in clusters of 2    a workspace, with A_log
    parts of ddt_bias    4 C K                        a workspace, with dt_bias

The records are freed before the results other than dv are allocated. If few long sequences are
split, as in the forward, each segment takes 4 (K + V) K bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ... import launch
from ...kernels.delta.table import HEAD_PREPARE
from ..checks import check_dtypes_are, check_flags, check_shapes
from ..operator import Operator
from .arguments import (
    Sizes,
    contiguous,
    launch_scalars,
    readable,
    readable_parameters,
    readable_state,
    sequence_plan,
    unchanged,
)
from .chunk_arguments import ChunkArguments, check
from .chunk_passes import Pass, empty_records, empty_states, empty_v_new, num_slots
from .chunk_plan import BackwardRequests, backward_requests

_empty = torch.empty
_empty_like = torch.empty_like
_contiguous = torch.contiguous_format
_Function = Callable[..., None]
_Gradients = tuple[Tensor | None, ...]

_INPUTS = ("q", "k", "v", "g", "beta")
_STATES = ("states", "v_new")
RECORDS = ("tiles", "decay", "inverse_norms")
_OPTIONS = (
    "initial_state", "cu_seqlens", "A_log", "dt_bias", "scale", "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "lower_bound",
    "state_v_first",
)  # fmt: skip

# The tensors that the forward saves for autograd.
SAVED = (*_INPUTS, *_OPTIONS, "disable_recompute", *_STATES, *RECORDS)


class BackwardArguments(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    do: Tensor
    states: Tensor
    v_new: Tensor
    dfinal_state: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    tiles: Tensor | None = None
    decay: Tensor | None = None
    inverse_norms: Tensor | None = None
    scale: float | None = None
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    lower_bound: float | None = None
    state_v_first: bool = False
    need_inputs: bool = True
    need_dA_log: bool = False
    need_ddt_bias: bool = False
    need_dinitial_state: bool = False

    @property
    def forward(self) -> ChunkArguments:
        """The arguments of the forward."""
        names = (*_INPUTS, *_OPTIONS)
        return ChunkArguments(**{name: getattr(self, name) for name in names})

    @property
    def from_tokens(self) -> bool:
        """Whether the call needs a gradient that the kernel `gradients` computes."""
        return bool(self.need_inputs or self.need_dA_log or self.need_ddt_bias)

    @property
    def of_gate(self) -> tuple[Tensor | None, Tensor | None]:
        """The kernels' arguments A_log and dt_bias, None if not used."""
        A, bias = (self.A_log, self.dt_bias) if self.use_gate_in_kernel else (None, None)
        gates = self.g.shape[2:]  # HV K, or HV alone
        return None if A is None else A.view(gates[:1]), None if bias is None else bias.view(gates)


class Ready(NamedTuple):
    """The loaded kernels, None for kernels not needed, and all values that calls with one key
    share."""

    prepare: _Function | None
    adjoint_pass: Pass
    gradients: _Function | None
    sum_A_log: _Function | None
    sum_dt_bias: _Function | None
    zero_unused: _Function | None
    scalars: tuple[float, float, float]
    cluster: int  # CTAs of `gradients` that share a chunk and a head
    per_head: bool  # whether prepare and adjoint_pass are those of `kernels.delta.chunk.per_head`


class Backward(Operator[BackwardArguments]):
    """The gradient of `chunk_kda`; a subclass computes the gradient of `chunk_gated_delta_rule`."""

    name = "chunk_kda_backward"
    of = "chunk_kda"
    decays: ClassVar[str] = "channel"  # what has a decay of its own, see `plan_chunk_kda`
    arguments = BackwardArguments
    results = (
        *((f"d{name}", "need_inputs") for name in _INPUTS),
        ("dA_log", "need_dA_log"),
        ("ddt_bias", "need_ddt_bias"),
        ("dinitial_state", "need_dinitial_state"),
    )

    def check(self, a: BackwardArguments, given: dict[str, Tensor]) -> None:
        self.check_forward(a.forward, given)
        needs = {name: getattr(a, name) for name in BackwardArguments._fields[-4:]}
        check_flags(**needs)
        if not any(needs.values()):
            raise ValueError(f"{', '.join(needs)} are False, one must be True")
        for name in ("A_log", "dt_bias", "initial_state"):
            if needs[f"need_d{name}"] and name not in given:
                raise ValueError(f"need_d{name} is True, it needs {name}")
        for name in ("A_log", "dt_bias"):
            if needs[f"need_d{name}"] and not a.use_gate_in_kernel:
                raise ValueError(f"need_d{name} is True, it needs use_gate_in_kernel")
        check_dtypes_are(given, ("do", *_STATES, "tiles"), a.q.dtype)
        check_dtypes_are(given, ("dfinal_state", "decay", "inverse_norms"), torch.float32)
        sizes = Sizes()
        sizes.take("q", a.q, "B T HQK K")
        sizes.take("v", a.v, "B T HV V")
        sizes.take("do", a.do, "B T HV V")
        sizes.check_sequences(a.cu_seqlens)
        if a.dfinal_state is not None:
            shape = "N HV V K" if a.state_v_first else "N HV K V"
            sizes.take("dfinal_state", a.dfinal_state, shape)
        kept = (*_STATES, *RECORDS)
        expected = {name: x for name, x in zip(kept, _kept(a), strict=True) if x is not None}
        records = [name for name in RECORDS if name in given]
        if records and records != [name for name in RECORDS if name in expected]:
            raise ValueError(
                f"{', '.join(records)} are given, must be all of "
                f"{', '.join(name for name in RECORDS if name in expected)}, or none"
            )
        check_shapes(given, {name: expected[name].shape for name in (*_STATES, *records)})

    def requests(self, arch: str, **options: Any) -> BackwardRequests:
        return backward_requests(arch, **options)

    def check_forward(self, a: ChunkArguments, given: dict[str, Tensor]) -> None:
        check(a, given)

    def prepare(self, a: BackwardArguments) -> Ready:
        return self.load(self.requests_of(a), a)

    def requests_of(self, a: BackwardArguments) -> BackwardRequests:
        """The kernels for these arguments."""
        plan = sequence_plan(a.forward)
        del plan["initial_state"], plan["output_final_state"]
        return self.requests(
            launch.arch_for(a.q.device),
            **plan,
            dfinal_state=a.dfinal_state is not None,
            dinitial_state=bool(a.need_dinitial_state),
            disable_recompute=a.tiles is not None,
            inputs=a.from_tokens,
            grouped=a.q.shape[2] != a.v.shape[2],
            split=None,
            decays=self.decays,
        )

    def load(self, requests: BackwardRequests, a: BackwardArguments) -> Ready:
        """Load the kernels for these arguments."""
        device = a.q.device

        def load(request: launch.Request | None) -> _Function | None:
            return None if request is None else launch.get_for(device, *request)

        return Ready(
            prepare=load(requests.prepare),
            adjoint_pass=Pass.load(device, requests.adjoint_pass),
            gradients=load(requests.gradients),
            sum_A_log=load(requests.sum_A_log if a.need_dA_log else None),
            sum_dt_bias=load(requests.sum_dt_bias if a.need_ddt_bias else None),
            zero_unused=load(requests.zero_unused),
            scalars=launch_scalars(a),
            cluster=requests.gradients[1].cluster if requests.gradients else 1,
            per_head=requests.prepare is not None and requests.prepare[0] is HEAD_PREPARE,
        )

    def key(self, a: BackwardArguments) -> tuple[Any, ...]:
        return (
            *a.q.shape[2:],
            *a.v.shape[2:],
            a.q.dtype,
            a.g.dtype,
            a.beta.dtype,
            a.q.get_device(),
            None if a.cu_seqlens is None else a.cu_seqlens.dtype,
            *(x is None for x in a[8:16]),
            *a[16:],
            type(a.scale),
            type(a.lower_bound),
            # No kernel's host code compares all these shapes. Keys of empty tensors are never in
            # the table.
            a.q.shape[:2] == a.v.shape[:2] == a.do.shape[:2],
            a.v.numel() > 0,
            *(x is None or x.shape[0] == _sequences(a) for x in (a.initial_state, a.dfinal_state)),
            a.cu_seqlens is None or (a.q.shape[0] == 1 and a.cu_seqlens.dim() == 1),
        )

    def launch(self, ready: Ready, a: BackwardArguments) -> _Gradients:
        # Unless kept, the records' memory is used for the results.
        return self.run_gradients(ready, a, *self.run_adjoints(ready, a, *self.prepared(ready, a)))

    def run_adjoints(
        self, ready: Ready, a: BackwardArguments, given: tuple[Tensor, ...], norms: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
        """Run the pass of the state's gradient. `given` and `norms` are the results of `prepared`.
        Return the last arguments of `run_gradients`."""
        of_chunks = a.q, a.v, a.cu_seqlens
        dinitial_state = _dinitial_state(a) if a.need_dinitial_state else None
        adjoints, dv = empty_states(*of_chunks), _empty_like(a.v, memory_format=_contiguous)
        ready.adjoint_pass.run_on(
            given, a.do, a.q.shape[3], (dv, adjoints, None), a.dfinal_state, dinitial_state,
            a.cu_seqlens,
        )  # fmt: skip
        return norms, dv, adjoints, dinitial_state

    def run_gradients(
        self, ready: Ready, a: BackwardArguments, inverse_norms: Tensor | None, dv: Tensor,
        adjoints: Tensor, dinitial_state: Tensor | None,
    ) -> _Gradients:  # fmt: skip
        """Compute all other gradients, and return all of them."""
        q, v, cu_seqlens = a.q, a.v, a.cu_seqlens
        A, bias = a.of_gate
        inputs = (q, a.k, a.g, a.beta, A, bias)
        if ready.gradients is None:
            return (None,) * 7 + (dinitial_state,)
        dq, dk, dg, dbeta = (
            _empty_like(x, memory_format=_contiguous) for x in (q, a.k, a.g, a.beta)
        )
        results = dq, dk, dv, dg, dbeta
        if ready.zero_unused is not None:
            _zero_unused(ready.zero_unused, results, cu_seqlens)
        slots, gates = num_slots(v, cu_seqlens), a.g.shape[2:]
        heads, per_head = gates[0], self.decays == "head"
        dA_log = ddt_bias = A_parts = bias_parts = None
        of_heads = slots, ready.cluster, heads
        if A is not None:
            A_parts = _empty(of_heads, dtype=torch.float32, device=v.device)
        if bias is not None:
            shape = of_heads if per_head else (slots, *gates)
            bias_parts = _empty(shape, dtype=torch.float32, device=v.device)
        ready.gradients(
            *inputs, inverse_norms, a.do, a.states, adjoints, a.v_new, dv, dq, dk, dg, dbeta,
            A_parts, bias_parts, cu_seqlens, *ready.scalars,
        )  # fmt: skip
        if ready.sum_A_log is not None and A_parts is not None:
            dA_log = _empty((heads,), dtype=torch.float32, device=v.device)
            ready.sum_A_log(A_parts.view(-1, 1, heads), dA_log[None])
        if ready.sum_dt_bias is not None and bias_parts is not None:
            ddt_bias = _empty(gates, dtype=torch.float32, device=v.device)
            if per_head:
                ready.sum_dt_bias(bias_parts.view(-1, 1, heads), ddt_bias[None])
            else:
                ready.sum_dt_bias(bias_parts, ddt_bias)
        return *(results if a.need_inputs else [None] * 5), dA_log, ddt_bias, dinitial_state

    def prepared(
        self, ready: Ready, a: BackwardArguments
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Prepare the chunks, unless they are kept. Return the pass's arguments up to `o`, and the
        inverse norms of q and k."""
        tiles, decay, inverse_norms = a.tiles, a.decay, a.inverse_norms
        if ready.prepare is not None:
            inputs = a.q, a.k, a.g, a.beta, *a.of_gate, a.cu_seqlens
            given = a.q, a.v, a.cu_seqlens
            tiles, decay, inverse_norms = empty_records(*given, a.use_qk_l2norm_in_kernel)
            ready.prepare(*inputs, tiles, decay, inverse_norms, *ready.scalars, None, None)
        assert tiles is not None and decay is not None
        return (a.do, tiles, decay), inverse_norms

    def outputs(self, a: BackwardArguments) -> _Gradients:
        inputs = [_empty_like(getattr(a, name), memory_format=_contiguous) for name in _INPUTS]
        heads = a.g.shape[2:]
        return (
            *(inputs if a.need_inputs else [None] * 5),
            a.q.new_empty(heads[:1], dtype=torch.float32) if a.need_dA_log else None,
            a.q.new_empty(heads, dtype=torch.float32) if a.need_ddt_bias else None,
            _dinitial_state(a) if a.need_dinitial_state else None,
        )

    def readable(self, a: BackwardArguments) -> BackwardArguments:
        rows = ("q", "k", "v", "do") if self.decays == "head" else ("q", "k", "v", "g", "do")
        changed: dict[str, Any] = {name: readable(getattr(a, name)) for name in rows}
        if a.use_gate_in_kernel:
            changed |= readable_parameters(a)
        for name in (*_STATES, *RECORDS, "cu_seqlens"):
            x = getattr(a, name)
            changed[name] = None if x is None else contiguous(x)
        for name in ("initial_state", "dfinal_state"):
            changed[name] = readable_state(getattr(a, name))
        return a._replace(**changed)

    def nothing(self, a: BackwardArguments) -> _Gradients | None:
        if a.v.numel() and (a.cu_seqlens is None or len(a.cu_seqlens) > 1):
            return None
        *inputs, dinitial_state = self.outputs(a)
        for x in inputs:
            if x is not None:
                x.zero_()
        return *inputs, unchanged(dinitial_state, a.dfinal_state)

    def backward(
        self,
        saved: Mapping[str, Any],
        gradients: Mapping[str, Tensor | None],
        needed: frozenset[str],
    ) -> Mapping[str, Tensor]:
        raise NotImplementedError(
            f"{self.of} has no second derivative: take the first one without create_graph=True"
        )

    def of_forward(
        self,
        saved: Mapping[str, Any],
        do: Tensor | None,
        dfinal_state: Tensor | None,
        needed: frozenset[str],
    ) -> dict[str, Tensor]:
        """The gradients of the forward's arguments named in `needed`.

        Args:
            saved: the tensors that `SAVED` names.
            do, dfinal_state: the gradients of o and final_state; None is 0.
        """
        a = {name: saved[name] for name in (*_INPUTS, *_OPTIONS, *_STATES) if name in saved}
        if saved.get("disable_recompute"):
            # A result that was not requested is a tensor without elements.
            records = RECORDS if saved["use_qk_l2norm_in_kernel"] else RECORDS[:2]
            a |= {name: saved[name] for name in records}
        if do is None:
            do = torch.zeros_like(saved["v"])
        needed = needed if saved["use_gate_in_kernel"] else needed - {"A_log", "dt_bias"}
        if not needed:
            return {}
        found = dict(
            zip(
                (*_INPUTS, "A_log", "dt_bias", "initial_state"),
                self.routed(
                    *BackwardArguments(
                        **a,
                        do=do,
                        dfinal_state=dfinal_state,
                        need_inputs=not needed.isdisjoint(_INPUTS),
                        need_dA_log="A_log" in needed,
                        need_ddt_bias="dt_bias" in needed,
                        need_dinitial_state="initial_state" in needed,
                    )
                ),
                strict=True,
            )
        )
        for name in ("A_log", "dt_bias", "initial_state"):  # convert from float32
            if name in needed:
                found[name] = found[name].to(saved[name].dtype).view(saved[name].shape)
        return {name: found[name] for name in needed}


def _sequences(a: BackwardArguments) -> int:
    return a.q.shape[0] if a.cu_seqlens is None else a.cu_seqlens.shape[0] - 1


def _dinitial_state(a: BackwardArguments) -> Tensor:
    dim_k, dim_v = a.q.shape[-1], a.v.shape[-1]
    matrix = (dim_v, dim_k) if a.state_v_first else (dim_k, dim_v)
    shape = (_sequences(a), a.v.shape[2], *matrix)
    return _empty(shape, dtype=torch.float32, device=a.v.device)


def _kept(a: BackwardArguments) -> tuple[Tensor | None, ...]:
    """Tensors of the shapes that a forward with disable_recompute keeps, without memory."""
    given = a.q.to("meta"), a.v.to("meta"), a.cu_seqlens
    records = empty_records(*given, a.use_qk_l2norm_in_kernel)
    return empty_states(*given), empty_v_new(*given), *records


def _zero_unused(kernel: _Function, results: tuple[Tensor, ...], cu_seqlens: Tensor | None) -> None:
    """Zero the tokens of no sequence in `results`, `[1, T, ...]`."""
    assert cu_seqlens is not None
    offsets = cu_seqlens.to(torch.int32)
    for x in results:
        row = x[0, 0].numel() * x.element_size()
        if row % 16:
            x.zero_()
        else:
            kernel(x.flatten(2).view(torch.int32), offsets, None)


BACKWARD = Backward()
