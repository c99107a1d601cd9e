// Matrices in registers: ldmatrix, stmatrix, movmatrix and mma.sync.
#include "engine.h"
#include "float_bits.h"
#include "numerics.h"

#include <fenv.h>
#include <math.h>

// All instructions of this file take the whole warp.
static void whole_warp(Warp *w, const Insn *I, Mask m) {
  if (m != ALL_LANES)
    finding(w, I, CK_SYNC, SEV_ERROR,
            "needs all 32 lanes of the warp, but only 0x%08x execute it", m);
}

static inline uint32_t word_at(const uint8_t *p) {
  uint32_t v;
  memcpy(&v, p, 4);
  return v;
}

// ------------------------------------------------------------------------- ldmatrix, stmatrix

// The 16 bytes of a matrix row that a lane's address points to, or NULL after a finding.
static uint8_t *row_pointer(Warp *w, const Insn *I, bool generic, uint64_t address, Cta **cta,
                            uint32_t *offset) {
  *cta = any_shared_target(w, address, generic, offset);
  if (*cta) return shared_pointer(w, I, *cta, *offset, 16, 16);
  finding(w, I, CK_BOUNDS, SEV_ERROR, "address 0x%llx is not in shared memory",
          (unsigned long long)address);
  return NULL;
}

// Eight rows access the banks together, in as many wavefronts as rows share a 16-byte column.
static void count_rows(Warp *w, const uint64_t *address, int rows) {
  Emu *e = emu_of(w);
  for (int first = 0; first < rows; first += 8) {
    int used[8] = {0}, most = 1;
    for (int i = first; i < first + 8; i++) {
      bool again = false;
      for (int j = first; j < i; j++) again |= address[j] == address[i];
      int column = address[i] >> 4 & 7;
      if (!again && ++used[column] > most) most = used[column];
    }
    e->counters[CT_BANK_WAVEFRONTS] += (uint64_t)most;
    e->counters[CT_BANK_IDEAL]++;
  }
}

// Matrix rows as in memory, at the addresses of the first `rows` lanes. `bytes`: how many of a
// row's 16 bytes hold data. `known`, if not NULL, gets 1 for each byte with a defined value.
static void load_rows(Warp *w, const Insn *I, Mask m, const Operand *o, bool generic, int rows,
                      int bytes, uint8_t out[32][16], uint8_t known[32][16]) {
  Mask lanes = m & (rows == 32 ? ALL_LANES : (1u << rows) - 1);
  uint64_t address[32] = {0};
  addresses_of(w, I, o, lanes, address);
  Access a = access_of(w, I, "ldmatrix");
  uint64_t own[32];  // offsets in the warp's own CTA
  uint32_t read[32];
  int rows_read = 0;
  Mask mine = 0;
  a.lazy = known != NULL;
  memset(out, 0, 32 * 16);
  if (known) memset(known, 1, 32 * 16);
  FOR_SET(l, lanes) {
    Cta *cta;
    uint32_t offset;
    uint8_t *p = row_pointer(w, I, generic, address[l], &cta, &offset);
    if (!p) continue;
    shared_read(&a, cta, offset, (uint32_t)bytes);
    if (cta == w->cta) own[l] = read[rows_read++] = offset, mine |= 1u << l;
    memcpy(out[l], p, (size_t)bytes);
    if (known) memcpy(known[l], cta->shared_init + offset, (size_t)bytes);
  }
  lanes_access(w, I, mine, own, (uint32_t)bytes, false, true);
  start_load(w, I, read, rows_read, (uint32_t)bytes);
  emu_of(w)->counters[CT_SHARED_LOAD] += (uint64_t)rows * 16;
  count_rows(w, address, rows);
}

static int matrices(int modifier) { return 1 << (modifier - 1); }  // .x1 .x2 .x4

// Each lane's elements of an 8 x 8 matrix of 16-bit elements.
static void fragment(uint8_t x[8][16], bool transposed, uint32_t v[32]) {
  FOR_LANES(l) {
    int g = l / 4, t = l % 4;
    if (!transposed) v[l] = word_at(&x[g][4 * t]);
    else v[l] = (word_at(&x[2 * t][g / 2 * 4]) >> (g & 1) * 16 & 0xFFFF) |
                word_at(&x[2 * t + 1][g / 2 * 4]) >> (g & 1) * 16 << 16;
  }
}

static int exec_ldmatrix(Warp *w, const Insn *I, Mask m) {
  int count = matrices(I->mod[0]);
  bool transposed = I->mod[1], checked = checking(emu_of(w), CK_UNINITIALISED);
  uint8_t rows[32][16], known[32][16];
  whole_warp(w, I, m);
  load_rows(w, I, m, &I->op[1], !I->mod[2], 8 * count, 16, rows, checked ? known : NULL);
  const Operand *d = list_of(w, &I->op[0]);
  for (int i = 0; i < count && i < count_of(&I->op[0]); i++) {
    uint32_t v[32];
    fragment(rows + 8 * i, transposed, v);
    put32_of(w, I, &d[i], m, v);
    if (!checked) continue;
    Mask defined = 0;
    fragment(known + 8 * i, transposed, v);
    FOR_LANES(l) defined |= (Mask)(v[l] == 0x01010101) << l;
    w->taint_origin = (int32_t)(I - emu_of(w)->program->code);
    set_defined(w, &d[i], m, defined);
  }
  return DONE;
}

// Rows of 16 packed elements of 6 or 4 bits, to bytes.
static void unpack_rows(uint8_t rows[32][16], int bits) {
  for (int r = 0; r < 32; r++) {
    uint8_t in[16];
    memcpy(in, rows[r], 16);
    unpack_bits(in, bits, rows[r]);
  }
}

static int packed_bits(int format) { return format == 1 ? 6 : 4; }  // .b6x16_p32 .b4x16_p64

// 8 x 16 elements of 6 or 4 bits: a lane gets four bytes of a row.
static int exec_ldmatrix_m8n16(Warp *w, const Insn *I, Mask m) {
  int count = matrices(I->mod[0]), bits = packed_bits(I->mod[2]);
  uint8_t rows[32][16];
  whole_warp(w, I, m);
  load_rows(w, I, m, &I->op[1], !I->mod[1], 8 * count, 2 * bits, rows, NULL);
  unpack_rows(rows, bits);
  const Operand *d = list_of(w, &I->op[0]);
  for (int i = 0; i < count && i < count_of(&I->op[0]); i++) {
    uint32_t v[32];
    FOR_LANES(l) v[l] = word_at(&rows[8 * i + l / 4][l % 4 * 4]);
    put32_of(w, I, &d[i], m, v);
  }
  return DONE;
}

// 16 x 16 bytes, transposed: a lane gets rows 4t .. 4t+3 of column g, then of column g + 8.
static int load_m16n16(Warp *w, const Insn *I, Mask m, bool generic, int bits) {
  int count = matrices(I->mod[0]);
  uint8_t rows[32][16];
  whole_warp(w, I, m);
  load_rows(w, I, m, &I->op[1], generic, 16 * count, 2 * bits, rows, NULL);
  if (bits < 8) unpack_rows(rows, bits);
  const Operand *d = list_of(w, &I->op[0]);
  for (int i = 0; i < 2 * count && i < count_of(&I->op[0]); i++) {
    uint32_t v[32];
    FOR_LANES(l) {
      uint8_t (*x)[16] = rows + i / 2 * 16 + l % 4 * 4;
      int column = l / 4 + i % 2 * 8;
      v[l] = x[0][column] | x[1][column] << 8 | x[2][column] << 16 |
             (uint32_t)x[3][column] << 24;
    }
    put32_of(w, I, &d[i], m, v);
  }
  return DONE;
}
static int exec_ldmatrix_b8(Warp *w, const Insn *I, Mask m) {
  return load_m16n16(w, I, m, !I->mod[1], 8);
}
static int exec_ldmatrix_m16n16(Warp *w, const Insn *I, Mask m) {
  return load_m16n16(w, I, m, !I->mod[1], packed_bits(I->mod[2]));
}

static void store_rows(Warp *w, const Insn *I, Mask m, const Operand *o, bool generic, int rows,
                       uint8_t in[32][16], uint8_t known[32][16]) {
  Mask lanes = m & (rows == 32 ? ALL_LANES : (1u << rows) - 1);
  uint64_t address[32] = {0};
  addresses_of(w, I, o, lanes, address);
  if (I->flags & F_PROPAGATE && o->sub == K_REG && lanes & ~w->defined[o->id])
    undefined_read(w, I, o, lanes & ~w->defined[o->id]);  // F_PROPAGATE is for the data
  Access a = access_of(w, I, "stmatrix");
  uint64_t own[32];
  Mask mine = 0;
  FOR_SET(l, lanes) {
    Cta *cta;
    uint32_t offset;
    uint8_t *p = row_pointer(w, I, generic, address[l], &cta, &offset);
    if (!p) continue;
    shared_write(&a, cta, offset, 16);
    if (cta == w->cta) own[l] = offset, mine |= 1u << l;
    memcpy(p, in[l], 16);
    for (uint32_t i = 0; known && i < 16; i++)
      if (!known[l][i]) make_undefined(cta, offset + i, 1, false);
    if (__builtin_expect(w->undecided & m, 0))
      branches_wrote(w, __builtin_ctz(w->undecided & m), cta, offset, 16);
  }
  lanes_access(w, I, mine, own, 16, true, true);
  emu_of(w)->counters[CT_SHARED_STORE] += (uint64_t)rows * 16;
  count_rows(w, address, rows);
  progress(emu_of(w));
}

// The inverse of fragment().
static void place_fragment(uint8_t x[8][16], bool transposed, const uint32_t *v) {
  FOR_LANES(l) {
    int g = l / 4, t = l % 4;
    if (!transposed) memcpy(&x[g][4 * t], &v[l], 4);
    else {
      memcpy(&x[2 * t][2 * g], &v[l], 2);
      memcpy(&x[2 * t + 1][2 * g], (const char *)&v[l] + 2, 2);
    }
  }
}

static int exec_stmatrix(Warp *w, const Insn *I, Mask m) {
  int count = matrices(I->mod[0]);
  bool transposed = I->mod[1];
  uint8_t rows[32][16] = {{0}}, known[32][16];
  Mask undefined = 0;
  whole_warp(w, I, m);
  memset(known, 1, sizeof known);
  const Operand *s = list_of(w, &I->op[1]);
  for (int i = 0; i < count && i < count_of(&I->op[1]); i++) {
    uint32_t buffer[32], are[32];
    place_fragment(rows + 8 * i, transposed, src32_of(w, I, &s[i], m, buffer));
    Mask defined = defined_in(w, &s[i]);
    undefined |= ~defined;
    FOR_LANES(l) are[l] = defined >> l & 1 ? 0x01010101 : 0;
    place_fragment(known + 8 * i, transposed, are);
  }
  store_rows(w, I, m, &I->op[0], !I->mod[2], 8 * count, rows, undefined ? known : NULL);
  return DONE;
}

// 16 x 8 bytes, held like an accumulator and stored column by column.
static int exec_stmatrix_b8(Warp *w, const Insn *I, Mask m) {
  int count = matrices(I->mod[0]);
  uint8_t rows[32][16] = {{0}};
  whole_warp(w, I, m);
  const Operand *s = list_of(w, &I->op[1]);
  for (int i = 0; i < count && i < count_of(&I->op[1]); i++) {
    uint32_t buffer[32];
    const uint32_t *v = src32_of(w, I, &s[i], m, buffer);
    FOR_LANES(l)
      for (int j = 0; j < 4; j++)
        rows[8 * i + l % 4 * 2 + j % 2][l / 4 + j / 2 * 8] = (uint8_t)(v[l] >> 8 * j);
  }
  store_rows(w, I, m, &I->op[0], !I->mod[1], 8 * count, rows, NULL);
  return DONE;
}

static int exec_movmatrix(Warp *w, const Insn *I, Mask m) {
  whole_warp(w, I, m);
  const uint32_t *a = SRC32(1);
  uint32_t v[32];
  FOR_LANES(l) {
    int g = l / 4, t = l % 4, shift = (g & 1) * 16;
    v[l] = (a[8 * t + g / 2] >> shift & 0xFFFF) | a[8 * t + 4 + g / 2] >> shift << 16;
  }
  PUT32(0, v);
  return DONE;
}

// -------------------------------------------------------------------------------- fragments
//
// Counted in bytes, all types have the same layout. A row of A (a column of B) has 16 or 32 bytes;
// register r of lane 4g + t holds four of these bytes, from 4t on (and from 16 + 4t on for its
// second half), of rows g and g + 8 in turn.

#define MAX_K_BYTES 32

static void gather(Warp *w, const Insn *I, Mask m, const Operand *o, int rows, int row_bytes,
                   uint8_t *out) {
  const Operand *list = list_of(w, o);
  int halves = rows / 8, expected = halves * row_bytes / 16;
  memset(out, 0, (size_t)rows * row_bytes);
  for (int r = 0; r < expected && r < count_of(o); r++) {
    uint32_t buffer[32];
    const uint32_t *v = src32_of(w, I, &list[r], m, buffer);
    FOR_LANES(l)
      memcpy(out + (l / 4 + r % halves * 8) * row_bytes + l % 4 * 4 + r / halves * 16, &v[l], 4);
  }
}

// Accumulators: of 32 bits in registers 2h and 2h + 1 for columns 2t and 2t + 1 of row g + 8h, of
// 16 bits in one register. `x` is row-major with 8 columns.
static void gather_words(Warp *w, const Insn *I, Mask m, const Operand *o, int rows, uint32_t *x) {
  const Operand *list = list_of(w, o);
  for (int r = 0; r < rows / 4 && r < count_of(o); r++) {
    uint32_t buffer[32];
    const uint32_t *v = src32_of(w, I, &list[r], m, buffer);
    FOR_LANES(l) x[(l / 4 + r / 2 * 8) * 8 + l % 4 * 2 + r % 2] = v[l];
  }
}
static void scatter_words(Warp *w, const Insn *I, Mask m, const Operand *o, int rows,
                          const uint32_t *x) {
  const Operand *list = list_of(w, o);
  for (int r = 0; r < rows / 4 && r < count_of(o); r++) {
    uint32_t v[32];
    FOR_LANES(l) v[l] = x[(l / 4 + r / 2 * 8) * 8 + l % 4 * 2 + r % 2];
    put32_of(w, I, &list[r], m, v);
  }
}
static void gather_halves(Warp *w, const Insn *I, Mask m, const Operand *o, int rows, float *x) {
  const Operand *list = list_of(w, o);
  for (int r = 0; r < rows / 8 && r < count_of(o); r++) {
    uint32_t buffer[32];
    const uint32_t *v = src32_of(w, I, &list[r], m, buffer);
    FOR_LANES(l) {
      float *pair = x + (l / 4 + r * 8) * 8 + l % 4 * 2;
      pair[0] = half_value((uint16_t)v[l]);
      pair[1] = half_value((uint16_t)(v[l] >> 16));
    }
  }
}
static void scatter_halves(Warp *w, const Insn *I, Mask m, const Operand *o, int rows,
                           const float *x) {
  const Operand *list = list_of(w, o);
  for (int r = 0; r < rows / 8 && r < count_of(o); r++) {
    uint32_t v[32];
    FOR_LANES(l) {
      const float *pair = x + (l / 4 + r * 8) * 8 + l % 4 * 2;
      v[l] = half_of(pair[0]) | (uint32_t)half_of(pair[1]) << 16;
    }
    put32_of(w, I, &list[r], m, v);
  }
}

// --------------------------------------------------------------------- floating-point mma.sync

static const int ELEMENT_BITS[FT_COUNT] = {
  [FT_F16] = 16, [FT_BF16] = 16, [FT_TF32] = 32, [FT_E4M3] = 8, [FT_E5M2] = 8, [FT_E3M2] = 8,
  [FT_E2M3] = 8, [FT_E2M1] = 8,
};

static void decode_rows(FloatType type, uint8_t *rows, int count, float *out) {
  if (type == FT_E2M1)  // the code is in the middle of its byte
    for (int i = 0; i < count; i++) rows[i] >>= 2;
  decode_floats(type, rows, count, out);
}

static void finish_count(Warp *w, const char *kind, int m, int k) {
  Emu *e = emu_of(w);
  e->counters[CT_MMA_SYNC_FLOPS] += (uint64_t)(2 * m * 8 * k);
  count_mma(e, kind, m, 8, k);
}

// Before sm_120 there is no mma.sync of fp8, except on sm_89: the assembler converts to f16, takes
// the even pairs of elements first, then the odd pairs, starts from zero and adds C at the end.
static void fp8_through_half(Emu *e, int K, const float *A, const float *B, bool f16_result,
                             float *D) {
  Numerics n = numerics_of(e, UNIT_MMA, FT_F16, FT_F16, f16_result, SCALED_NONE);
  n.block_k = K / 2;
  float a[16 * 32], b[8 * 32], sum[16 * 8];
  for (int k = 0; k < K; k++) {
    int to = k / 4 * 2 + k % 2 + (k & 2 ? K / 2 : 0);
    for (int m = 0; m < 16; m++) a[m * K + to] = A[m * K + k];
    for (int j = 0; j < 8; j++) b[j * K + to] = B[j * K + k];
  }
  mma_tile(&n, 16, 8, K, a, b, sum, false);
  for (int i = 0; i < 16 * 8; i++) {
    D[i] += sum[i];
    if (isnan(D[i])) memcpy(&D[i], &(uint32_t){NAN32}, 4);
    if (f16_result) D[i] = half_value(half_of(D[i]));
  }
}

typedef struct {
  const char *kind;
  FloatType a, b;
  int k;
  bool f16_c, f16_d;
} FloatMma;

// Lanes with an undefined value in the registers of a fragment that `chosen` names, one bit each.
static Mask undefined_in(Warp *w, const Operand *o, unsigned chosen) {
  const Operand *list = list_of(w, o);
  Mask bad = 0;
  for (int r = 0; r < count_of(o); r++)
    if (chosen >> r & 1) bad |= ~defined_in(w, &list[r]);
  return bad;
}

static unsigned fours(Mask lanes) {  // quads (rows) with a lane in the mask, one bit each
  unsigned rows = 0;
  for (int g = 0; g < 8; g++) rows |= (unsigned)((lanes >> 4 * g & 15) != 0) << g;
  return rows;
}

// An undefined element of A makes its row of D undefined, an element of B its column, an element of
// C only itself.
static void spread_undefined(Warp *w, const Insn *I, Mask m, const FloatMma *f, const Mask c[4]) {
  const Operand *d = list_of(w, &I->op[0]);
  unsigned low = fours(undefined_in(w, &I->op[1], 0x55)), high =
      fours(undefined_in(w, &I->op[1], 0xAA)), columns = fours(undefined_in(w, &I->op[2], 0xFF));
  for (int r = 0; r < count_of(&I->op[0]); r++) {
    Mask bad = 0;
    FOR_LANES(l) {
      unsigned mine = f->f16_d ? 3u << l % 4 * 2 : 1u << (l % 4 * 2 + r % 2);
      unsigned rows = (f->f16_d ? r : r / 2) ? high : low;
      bad |= (Mask)(rows >> l / 4 & 1 || columns & mine) << l;
    }
    set_defined(w, &d[r], m, ~(bad | c[r]));
  }
}

static int float_mma(Warp *w, const Insn *I, Mask m, const FloatMma *f) {
  Emu *e = emu_of(w);
  uint8_t rows[16 * MAX_K_BYTES];
  float A[16 * 32], B[8 * 32], D[16 * 8];
  int row_bytes = f->k * ELEMENT_BITS[f->a] / 8;
  whole_warp(w, I, m);
  gather(w, I, m, &I->op[1], 16, row_bytes, rows);
  decode_rows(f->a, rows, 16 * f->k, A);
  gather(w, I, m, &I->op[2], 8, row_bytes, rows);
  decode_rows(f->b, rows, 8 * f->k, B);
  if (f->f16_c) gather_halves(w, I, m, &I->op[3], 16, D);
  else gather_words(w, I, m, &I->op[3], 16, (uint32_t *)D);
  int arch = e->program->arch;
  if (ELEMENT_BITS[f->a] == 8 && arch >= 90 && arch < 120 && e->numerics)
    fp8_through_half(e, f->k, A, B, f->f16_d, D);
  else {
    Numerics n = numerics_of(e, UNIT_MMA, f->a, f->b, f->f16_d, SCALED_NONE);
    mma_tile(&n, 16, 8, f->k, A, B, D, true);
  }
  // D and C may be the same registers, so undefined lanes are found before D is written.
  Mask undefined[4] = {0};
  const Operand *c = list_of(w, &I->op[3]);
  for (int r = 0; r < 4 && r < count_of(&I->op[3]); r++) {
    int first = f->f16_c == f->f16_d ? r : f->f16_c ? 2 * r : r / 2;
    undefined[first % 4] |= ~defined_in(w, &c[r]);
    if (f->f16_c && !f->f16_d) undefined[first + 1] |= ~defined_in(w, &c[r]);
  }
  Mask any = undefined_in(w, &I->op[1], 0xFF) | undefined_in(w, &I->op[2], 0xFF) | undefined[0] |
             undefined[1] | undefined[2] | undefined[3];
  if (f->f16_d) scatter_halves(w, I, m, &I->op[0], 16, D);
  else scatter_words(w, I, m, &I->op[0], 16, (uint32_t *)D);
  if (any) spread_undefined(w, I, m, f, undefined);
  finish_count(w, f->kind, 16, f->k);
  return DONE;
}

static int exec_mma_f16(Warp *w, const Insn *I, Mask m) {
  return float_mma(w, I, m, &(FloatMma){"mma.sync f16", FT_F16, FT_F16, I->mod[0] == 1 ? 8 : 16,
                                        I->mod[2] == 1, I->mod[1] == 1});
}
static int exec_mma_bf16(Warp *w, const Insn *I, Mask m) {
  return float_mma(w, I, m, &(FloatMma){"mma.sync bf16", FT_BF16, FT_BF16,
                                        I->mod[0] == 1 ? 8 : 16, false, false});
}
static int exec_mma_tf32(Warp *w, const Insn *I, Mask m) {
  return float_mma(w, I, m, &(FloatMma){"mma.sync tf32", FT_TF32, FT_TF32,
                                        I->mod[0] == 1 ? 4 : 8, false, false});
}
// .e4m3 .e5m2 .e3m2 .e2m3 .e2m1, in the order of the patterns below
static const FloatType SMALL_TYPES[] = {0, FT_E4M3, FT_E5M2, FT_E3M2, FT_E2M3, FT_E2M1};
static int exec_mma_fp8(Warp *w, const Insn *I, Mask m) {
  return float_mma(w, I, m, &(FloatMma){"mma.sync fp8", SMALL_TYPES[I->mod[2]],
                                        SMALL_TYPES[I->mod[3]], I->mod[0] == 1 ? 16 : 32,
                                        I->mod[4] == 1, I->mod[1] == 1});
}
static int exec_mma_f8f6f4(Warp *w, const Insn *I, Mask m) {
  return float_mma(w, I, m, &(FloatMma){"mma.sync f8f6f4", SMALL_TYPES[I->mod[1]],
                                        SMALL_TYPES[I->mod[2]], 32, I->mod[3] == 1,
                                        I->mod[0] == 1});
}

// --------------------------------------------------------------------- block-scaled mma.sync

// Scale factors of `rows` rows, `per_row` each. A lane's register holds four factors: `selector`
// names the first factor, and which lanes of each four hold factors.
static void gather_scales(Warp *w, const Insn *I, Mask m, const Operand *data,
                          const Operand *selector, int rows, int per_row, FloatType type,
                          float *out) {
  const Operand *ids = list_of(w, selector);
  uint32_t buffer[32], byte = 0, thread = 0;
  if (count_of(selector) == 2) {
    byte = src32_of(w, I, &ids[0], m, buffer)[0];
    thread = src32_of(w, I, &ids[1], m, buffer)[0];
  }
  uint32_t threads = rows == 16 ? 2 : 4;
  if (byte + (uint32_t)per_row > 4 || byte % (uint32_t)per_row || thread >= threads) {
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "scale factor selector {byte %u, thread %u}: with %d factors a row the byte must be a "
            "multiple of %d below 4, the thread below %u", byte, thread, per_row, per_row, threads);
    byte = thread = 0;
  }
  const uint32_t *v = src32_of(w, I, list_of(w, data), m, buffer);
  for (int r = 0; r < rows; r++) {
    uint32_t word = v[rows == 16 ? r % 8 * 4 + 2 * thread + r / 8 : r * 4 + thread];
    uint8_t factors[4];
    memcpy(factors, &word, 4);
    decode_floats(type, factors + byte, per_row, out + r * per_row);
  }
}

static int scaled_mma(Warp *w, const Insn *I, Mask m, FloatType a, FloatType b, int k, int per_row,
                      FloatType scale) {
  uint8_t rows[16 * MAX_K_BYTES];
  float A[16 * 64], B[8 * 64], D[16 * 8], sa[16 * 4], sb[8 * 4];
  whole_warp(w, I, m);
  gather(w, I, m, &I->op[1], 16, 32, rows);
  if (k == 64) decode_fp4(rows, 16 * k, A);
  else decode_rows(a, rows, 16 * k, A);
  gather(w, I, m, &I->op[2], 8, 32, rows);
  if (k == 64) decode_fp4(rows, 8 * k, B);
  else decode_rows(b, rows, 8 * k, B);
  gather_words(w, I, m, &I->op[3], 16, (uint32_t *)D);
  gather_scales(w, I, m, &I->op[4], &I->op[5], 16, per_row, scale, sa);
  gather_scales(w, I, m, &I->op[6], &I->op[7], 8, per_row, scale, sb);
  Numerics n = numerics_of(emu_of(w), UNIT_MMA, a, b, false,
                           k == 64 ? SCALED_MXF4 : SCALED_MXF8F6F4);
  mma_tile_scaled(&n, 16, 8, k, A, B, sa, sb, k / per_row, D, true);
  scatter_words(w, I, m, &I->op[0], 16, (uint32_t *)D);
  finish_count(w, k == 64 ? "mma.sync mxf4" : "mma.sync mxf8f6f4", 16, k);
  return DONE;
}
static int exec_mma_mxf8f6f4(Warp *w, const Insn *I, Mask m) {
  return scaled_mma(w, I, m, SMALL_TYPES[I->mod[1]], SMALL_TYPES[I->mod[2]], 32, 1, FT_UE8M0);
}
static int exec_mma_mxf4(Warp *w, const Insn *I, Mask m) {
  return scaled_mma(w, I, m, FT_E2M1, FT_E2M1, 64, 2, FT_UE8M0);
}
static int exec_mma_mxf4nvf4(Warp *w, const Insn *I, Mask m) {
  return scaled_mma(w, I, m, FT_E2M1, FT_E2M1, 64, I->mod[0] == 1 ? 2 : 4,
                    I->mod[1] == 1 ? FT_UE8M0 : FT_UE4M3);
}

// ------------------------------------------------------------------------------- f64 mma.sync

// Fragments of f64 are laid out like fragments of 32-bit elements, in 64-bit registers.
static void gather_doubles(Warp *w, const Insn *I, Mask m, const Operand *o, int rows, int k,
                           double *out) {
  const Operand *list = list_of(w, o);
  int halves = rows / 8;
  for (int r = 0; r < halves * k / 4 && r < count_of(o); r++) {
    uint64_t buffer[32];
    const uint64_t *v = src64_of(w, I, &list[r], m, buffer);
    FOR_LANES(l) memcpy(&out[(l / 4 + r % halves * 8) * k + l % 4 + r / halves * 4], &v[l], 8);
  }
}

static int exec_mma_f64(Warp *w, const Insn *I, Mask m) {
  static const int shapes[][2] = {{0, 0}, {8, 4}, {16, 4}, {16, 8}, {16, 16}};
  static const int modes[] = {FE_TONEAREST, FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  int M = shapes[I->mod[0]][0], K = shapes[I->mod[0]][1];
  double A[16 * 16] = {0}, B[8 * 16] = {0};
  whole_warp(w, I, m);
  gather_doubles(w, I, m, &I->op[1], M, K, A);
  gather_doubles(w, I, m, &I->op[2], 8, K, B);
  const Operand *c = list_of(w, &I->op[3]), *d = list_of(w, &I->op[0]);
  int registers = M / 4;
  uint64_t out[4][32];
  if (count_of(&I->op[0]) < registers || count_of(&I->op[3]) < registers) {
    fatal(w, I, CK_REGISTERS, "needs %d registers for C and D", registers);
    return DONE;
  }
  for (int r = 0; r < registers; r++) {
    uint64_t buffer[32];
    memcpy(out[r], src64_of(w, I, &c[r], m, buffer), sizeof out[r]);
  }
  fesetround(modes[I->mod[1]]);
  for (int r = 0; r < registers; r++)
    FOR_LANES(l) {
      const double *a = A + (l / 4 + r / 2 * 8) * K, *b = B + (l % 4 * 2 + r % 2) * K;
      volatile double sum;   // volatile: the compiler does not know the rounding mode
      memcpy((void *)&sum, &out[r][l], 8);
      for (int k = 0; k < K; k++)  // of NaNs, B's comes first, then the sum's, then A's
        sum = isnan(sum) && !isnan(b[k]) ? sum + 0.0 : fma(a[k], b[k], sum);
      memcpy(&out[r][l], (void *)&sum, 8);
    }
  fesetround(FE_TONEAREST);
  for (int r = 0; r < registers; r++) put64_of(w, I, &d[r], m, out[r]);
  finish_count(w, "mma.sync f64", M, K);
  return DONE;
}

// --------------------------------------------------------------------------- integer mma.sync

static const int INT_SHAPES[][2] = {{0, 0}, {8, 16}, {16, 16}, {16, 32}};  // M, bytes of K

static int element(const uint8_t *row, int i, int bits, bool is_signed) {
  int v = bits == 8 ? row[i] : row[i / 2] >> (i & 1) * 4 & 15;
  return is_signed && v >> (bits - 1) ? v - (1 << bits) : v;
}

// bits: bits of an element. Modifiers: shape, .satfinite, types of A and B (1 unsigned, 2 signed).
static int integer_mma(Warp *w, const Insn *I, Mask m, int bits, const char *kind) {
  int M = INT_SHAPES[I->mod[0]][0], row_bytes = INT_SHAPES[I->mod[0]][1];
  int K = row_bytes * 8 / bits;
  uint8_t a[16 * MAX_K_BYTES], b[8 * MAX_K_BYTES];
  int16_t A[16 * 64], B[8 * 64];
  uint32_t D[16 * 8] = {0};
  whole_warp(w, I, m);
  gather(w, I, m, &I->op[1], M, row_bytes, a);
  gather(w, I, m, &I->op[2], 8, row_bytes, b);
  gather_words(w, I, m, &I->op[3], M, D);
  for (int i = 0; i < M * K; i++) A[i] = (int16_t)element(a, i, bits, I->mod[2] == 2);
  for (int i = 0; i < 8 * K; i++) B[i] = (int16_t)element(b, i, bits, I->mod[3] == 2);
  multiply_integers(M, 8, K, A, B, (int32_t *)D, true, I->mod[1]);
  scatter_words(w, I, m, &I->op[0], M, D);
  finish_count(w, kind, M, K);
  return DONE;
}
static int exec_mma_int8(Warp *w, const Insn *I, Mask m) {
  return integer_mma(w, I, m, 8, "mma.sync int8");
}
static int exec_mma_int4(Warp *w, const Insn *I, Mask m) {
  return integer_mma(w, I, m, 4, "mma.sync int4");
}

static int exec_mma_b1(Warp *w, const Insn *I, Mask m) {
  int M = INT_SHAPES[I->mod[0]][0], row_bytes = INT_SHAPES[I->mod[0]][1];
  uint8_t a[16 * MAX_K_BYTES], b[8 * MAX_K_BYTES];
  uint32_t D[16 * 8] = {0};
  whole_warp(w, I, m);
  gather(w, I, m, &I->op[1], M, row_bytes, a);
  gather(w, I, m, &I->op[2], 8, row_bytes, b);
  gather_words(w, I, m, &I->op[3], M, D);
  for (int i = 0; i < M * 8; i++)
    for (int k = 0; k < row_bytes; k += 4) {
      uint32_t x = word_at(a + i / 8 * row_bytes + k), y = word_at(b + i % 8 * row_bytes + k);
      D[i] += (uint32_t)__builtin_popcount(I->mod[1] == 1 ? x ^ y : x & y);
    }
  scatter_words(w, I, m, &I->op[0], M, D);
  finish_count(w, "mma.sync b1", M, row_bytes * 8);
  return DONE;
}

#define FP8 "(.e4m3|e5m2)"
#define SMALL "(.e4m3|e5m2|e3m2|e2m3|e2m1)"
#define SHARED "{.shared|shared::cta}"
#define SCALED_OPERANDS "d32l s32l s32l s32l s32l s32l s32l s32l"  // peers write {scale}
// The kind may stand before the shape.
#define SCALED(shape, kind, types, exec)                                          \
  {"mma.sync.aligned" shape kind types, SCALED_OPERANDS, exec, F_ALIGNED},        \
  {"mma.sync.aligned" kind shape types, SCALED_OPERANDS, exec, F_ALIGNED}

static const Form FORMS[] = {
  {"ldmatrix.sync.aligned.m8n8(.x1|x2|x4){.trans}" SHARED ".b16", "d32l a", exec_ldmatrix,
   F_ALIGNED},
  {"ldmatrix.sync.aligned.m16n16(.x1|x2).trans" SHARED ".b8", "d32l a", exec_ldmatrix_b8,
   F_ALIGNED},
  {"ldmatrix.sync.aligned.m16n16(.x1|x2).trans" SHARED ".b8x16(.b6x16_p32|b4x16_p64)", "d32l a",
   exec_ldmatrix_m16n16, F_ALIGNED},
  {"ldmatrix.sync.aligned.m8n16(.x1|x2|x4)" SHARED ".b8x16(.b6x16_p32|b4x16_p64)", "d32l a",
   exec_ldmatrix_m8n16, F_ALIGNED},
  {"stmatrix.sync.aligned.m8n8(.x1|x2|x4){.trans}" SHARED ".b16", "a s32l", exec_stmatrix,
   F_ALIGNED | F_PROPAGATE},
  {"stmatrix.sync.aligned.m16n8(.x1|x2|x4).trans" SHARED ".b8", "a s32l", exec_stmatrix_b8,
   F_ALIGNED},
  {"movmatrix.sync.aligned.m8n8.trans.b16", "d32 s32", exec_movmatrix, F_ALIGNED},
  {"mma.sync.aligned(.m16n8k8|m16n8k16).row.col(.f16|f32).f16.f16(.f16|f32)",
   "d32l s32l s32l s32l", exec_mma_f16, F_ALIGNED | F_PROPAGATE},
  {"mma.sync.aligned(.m16n8k8|m16n8k16).row.col.f32.bf16.bf16.f32", "d32l s32l s32l s32l",
   exec_mma_bf16, F_ALIGNED | F_PROPAGATE},
  {"mma.sync.aligned(.m16n8k4|m16n8k8).row.col.f32.tf32.tf32.f32", "d32l s32l s32l s32l",
   exec_mma_tf32, F_ALIGNED | F_PROPAGATE},
  {"mma.sync.aligned(.m16n8k16|m16n8k32).row.col(.f16|f32)" FP8 FP8 "(.f16|f32)",
   "d32l s32l s32l s32l", exec_mma_fp8, F_ALIGNED | F_PROPAGATE},
  {"mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4(.f16|f32)" SMALL SMALL "(.f16|f32)",
   "d32l s32l s32l s32l", exec_mma_f8f6f4, F_ALIGNED | F_PROPAGATE},
  SCALED(".m16n8k32.row.col", ".kind::mxf8f6f4.block_scale{.scale_vec::1X}",
         ".f32" SMALL SMALL ".f32.ue8m0", exec_mma_mxf8f6f4),
  SCALED(".m16n8k64.row.col", ".kind::mxf4.block_scale{.scale_vec::2X}",
         ".f32.e2m1.e2m1.f32.ue8m0", exec_mma_mxf4),
  SCALED(".m16n8k64.row.col", ".kind::mxf4nvf4.block_scale(.scale_vec::2X|scale_vec::4X)",
         ".f32.e2m1.e2m1.f32(.ue8m0|ue4m3)", exec_mma_mxf4nvf4),
  {"mma.sync.aligned(.m8n8k4|m16n8k4|m16n8k8|m16n8k16).row.col{.rn|rz|rm|rp}.f64.f64.f64.f64",
   "d64l s64l s64l s64l", exec_mma_f64, F_ALIGNED},
  {"mma.sync.aligned(.m8n8k16|m16n8k16|m16n8k32).row.col{.satfinite}.s32(.u8|s8)(.u8|s8).s32",
   "d32l s32l s32l s32l", exec_mma_int8, F_ALIGNED},
  {"mma.sync.aligned(.m8n8k32|m16n8k32|m16n8k64).row.col{.satfinite}.s32(.u4|s4)(.u4|s4).s32",
   "d32l s32l s32l s32l", exec_mma_int4, F_ALIGNED},
  {"mma.sync.aligned(.m8n8k128|m16n8k128|m16n8k256).row.col.s32.b1.b1.s32(.xor|and).popc",
   "d32l s32l s32l s32l", exec_mma_b1, F_ALIGNED},
  {0},
};

const Family FAMILY_MMA = {.name = "mma", .forms = FORMS};
