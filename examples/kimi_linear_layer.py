"""A Kimi Linear attention layer in an inference server: prefill in chunks, then decode.

    python examples/kimi_linear_layer.py

What it shows:

- the layer of the paper (arXiv 2510.26692): short convolutions, Kimi Delta Attention with grouped
  value heads, a gated norm; the kernels apply the gate, the normalisation of q and k and beta's
  sigmoid;
- q, k and v as views of one convolved projection, read in place;
- prefill: prompts of different lengths are packed, and long ones are split into pieces. `chunk_kda`
  starts from the states after the previous piece, which are in a pool of slots;
- decode: `kda_decode` updates slots of the same pool in place; slot -1 marks a row of padding. On a
  GPU it runs in a CUDA graph, captured once and replayed for every token;
- neither operator waits for the device, nor needs on the host how the prompts are packed.

At the end all outputs of the operators are compared with the float64 reference, which runs from the
first prompt token to the last decoded one. Their errors are compared with those of plain PyTorch.
Without a GPU the kernels run in the emulator, with every check on.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import cute_attn
from cute_attn.emulator import EmulatorUnavailable
from cute_attn.reference.kda import kda_chunk_reference, kda_decode_reference

WIDTH = 128  # of the hidden states: small
CONVOLUTION = 4  # tokens that a short convolution sees
LOWER_BOUND = -5.0  # of the gate's logarithm
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """How large a problem is."""

    heads: int = 16  # of q and k
    heads_v: int = 32
    head_dim: int = 128
    prompts: tuple[int, ...] = (1000, 300, 4, 777)  # tokens
    piece: int = 512  # tokens of a prompt that are prefilled at a time
    steps: int = 8  # of decode


SMALL = Sizes(heads=1, heads_v=2, head_dim=64, prompts=(100, 9), piece=70, steps=2)


class KimiDeltaAttention(torch.nn.Module):
    """The layer, with the state that a server keeps for each slot."""

    def __init__(self, sizes: Sizes, slots: int):
        super().__init__()
        self.sizes = sizes
        heads, heads_v, dim = sizes.heads, sizes.heads_v, sizes.head_dim
        self.widths = [heads * dim, heads * dim, heads_v * dim]
        self.qkv = torch.nn.Linear(WIDTH, sum(self.widths), bias=False)
        self.taps = torch.nn.Parameter(torch.randn(CONVOLUTION, sum(self.widths)) * 0.5)
        self.gate = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, dim, bias=False),
            torch.nn.Linear(dim, heads_v * dim, bias=False),
        )
        self.beta = torch.nn.Linear(WIDTH, heads_v, bias=False)
        self.out_gate = torch.nn.Linear(WIDTH, heads_v * dim, bias=False)
        self.norm = torch.nn.RMSNorm(dim)
        self.out = torch.nn.Linear(heads_v * dim, WIDTH, bias=False)
        # These stay in float32 in a model of any dtype.
        self.register_buffer("A_log", torch.rand(heads_v) - 0.5)
        self.register_buffer("dt_bias", -4 * torch.rand(heads_v * dim))
        self.register_buffer("states", torch.zeros(slots, heads_v, dim, dim))
        # The last inputs, which the next convolutions need, and a spare row for padding.
        past = torch.zeros(slots + 1, CONVOLUTION - 1, sum(self.widths), dtype=DTYPE)
        self.register_buffer("past", past)

    def prefill(self, x: Tensor, lengths: list[int], slots: list[int], log: Log) -> Tensor:
        """The layer's output for x `[1, tokens, width]`, packed pieces of several prompts.

        Args:
            lengths, slots: of each piece.
        """
        convolved = []
        for piece, slot in zip(self.qkv(x)[0].split(lengths), slots, strict=True):
            window = torch.cat([self.past[slot], piece])
            seen = window.unfold(0, CONVOLUTION, 1)
            convolved.append(torch.einsum("tcw,wc->tc", seen, self.taps))
            self.past[slot] = window[-(CONVOLUTION - 1) :]
        q, k, v, g, beta = self.split(torch.cat(convolved)[None], x)
        where = torch.tensor(slots, device=x.device)
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], device=x.device)
        call = {
            "q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": self.A_log,
            "dt_bias": self.dt_bias, "lower_bound": LOWER_BOUND, "safe_gate": True,
            "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True, "state_v_first": True, "cu_seqlens": cu_seqlens,
        }  # fmt: skip
        o, final = cute_attn.chunk_kda(
            **call, initial_state=self.states[where], output_final_state=True
        )
        self.states[where] = final
        log.prefill(call, where, o)
        return self.finish(o, x)

    def decode(self, x: Tensor, slots: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A decode step for x `[batch, width]`, a token per slot. A CUDA graph can capture it.

        Returns:
            The layer's output, and the operator's inputs and output.
        """
        where = torch.where(slots >= 0, slots, len(self.past) - 1)
        window = torch.cat([self.past[where], self.qkv(x)[:, None]], dim=1)
        convolved = (window * self.taps).sum(1)
        self.past[where] = window[:, 1:]
        q, k, v, g, beta = self.split(convolved, x)
        o = cute_attn.kda_decode(
            q, k, v, g, beta, self.states, A_log=self.A_log, dt_bias=self.dt_bias,
            lower_bound=LOWER_BOUND, state_indices=slots,
        )  # fmt: skip
        return self.finish(o, x), {"q": q, "k": k, "v": v, "g": g, "beta": beta, "o": o}

    def split(self, convolved: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v as views of one tensor; g and beta before activation, which the kernels apply."""
        dim = self.sizes.head_dim
        qkv = torch.nn.functional.silu(convolved)
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in qkv.split(self.widths, dim=-1))
        return q, k, v, self.gate(x).unflatten(-1, (-1, dim)), self.beta(x)

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.out_gate(x)).unflatten(-1, o.shape[-2:])
        return self.out((self.norm(o) * gate).flatten(-2))


@dataclass
class Log:
    """Inputs and outputs of the operators, which the references compute again at the end."""

    layer: KimiDeltaAttention
    calls: list[Callable[[Tensor, dict[str, Any]], tuple[str, Tensor, Tensor]]] = field(
        default_factory=list
    )

    def prefill(self, call: dict[str, Any], slots: Tensor, o: Tensor) -> None:
        """Record a call; `call` holds the operator's arguments, except the state."""
        kept = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}
        kept["cu_seqlens"] = kept["cu_seqlens"].cpu()
        ours, where = o.clone(), slots.clone()

        def again(states: Tensor, how: dict[str, Any]) -> tuple[str, Tensor, Tensor]:
            stages = kda_chunk_reference(**kept, initial_state=states[where], **how)
            states[where] = stages.states.final_state
            return "prefill", ours, stages.o

        self.calls.append(again)

    def decode(self, tensors: dict[str, Tensor], slots: Tensor) -> None:
        kept = {name: x.clone() for name, x in tensors.items()}
        ours, where = kept.pop("o"), slots.clone()
        layer = self.layer

        def again(states: Tensor, how: dict[str, Any]) -> tuple[str, Tensor, Tensor]:
            found = kda_decode_reference(
                **kept, state=states, A_log=layer.A_log, dt_bias=layer.dt_bias,
                lower_bound=LOWER_BOUND, state_indices=where, dtype=how["dtype"],
            )  # fmt: skip
            states.copy_(found.state)
            return "decode", ours, found.o

        self.calls.append(again)

    def errors(self) -> dict[str, tuple[float, float]]:
        """By phase, the relative errors of the operators and of plain PyTorch."""
        exact, plain = (
            torch.zeros_like(self.layer.states, dtype=dtype)
            for dtype in (torch.float64, torch.float32)
        )
        sums: dict[str, list[float]] = {}
        for again in self.calls:
            phase, ours, right = again(exact, {"dtype": torch.float64})
            _, _, theirs = again(plain, {"dtype": torch.float32, "stage_dtype": DTYPE})
            parts = (ours.double() - right, theirs.to(DTYPE).double() - right, right)
            squares = [float(x.square().sum()) for x in parts]
            sums[phase] = [a + b for a, b in zip(sums.get(phase, [0.0] * 3), squares, strict=True)]
        return {
            phase: ((ours / norm) ** 0.5, (theirs / norm) ** 0.5)
            for phase, (ours, theirs, norm) in sums.items()
        }


def serve(sizes: Sizes, device: str) -> dict[str, tuple[float, float]]:
    """Prefill and decode of one layer, on random hidden states; errors by phase."""
    torch.manual_seed(0)
    count = len(sizes.prompts)
    layer = KimiDeltaAttention(sizes, slots=count + 2).to(device)
    for module in layer.children():
        module.to(DTYPE)  # but not the buffers of the layer itself
    layer.taps.data = layer.taps.data.to(DTYPE)
    log = Log(layer)
    slots = torch.randperm(count + 2)[:count].tolist()
    prefill(layer, slots, device, log)
    decode(layer, slots, device, log)
    return log.errors()


def prefill(layer: KimiDeltaAttention, slots: list[int], device: str, log: Log) -> None:
    """Prefill all prompts, at most `piece` tokens of each at a time, packed together."""
    sizes = layer.sizes
    for done in range(0, max(sizes.prompts), sizes.piece):
        turn = [i for i, length in enumerate(sizes.prompts) if length > done]
        lengths = [min(sizes.prompts[i] - done, sizes.piece) for i in turn]
        x = torch.randn(1, sum(lengths), WIDTH, device=device, dtype=DTYPE)
        layer.prefill(x, lengths, [slots[i] for i in turn], log)


def decode(layer: KimiDeltaAttention, slots: list[int], device: str, log: Log) -> None:
    """Decode tokens of all slots, with one row of padding, as if a batch had been rounded up."""
    rows = torch.tensor([*slots, -1], device=device, dtype=torch.int32)
    x = torch.zeros(len(rows), WIDTH, device=device, dtype=DTYPE)
    step = capture(layer, x, rows) if rows.is_cuda else lambda: layer.decode(x, rows)
    for _ in range(layer.sizes.steps):
        x.copy_(torch.randn_like(x))
        _, tensors = step()
        log.decode(tensors, rows)


def capture(
    layer: KimiDeltaAttention, x: Tensor, rows: Tensor
) -> Callable[[], tuple[Tensor, dict[str, Tensor]]]:
    """The step as a CUDA graph, which reads x at each replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer.decode(x, torch.full_like(rows, -1))  # loads the kernel; every row is padding
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = layer.decode(x, rows)

    def replay() -> tuple[Tensor, dict[str, Tensor]]:
        graph.replay()
        return results

    return replay


@torch.inference_mode()
def main() -> bool:
    """Run it, and return whether every output is close enough to the reference."""
    console = Console()
    on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8
    where = torch.cuda.get_device_name() if on_gpu else "sm_90a, emulated"
    console.print(f"cute_attn {cute_attn.__version__}, torch {torch.__version__}, on {where}")
    with contextlib.nullcontext() if on_gpu else cute_attn.emulated("sm_90a"):
        errors = serve(Sizes() if on_gpu else SMALL, "cuda" if on_gpu else "cpu")
    table = Table("phase", "error", "plain PyTorch", "")
    for phase, (ours, plain) in errors.items():
        verdict = "agrees" if ours <= 2 * plain else "WRONG"
        table.add_row(phase, f"{ours:.1e}", f"{plain:.1e}", verdict)
    console.print(table)
    if not on_gpu:
        console.print(
            "No GPU here: the compiled kernels ran in the emulator, which found no race, no access "
            "out of bounds and no uninitialised read."
        )
    return all(ours <= 2 * plain for ours, plain in errors.values())


if __name__ == "__main__":
    try:
        passed = main()
    except EmulatorUnavailable as error:
        raise SystemExit(f"There is no GPU here, and {error}") from None
    raise SystemExit(0 if passed else 1)
