"""Calls vLLM's chunked gated delta rule, for `bugs_in_scripts`.

    python -m cute_attn.emulator --arch sm_100a tests/emulator/vllm_gdn.py VLLM

VLLM is the folder `vllm` of an unpacked wheel. Only the kernels' own modules are imported. Two
sequences have 70 and 130 tokens.
"""

import importlib.util
import itertools
import sys
import types
from pathlib import Path

import torch
from bare_packages import bare_package, module_of

MODULE = "vllm.model_executor.layers.mamba.ops.gdn_chunk_cutedsl"
HEADS, VALUE_HEADS, DIM, STARTS = 2, 4, 128, (0, 70, 200)


def kernels(folder: Path):
    """The module of the kernels. The packages around them import much that is not there."""
    quack = importlib.util.find_spec("quack")
    if quack is None or quack.origin is None:
        raise ImportError("vLLM's kernels need quack-kernels")
    bare_package("quack", Path(quack.origin).parent)
    utilities = types.ModuleType("vllm.triton_utils")
    utilities.triton = types.SimpleNamespace(cdiv=lambda a, b: -(-a // b))
    sys.modules[utilities.__name__] = utilities
    return module_of(folder, MODULE)


def main() -> None:
    module = kernels(Path(sys.argv[1]))
    torch.manual_seed(0)
    tokens = STARTS[-1]
    q, k = torch.nn.functional.normalize(torch.randn(2, tokens, HEADS, DIM), dim=-1).bfloat16()
    v = torch.randn(tokens, VALUE_HEADS, DIM).bfloat16()
    g, beta = -torch.rand(tokens, VALUE_HEADS), torch.rand(tokens, VALUE_HEADS)
    state = torch.randn(len(STARTS) - 1, VALUE_HEADS, DIM, DIM)
    starts = torch.tensor(STARTS, dtype=torch.int32).cuda()
    o, final = module.chunk_gated_delta_rule_cutedsl(
        *(x.cuda()[None] for x in (q, k, v, g, beta)), state.cuda(), starts,
        *module.prepare_metadata_cutedsl(starts, tokens),
    )  # fmt: skip

    share = VALUE_HEADS // HEADS
    outputs, finals = [], []
    for number, (start, end) in enumerate(itertools.pairwise(STARTS)):
        exact = state[number].double()  # V by K, of each head
        for t in range(start, end):
            q_, k_ = (x[t].double().repeat_interleave(share, 0)[:, :, None] for x in (q, k))
            exact = g[t].double().exp()[:, None, None] * exact
            change = beta[t].double()[:, None, None] * (v[t].double()[:, :, None] - exact @ k_)
            exact = exact + change @ k_.transpose(1, 2)
            outputs.append((exact @ q_)[..., 0] * DIM**-0.5)
        finals.append(exact)
    for name, got, right in (
        ("o", o.cpu()[0], torch.stack(outputs)),
        ("the state", final.cpu(), torch.stack(finals)),
    ):
        error = (got.double() - right).norm() / right.norm()
        print(f"relative error of {name}: {error:.1e}")


if __name__ == "__main__":
    main()
