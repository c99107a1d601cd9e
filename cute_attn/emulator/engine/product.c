// Matrix products outside of kernels, with the arithmetic of a device's tensor cores: what a
// program compares a kernel's result with.
#include "core.h"
#include "numerics.h"

Emu *emu_new(void);  // core.c
void emu_free(Emu *e);

// D = A * B^T as in mma_tile; A and B have values of f16, or of bf16.
void emu_product(int arch, int bf16, int M, int N, int K, const float *A, const float *B,
                 float *D) {
  Program program = {.arch = arch};
  Emu *e = emu_new();
  e->program = &program;
  MmaUnit unit = arch >= 120 || arch < 90 ? UNIT_MMA : arch >= 100 ? UNIT_TCGEN05 : UNIT_WGMMA;
  FloatType type = bf16 ? FT_BF16 : FT_F16;
  Numerics n = numerics_of(e, unit, type, type, false, SCALED_NONE);
  mma_tile(&n, M, N, K, A, B, D, false);
  emu_free(e);
}
