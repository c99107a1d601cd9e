// The arithmetic of reductions, see reductions.h.
#include "reductions.h"
#include "scalar.h"

#define REDUCE(name, type, result) \
  static void name(uint8_t *to, const uint8_t *from, uint32_t bytes) { \
    for (uint32_t i = 0; i + sizeof(type) <= bytes; i += sizeof(type)) { \
      type a, b; \
      memcpy(&a, to + i, sizeof a); \
      memcpy(&b, from + i, sizeof b); \
      a = (type)(result); \
      memcpy(to + i, &a, sizeof a); \
    } \
  }
#define EXTREMES(name, type) \
  REDUCE(min_##name, type, a < b ? a : b) \
  REDUCE(max_##name, type, a > b ? a : b)
#define INTEGER(bits) \
  REDUCE(add_##bits, uint##bits##_t, a + b) \
  REDUCE(and_##bits, uint##bits##_t, a & b) \
  REDUCE(or_##bits, uint##bits##_t, a | b) \
  REDUCE(xor_##bits, uint##bits##_t, a ^ b) \
  EXTREMES(u##bits, uint##bits##_t) \
  EXTREMES(s##bits, int##bits##_t)
INTEGER(32)
INTEGER(64)
REDUCE(inc_32, uint32_t, a >= b ? 0 : a + 1)
REDUCE(dec_32, uint32_t, a == 0 || a > b ? b : a - 1)

ALWAYS_INLINE uint32_t sum_f32(uint32_t a, uint32_t b) {
  return canonical(as_float(a) + as_float(b));
}
// A NaN stays unchanged, signalling or not; the NaN of `b` takes precedence.
ALWAYS_INLINE uint64_t sum_f64(uint64_t a, uint64_t b) {
  double x = as_double(a), y = as_double(b), sum = x + y;
  return y != y ? b : x != x ? a : sum == sum ? double_bits(sum) : NAN64;
}
REDUCE(add_f32, uint32_t, sum_f32(a, b))
REDUCE(add_f32_ftz, uint32_t, flushed(sum_f32(flushed(a), flushed(b))))
REDUCE(add_f64, uint64_t, sum_f64(a, b))
REDUCE(min_f32, uint32_t, EXTREME32(a, b, false, false))
REDUCE(max_f32, uint32_t, EXTREME32(a, b, true, false))
REDUCE(min_nan_f32, uint32_t, EXTREME32(a, b, false, true))
REDUCE(max_nan_f32, uint32_t, EXTREME32(a, b, true, true))

// Sums in f32. f16 and bf16 have less than half of f32's precision, so rounding twice is right.
#define HALF(type, infinity) \
  REDUCE(add_##type, uint16_t, type##_of(sum_f32(f32_of_##type(a), f32_of_##type(b)))) \
  REDUCE(min_##type, uint16_t, extreme16(a, b, false, infinity)) \
  REDUCE(max_##type, uint16_t, extreme16(a, b, true, infinity))
HALF(f16, INFINITY_F16)
HALF(bf16, INFINITY_BF16)

#define LOGIC(bits) [OP_AND] = and_##bits, [OP_OR] = or_##bits, [OP_XOR] = xor_##bits
static const Reduction TABLE[TY_COUNT][OP_COUNT] = {
    [TY_U32] = {[OP_ADD] = add_32, [OP_MIN] = min_u32, [OP_MAX] = max_u32, [OP_INC] = inc_32,
                [OP_DEC] = dec_32, LOGIC(32)},
    [TY_S32] = {[OP_ADD] = add_32, [OP_MIN] = min_s32, [OP_MAX] = max_s32, LOGIC(32)},
    [TY_U64] = {[OP_ADD] = add_64, [OP_MIN] = min_u64, [OP_MAX] = max_u64, LOGIC(64)},
    [TY_S64] = {[OP_MIN] = min_s64, [OP_MAX] = max_s64},
    [TY_F16] = {[OP_ADD] = add_f16, [OP_MIN] = min_f16, [OP_MAX] = max_f16},
    [TY_BF16] = {[OP_ADD] = add_bf16, [OP_MIN] = min_bf16, [OP_MAX] = max_bf16},
    [TY_F32] = {[OP_ADD] = add_f32, [OP_MIN_NUMBER] = min_f32, [OP_MAX_NUMBER] = max_f32,
                [OP_MIN_NAN] = min_nan_f32, [OP_MAX_NAN] = max_nan_f32},
    [TY_TF32] = {[OP_ADD] = add_f32},
    [TY_F32_FTZ] = {[OP_ADD] = add_f32_ftz},
    [TY_TF32_FTZ] = {[OP_ADD] = add_f32_ftz},
    [TY_F64] = {[OP_ADD] = add_f64},
};

Reduction reduction_of(ReduceOp op, ElementType type) {
  return type < TY_COUNT ? TABLE[type][op] : NULL;
}
