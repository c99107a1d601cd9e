// Conversions.
#include "scalar.h"
#include <math.h>

#define HANDLER(name) static int name(Warp *w, const Insn *I, Mask m)

// Registers may be wider than types: sources are truncated, results extended.
static const uint32_t *low_words(Warp *w, const Insn *I, int k, Mask m, uint32_t buffer[32]) {
  const Operand *o = &I->op[k];
  if (o->kind != K_REG || o->bits != 64) return src32_of(w, I, o, m, buffer);
  uint64_t store[32];
  const uint64_t *a = src64_of(w, I, o, m, store);
  FOR_LANES(l) buffer[l] = (uint32_t)a[l];
  return buffer;
}
#define LOW_WORDS(name, k) \
  uint32_t name##_store[32]; const uint32_t *name = low_words(w, I, k, m, name##_store)
// Results extended to 32 bits; a wider register is sign-extended from bit 31 if `is_signed`.
static void put_extended(Warp *w, const Insn *I, Mask m, const uint32_t *v, bool is_signed) {
  const Operand *o = &I->op[0];
  if (o->bits == 64) {
    uint64_t r[32];
    FOR_LANES(l) r[l] = is_signed ? (uint64_t)(int64_t)(int32_t)v[l] : v[l];
    PUT64(0, r);
  } else if (o->bits < 32) {
    uint32_t r[32], keep = (1u << o->bits) - 1;
    FOR_LANES(l) r[l] = v[l] & keep;
    PUT32(0, r);
  } else PUT32(0, v);
}

// --------------------------------------------------------------------- integers to integers

#define T_u8 uint8_t
#define T_s8 int8_t
#define T_u16 uint16_t
#define T_s16 int16_t
#define T_u32 uint32_t
#define T_s32 int32_t
#define T_u64 uint64_t
#define T_s64 int64_t
#define LOWEST_u8 0
#define LOWEST_s8 INT8_MIN
#define LOWEST_u16 0
#define LOWEST_s16 INT16_MIN
#define LOWEST_u32 0
#define LOWEST_s32 INT32_MIN
#define LOWEST_u64 0
#define LOWEST_s64 INT64_MIN
#define HIGHEST_u8 UINT8_MAX
#define HIGHEST_s8 INT8_MAX
#define HIGHEST_u16 UINT16_MAX
#define HIGHEST_s16 INT16_MAX
#define HIGHEST_u32 UINT32_MAX
#define HIGHEST_s32 INT32_MAX
#define HIGHEST_u64 UINT64_MAX
#define HIGHEST_s64 INT64_MAX

// Into [LOWEST, HIGHEST] of d, from a value v of any integer type.
#define CLAMPED(d, v) \
  ((v) < 0 ? LOWEST_##d == 0 || (int64_t)(v) < (int64_t)LOWEST_##d ? (T_##d)LOWEST_##d \
                                                                  : (T_##d)(v) \
           : (uint64_t)(v) > (uint64_t)HIGHEST_##d ? (T_##d)HIGHEST_##d : (T_##d)(v))
// Names of the lanes of sources and results, by width.
#define SOURCE_32(name) LOW_WORDS(name, 1)
#define SOURCE_64(name) LANES64(name, 1)
#define RESULT_32(r, is_signed) put_extended(w, I, m, r, is_signed)
#define RESULT_64(r, is_signed) PUT64(0, r)
#define WORD_32 uint32_t
#define WORD_64 uint64_t
#define SIGNED_WORD_32 int32_t
#define SIGNED_WORD_64 int64_t

// mod: sat
#define INTEGERS(d, dw, s, sw) \
  HANDLER(cvt_##d##_##s) { \
    SOURCE_##sw(a); WORD_##dw r[32]; \
    if (I->mod[0]) \
      FOR_LANES(l) { T_##s v = (T_##s)a[l]; r[l] = (WORD_##dw)(SIGNED_WORD_##dw)CLAMPED(d, v); } \
    else FOR_LANES(l) r[l] = (WORD_##dw)(SIGNED_WORD_##dw)(T_##d)(T_##s)a[l]; \
    RESULT_##dw(r, (T_##d)-1 < (T_##d)1); return DONE; \
  }
#define FROM_ALL(d, dw) \
  INTEGERS(d, dw, u8, 32) INTEGERS(d, dw, s8, 32) INTEGERS(d, dw, u16, 32) \
  INTEGERS(d, dw, s16, 32) INTEGERS(d, dw, u32, 32) INTEGERS(d, dw, s32, 32) \
  INTEGERS(d, dw, u64, 64) INTEGERS(d, dw, s64, 64)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtype-limits"   // v < 0 of an unsigned v
FROM_ALL(u8, 32) FROM_ALL(s8, 32) FROM_ALL(u16, 32) FROM_ALL(s16, 32)
FROM_ALL(u32, 32) FROM_ALL(s32, 32) FROM_ALL(u64, 64) FROM_ALL(s64, 64)
#pragma GCC diagnostic pop

// ------------------------------------------------------------------- through double: generic
//
// The types by their number in the groups of the patterns.
#define INTEGER_TYPES "(.u8|u16|u32|u64|s8|s16|s32|s64)"
#define FLOAT_TYPES "(.f16|bf16|f32|f64)"
enum { TY_F16 = 1, TY_BF16, TY_F32, TY_F64 };
enum { TY_U8 = 1, TY_U16, TY_U32, TY_U64, TY_S8, TY_S16, TY_S32, TY_S64 };

// The exact values of a floating-point source. Only f32 is ever flushed, by a multiplication that
// makes any NaN canonical.
static void load_float(Warp *w, const Insn *I, Mask m, int type, bool ftz, double v[32]) {
  if (type == TY_F64) {
    LANES64(a, 1);
    FOR_LANES(l) v[l] = as_double(a[l]);
    return;
  }
  LOW_WORDS(a, 1);
  if (type == TY_F32)
    FOR_LANES(l) v[l] = as_float(!ftz ? a[l] : is_nan(a[l]) ? NAN32 : flushed(a[l]));
  else if (type == TY_BF16) FOR_LANES(l) v[l] = as_float(f32_of_bf16(a[l]));
  else FOR_LANES(l) v[l] = as_float(f32_of_f16(a[l] & 0xFFFF));
}
// A quiet NaN with the sign, and as many bits of the payload as fit.
static uint32_t narrow_nan(double v, const Format *f) {
  uint64_t bits = double_bits(v) >> (52 - f->mantissa);
  uint32_t sign = (uint32_t)signbit(v) << (f->bits - 1), quiet = 1u << (f->mantissa - 1);
  return sign | f->infinity | quiet | ((uint32_t)bits & ((1u << f->mantissa) - 1));
}
// Round and store in a type. A NaN becomes the type's canonical NaN, except in double.
static void store_float(Warp *w, const Insn *I, Mask m, int type, int from, int mode, bool ftz,
                        const double v[32]) {
  static const Format *formats[] = {NULL, &F16, &BF16, &F32};
  if (type == TY_F64) {
    uint64_t r[32];
    FOR_LANES(l) r[l] = double_bits(v[l]);
    PUT64(0, r);
    return;
  }
  const Format *f = formats[type];
  uint32_t r[32];
  FOR_LANES(l) {
    r[l] = from == TY_F64 && v[l] != v[l] ? narrow_nan(v[l], f) : narrow(v[l], f, mode);
    if (ftz && type == TY_F32 && tiny(v[l], f, mode)) r[l] &= 0x80000000;
  }
  PUT32(0, r);
}
static double rounded_to_integer(double v, int mode) {
  switch (mode) {
    case RN: return rint(v);
    case RZ: return trunc(v);
    case RM: return floor(v);
    default: return ceil(v);
  }
}
// mod: rounding to an integer, ftz, sat, type, type of the source
HANDLER(integer_from_float) {
  static const struct { double low, high; bool is_signed; } ranges[] = {
    {0, 0, false}, {0, 0x1p8, false}, {0, 0x1p16, false}, {0, 0x1p32, false}, {0, 0x1p64, false},
    {-0x1p7, 0x1p7, true}, {-0x1p15, 0x1p15, true}, {-0x1p31, 0x1p31, true},
    {-0x1p63, 0x1p63, true}};
  static const int widths[] = {0, 8, 16, 32, 64, 8, 16, 32, 64};
  int type = I->mod[3], from = I->mod[4], width = widths[type];
  double v[32], low = ranges[type].low, high = ranges[type].high;
  bool is_signed = ranges[type].is_signed;
  load_float(w, I, m, from, I->mod[1], v);
  uint64_t top = 1ull << (width - 1);
  uint64_t most = is_signed ? top - 1 : top - 1 + top;
  uint64_t of_nan = from != TY_F64 && width != 64 ? 0 : top;
  uint64_t r[32];
  FOR_LANES(l) {
    double x = rounded_to_integer(v[l], I->mod[0]);
    r[l] = x != x ? of_nan : x >= high ? most : x <= low ? (uint64_t)(int64_t)low
           : x < 0 ? (uint64_t)(int64_t)x : (uint64_t)x;
  }
  if (width == 64) { PUT64(0, r); return DONE; }
  uint32_t r32[32];
  FOR_LANES(l) r32[l] = (uint32_t)r[l];
  if (is_signed && width < 32)
    FOR_LANES(l) r32[l] = (uint32_t)((int32_t)(r32[l] << (32 - width)) >> (32 - width));
  put_extended(w, I, m, r32, is_signed);
  return DONE;
}
// An integer as a double: exactly if it has at most 53 bits, else rounded to odd.
static double odd_double(uint64_t v, bool is_signed) {
  bool negative = is_signed && v >> 63;
  uint64_t a = negative ? 0 - v : v;
  int extra = a >> 53 ? 11 - __builtin_clzll(a) : 0;
  uint64_t kept = a >> extra << extra;
  if (kept != a) kept |= 1ull << extra;
  double d = (double)kept;
  return negative ? -d : d;
}
static double saturated_double(double v) { return v > 0 ? v < 1 ? v : 1 : 0; }

// mod: rounding, ftz, sat, type, type of the source
HANDLER(float_from_integer) {
  int type = I->mod[3], from = I->mod[4], mode = I->mod[0];
  bool is_signed = from >= TY_S8;
  int bits = 8 << ((from - 1) & 3);
  uint64_t a[32];
  double v[32];
  if (bits == 64) {
    LANES64(wide, 1);
    memcpy(a, wide, sizeof a);
  } else {
    LOW_WORDS(narrow_source, 1);
    FOR_LANES(l) {
      uint64_t x = (uint64_t)narrow_source[l] << (64 - bits);
      a[l] = is_signed ? (uint64_t)((int64_t)x >> (64 - bits)) : x >> (64 - bits);
    }
  }
  if (type == TY_F64 && bits == 64) {
    round_as(mode);
    BARRIER4(a, v, a, v);
    FOR_LANES(l) v[l] = is_signed ? (double)(int64_t)a[l] : (double)a[l];
    BARRIER4(a, v, a, v);
    round_nearest(mode);
    FOR_LANES(l) if (a[l] == 0) v[l] = 0;
  } else FOR_LANES(l) v[l] = odd_double(a[l], is_signed);
  if (I->mod[2]) FOR_LANES(l) v[l] = saturated_double(v[l]);
  store_float(w, I, m, type, 0, mode, I->mod[1], v);
  return DONE;
}
// mod: rounding (5 to 8: to an integer), ftz, sat, relu, satfinite, type, type of the source
HANDLER(float_from_float) {
  int mode = I->mod[0], type = I->mod[5], from = I->mod[6];
  bool ftz = I->mod[1], finite = I->mod[4];
  double v[32];
  load_float(w, I, m, from, ftz && type != TY_F16, v);  // .ftz has no effect on conversions to f16
  if (mode > RP) { FOR_LANES(l) v[l] = rounded_to_integer(v[l], mode - RP); mode = RN; }
  if (I->mod[2]) FOR_LANES(l) v[l] = saturated_double(v[l]);
  if (I->mod[3]) FOR_LANES(l) v[l] = v[l] <= 0 ? 0 : v[l];
  if (finite) FOR_LANES(l) {
    double most = type == TY_F16 ? 65504 : 0x1.FEp127;
    if (fabs(v[l]) > most) v[l] = copysign(most, v[l]);
  }
  store_float(w, I, m, type, from, mode, ftz, v);
  return DONE;
}

// -------------------------------------------------------------- common conversions, with short
// loops

#define FAST(name, expr) \
  HANDLER(name) { \
    LOW_WORDS(a, 1); uint32_t r[32]; \
    FOR_LANES(l) { uint32_t v = a[l]; r[l] = expr; } \
    PUT32(0, r); return DONE; \
  }
FAST(f32_from_bf16, v << 16)
FAST(f32_from_f16, (v & 0x7FFF) > INFINITY_F16 ? NAN32 : f32_of_f16(v & 0xFFFF))
FAST(same_f32, v)
FAST(f16_from_f32, f16_of(v))
FAST(bf16_from_f32, bf16_of(v))
FAST(f32_from_s32, float_bits((float)(int32_t)v))
FAST(f32_from_u32, float_bits((float)v))
HANDLER(same_f64) { LANES64(a, 1); PUT64(0, a); return DONE; }
HANDLER(bf16x2_from_f32) {
  LANES32(a, 1); LANES32(b, 2); uint32_t r[32];
  FOR_LANES(l) r[l] = bf16_of(a[l]) << 16 | bf16_of(b[l]);
  PUT32(0, r); return DONE;
}
HANDLER(f16x2_from_f32) {
  LANES32(a, 1); LANES32(b, 2); uint32_t r[32];
  FOR_LANES(l) r[l] = f16_of(a[l]) << 16 | f16_of(b[l]);
  PUT32(0, r); return DONE;
}

// -------------------------------------------------------------------------- packed and small

typedef struct { int mode; bool finite, relu; } Rounding;
static uint32_t rounded(double v, const Format *f, Rounding how, uint32_t random) {
  if (how.relu && v <= 0) v = 0;
  return narrow_random(v, f, how.mode, how.finite, random);
}
// Two f32 to a pair; the first becomes the upper element. `slot` is the width of an element.
static int pair_from_f32(Warp *w, const Insn *I, Mask m, const Format *f, int slot, Rounding how) {
  LANES32(a, 1); LANES32(b, 2); uint32_t r[32];
  FOR_LANES(l)
    r[l] = rounded(as_float(a[l]), f, how, 0) << slot | rounded(as_float(b[l]), f, how, 0);
  PUT32(0, r); return DONE;
}
static double value_of_half(uint32_t code, bool bf16) {
  return as_float(bf16 ? code << 16 : f32_of_f16(code & 0xFFFF));
}
static int pair_from_halves(Warp *w, const Insn *I, Mask m, const Format *f, int slot, bool bf16,
                            Rounding how) {
  LANES32(a, 1); uint32_t r[32];
  FOR_LANES(l)
    r[l] = rounded(value_of_half(a[l] >> 16, bf16), f, how, 0) << slot |
           rounded(value_of_half(a[l] & 0xFFFF, bf16), f, how, 0);
  PUT32(0, r); return DONE;
}
static const Format *const SMALL[] = {NULL, &E4M3, &E5M2, &E2M1, &E2M3, &E3M2};
#define SMALL_PAIRS "(.e4m3x2|e5m2x2|e2m1x2|e2m3x2|e3m2x2)"
static int slot_of(const Format *f) { return f->bits < 6 ? 4 : 8; }

// mod: rounding (rn, rz), relu, satfinite, type (1 f16x2, 2 bf16x2)
HANDLER(halves_from_f32) {
  Rounding how = {I->mod[0], I->mod[2], I->mod[1]};
  return pair_from_f32(w, I, m, I->mod[3] == 1 ? &F16 : &BF16, 16, how);
}
// .rs takes random bits: 13 per element for f16, 16 for bf16. mod: relu, satfinite, type
HANDLER(halves_from_f32_random) {
  LANES32(a, 1); LANES32(b, 2); LANES32(c, 3); uint32_t r[32];
  Rounding how = {RS, I->mod[1], I->mod[0]};
  const Format *f = I->mod[2] == 1 ? &F16 : &BF16;
  int shift = I->mod[2] == 1 ? 19 : 16;  // moves the random bits to the top of 32 bits
  FOR_LANES(l)
    r[l] = rounded(as_float(a[l]), f, how, c[l] >> 16 << shift) << 16 |
           rounded(as_float(b[l]), f, how, c[l] << shift);
  PUT32(0, r); return DONE;
}
// mod: relu, type
HANDLER(small_from_f32) {
  const Format *f = SMALL[I->mod[1]];
  return pair_from_f32(w, I, m, f, slot_of(f), (Rounding){RN, true, I->mod[0]});
}
// mod: relu, type of the result, type of the source (1 f16x2, 2 bf16x2)
HANDLER(small_from_halves) {
  const Format *f = SMALL[I->mod[1]];
  return pair_from_halves(w, I, m, f, slot_of(f), I->mod[2] == 2, (Rounding){RN, true, I->mod[0]});
}
// mod: relu, type of the result (1 f16x2, 2 bf16x2), type of the source
HANDLER(halves_from_small) {
  LANES32(a, 1); uint32_t r[32];
  const Format *f = SMALL[I->mod[2]], *to = I->mod[1] == 1 ? &F16 : &BF16;
  Rounding how = {RN, false, I->mod[0]};
  int slot = slot_of(f);
  FOR_LANES(l)
    r[l] = rounded(small_value(f, a[l] >> slot), to, how, 0) << 16 |
           rounded(small_value(f, a[l]), to, how, 0);
  PUT32(0, r); return DONE;
}
// Four f32; the first becomes the uppermost element. Each half of rbits serves two elements: the
// upper half (for 4-bit formats the upper bytes of both halves) a and b, the other half e and f.
// mod: relu, type
HANDLER(four_from_f32_random) {
  const Operand *list = list_of(w, &I->op[1]);
  const Format *f = SMALL[I->mod[1]];
  LANES32(c, 2); uint32_t r[32] = {0};
  Rounding how = {RS, true, I->mod[0]};
  int slot = slot_of(f);
  for (int i = 0; i < 4; i++) {
    uint32_t store[32];
    const uint32_t *a = src32_of(w, I, &list[i], m, store);
    bool upper = i < 2;
    FOR_LANES(l) {
      uint32_t bytes = upper ? c[l] & 0xFF00FF00 : (c[l] & 0x00FF00FF) << 8;
      uint32_t random = slot == 4 ? (bytes & 0xFF000000) | (bytes & 0xFF00) << 8
                        : upper   ? c[l] & 0xFFFF0000 : c[l] << 16;
      r[l] |= rounded(as_float(a[l]), f, how, random) << (slot * (3 - i));
    }
  }
  PUT32(0, r); return DONE;
}

// tf32 is f32 with the low 13 bits zero. mod: rounding (rn rz), satfinite, relu
HANDLER(tf32_from_f32) {
  LANES32(a, 1); uint32_t r[32];
  Rounding how = {I->mod[0], I->mod[1], I->mod[2]};
  FOR_LANES(l) r[l] = rounded(as_float(a[l]), &TF32, how, 0) << 13;
  PUT32(0, r); return DONE;
}
// Rounding with ties away works on the bits as an integer, NaN included. mod: satfinite
HANDLER(tf32_from_f32_away) {
  LANES32(a, 1); uint32_t r[32]; bool finite = I->mod[0];
  FOR_LANES(l) {
    uint32_t v = ((a[l] & 0x7FFFFFFF) < 0x7F800000 ? a[l] + 0x1000 : a[l]) & 0xFFFFE000;
    r[l] = finite && (v & 0x7FFFFFFF) >= 0x7F800000 ? v - 0x2000 : v;
  }
  PUT32(0, r); return DONE;
}

// ue8m0: the exponent of the magnitude. mod: rounding (1 rz, 2 rp), satfinite
static uint32_t exponent_code(uint32_t v, bool up, bool finite) {
  uint32_t a = v & 0x7FFFFFFF, e = a >> 23, fraction = a & 0x7FFFFF;
  if (a > 0x7F800000) return 0xFF;
  if (e == 255) return finite ? 0xFE : 0xFF;
  if (up) e += e ? fraction != 0 : fraction > 0x400000;
  return e == 255 && finite ? 0xFE : e;
}
HANDLER(ue8m0_from_f32) {
  LANES32(a, 1); LANES32(b, 2); uint32_t r[32];
  bool up = I->mod[0] == 2, finite = I->mod[1];
  FOR_LANES(l) r[l] = exponent_code(a[l], up, finite) << 8 | exponent_code(b[l], up, finite);
  PUT32(0, r); return DONE;
}
HANDLER(ue8m0_from_bf16x2) {
  LANES32(a, 1); uint32_t r[32];
  bool up = I->mod[0] == 2, finite = I->mod[1];
  FOR_LANES(l)
    r[l] = exponent_code(a[l] & 0xFFFF0000, up, finite) << 8 |
           exponent_code(a[l] << 16, up, finite);
  PUT32(0, r); return DONE;
}
ALWAYS_INLINE uint32_t power_bf16(uint32_t e) {
  return e == 0 ? 0x0040 : e == 255 ? NAN16 : e << 7;
}
HANDLER(bf16x2_from_ue8m0) {
  LANES32(a, 1); uint32_t r[32];
  FOR_LANES(l) r[l] = power_bf16(a[l] >> 8 & 255) << 16 | power_bf16(a[l] & 255);
  PUT32(0, r); return DONE;
}

// cvt.pack: two integers, saturated and packed above the kept bits of c. mod: type
ALWAYS_INLINE uint32_t packed(int32_t v, int bits, bool is_signed) {
  int32_t high = is_signed ? (1 << (bits - 1)) - 1 : (1 << bits) - 1;
  int32_t low = is_signed ? -(1 << (bits - 1)) : 0;
  return (uint32_t)(v > high ? high : v < low ? low : v) & ((1u << bits) - 1);
}
HANDLER(pack_16) {
  LANES32(a, 1); LANES32(b, 2); uint32_t r[32]; bool is_signed = I->mod[0] == 2;
  FOR_LANES(l)
    r[l] = packed((int32_t)a[l], 16, is_signed) << 16 | packed((int32_t)b[l], 16, is_signed);
  PUT32(0, r); return DONE;
}
HANDLER(pack_small) {
  LANES32(a, 1); LANES32(b, 2); LANES32(c, 3); uint32_t r[32];
  bool is_signed = (I->mod[0] - 1) & 1;
  int bits = 8 >> ((I->mod[0] - 1) / 2);
  FOR_LANES(l)
    r[l] = c[l] << (2 * bits) | packed((int32_t)a[l], bits, is_signed) << bits |
           packed((int32_t)b[l], bits, is_signed);
  PUT32(0, r); return DONE;
}

// -------------------------------------------------------------------------------------- forms

#define INTEGER_FORM(d, s) {"cvt{.sat}." #d "." #s, "dx sx", cvt_##d##_##s, 0}
#define FORMS_FROM_ALL(d) \
  INTEGER_FORM(d, u8), INTEGER_FORM(d, s8), INTEGER_FORM(d, u16), INTEGER_FORM(d, s16), \
  INTEGER_FORM(d, u32), INTEGER_FORM(d, s32), INTEGER_FORM(d, u64), INTEGER_FORM(d, s64)

static const Form FORMS[] = {
  // common cases, before the general forms
  {"cvt.rn.bf16x2.f32", "d32 s32 s32", bf16x2_from_f32, 0},
  {"cvt.rn.f16x2.f32", "d32 s32 s32", f16x2_from_f32, 0},
  {"cvt.rn.bf16.f32", "d32 s32", bf16_from_f32, 0},
  {"cvt.rn.f16.f32", "d32 s32", f16_from_f32, 0},
  {"cvt{.rn|rz|rm|rp}.f32.bf16", "d32 s32", f32_from_bf16, 0},
  {"cvt.f32.f16", "d32 s32", f32_from_f16, 0},
  {"cvt.f32.f32", "d32 s32", same_f32, 0}, {"cvt.f64.f64", "d64 s64", same_f64, 0},
  {"cvt.rn.f32.s32", "d32 sx", f32_from_s32, 0},
  {"cvt.rn.f32.u32", "d32 sx", f32_from_u32, 0},
  FORMS_FROM_ALL(u8), FORMS_FROM_ALL(s8), FORMS_FROM_ALL(u16), FORMS_FROM_ALL(s16),
  FORMS_FROM_ALL(u32), FORMS_FROM_ALL(s32), FORMS_FROM_ALL(u64), FORMS_FROM_ALL(s64),

  {"cvt(.rni|rzi|rmi|rpi){.ftz}{.sat}" INTEGER_TYPES FLOAT_TYPES, "dx sx", integer_from_float, 0},
  {"cvt{.rn|rz|rm|rp}{.ftz}{.sat}" FLOAT_TYPES INTEGER_TYPES, "dx sx", float_from_integer, 0},
  {"cvt{.rn|rz|rm|rp|rni|rzi|rmi|rpi}{.ftz}{.sat}{.relu}{.satfinite}" FLOAT_TYPES FLOAT_TYPES,
   "dx sx", float_from_float, 0},
  {"cvt(.rn|rz){.relu}{.satfinite}(.f16x2|bf16x2).f32", "d32 s32 s32", halves_from_f32, 0},
  {"cvt.rs{.relu}{.satfinite}(.f16x2|bf16x2).f32", "d32 s32 s32 s32", halves_from_f32_random, 0},
  {"cvt(.rn|rz){.satfinite}{.relu}.tf32.f32", "d32 s32", tf32_from_f32, 0},
  {"cvt.rna{.satfinite}.tf32.f32", "d32 s32", tf32_from_f32_away, 0},
  {"cvt.rn.satfinite{.relu}" SMALL_PAIRS ".f32", "d32 s32 s32", small_from_f32, 0},
  {"cvt.rn.satfinite{.relu}" SMALL_PAIRS "(.f16x2|bf16x2)", "d32 s32", small_from_halves, 0},
  {"cvt.rn{.relu}(.f16x2|bf16x2)" SMALL_PAIRS, "d32 s32", halves_from_small, 0},
  {"cvt.rs{.relu}.satfinite(.e4m3x4|e5m2x4|e2m1x4|e2m3x4|e3m2x4).f32", "d32 s32l s32",
   four_from_f32_random, 0},
  {"cvt(.rz|rp){.satfinite}.ue8m0x2.f32", "d32 s32 s32", ue8m0_from_f32, 0},
  {"cvt(.rz|rp){.satfinite}.ue8m0x2.bf16x2", "d32 s32", ue8m0_from_bf16x2, 0},
  {"cvt.rn.bf16x2.ue8m0x2", "d32 s32", bf16x2_from_ue8m0, 0},
  {"cvt.pack.sat(.u16|s16).s32", "d32 s32 s32", pack_16, 0},
  {"cvt.pack.sat(.u8|s8|u4|s4|u2|s2).s32.b32", "d32 s32 s32 s32", pack_small, 0},
  {0}
};

const Family FAMILY_CONVERT = {.name = "convert", .forms = FORMS};
