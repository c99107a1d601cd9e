// tcgen05.mma: the tensor cores of sm_100.
#include "float_bits.h"
#include "numerics.h"
#include "tcgen05.h"

// `rows` rows of K_BYTES from shared memory; elements of `size` bytes.
static void gather(const Access *a, Cta *cta, const Matrix *m, const char *name, bool transposed,
                   int rows, int size, uint8_t (*out)[K_BYTES]) {
  Touched *touched = fetch_begin(cta);
  if (!transposed) {
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < 2; c++) memcpy(&out[r][16 * c], fetch(touched, cta, k_major(m, r, c)), 16);
  } else {
    int each = 16 / size;
    for (int c = 0; c < rows / each; c++) {
      for (int k = 0; k < K_BYTES / size; k++) {
        const uint8_t *p = fetch(touched, cta, mn_major(m, c, k));
        for (int i = 0; i < each; i++) {
          uint8_t *to = &out[c * each + i][k * size];
          for (int b = 0; b < size; b++) to[b] = p[i * size + b];
        }
      }
    }
  }
  fetch_end(touched, a, cta, name);
}

// ------------------------------------------------------------------------------------- mma

enum { KIND_F16 = 1, KIND_TF32, KIND_F8F6F4, KIND_I8, KIND_MXF8F6F4, KIND_MXF4, KIND_MXF4NVF4 };
#define NO FT_COUNT
#define NAMES(k) k, {"tcgen05 " k " cta_group::1", "tcgen05 " k " cta_group::2"}
static const struct { int k, element; FloatType types[8]; const char *name, *label[2]; }
    KINDS[] = {
    [KIND_F16] = {16, 2, {FT_F16, FT_BF16, NO, NO, NO, NO, NO, NO}, NAMES("f16")},
    [KIND_TF32] = {8, 4, {NO, NO, FT_TF32, NO, NO, NO, NO, NO}, NAMES("tf32")},
    [KIND_F8F6F4] = {32, 1, {FT_E4M3, FT_E5M2, NO, FT_E2M3, FT_E3M2, FT_E2M1, NO, NO},
                     NAMES("f8f6f4")},
    [KIND_I8] = {32, 1, {FT_E4M3, FT_E4M3, NO, NO, NO, NO, NO, NO}, NAMES("i8")},
    [KIND_MXF8F6F4] = {32, 1, {FT_E4M3, FT_E5M2, NO, FT_E2M3, FT_E3M2, FT_E2M1, NO, NO},
                       NAMES("mxf8f6f4")},
    [KIND_MXF4] = {64, 0, {NO, FT_E2M1, NO, NO, NO, NO, NO, NO}, NAMES("mxf4")},
    [KIND_MXF4NVF4] = {64, 0, {NO, FT_E2M1, NO, NO, NO, NO, NO, NO}, NAMES("mxf4nvf4")},
};

typedef struct {
  int kind, group, M, N, K;
  FloatType a_type, b_type;
  bool a_signed, b_signed, f16_result, saturate, negate_a, negate_b, transpose_a, transpose_b;
  bool a_in_tmem, accumulate, weight_stationary, shift_a;
  int scale_d;              // D is scaled by 2 to the power of -scale_d
  uint64_t a, b;            // descriptors; `a` may be an address in TMEM
  Matrix a_matrix, b_matrix;
  uint32_t d;
  int vectors;              // scale factors along K; 0: none
  uint32_t scale_a, scale_b;
  int scale_a_id, scale_b_id;
  FloatType scale_type;
  uint32_t disabled[8];     // lanes of D, CTA by CTA
  uint64_t zero_columns;    // for .ws: descriptor of the mask of B's columns
} Mma;

// Layout of the rows of D (and of A) in the TMEM of one CTA: `folds` groups of columns are stacked
// along the lanes; with `half` only 16 of every 32 lanes are used.
typedef struct { int rows, folds, columns, base; bool half; } Layout;

static Layout layout_of(const Mma *m) {
  Layout l = {.rows = m->M / m->group, .folds = 1};
  if (m->weight_stationary || (m->group == 2 && l.rows == 64)) l.folds = LANES / l.rows;
  l.half = l.folds == 1 && l.rows == 64;
  l.columns = m->N / l.folds;
  l.base = (int)(m->d >> 16);
  return l;
}

static inline int lane_of(const Layout *l, int row, int fold) {
  return l->half ? row / 16 * 32 + row % 16 + l->base : row + fold * l->rows;
}

static inline int blocks_of(const Layout *l) { return l->half ? 4 : 1; }
static inline int block_rows(const Layout *l) { return l->half ? 16 : l->rows; }

// The operands of the current multiplication.
typedef struct {
  _Alignas(64) float a_tile[128 * 64], b_tile[256 * 64], d_tile[128 * 256];
  _Alignas(64) uint8_t a_raw[128][K_BYTES], b_raw[256 + 64][K_BYTES];
  float a_scales[128 * 4], b_scales[256 * 4];
  int16_t wide_a[128 * K_BYTES], wide_b[256 * K_BYTES];  // operands of integer types
} Tiles;

static Tiles *tiles_of(Emu *e) { return scratch(e, SCRATCH_TCGEN05, sizeof(Tiles)); }

static int bits_of(FloatType type) {
  return type == FT_E2M1 ? 4 : type == FT_E2M3 || type == FT_E3M2 ? 6 : 8;
}

// In TMEM an element under 8 bits takes a byte, with the sign in bit 5.
static uint8_t narrow_from_byte(uint8_t byte, int bits) {
  return (uint8_t)(byte >> (6 - bits) & ((1u << bits) - 1));
}

static void decode(const Mma *m, FloatType type, bool in_tmem, bool negate, int rows,
                   uint8_t (*raw)[K_BYTES], float *out) {
  int count = rows * m->K;
  if (m->kind == KIND_MXF4 || m->kind == KIND_MXF4NVF4) {
    decode_fp4(raw[0], count, out);
  } else {
    if (KINDS[m->kind].element == 1 && bits_of(type) < 8) {
      int bits = bits_of(type);
      for (int r = 0; r < rows; r++) {
        uint8_t wide[K_BYTES];
        for (int h = 0; h < 2 && !in_tmem; h++) unpack_bits(&raw[r][16 * h], bits, &wide[16 * h]);
        for (int i = 0; i < K_BYTES && in_tmem; i++)
          wide[i] = narrow_from_byte(raw[r][i], bits);
        memcpy(raw[r], wide, K_BYTES);
      }
    }
    decode_floats(type, raw[0], count, out);
  }
  if (negate)
    for (int i = 0; i < count; i++) out[i] = -out[i];
}

static void load_a_from_tmem(const AsyncOp *op, const Mma *m, Cta *cta, const Layout *l, int fold) {
  Tiles *t = tiles_of(op->emu);
  int column = (int)(m->a & 0xFFFF), columns = K_BYTES / 4;
  for (int b = 0; b < blocks_of(l); b++) {
    int row = b * block_rows(l), lane = lane_of(l, row, fold);
    if (!check_block(&op->access, cta, "A of tcgen05.mma", lane, column, block_rows(l), columns)) {
      memset(t->a_raw[row], 0, (size_t)block_rows(l) * K_BYTES);
      continue;
    }
    tmem_read(&op->access, cta, lane, column, block_rows(l), columns);
    for (int r = 0; r < block_rows(l); r++)
      memcpy(t->a_raw[row + r], &cta->tmem->words[lane + r][column], K_BYTES);
  }
  if (m->shift_a) memmove(t->a_raw[0], t->a_raw[1], (size_t)(l->rows - 1) * K_BYTES);
}

// Read D into d_tile. The operation also writes D, so the read needs no separate mark.
static bool load_d(const AsyncOp *op, const Mma *m, Cta *cta, const Layout *l, int fold) {
  Tiles *t = tiles_of(op->emu);
  int column = (int)(m->d & 0xFFFF), n = l->columns;
  for (int b = 0; b < blocks_of(l); b++) {
    int row = b * block_rows(l), lane = lane_of(l, row, fold);
    if (!check_block(&op->access, cta, "D of tcgen05.mma", lane, column, block_rows(l), n))
      return false;
    if (!m->accumulate) continue;
    if (!tmem_initialised(cta, lane, column, block_rows(l), n))
      tmem_read(&op->access, cta, lane, column, block_rows(l), n);
    for (int r = 0; r < block_rows(l); r++) {
      const uint32_t *from = &cta->tmem->words[lane + r][column];
      float *to = t->d_tile + (row + r) * n;
      if (m->f16_result)
        for (int i = 0; i < n; i++) to[i] = half_value((uint16_t)from[i]);
      else memcpy(to, from, (size_t)n * 4);
    }
  }
  if (m->accumulate && m->scale_d) {
    float factor = 1.0f / (float)(1 << m->scale_d);
    for (int i = 0; i < l->rows * n; i++) t->d_tile[i] *= factor;
  }
  return true;
}

static void store_d(const AsyncOp *op, const Mma *m, Cta *cta, const Layout *l, int fold,
                    const uint32_t *disabled) {
  const Tiles *t = tiles_of(op->emu);
  int column = (int)(m->d & 0xFFFF), n = l->columns;
  for (int b = 0; b < blocks_of(l); b++) {
    int rows = block_rows(l), row = b * rows, lane = lane_of(l, row, fold);
    for (int r = 0; r < rows;) {
      int run = 0;
      while (r + run < rows && !(disabled[(lane + r + run) / 32] >> (lane + r + run) % 32 & 1))
        run++;
      if (run) tmem_write(&op->access, cta, lane + r, column, run, n);
      for (int i = r; i < r + run; i++) {
        uint32_t *to = &cta->tmem->words[lane + i][column];
        const float *from = t->d_tile + (row + i) * n;
        if (m->f16_result)
          for (int c = 0; c < n; c++) to[c] = half_of(from[c]);
        else memcpy(to, from, (size_t)n * 4);
      }
      r += run + 1;
    }
  }
}

static void multiply_rows(Tiles *t, const Mma *m, int rows, int columns, int first) {
  widen_bytes(t->a_raw[0], rows * K_BYTES, m->a_signed, t->wide_a);
  widen_bytes(t->b_raw[first], columns * K_BYTES, m->b_signed, t->wide_b);
  multiply_integers(rows, columns, K_BYTES, t->wide_a, t->wide_b, (int32_t *)(void *)t->d_tile,
                    m->accumulate, m->saturate);
}

// Scale factors of row (or column) i are in lane i % 32 of a 32-lane partition, in column i / 32,
// one byte each. Every partition has its own copy.
static void load_scales(const AsyncOp *op, const Mma *m, Cta *cta, const Layout *l, int fold) {
  Tiles *t = tiles_of(op->emu);
  const struct Tmem *tmem = cta->tmem;
  int first = lane_of(l, 0, fold) / 32, partitions = l->rows / 32;
  int column_a = (int)(m->scale_a & 0xFFFF), column_b = (int)(m->scale_b & 0xFFFF);
  uint8_t bytes_a[128 * 4], bytes_b[256 * 4];
  memset(bytes_a, 0, sizeof bytes_a);
  memset(bytes_b, 0, sizeof bytes_b);
  for (int p = 0; p < partitions; p++) {
    int lane = 32 * (first + p);
    if (!check_block(&op->access, cta, "scale factors of A", lane, column_a + p, 32, 1)) break;
    tmem_read(&op->access, cta, lane, column_a + p, 32, 1);
    for (int r = 0; r < 32; r++) {
      uint32_t word = tmem->words[lane + r][column_a + p] >> 8 * m->scale_a_id;
      memcpy(&bytes_a[(32 * p + r) * m->vectors], &word, (size_t)m->vectors);
    }
  }
  for (int p = 0; p < partitions; p++) {
    bool same = true;
    int lane = 32 * (first + p);
    for (int c = 0; 32 * c < l->columns; c++) {
      int lanes = l->columns - 32 * c < 32 ? l->columns - 32 * c : 32;
      if (!check_block(&op->access, cta, "scale factors of B", lane, column_b + c, lanes, 1))
        break;
      tmem_read(&op->access, cta, lane, column_b + c, lanes, 1);
      for (int r = 0; r < lanes; r++) {
        uint32_t word = tmem->words[lane + r][column_b + c] >> 8 * m->scale_b_id;
        uint8_t *to = &bytes_b[(32 * c + r) * m->vectors];
        if (p) same = same && !memcmp(to, &word, (size_t)m->vectors);
        else memcpy(to, &word, (size_t)m->vectors);
      }
    }
    if (!same)
      finding(op->warp, op->insn, CK_TMEM, SEV_ERROR,
              "the scale factors of B in lanes %d to %d of TMEM differ from those in lanes %d to "
              "%d: each 32 lanes need the same copy", lane, lane + 31, 32 * first, 32 * first + 31);
  }
  decode_floats(m->scale_type, bytes_a, l->rows * m->vectors, t->a_scales);
  decode_floats(m->scale_type, bytes_b, l->columns * m->vectors, t->b_scales);
}

static void multiply(const AsyncOp *op, const Mma *m, Cta *cta, const Layout *l, int fold,
                     const Numerics *numerics) {
  Tiles *t = tiles_of(op->emu);
  int first = fold * l->columns;
  if (m->kind == KIND_I8) {
    multiply_rows(t, m, l->rows, l->columns, first);
    return;
  }
  const float *b = t->b_tile + first * m->K;
  if (m->vectors) {
    load_scales(op, m, cta, l, fold);
    mma_tile_scaled(numerics, l->rows, l->columns, m->K, t->a_tile, b, t->a_scales, t->b_scales,
                    m->K / m->vectors, t->d_tile, m->accumulate);
  } else {
    mma_tile(numerics, l->rows, l->columns, m->K, t->a_tile, b, t->d_tile, m->accumulate);
  }
}

// Columns of B that count as 0: spans of `use` and `skip` columns alternate.
static void clear_columns(Tiles *t, const Mma *m) {
  if (!(m->zero_columns >> 39 & 1)) return;
  int parts = LANES / m->M, size = m->N / parts;
  int spans[2] = {(int)(m->zero_columns >> 48 & 255) + 1, (int)(m->zero_columns >> 40 & 255) + 1};
  for (int p = 0; p < parts; p++) {
    int skip = m->zero_columns >> (32 + p) & 1;
    int left = spans[skip], start = (int)(m->zero_columns >> 8 * p & 255);
    for (int n = -start; n < size; n++, left--) {
      if (!left) skip = !skip, left = spans[skip];
      if (n >= 0 && skip) memset(t->b_raw[p * size + n], 0, K_BYTES);
    }
  }
}

static int shift_of_b(const Mma *m) { return (int)(m->zero_columns >> 56 & 63); }

static void load_b(const AsyncOp *op, const Mma *m, Cta **ctas, int n) {
  Tiles *t = tiles_of(op->emu);
  int rows = m->N / n, shift = shift_of_b(m);
  for (int c = 0; c < n; c++)
    gather(&op->access, ctas[c], &m->b_matrix, "B of tcgen05.mma", m->transpose_b, rows + shift,
           KINDS[m->kind].element, t->b_raw + c * rows);
  if (!m->weight_stationary) return;
  if (shift) memmove(t->b_raw[0], t->b_raw[shift], (size_t)rows * K_BYTES);
  clear_columns(t, m);
}

static void run_mma(AsyncOp *op, int stage) {
  (void)stage;
  const Mma *m = op->data;
  Cta *ctas[2];
  int n = ctas_of(op->warp, op->insn, m->group, ctas);
  if (!n || !op->cta->tmem) return;
  Tiles *t = tiles_of(op->emu);
  Layout l = layout_of(m);
  int size = KINDS[m->kind].element;
  bool integers = m->kind == KIND_I8;
  load_b(op, m, ctas, n);
  if (!integers) decode(m, m->b_type, false, m->negate_b, m->N, t->b_raw, t->b_tile);
  Numerics numerics = {0};
  if (!integers)
    numerics = numerics_of(op->emu, UNIT_TCGEN05, m->a_type, m->b_type, m->f16_result,
                           m->kind >= KIND_MXF4 ? SCALED_MXF4
                           : m->vectors ? SCALED_MXF8F6F4 : SCALED_NONE);
  for (int c = 0; c < n; c++) {
    for (int fold = 0; fold < l.folds; fold++) {
      if (m->a_in_tmem) load_a_from_tmem(op, m, ctas[c], &l, fold);
      else if (!fold)
        gather(&op->access, ctas[c], &m->a_matrix, "A of tcgen05.mma", m->transpose_a, l.rows, size,
               t->a_raw);
      if (!integers && (m->a_in_tmem || !fold))
        decode(m, m->a_type, m->a_in_tmem, m->negate_a, l.rows, t->a_raw, t->a_tile);
      if (!load_d(op, m, ctas[c], &l, fold)) continue;
      multiply(op, m, ctas[c], &l, fold, &numerics);
      store_d(op, m, ctas[c], &l, fold, m->disabled + 4 * c);
    }
  }
  op->emu->counters[CT_TCGEN05_FLOPS] += 2ull * m->M * m->N * m->K;
  count_mma(op->emu, KINDS[m->kind].label[m->group - 1], m->M, m->N, m->K);
  if (op->emu->tracing)
    trace_event(op->emu, 2, op->warp, op->insn, op->issued, op->emu->time, m->d,
                2ull * m->M * m->N * m->K);
  progress(op->emu);
}

static bool bad_shape(const Mma *m) {
  if (m->weight_stationary)
    return (m->M != 32 && m->M != 64 && m->M != 128) || (m->N != 64 && m->N != 128 && m->N != 256);
  bool rows = m->M == 128 || (m->group == 1 ? m->M == 64 && !m->vectors : m->M == 256);
  int step = 8 * m->group;
  if (m->kind == KIND_I8 && (m->group == 2 || m->N > 32)) step *= 2;
  return !rows || m->N < step || m->N > 256 || m->N % step;
}

static void check_reserved(Warp *w, const Insn *I, uint32_t d, uint32_t reserved) {
  if (d & reserved)
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "instruction descriptor 0x%08x: reserved bits 0x%08x are not 0", d, d & reserved);
}

// Read the instruction descriptor; false after a finding if nothing can be computed.
static bool read_descriptor(Warp *w, const Insn *I, uint32_t d, Mma *m) {
  const char *kind = KINDS[m->kind].name;
  bool scaled = m->kind >= KIND_MXF8F6F4, fp4 = m->kind >= KIND_MXF4;
  // Bit 12 of fp4 is the version of a sparse A; a dense A has no version.
  int d_type = d >> 4 & 3, a_type = d >> 7 & 7, b_type = d >> 10 & (fp4 ? 3 : 7);
  m->M = (int)(d >> 24 & 31) * 16;
  m->N = (int)(d >> 17 & 63) * 8;
  m->K = KINDS[m->kind].k;
  m->negate_a = d >> 13 & 1, m->negate_b = d >> 14 & 1;
  m->transpose_a = d >> 15 & 1, m->transpose_b = d >> 16 & 1;
  m->saturate = d >> 3 & 1;
  m->a_type = KINDS[m->kind].types[a_type], m->b_type = KINDS[m->kind].types[b_type];
  m->a_signed = a_type == 1, m->b_signed = b_type == 1;
  if (d >> 2 & 1) {
    fatal(w, I, CK_DESCRIPTOR, "instruction descriptor 0x%08x: sparse A is not supported", d);
    return false;
  }
  if (m->a_type == NO || m->b_type == NO) {
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "instruction descriptor 0x%08x: types %d of A and %d of B are not all of kind::%s", d,
            a_type, b_type, kind);
    return false;
  }
  check_reserved(w, I, d, scaled ? 1u << 0 | 1u << 1 | 1u << 3 | 1u << 6 | (fp4 ? 0 : 1u << 31)
                                 : 1u << 6 | 1u << 23 | 1u << 29 |
                                       (m->weight_stationary ? 0 : 3u << 30));
  if (scaled) {
    m->scale_type = d >> 23 & 1 ? FT_UE8M0 : FT_UE4M3;
    m->scale_b_id = d >> 4 & 3, m->scale_a_id = d >> 29 & 3;
    if (fp4 && d >> 31) {
      fatal(w, I, CK_DESCRIPTOR, "instruction descriptor 0x%08x: K = 96 is %s", d,
            emu_of(w)->program->arch == 103 ? "not emulated" : "for sm_103a only");
      return false;
    }
    if (m->scale_a_id % m->vectors || m->scale_b_id % m->vectors) {
      finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
              "instruction descriptor 0x%08x: ids %d and %d of scale factors of A and B, which must "
              "be multiples of their number in a row, %d", d, m->scale_a_id, m->scale_b_id,
              m->vectors);
      return false;
    }
    if (m->scale_type == FT_UE4M3 && !(m->kind == KIND_MXF4NVF4 && m->vectors == 4))
      finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
              "instruction descriptor 0x%08x: scale factors of type ue4m3 are for kind::mxf4nvf4 "
              "with blocks of 16 only", d);
  } else {
    m->f16_result = d_type == 0;
    bool good = m->kind == KIND_I8 ? d_type == 2 : d_type == 1 ||
                (d_type == 0 && m->kind != KIND_TF32 &&
                 (m->kind != KIND_F16 || (m->a_type == FT_F16 && m->b_type == FT_F16)));
    if (!good) {
      finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
              "instruction descriptor 0x%08x: kind::%s with these operands has no D of type %d", d,
              kind, d_type);
      m->f16_result = false;
    }
    if (m->kind != KIND_I8 && m->saturate)
      finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
              "instruction descriptor 0x%08x: saturation (bit 3) is for kind::i8 only", d);
    if (m->kind == KIND_I8 && (m->negate_a || m->negate_b))
      finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
              "instruction descriptor 0x%08x: kind::i8 cannot negate", d);
  }
  if (bad_shape(m)) {
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "instruction descriptor 0x%08x: no shape M %d, N %d of kind::%s with cta_group::%d%s",
            d, m->M, m->N, kind, m->group, m->weight_stationary ? " and .ws" : "");
    return false;
  }
  return true;
}

static void check_major(Warp *w, const Insn *I, const Mma *m, const Matrix *matrix, bool transposed,
                        FloatType type, int rows, const char *name) {
  if (!transposed) return;
  bool wide_atoms = matrix->mode == SWIZZLE_128B_32B;
  if (KINDS[m->kind].element == 1 && bits_of(type) < 8)
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "%s is transposed (major along M or N), which elements under 8 bits cannot be", name);
  else if ((m->kind == KIND_TF32) != wide_atoms)
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "%s is transposed (major along M or N) with swizzle mode %d: 32-bit elements need "
            "mode 1, others cannot have it", name, matrix->mode);
  else if (rows % (16 / KINDS[m->kind].element))
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "%s is transposed, but its %d rows a CTA are not whole units of 16 bytes", name, rows);
}

static bool read_matrices(Warp *w, const Insn *I, Mma *m) {
  if (m->kind >= KIND_MXF4 && (m->transpose_a || m->transpose_b)) {
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR, "kind::%s cannot transpose its operands",
            KINDS[m->kind].name);
    m->transpose_a = m->transpose_b = false;
  }
  bool good = read_matrix(w, I, m->b, "B", &m->b_matrix);
  if (good)
    check_major(w, I, m, &m->b_matrix, m->transpose_b, m->b_type, m->N / m->group, "B");
  if (m->a_in_tmem) {
    if (m->transpose_a)
      finding(w, I, CK_DESCRIPTOR, SEV_ERROR, "A in TMEM cannot be transposed");
    return good;
  }
  good = read_matrix(w, I, m->a, "A", &m->a_matrix) && good;
  if (good) check_major(w, I, m, &m->a_matrix, m->transpose_a, m->a_type, m->M / m->group, "A");
  return good;
}

static void check_lanes(Warp *w, const Insn *I, const Mma *m) {
  Layout l = layout_of(m);
  uint32_t lane = m->d >> 16, a_lane = (uint32_t)m->a >> 16;
  if (lane && !(l.half && lane == 16))
    finding(w, I, CK_TMEM, SEV_ERROR,
            "D of tcgen05.mma at lane %u: with M = %d it must be at lane 0%s", lane, m->M,
            l.half ? " or 16" : "");
  if (m->a_in_tmem && a_lane != lane)
    finding(w, I, CK_TMEM, SEV_ERROR,
            "A of tcgen05.mma at lane %u, D at lane %u: they must be aligned alike", a_lane, lane);
}

// Collector buffers hold no data in the emulator; a reuse is only checked for an earlier fill with
// its matrix.
static void check_collector(Warp *w, const Insn *I, const Mma *m, int modifier) {
  enum { FILL = 1, USE, LAST_USE, DISCARD };
  int usage = modifier ? (modifier - 1) % 4 + 1 : DISCARD;
  int buffer = m->weight_stationary ? 1 + (modifier ? (modifier - 1) / 4 : 0) : 0;
  Collector *c = &w->cta->tmem->collectors[buffer];
  uint64_t source = buffer ? m->b : m->a;
  bool in_tmem = !buffer && m->a_in_tmem;
  if (m->shift_a && (usage == USE || usage == FILL))
    finding(w, I, CK_TCGEN05, SEV_ERROR, ".ashift with collector::a::%s",
            usage == USE ? "use" : "fill");
  if ((usage == USE || usage == LAST_USE) &&
      (!c->filled || c->a != source || c->in_tmem != in_tmem))
    finding(w, I, CK_TCGEN05, SEV_ERROR,
            "collector buffer used without having been filled from the same matrix by an operation "
            "before");
  c->filled = usage == FILL || (usage == USE && c->filled);
  if (usage == FILL) c->a = source, c->in_tmem = in_tmem;
}

static void check_shift_of_b(Warp *w, const Insn *I, const Mma *m) {
  int most = m->M == 32 ? 16 : 32;
  if (shift_of_b(m) > most)
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "mask of columns 0x%016llx: columns of B are shifted by %d, with M = %d by at most %d",
            (unsigned long long)m->zero_columns, shift_of_b(m), m->M, most);
}

// Operands that all forms of mma have, in one lane.
typedef struct { const uint64_t *d, *a, *b; const uint32_t *descriptor; Mask enable; } MmaOperands;

static MmaOperands mma_operands(Warp *w, const Insn *I, Mask m, int enable,
                                uint64_t buffers[4][32]) {
  MmaOperands o;
  addresses_of(w, I, &I->op[0], m, buffers[0]);
  o.d = buffers[0];
  if (I->op[1].kind == K_ADDRESS) {
    addresses_of(w, I, &I->op[1], m, buffers[1]);
    o.a = buffers[1];
  } else {
    o.a = src64_of(w, I, &I->op[1], m, buffers[1]);
  }
  o.b = src64_of(w, I, &I->op[2], m, buffers[2]);
  o.descriptor = src32_of(w, I, &I->op[3], m, (uint32_t *)buffers[3]);
  o.enable = srcp_of(w, I, &I->op[enable], m);
  return o;
}

static bool begin_mma(Warp *w, const Insn *I, Mask m, int group) {
  if (!tmem_of(w, I)) return false;
  check_group(w, I, group);
  check_single_thread(w, I, m, "tcgen05.mma");
  Cta *ctas[2];
  return ctas_of(w, I, group, ctas) != 0;
}

static void issue_mma(Warp *w, const Insn *I, int lane, const MmaOperands *o, Mma m,
                      int collector) {
  m.d = (uint32_t)o->d[lane];
  m.a_in_tmem = I->op[1].kind == K_ADDRESS;
  m.a = m.a_in_tmem ? (uint32_t)o->a[lane] : o->a[lane];
  m.b = o->b[lane];
  m.accumulate = o->enable >> lane & 1;
  if (!read_descriptor(w, I, o->descriptor[lane], &m) || !read_matrices(w, I, &m)) return;
  check_lanes(w, I, &m);
  check_collector(w, I, &m, collector);
  check_shift_of_b(w, I, &m);
  if (m.shift_a && !m.a_in_tmem)
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR, ".ashift with A in shared memory: it is for TMEM only");
  if (m.shift_a && m.M < 128)
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR, ".ashift with M = %d: it needs 128 or 256", m.M);
  Mma *data = malloc(sizeof m);
  *data = m;
  issue_tcgen05(w, I, "tcgen05.mma", lane, data, run_mma);
  stream_event(w, I, STEP_TENSOR, stream_shape(m.M, m.N, m.K), stream_traits(m.kind, m.a_in_tmem),
               other_of_pair(w, m.group));
}

// [d], a, b, descriptor, {disable-output-lane}, enable, scale
static int exec_mma(Warp *w, const Insn *I, Mask m) {
  int group = I->mod[0];
  if (!begin_mma(w, I, m, group)) return DONE;
  bool masks = I->op[4].kind == K_LIST;
  uint64_t buffers[4][32];
  MmaOperands o = mma_operands(w, I, m, 4 + masks, buffers);
  const Operand *scale = &I->op[5 + masks];
  FOR_SET(l, m) {
    Mma mma = {.kind = I->mod[1], .group = group, .shift_a = I->mod[2] != 0};
    if (scale->kind != K_NONE) mma.scale_d = (int)scale->imm;
    if (mma.scale_d < 0 || mma.scale_d > 15 || (mma.scale_d && mma.kind > KIND_TF32)) {
      finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
              "scale-input-d is %d: it is from 0 to 15, for kind::f16 and kind::tf32", mma.scale_d);
      mma.scale_d = 0;
    }
    if (masks) {
      const Operand *list = list_of(w, &I->op[4]);
      int count = count_of(&I->op[4]);
      if (count != 4 * group)
        finding(w, I, CK_TCGEN05, SEV_ERROR,
                "disable-output-lane has %d elements, cta_group::%d needs %d", count, group,
                4 * group);
      uint32_t buffer[32];
      for (int i = 0; i < count && i < 4 * group; i++)
        mma.disabled[i] = src32_of(w, I, &list[i], 1u << l, buffer)[l];
    }
    issue_mma(w, I, l, &o, mma, I->mod[3]);
  }
  return DONE;
}

static int exec_mma_scaled(Warp *w, const Insn *I, Mask m) {
  int group = I->mod[0], kind = KIND_I8 + I->mod[1], size = I->mod[2];
  if (!begin_mma(w, I, m, group)) return DONE;
  // .scale_vec::1X 2X 4X .block16 .block32
  static const int vectors_of[] = {0, 1, 2, 4, 4, 2};
  int vectors = vectors_of[size];
  if (kind == KIND_MXF8F6F4 && (!size || size == 5)) vectors = 1;
  if (kind == KIND_MXF4 && !size) vectors = 2;
  bool good = kind == KIND_MXF8F6F4 ? vectors == 1 && size != 4
              : kind == KIND_MXF4 ? vectors == 2 : vectors == 2 || vectors == 4;
  if (!good) {
    fatal(w, I, CK_DESCRIPTOR, "kind::%s has no scale vectors of this size", KINDS[kind].name);
    return DONE;
  }
  uint64_t buffers[4][32], scale_a[32], scale_b[32];
  MmaOperands o = mma_operands(w, I, m, 6, buffers);
  addresses_of(w, I, &I->op[4], m, scale_a);
  addresses_of(w, I, &I->op[5], m, scale_b);
  FOR_SET(l, m) {
    // The two top bits may hold the scale factor's number, which the descriptor repeats.
    Mma mma = {.kind = kind, .group = group, .vectors = vectors,
               .scale_a = (uint32_t)scale_a[l] & 0x3FFFFFFF,
               .scale_b = (uint32_t)scale_b[l] & 0x3FFFFFFF};
    if (mma.scale_a >> 16 || mma.scale_b >> 16)
      finding(w, I, CK_TMEM, SEV_ERROR,
              "scale factors at lanes %u and %u of TMEM: they must be at lane 0",
              mma.scale_a >> 16, mma.scale_b >> 16);
    issue_mma(w, I, l, &o, mma, I->mod[3]);
  }
  return DONE;
}

static int exec_mma_ws(Warp *w, const Insn *I, Mask m) {
  if (!begin_mma(w, I, m, 1)) return DONE;
  uint64_t buffers[4][32], zeros[32] = {0};
  MmaOperands o = mma_operands(w, I, m, 4, buffers);
  const uint64_t *mask = I->op[5].kind == K_NONE ? zeros : src64_of(w, I, &I->op[5], m, zeros);
  FOR_SET(l, m) {
    Mma mma = {.kind = I->mod[0], .group = 1, .weight_stationary = true, .zero_columns = mask[l]};
    issue_mma(w, I, l, &o, mma, I->mod[1]);
  }
  return DONE;
}

// ----------------------------------------------------------------------------------- forms

#define COLLECTOR_A \
  "{.collector::a::fill|.collector::a::use|.collector::a::lastuse|.collector::a::discard}"
#define BUFFER_B(n)                                                         \
  ".collector::b" n "::fill|.collector::b" n "::use|.collector::b" n \
  "::lastuse|.collector::b" n "::discard"
#define COLLECTOR_B "{" BUFFER_B("0") "|" BUFFER_B("1") "|" BUFFER_B("2") "|" BUFFER_B("3") "}"
#define MMA                                                                         \
  "tcgen05.mma" GROUP "(.kind::f16|.kind::tf32|.kind::f8f6f4|.kind::i8){.ashift}" COLLECTOR_A
#define MMA_SCALED                                                                        \
  "tcgen05.mma" GROUP "(.kind::mxf8f6f4|.kind::mxf4|.kind::mxf4nvf4).block_scale"          \
  "{.scale_vec::1X|.scale_vec::2X|.scale_vec::4X|.block16|.block32}" COLLECTOR_A
#define MMA_WS                                                                             \
  "tcgen05.mma.ws.cta_group::1(.kind::f16|.kind::tf32|.kind::f8f6f4|.kind::i8)" COLLECTOR_B

static const Form FORMS[] = {
    {MMA, "a s64 s64 s32 sp i?", exec_mma, F_EFFECT},
    {MMA, "a a s64 s32 sp i?", exec_mma, F_EFFECT},
    {MMA, "a s64 s64 s32 s32l sp i?", exec_mma, F_EFFECT},
    {MMA, "a a s64 s32 s32l sp i?", exec_mma, F_EFFECT},
    {MMA_SCALED, "a s64 s64 s32 a a sp", exec_mma_scaled, F_EFFECT},
    {MMA_SCALED, "a a s64 s32 a a sp", exec_mma_scaled, F_EFFECT},
    {MMA_WS, "a s64 s64 s32 sp s64?", exec_mma_ws, F_EFFECT},
    {MMA_WS, "a a s64 s32 sp s64?", exec_mma_ws, F_EFFECT},
    {0},
};

const Family FAMILY_TCGEN05_MMA = {.name = "tcgen05_mma", .forms = FORMS};
