"""Calls FlashInfer's chunked gated delta rule, for `bugs_in_scripts`.

    python -m cute_attn.emulator --arch sm_100a tests/emulator/flashinfer_gdn.py FLASHINFER

FLASHINFER is the folder `flashinfer` of an unpacked wheel. Only the kernel's own module is
imported. One sequence has 128 tokens and two heads.
"""

import sys
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from bare_packages import module_of
from cutlass.cute.runtime import from_dlpack

MODULE = "flashinfer.gdn_kernels.blackwell.gated_delta_net_chunked"
ARCH, TOKENS, HEADS, DIM, SMS = "sm_100a", 128, 2, 128, 2


def main() -> None:
    kernel = module_of(Path(sys.argv[1]), MODULE).GatedDeltaNetChunkedKernel
    torch.manual_seed(0)
    q, k = torch.nn.functional.normalize(torch.randn(2, TOKENS, HEADS, DIM), dim=-1).half()
    v = (0.1 * torch.randn(TOKENS, HEADS, DIM)).half()
    gate, beta = 0.9 + 0.1 * torch.rand(TOKENS, HEADS), torch.rand(TOKENS, HEADS)
    state = 0.1 * torch.randn(1, HEADS, DIM, DIM)
    o, final = torch.full_like(v, torch.nan).cuda(), torch.full_like(state, torch.nan).cuda()
    starts = torch.tensor([0, TOKENS], dtype=torch.int32).cuda()
    size = kernel.get_workspace_size(SMS, 1, HEADS, HEADS, True)
    workspace = torch.empty(size, dtype=torch.int8).cuda()

    def rows(x: torch.Tensor):
        order = tuple(range(x.dim()))
        return from_dlpack(x, assumed_align=16).mark_compact_shape_dynamic(
            mode=0, stride_order=order, divisibility=1
        )

    def state_of(x: torch.Tensor):
        return (
            from_dlpack(x, assumed_align=16)
            .mark_layout_dynamic()
            .mark_compact_shape_dynamic(mode=3, stride_order=(0, 1, 2, 3), divisibility=DIM)
        )

    # FlashInfer's own choices, in its gdn_prefill.py.
    built = kernel(
        io_dtype=cutlass.Float16, inverse_dtype=cutlass.Float16, acc_dtype=cutlass.Float32,
        state_dtype=cutlass.Float32, mma_tiler_qk=(64, 64, 128), mma_tiler_qs=(128, 64, 128),
        mma_tiler_qkv=(128, 64, 64), mma_tiler_kv=(128, 128, 64), max_active_clusters=SMS,
        num_sm=SMS, is_GQA=True, use_initial_state=True, store_final_state=True,
        enable_checkpoints=False, is_persistent=True,
    )  # fmt: skip
    given = [x.cuda() for x in (q, k, v, gate, beta)]
    first, last = state.cuda(), (None, None, None, 0, 1.0)
    compiled = cute.compile(
        built, *map(rows, (*given, o)), from_dlpack(starts, assumed_align=4).mark_layout_dynamic(),
        state_of(first), state_of(final), *last, from_dlpack(workspace, assumed_align=16),
        cuda.CUstream(0), options=f"--gpu-arch {ARCH} --enable-tvm-ffi",
    )  # fmt: skip
    compiled(*given, o, starts, first, final, *last, workspace, cuda.CUstream(0))

    exact, outputs = state[0].double().transpose(1, 2), []  # K by V, of each head
    for t in range(TOKENS):
        q_, k_, v_ = (x[t].double()[:, :, None] for x in (q, k, v))
        exact = gate[t].double()[:, None, None] * exact
        change = beta[t].double()[:, None, None] * (v_ - exact.transpose(1, 2) @ k_)
        exact = exact + k_ @ change.transpose(1, 2)
        outputs.append((exact.transpose(1, 2) @ q_)[..., 0])
    for name, got, right in (("o", o.cpu(), torch.stack(outputs)),
                             ("the state", final.cpu()[0], exact.transpose(1, 2))):  # fmt: skip
        error = (got.double() - right).norm() / right.norm()
        print(f"relative error of {name}: {error:.1e}")


if __name__ == "__main__":
    main()
