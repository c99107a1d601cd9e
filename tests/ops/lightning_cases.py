"""Lightning decode: what its tests draw, run and compare, on a GPU or in the emulator.

The rule for errors: no more than twice the error of the same formula in plain PyTorch float32
arithmetic, whose results are rounded to the same dtypes as ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st

import cute_attn
from cute_attn.reference.lightning import lightning_attn_decode_reference
from tests.sweeps import FULL

HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class Case:
    """What hypothesis draws."""

    batch: int = 3
    tokens: int | None = None
    heads: int = 2
    head_dim_k: int = 128
    head_dim_v: int = 128
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    layout: str = "vk"
    slots: int | None = None  # None: no state_indices
    padded: int = 0  # how many rows are padding
    records: int | None = None  # not None: speculative decoding
    packing: str = "separate"  # of q, k and v: "separate", "packed" or "misaligned"
    give_out: bool = True
    scale: float | None = None
    decay: float = 1.0
    seed: int = 0

    def inputs(self, device: str = "cuda") -> dict[str, Any]:
        generator = torch.Generator(device).manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        step = (self.batch,) if self.tokens is None else (self.batch, self.tokens)
        widths = (self.head_dim_k, self.head_dim_k, self.head_dim_v)
        if self.packing == "separate":
            q, k, v = (normal(*step, self.heads, width).to(self.dtype) for width in widths)
        else:
            # One fused projection, a row of every head's q, then k, then v, and a gate between.
            gap = 1 if self.packing == "misaligned" else 8
            sizes = [self.heads * width for width in widths]
            packed = normal(*step, sum(sizes) + 3 * gap).to(self.dtype)
            q, k, v = (
                part[..., gap:].unflatten(-1, (self.heads, width))
                for part, width in zip(
                    packed.split([size + gap for size in sizes], dim=-1), widths, strict=True
                )
            )
        slots = self.batch if self.slots is None else self.slots
        matrix = (self.head_dim_v, self.head_dim_k)
        if self.layout == "kv":
            matrix = matrix[::-1]
        args: dict[str, Any] = {
            "q": q,
            "k": k,
            "v": v,
            "state": normal(slots, self.heads, *matrix).to(self.state_dtype),
            "decay": self.decay * torch.rand(self.heads, generator=generator, device=device),
            "softmax_scale": self.scale,
            "state_layout": self.layout,
        }
        if self.slots is not None:
            indices = torch.randperm(slots, generator=generator, device=device)[: self.batch]
            indices = indices.to(torch.int32)
            indices[: self.padded] = -1
            args["state_indices"] = indices[torch.randperm(self.batch, device=device)]
        if self.records is not None:
            args["num_accepted_tokens"] = torch.randint(
                0, self.records + 1, (self.batch,), generator=generator, device=device
            ).to(torch.int32)
            for name, width in (("draft_k", self.head_dim_k), ("draft_v", self.head_dim_v)):
                args[name] = normal(slots, self.records, self.heads, width).to(self.dtype)
        if self.give_out:
            args["out"] = torch.full((*step, self.heads, self.head_dim_v), torch.nan).to(
                device, self.dtype
            )
        return args


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATE_DTYPES = (torch.float32, torch.bfloat16)

# What is compiled in: the full sweep draws from all of it, the usual one from every pair of K and V
# with the rest in turns, so that the kernels can be compiled beforehand, in parallel.
EVERYTHING = list(product(HEAD_DIMS, HEAD_DIMS, DTYPES, STATE_DTYPES, ("vk", "kv")))
SOME = [
    (k, v, DTYPES[(i + i // 3) % 3], STATE_DTYPES[i % 2], ("vk", "kv")[i // 2 % 2])
    for i, (k, v) in enumerate(product(HEAD_DIMS, HEAD_DIMS))
]

# What the emulator is given: fewer kernels to compile, and fewer calls.
EMULATED = [
    (64, 128, torch.bfloat16, torch.float32, "vk"),
    (128, 64, torch.float16, torch.bfloat16, "kv"),
]
few = settings() if FULL else settings(max_examples=4)


@st.composite
def cases(draw: st.DrawFn, device: str, one_kernel: bool = True) -> Case:
    """In the emulator, of one size and layout unless told otherwise."""
    emulated = device == "cpu"
    compiled = EVERYTHING if FULL else EMULATED[: 1 if one_kernel else None] if emulated else SOME
    k, v, dtype, state_dtype, layout = draw(st.sampled_from(compiled))
    batch = draw(st.integers(1, 3 if emulated else 9))
    tokens = draw(st.none() | st.integers(1, 5))
    slots = draw(st.none() | st.integers(batch, batch + 5))
    return Case(
        batch=batch,
        tokens=tokens,
        heads=draw(st.integers(1, 2 if emulated else 5)),
        head_dim_k=k,
        head_dim_v=v,
        dtype=dtype,
        state_dtype=state_dtype,
        layout=layout,
        slots=slots,
        padded=0 if slots is None else draw(st.integers(0, batch)),
        records=None if tokens is None else draw(st.none() | st.integers(1, 5)),
        packing=draw(st.sampled_from(["separate", "packed", "misaligned"])),
        give_out=draw(st.booleans()),
        scale=draw(st.none() | st.floats(0.01, 2.0)),
        decay=draw(st.sampled_from([0.0, 0.1, 1.0, 8.0])),
        seed=draw(st.integers(0, 2**31)),
    )


def run(args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, new state), leaving the arguments as they are."""
    args = args | {"state": args["state"].clone()}
    if "out" in args:
        args["out"] = torch.full_like(args["out"], torch.nan)
    o = cute_attn.lightning_attn_decode(**args)
    if "out" in args:
        assert o is args["out"]
    return o, args["state"]


def reference(args: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    args = {name: x for name, x in args.items() if name != "out"}
    o, state = lightning_attn_decode_reference(**args, dtype=dtype)
    return (o if dtype == torch.float64 else o.to(args["q"].dtype)), state


def assert_no_worse(actual: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """The error rule, on the norm over all elements."""
    assert not actual.isnan().any()
    ours = (actual.double() - exact).norm()
    theirs = (plain.double() - exact).norm()
    # A single rounding of every element is granted where plain arithmetic happens to be exact.
    floor = torch.finfo(torch.float32).eps * exact.norm()
    assert ours <= 2 * theirs + floor, f"error {ours:.3e}, plain float32 {theirs:.3e}"


def assert_agrees(args: dict[str, Any], o: torch.Tensor, state: torch.Tensor) -> None:
    exact_o, exact_state = reference(args, torch.float64)
    plain_o, plain_state = reference(args, torch.float32)
    assert o.dtype == args["q"].dtype
    assert o.shape == args["v"].shape
    assert_no_worse(o, plain_o, exact_o)
    assert_no_worse(state, plain_state, exact_state)
