// The bits of floating-point numbers: formats, NaN, minimum and maximum by the rules of PTX.
#ifndef CUTE_ATTN_FLOAT_BITS_H
#define CUTE_ATTN_FLOAT_BITS_H

#include <stdbool.h>
#include <stdint.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

#define REINTERPRET(name, From, To) \
  ALWAYS_INLINE To name(From v) { union { From from; To to; } x = {.from = v}; return x.to; }
REINTERPRET(as_float, uint32_t, float)
REINTERPRET(float_bits, float, uint32_t)
REINTERPRET(as_double, uint64_t, double)
REINTERPRET(double_bits, double, uint64_t)

// Canonical NaNs, as arithmetic and tensor cores return them.
#define NAN32 0x7FFFFFFFu
#define NAN16 0x7FFFu
#define NAN64 0xFFF8000000000000ull

#define INFINITY32 0x7F800000u
#define INFINITY_F16 0x7C00u
#define INFINITY_BF16 0x7F80u

ALWAYS_INLINE bool is_nan(uint32_t v) { return (v & 0x7FFFFFFF) > INFINITY32; }
// The result of f32 arithmetic: any NaN becomes the canonical NaN.
ALWAYS_INLINE uint32_t canonical(float v) { return v == v ? float_bits(v) : NAN32; }
ALWAYS_INLINE uint32_t flushed(uint32_t v) { return v & INFINITY32 ? v : v & 0x80000000; }
ALWAYS_INLINE uint32_t saturated(uint32_t v) {  // clamps to [0, 1]; NaN and -0 give +0
  return (int32_t)v <= 0 || v > INFINITY32 ? 0 : v > 0x3F800000 ? 0x3F800000 : v;
}

// f32 to f16 and bf16, to nearest: forms that vectorise.
ALWAYS_INLINE uint32_t f16_of(uint32_t v) {
  uint32_t a = v & 0x7FFFFFFF, sign = v >> 16 & 0x8000;
  uint32_t normal = (a + 0xFFF + (a >> 13 & 1) - (112u << 23)) >> 13;
  uint32_t small = float_bits(as_float(a) + 0.5f) - 0x3F000000;  // 0.5 has f16's smallest ulp
  uint32_t r = a < 0x38800000 ? small : a >= 0x477FF000 ? INFINITY_F16 : normal;
  return a > INFINITY32 ? NAN16 : sign | r;
}
ALWAYS_INLINE uint32_t bf16_of(uint32_t v) {
  uint32_t r = (v + 0x7FFF + (v >> 16 & 1)) >> 16;
  return is_nan(v) ? NAN16 : r;
}
// f16 and bf16 in the low half to f32, exactly; NaN payloads shifted along.
ALWAYS_INLINE uint32_t f32_of_f16(uint32_t h) {
  uint32_t a = (h & 0x7FFF) << 13;
  uint32_t r = float_bits(as_float(a) * 0x1p112f);
  r = a >= 0x0F800000 ? a | INFINITY32 : r;
  return r | (h & 0x8000) << 16;
}
ALWAYS_INLINE uint16_t half_of(float v) { return (uint16_t)f16_of(float_bits(v)); }
ALWAYS_INLINE float half_value(uint16_t h) { return as_float(f32_of_f16(h)); }
ALWAYS_INLINE uint32_t f32_of_bf16(uint32_t h) { return h << 16; }

// Formats. A format without an infinity gives `infinity` on overflow; a format under 8 bits has no
// NaN: a NaN becomes the format's largest number.
typedef struct {
  int mantissa, bias, bits;
  uint32_t infinity, max, nan;  // codes
} Format;
#define FORMAT static const Format __attribute__((unused))
FORMAT F16 = {10, 15, 16, INFINITY_F16, 0x7BFF, NAN16};
FORMAT BF16 = {7, 127, 16, INFINITY_BF16, 0x7F7F, NAN16};
FORMAT F32 = {23, 127, 32, INFINITY32, 0x7F7FFFFF, NAN32};
FORMAT TF32 = {10, 127, 19, 0x3FC00, 0x3FBFF, 0x3FFFF};
FORMAT E4M3 = {3, 7, 8, 0x7E, 0x7E, 0x7F};
FORMAT E5M2 = {2, 15, 8, 0x7C, 0x7B, 0x7F};
FORMAT E2M3 = {3, 1, 6, 0x1F, 0x1F, 0x1F};
FORMAT E3M2 = {2, 3, 6, 0x1F, 0x1F, 0x1F};
FORMAT E2M1 = {1, 1, 4, 0x7, 0x7, 0x7};

// The value of a code of at most 8 bits, in the low bits; without a branch, so that loops
// vectorise.
ALWAYS_INLINE float small_value(const Format *f, uint32_t code) {
  uint32_t sign_bit = 1u << (f->bits - 1), magnitude = code & (sign_bit - 1);
  uint32_t bits = magnitude << (23 - f->mantissa);
  uint32_t smallest = (uint32_t)(128 - f->bias) << 23;  // normal number
  uint32_t subnormal = float_bits(as_float(bits | smallest) - as_float(smallest));
  uint32_t v = magnitude >> f->mantissa ? bits + smallest - (1u << 23) : subnormal;
  v = magnitude <= f->max ? v : magnitude == f->infinity ? INFINITY32 : 0x7FC00000;
  return as_float(code & sign_bit ? v | 0x80000000 : v);
}

// Codes of any format, shifted to the top of 32 bits, as ordered integers: -0 < +0.
ALWAYS_INLINE int32_t ordered(uint32_t v) {
  return (int32_t)(v ^ ((uint32_t)((int32_t)v >> 31) >> 1));
}
// The minimum or maximum of two codes. The number wins over a NaN, or with keep_nan the NaN wins.
// `infinity` is the largest magnitude that is no NaN, `nan` the canonical NaN.
ALWAYS_INLINE uint32_t extreme(uint32_t x, uint32_t y, bool max, bool keep_nan, uint32_t infinity,
                               uint32_t nan) {
  bool nx = (x & 0x7FFFFFFF) > infinity, ny = (y & 0x7FFFFFFF) > infinity;
  uint32_t r = max ? (ordered(x) > ordered(y) ? x : y) : ordered(x) < ordered(y) ? x : y;
  r = nx ? y : ny ? x : r;
  return (keep_nan ? nx | ny : nx & ny) ? nan : r;
}
#define EXTREME32(x, y, max, keep_nan) extreme(x, y, max, keep_nan, INFINITY32, NAN32)
// The minimum or maximum of 16-bit codes in the low half, with their format's infinity.
ALWAYS_INLINE uint32_t extreme16(uint32_t x, uint32_t y, bool max, uint32_t infinity) {
  return extreme(x << 16, y << 16, max, false, infinity << 16, NAN16 << 16) >> 16;
}

#endif
