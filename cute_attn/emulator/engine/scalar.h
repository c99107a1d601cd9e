// Helpers of the scalar families (integer.c, float.c, convert.c): operands as arrays of lanes,
// masks from comparisons, and the floating-point formats. In these files, "mod:" lists the entries
// of I->mod in order.
#ifndef CUTE_ATTN_SCALAR_H
#define CUTE_ATTN_SCALAR_H

// The host's exception flags are not used, and preserving them would prevent vectorisation.
#pragma GCC optimize("no-trapping-math")

#include "engine.h"
#include "float_bits.h"
#include <fenv.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

// Operand k as 32 lanes called `name`. Unlike SRC32, this macro does not clear the buffer first.
#define LANES32(name, k) \
  uint32_t name##_store[32]; \
  const uint32_t *name = src32_of(w, I, &I->op[k], m, name##_store)
#define LANES64(name, k) \
  uint64_t name##_store[32]; \
  const uint64_t *name = src64_of(w, I, &I->op[k], m, name##_store)

// The lanes whose word is not 0; the words are 0 or all ones.
static inline Mask mask_of(const uint32_t r[32]) {
  Mask v = 0;
#ifdef __AVX2__
  for (int i = 0; i < 4; i++) {
    __m256i x = _mm256_loadu_si256((const __m256i *)(r + 8 * i));
    v |= (Mask)_mm256_movemask_ps(_mm256_castsi256_ps(x)) << (8 * i);
  }
#else
  FOR_LANES(l) v |= (r[l] & 1) << l;
#endif
  return v;
}

// ---------------------------------------------------------------------------------- rounding
//
// Values are indices in the group {.rn|rz|rm|rp} of a pattern; absent means nearest.
enum { RN = 1, RZ, RM, RP, RNA, RS };

// Set the host's rounding mode until the next round_nearest().
static inline void round_as(int mode) {
  static const int modes[] = {FE_TONEAREST, FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  if (mode > RN) fesetround(modes[mode]);
}
static inline void round_nearest(int mode) { if (mode > RN) fesetround(FE_TONEAREST); }
// Keeps arithmetic on the data behind these pointers from moving across a change of the rounding
// mode, because the compiler does not know that the arithmetic depends on the mode.
#define BARRIER4(a, b, c, d) __asm__ volatile("" : : "r"(a), "r"(b), "r"(c), "r"(d) : "memory")

// x + y rounded to odd: a second rounding, to at most 51 bits in any direction, gives the rounded
// exact sum.
ALWAYS_INLINE double add_odd(double x, double y) {
  double s = x + y, t = s - x, error = (x - (s - t)) + (y - t);
  uint64_t bits = double_bits(s);
  int inexact = (error > 0) | (error < 0);
  uint64_t step = (error > 0) == (s > 0) ? 1 : (uint64_t)-1;
  return as_double(bits + (inexact & ~(int)bits & 1 ? step : 0));
}

// ----------------------------------------------------------------------------------- formats

// A double in another format. The 32 bits of `random` line up just below the last bit kept.
ALWAYS_INLINE uint32_t narrow_random(double value, const Format *f, int mode, bool finite,
                                     uint32_t random) {
  uint64_t d = double_bits(value), a = d & ~(1ull << 63);
  uint32_t negative = d >> 63, sign = negative << (f->bits - 1);
  int e = (int)(a >> 52);
  int target = e - 1023 + f->bias, lost = 52 - f->mantissa + (target < 1 ? 1 - target : 0);
  target = target < 1 ? 1 : target;
  lost = lost > 62 ? 62 : lost;
  uint64_t all = (1ull << lost) - 1, half = 1ull << (lost - 1);
  uint64_t s = (a & 0xFFFFFFFFFFFFFull) | (e ? 1ull << 52 : 0);
  bool away = mode == (negative ? RM : RP);
  uint64_t add = mode <= RN    ? half - 1 + (s >> lost & 1)
                 : away        ? all
                 : mode == RNA ? half
                 : mode == RS  ? lost > 32 ? (uint64_t)random << (lost - 32) : random >> (32 - lost)
                               : 0;
  uint64_t code = ((s + add) >> lost) + ((uint64_t)(target - 1) << f->mantissa);
  uint32_t overflow = !finite && (mode <= RN || away || mode >= RNA) ? f->infinity : f->max;
  uint32_t r = code > f->max ? overflow : (uint32_t)code;
  if (e == 0x7FF) {
    if (a << 12) return f->nan;
    r = finite ? f->max : f->infinity;
  }
  return sign | r;
}
ALWAYS_INLINE uint32_t narrow(double value, const Format *f, int mode) {
  return narrow_random(value, f, mode, false, 0);
}

// Whether .ftz flushes v, exact or rounded to odd: whether v, rounded to f's precision with
// unbounded exponent, is below the smallest normal number.
ALWAYS_INLINE bool tiny(double v, const Format *f, int mode) {
  int exponent = 1023 + 1 - f->bias;
  double a = __builtin_fabs(v), smallest = as_double((uint64_t)exponent << 52);
  double ulp = as_double((uint64_t)(exponent - f->mantissa - 1) << 52);
  return mode <= RN                   ? a < smallest - ulp / 2
         : mode == (v < 0 ? RM : RP) ? a <= smallest - ulp
                                       : a < smallest;
}

#endif
