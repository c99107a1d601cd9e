"""Calls FlashInfer's paged MQA logits in fp8, for `bugs_in_scripts`.

    python -m cute_attn.emulator --arch sm_100a tests/emulator/flashinfer_mqa.py FLASHINFER

FLASHINFER is the folder `flashinfer` of an unpacked wheel. Only the kernel's own module is
imported. Two sequences have 512 and 256 keys, and two CTAs share the work.
"""

import sys
from pathlib import Path

import cutlass
import cutlass.cute as cute
import torch
from bare_packages import module_of

MODULE = "flashinfer.attn_scores.kernels.fp8_paged_mqa_logits"
ARCH, PAGE, HEADS, DIM, CTAS, KEYS = "sm_100a", 64, 64, 128, 2, 512
LENGTHS = (512, 256)


def compiled(folder: Path):
    """The kernel with FlashInfer's own choice of arguments."""
    kernel = module_of(folder, MODULE).FP8MQALogitsKernel(
        block_kv=128, phys_block_kv=PAGE, num_heads=HEADS, head_dim=DIM, next_n=1, num_sms=CTAS,
        epi_dtype=cutlass.Float32, acc_dtype=cutlass.Float32, output_dtype=cutlass.Float32,
        arch=ARCH,
    )  # fmt: skip
    strided, compact = cute.runtime.make_fake_tensor, cute.runtime.make_fake_compact_tensor
    pages, batch, keys, columns, ctas, rows = (cute.sym_int() for _ in range(6))
    rows_of = {"stride": (cute.sym_int64(), 1)}
    return cute.compile(
        kernel,
        strided(cutlass.Uint8, (pages, PAGE * (DIM + 4)), stride=(cute.sym_int64(), 1)),
        compact(cutlass.Uint8, (HEADS, DIM, batch), stride_order=(1, 0, 2)),
        compact(cutlass.Float32, (HEADS, batch), stride_order=(0, 1)),
        strided(cutlass.Float32, (rows, keys), **rows_of),
        strided(cutlass.Int32, (batch, columns), stride=(cute.sym_int64(), 1), assumed_align=4),
        strided(cutlass.Int32, (batch,), stride=(cute.sym_int(),), assumed_align=4),
        compact(cutlass.Int32, (ctas, 2), stride_order=(1, 0)),
        cutlass.Int32(1),
        cutlass.Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch {ARCH} --enable-tvm-ffi",
    )


def main() -> None:
    function = compiled(Path(sys.argv[1]))
    torch.manual_seed(0)
    batch, blocks = len(LENGTHS), KEYS // PAGE
    pages = batch * blocks
    keys = torch.randn(pages, PAGE, DIM).to(torch.float8_e4m3fn)
    scales = torch.rand(pages, PAGE) + 0.5
    parts = [x.view(torch.uint8).reshape(pages, -1) for x in (keys, scales)]
    q = torch.randn(batch, HEADS, DIM).to(torch.float8_e4m3fn)
    weights = torch.randn(batch, HEADS)
    table = torch.arange(pages, dtype=torch.int32).reshape(batch, blocks)
    logits = torch.full((batch, KEYS), float("nan"), device="cuda")
    # Where each CTA starts and ends: a sequence, and a pair of blocks of 128 keys.
    starts = torch.tensor([[0, 0], [0, 1], [2, 0]], dtype=torch.int32)
    function(
        torch.cat(parts, 1).cuda(),
        q.view(torch.uint8).cuda().permute(1, 2, 0),
        weights.cuda().T,
        logits,
        table.cuda(),
        torch.tensor(LENGTHS, dtype=torch.int32).cuda(),
        starts.cuda(),
        pages,
        batch,
    )
    scores = torch.einsum("bhd,bkd->bhk", q.double(), keys.double().reshape(batch, KEYS, DIM))
    exact = torch.einsum("bhk,bh->bk", scores.relu(), weights.double()) * scales.reshape(batch, -1)
    for row, length in enumerate(LENGTHS):
        error = (logits.cpu()[row, :length] - exact[row, :length]).norm() / exact[row].norm()
        print(f"sequence {row}: relative error {error:.1e}")


if __name__ == "__main__":
    main()
