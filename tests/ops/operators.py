"""Every public operator with a good call on the CPU, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cute_attn
from cute_attn.ops import kda

BF16, INT32 = torch.bfloat16, torch.int32


@dataclass(frozen=True)
class Operator:
    """An operator, how to call it, and which arguments it writes."""

    function: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]
    arch: str = "sm_90a"
    written: tuple[str, ...] = ()

    @property
    def tensors(self) -> list[str]:
        return [name for name, x in self.arguments().items() if isinstance(x, Tensor)]

    @property
    def tensors_of_kernels(self) -> list[str]:
        """All but those that the host reads."""
        return [name for name in self.tensors if name != "cu_seqlens_cpu"]

    @property
    def floats(self) -> list[str]:
        given = self.arguments()
        return [name for name in self.tensors if given[name].is_floating_point()]

    def call(self, **changed: Any) -> Any:
        return self.function(**self.arguments() | changed)


def values(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.linspace(-1, 1, max(1, torch.Size(shape).numel())).view(shape).to(dtype)


def dense() -> dict[str, Any]:
    return {
        "q": values(2, 3, 4, 256),
        "k": values(2, 5, 2, 256),
        "v": values(2, 5, 2, 256),
        "learnable_sink": values(4, dtype=torch.float32),
        "return_lse": True,
    }


def splits() -> dict[str, Any]:
    return {
        "out_partial": values(3, 2, 5, 4, 64, dtype=torch.float32),
        "lse_partial": values(3, 2, 5, 4, dtype=torch.float32),
    }


def varlen() -> dict[str, Any]:
    return {
        "q": values(6, 4, 256),
        "k": values(10, 2, 256),
        "v": values(10, 2, 256),
        "cu_seqlens_q": torch.tensor([0, 2, 6], dtype=INT32),
        "cu_seqlens_k": torch.tensor([0, 5, 10], dtype=INT32),
        "seqused_q": torch.tensor([2, 3], dtype=INT32),
        "seqused_k": torch.tensor([4, 5], dtype=INT32),
        "learnable_sink": values(4, dtype=torch.float32),
    }


def into() -> dict[str, Any]:
    return varlen() | {"out": torch.zeros(6, 4, 256, dtype=BF16)}


def lightning() -> dict[str, Any]:
    return {
        "q": values(2, 2, 3, 64),
        "k": values(2, 2, 3, 64),
        "v": values(2, 2, 3, 64),
        "state": values(4, 3, 64, 64, dtype=torch.float32),
        "decay": values(3, dtype=torch.float32),
        "out": torch.zeros(2, 2, 3, 64, dtype=BF16),
        "state_indices": torch.tensor([3, 0], dtype=INT32),
        "num_accepted_tokens": torch.tensor([1, 2], dtype=INT32),
        "draft_k": values(4, 2, 3, 64),
        "draft_v": values(4, 2, 3, 64),
    }


def decode() -> dict[str, Any]:
    return {
        "q": values(2, 2, 2, 64),
        "k": values(2, 2, 2, 64),
        "v": values(2, 2, 4, 64),
        "g": values(2, 2, 4, 64, dtype=torch.float32),
        "beta": values(2, 2, 4),
        "state": values(4, 4, 64, 64, dtype=torch.float32),
        "A_log": values(4, dtype=torch.float32),
        "dt_bias": values(4, 64, dtype=torch.float32),
        "out": torch.zeros(2, 2, 4, 64, dtype=BF16),
        "state_indices": torch.tensor([3, 0], dtype=INT32),
        "num_accepted_tokens": torch.tensor([1, 2], dtype=INT32),
        "record_k": values(4, 2, 2, 64),
        "record_g": values(4, 2, 4, 64, dtype=torch.float32),
        "record_u": values(4, 2, 4, 64, dtype=torch.float32),
    }


def tokens() -> dict[str, Any]:
    return {
        "q": values(1, 5, 2, 64),
        "k": values(1, 5, 2, 64),
        "v": values(1, 5, 4, 64),
        "g": values(1, 5, 4, 64, dtype=torch.float32) - 1,
        "beta": values(1, 5, 4),
    }


def sequences() -> dict[str, Any]:
    return tokens() | {
        "initial_state": values(2, 4, 64, 64, dtype=torch.float32),
        "output_final_state": True,
        "use_gate_in_kernel": True,
        "A_log": values(4, dtype=torch.float32),
        "dt_bias": values(4, 64, dtype=torch.float32),
        "cu_seqlens": torch.tensor([0, 2, 5]),
    }


def in_pool() -> dict[str, Any]:
    given = sequences()
    del given["output_final_state"]
    return given | {
        "initial_state": values(4, 4, 64, 64, dtype=torch.float32),
        "state_indices": torch.tensor([3, 0], dtype=INT32),
        "checkpoint_indices": torch.tensor([[2], [-1]], dtype=INT32),
    }


def gate() -> dict[str, Any]:
    given = sequences()
    names = ("g", "A_log", "dt_bias", "use_gate_in_kernel", "cu_seqlens")
    return {name: given[name] for name in names}


def intra() -> dict[str, Any]:
    return tokens() | {"cu_seqlens": torch.tensor([0, 2, 5])}


def recompute() -> dict[str, Any]:
    return intra() | {"Akk": values(1, 5, 4, 64)}


def delta_h() -> dict[str, Any]:
    given = sequences()
    return {
        "kg": values(1, 5, 4, 64),
        "w": values(1, 5, 4, 64),
        "u": values(1, 5, 4, 64),
        **{name: given[name] for name in ("g", "initial_state", "cu_seqlens")},
        "cu_seqlens_cpu": given["cu_seqlens"].clone(),
    }


def output() -> dict[str, Any]:
    given = sequences()
    return {
        **{name: given[name] for name in ("q", "g", "cu_seqlens")},
        "v_new": values(1, 5, 4, 64),
        "Aqk": values(1, 5, 4, 64),
        "h": values(1, 2, 4, 64, 64),
    }


def float32s(*names: str) -> dict[str, Any]:
    """Gradients of `[1, 5, 4, 64]`."""
    return {name: values(1, 5, 4, 64, dtype=torch.float32) for name in names}


def gate_backward() -> dict[str, Any]:
    return gate() | float32s("dg")


def intra_backward() -> dict[str, Any]:
    given = intra()
    del given["v"]
    found = given | float32s("dAqk", "dAkk", "dq", "dk", "dg")
    return found | {"dbeta": values(1, 5, 4, dtype=torch.float32)}


def recompute_backward() -> dict[str, Any]:
    return recompute() | {
        **{name: values(1, 5, 4, 64) for name in ("v_new", "do", "dv")},
        **{name: values(1, 2, 4, 64, 64) for name in ("h", "dh")},
    }


def delta_h_backward() -> dict[str, Any]:
    given = delta_h()
    del given["u"]
    given["dfinal_state"] = given.pop("initial_state")
    return given | {name: values(1, 5, 4, 64) for name in ("qg", "do", "dv")}


def output_backward() -> dict[str, Any]:
    given = output()
    names = ("v_new", "Aqk", "cu_seqlens")
    return {name: given[name] for name in names} | {"do": values(1, 5, 4, 64), "scale": 0.5}


OPERATORS: dict[str, Operator] = {
    "flash_attn_func": Operator(cute_attn.flash_attn_func, dense, "sm_100a"),
    "flash_attn_varlen_func": Operator(cute_attn.flash_attn_varlen_func, varlen, "sm_100a"),
    "flash_attn_out": Operator(cute_attn.flash_attn_varlen_func, into, "sm_100a", written=("out",)),
    "flash_attn_combine": Operator(cute_attn.flash_attn_combine, splits),
    "lightning_attn_decode": Operator(
        cute_attn.lightning_attn_decode, lightning, written=("state", "out")
    ),
    "kda_decode": Operator(
        cute_attn.kda_decode,
        decode,
        written=("state", "out", "record_k", "record_g", "record_u"),
    ),
    "fused_recurrent_kda": Operator(cute_attn.fused_recurrent_kda, sequences),
    "chunk_kda": Operator(
        cute_attn.chunk_kda, lambda: sequences() | {"cu_seqlens_cpu": torch.tensor([0, 2, 5])}
    ),
    "chunk_kda_in_pool": Operator(cute_attn.chunk_kda, in_pool, written=("initial_state",)),
    "kda_gate_cumsum": Operator(kda.kda_gate_cumsum, gate),
    "kda_chunk_intra": Operator(kda.kda_chunk_intra, intra),
    "kda_recompute_w_u": Operator(kda.kda_recompute_w_u, recompute),
    "kda_chunk_delta_h": Operator(kda.kda_chunk_delta_h, delta_h),
    "kda_chunk_output": Operator(kda.kda_chunk_output, output),
    "kda_chunk_output_backward": Operator(kda.kda_chunk_output_backward, output_backward),
    "kda_chunk_delta_h_backward": Operator(kda.kda_chunk_delta_h_backward, delta_h_backward),
    "kda_recompute_w_u_backward": Operator(kda.kda_recompute_w_u_backward, recompute_backward),
    "kda_chunk_intra_backward": Operator(kda.kda_chunk_intra_backward, intra_backward),
    "kda_gate_cumsum_backward": Operator(kda.kda_gate_cumsum_backward, gate_backward),
}


# Those with a gradient, with respect to all of their floating-point arguments.
DIFFERENTIABLE = ("flash_attn_func", "flash_attn_varlen_func", "chunk_kda")


def tensors_in(results: Any) -> list[Tensor]:
    """The tensors that an operator returned."""
    if isinstance(results, Tensor):
        return [results]
    return [x for x in results if isinstance(x, Tensor)]
