// Floating-point arithmetic: f32, f32x2, f64, f16, bf16 and their pairs, and the approximations.
#include "approximations.h"
#include <math.h>

#define HANDLER(name) static int name(Warp *w, const Insn *I, Mask m)

// ------------------------------------------------------------------- f32 and f32x2 arithmetic
//
// A kernel computes n = 32 (f32) or 64 (f32x2) results as bits; `wide` gives one result in double,
// exact or rounded to odd (a quotient: accurate enough to compare with a power of two).
typedef void Kernel(int n, const float *restrict a, const float *restrict b,
                    const float *restrict c, uint32_t *restrict r);
typedef double Wide(double x, double y, double z);
#define KERNEL(name, expr, wide_expr) \
  ALWAYS_INLINE void name##_kernel(int n, const float *restrict a, const float *restrict b, \
                                   const float *restrict c, uint32_t *restrict r) { \
    (void)b; (void)c; \
    for (int i = 0; i < n; i++) { float x = a[i]; r[i] = canonical(expr); } \
  } \
  static double name##_wide(double x, double y, double z) { \
    (void)y; (void)z; return wide_expr; \
  }
KERNEL(add, x + b[i], x + y)
KERNEL(sub, x - b[i], x - y)
KERNEL(mul, x * b[i], x * y)
KERNEL(fma, __builtin_fmaf(x, b[i], c[i]), add_odd(x * y, z))
KERNEL(div, x / b[i], x / y)
KERNEL(rcp, 1.0f / x, 1.0 / x)
KERNEL(sqrt, __builtin_sqrtf(x), x)

static void flush_all(int n, const uint32_t *a, uint32_t *r) {
  for (int i = 0; i < n; i++) r[i] = flushed(a[i]);
}
static void saturate_all(int n, uint32_t *r) {
  for (int i = 0; i < n; i++) r[i] = saturated(r[i]);
}
// Results are flushed if they are tiny after rounding to 24 bits with unbounded exponent; some of
// these would round to the smallest normal number.
static void flush_results(Wide *wide, int n, int mode, const uint32_t *a, const uint32_t *b,
                          const uint32_t *c, uint32_t *r) {
  uint32_t smallest = 0;
  for (int i = 0; i < n; i++) {
    smallest |= (r[i] & 0x7FFFFFFF) == 0x00800000;
    r[i] = flushed(r[i]);
  }
  if (smallest)
    for (int i = 0; i < n; i++)
      if ((r[i] & 0x7FFFFFFF) == 0x00800000 &&
          tiny(wide(as_float(a[i]), as_float(b[i]), as_float(c[i])), &F32, mode))
        r[i] &= 0x80000000;
}
ALWAYS_INLINE void run_kernel(Kernel *kernel, Wide *wide, int n, int mode, bool ftz, bool sat,
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
  if (__builtin_expect(ftz, 0)) flush_results(wide, n, mode, a, b, c, r);
  if (__builtin_expect(sat, 0)) saturate_all(n, r);
}
#define RUN(name, n, mode, ftz, sat, a, b, c, r) \
  run_kernel(name##_kernel, name##_wide, n, mode, ftz, sat, a, b, c, r)

#define ALIAS32(name, other) const uint32_t *name = other
#define ALIAS64(name, other) const uint64_t *name = other
// Operands of one, two and three sources; an absent source repeats the first.
#define SOURCES_1(W) LANES##W(a, 1); ALIAS##W(b, a); ALIAS##W(c, a)
#define SOURCES_2(W) LANES##W(a, 1); LANES##W(b, 2); ALIAS##W(c, a)
#define SOURCES_3(W) LANES##W(a, 1); LANES##W(b, 2); LANES##W(c, 3)

// mod: rounding, ftz, sat
#define SINGLE(name, arity) \
  HANDLER(name##_f32) { \
    SOURCES_##arity(32); uint32_t r[32]; \
    RUN(name, 32, I->mod[0], I->mod[1], I->mod[2], a, b, c, r); \
    PUT32(0, r); return DONE; \
  }
#define PAIR(name, arity) \
  HANDLER(name##_f32x2) { \
    SOURCES_##arity(64); uint64_t r[32]; \
    RUN(name, 64, I->mod[0], I->mod[1], false, (const uint32_t *)a, (const uint32_t *)b, \
        (const uint32_t *)c, (uint32_t *)r); \
    PUT64(0, r); return DONE; \
  }
SINGLE(add, 2) PAIR(add, 2)
SINGLE(sub, 2) PAIR(sub, 2)
SINGLE(mul, 2) PAIR(mul, 2)
SINGLE(fma, 3) PAIR(fma, 3)
SINGLE(div, 2)
SINGLE(rcp, 1)
SINGLE(sqrt, 1)

// Sums and products of f16 or bf16 with f32. mod: rounding, sat, type (1 f16, 2 bf16).
static void widen(int n, bool bf16, const uint32_t *a, uint32_t *r) {
  if (bf16) for (int i = 0; i < n; i++) r[i] = a[i] << 16;
  else for (int i = 0; i < n; i++) r[i] = f32_of_f16(a[i] & 0xFFFF);
}
#define MIXED(name, arity) \
  HANDLER(name##_mixed) { \
    SOURCES_##arity(32); uint32_t r[32], wa[32], wb[32]; \
    widen(32, I->mod[2] == 2, a, wa); \
    if (arity == 3) { widen(32, I->mod[2] == 2, b, wb); b = wb; } \
    RUN(name, 32, I->mod[0], false, I->mod[1], wa, b, c, r); \
    PUT32(0, r); return DONE; \
  }
MIXED(add, 2)
MIXED(sub, 2)
MIXED(fma, 3)

// ---------------------------------------------------------------------------- f16 and bf16
//
// Computed in double. Products are exact, and sums are rounded to odd, so that only the final
// rounding counts. A lane of a pair has its low half at element 2 l.
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

// Codes of a register's elements, and a register from codes.
static void split(bool pair, const uint32_t *a, uint32_t *r) {
  if (pair) FOR_LANES(l) { r[2 * l] = a[l] & 0xFFFF; r[2 * l + 1] = a[l] >> 16; }
  else FOR_LANES(l) r[l] = a[l] & 0xFFFF;
}
static void join(bool pair, const uint32_t *a, uint32_t *r) {
  if (pair) FOR_LANES(l) r[l] = a[2 * l] | a[2 * l + 1] << 16;
  else FOR_LANES(l) r[l] = a[l];
}
static void flush_halves(int n, bool bf16, uint32_t *r) {
  uint32_t exponent = bf16 ? INFINITY_BF16 : INFINITY_F16;
  for (int i = 0; i < n; i++) r[i] = r[i] & exponent ? r[i] : r[i] & 0x8000;
}
static void to_doubles(int n, bool bf16, const uint32_t *codes, double *r) {
  uint32_t bits[64];
  widen(n, bf16, codes, bits);
  for (int i = 0; i < n; i++) r[i] = as_float(bits[i]);
}
// The NaN that a tensor map may give elements outside of its tensor; fma.oob ignores the sign.
#define OOB_NAN 0x7FF7u   // in f16 and bf16
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
    if (flags & H_OOB && ((codes[0][i] & 0x7FFF) == OOB_NAN || (codes[1][i] & 0x7FFF) == OOB_NAN))
      result[i] = 0;
    if (flags & H_FTZ && tiny(y[i], f, RN)) result[i] &= 0x8000;
  }
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
// -------------------------------------------------------------------------- minimum, maximum
#define EXTREME32_OF_3(x, y, z, max, keep_nan) \
  EXTREME32(EXTREME32(x, y, max, keep_nan), z, max, keep_nan)

// The common case has its own loop. mod: ftz, NaN, xorsign.abs
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
  uint32_t infinity = (bf16 ? INFINITY_BF16 : INFINITY_F16) << 16;
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
      r[l] = is_nan(v) ? NAN32 : r[l]; \
    } \
    PUT32(0, r); return DONE; \
  } \
  HANDLER(name##_f64) { \
    LANES64(a, 1); uint64_t r[32], sign = 1ull << 63; \
    FOR_LANES(l) { \
      uint64_t v = a[l]; \
      r[l] = (v & ~sign) > 0x7FFull << 52 ? v | 1ull << 51 : (expr); \
    } \
    PUT64(0, r); return DONE; \
  } \
  /* mod: ftz, type (f16 f16x2 bf16 bf16x2) */ \
  HANDLER(name##_half) { \
    LANES32(a, 1); uint32_t x[64], r[32], sign = 0x8000; \
    bool pair = (I->mod[1] - 1) & 1, bf16 = I->mod[1] > 2; \
    int n = pair ? 64 : 32; \
    uint32_t infinity = bf16 ? INFINITY_BF16 : INFINITY_F16; \
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

// A NaN operand becomes the result, quieted, with sign and payload kept; of several NaNs, the
// second operand's NaN wins, else the third operand's.
ALWAYS_INLINE uint64_t double_result(double v, uint64_t a, uint64_t b, uint64_t c) {
  uint64_t infinity = 0x7FFull << 52, magnitude = ~(1ull << 63), quiet = 1ull << 51;
  return v == v ? double_bits(v) : (b & magnitude) > infinity ? b | quiet
         : (c & magnitude) > infinity ? c | quiet : (a & magnitude) > infinity ? a | quiet : NAN64;
}
#define DOUBLE(name, arity, expr) DOUBLE_OF(name, arity, expr, a, b)
#define DOUBLE_OF(name, arity, expr, first, second) \
  HANDLER(name##_f64) { \
    SOURCES_##arity(64); uint64_t r[32]; int mode = I->mod[0]; \
    round_as(mode); \
    BARRIER4(a, b, c, r); \
    FOR_LANES(l) { \
      double x = as_double(a[l]), y = as_double(b[l]), z = as_double(c[l]); \
      (void)y; (void)z; \
      r[l] = double_result(expr, first[l], second[l], c[l]); \
    } \
    BARRIER4(a, b, c, r); \
    round_nearest(mode); \
    PUT64(0, r); return DONE; \
  }
DOUBLE(add, 2, x + y)
DOUBLE(sub, 2, x - y)
DOUBLE(mul, 2, x * y)
DOUBLE(fma, 3, __builtin_fma(x, y, z))
DOUBLE_OF(div, 2, x / y, b, a)  // of two NaNs, the dividend's
DOUBLE(rcp, 1, 1.0 / x)
DOUBLE(sqrt, 1, __builtin_sqrt(x))

// ----------------------------------------------------------------------------- approximations
//
// As ptxas builds the functions from the special function unit, which flushes subnormals: without
// .ftz, arguments are scaled. mod: ftz
#define APPROXIMATE(name, condition, argument, result) \
  HANDLER(name##_approx_f32) { \
    LANES32(a, 1); uint32_t r[32]; \
    if (I->mod[0]) { \
      mufu_##name##s(a, r, 32); \
      PUT32(0, r); return DONE; \
    } \
    uint32_t arguments[32]; \
    FOR_LANES(l) { \
      float x = as_float(a[l]); \
      arguments[l] = float_bits(condition ? argument : x); \
    } \
    mufu_##name##s(arguments, r, 32); \
    FOR_LANES(l) { \
      float x = as_float(a[l]), y = as_float(r[l]); \
      r[l] = canonical(condition ? result : y); \
    } \
    PUT32(0, r); return DONE; \
  }
#define SMALL (__builtin_fabsf(x) < 0x1p-126f)
#define LARGE(x) (__builtin_fabsf(x) > 0x1p126f)
APPROXIMATE(ex2, x < -126, x * 0.5f, y * y)
APPROXIMATE(lg2, SMALL, x * 0x1p24f, y - 24)
APPROXIMATE(sqrt, SMALL, x * 0x1p24f, y * 0x1p-12f)
APPROXIMATE(rsq, SMALL, x * 0x1p24f, y * 0x1p12f)
APPROXIMATE(rcp, SMALL | LARGE(x), x * (LARGE(x) ? 0.25f : 0x1p24f),
            y * (LARGE(x) ? 0.25f : 0x1p24f))
// The unit takes angles in turns: the argument times the f32 near 1 / (2 pi), truncated.
ALWAYS_INLINE uint32_t turns(uint32_t x) {
  double t = (double)as_float(x) * 0x1.45f306p-3;
  return float_bits((float)as_double(double_bits(t) & ~0x1FFFFFFFull));
}
#define ANGLE(name) \
  HANDLER(name##_approx_f32) { \
    LANES32(a, 1); uint32_t r[32], t[32]; \
    FOR_LANES(l) t[l] = turns(a[l]); \
    mufu_##name##s(t, r, 32); \
    PUT32(0, r); return DONE; \
  }
ANGLE(sin)
ANGLE(cos)
HANDLER(tanh_f32) {
  LANES32(a, 1); uint32_t r[32];
  mufu_tanhs(a, r, 32);
  PUT32(0, r); return DONE;
}
// The 16-bit forms truncate the result once more.
#define HALF_APPROXIMATE(name, type, bf16, pair) \
  HANDLER(name##_##type) { \
    LANES32(a, 1); uint32_t codes[64], arguments[64], x[64], r[32]; \
    int n = pair ? 64 : 32; \
    split(pair, a, codes); \
    widen(n, bf16, codes, arguments); \
    mufu_##name##s(arguments, x, n); \
    for (int i = 0; i < n; i++) \
      codes[i] = bf16 || x[i] == NAN32 ? x[i] >> 16 \
                 : x[i] >> 31 == 0 && x[i] >= 0x47800000 ? F16.infinity \
                 : narrow(as_float(x[i]), &F16, RZ); \
    join(pair, codes, r); \
    PUT32(0, r); return DONE; \
  }
#define HALF_APPROXIMATE_ALL(name) \
  HALF_APPROXIMATE(name, f16, false, false) HALF_APPROXIMATE(name, f16x2, false, true) \
  HALF_APPROXIMATE(name, bf16, true, false) HALF_APPROXIMATE(name, bf16x2, true, true)
HALF_APPROXIMATE_ALL(ex2)
HALF_APPROXIMATE_ALL(tanh)

// Quotients are products with a reciprocal; with .full, quotients are also right beyond 2^126.
// mod: ftz
static int divide(Warp *w, const Insn *I, Mask m, bool full) {
  LANES32(a, 1); LANES32(b, 2); uint32_t r[32], x[32], y[32], scale[32];
  bool ftz = I->mod[0];
  FOR_LANES(l) {
    float v = as_float(b[l]);
    bool small = !ftz && __builtin_fabsf(v) < 0x1p-126f;
    scale[l] = float_bits(full && LARGE(v) ? 0.25f : small ? 0x1p24f : 1);
  }
  RUN(mul, 32, RN, ftz, false, a, scale, a, x);
  RUN(mul, 32, RN, ftz, false, b, scale, b, y);
  uint32_t reciprocal[32];
  mufu_rcps(y, reciprocal, 32);
  RUN(mul, 32, RN, ftz, false, x, reciprocal, x, r);
  PUT32(0, r); return DONE;
}
HANDLER(div_approx_f32) { return divide(w, I, m, false); }
HANDLER(div_full_f32) { return divide(w, I, m, true); }

// For double, the approximation reads and writes only the upper halves.
#define UPPER(name) \
  HANDLER(name##_approx_f64) { \
    LANES64(a, 1); uint64_t r[32]; \
    FOR_LANES(l) r[l] = (uint64_t)mufu_##name##64((uint32_t)(a[l] >> 32)) << 32; \
    PUT64(0, r); return DONE; \
  }
UPPER(rcp)
UPPER(rsq)
// Refined once.
ALWAYS_INLINE double refined_rsqrt(double x) {
  double y = as_double((uint64_t)mufu_rsq64((uint32_t)(double_bits(x) >> 32)) << 32);
  double e = __builtin_fma(x, -(y * y), 1.0);
  return __builtin_fma(__builtin_fma(e, 0.375, 0.5), y * e, y);
}
HANDLER(rsqrt_f64) {
  LANES64(a, 1); uint64_t r[32];
  FOR_LANES(l) {
    double x = as_double(a[l]);
    double v = !(x > 0) || x == INFINITY ? 1 / __builtin_sqrt(x)
               : x < 0x1p-1022           ? refined_rsqrt(x * 0x1p54) * 0x1p27
                                         : refined_rsqrt(x);
    r[l] = double_result(v, a[l], a[l], a[l]);
  }
  PUT64(0, r); return DONE;
}

// ------------------------------------------------------------------------------- comparisons
//
// In the pattern, each even comparison is the inverse of the comparison before it, NaN included.
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
// The lanes' 16-bit halves at bit `shift`.
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

static const Form FORMS[] = {
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
  {"rsqrt.approx.ftz.f64", S64_1, rsq_approx_f64, 0},
  FORM_APPROXIMATE(ex2, ex2_approx_f32), FORM_APPROXIMATE(lg2, lg2_approx_f32),
  FORM_APPROXIMATE(sin, sin_approx_f32), FORM_APPROXIMATE(cos, cos_approx_f32),
  FORM_APPROXIMATE(rcp, rcp_approx_f32), FORM_APPROXIMATE(sqrt, sqrt_approx_f32),
  FORM_APPROXIMATE(rsqrt, rsq_approx_f32),
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

const Family FAMILY_FLOAT = {.name = "float", .forms = FORMS};
