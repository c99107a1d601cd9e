// Integer arithmetic and logic, moves, predicates, comparison and selection.
#include "scalar.h"

// Types as patterns name them: C type, its unsigned counterpart, width of a lane.
#define T_u16 uint16_t
#define U_u16 uint16_t
#define W_u16 32
#define T_s16 int16_t
#define U_s16 uint16_t
#define W_s16 32
#define T_u32 uint32_t
#define U_u32 uint32_t
#define W_u32 32
#define T_s32 int32_t
#define U_s32 uint32_t
#define W_s32 32
#define T_u64 uint64_t
#define U_u64 uint64_t
#define W_u64 64
#define T_s64 int64_t
#define U_s64 uint64_t
#define W_s64 64
// Types twice as wide, for products.
#define D_u16 uint32_t
#define D_s16 int32_t
#define D_u32 uint64_t
#define D_s32 int64_t
#define D_u64 unsigned __int128
#define D_s64 __int128
#define BITS_u16 16
#define BITS_s16 16
#define BITS_u32 32
#define BITS_s32 32
#define BITS_u64 64
#define BITS_s64 64
#define SIGNED_u16 false
#define SIGNED_s16 true
#define SIGNED_u32 false
#define SIGNED_s32 true
#define SIGNED_u64 false
#define SIGNED_s64 true

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define LANES(t, name, k) PASTE(LANES, W_##t)(name, k)
#define PUT(t, k, v) PASTE(PUT, W_##t)(k, v)
#define WORD_32 uint32_t
#define WORD_64 uint64_t
#define WORD(t) PASTE(WORD_, W_##t)
#define HANDLER(name) static int name(Warp *w, const Insn *I, Mask m)

// d = f(x), f(x, y), f(x, y, z) on values of one type; results are zero-extended to the lane.
#define UNARY(name, t, expr) \
  HANDLER(name) { \
    LANES(t, a, 1); WORD(t) r[32]; \
    FOR_LANES(l) { T_##t x = (T_##t)a[l]; r[l] = (U_##t)(expr); } \
    PUT(t, 0, r); return DONE; \
  }
#define BINARY(name, t, expr) \
  HANDLER(name) { \
    LANES(t, a, 1); LANES(t, b, 2); WORD(t) r[32]; \
    FOR_LANES(l) { T_##t x = (T_##t)a[l], y = (T_##t)b[l]; r[l] = (U_##t)(expr); } \
    PUT(t, 0, r); return DONE; \
  }
#define TERNARY(name, t, expr) \
  HANDLER(name) { \
    LANES(t, a, 1); LANES(t, b, 2); LANES(t, c, 3); WORD(t) r[32]; \
    FOR_LANES(l) { \
      T_##t x = (T_##t)a[l], y = (T_##t)b[l], z = (T_##t)c[l]; r[l] = (U_##t)(expr); \
    } \
    PUT(t, 0, r); return DONE; \
  }
#define ALL_TYPES(X) X(u16) X(s16) X(u32) X(s32) X(u64) X(s64)
#define WIDTHS(X) X(u16) X(u32) X(u64)      // for operations that ignore the sign

// --------------------------------------------------------------------------------- arithmetic

#define PLAIN(t) \
  BINARY(add_##t, t, x + y) \
  BINARY(sub_##t, t, x - y) \
  BINARY(mul_lo_##t, t, x * y) \
  TERNARY(mad_lo_##t, t, x * y + z) \
  BINARY(and_##t, t, x & y) \
  BINARY(or_##t, t, x | y) \
  BINARY(xor_##t, t, x ^ y) \
  UNARY(not_##t, t, ~x) \
  UNARY(cnot_##t, t, x == 0)
WIDTHS(PLAIN)

// Quotient and remainder of a zero divisor are all ones, as in the code that ptxas generates.
#define QUOTIENT(t) (y == 0 ? (T_##t)-1 : SIGNED_##t && y == (T_##t)-1 ? (T_##t)(0 - x) : x / y)
#define REMAINDER(t) (y == 0 ? (T_##t)-1 : SIGNED_##t && y == (T_##t)-1 ? 0 : x % y)
#define HIGH(t) ((D_##t)x * y >> BITS_##t)
#define BY_SIGN(t) \
  BINARY(mul_hi_##t, t, HIGH(t)) \
  TERNARY(mad_hi_##t, t, HIGH(t) + z) \
  TERNARY(sad_##t, t, (U_##t)z + (x < y ? (U_##t)y - (U_##t)x : (U_##t)x - (U_##t)y)) \
  BINARY(div_##t, t, QUOTIENT(t)) \
  BINARY(rem_##t, t, REMAINDER(t)) \
  BINARY(min_##t, t, x < y ? x : y) \
  BINARY(max_##t, t, x > y ? x : y)
ALL_TYPES(BY_SIGN)

#define OF_SIGNED(t) \
  UNARY(abs_##t, t, (x < 0 ? 0 - (U_##t)x : (U_##t)x)) \
  UNARY(neg_##t, t, 0 - (U_##t)x)
OF_SIGNED(s16) OF_SIGNED(s32) OF_SIGNED(s64)

// Full products of 16- and 32-bit values.
#define WIDE(t, wide) \
  HANDLER(mul_wide_##t) { \
    LANES32(a, 1); LANES32(b, 2); WORD(wide) r[32]; \
    FOR_LANES(l) r[l] = (WORD(wide))((D_##t)(T_##t)a[l] * (T_##t)b[l]); \
    PUT(wide, 0, r); return DONE; \
  } \
  HANDLER(mad_wide_##t) { \
    LANES32(a, 1); LANES32(b, 2); LANES(wide, c, 3); WORD(wide) r[32]; \
    FOR_LANES(l) r[l] = (WORD(wide))((D_##t)(T_##t)a[l] * (T_##t)b[l]) + c[l]; \
    PUT(wide, 0, r); return DONE; \
  }
WIDE(u16, u32) WIDE(s16, u32) WIDE(u32, u64) WIDE(s32, u64)

ALWAYS_INLINE int32_t clamp_s32(int64_t v) {
  return v > INT32_MAX ? INT32_MAX : v < INT32_MIN ? INT32_MIN : (int32_t)v;
}
BINARY(add_sat_s32, s32, clamp_s32((int64_t)x + y))
BINARY(sub_sat_s32, s32, clamp_s32((int64_t)x - y))
TERNARY(mad_hi_sat_s32, s32, clamp_s32((int64_t)HIGH(s32) + z))
BINARY(min_relu_s32, s32, x < y ? x < 0 ? 0 : x : y < 0 ? 0 : y)
BINARY(max_relu_s32, s32, x > y ? x < 0 ? 0 : x : y < 0 ? 0 : y)

#define LOW24_s32(v) ((int64_t)((int32_t)((uint32_t)(v) << 8) >> 8))
#define LOW24_u32(v) ((uint64_t)((v) & 0xFFFFFF))
#define PRODUCT24(t) (LOW24_##t(x) * LOW24_##t(y))
#define MUL24(t) \
  BINARY(mul24_lo_##t, t, PRODUCT24(t)) \
  BINARY(mul24_hi_##t, t, PRODUCT24(t) >> 16) \
  TERNARY(mad24_lo_##t, t, (U_##t)PRODUCT24(t) + (U_##t)z) \
  TERNARY(mad24_hi_##t, t, (U_##t)(PRODUCT24(t) >> 16) + (U_##t)z)
MUL24(u32) MUL24(s32)
TERNARY(mad24_hi_sat_s32, s32, clamp_s32((int64_t)(int32_t)(PRODUCT24(s32) >> 16) + z))

// Two 16-bit values in a register.
#define HALVES(T, operator_on) \
  ((uint16_t)operator_on((T)x, (T)y) | \
   (uint32_t)(uint16_t)operator_on((T)(x >> 16), (T)(y >> 16)) << 16)
#define PLUS(x, y) ((x) + (y))
#define LESS(x, y) ((x) < (y) ? (x) : (y))
#define MORE(x, y) ((x) > (y) ? (x) : (y))
#define LESS_RELU(x, y) MORE(LESS(x, y), 0)
#define MORE_RELU(x, y) MORE(MORE(x, y), 0)
BINARY(add_x2, u32, HALVES(uint16_t, PLUS))
BINARY(min_u16x2, u32, HALVES(uint16_t, LESS))
BINARY(max_u16x2, u32, HALVES(uint16_t, MORE))
BINARY(min_s16x2, u32, HALVES(int16_t, LESS))
BINARY(max_s16x2, u32, HALVES(int16_t, MORE))
BINARY(min_relu_s16x2, u32, HALVES(int16_t, LESS_RELU))
BINARY(max_relu_s16x2, u32, HALVES(int16_t, MORE_RELU))

// Extended precision: the carry of each lane is in Warp.carry. Subtraction adds the complement, so
// "no borrow" is a carry; mixtures of addc and subc on hardware show this.
#define CARRIED(name, t, arity, with_carry, sum, carry_out) \
  HANDLER(name) { \
    LANES(t, a, 1); LANES(t, b, 2); LANES(t, c, arity); \
    WORD(t) r[32]; Mask carries = 0; \
    FOR_LANES(l) { \
      U_##t x = (U_##t)a[l], y = (U_##t)b[l], z = (U_##t)c[l]; \
      D_##t cin = with_carry ? w->carry >> l & 1 : 0, s = sum; \
      (void)y; (void)z; \
      r[l] = (U_##t)s; \
      carries |= (Mask)(carry_out) << l; \
    } \
    PUT(t, 0, r); \
    if (I->mod[0]) w->carry = (w->carry & ~m) | (carries & m); \
    return DONE; \
  }
#define OVER(t) ((s >> BITS_##t & 1) != 0)
#define EXTENDED(t) \
  CARRIED(add_cc_##t, t, 2, 0, (D_##t)x + y + cin, OVER(t)) \
  CARRIED(addc_##t, t, 2, 1, (D_##t)x + y + cin, OVER(t)) \
  CARRIED(sub_cc_##t, t, 2, 0, (D_##t)x + (U_##t)~y + 1 + cin, OVER(t)) \
  CARRIED(subc_##t, t, 2, 1, (D_##t)x + (U_##t)~y + cin, OVER(t)) \
  CARRIED(mad_lo_cc_##t, t, 3, 0, (D_##t)(U_##t)(x * y) + z + cin, OVER(t)) \
  CARRIED(madc_lo_##t, t, 3, 1, (D_##t)(U_##t)(x * y) + z + cin, OVER(t)) \
  CARRIED(mad_hi_cc_##t, t, 3, 0, (D_##t)(U_##t)HIGH(t) + z + cin, OVER(t)) \
  CARRIED(madc_hi_##t, t, 3, 1, (D_##t)(U_##t)HIGH(t) + z + cin, OVER(t))
EXTENDED(u32) EXTENDED(u64)
#define SIGNED_HIGH(t, signed_t) \
  ((D_##t)(U_##t)((D_##signed_t)(T_##signed_t)x * (T_##signed_t)y >> BITS_##t) + z + cin)
CARRIED(mad_hi_cc_s32, u32, 3, 0, SIGNED_HIGH(u32, s32), OVER(u32))
CARRIED(madc_hi_s32, u32, 3, 1, SIGNED_HIGH(u32, s32), OVER(u32))
CARRIED(mad_hi_cc_s64, u64, 3, 0, SIGNED_HIGH(u64, s64), OVER(u64))
CARRIED(madc_hi_s64, u64, 3, 1, SIGNED_HIGH(u64, s64), OVER(u64))

// Dot products of bytes, and of 16-bit values with bytes. mod: types of a and b (1 u32, 2 s32).
ALWAYS_INLINE int32_t part(uint32_t v, int bits, int index, bool is_signed) {
  uint32_t top = v << (32 - bits * (index + 1));
  return is_signed ? (int32_t)top >> (32 - bits) : (int32_t)(top >> (32 - bits));
}
HANDLER(dp4a) {
  LANES32(a, 1); LANES32(b, 2); LANES32(c, 3); uint32_t r[32];
  bool sa = I->mod[0] == 2, sb = I->mod[1] == 2;
  FOR_LANES(l) {
    r[l] = c[l];
    for (int i = 0; i < 4; i++) r[l] += (uint32_t)(part(a[l], 8, i, sa) * part(b[l], 8, i, sb));
  }
  PUT32(0, r); return DONE;
}
HANDLER(dp2a) {
  LANES32(a, 1); LANES32(b, 2); LANES32(c, 3); uint32_t r[32];
  int first = I->mod[0] == 2 ? 2 : 0;
  bool sa = I->mod[1] == 2, sb = I->mod[2] == 2;
  FOR_LANES(l) {
    r[l] = c[l];
    for (int i = 0; i < 2; i++)
      r[l] += (uint32_t)(part(a[l], 16, i, sa) * part(b[l], 8, first + i, sb));
  }
  PUT32(0, r); return DONE;
}

// --------------------------------------------------------------------------------------- bits

// Instructions that count bits of a 32- or 64-bit source; the result has 32 bits.
#define COUNT(name, t, expr) \
  HANDLER(name) { \
    LANES(t, a, 1); uint32_t r[32]; \
    FOR_LANES(l) { T_##t x = (T_##t)a[l]; r[l] = (uint32_t)(expr); } \
    PUT32(0, r); return DONE; \
  }
#define LEADING(t, v) ((v) == 0 ? BITS_##t : __builtin_clzll((uint64_t)(v)) - (64 - BITS_##t))
ALWAYS_INLINE uint32_t find_msb(uint64_t v, int bits, bool shift) {
  if (v == 0) return 0xFFFFFFFF;
  int position = 63 - __builtin_clzll(v);
  return (uint32_t)(shift ? bits - 1 - position : position);
}
#define BFIND(t) COUNT(bfind_##t, t, \
  find_msb((U_##t)(SIGNED_##t && x >> (BITS_##t - 1) ? ~x : x), BITS_##t, I->mod[0] != 0))
COUNT(popc_u32, u32, __builtin_popcount(x))
COUNT(popc_u64, u64, __builtin_popcountll(x))
COUNT(clz_u32, u32, LEADING(u32, x))
COUNT(clz_u64, u64, LEADING(u64, x))
BFIND(u32) BFIND(s32) BFIND(u64) BFIND(s64)

ALWAYS_INLINE uint64_t reversed(uint64_t v) {
  v = (v >> 1 & 0x5555555555555555) | (v & 0x5555555555555555) << 1;
  v = (v >> 2 & 0x3333333333333333) | (v & 0x3333333333333333) << 2;
  v = (v >> 4 & 0x0F0F0F0F0F0F0F0F) | (v & 0x0F0F0F0F0F0F0F0F) << 4;
  return __builtin_bswap64(v);
}
UNARY(brev_u32, u32, reversed(x) >> 32)
UNARY(brev_u64, u64, reversed(x))

ALWAYS_INLINE uint32_t find_nth(uint32_t mask, uint32_t base, int32_t offset) {
  if (offset == 0) return base < 32 && mask >> base & 1 ? base : 0xFFFFFFFF;
  int step = offset > 0 ? 1 : -1;
  int64_t left = offset > 0 ? offset : -(int64_t)offset;
  for (int64_t p = (int32_t)base; p >= 0 && p < 32; p += step)
    if (mask >> p & 1 && --left == 0) return (uint32_t)p;
  return 0xFFFFFFFF;
}
TERNARY(fns_b32, u32, find_nth(x, y, (int32_t)z))

ALWAYS_INLINE uint32_t bit_mask(uint32_t position, uint32_t width, bool clamp) {
  if (clamp && position > 31) return 0;
  uint32_t from = ~0u << (position & 31), end = (position & 31) + (width & 31);
  if (end > 31 || (clamp && width > 31)) return from;
  return width & 31 ? from & ~(~0u << end) : 0;
}
BINARY(bmsk_b32, u32, bit_mask(x, y, I->mod[0] == 1))

ALWAYS_INLINE uint32_t extended(uint32_t v, uint32_t width, bool clamp, bool is_signed) {
  if (clamp && width > 31) return v;
  width &= 31;
  if (width == 0) return 0;
  uint32_t top = v << (32 - width);
  return is_signed ? (uint32_t)((int32_t)top >> (32 - width)) : top >> (32 - width);
}
BINARY(szext_b32, u32, extended(x, y, I->mod[0] == 1, I->mod[1] == 2))

// Bit fields: for 32-bit values position and length are the low bytes of 32-bit operands; 64-bit
// fields are built from shifts, which use the whole operands.
ALWAYS_INLINE uint64_t extracted(uint64_t v, uint32_t position, uint32_t length, int bits,
                                 bool is_signed) {
  if (bits == 32) position &= 255, length &= 255;
  if (length == 0) return 0;
  uint32_t width = (uint32_t)bits, got = position < width ? width - position : 0;
  uint32_t top = length < got ? position + length - 1 : width - 1;
  bool fill = is_signed && v >> top & 1;
  uint64_t field = position < width ? v >> position : 0;
  got = got < length ? got : length;
  uint64_t keep = got > 63 ? ~0ull : (1ull << got) - 1;
  return (field & keep) | (fill ? ~keep : 0);
}
ALWAYS_INLINE uint64_t inserted(uint64_t v, uint64_t into, uint32_t position, uint32_t length,
                                int bits) {
  if (bits == 32) position &= 255, length &= 255;
  if (length == 0 || position > 63) return into;
  uint64_t field = (length > 63 ? ~0ull : (1ull << length) - 1) << position;
  return (into & ~field) | (v << position & field);
}
#define FIELDS(t) \
  HANDLER(bfe_##t) { \
    LANES(t, a, 1); LANES32(b, 2); LANES32(c, 3); WORD(t) r[32]; \
    FOR_LANES(l) r[l] = (WORD(t))extracted(a[l], b[l], c[l], BITS_##t, SIGNED_##t); \
    PUT(t, 0, r); return DONE; \
  }
FIELDS(u32) FIELDS(s32) FIELDS(u64) FIELDS(s64)
// Compilers build vectors of bytes from undefined vectors, so the result is defined if a source is.
#define INSERT(t) \
  HANDLER(bfi_##t) { \
    LANES(t, a, 1); LANES(t, b, 2); LANES32(c, 3); LANES32(d, 4); WORD(t) r[32]; \
    FOR_LANES(l) r[l] = (WORD(t))inserted(a[l], b[l], c[l], d[l], BITS_##t); \
    Mask defined = defined_in(w, &I->op[1]) | defined_in(w, &I->op[2]); \
    PUT(t, 0, r); set_defined(w, &I->op[0], m, defined); return DONE; \
  }
INSERT(u32) INSERT(u64)

// Shifts: amounts are unsigned 32-bit, clamped to the width.
#define SHIFT(name, t, expr) \
  HANDLER(name) { \
    LANES(t, a, 1); LANES32(b, 2); WORD(t) r[32]; \
    FOR_LANES(l) { T_##t x = (T_##t)a[l]; uint32_t n = b[l]; r[l] = (U_##t)(expr); } \
    PUT(t, 0, r); return DONE; \
  }
#define SHIFTS_LOGICAL(t) \
  SHIFT(shl_##t, t, n < BITS_##t ? x << n : 0) \
  SHIFT(shr_##t, t, n < BITS_##t ? x >> n : 0)
#define SHIFTS_SIGNED(t) SHIFT(shr_##t, t, x >> (n < BITS_##t ? n : BITS_##t - 1))
WIDTHS(SHIFTS_LOGICAL)
SHIFTS_SIGNED(s16) SHIFTS_SIGNED(s32) SHIFTS_SIGNED(s64)

#define FUNNEL(name, expr) \
  HANDLER(name) { \
    LANES32(a, 1); LANES32(b, 2); LANES32(c, 3); uint32_t r[32]; bool wrap = I->mod[0] == 2; \
    FOR_LANES(l) { \
      uint64_t v = (uint64_t)b[l] << 32 | a[l]; \
      uint32_t n = wrap ? c[l] & 31 : c[l] < 32 ? c[l] : 32; \
      r[l] = (uint32_t)(expr); \
    } \
    PUT32(0, r); return DONE; \
  }
FUNNEL(shf_l, v << n >> 32)
FUNNEL(shf_r, v >> n)

// Permutation of bytes. The modes, in the order of the pattern: f4e b4e rc8 ecl ecr rc16.
ALWAYS_INLINE uint32_t permuted(uint32_t a, uint32_t b, uint32_t c, int mode) {
  static const uint16_t selectors[7][4] = {
    {0}, {0x3210, 0x4321, 0x5432, 0x6543}, {0x5670, 0x6701, 0x7012, 0x0123},
    {0x0000, 0x1111, 0x2222, 0x3333}, {0x3210, 0x3211, 0x3222, 0x3333},
    {0x0000, 0x1110, 0x2210, 0x3210}, {0x1010, 0x3232, 0x1010, 0x3232}};
  uint64_t bytes = (uint64_t)b << 32 | a;
  uint32_t selector = mode ? selectors[mode][c & 3] : c, r = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t s = selector >> (4 * i);
    uint32_t byte = (uint32_t)(bytes >> (8 * (s & 7))) & 255;
    if (s & 8) byte = byte & 0x80 ? 255 : 0;
    r |= byte << (8 * i);
  }
  return r;
}
HANDLER(prmt_b32) {
  LANES32(a, 1); LANES32(b, 2); LANES32(c, 3); uint32_t r[32];
  FOR_LANES(l) r[l] = permuted(a[l], b[l], c[l], I->mod[0]);
  Mask defined = defined_in(w, &I->op[1]) | defined_in(w, &I->op[2]);
  PUT32(0, r); set_defined(w, &I->op[0], m, defined); return DONE;
}

// Any function of three bits: the table has F(1111 0000, 1100 1100, 1010 1010).
static void look_up(const uint32_t *a, const uint32_t *b, const uint32_t *c, unsigned table,
                    uint32_t r[32]) {
  uint32_t term[8];
  for (int i = 0; i < 8; i++) term[i] = table >> i & 1 ? ~0u : 0;
  FOR_LANES(l) {
    uint32_t low = (~b[l] & ((~c[l] & term[0]) | (c[l] & term[1]))) |
                   (b[l] & ((~c[l] & term[2]) | (c[l] & term[3])));
    uint32_t high = (~b[l] & ((~c[l] & term[4]) | (c[l] & term[5]))) |
                    (b[l] & ((~c[l] & term[6]) | (c[l] & term[7])));
    r[l] = (~a[l] & low) | (a[l] & high);
  }
}
HANDLER(lop3_b32) {
  LANES32(a, 1); LANES32(b, 2); LANES32(c, 3); uint32_t r[32];
  look_up(a, b, c, (unsigned)I->op[4].imm, r);
  PUT32(0, r); return DONE;
}
HANDLER(lop3_predicate) {  // operands: d p a b c table q
  LANES32(a, 2); LANES32(b, 3); LANES32(c, 4); uint32_t r[32], some[32];
  look_up(a, b, c, (unsigned)I->op[5].imm, r);
  FOR_LANES(l) some[l] = r[l] ? ~0u : 0;
  Mask p = mask_of(some), q = SRCP(6);
  PUT32(0, r); PUTP(1, I->mod[0] == 1 ? p | q : p & q); return DONE;
}

// --------------------------------------------------------------------------------- predicates

#define PREDICATE(name, expr) \
  HANDLER(name) { Mask x = SRCP(1), y = SRCP(2); PUTP(0, expr); return DONE; }
// One operand may decide the result, even if the other is undefined.
#define DECIDED(name, expr, decides) \
  HANDLER(name) { \
    Mask x = SRCP(1), y = SRCP(2); \
    Mask known_x = defined_in(w, &I->op[1]), known_y = defined_in(w, &I->op[2]); \
    Mask known = (known_x & known_y) | (known_x & decides(x)) | (known_y & decides(y)); \
    PUTP(0, expr); set_defined(w, &I->op[0], m, known); return DONE; \
  }
#define IF_TRUE(p) (p)
#define IF_FALSE(p) (~(p))
DECIDED(and_pred, x & y, IF_FALSE)
DECIDED(or_pred, x | y, IF_TRUE)
PREDICATE(xor_pred, x ^ y)
HANDLER(not_pred) { PUTP(0, ~SRCP(1)); return DONE; }
HANDLER(mov_pred) {
  Mask defined = defined_in(w, &I->op[1]);
  PUTP(0, SRCP(1)); set_defined(w, &I->op[0], m, defined); return DONE;
}

// Comparisons of the pattern COMPARISONS: each even comparison is the inverse of the comparison
// before.
#define COMPARISONS "(.eq|ne|lt|ge|gt|le|lo|hs|hi|ls)"
#define BOOLEANS "{.and|or|xor}"
#define COMPARE(t) \
  static Mask compare_##t(int comparison, const WORD(t) *a, const WORD(t) *b) { \
    uint32_t r[32]; \
    switch ((comparison - 1) / 2) { \
      case 0: FOR_LANES(l) r[l] = (T_##t)a[l] == (T_##t)b[l] ? ~0u : 0; break; \
      case 1: case 3: FOR_LANES(l) r[l] = (T_##t)a[l] < (T_##t)b[l] ? ~0u : 0; break; \
      default: FOR_LANES(l) r[l] = (T_##t)a[l] > (T_##t)b[l] ? ~0u : 0; \
    } \
    return comparison & 1 ? mask_of(r) : ~mask_of(r); \
  }
ALWAYS_INLINE Mask combined(int boolean, Mask x, Mask y) {
  return boolean == 0 ? x : boolean == 1 ? x & y : boolean == 2 ? x | y : x ^ y;
}
static const uint32_t TRUE_VALUES[] = {0, ~0u, ~0u, 0x3F800000, 0x3C00, 0x3F80, 0xFFFF, 0xFFFF};
#define SET_TYPES "(.u32|s32|f32|f16|bf16|u16|s16)"  // in the order of TRUE_VALUES, from 1 on
#define COMPARED(t) \
  COMPARE(t) \
  HANDLER(setp_##t) { /* operands: p q a b c */ \
    LANES(t, a, 2); LANES(t, b, 3); \
    Mask v = compare_##t(I->mod[0], a, b), c = I->mod[1] ? SRCP(4) : 0; \
    PUTP(0, combined(I->mod[1], v, c)); PUTP(1, combined(I->mod[1], ~v, c)); return DONE; \
  } \
  HANDLER(set_##t) { \
    LANES(t, a, 1); LANES(t, b, 2); uint32_t r[32]; \
    Mask v = compare_##t(I->mod[0], a, b); \
    v = combined(I->mod[1], v, I->mod[1] ? SRCP(3) : 0); \
    uint32_t value = TRUE_VALUES[I->mod[2]]; \
    FOR_LANES(l) r[l] = v >> l & 1 ? value : 0; \
    PUT32(0, r); return DONE; \
  }
ALL_TYPES(COMPARED)

// Lanes of a result that is chosen between two operands by a condition.
static Mask chosen_between(Warp *w, const Operand *x, const Operand *y, const Operand *condition,
                           Mask p) {
  Mask known = defined_in(w, condition);
  Mask good_x = defined_in(w, x) | chosen_in(w, x), good_y = defined_in(w, y) | chosen_in(w, y);
  return (known & ((p & good_x) | (~p & good_y))) | (~known & good_x & good_y);
}
// An undefined operand matters only in lanes that select it.
#define SELECT(t) \
  HANDLER(selp_##t) { \
    LANES(t, a, 1); LANES(t, b, 2); WORD(t) r[32]; \
    Mask p = SRCP(3); \
    Mask defined = ((p & defined_in(w, &I->op[1])) | (~p & defined_in(w, &I->op[2]))) & \
                   defined_in(w, &I->op[3]); \
    Mask chosen = chosen_between(w, &I->op[1], &I->op[2], &I->op[3], p); \
    FOR_LANES(l) r[l] = (U_##t)(p >> l & 1 ? a[l] : b[l]); \
    PUT(t, 0, r); set_chosen(w, &I->op[0], m, defined, chosen); return DONE; \
  } \
  HANDLER(slct_##t) { \
    LANES(t, a, 1); LANES(t, b, 2); LANES32(c, 3); WORD(t) r[32]; \
    FOR_LANES(l) r[l] = (U_##t)((int32_t)c[l] >= 0 ? a[l] : b[l]); \
    PUT(t, 0, r); return DONE; \
  } \
  HANDLER(slct_f32_##t) {  /* mod: ftz */ \
    LANES(t, a, 1); LANES(t, b, 2); LANES32(c, 3); WORD(t) r[32]; \
    uint32_t low = I->mod[0] ? 0x7F800000 : 0x7FFFFFFF; \
    FOR_LANES(l) { \
      uint32_t magnitude = c[l] & 0x7FFFFFFF; \
      bool first = magnitude <= 0x7F800000 && ((int32_t)c[l] >= 0 || (magnitude & low) == 0); \
      r[l] = (U_##t)(first ? a[l] : b[l]); \
    } \
    PUT(t, 0, r); return DONE; \
  }
WIDTHS(SELECT)

// -------------------------------------------------------------------------------------- moves

#define MOVE(t) \
  HANDLER(mov_##t) { \
    LANES(t, a, 1); \
    Mask defined = defined_in(w, &I->op[1]), chosen = chosen_in(w, &I->op[1]); \
    if (BITS_##t >= 32) PUT(t, 0, a); \
    else { WORD(t) r[32]; FOR_LANES(l) r[l] = (U_##t)a[l]; PUT(t, 0, r); } \
    set_chosen(w, &I->op[0], m, defined, chosen); return DONE; \
  }
WIDTHS(MOVE)

// Vectors of `bits` bits in all. A packed vector counts as defined if any element is defined:
// compilers leave unused halves undefined.
static Mask defined_list(Warp *w, const Operand *list, int count) {
  Mask defined = 0;
  for (int i = 0; i < count; i++) defined |= defined_in(w, &list[i]);
  return defined;
}
#define ELEMENT(name, o) \
  uint32_t name##_store[32]; const uint32_t *name = src32_of(w, I, o, m, name##_store)
ALWAYS_INLINE int pack32(Warp *w, const Insn *I, Mask m, int bits) {
  const Operand *list = list_of(w, &I->op[1]);
  int count = count_of(&I->op[1]), width = bits / count;
  uint32_t r[32] = {0};
  for (int i = 0; i < count; i++) {
    ELEMENT(a, &list[i]);
    FOR_LANES(l) r[l] |= (a[l] & (~0u >> (32 - width))) << (width * i);
  }
  Mask defined = defined_list(w, list, count);
  PUT32(0, r); set_defined(w, &I->op[0], m, defined); return DONE;
}
HANDLER(pack_b16) { return pack32(w, I, m, 16); }
HANDLER(pack_b32) { return pack32(w, I, m, 32); }
HANDLER(pack_b64) {
  const Operand *list = list_of(w, &I->op[1]);
  int count = count_of(&I->op[1]), width = 64 / count;
  uint64_t r[32];
  Mask defined = defined_list(w, list, count);
  if (count == 2) {
    ELEMENT(a, &list[0]); ELEMENT(b, &list[1]);
    FOR_LANES(l) r[l] = a[l] | (uint64_t)b[l] << 32;
  } else {
    memset(r, 0, sizeof r);
    for (int i = 0; i < count; i++) {
      ELEMENT(a, &list[i]);
      FOR_LANES(l) r[l] |= (uint64_t)(a[l] & (~0u >> (32 - width))) << (width * i);
    }
  }
  PUT64(0, r); set_defined(w, &I->op[0], m, defined); return DONE;
}
#define UNPACK(t) \
  HANDLER(unpack_##t) { \
    LANES(t, a, 1); \
    const Operand *list = list_of(w, &I->op[0]); \
    int count = count_of(&I->op[0]), width = BITS_##t / count; \
    Mask defined = defined_in(w, &I->op[1]); \
    WORD(t) whole[32]; uint32_t r[32]; \
    memcpy(whole, a, sizeof whole);  /* a destination may be the source */ \
    for (int i = 0; i < count; i++) { \
      FOR_LANES(l) r[l] = (uint32_t)(whole[l] >> (width * i)) & (~0u >> (32 - width)); \
      put32_of(w, I, &list[i], m, r); set_defined(w, &list[i], m, defined); \
    } \
    return DONE; \
  }
WIDTHS(UNPACK)

static void put128(Warp *w, const Insn *I, const Operand *o, Mask m, Mask defined,
                   const uint32_t v[128]) {
  if (o->kind != K_REG) return;
  note_write(w, I, o, m);
  FOR_SET(l, m) memcpy(reg128(w, o) + 4 * l, v + 4 * l, 16);
  set_defined(w, o, m, defined);
}
static const uint32_t *source128(Warp *w, const Insn *I, const Operand *o, Mask m,
                                 uint32_t buffer[128]) {
  if (o->kind == K_REG) { check_read(w, I, o, m); return reg128(w, o); }
  memset(buffer, 0, 512);
  uint64_t v = operand_constant(w, o);
  FOR_LANES(l) memcpy(buffer + 4 * l, &v, 8);
  return buffer;
}
HANDLER(mov_b128) {
  uint32_t buffer[128];
  put128(w, I, &I->op[0], m, defined_in(w, &I->op[1]), source128(w, I, &I->op[1], m, buffer));
  return DONE;
}
HANDLER(pack_b128) {  // packs elements of at most 64 bits
  const Operand *list = list_of(w, &I->op[1]);
  int count = count_of(&I->op[1]), words = 4 / count;
  uint32_t r[128];
  for (int i = 0; i < count; i++) {
    if (words == 2) {
      uint64_t store[32];
      const uint64_t *a = src64_of(w, I, &list[i], m, store);
      FOR_LANES(l) memcpy(r + 4 * l + 2 * i, a + l, 8);
    } else {
      ELEMENT(a, &list[i]);
      FOR_LANES(l) r[4 * l + i] = a[l];
    }
  }
  put128(w, I, &I->op[0], m, defined_list(w, list, count), r); return DONE;
}
HANDLER(unpack_b128) {
  uint32_t buffer[128], whole[128], r[32]; uint64_t wide[32];
  memcpy(whole, source128(w, I, &I->op[1], m, buffer), sizeof whole);
  const Operand *list = list_of(w, &I->op[0]);
  int count = count_of(&I->op[0]), words = 4 / count;
  Mask defined = defined_in(w, &I->op[1]);
  for (int i = 0; i < count; i++) {
    if (words == 2) {
      FOR_LANES(l) memcpy(wide + l, whole + 4 * l + 2 * i, 8);
      put64_of(w, I, &list[i], m, wide);
    } else {
      FOR_LANES(l) r[l] = whole[4 * l + i];
      put32_of(w, I, &list[i], m, r);
    }
    set_defined(w, &list[i], m, defined);
  }
  return DONE;
}

// -------------------------------------------------------------------------------------- forms

#define S32_2 "d32 s32 s32"
#define S64_2 "d64 s64 s64"
#define S32_3 "d32 s32 s32 s32"
#define S64_3 "d64 s64 s64 s64"
// Signed and unsigned types, or all bit types, share a handler.
#define FORMS_BY_WIDTH(op, name, two_or_three) \
  {op "(.u16|s16)", S32_##two_or_three, name##_u16, 0}, \
  {op "(.u32|s32)", S32_##two_or_three, name##_u32, 0}, \
  {op "(.u64|s64)", S64_##two_or_three, name##_u64, 0}
#define FORMS_BY_SIGN(op, name, two_or_three) \
  {op ".u16", S32_##two_or_three, name##_u16, 0}, {op ".s16", S32_##two_or_three, name##_s16, 0}, \
  {op ".u32", S32_##two_or_three, name##_u32, 0}, {op ".s32", S32_##two_or_three, name##_s32, 0}, \
  {op ".u64", S64_##two_or_three, name##_u64, 0}, {op ".s64", S64_##two_or_three, name##_s64, 0}
#define FORMS_SIGNED(op, name) \
  {op ".s16", "d32 s32", name##_s16, 0}, {op ".s32", "d32 s32", name##_s32, 0}, \
  {op ".s64", "d64 s64", name##_s64, 0}
#define FORMS_BITS(op, name) \
  {op ".b16", S32_2, name##_u16, 0}, {op ".b32", S32_2, name##_u32, 0}, \
  {op ".b64", S64_2, name##_u64, 0}
#define FORMS_BITS_UNARY(op, name) \
  {op ".b16", "d32 s32", name##_u16, 0}, {op ".b32", "d32 s32", name##_u32, 0}, \
  {op ".b64", "d64 s64", name##_u64, 0}
#define FORMS_CARRY(op, name, two_or_three) \
  {op "(.u32|s32)", S32_##two_or_three, name##_u32, 0}, \
  {op "(.u64|s64)", S64_##two_or_three, name##_u64, 0}
#define FORMS_CARRY_HIGH(op, name) \
  {op ".u32", S32_3, name##_u32, 0}, {op ".s32", S32_3, name##_s32, 0}, \
  {op ".u64", S64_3, name##_u64, 0}, {op ".s64", S64_3, name##_s64, 0}
#define COMPARE_FORM(types, t, s) \
  {"setp" COMPARISONS BOOLEANS types, "dpp " s " " s " sp?", setp_##t, 0}, \
  {"set" COMPARISONS BOOLEANS SET_TYPES types, "d32 " s " " s " sp?", set_##t, 0}

static const Form FORMS[] = {
  // moves: scalars first, so that a lone register is not taken for a vector
  {"mov(.b16|u16|s16)", "d32 s32", mov_u16, F_PROPAGATE},
  {"mov(.b32|u32|s32|f32)", "d32 s32", mov_u32, F_PROPAGATE | F_MOVE},
  {"mov(.b64|u64|s64|f64)", "d64 s64", mov_u64, F_PROPAGATE},
  {"mov.b128", "d128 s128", mov_b128, F_PROPAGATE},
  {"mov.b16", "d32 s32l", pack_b16, F_PROPAGATE},
  {"mov(.b32|u32)", "d32 s32l", pack_b32, F_PROPAGATE},
  {"mov(.b64|u64|f64)", "d64 s32l", pack_b64, F_PROPAGATE},
  {"mov.b128", "d128 s64l", pack_b128, F_PROPAGATE},
  {"mov.b128", "d128 s32l", pack_b128, F_PROPAGATE},
  {"mov.b16", "d32l s32", unpack_u16, F_PROPAGATE},
  {"mov(.b32|u32)", "d32l s32", unpack_u32, F_PROPAGATE},
  {"mov(.b64|u64|f64)", "d32l s64", unpack_u64, F_PROPAGATE},
  {"mov.b128", "d64l s128", unpack_b128, F_PROPAGATE},
  {"mov.b128", "d32l s128", unpack_b128, F_PROPAGATE},
  {"mov.pred", "dp sp", mov_pred, F_PROPAGATE},

  FORMS_BY_WIDTH("add", add, 2),
  FORMS_BY_WIDTH("sub", sub, 2),
  FORMS_BY_WIDTH("mul.lo", mul_lo, 2),
  FORMS_BY_WIDTH("mad.lo", mad_lo, 3),
  FORMS_BY_SIGN("mul.hi", mul_hi, 2),
  FORMS_BY_SIGN("mad.hi", mad_hi, 3),
  {"mul.wide.u16", S32_2, mul_wide_u16, 0}, {"mul.wide.s16", S32_2, mul_wide_s16, 0},
  {"mul.wide.u32", "d64 s32 s32", mul_wide_u32, 0},
  {"mul.wide.s32", "d64 s32 s32", mul_wide_s32, 0},
  {"mad.wide.u16", S32_3, mad_wide_u16, 0}, {"mad.wide.s16", S32_3, mad_wide_s16, 0},
  {"mad.wide.u32", "d64 s32 s32 s64", mad_wide_u32, 0},
  {"mad.wide.s32", "d64 s32 s32 s64", mad_wide_s32, 0},
  {"add.sat.s32", S32_2, add_sat_s32, 0},
  {"sub.sat.s32", S32_2, sub_sat_s32, 0},
  {"mad.hi.sat.s32", S32_3, mad_hi_sat_s32, 0},
  {"add(.u16x2|s16x2)", S32_2, add_x2, 0},
  {"mul24.lo.u32", S32_2, mul24_lo_u32, 0}, {"mul24.lo.s32", S32_2, mul24_lo_s32, 0},
  {"mul24.hi.u32", S32_2, mul24_hi_u32, 0}, {"mul24.hi.s32", S32_2, mul24_hi_s32, 0},
  {"mad24.lo.u32", S32_3, mad24_lo_u32, 0}, {"mad24.lo.s32", S32_3, mad24_lo_s32, 0},
  {"mad24.hi.u32", S32_3, mad24_hi_u32, 0}, {"mad24.hi.s32", S32_3, mad24_hi_s32, 0},
  {"mad24.hi.sat.s32", S32_3, mad24_hi_sat_s32, 0},
  FORMS_BY_SIGN("sad", sad, 3),
  FORMS_BY_SIGN("div", div, 2),
  FORMS_BY_SIGN("rem", rem, 2),
  FORMS_BY_SIGN("min", min, 2),
  FORMS_BY_SIGN("max", max, 2),
  {"min.relu.s32", S32_2, min_relu_s32, 0}, {"max.relu.s32", S32_2, max_relu_s32, 0},
  {"min.u16x2", S32_2, min_u16x2, 0}, {"max.u16x2", S32_2, max_u16x2, 0},
  {"min.s16x2", S32_2, min_s16x2, 0}, {"max.s16x2", S32_2, max_s16x2, 0},
  {"min.relu.s16x2", S32_2, min_relu_s16x2, 0}, {"max.relu.s16x2", S32_2, max_relu_s16x2, 0},
  FORMS_SIGNED("abs", abs), FORMS_SIGNED("neg", neg),
  FORMS_CARRY("add(.cc)", add_cc, 2), FORMS_CARRY("addc{.cc}", addc, 2),
  FORMS_CARRY("sub(.cc)", sub_cc, 2), FORMS_CARRY("subc{.cc}", subc, 2),
  FORMS_CARRY("mad.lo(.cc)", mad_lo_cc, 3), FORMS_CARRY("madc.lo{.cc}", madc_lo, 3),
  FORMS_CARRY_HIGH("mad.hi(.cc)", mad_hi_cc), FORMS_CARRY_HIGH("madc.hi{.cc}", madc_hi),
  {"dp4a(.u32|s32)(.u32|s32)", S32_3, dp4a, 0},
  {"dp2a(.lo|hi)(.u32|s32)(.u32|s32)", S32_3, dp2a, 0},

  {"popc.b32", "d32 s32", popc_u32, 0}, {"popc.b64", "d32 s64", popc_u64, 0},
  {"clz.b32", "d32 s32", clz_u32, 0}, {"clz.b64", "d32 s64", clz_u64, 0},
  {"bfind{.shiftamt}.u32", "d32 s32", bfind_u32, 0},
  {"bfind{.shiftamt}.s32", "d32 s32", bfind_s32, 0},
  {"bfind{.shiftamt}.u64", "d32 s64", bfind_u64, 0},
  {"bfind{.shiftamt}.s64", "d32 s64", bfind_s64, 0},
  {"brev.b32", "d32 s32", brev_u32, 0}, {"brev.b64", "d64 s64", brev_u64, 0},
  {"fns.b32", S32_3, fns_b32, 0},
  {"bmsk(.clamp|wrap).b32", S32_2, bmsk_b32, 0},
  {"szext(.clamp|wrap)(.u32|s32)", S32_2, szext_b32, 0},
  {"bfe.u32", S32_3, bfe_u32, 0}, {"bfe.s32", S32_3, bfe_s32, 0},
  {"bfe.u64", "d64 s64 s32 s32", bfe_u64, 0}, {"bfe.s64", "d64 s64 s32 s32", bfe_s64, 0},
  {"bfi.b32", "d32 s32 s32 s32 s32", bfi_u32, F_PROPAGATE},
  {"bfi.b64", "d64 s64 s64 s32 s32", bfi_u64, F_PROPAGATE},
  {"shl.b16", S32_2, shl_u16, 0}, {"shl.b32", S32_2, shl_u32, 0},
  {"shl.b64", "d64 s64 s32", shl_u64, 0},
  {"shr(.b16|u16)", S32_2, shr_u16, 0}, {"shr(.b32|u32)", S32_2, shr_u32, 0},
  {"shr(.b64|u64)", "d64 s64 s32", shr_u64, 0},
  {"shr.s16", S32_2, shr_s16, 0}, {"shr.s32", S32_2, shr_s32, 0},
  {"shr.s64", "d64 s64 s32", shr_s64, 0},
  {"shf.l(.clamp|wrap).b32", S32_3, shf_l, 0}, {"shf.r(.clamp|wrap).b32", S32_3, shf_r, 0},
  {"prmt.b32{.f4e|b4e|rc8|ecl|ecr|rc16}", S32_3, prmt_b32, F_PROPAGATE},
  {"lop3.b32", "d32 s32 s32 s32 i", lop3_b32, 0},
  {"lop3(.or|and).b32", "d32p s32 s32 s32 i sp", lop3_predicate, 0},
  FORMS_BITS("and", and), FORMS_BITS("or", or), FORMS_BITS("xor", xor),
  FORMS_BITS_UNARY("not", not), FORMS_BITS_UNARY("cnot", cnot),
  {"and.pred", "dp sp sp", and_pred, F_PROPAGATE}, {"or.pred", "dp sp sp", or_pred, F_PROPAGATE},
  {"xor.pred", "dp sp sp", xor_pred, 0}, {"not.pred", "dp sp", not_pred, 0},

  COMPARE_FORM("(.b16|u16)", u16, "s32"), COMPARE_FORM(".s16", s16, "s32"),
  COMPARE_FORM("(.b32|u32)", u32, "s32"), COMPARE_FORM(".s32", s32, "s32"),
  COMPARE_FORM("(.b64|u64)", u64, "s64"), COMPARE_FORM(".s64", s64, "s64"),
  {"selp(.b16|u16|s16)", "d32 s32 s32 sp", selp_u16, F_PROPAGATE},
  {"selp(.b32|u32|s32|f32)", "d32 s32 s32 sp", selp_u32, F_PROPAGATE},
  {"selp(.b64|u64|s64|f64)", "d64 s64 s64 sp", selp_u64, F_PROPAGATE},
  {"slct(.b16|u16|s16).s32", S32_3, slct_u16, 0},
  {"slct(.b32|u32|s32|f32).s32", S32_3, slct_u32, 0},
  {"slct(.b64|u64|s64|f64).s32", "d64 s64 s64 s32", slct_u64, 0},
  {"slct{.ftz}(.b16|u16|s16).f32", S32_3, slct_f32_u16, 0},
  {"slct{.ftz}(.b32|u32|s32|f32).f32", S32_3, slct_f32_u32, 0},
  {"slct{.ftz}(.b64|u64|s64|f64).f32", "d64 s64 s64 s32", slct_f32_u64, 0},
  {0}
};

const Family FAMILY_INTEGER = {.name = "integer", .forms = FORMS};
