"""What stands in for the kernels of chunk_kda where a test is about the operators around them.

Each is known by the memory that it writes: a kernel that is given this memory knows what it was
made from, and computes from that, in float64, what the kernel of its name does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cute_attn.cache import KernelDef
from cute_attn.emulation import Emulation
from cute_attn.kernels.common.table import SUM_PARTIALS, ZERO_UNUSED
from cute_attn.kernels.delta import table
from cute_attn.kernels.delta.chunk.spec import CHUNK, record_elements
from cute_attn.reference.kda import KdaGradients, kda_reference
from cute_attn.reference.kda import kda_gradients as of_this_thread


def kda_gradients(**arguments: Any) -> KdaGradients:
    """The reference in a thread of its own: a kernel runs below autograd, in which none works."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(of_this_thread, **arguments).result()


class StandIns:
    """The kernels that were launched, in order: their names, specs and arguments.

    Attributes:
        copied: whether the caller copies and compares what one kernel leaves to another. Then it
            holds 0 rather than NaN, and memory that no kernel wrote counts as the last of its kind.
    """

    def __init__(self) -> None:
        self.copied = False
        self.launched: list[tuple[str, Any, tuple[Any, ...]]] = []
        self._made: dict[tuple[str, int], dict[str, Any]] = {}
        self._last: dict[str, dict[str, Any]] = {}

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.launched]

    def function(self, _: Emulation, kernel: KernelDef, spec: Any) -> Callable[..., None]:
        run = {
            table.PREPARE.name: self._prepare,
            table.STATE_PASS.name: self._state_pass,
            table.ADJOINT_PASS.name: self._adjoint_pass,
            table.GRADIENTS.name: self._gradients,
            SUM_PARTIALS.name: self._sum_partials,
            ZERO_UNUSED.name: self._zero_unused,
        }[kernel.name]

        def call(*args: Any) -> None:
            for x in args:
                rows = isinstance(x, Tensor) and x.dim() == 4
                if rows and (x.stride(-1) != 1 or x.data_ptr() % 16):
                    raise ValueError(f"host code refuses strides {x.stride()}")
            run(spec, *args)
            self.launched.append((kernel.name, spec, args))

        return call

    def _make(self, kind: str, x: Tensor | None, **of: Any) -> None:
        if x is not None:
            x.fill_(0.0 if self.copied else math.nan)
            self._made[kind, x.data_ptr()] = self._last[kind] = of

    def _of(self, kind: str, x: Tensor) -> dict[str, Any]:
        at = kind, x.data_ptr()
        return dict(self._last[kind] if self.copied and at not in self._made else self._made[at])

    # -- the forward

    def _prepare(
        self, spec: Any, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, A: Tensor | None,
        bias: Tensor | None, cu_seqlens: Tensor | None, tiles: Tensor, decay: Tensor,
        inverse_norms: Tensor | None, scale: float, bound: float, beta_scale: float,
        *no_starts: None,
    ) -> None:  # fmt: skip
        assert no_starts == (None, None)
        assert (spec.has_A_log, spec.has_dt_bias) == (A is not None, bias is not None)
        heads, dim_k = g.shape[2:]
        slots = q.shape[0] * -(-q.shape[1] // CHUNK)
        if cu_seqlens is not None:
            slots = q.shape[1] // CHUNK + len(cu_seqlens) - 1
        assert tiles.shape == (slots, heads, record_elements(dim_k))
        assert decay.shape == (slots, heads, dim_k)
        assert spec.store_norms == (inverse_norms is not None)
        if inverse_norms is not None:
            assert inverse_norms.shape == (slots, q.shape[2], 2 * CHUNK)
            assert inverse_norms.dtype == torch.float32
        options = {
            "scale": scale,
            "use_qk_l2norm_in_kernel": spec.l2norm,
            "use_gate_in_kernel": spec.gate != "none",
            "use_beta_sigmoid_in_kernel": spec.beta_sigmoid,
            "allow_neg_eigval": beta_scale == 2.0,
            "lower_bound": bound if spec.gate == "lower_bound" else None,
            "A_log": A,
            "dt_bias": bias,
            "cu_seqlens": cu_seqlens,
        }
        of = {"q": q, "k": k, "g": g, "beta": beta} | options
        self._make("tiles", tiles, of=of, for_backward=spec.for_backward)
        self._make("decay", decay, of=of)
        self._make("inverse_norms", inverse_norms, of=of)

    def _recorded(self, tiles: Tensor, decay: Tensor) -> dict[str, Any]:
        of = self._of("tiles", tiles)
        assert self._of("decay", decay)["of"] is of["of"]
        return of

    def _state_pass(
        self, spec: Any, v: Tensor, tiles: Tensor, decay: Tensor, o: Tensor,
        states: Tensor | None, v_new: Tensor | None, initial_state: Tensor | None,
        final_state: Tensor | None, *rest: Any,
    ) -> None:  # fmt: skip
        of = self._recorded(tiles, decay)
        assert spec.store_states == (states is not None) == (v_new is not None)
        assert of["for_backward"] == spec.store_states
        assert spec.has_initial_state == (initial_state is not None)
        assert spec.has_final_state == (final_state is not None)
        assert is_same(rest[0], of["of"]["cu_seqlens"])
        assert rest[1:] == (None, None, 0, 1, None, None)
        options = {"initial_state": initial_state, "state_v_first": spec.state_v_first}
        found = kda_reference(**of["of"], v=v, **options)
        o.copy_(found.o)
        if final_state is not None:
            final_state.copy_(found.final_state)
        if states is not None and v_new is not None:
            slots, heads, dim_k = decay.shape
            assert states.shape == (slots, heads, v.shape[3] * dim_k)
            assert v_new.shape == (slots, heads, v.shape[3] * CHUNK)
        self._make("states", states, of=of["of"], v=v, **options)
        self._make("v_new", v_new, of=of["of"], v=v, **options)

    # -- the backward

    def _adjoint_pass(
        self, spec: Any, do: Tensor, tiles: Tensor, decay: Tensor, dv: Tensor, adjoints: Tensor,
        v_new: None, dfinal_state: Tensor | None, dinitial_state: Tensor | None, *rest: Any,
    ) -> None:  # fmt: skip
        of = self._recorded(tiles, decay)
        assert dv.shape == do.shape and v_new is None
        assert spec.has_final_state == (dfinal_state is not None)
        assert spec.has_initial_state == (dinitial_state is not None)
        assert of["for_backward"]
        assert is_same(rest[0], of["of"]["cu_seqlens"])
        assert rest[1:] == (None, None, 0, 1, None, None)
        if dinitial_state is not None:
            found = kda_gradients(
                **of["of"], v=torch.zeros_like(do), do=do, dfinal_state=dfinal_state,
                initial_state=torch.zeros_like(dinitial_state), state_v_first=spec.state_v_first,
            )  # fmt: skip
            assert found.dinitial_state is not None
            dinitial_state.copy_(found.dinitial_state)
        self._make("adjoints", adjoints, of=of["of"], do=do, dfinal_state=dfinal_state)
        self._make("dv", dv, of=of["of"], do=do, dfinal_state=dfinal_state)

    def _gradients(
        self, spec: Any, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, A: Tensor | None,
        bias: Tensor | None, inverse_norms: Tensor | None, do: Tensor, states: Tensor,
        adjoints: Tensor, v_new: Tensor, dv: Tensor, dq: Tensor, dk: Tensor, dg: Tensor,
        dbeta: Tensor, A_parts: Tensor | None, bias_parts: Tensor | None,
        cu_seqlens: Tensor | None, scale: float, bound: float, beta_scale: float,
    ) -> None:  # fmt: skip
        of_states, of_adjoints = self._of("states", states), self._of("adjoints", adjoints)
        of = of_adjoints["of"]
        assert self._of("v_new", v_new) == of_states and self._of("dv", dv) == of_adjoints
        given = {"q": q, "k": k, "g": g, "beta": beta, "cu_seqlens": cu_seqlens}
        assert all(is_same(x, of[name]) for name, x in given.items())
        # The states are from the forward, the adjoints from records that may be the backward's own.
        torch.testing.assert_close(of_states.pop("of"), of, rtol=0, atol=0, equal_nan=True)
        del of_adjoints["of"]
        assert (inverse_norms is not None) == spec.l2norm
        if inverse_norms is not None:
            assert self._of("inverse_norms", inverse_norms)["of"] == of
        assert is_same(of_adjoints["do"], do) and scale == of["scale"]
        assert spec.l2norm == of["use_qk_l2norm_in_kernel"]
        assert beta_scale == (2.0 if of["allow_neg_eigval"] else 1.0)
        assert bound == (of["lower_bound"] or 0.0)
        found = kda_gradients(**of, **of_states, **of_adjoints)
        for x, exact in zip((dq, dk, dv, dg, dbeta), found, strict=False):
            used = slice(None) if cu_seqlens is None else slice(cu_seqlens[0], cu_seqlens[-1])
            assert x.shape == exact.shape
            x[:, used] = exact[:, used].to(x.dtype)
        for parts, exact in ((A_parts, found.dA_log), (bias_parts, found.ddt_bias)):
            assert (parts is None) == (exact is None)
            if parts is not None and exact is not None:
                assert parts.dtype == torch.float32 and len(parts) == len(states)
                exact = exact.view(parts.shape[-1 if parts is A_parts else 1 :])
                parts.copy_(exact * (exact.numel() / parts.numel()))

    def _sum_partials(self, spec: Any, partials: Tensor, out: Tensor) -> None:
        assert partials.is_contiguous() and partials.dtype == torch.float32
        assert partials.shape[-1] % spec.vector == 0
        out.copy_(partials.double().sum(0))

    def _zero_unused(self, spec: Any, x: Tensor, cu_seqlens: Tensor, seqused: None) -> None:
        assert x.dtype == cu_seqlens.dtype == torch.int32 and seqused is None
        x[:, : cu_seqlens[0]] = 0
        x[:, cu_seqlens[-1] :] = 0


def is_same(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether both are the same memory, or None."""
    if x is None or y is None:
        return x is y
    return (x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride())


@contextmanager
def stand_ins() -> Iterator[StandIns]:
    """Within it, no kernel of chunk_kda is compiled."""
    found = StandIns()
    with mock.patch.object(Emulation, "function", lambda *args: found.function(*args)):
        yield found
