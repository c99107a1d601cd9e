"""The plots of README and of pages, drawn from the reports in docs/benchmarks, with their captions.

    python -m docs.page_plots

draws them into docs/plots, which needs matplotlib, and writes the captions between the pages'
markers anew.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_attn.bench.harness.plot import draw
from cute_attn.bench.harness.report import Report

from .kernels.page_tables import filled

WRAP: dict[str, Any] = {"width": 120, "break_long_words": False, "break_on_hyphens": False}

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "docs/benchmarks"
PLOTS = ROOT / "docs/plots"

VERSIONS = {  # an entry of a report's environment -> its name in a caption
    "driver": "driver",
    "cuda": "CUDA",
    "torch": "PyTorch",
    "flash-attn-4": "FlashAttention-4",
    "flash-linear-attention": "flash-linear-attention",
}


@dataclass(frozen=True)
class Shown:
    """Some plots of a report, or all of them.

    Attributes:
        report: its file below docs/benchmarks, without the suffix.
        about: what a reader sees, for the caption.
        peers: the entries of VERSIONS that are peers in the plots.
        titles: of the plots in the report; None is all.
    """

    report: str
    about: str
    peers: tuple[str, ...] = ()
    titles: Collection[str] | None = None

    def read(self) -> Report:
        return Report.from_json((REPORTS / f"{self.report}.json").read_text())


ATTENTION = ("head_dim 64", "head_dim 128", "head_dim 256")
CAUSAL = (
    "causal, bfloat16, 16,384 tokens in a call (32,768 at that length), as many K/V heads as query"
    " heads, timed by `triton.testing.do_bench`. Higher is better. cuDNN and FlashAttention-2 are"
    " called through PyTorch. Dashed: `torch.matmul` of 8192 by 8192."
)
HOST_BOUND = "Where flash-linear-attention's line is flat, the line shows its host code's time."

SHOWN = {
    "attention-forward": Shown(
        "h200/attention-forward",
        f"Softmax attention, forward: {CAUSAL}",
        ("flash-attn-4",),
        tuple(f"{head_dim}, causal (do_bench)" for head_dim in ATTENTION),
    ),
    "attention-backward": Shown(
        "h200/attention-backward",
        f"Softmax attention, backward: {CAUSAL}",
        ("flash-attn-4",),
        tuple(f"{head_dim}, causal (do_bench)" for head_dim in ATTENTION),
    ),
    "attention-decode": Shown(
        "h200/attention-decode",
        "Softmax attention, decode: one query for each sequence, bfloat16, pages of 64 tokens, in a"
        " CUDA graph. Lower is better.",
        ("flash-attn-4",),
        tuple(f"decode, head_dim 128, {keys} keys (graph)" for keys in (1024, 8192, 131072)),
    ),
    "kda-chunk": Shown(
        "h100/kda-chunk",
        "Kimi Delta Attention, `chunk_kda` forward: K = V = 128, bfloat16, one sequence, H heads of"
        f" q and k and HV of v. Lower is better. {HOST_BOUND}",
        ("flash-linear-attention",),
        ("H=12 HV=12", "H=64 HV=64", "H=32 HV=64"),
    ),
    "kda-backward": Shown(
        "h200/kda-backward",
        "Kimi Delta Attention, gradients of `chunk_kda`: K = V = 128, bfloat16, one sequence, H"
        f" heads of q and k and HV of v. Lower is better. {HOST_BOUND}",
        ("flash-linear-attention",),
        ("H=12 HV=12", "H=64 HV=64", "H=32 HV=64"),
    ),
    "kda-decode": Shown(
        "h100/kda-decode",
        "Kimi Delta Attention, `kda_decode`: K = V = 128, one bfloat16 token, float32 state, H"
        " heads of q and k and HV of v, in a CUDA graph. Lower is better.",
        ("flash-linear-attention",),
        ("H=64 HV=64 (graph)", "H=64 HV=128 (graph)"),
    ),
    "lightning-decode": Shown(
        "h100/lightning-decode",
        "Lightning Attention decode: 64 heads, K = V = 128, one bfloat16 token, float32 state, in a"
        " CUDA graph with a cold L2 cache. Left, lower is better; right, higher is.",
        ("flash-linear-attention",),
    ),
    "async-copy": Shown(
        "h200/async-copy",
        "Tiles copied to shared memory: by instruction, and by the bytes in flight on an SM. Higher"
        " is better. With CTA pairs or multicast, data that is read once reaches several SMs.",
    ),
    "fmha-ladder": Shown(
        "h200/fmha-ladder",
        "The steps of the ladder: causal attention forward, head_dim 128, float16, batch 4, 32"
        " heads. Higher is better.",
        ("flash-attn-4",),
    ),
}  # fmt: skip

FIRST = ("attention-forward",)
PAGES: Mapping[str, tuple[str, ...]] = {
    "README.md": FIRST,
    "docs/index.md": FIRST,
    "docs/ladder.md": ("fmha-ladder",),
    "docs/kernels/async_copy.md": ("async-copy",),
    "docs/kernels/kda_backward.md": ("kda-backward",),
    "docs/kernels/kda_decode.md": ("kda-decode",),
    "docs/kernels/kda_forward.md": ("kda-chunk",),
    "docs/kernels/lightning_decode.md": ("lightning-decode",),
    "docs/kernels/sm90_backward.md": ("attention-backward",),
    "docs/kernels/sm90_forward.md": ("attention-forward", "attention-decode"),
}


def on_page(page: str, name: str) -> str:
    """The plot and its caption, in Markdown; links are relative to the page."""
    shown = SHOWN[name]
    facts = shown.read().environment

    def link(path: Path) -> str:
        return os.path.relpath(path, (ROOT / page).parent)

    versions = [
        f"{label} {facts[entry]}"
        for entry, label in VERSIONS.items()
        if entry in ("driver", "cuda", "torch", *shown.peers)
    ]
    where = ", ".join([str(facts["gpu"]), *versions, str(facts["date"])[:10]])
    picture = PLOTS / f"{name}.png"
    machine, benchmark = shown.report.split("/")
    results = f"{link(REPORTS / machine)}.md#{benchmark}"
    alt = shown.about.partition(":")[0]
    caption = f"*{shown.about} {where}, `{facts['command']}`: [all results]({results}).*"
    return f"[![{alt}]({link(picture)})]({link(picture)})\n\n{textwrap.fill(caption, **WRAP)}"


def text(page: str) -> str:
    """The page with its plots and captions as they should be."""
    parts = {f"plot {name}": on_page(page, name) for name in PAGES[page]}
    return filled((ROOT / page).read_text(), parts)


def main() -> None:
    for name, shown in SHOWN.items():
        draw(shown.read(), PLOTS / f"{name}.png", shown.titles)
    for page in PAGES:
        (ROOT / page).write_text(text(page))


if __name__ == "__main__":
    main()
