// How tensor cores multiply and accumulate: the formats of their operands, and the arithmetic of
// one tile. mma.sync, wgmma and tcgen05 share it.
#ifndef CUTE_ATTN_NUMERICS_H
#define CUTE_ATTN_NUMERICS_H

#include "engine.h"

#pragma GCC visibility push(hidden)

typedef enum {
  FT_F16, FT_BF16, FT_TF32, FT_E4M3, FT_E5M2, FT_E3M2, FT_E2M3, FT_E2M1,
  FT_F32,
  FT_UE8M0, FT_UE4M3,  // scale factors
  FT_COUNT
} FloatType;

// Which instruction multiplies.
typedef enum { UNIT_MMA, UNIT_WGMMA, UNIT_TCGEN05 } MmaUnit;

// A block of `block_k` products is summed together with the accumulator in fixed point. A product
// has exponent e(a) + e(b) and a significand in [0, 4). Products and accumulator are truncated to
// `fraction_bits` below the largest of their exponents (zeros have none). The exact sum is then
// rounded to the accumulator's format: towards zero to `result_bits` fraction bits of f32, or to
// nearest f16. Zero is always positive. This model agrees bit for bit with an H100 and an H200 for
// all types of sm_90. Other generations are as published (MMA-Sim, arXiv 2511.10909).
typedef struct {
  bool exact;           // false: plain f32 arithmetic, in the order of k
  int block_k, fraction_bits, result_bits;
  bool f16_result;
  int min_exponent_a, min_exponent_b;  // smallest exponent of normal numbers; subnormals use it too
  int scale_group;      // products summed exactly before scaling (block-scaled fp4); 0 means 1
  Emu *emu;             // owner of the working memory
} Numerics;

// Whether, and how, operands come with scale factors.
typedef enum { SCALED_NONE, SCALED_MXF8F6F4, SCALED_MXF4 /* mxf4, mxf4nvf4 */ } BlockScale;

// The arithmetic of one instruction on the machine's architecture (e->program->arch), and of
// e->numerics.
Numerics numerics_of(Emu *e, MmaUnit unit, FloatType a, FloatType b, bool f16_accumulator,
                     BlockScale scaled);

// D = A * B^T (+ D): A is M x K, B is N x K, D is M x N, all row-major and dense. Values have the
// operands' formats, which are exact in f32; with an f16 accumulator D holds values of f16. Any M,
// N; K is a multiple of n->block_k, or less.
void mma_tile(const Numerics *n, int M, int N, int K, const float *A, const float *B, float *D,
              bool accumulate);

// mma_tile; faster if B (address and contents), N and K are as in the last call.
void mma_tile_again(const Numerics *n, int M, int N, int K, const float *A, const float *B,
                    float *D, bool accumulate);

// mma_tile with scale factors: each run of `vector` elements along K of row m of A is scaled by
// scale_a[m * (K / vector) + k / vector], of row n of B by scale_b alike (values as f32).
void mma_tile_scaled(const Numerics *n, int M, int N, int K, const float *A, const float *B,
                     const float *scale_a, const float *scale_b, int vector, float *D,
                     bool accumulate);

// `count` packed elements to f32. `raw` holds 16-bit (f16, bf16), 32-bit (tf32, whose low bits
// are ignored, f32) or 8-bit elements; of formats under 8 bits the low bits of each byte. FT_E2M1
// packed two to a byte, low half first: decode_fp4.
void decode_floats(FloatType type, const void *raw, int count, float *out);
void decode_fp4(const uint8_t *raw, int count, float *out);

// D = A * B^T (+ D) of integers, in tiles as in mma_tile.
void multiply_integers(int M, int N, int K, const int16_t *A, const int16_t *B, int32_t *D,
                       bool accumulate, bool saturate);
void widen_bytes(const uint8_t *in, int count, bool is_signed, int16_t *out);
// Unpack sixteen elements of 6 or 4 bits, from 12 or 8 bytes, to a byte each.
void unpack_bits(const uint8_t *in, int bits, uint8_t out[16]);

#pragma GCC visibility pop
#endif
