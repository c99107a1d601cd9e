// Floating-point arithmetic: f32, f32x2, f64, f16, bf16 and their pairs, and the approximations.
#include "scalar.h"
#include <math.h>

#define HANDLER(name) static int name(Warp *w, const Insn *I, Mask m)

// ------------------------------------------------------------------- f32 and f32x2 arithmetic
//
// A kernel computes n = 32 (f32) or 64 (f32x2) results as bits.
typedef void Kernel(int n, const float *restrict a, const float *restrict b,
                    const float *restrict c, uint32_t *restrict r);
#define KERNEL(name, expr) \
  ALWAYS_INLINE void name(int n, const float *restrict a, const float *restrict b, \
                          const float *restrict c, uint32_t *restrict r) { \
    (void)b; (void)c; \
    for (int i = 0; i < n; i++) { float x = a[i]; r[i] = canonical(expr); } \
  }
KERNEL(add_kernel, x + b[i])
KERNEL(sub_kernel, x - b[i])
KERNEL(mul_kernel, x * b[i])
KERNEL(fma_kernel, __builtin_fmaf(x, b[i], c[i]))
KERNEL(div_kernel, x / b[i])
KERNEL(rcp_kernel, 1.0f / x)
KERNEL(sqrt_kernel, __builtin_sqrtf(x))

static void flush_all(int n, const uint32_t *a, uint32_t *r) {
  for (int i = 0; i < n; i++) r[i] = flushed(a[i]);
}
static void saturate_all(int n, uint32_t *r) {
  for (int i = 0; i < n; i++) r[i] = saturated(r[i]);
}
ALWAYS_INLINE void run_kernel(Kernel *kernel, int n, int mode, bool ftz, bool sat,
                              const uint32_t *a, const uint32_t *b, const uint32_t *c,
                              uint32_t *r) {
  uint32_t fa[64], fb[64], fc[64];
  if (__builtin_expect(ftz, 0)) {
    flush_all(n, a, fa), flush_all(n, b, fb), flush_all(n, c, fc);
    a = fa, b = fb, c = fc;
  }
  if (__builtin_expect(mode > RN, 0)) {
    round_as(mode);
    BARRIER4(a, b, c, r);
    kernel(n, (const float *)a, (const float *)b, (const float *)c, r);
    BARRIER4(a, b, c, r);
    round_nearest(mode);
  } else kernel(n, (const float *)a, (const float *)b, (const float *)c, r);
  if (__builtin_expect(ftz, 0)) flush_all(n, r, r);
  if (__builtin_expect(sat, 0)) saturate_all(n, r);
}

#define ALIAS32(name, other) const uint32_t *name = other
#define ALIAS64(name, other) const uint64_t *name = other
// Operands of one, two and three sources; what is not there stands for the first.
#define SOURCES_1(W) LANES##W(a, 1); ALIAS##W(b, a); ALIAS##W(c, a)
#define SOURCES_2(W) LANES##W(a, 1); LANES##W(b, 2); ALIAS##W(c, a)
#define SOURCES_3(W) LANES##W(a, 1); LANES##W(b, 2); LANES##W(c, 3)

// mod: rounding, ftz, sat
#define SINGLE(name, arity, kernel) \
  HANDLER(name##_f32) { \
    SOURCES_##arity(32); uint32_t r[32]; \
    run_kernel(kernel, 32, I->mod[0], I->mod[1], I->mod[2], a, b, c, r); \
    PUT32(0, r); return DONE; \
  }
#define PAIR(name, arity, kernel) \
  HANDLER(name##_f32x2) { \
    SOURCES_##arity(64); uint64_t r[32]; \
    run_kernel(kernel, 64, I->mod[0], I->mod[1], false, (const uint32_t *)a, \
               (const uint32_t *)b, (const uint32_t *)c, (uint32_t *)r); \
    PUT64(0, r); return DONE; \
  }
SINGLE(add, 2, add_kernel) PAIR(add, 2, add_kernel)
SINGLE(sub, 2, sub_kernel) PAIR(sub, 2, sub_kernel)
SINGLE(mul, 2, mul_kernel) PAIR(mul, 2, mul_kernel)
SINGLE(fma, 3, fma_kernel) PAIR(fma, 3, fma_kernel)
SINGLE(div, 2, div_kernel)
SINGLE(rcp, 1, rcp_kernel)
SINGLE(sqrt, 1, sqrt_kernel)

// Sums and products of f16 or bf16 with f32. mod: rounding, sat, type (1 f16, 2 bf16).
static void widen(int n, bool bf16, const uint32_t *a, uint32_t *r) {
  if (bf16) for (int i = 0; i < n; i++) r[i] = a[i] << 16;
  else for (int i = 0; i < n; i++) r[i] = f32_of_f16(a[i] & 0xFFFF);
}
#define MIXED(name, arity, kernel) \
  HANDLER(name##_mixed) { \
    SOURCES_##arity(32); uint32_t r[32], wa[32], wb[32]; \
    widen(32, I->mod[2] == 2, a, wa); \
    if (arity == 3) { widen(32, I->mod[2] == 2, b, wb); b = wb; } \
    run_kernel(kernel, 32, I->mod[0], false, I->mod[1], wa, b, c, r); \
    PUT32(0, r); return DONE; \
  }
MIXED(add, 2, add_kernel)
MIXED(sub, 2, sub_kernel)
MIXED(fma, 3, fma_kernel)

// ---------------------------------------------------------------------------- f16 and bf16
//
// Computed in double: products are exact, sums rounded to odd, so that the final rounding is the
// only one. A lane of a pair has its low half at element 2 l.
typedef void HalfKernel(int n, const double *restrict a, const double *restrict b,
                        const double *restrict c, double *restrict r);
#define HALF_KERNEL(name, expr) \
  static void name(int n, const double *restrict a, const double *restrict b, \
                   const double *restrict c, double *restrict r) { \
    (void)b; (void)c; \
    for (int i = 0; i < n; i++) { double x = a[i]; r[i] = expr; } \
  }
HALF_KERNEL(half_add, add_odd(x, b[i]))
HALF_KERNEL(half_sub, add_odd(x, -b[i]))
HALF_KERNEL(half_mul, x * b[i])
HALF_KERNEL(half_fma, add_odd(x * b[i], c[i]))
HALF_KERNEL(half_ex2, exp2(x))
HALF_KERNEL(half_tanh, tanh(x))

// Codes of the elements of a register, and back.
static void split(bool pair, const uint32_t *a, uint32_t *r) {
  if (pair) FOR_LANES(l) { r[2 * l] = a[l] & 0xFFFF; r[2 * l + 1] = a[l] >> 16; }
  else FOR_LANES(l) r[l] = a[l] & 0xFFFF;
}
static void join(bool pair, const uint32_t *a, uint32_t *r) {
  if (pair) FOR_LANES(l) r[l] = a[2 * l] | a[2 * l + 1] << 16;
  else FOR_LANES(l) r[l] = a[l];
}
#define F16_EXPONENT 0x7C00u
#define BF16_EXPONENT 0x7F80u
static void flush_halves(int n, bool bf16, uint32_t *r) {
  uint32_t exponent = bf16 ? BF16_EXPONENT : F16_EXPONENT;
  for (int i = 0; i < n; i++) r[i] = r[i] & exponent ? r[i] : r[i] & 0x8000;
}
static void to_doubles(int n, bool bf16, const uint32_t *codes, double *r) {
  uint32_t bits[64];
  widen(n, bf16, codes, bits);
  for (int i = 0; i < n; i++) r[i] = as_float(bits[i]);
}
// The tensor map's mark of an element outside the tensor, when it asks for zeros from fma.oob.
#define OOB_NAN 0x7FFEu   // in both formats
enum { H_FTZ = 1, H_SAT = 2, H_RELU = 4, H_OOB = 8 };

static int half_operation(Warp *w, const Insn *I, Mask m, HalfKernel *kernel, int arity, bool bf16,
                          bool pair, unsigned flags) {
  uint32_t codes[3][64], result[64], r[32];
  double x[3][64], y[64];
  int n = pair ? 64 : 32;
  for (int k = 0; k < arity; k++) {
    LANES32(a, k + 1);
    split(pair, a, codes[k]);
    if (flags & H_FTZ) flush_halves(n, bf16, codes[k]);
    to_doubles(n, bf16, codes[k], x[k]);
  }
  kernel(n, x[0], x[1], x[2], y);
  const Format *f = bf16 ? &BF16 : &F16;
  for (int i = 0; i < n; i++) {
    result[i] = narrow(y[i], f, RN);
    bool nan = y[i] != y[i];
    if (flags & H_SAT) result[i] = nan || y[i] <= 0 ? 0 : y[i] > 1 ? narrow(1, f, RN) : result[i];
    if (flags & H_RELU && !nan && result[i] & 0x8000) result[i] = 0;
    if (flags & H_OOB && (codes[0][i] == OOB_NAN || codes[1][i] == OOB_NAN)) result[i] = 0;
  }
  if (flags & H_FTZ) flush_halves(n, bf16, result);
  join(pair, result, r);
  PUT32(0, r); return DONE;
}
#define FLAG(k, flag) (I->mod[k] ? flag : 0)
#define HALF(name, arity, kernel, type, bf16, pair, flags) \
  HANDLER(name##_##type) { return half_operation(w, I, m, kernel, arity, bf16, pair, flags); }
#define HALF_ALL(name, arity, kernel) \
  HALF(name, arity, kernel, f16, false, false, FLAG(1, H_FTZ) | FLAG(2, H_SAT)) \
  HALF(name, arity, kernel, f16x2, false, true, FLAG(1, H_FTZ) | FLAG(2, H_SAT)) \
  HALF(name, arity, kernel, bf16, true, false, 0) \
  HALF(name, arity, kernel, bf16x2, true, true, 0)
HALF_ALL(add, 2, half_add)
HALF_ALL(sub, 2, half_sub)
HALF_ALL(mul, 2, half_mul)
// fma. mod: ftz, sat, relu (f16); relu (bf16, oob)
#define HALF_FMA_FLAGS (FLAG(0, H_FTZ) | FLAG(1, H_SAT) | FLAG(2, H_RELU))
#define HALF_OOB_FLAGS (H_OOB | FLAG(0, H_RELU))
HALF(fma, 3, half_fma, f16, false, false, HALF_FMA_FLAGS)
HALF(fma, 3, half_fma, f16x2, false, true, HALF_FMA_FLAGS)
HALF(fma, 3, half_fma, bf16, true, false, FLAG(0, H_RELU))
HALF(fma, 3, half_fma, bf16x2, true, true, FLAG(0, H_RELU))
HALF(fma_oob, 3, half_fma, f16, false, false, HALF_OOB_FLAGS)
HALF(fma_oob, 3, half_fma, f16x2, false, true, HALF_OOB_FLAGS)
HALF(fma_oob, 3, half_fma, bf16, true, false, HALF_OOB_FLAGS)
HALF(fma_oob, 3, half_fma, bf16x2, true, true, HALF_OOB_FLAGS)
// approximations: correctly rounded
HALF(ex2, 1, half_ex2, f16, false, false, 0)
HALF(ex2, 1, half_ex2, f16x2, false, true, 0)
HALF(ex2, 1, half_ex2, bf16, true, false, H_FTZ)
HALF(ex2, 1, half_ex2, bf16x2, true, true, H_FTZ)
HALF(tanh, 1, half_tanh, f16, false, false, 0)
HALF(tanh, 1, half_tanh, f16x2, false, true, 0)
HALF(tanh, 1, half_tanh, bf16, true, false, 0)
HALF(tanh, 1, half_tanh, bf16x2, true, true, 0)

// -------------------------------------------------------------------------- minimum, maximum
//
// On codes of any format, shifted to the top of 32 bits, as ordered integers: -0 < +0.
ALWAYS_INLINE int32_t ordered(uint32_t v) {
  return (int32_t)(v ^ ((uint32_t)((int32_t)v >> 31) >> 1));
}
ALWAYS_INLINE uint32_t larger(uint32_t x, uint32_t y) { return ordered(x) > ordered(y) ? x : y; }
ALWAYS_INLINE uint32_t smaller(uint32_t x, uint32_t y) { return ordered(x) < ordered(y) ? x : y; }
// With the rules for NaN: `nan` is the canonical one, `infinity` the largest magnitude of the rest.
ALWAYS_INLINE uint32_t extreme(uint32_t x, uint32_t y, bool max, bool keep_nan, uint32_t infinity,
                               uint32_t nan) {
  bool nx = (x & 0x7FFFFFFF) > infinity, ny = (y & 0x7FFFFFFF) > infinity;
  uint32_t r = max ? larger(x, y) : smaller(x, y);
  r = nx ? y : ny ? x : r;
  return (keep_nan ? nx | ny : nx & ny) ? nan : r;
}
#define EXTREME32(x, y, max, keep_nan) extreme(x, y, max, keep_nan, 0x7F800000, NAN32)
#define EXTREME32_OF_3(x, y, z, max, keep_nan) \
  EXTREME32(EXTREME32(x, y, max, keep_nan), z, max, keep_nan)

// The common case has a loop of its own. mod: ftz, NaN, xorsign.abs
#define EXTREMES(name, is_max) \
  HANDLER(name##_f32) { \
    LANES32(a, 1); LANES32(b, 2); uint32_t r[32], fa[32], fb[32]; \
    if (I->mod[0]) { flush_all(32, a, fa), flush_all(32, b, fb); a = fa, b = fb; } \
    if (I->mod[2]) FOR_LANES(l) { \
      uint32_t v = EXTREME32(a[l] & 0x7FFFFFFF, b[l] & 0x7FFFFFFF, is_max, I->mod[1] != 0); \
      r[l] = v > 0x7F800000 ? v : v | ((a[l] ^ b[l]) & 0x80000000); \
    } \
    else if (I->mod[1]) FOR_LANES(l) r[l] = EXTREME32(a[l], b[l], is_max, true); \
    else FOR_LANES(l) r[l] = EXTREME32(a[l], b[l], is_max, false); \
    PUT32(0, r); return DONE; \
  } \
  /* mod: ftz, NaN, abs */ \
  HANDLER(name##3_f32) { \
    LANES32(a, 1); LANES32(b, 2); LANES32(c, 3); uint32_t r[32], fa[32], fb[32], fc[32]; \
    if (I->mod[0]) { \
      flush_all(32, a, fa), flush_all(32, b, fb), flush_all(32, c, fc); \
      a = fa, b = fb, c = fc; \
    } \
    uint32_t keep = I->mod[2] ? 0x7FFFFFFF : ~0u; \
    if (I->mod[1]) FOR_LANES(l) \
      r[l] = EXTREME32_OF_3(a[l] & keep, b[l] & keep, c[l] & keep, is_max, true); \
    else FOR_LANES(l) \
      r[l] = EXTREME32_OF_3(a[l] & keep, b[l] & keep, c[l] & keep, is_max, false); \
    PUT32(0, r); return DONE; \
  } \
  HANDLER(name##_half) { return half_extreme(w, I, m, is_max); } \
  HANDLER(name##_f64) { \
    LANES64(a, 1); LANES64(b, 2); uint64_t r[32]; \
    FOR_LANES(l) { \
      double x = as_double(a[l]), y = as_double(b[l]); \
      bool first = x == y ? (a[l] >> 63 < b[l] >> 63) == is_max : (x > y) == is_max; \
      uint64_t number = x != x ? b[l] : y != y ? a[l] : first ? a[l] : b[l]; \
      r[l] = x != x && y != y ? b[l] | 1ull << 51 : number; \
    } \
    PUT64(0, r); return DONE; \
  }
// mod: ftz, NaN, xorsign.abs, type (f16 f16x2 bf16 bf16x2)
static int half_extreme(Warp *w, const Insn *I, Mask m, bool is_max) {
  LANES32(a, 1); LANES32(b, 2); uint32_t x[64], y[64], v[64], r[32];
  bool pair = (I->mod[3] - 1) & 1, bf16 = I->mod[3] > 2;
  uint32_t infinity = (bf16 ? BF16_EXPONENT : F16_EXPONENT) << 16;
  int n = pair ? 64 : 32;
  split(pair, a, x), split(pair, b, y);
  if (I->mod[0]) flush_halves(n, bf16, x), flush_halves(n, bf16, y);
  for (int i = 0; i < n; i++) {
    uint32_t p = x[i] << 16, q = y[i] << 16, sign = I->mod[2] ? (p ^ q) & 0x80000000 : 0;
    if (I->mod[2]) p &= 0x7FFFFFFF, q &= 0x7FFFFFFF;
    uint32_t e = extreme(p, q, is_max, I->mod[1] != 0, infinity, NAN16 << 16);
    v[i] = (e > infinity && !(e >> 31) ? e : e | sign) >> 16;
  }
  join(pair, v, r);
  PUT32(0, r); return DONE;
}
EXTREMES(min, false)
EXTREMES(max, true)

// ------------------------------------------------------------------------------------- signs
//
// mod: ftz
#define SIGN(name, expr) \
  HANDLER(name##_f32) { \
    LANES32(a, 1); uint32_t r[32]; bool ftz = I->mod[0]; \
    FOR_LANES(l) { \
      uint32_t v = ftz ? flushed(a[l]) : a[l], sign = 0x80000000; r[l] = expr; \
      r[l] = (v & 0x7FFFFFFF) > 0x7F800000 ? NAN32 : r[l]; \
    } \
    PUT32(0, r); return DONE; \
  } \
  HANDLER(name##_f64) { \
    LANES64(a, 1); uint64_t r[32], sign = 1ull << 63; \
    FOR_LANES(l) { uint64_t v = a[l]; r[l] = expr; } \
    PUT64(0, r); return DONE; \
  } \
  /* mod: ftz, type (f16 f16x2 bf16 bf16x2) */ \
  HANDLER(name##_half) { \
    LANES32(a, 1); uint32_t x[64], r[32], sign = 0x8000; \
    bool pair = (I->mod[1] - 1) & 1, bf16 = I->mod[1] > 2; \
    int n = pair ? 64 : 32; \
    uint32_t infinity = bf16 ? BF16_EXPONENT : F16_EXPONENT; \
    split(pair, a, x); \
    if (I->mod[0]) flush_halves(n, bf16, x); \
    for (int i = 0; i < n; i++) { \
      uint32_t v = x[i]; x[i] = (v & 0x7FFF) > infinity ? NAN16 : (expr); \
    } \
    join(pair, x, r); \
    PUT32(0, r); return DONE; \
  }
SIGN(abs, v & ~sign)
SIGN(neg, v ^ sign)

HANDLER(copysign_f32) {
  LANES32(a, 1); LANES32(b, 2); uint32_t r[32];
  FOR_LANES(l) r[l] = (a[l] & 0x80000000) | (b[l] & 0x7FFFFFFF);
  PUT32(0, r); return DONE;
}
HANDLER(copysign_f64) {
  LANES64(a, 1); LANES64(b, 2); uint64_t r[32], sign = 1ull << 63;
  FOR_LANES(l) r[l] = (a[l] & sign) | (b[l] & ~sign);
  PUT64(0, r); return DONE;
}

// ---------------------------------------------------------------------------------------- f64

// A NaN among the operands comes out quiet, the first one first.
#define DOUBLE_LOOP(expr) \
  FOR_LANES(l) { \
    double x = as_double(a[l]), y = as_double(b[l]), z = as_double(c[l]), v; \
    (void)y; (void)z; \
    v = expr; \
    uint64_t quiet = 1ull << 51; \
    r[l] = v == v ? double_bits(v) : x != x ? a[l] | quiet : y != y ? b[l] | quiet \
           : z != z ? c[l] | quiet : NAN64; \
  }
#define DOUBLE(name, arity, expr) \
  HANDLER(name##_f64) { \
    SOURCES_##arity(64); uint64_t r[32]; int mode = I->mod[0]; \
    round_as(mode); \
    BARRIER4(a, b, c, r); \
    DOUBLE_LOOP(expr) \
    BARRIER4(a, b, c, r); \
    round_nearest(mode); \
    PUT64(0, r); return DONE; \
  }
DOUBLE(add, 2, x + y)
DOUBLE(sub, 2, x - y)
DOUBLE(mul, 2, x * y)
DOUBLE(fma, 3, __builtin_fma(x, y, z))
DOUBLE(div, 2, x / y)
DOUBLE(rcp, 1, 1.0 / x)
DOUBLE(sqrt, 1, __builtin_sqrt(x))
// Of the approximations of double, the hardware looks at the upper halves only. mod: none
#define GROSS(name, expr) \
  HANDLER(name##_approx_f64) { \
    LANES64(a, 1); uint64_t r[32]; \
    FOR_LANES(l) { \
      double x = as_double(a[l] & 0xFFFFFFFF00000000); \
      if (fabs(x) < 0x1p-1022) x = copysign(0, x); \
      double v = expr; \
      if (fabs(v) < 0x1p-1022) v = copysign(0, v); \
      r[l] = v == v ? double_bits(v) & 0xFFFFFFFF00000000 : NAN64; \
    } \
    PUT64(0, r); return DONE; \
  }
GROSS(rcp, 1.0 / x)
GROSS(rsqrt, 1.0 / sqrt(x))
HANDLER(rsqrt_f64) {
  LANES64(a, 1); uint64_t r[32];
  FOR_LANES(l) {
    double v = 1.0 / sqrt(as_double(a[l]));
    r[l] = v == v ? double_bits(v) : NAN64;
  }
  PUT64(0, r); return DONE;
}

// ----------------------------------------------------------------------------- approximations
//
// The value itself, rounded once from double; the hardware's differs in the last bits.

// 2^x, relative error below 1e-13 before rounding: a polynomial for 2^f - 1 on [-1/2, 1/2].
ALWAYS_INLINE double exponential(double x) {
  x = x < -1000 ? -1000 : x > 1000 ? 1000 : x;  // f32 has long gone to 0 or infinity
  double shifted = x + 0x1.8p52, f = x - (shifted - 0x1.8p52);
  double p = 0x1.b63880a30e9ffp-24;
  p = p * f + 0x1.63d136366db24p-20;
  p = p * f + 0x1.ffcb9515a8016p-17;
  p = p * f + 0x1.4308ac85aa947p-13;
  p = p * f + 0x1.5d87fe86fe88ep-10;
  p = p * f + 0x1.3b2ab7181b755p-7;
  p = p * f + 0x1.c6b08d7047e52p-5;
  p = p * f + 0x1.ebfbdff823cedp-3;
  p = p * f + 0x1.62e42fefa39efp-1;
  p = p * f + 1.0;
  return as_double(double_bits(p) + (double_bits(shifted) << 52));
}
HANDLER(ex2_f32) {  // mod: ftz
  LANES32(a, 1); uint32_t r[32], f[32];
  if (I->mod[0]) flush_all(32, a, f); else memcpy(f, a, 128);
  FOR_LANES(l) r[l] = float_bits((float)exponential((double)as_float(f[l])));
  FOR_LANES(l) r[l] = (f[l] & 0x7FFFFFFF) > 0x7F800000 ? NAN32 : r[l];
  if (I->mod[0]) flush_all(32, r, r);
  PUT32(0, r); return DONE;
}

// The hardware first multiplies by the f32 nearest to 1 / (2 pi), cutting off the product, and
// takes the result for a number of turns: that is what large arguments lose. Small ones are
// flushed.
#define TWO_PI 6.283185307179586476925
static double turns(double x) {
  double t = x * (double)0.15915494667125701904f;
  t = as_float(flushed(narrow(t, &F32, RZ)));
  return t - rint(t);
}
// The others. mod: ftz
#define APPROXIMATE(name, expr) \
  HANDLER(name##_approx_f32) { \
    LANES32(a, 1); uint32_t r[32], f[32]; \
    if (I->mod[0]) flush_all(32, a, f); else memcpy(f, a, 128); \
    FOR_LANES(l) { double x = as_float(f[l]); r[l] = canonical((float)(expr)); } \
    if (I->mod[0]) flush_all(32, r, r); \
    PUT32(0, r); return DONE; \
  }
APPROXIMATE(lg2, log2(x))
APPROXIMATE(sin, sin(turns(x) * TWO_PI))
APPROXIMATE(cos, cos(turns(x) * TWO_PI))
APPROXIMATE(rcp, 1.0 / x)
APPROXIMATE(sqrt, __builtin_sqrt(x))
APPROXIMATE(rsqrt, 1.0 / __builtin_sqrt(x))
HANDLER(tanh_f32) {
  LANES32(a, 1); uint32_t r[32];
  FOR_LANES(l) r[l] = canonical((float)tanh(as_float(a[l])));
  PUT32(0, r); return DONE;
}
// a * (1 / b): beyond 2^126 the reciprocal is 0. mod: ftz
HANDLER(div_approx_f32) {
  LANES32(a, 1); LANES32(b, 2); uint32_t r[32], fa[32], fb[32];
  if (I->mod[0]) { flush_all(32, a, fa), flush_all(32, b, fb); a = fa, b = fb; }
  FOR_LANES(l) {
    float x = as_float(a[l]), y = as_float(b[l]);
    uint32_t sign = (a[l] ^ b[l]) & 0x80000000, magnitude = b[l] & 0x7FFFFFFF;
    bool large = magnitude > 0x7E800000 && magnitude < 0x7F800000;
    float v = large ? x * as_float(sign ^ (a[l] & 0x80000000)) : x / y;
    r[l] = canonical(v);
  }
  if (I->mod[0]) flush_all(32, r, r);
  PUT32(0, r); return DONE;
}
HANDLER(div_full_f32) {  // mod: ftz
  LANES32(a, 1); LANES32(b, 2); uint32_t r[32];
  run_kernel(div_kernel, 32, RN, I->mod[0], false, a, b, a, r);
  PUT32(0, r); return DONE;
}

// ------------------------------------------------------------------------------- comparisons
//
// Each even one of the pattern is the inverse of the one before it, NaN included.
#define COMPARISONS "(.eq|neu|lt|geu|gt|leu|ge|ltu|le|gtu|ne|equ|num|nan)"
#define BOOLEANS "{.and|or|xor}"
#define ORDERED_COMPARE(name, T) \
  static Mask name(int comparison, const T *a, const T *b) { \
    uint32_t r[32]; \
    switch ((comparison - 1) / 2) { \
      case 0: FOR_LANES(l) r[l] = a[l] == b[l] ? ~0u : 0; break; \
      case 1: FOR_LANES(l) r[l] = a[l] < b[l] ? ~0u : 0; break; \
      case 2: FOR_LANES(l) r[l] = a[l] > b[l] ? ~0u : 0; break; \
      case 3: FOR_LANES(l) r[l] = a[l] >= b[l] ? ~0u : 0; break; \
      case 4: FOR_LANES(l) r[l] = a[l] <= b[l] ? ~0u : 0; break; \
      case 5: FOR_LANES(l) r[l] = (a[l] < b[l]) | (a[l] > b[l]) ? ~0u : 0; break; \
      default: FOR_LANES(l) r[l] = (a[l] == a[l]) & (b[l] == b[l]) ? ~0u : 0; \
    } \
    return comparison & 1 ? mask_of(r) : ~mask_of(r); \
  }
ORDERED_COMPARE(compare_float, float)
ORDERED_COMPARE(compare_double, double)
ALWAYS_INLINE Mask combined(int boolean, Mask x, Mask y) {
  return boolean == 0 ? x : boolean == 1 ? x & y : boolean == 2 ? x | y : x ^ y;
}
static Mask compared_f32(Warp *w, const Insn *I, Mask m, int first, bool ftz) {
  LANES32(a, first); LANES32(b, first + 1); uint32_t fa[32], fb[32];
  if (ftz) { flush_all(32, a, fa), flush_all(32, b, fb); a = fa, b = fb; }
  return compare_float(I->mod[0], (const float *)a, (const float *)b);
}
static Mask compared_f64(Warp *w, const Insn *I, Mask m, int first, bool ftz) {
  (void)ftz;
  LANES64(a, first); LANES64(b, first + 1);
  return compare_double(I->mod[0], (const double *)a, (const double *)b);
}
// Halves at `shift` of the lanes.
static Mask compared_half(Warp *w, const Insn *I, Mask m, int first, bool ftz, bool bf16,
                          int shift) {
  LANES32(a, first); LANES32(b, first + 1); uint32_t x[32], y[32], fx[32], fy[32];
  FOR_LANES(l) { x[l] = a[l] >> shift & 0xFFFF; y[l] = b[l] >> shift & 0xFFFF; }
  if (ftz) flush_halves(32, bf16, x), flush_halves(32, bf16, y);
  widen(32, bf16, x, fx), widen(32, bf16, y, fy);
  return compare_float(I->mod[0], (const float *)fx, (const float *)fy);
}
// setp. mod: comparison, boolean, ftz; operands: p q a b c
static int put_compared(Warp *w, const Insn *I, Mask m, Mask p, Mask q) {
  Mask c = I->mod[1] ? SRCP(4) : 0;
  PUTP(0, combined(I->mod[1], p, c)); PUTP(1, combined(I->mod[1], q, c)); return DONE;
}
#define SETP(name, expr) \
  HANDLER(setp_##name) { Mask v = expr; return put_compared(w, I, m, v, ~v); }
#define SETP_PAIR(name, bf16) \
  HANDLER(setp_##name) { \
    Mask low = compared_half(w, I, m, 2, I->mod[2], bf16, 0); \
    Mask high = compared_half(w, I, m, 2, I->mod[2], bf16, 16); \
    return put_compared(w, I, m, low, high); \
  }
SETP(f32, compared_f32(w, I, m, 2, I->mod[2]))
SETP(f64, compared_f64(w, I, m, 2, false))
SETP(f16, compared_half(w, I, m, 2, I->mod[2], false, 0))
SETP(bf16, compared_half(w, I, m, 2, false, true, 0))
SETP_PAIR(f16x2, false)
SETP_PAIR(bf16x2, true)
// set. mod: comparison, boolean, ftz, type of the result; operands: d a b c
static const uint32_t TRUE_VALUES[] = {0, ~0u, ~0u, 0x3F800000, 0x3C00, 0x3F80, 0xFFFF, 0xFFFF};
#define SET_TYPES "(.u32|s32|f32|f16|bf16|u16|s16)"  // in the order of TRUE_VALUES, from 1 on
#define SET(name, expr) \
  HANDLER(set_##name) { \
    uint32_t r[32], value = TRUE_VALUES[I->mod[3]]; Mask v = expr; \
    v = combined(I->mod[1], v, I->mod[1] ? SRCP(3) : 0); \
    FOR_LANES(l) r[l] = v >> l & 1 ? value : 0; \
    PUT32(0, r); return DONE; \
  }
// Pairs give a pair of 1.0 (of their own type) or of 0xFFFF.
#define SET_PAIR(name, bf16, one) \
  HANDLER(set_##name) { \
    uint32_t r[32], value = I->mod[3] == 1 ? one : 0xFFFF; \
    Mask low = compared_half(w, I, m, 1, I->mod[2], bf16, 0); \
    Mask high = compared_half(w, I, m, 1, I->mod[2], bf16, 16); \
    Mask c = I->mod[1] ? SRCP(3) : 0; \
    low = combined(I->mod[1], low, c), high = combined(I->mod[1], high, c); \
    FOR_LANES(l) r[l] = (low >> l & 1 ? value : 0) | (high >> l & 1 ? value << 16 : 0); \
    PUT32(0, r); return DONE; \
  }
SET(from_f32, compared_f32(w, I, m, 1, I->mod[2]))
SET(from_f64, compared_f64(w, I, m, 1, false))
SET(from_f16, compared_half(w, I, m, 1, I->mod[2], false, 0))
SET(from_bf16, compared_half(w, I, m, 1, I->mod[2], true, 0))
SET_PAIR(from_f16x2, false, 0x3C00)
SET_PAIR(from_bf16x2, true, 0x3F80)

// testp. mod: property
enum { FINITE = 1, INFINITE, NUMBER, NOT_A_NUMBER, NORMAL, SUBNORMAL };
ALWAYS_INLINE bool has_property(int property, uint64_t magnitude, uint64_t infinity,
                                uint64_t smallest) {
  switch (property) {
    case FINITE: return magnitude < infinity;
    case INFINITE: return magnitude == infinity;
    case NUMBER: return magnitude <= infinity;
    case NOT_A_NUMBER: return magnitude > infinity;
    case NORMAL: return magnitude < infinity && (magnitude >= smallest || magnitude == 0);
    default: return magnitude != 0 && magnitude < smallest;
  }
}
HANDLER(testp_f32) {
  LANES32(a, 1); Mask v = 0;
  FOR_LANES(l)
    v |= (Mask)has_property(I->mod[0], a[l] & 0x7FFFFFFF, 0x7F800000, 0x00800000) << l;
  PUTP(0, v); return DONE;
}
HANDLER(testp_f64) {
  LANES64(a, 1); Mask v = 0;
  FOR_LANES(l)
    v |= (Mask)has_property(I->mod[0], a[l] & ~(1ull << 63), 0x7FFull << 52, 1ull << 52) << l;
  PUTP(0, v); return DONE;
}

// -------------------------------------------------------------------------------------- forms

#define ROUNDING "{.rn|rz|rm|rp}"
#define S32_1 "d32 s32"
#define S32_2 "d32 s32 s32"
#define S32_3 "d32 s32 s32 s32"
#define S64_1 "d64 s64"
#define S64_2 "d64 s64 s64"
#define S64_3 "d64 s64 s64 s64"
#define FORMS_ARITHMETIC(op) \
  {#op ROUNDING "{.ftz}{.sat}.f32", S32_2, op##_f32, 0}, \
  {#op ROUNDING "{.ftz}.f32x2", S64_2, op##_f32x2, 0}, \
  {#op ROUNDING ".f64", S64_2, op##_f64, 0}, \
  {#op "{.rn}{.ftz}{.sat}.f16", S32_2, op##_f16, 0}, \
  {#op "{.rn}{.ftz}{.sat}.f16x2", S32_2, op##_f16x2, 0}, \
  {#op "{.rn}.bf16", S32_2, op##_bf16, 0}, \
  {#op "{.rn}.bf16x2", S32_2, op##_bf16x2, 0}
#define FORMS_EXTREME(op) \
  {#op "{.ftz}{.NaN}{.xorsign.abs}.f32", S32_2, op##_f32, 0}, \
  {#op "{.ftz}{.NaN}{.abs}.f32", S32_3, op##3_f32, 0}, \
  {#op "{.ftz}{.NaN}{.xorsign.abs}(.f16|f16x2|bf16|bf16x2)", S32_2, op##_half, 0}, \
  {#op ".f64", S64_2, op##_f64, 0}
#define FORMS_SIGN(op) \
  {#op "{.ftz}.f32", S32_1, op##_f32, 0}, {#op ".f64", S64_1, op##_f64, 0}, \
  {#op "{.ftz}(.f16|f16x2|bf16|bf16x2)", S32_1, op##_half, 0}
#define FORM_APPROXIMATE(op, handler) {#op ".approx{.ftz}.f32", S32_1, handler, 0}

const Form FORMS_FLOAT[] = {
  FORMS_ARITHMETIC(add), FORMS_ARITHMETIC(sub), FORMS_ARITHMETIC(mul),
  {"fma(.rn|rz|rm|rp){.ftz}{.sat}.f32", S32_3, fma_f32, 0},
  {"mad" ROUNDING "{.ftz}{.sat}.f32", S32_3, fma_f32, 0},
  {"fma(.rn|rz|rm|rp){.ftz}.f32x2", S64_3, fma_f32x2, 0},
  {"fma(.rn|rz|rm|rp).f64", S64_3, fma_f64, 0},
  {"mad(.rn|rz|rm|rp).f64", S64_3, fma_f64, 0},
  {"fma.rn{.ftz}{.sat}{.relu}.f16", S32_3, fma_f16, 0},
  {"fma.rn{.ftz}{.sat}{.relu}.f16x2", S32_3, fma_f16x2, 0},
  {"fma.rn{.relu}.bf16", S32_3, fma_bf16, 0}, {"fma.rn{.relu}.bf16x2", S32_3, fma_bf16x2, 0},
  {"fma.rn.oob{.relu}.f16", S32_3, fma_oob_f16, 0},
  {"fma.rn.oob{.relu}.f16x2", S32_3, fma_oob_f16x2, 0},
  {"fma.rn.oob{.relu}.bf16", S32_3, fma_oob_bf16, 0},
  {"fma.rn.oob{.relu}.bf16x2", S32_3, fma_oob_bf16x2, 0},
  {"add" ROUNDING "{.sat}.f32(.f16|bf16)", S32_2, add_mixed, 0},
  {"sub" ROUNDING "{.sat}.f32(.f16|bf16)", S32_2, sub_mixed, 0},
  {"fma(.rn|rz|rm|rp){.sat}.f32(.f16|bf16)", S32_3, fma_mixed, 0},
  {"div(.rn|rz|rm|rp){.ftz}.f32", S32_2, div_f32, 0},
  {"div(.rn|rz|rm|rp).f64", S64_2, div_f64, 0},
  {"div.approx{.ftz}.f32", S32_2, div_approx_f32, 0},
  {"div.full{.ftz}.f32", S32_2, div_full_f32, 0},
  {"rcp(.rn|rz|rm|rp){.ftz}.f32", S32_1, rcp_f32, 0},
  {"rcp(.rn|rz|rm|rp).f64", S64_1, rcp_f64, 0},
  {"rcp.approx.ftz.f64", S64_1, rcp_approx_f64, 0},
  {"sqrt(.rn|rz|rm|rp){.ftz}.f32", S32_1, sqrt_f32, 0},
  {"sqrt(.rn|rz|rm|rp).f64", S64_1, sqrt_f64, 0},
  {"rsqrt.approx.f64", S64_1, rsqrt_f64, 0},
  {"rsqrt.approx.ftz.f64", S64_1, rsqrt_approx_f64, 0},
  FORM_APPROXIMATE(ex2, ex2_f32), FORM_APPROXIMATE(lg2, lg2_approx_f32),
  FORM_APPROXIMATE(sin, sin_approx_f32), FORM_APPROXIMATE(cos, cos_approx_f32),
  FORM_APPROXIMATE(rcp, rcp_approx_f32), FORM_APPROXIMATE(sqrt, sqrt_approx_f32),
  FORM_APPROXIMATE(rsqrt, rsqrt_approx_f32),
  {"ex2.approx.f16", S32_1, ex2_f16, 0}, {"ex2.approx.f16x2", S32_1, ex2_f16x2, 0},
  {"ex2.approx.ftz.bf16", S32_1, ex2_bf16, 0}, {"ex2.approx.ftz.bf16x2", S32_1, ex2_bf16x2, 0},
  {"tanh.approx.f32", S32_1, tanh_f32, 0},
  {"tanh.approx.f16", S32_1, tanh_f16, 0}, {"tanh.approx.f16x2", S32_1, tanh_f16x2, 0},
  {"tanh.approx.bf16", S32_1, tanh_bf16, 0}, {"tanh.approx.bf16x2", S32_1, tanh_bf16x2, 0},
  FORMS_EXTREME(min), FORMS_EXTREME(max), FORMS_SIGN(abs), FORMS_SIGN(neg),
  {"copysign.f32", S32_2, copysign_f32, 0}, {"copysign.f64", S64_2, copysign_f64, 0},
  {"setp" COMPARISONS BOOLEANS "{.ftz}.f32", "dpp s32 s32 sp?", setp_f32, 0},
  {"setp" COMPARISONS BOOLEANS ".f64", "dpp s64 s64 sp?", setp_f64, 0},
  {"setp" COMPARISONS BOOLEANS "{.ftz}.f16", "dpp s32 s32 sp?", setp_f16, 0},
  {"setp" COMPARISONS BOOLEANS "{.ftz}.f16x2", "dpp s32 s32 sp?", setp_f16x2, 0},
  {"setp" COMPARISONS BOOLEANS ".bf16", "dpp s32 s32 sp?", setp_bf16, 0},
  {"setp" COMPARISONS BOOLEANS "{.ftz}.bf16x2", "dpp s32 s32 sp?", setp_bf16x2, 0},
  {"set" COMPARISONS BOOLEANS "{.ftz}" SET_TYPES ".f32", "d32 s32 s32 sp?", set_from_f32, 0},
  {"set" COMPARISONS BOOLEANS "{.ftz}" SET_TYPES ".f64", "d32 s64 s64 sp?", set_from_f64, 0},
  {"set" COMPARISONS BOOLEANS "{.ftz}" SET_TYPES ".f16", "d32 s32 s32 sp?", set_from_f16, 0},
  {"set" COMPARISONS BOOLEANS "{.ftz}" SET_TYPES ".bf16", "d32 s32 s32 sp?", set_from_bf16, 0},
  {"set" COMPARISONS BOOLEANS "{.ftz}(.f16x2|u32|s32).f16x2", "d32 s32 s32 sp?", set_from_f16x2, 0},
  {"set" COMPARISONS BOOLEANS "{.ftz}(.bf16x2|u32|s32).bf16x2", "d32 s32 s32 sp?",
   set_from_bf16x2, 0},
  {"testp(.finite|infinite|number|notanumber|normal|subnormal).f32", "dp s32", testp_f32, 0},
  {"testp(.finite|infinite|number|notanumber|normal|subnormal).f64", "dp s64", testp_f64, 0},
  {0}
};
