"""Calls vLLM's kernel of states of the gated delta rule, for `bugs_in_scripts`.

    python -m cute_attn.emulator --arch sm_100a tests/emulator/vllm_state.py VLLM

VLLM is the folder `vllm` of an unpacked wheel. Only the kernel's own modules are imported.
"""

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import torch

HEADS, DIM, CHUNK, TOKENS = 4, 128, 64, 128


def state_kernel(folder: Path):
    """The function of the kernel's module. vLLM's own packages import much that is not there."""
    where = ["vllm", "model_executor", "layers", "mamba", "ops", "gdn_chunk_cutedsl"]
    paths = {".".join(where[:n]): folder.joinpath(*where[1:n]) for n in range(1, len(where) + 1)}
    quack = importlib.util.find_spec("quack")
    assert quack is not None
    paths["quack"] = Path(quack.origin).parent
    for name, path in paths.items():
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    return importlib.import_module(".".join([*where, "kernel_h"])).h_cutedsl


def main() -> None:
    torch.manual_seed(0)
    chunks = TOKENS // CHUNK
    k, w, u = (0.1 * torch.randn(3, TOKENS, HEADS, DIM)).bfloat16()
    g = -torch.rand(TOKENS, HEADS).reshape(chunks, CHUNK, HEADS).cumsum(1).reshape(TOKENS, HEADS)
    state = torch.randn(1, HEADS, DIM, DIM)
    device = {"device": "cuda"}
    new, states = (
        torch.full_like(u, torch.nan, **device),
        torch.full((chunks, HEADS, DIM, DIM), torch.nan, dtype=torch.bfloat16, **device),
    )
    final = torch.full_like(state, torch.nan, **device)
    starts = torch.tensor([0, TOKENS], dtype=torch.int32, **device)
    offsets = torch.tensor([0, chunks], dtype=torch.int32, **device)
    state_kernel(Path(sys.argv[1]))(
        k.cuda(), u.cuda(), w.cuda(), new, g.cuda(), states, state.cuda(), final, starts, offsets
    )
    exact = state[0].double()
    for at in range(0, TOKENS, CHUNK):
        rows = slice(at, at + CHUNK)
        k_, w_, u_, g_ = (x[rows].double().transpose(0, 1) for x in (k, w, u, g[..., None]))
        last = g_[:, -1:]
        values = (u_ - w_ @ exact.transpose(1, 2)) * (last - g_).exp()
        exact = exact * last.exp() + values.transpose(1, 2) @ k_
    error = (final.cpu()[0].double() - exact).norm() / exact.norm()
    print(f"relative error of the state: {error:.1e}")


if __name__ == "__main__":
    main()
