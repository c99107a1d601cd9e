// The arithmetic of tensor cores. See numerics.h for the model; its parameters are in RULES.
#include "numerics.h"
#include "float_bits.h"

#include <math.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

// Without AVX these vectors are passed in memory; only this file uses the vectors.
#pragma GCC diagnostic ignored "-Wpsabi"
typedef float v8f __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef int16_t v8s __attribute__((vector_size(16)));

// ------------------------------------------------------------------------------------- formats

// A power of two without a sign: a scale factor.
ALWAYS_INLINE float ue8m0_value(uint32_t code) {
  return as_float(code == 255 ? 0x7FC00000 : code ? code << 23 : 0x00400000);
}

void decode_floats(FloatType type, const void *raw, int count, float *out) {
  const uint16_t *h = raw;
  const uint32_t *word = raw;
  const uint8_t *byte = raw;
#define DECODE(value) for (int i = 0; i < count; i++) out[i] = value; break
  switch (type) {
    case FT_F16: DECODE(half_value(h[i]));
    case FT_BF16: DECODE(as_float(f32_of_bf16(h[i])));
    case FT_TF32: DECODE(as_float(word[i] & ~0x1FFFu));
    case FT_E4M3: DECODE(small_value(&E4M3, byte[i]));
    case FT_E5M2: DECODE(small_value(&E5M2, byte[i]));
    case FT_E3M2: DECODE(small_value(&E3M2, byte[i]));
    case FT_E2M3: DECODE(small_value(&E2M3, byte[i]));
    case FT_E2M1: DECODE(small_value(&E2M1, byte[i]));
    case FT_UE8M0: DECODE(ue8m0_value(byte[i]));
    case FT_UE4M3: DECODE(small_value(&E4M3, byte[i] & 0x7F));
    default: memcpy(out, raw, (size_t)count * 4);
  }
}

void decode_fp4(const uint8_t *raw, int count, float *out) {
  for (int i = 0; i < count; i++) out[i] = small_value(&E2M1, raw[i / 2] >> (i & 1) * 4);
}

// --------------------------------------------------------------------------------------- rules

// The parameters of each GPU generation. A rule holds from its architecture on, up to the next rule
// for its unit and operands.
enum { OPERAND_HALF, OPERAND_TF32, OPERAND_FP8, OPERAND_SCALED, OPERAND_SCALED_FP4 };
typedef struct { int arch; MmaUnit unit; int operand, block_k, fraction_bits, result_bits; } Rule;
static const Rule RULES[] = {
  {80, UNIT_MMA, OPERAND_HALF, 8, 24, 23},
  {80, UNIT_MMA, OPERAND_TF32, 4, 24, 23},
  {89, UNIT_MMA, OPERAND_FP8, 16, 13, 13},
  {90, UNIT_MMA, OPERAND_HALF, 16, 25, 23},
  {90, UNIT_MMA, OPERAND_TF32, 8, 25, 23},
  {90, UNIT_WGMMA, OPERAND_HALF, 16, 25, 23},
  {90, UNIT_WGMMA, OPERAND_TF32, 8, 25, 23},
  {90, UNIT_WGMMA, OPERAND_FP8, 32, 13, 13},
  {100, UNIT_TCGEN05, OPERAND_HALF, 16, 25, 23},
  {100, UNIT_TCGEN05, OPERAND_TF32, 8, 25, 23},
  {100, UNIT_TCGEN05, OPERAND_FP8, 32, 25, 23},
  {100, UNIT_TCGEN05, OPERAND_SCALED, 32, 25, 23},
  {100, UNIT_TCGEN05, OPERAND_SCALED_FP4, 64, 35, 23},
  {120, UNIT_MMA, OPERAND_FP8, 32, 25, 23},
  {120, UNIT_MMA, OPERAND_SCALED, 32, 25, 23},
  {120, UNIT_MMA, OPERAND_SCALED_FP4, 64, 35, 23},
};
static const int MIN_EXPONENT[FT_COUNT] = {
  [FT_F16] = -14, [FT_BF16] = -126, [FT_TF32] = -126, [FT_F32] = -126,
  [FT_E4M3] = -6, [FT_E5M2] = -14, [FT_E3M2] = -2, [FT_E2M3] = 0, [FT_E2M1] = 0,
};

static int operand_class(FloatType a, BlockScale scaled) {
  if (scaled) return scaled == SCALED_MXF4 ? OPERAND_SCALED_FP4 : OPERAND_SCALED;
  if (a == FT_F16 || a == FT_BF16) return OPERAND_HALF;
  return a == FT_TF32 ? OPERAND_TF32 : OPERAND_FP8;
}

Numerics numerics_of(Emu *e, MmaUnit unit, FloatType a, FloatType b, bool f16_accumulator,
                     BlockScale scaled) {
  int operand = operand_class(a, scaled);
  const Rule *rule = NULL, *any = NULL;
  for (size_t i = 0; i < sizeof RULES / sizeof *RULES; i++) {
    if (RULES[i].unit != unit || RULES[i].operand != operand) continue;
    any = &RULES[i];
    if (RULES[i].arch <= e->program->arch) rule = any;
  }
  if (!rule) rule = any ? any : &RULES[0];
  return (Numerics){
    .exact = e->numerics != 0, .block_k = rule->block_k, .fraction_bits = rule->fraction_bits,
    .result_bits = rule->result_bits, .f16_result = f16_accumulator,
    .min_exponent_a = MIN_EXPONENT[a], .min_exponent_b = MIN_EXPONENT[b],
    .scale_group = operand == OPERAND_SCALED_FP4 ? 16 : 0, .emu = e,
  };
}

// ------------------------------------------------------------------------------------- scratch

// Working arrays, by number.
static void *array(const Numerics *num, int slot, size_t bytes) {
  return scratch(num->emu, SCRATCH_NUMERICS + slot, bytes);
}

// out[k][column] for k0 <= k < k0 + K of B, columns padded with zeros to a multiple of 8.
static float *transposed(const Numerics *num, const float *B, int N, int ldb, int k0, int K,
                         int padded) {
  float *out = array(num, 0, (size_t)padded * K * sizeof(float));
  for (int k = 0; k < K; k++)
    for (int n = N; n < padded; n++) out[k * padded + n] = 0;
  for (int n = 0; n < N; n++)
    for (int k = 0; k < K; k++) out[k * padded + n] = B[(size_t)n * ldb + k0 + k];
  return out;
}

// ----------------------------------------------------------------------- plain floating point

static void float_row(int K, int padded, const float *a, const float *bt, int n0, float *d,
                      int columns, bool accumulate) {
  v8f sum[4] = {{0}};
  int vectors = (columns + 7) / 8;
  for (int k = 0; k < K; k++) {
    const float *b = bt + (size_t)k * padded + n0;
    for (int v = 0; v < 4; v++)
      if (v < vectors) sum[v] += a[k] * *(const v8f *)(b + 8 * v);
  }
  const float *flat = (const float *)sum;
  for (int n = 0; n < columns; n++) {
    float x = accumulate ? d[n] + flat[n] : flat[n];
    d[n] = x == x ? x : as_float(NAN32);
  }
}

// bt: B transposed.
static void float_tile(const Numerics *num, int M, int N, int K, const float *A, const float *bt,
                       float *D, bool accumulate) {
  int padded = (N + 7) & ~7;
  for (int n0 = 0; n0 < N; n0 += 32) {
    int columns = N - n0 < 32 ? N - n0 : 32;
    for (int m = 0; m < M; m++)
      float_row(K, padded, A + (size_t)m * K, bt, n0, D + (size_t)m * N + n0, columns, accumulate);
  }
  if (num->f16_result)
    for (int i = 0; i < M * N; i++) D[i] = half_value(half_of(D[i]));
}

// --------------------------------------------------------------------------- one element, exact

static inline double power_of_two(int e) {   // -1022 <= e <= 1023
  uint64_t bits = (uint64_t)(e + 1023) << 52;
  double d;
  memcpy(&d, &bits, 8);
  return d;
}
static inline int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

#define NO_EXPONENT (-2000)  // exponent of zero: never the largest
#define LOWEST (-133)        // smallest exponent to which products are aligned
#define BAD_EXPONENT 12000   // marks values left to exact_element

static inline int exponent_of(float x, int lowest) {
  uint32_t bits = float_bits(x) & 0x7FFFFFFF;
  if (!bits) return NO_EXPONENT;
  int e = (int)(bits >> 23) - 127;
  return e < lowest ? lowest : e;
}

// A result that has become zero loses its sign.
static inline float positive_zero(float x) { return x == 0 ? 0 : x; }

// An exact value rounded to the accumulator's format.
static float rounded(const Numerics *num, double v) {
  if (v == 0) return 0;
  if (num->f16_result) {
    // To f32 with the lost bits gathered in the last bit, so that a second rounding is right.
    uint64_t bits;
    memcpy(&bits, &v, 8);
    uint64_t lost = bits & 0x1FFFFFFF;
    bits = (bits & ~(uint64_t)0x1FFFFFFF) | (lost ? 0x20000000 : 0);
    memcpy(&v, &bits, 8);
    return positive_zero(half_value(half_of((float)v)));
  }
  int e = ilogb(v);
  if (e < -126) e = -126;
  double units = trunc(v * power_of_two(num->result_bits - e));
  return positive_zero((float)(units * power_of_two(e - num->result_bits)));
}

// One element of one block. `shift`: exponent of the block's scale factors.
static float exact_element(const Numerics *num, int K, const float *a, const float *b, float c,
                           int shift) {
  int largest = exponent_of(c, num->f16_result ? -14 : -126);
  if (largest < LOWEST) largest = LOWEST;
  double plain = c;
  for (int k = 0; k < K; k++) {
    plain += (double)a[k] * b[k];
    int e = exponent_of(a[k], num->min_exponent_a) + exponent_of(b[k], num->min_exponent_b);
    if (a[k] != 0 && b[k] != 0 && e + shift > largest) largest = e + shift;
  }
  if (!isfinite(plain)) return isnan(plain) ? as_float(NAN32) : (float)plain;
  int64_t total = (int64_t)(c * power_of_two(num->fraction_bits - largest));
  double unit = power_of_two(clamp(num->fraction_bits + shift - largest, -700, 700));
  for (int k = 0; k < K; k++) total += (int64_t)((double)a[k] * b[k] * unit);
  return rounded(num, (double)total * power_of_two(largest - num->fraction_bits));
}

// ------------------------------------------------------------------------------- blocks, exact
//
// Eight columns at a time. Products are formed in f32, where they are exact if their factors are
// between 2^-50 and 2^60; smaller factors are left out, and exact_element recomputes elements for
// which that could matter.

#define MAX_BLOCK 64
#define SMALLEST (-50)
#define LARGEST 60

typedef struct {
  const Numerics *num;
  int K, padded;
  const float *bt;           // K x padded
  const int16_t *eb;         // exponents of bt
  const int16_t *column_top, *column_small;  // largest exponent; largest exponent left out
  const int16_t *shift;  // exponents of the columns' scale factors
} Block;

static inline v8s max8(v8s a, v8s b) {
#ifdef __SSE2__
  return (v8s)_mm_max_epi16((__m128i)a, (__m128i)b);
#else
  v8s less = a < b;
  return (b & less) | (a & ~less);
#endif
}
static inline v8i max8i(v8i a, v8i b) {
  v8i less = a < b;
  return (b & less) | (a & ~less);
}
static inline v8i min8i(v8i a, v8i b) {
  v8i less = a < b;
  return (a & less) | (b & ~less);
}

// Exponents of eight values. Values that are left out become 0; their exponents go into *left.
static inline v8s take_exponents(float *x, int lowest, v8s *left) {
  v8i bits = *(v8i *)x & 0x7FFFFFFF;
  v8i e = (bits >> 23) - 127;
  v8i large = e > LARGEST, usual = (e >= SMALLEST) & ~large, zero = bits == 0;
  e = max8i(e, (v8i){0} + lowest);
  e = (e & ~zero) | (zero & NO_EXPONENT);
  // Too large for the vector path: treated as if a huge value had been left out.
  v8i out = (large & BAD_EXPONENT) | (usual & (2 * NO_EXPONENT)) | (e & ~large & ~usual);
  *left = __builtin_convertvector(out, v8s);
  *(v8i *)x &= usual;
  return __builtin_convertvector(e, v8s);
}

static int16_t largest_of(v8s v) {
  int16_t largest = v[0];
  for (int i = 1; i < 8; i++) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

static inline unsigned mask_of(v8i v) {
#ifdef __AVX__
  return (unsigned)_mm256_movemask_ps((__m256)v);
#else
  unsigned mask = 0;
  for (int i = 0; i < 8; i++) mask |= (v[i] & 1u) << i;
  return mask;
#endif
}

static inline v8f through_half(v8f x) {
#ifdef __F16C__
  return (v8f)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < 8; i++) x[i] = half_value(half_of(x[i]));
  return x;
#endif
}

// An integer times 2^exponent, in f32 (or f16) as the hardware rounds it. Lanes whose result is
// not a normal number are set in *again.
static inline v8f rounded8(const Numerics *num, v8i total, v8i exponent, v8i *again) {
  v8i sign = total >> 31, zero = total == 0;
  v8i magnitude = (total ^ sign) - sign;
  v8i bits = (v8i)__builtin_convertvector(magnitude, v8f);  // to nearest: undo rounding up
  v8i back = __builtin_convertvector((v8f)bits, v8i);
  bits += (back > magnitude) | (back < 0);
  if (num->f16_result)  // lost bits are gathered in the last bit
    bits |= (__builtin_convertvector((v8f)bits, v8i) != magnitude) & 1;
  else bits &= ~((1 << (23 - num->result_bits)) - 1);
  v8i field = (bits >> 23) + exponent;
  *again |= ((field < 1) | (field > 254) | (magnitude < 0)) & ~zero;
  v8f value = (v8f)((bits + (exponent << 23)) & ~zero);
  if (num->f16_result) value = through_half(value);
  return (v8f)((v8i)value | (sign & (int32_t)0x80000000 & ((v8i)value != 0)));
}

// Adds one block of K products to eight columns of a row. Returns the columns to recompute, one bit
// each.
static inline __attribute__((always_inline)) unsigned exact_eight(
    const Block *b, int K, int n0, const float *a, const int16_t *ea, int row_top, int row_small,
    int row_shift, float *c) {
  const Numerics *num = b->num;
  const int F = num->fraction_bits;
  v8s top = (v8s){0} + (int16_t)(2 * NO_EXPONENT);
  for (int k = 0; k < K; k++)
    top = max8(top, *(const v8s *)(b->eb + (size_t)k * b->padded + n0) + ea[k]);
  v8f c8;
  memcpy(&c8, c, sizeof c8);
  v8i c_bits = (v8i)c8 & 0x7FFFFFFF;
  v8i ec = (c_bits >> 23) - 127;
  v8i c_bad = ec > 127, c_zero = c_bits == 0;
  ec = max8i(ec, (v8i){0} + (num->f16_result ? -14 : -126));
  ec = (ec & ~c_zero & ~c_bad) | (c_zero & LOWEST);
  v8i shift = __builtin_convertvector(*(const v8s *)(b->shift + n0), v8i) + row_shift;
  v8i e = max8i(__builtin_convertvector(top, v8i) + shift, ec);

  v8i field = min8i(max8i(127 + F + shift - e, (v8i){0} + 1), (v8i){0} + 254);
  v8f scale = (v8f)(field << 23);
  v8i sum = {0}, high = {0};
  int first = K < 16 ? K : 16;
  const float *column = b->bt + n0;
  for (int k = 0; k < first; k++, column += b->padded)
    sum += __builtin_convertvector(a[k] * *(const v8f *)column * scale, v8i);
  for (int k = first; k < K; k++, column += b->padded)   // kept apart: 32 terms may not fit
    high += __builtin_convertvector(a[k] * *(const v8f *)column * scale, v8i);
  field = min8i(max8i(127 + F - e, (v8i){0} + 1), (v8i){0} + 254);
  high += __builtin_convertvector((v8f)((v8i)c8 & ~c_bad) * (v8f)(field << 23), v8i);
  v8i total = sum + high;
  v8i again = (((sum ^ total) & (high ^ total)) < 0) | c_bad;

  v8i c_small = __builtin_convertvector(*(const v8s *)(b->column_small + n0), v8i) + row_top;
  v8i r_small = __builtin_convertvector(*(const v8s *)(b->column_top + n0), v8i) + row_small;
  v8i limit = max8i(c_small, r_small) + shift + F + 3;
  // A factor that was left out matters, or the scale was out of range.
  again |= (e < limit) | (e > F + 120) | ((e < F - 126) & ~((total == 0) & c_zero));
  v8f out = rounded8(num, total, e - F, &again);
  out = (v8f)(((v8i)out & ~again) | ((v8i)c8 & again));
  memcpy(c, &out, sizeof out);
  return mask_of(again);
}

// exact_eight with the usual lengths as compile-time constants.
static unsigned exact_columns(const Block *b, int n0, const float *a, const int16_t *ea,
                              int row_top, int row_small, int row_shift, float *c) {
  switch (b->K) {
    case 16: return exact_eight(b, 16, n0, a, ea, row_top, row_small, row_shift, c);
    case 32: return exact_eight(b, 32, n0, a, ea, row_top, row_small, row_shift, c);
    default: return exact_eight(b, b->K, n0, a, ea, row_top, row_small, row_shift, c);
  }
}

static inline int scale_exponent(float s) {
  return s == 0 || !isfinite(s) ? 0 : ilogbf(s);
}

// Prepare B for exact_eight: columns n0 .. n0 + K of its rows.
static Block prepare(const Numerics *num, int N, int ld, int k0, int K, const float *B,
                     const int16_t *scale) {
  int padded = (N + 7) & ~7;
  float *bt = transposed(num, B, N, ld, k0, K, padded);
  int16_t *eb = array(num, 1, (size_t)padded * K * 2);
  int16_t *top = array(num, 2, (size_t)padded * 3 * 2);
  int16_t *small = top + padded, *shift = small + padded;
  for (int n = 0; n < padded; n++) shift[n] = scale && n < N ? scale[n] : 0;
  for (int n = 0; n < padded; n += 8) {
    v8s column_top = (v8s){0} + (int16_t)(2 * NO_EXPONENT), column_small = column_top;
    for (int k = 0; k < K; k++) {
      v8s left;
      v8s e = take_exponents(bt + (size_t)k * padded + n, num->min_exponent_b, &left);
      memcpy(eb + (size_t)k * padded + n, &e, sizeof e);
      column_top = max8(column_top, e);
      column_small = max8(column_small, left);
    }
    memcpy(top + n, &column_top, sizeof column_top);
    memcpy(small + n, &column_small, sizeof column_small);
  }
  return (Block){num, K, padded, bt, eb, top, small, shift};
}

// A prepared block for the whole tile. sa: exponents of A's scale factors, by row.
static void exact_block(const Block *block, int M, int N, int ld, int k0, const float *A,
                        const float *B, const int16_t *sa, float *D) {
  const Numerics *num = block->num;
  int K = block->K;
  float row[MAX_BLOCK] __attribute__((aligned(32)));
  int16_t er[MAX_BLOCK] __attribute__((aligned(16)));
  for (int m = 0; m < M; m++) {
    const float *a = A + (size_t)m * ld + k0;
    memset(row, 0, sizeof row);
    memcpy(row, a, (size_t)K * 4);
    v8s top = (v8s){0} + (int16_t)(2 * NO_EXPONENT), small = top;
    for (int k = 0; k < K; k += 8) {
      v8s left, e = take_exponents(row + k, num->min_exponent_a, &left);
      memcpy(er + k, &e, sizeof e);
      top = max8(top, e);
      small = max8(small, left);
    }
    int row_top = largest_of(top), row_small = largest_of(small), row_shift = sa ? sa[m] : 0;
    float *d = D + (size_t)m * N;
    for (int n0 = 0; n0 < N; n0 += 8) {
      int columns = N - n0 < 8 ? N - n0 : 8;
      float c[8] = {0};
      memcpy(c, d + n0, (size_t)columns * 4);
      unsigned again = exact_columns(block, n0, row, er, row_top, row_small, row_shift, c);
      memcpy(d + n0, c, (size_t)columns * 4);
      for (; __builtin_expect(again != 0, 0); again &= again - 1) {
        int n = n0 + __builtin_ctz(again);
        if (n < N)
          d[n] = exact_element(num, K, a, B + (size_t)n * ld + k0, d[n],
                               row_shift + block->shift[n]);
      }
    }
  }
}

// The prepared B of the last call of mma_tile, if its K was one block.
typedef struct { Numerics num; Block block; const float *B; int N, K; bool exact; } Latest;

static Latest *latest_of(const Numerics *num) {
  return scratch(num->emu, SCRATCH_LATEST, sizeof(Latest));
}

void mma_tile(const Numerics *num, int M, int N, int K, const float *A, const float *B, float *D,
              bool accumulate) {
  Latest *latest = latest_of(num);
  latest->B = NULL;
  if (!num->exact) {
    int padded = (N + 7) & ~7;
    const float *bt = transposed(num, B, N, K, 0, K, padded);
    float_tile(num, M, N, K, A, bt, D, accumulate);
    latest->block = (Block){.padded = padded, .bt = bt};
  } else {
    if (!accumulate) memset(D, 0, (size_t)M * N * sizeof *D);
    for (int k = 0; k < K; k += num->block_k) {
      Block block = prepare(num, N, K, k, K - k < num->block_k ? K - k : num->block_k, B, NULL);
      exact_block(&block, M, N, K, k, A, B, NULL, D);
      latest->block = block;
    }
    if (K > num->block_k) return;
  }
  latest->num = *num;
  latest->block.num = &latest->num;
  latest->B = B, latest->N = N, latest->K = K, latest->exact = num->exact;
}

void mma_tile_again(const Numerics *num, int M, int N, int K, const float *A, const float *B,
                    float *D, bool accumulate) {
  const Latest *latest = latest_of(num);
  if (latest->B != B || latest->N != N || latest->K != K || latest->exact != num->exact) {
    mma_tile(num, M, N, K, A, B, D, accumulate);
  } else if (!num->exact) {
    float_tile(num, M, N, K, A, latest->block.bt, D, accumulate);
  } else {
    if (!accumulate) memset(D, 0, (size_t)M * N * sizeof *D);
    exact_block(&latest->block, M, N, K, 0, A, B, NULL, D);
  }
}

// -------------------------------------------------------------------------------- block scaling

// Rows of X (rows x K) times their scale factors.
static float *prescaled(const Numerics *num, int slot, const float *X, const float *scale, int rows,
                        int K, int vector) {
  float *out = array(num, slot, (size_t)rows * K * sizeof(float));
  for (int i = 0; i < rows * K; i++) out[i] = X[i] * scale[i / vector];
  return out;
}

// fp4 with scale factors: `scale_group` products are summed exactly and multiplied by the scale
// factors' significands; the scale factors' exponents decide how the sums are aligned.
static float grouped_element(const Numerics *num, int K, const float *a, const float *b,
                             const float *sa, const float *sb, int vector, float c) {
  double part[64];
  int exponent[64], groups = 0, largest = exponent_of(c, -126);
  if (largest < LOWEST) largest = LOWEST;
  double plain = c;
  for (int k = 0; k < K; k += num->scale_group, groups++) {
    float fa = sa[k / vector], fb = sb[k / vector];
    double sum = 0;
    for (int i = 0; i < num->scale_group; i++) sum += (double)a[k + i] * b[k + i];
    plain += sum * fa * fb + 0 * fa * fb;
    exponent[groups] = scale_exponent(fa) + scale_exponent(fb);
    part[groups] = sum * fa * fb * power_of_two(-exponent[groups]);
    if (exponent[groups] > largest) largest = exponent[groups];
  }
  if (!isfinite(plain)) return isnan(plain) ? as_float(NAN32) : (float)plain;
  int64_t total = (int64_t)(c * power_of_two(num->fraction_bits - largest));
  for (int g = 0; g < groups; g++)
    total += (int64_t)(part[g] * power_of_two(clamp(num->fraction_bits + exponent[g] - largest,
                                                    -700, 700)));
  return rounded(num, (double)total * power_of_two(largest - num->fraction_bits));
}

static void scale_exponents(const float *scale, int rows, int per_row, int at, int16_t *out) {
  for (int i = 0; i < rows; i++) out[i] = (int16_t)scale_exponent(scale[i * per_row + at]);
}

// Rows or columns whose scale factor is NaN give NaN.
static void spread_nan(int M, int N, int per_row, int at, const float *sa, const float *sb,
                       float *D) {
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++)
      if (isnan(sa[m * per_row + at]) || isnan(sb[n * per_row + at]))
        D[m * N + n] = as_float(NAN32);
}

void mma_tile_scaled(const Numerics *num, int M, int N, int K, const float *A, const float *B,
                     const float *scale_a, const float *scale_b, int vector, float *D,
                     bool accumulate) {
  latest_of(num)->B = NULL;
  if (!num->exact) {
    const float *a = prescaled(num, 3, A, scale_a, M, K, vector);
    const float *b = prescaled(num, 4, B, scale_b, N, K, vector);
    float_tile(num, M, N, K, a, transposed(num, b, N, K, 0, K, (N + 7) & ~7), D, accumulate);
    return;
  }
  if (!accumulate) memset(D, 0, (size_t)M * N * sizeof *D);
  int per_row = K / vector;
  if (num->scale_group) {
    for (int k = 0; k < K; k += num->block_k) {
      int length = K - k < num->block_k ? K - k : num->block_k;
      for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++)
          D[m * N + n] = grouped_element(
              num, length, A + (size_t)m * K + k, B + (size_t)n * K + k,
              scale_a + m * per_row + k / vector, scale_b + n * per_row + k / vector, vector,
              D[m * N + n]);
    }
    return;
  }
  int16_t *sa = array(num, 5, (size_t)(M + N) * 2), *sb = sa + M;
  for (int k = 0; k < K; k += vector) {
    scale_exponents(scale_a, M, per_row, k / vector, sa);
    scale_exponents(scale_b, N, per_row, k / vector, sb);
    Block block = prepare(num, N, K, k, vector, B, sb);
    exact_block(&block, M, N, K, k, A, B, sa, D);
    spread_nan(M, N, per_row, k / vector, scale_a, scale_b, D);
  }
}

// ------------------------------------------------------------------------------------ integers

void multiply_integers(int M, int N, int K, const int16_t *A, const int16_t *B, int32_t *D,
                       bool accumulate, bool saturate) {
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) {
      int32_t sum = 0;
      for (int k = 0; k < K; k++) sum += A[m * K + k] * B[n * K + k];
      int64_t all = (int64_t)sum + (accumulate ? D[m * N + n] : 0);
      if (saturate) all = all > INT32_MAX ? INT32_MAX : all < INT32_MIN ? INT32_MIN : all;
      D[m * N + n] = (int32_t)(uint32_t)all;
    }
}

void widen_bytes(const uint8_t *in, int count, bool is_signed, int16_t *out) {
  for (int i = 0; i < count; i++) out[i] = is_signed ? (int8_t)in[i] : in[i];
}

void unpack_bits(const uint8_t *in, int bits, uint8_t out[16]) {
  for (int i = 0; i < 16; i++) {
    int at = i * bits;
    out[i] = (uint8_t)((in[at / 8] | in[at / 8 + 1] << 8) >> at % 8 & ((1 << bits) - 1));
  }
}
