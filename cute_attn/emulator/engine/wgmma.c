// wgmma: asynchronous matrix multiplication by warpgroups of four warps.
//
// Each warp computes its 16 of the 64 rows as a separate operation. The hardware starts when all
// four warps have arrived, so the operations of the first three warps are held back, and the last
// warp's operation runs all four. A wgmma that one warp has waited for is complete in all four
// warps.
#include "engine.h"
#include "float_bits.h"
#include "matrix.h"
#include "numerics.h"

#define GROUPS 64          // the latest commit groups
#define MAX_N 256

typedef enum { OPERANDS_FLOAT, OPERANDS_INT, OPERANDS_BIT } OperandClass;

typedef struct Multiply {
  AsyncOp *op;
  struct Multiply *next;   // list of the warp's operations not yet run
  uint64_t number;         // among the warp's wgmmas, from 1
  const char *kind;
  OperandClass operands;
  FloatType a_type, b_type;
  int n, k;
  bool f16_result, saturate, a_signed, b_signed;
  bool accumulate, negate_a, negate_b, mn_major_a, mn_major_b, a_in_registers;
  bool last;               // whether the warp was the last of its warpgroup to issue
  uint64_t a_descriptor, b_descriptor;
  uint8_t a[16 * K_BYTES];  // the warp's rows of A, if A is in registers
  uint16_t undefined;       // the warp's rows of A that have elements without a value, one bit each
} Multiply;

typedef struct { int32_t id; uint64_t group; const Insn *insn; } HeldRegister;

struct Wgmma {
  uint64_t issued, done;          // numbers of wgmmas issued, and done
  uint64_t group_end[GROUPS];     // `issued` when the group was committed
  const Insn *latest;
  Multiply *first_waiting, *last_waiting;
  int held; HeldRegister registers[256];  // registers of A that wgmmas in flight read
  bool undefined;                 // some wgmma has had rows of A without a value
};

static struct Wgmma *state_of(Warp *w) {
  if (!w->wgmma) w->wgmma = calloc(1, sizeof *w->wgmma);
  return w->wgmma;
}

// Registers written since the last wgmma.fence; before the first fence, all registers.
static int32_t *unfenced_of(Warp *w) {
  int nregs = emu_of(w)->program->nregs;
  if (!w->unfenced) {
    w->unfenced = malloc(sizeof(int32_t) * (size_t)(nregs + 1));
    for (int i = 0; i <= nregs; i++) w->unfenced[i] = 1;
  }
  return w->unfenced;
}

static int first_peer(const Warp *w) { return w->index & ~3; }
static int end_of_peers(const Warp *w) {
  int end = first_peer(w) + 4;
  return end < w->cta->nwarps ? end : w->cta->nwarps;
}
#define FOR_PEERS(p, w) \
  for (Warp *p = &(w)->cta->warps[first_peer(w)]; p < &(w)->cta->warps[end_of_peers(w)]; p++)

static uint64_t issued_by(const Warp *w) { return w->wgmma ? w->wgmma->issued : 0; }

static Clock clock_of(const Warp *w, uint64_t group) {
  return w->agent_birth[AG_WGMMA] + (Clock)(group - 1);
}

// --------------------------------------------------------------------------- matrix descriptors

static Matrix matrix_of_bits(uint64_t bits) { return matrix_of(bits & ~(1ull << 61)); }

// Report an invalid descriptor. `rows`: M or N.
static void check_descriptor(Warp *w, const Insn *I, const char *which, uint64_t bits,
                             bool transposed, int rows) {
  uint64_t reserved = bits & 0x3FF1C000C000C000ull;
  if (reserved)
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "descriptor of %s is 0x%016llx: reserved bits 0x%llx are set (an address or offset "
            "not cut to 18 bits, or a descriptor of another architecture)", which,
            (unsigned long long)bits, (unsigned long long)reserved);
  Matrix matrix = matrix_of_bits(bits);
  if (!matrix.mode) return;
  int chunks = matrix.width / 16;  // chunks of 16 bytes
  int first = (int)(matrix.start >> 4) & (chunks - 1), used = transposed ? rows / 8 : 2;
  if (used > chunks) used = chunks;
  if (first + used > chunks)
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "descriptor of %s starts at 0x%x, %d bytes into a line of its %d-byte swizzle; the %d "
            "bytes along %s that it needs cross the end of that line", which, matrix.start, 16 * first,
            matrix.width, 16 * used, transposed ? "M or N" : "K");
}

// ------------------------------------------------------------------------------- reading operands

static const uint8_t *chunk_pointer(const Access *a, uint32_t address, bool check) {
  Cta *cta = a->warp->cta;
  uint32_t offset = address - SHARED_BASE;
  static const uint8_t nothing[16];
  if (__builtin_expect(offset > cta->shared_bytes || offset + 16 > cta->shared_bytes, 0)) {
    const uint8_t *p = shared_pointer(a->warp, a->insn, cta, offset, 16, 16);
    return p ? p : nothing;
  }
  if (check) shared_read(a, cta, offset, 16);
  return cta->shared + offset;
}

// Read rows first .. first + rows of an operand, 32 contiguous bytes of K each. The mask `check`
// says which of every four groups of eight rows are checked for races.
static void read_rows(const Access *a, uint64_t bits, bool transposed, int first, int rows,
                      unsigned check, uint8_t *out) {
  Matrix matrix = matrix_of_bits(bits);
  for (int r = first; r < first + rows; r += 8) {
    bool checked = check >> (r / 8 & 3) & 1;
    if (transposed) {
      for (int k = 0; k < 16; k++) {
        uint16_t column[8];
        memcpy(column, chunk_pointer(a, mn_major(&matrix, r / 8, k), checked), 16);
        if (out)
          for (int i = 0; i < 8; i++)
            memcpy(out + (r - first + i) * K_BYTES + 2 * k, &column[i], 2);
      }
    } else {
      for (int i = 0; i < 16; i++) {
        const uint8_t *p = chunk_pointer(a, k_major(&matrix, r + i / 2, i & 1), checked);
        if (out) memcpy(out + (r - first + i / 2) * K_BYTES + (i & 1) * 16, p, 16);
      }
    }
  }
}

static void check_rows(const Access *a, uint64_t bits, bool transposed, int rows, unsigned check) {
  for (int r = 0; r < rows; r += 8)
    if (check >> (r / 8 & 3) & 1) read_rows(a, bits, transposed, r, 8, check, NULL);
}

// -- rows of A without a value
//
// A row of D depends only on its own row of A. Kernels let rows of Q beyond the last query be
// unwritten, and do not store their results. So such rows of D are undefined, and no finding.

// Whether a wgmma like I has left lanes of an accumulator undefined.
static bool left_undefined(const Warp *w, const Insn *I, int32_t id) {
  int32_t origin = w->origin[id];
  return w->wgmma->undefined && origin >= 0 && emu_of(w)->program->code[origin].exec == I->exec;
}

// Of the warp's 16 rows of A in shared memory.
static uint16_t unwritten_rows(const Warp *w, const Multiply *x) {
  if (!checking(x->op->emu, CK_UNINITIALISED)) return 0;
  const Cta *cta = w->cta;
  Matrix matrix = matrix_of_bits(x->a_descriptor);
  uint16_t rows = 0;
  int first = w->index % 4 * 16;
  for (int i = 0; i < 32; i++) {  // chunks of 16 bytes
    int block = i / 16, k = i % 16;
    uint32_t address = x->mn_major_a ? mn_major(&matrix, first / 8 + block, k)
                                     : k_major(&matrix, first + i / 2, i & 1);
    uint32_t offset = address - SHARED_BASE;
    if (offset > cta->shared_bytes || offset + 16 > cta->shared_bytes) continue;
    const uint8_t *written = cta->shared_init + offset;
    if (!memchr(written, 0, 16)) continue;
    for (int b = 0; b < 16; b++)
      if (!written[b]) rows |= (uint16_t)(1u << (x->mn_major_a ? 8 * block + b / 2 : i / 2));
  }
  return rows;
}

// Lanes of the registers of row g or g + 8, as in read_accumulators.
static Mask lanes_of_rows(uint16_t rows, int high) {
  Mask lanes = 0;
  for (int g = 0; g < 8; g++)
    if (rows >> (g + 8 * high) & 1) lanes |= 0xFu << 4 * g;
  return lanes;
}

static void leave_undefined(Warp *w, const Multiply *x, uint16_t rows) {
  if (rows) w->wgmma->undefined = true;
  if (!w->wgmma->undefined) return;
  const Insn *I = x->op->insn;
  const Operand *d = list_of(w, &I->op[0]);
  int count = x->f16_result ? x->n / 4 : x->n / 2;
  for (int i = 0; i < count; i++) {
    if (d[i].kind != K_REG) continue;
    Mask lanes = lanes_of_rows(rows, (x->f16_result ? i : i / 2) & 1);
    if (!x->accumulate) w->defined[d[i].id] = ALL_LANES;
    if (!lanes) continue;
    w->defined[d[i].id] &= ~lanes;
    w->chosen[d[i].id] &= ~lanes;
    w->origin[d[i].id] = (int32_t)(I - emu_of(w)->program->code);
  }
}

// ------------------------------------------------------------------------------------ arithmetic

static void flip_signs(float *x, int count) {
  for (int i = 0; i < count; i++) x[i] = -x[i];
}

// Accumulators of lane 4g + t: registers 4j + 2h and 4j + 2h + 1 hold columns 8j + 2t and
// 8j + 2t + 1 of row g + 8h; with f16, register 2j + h holds both elements. D is 16 x n.
static void read_accumulators(Warp *w, const Multiply *x, float *D) {
  static const uint32_t zeros[32];
  const Operand *d = list_of(w, &x->op->insn->op[0]);
  for (int pair = 0; pair < x->n / 4; pair++) {
    float *block = D + pair % 2 * 8 * x->n + pair / 2 * 8;
    const Operand *o = &d[x->f16_result ? pair : 2 * pair];
    const uint32_t *u = o->kind == K_REG ? w->regs + o->reg : zeros, *v = zeros;
    if (!x->f16_result && o[1].kind == K_REG) v = w->regs + o[1].reg;
    for (int g = 0; g < 8; g++)
      for (int t = 0; t < 4; t++) {
        float *to = block + g * x->n + 2 * t;
        if (x->f16_result) {
          to[0] = half_value((uint16_t)u[4 * g + t]);
          to[1] = half_value((uint16_t)(u[4 * g + t] >> 16));
        } else {
          memcpy(&to[0], &u[4 * g + t], 4);
          memcpy(&to[1], &v[4 * g + t], 4);
        }
      }
  }
}

static void write_accumulators(Warp *w, const Multiply *x, const float *D) {
  uint32_t nowhere[32];
  const Operand *d = list_of(w, &x->op->insn->op[0]);
  for (int pair = 0; pair < x->n / 4; pair++) {
    const float *block = D + pair % 2 * 8 * x->n + pair / 2 * 8;
    const Operand *o = &d[x->f16_result ? pair : 2 * pair];
    uint32_t *u = o->kind == K_REG ? w->regs + o->reg : nowhere, *v = nowhere;
    if (!x->f16_result && o[1].kind == K_REG) v = w->regs + o[1].reg;
    for (int g = 0; g < 8; g++)
      for (int t = 0; t < 4; t++) {
        const float *from = block + g * x->n + 2 * t;
        if (x->f16_result)
          u[4 * g + t] = half_of(from[0]) | (uint32_t)half_of(from[1]) << 16;
        else {
          memcpy(&u[4 * g + t], &from[0], 4);
          memcpy(&v[4 * g + t], &from[1], 4);
        }
      }
  }
}

static void multiply_rows(const Multiply *x, const uint8_t *a, const uint8_t *b, int32_t *D) {
  int16_t A[16 * K_BYTES], B[MAX_N * K_BYTES];
  widen_bytes(a, 16 * K_BYTES, x->a_signed, A);
  widen_bytes(b, x->n * K_BYTES, x->b_signed, B);
  multiply_integers(16, x->n, K_BYTES, A, B, D, x->accumulate, x->saturate);
}

static void multiply_bits(const Multiply *x, const uint8_t *a, const uint8_t *b, int32_t *D) {
  for (int i = 0; i < 16 * x->n; i++) {
    int32_t sum = x->accumulate ? D[i] : 0;
    for (int k = 0; k < K_BYTES; k++)
      sum += __builtin_popcount(a[i / x->n * K_BYTES + k] & b[i % x->n * K_BYTES + k]);
    D[i] = sum;
  }
}

// B, which the last warp to arrive reads. That warp runs the operations of all four warps. A and D
// belong to the warp whose operation is running.
typedef struct { bool valid; uint64_t descriptor; uint8_t rows[MAX_N * K_BYTES];
                 _Alignas(64) float values[MAX_N * K_BYTES], A[16 * K_BYTES], D[16 * MAX_N];
} SharedB;

static SharedB *shared_b_of(Emu *e) { return scratch(e, SCRATCH_WGMMA, sizeof(SharedB)); }

static void read_b(SharedB *shared_b, const Multiply *x, unsigned check) {
  const Access *access = &x->op->access;
  if (shared_b->valid && shared_b->descriptor == x->b_descriptor) {
    check_rows(access, x->b_descriptor, x->mn_major_b, x->n, check);
    return;
  }
  read_rows(access, x->b_descriptor, x->mn_major_b, 0, x->n, check, shared_b->rows);
  shared_b->descriptor = x->b_descriptor;
  if (x->operands == OPERANDS_FLOAT) {
    decode_floats(x->b_type, shared_b->rows, x->n * x->k, shared_b->values);
    if (x->negate_b) flip_signs(shared_b->values, x->n * x->k);
  }
}

static void run_part(Multiply *x) {
  Warp *w = x->op->warp;
  SharedB *shared_b = shared_b_of(x->op->emu);
  float *A = shared_b->A, *D = shared_b->D;
  uint8_t a[16 * K_BYTES];
  const uint8_t *a_rows = x->a_in_registers ? x->a : a;
  // All four warps read the same B: each warp checks a quarter of B, another quarter at each step
  // along K.
  read_b(shared_b, x, 1u << (((unsigned)w->index + 1 + (unsigned)(x->b_descriptor >> 1)) & 3));
  uint16_t undefined = x->undefined;
  if (!x->a_in_registers) {
    Access access = x->op->access;
    access.lazy = true;
    undefined = unwritten_rows(w, x);
    read_rows(&access, x->a_descriptor, x->mn_major_a, w->index % 4 * 16, 16, 15, a);
  }
  if (x->accumulate) read_accumulators(w, x, D);
  if (x->operands == OPERANDS_INT)
    multiply_rows(x, a_rows, shared_b->rows, (int32_t *)D);
  else if (x->operands == OPERANDS_BIT)
    multiply_bits(x, a_rows, shared_b->rows, (int32_t *)D);
  else {
    decode_floats(x->a_type, a_rows, 16 * x->k, A);
    if (x->negate_a) flip_signs(A, 16 * x->k);
    Numerics n = numerics_of(x->op->emu, UNIT_WGMMA, x->a_type, x->b_type, x->f16_result,
                             SCALED_NONE);
    (shared_b->valid ? mma_tile_again : mma_tile)(&n, 16, x->n, x->k, A, shared_b->values, D,
                                                 x->accumulate);
  }
  write_accumulators(w, x, D);
  leave_undefined(w, x, undefined);
}

// The first wgmma that warp w still has to run, if its number is `number`.
static Multiply *waiting(Warp *w, uint64_t number) {
  Multiply *x = w->wgmma ? w->wgmma->first_waiting : NULL;
  return x && x->number == number ? x : NULL;
}

static void run_multiply(AsyncOp *op, int stage) {
  (void)stage;
  Multiply *x = op->data;
  Warp *w = op->warp;
  struct Wgmma *s = w->wgmma;
  s->first_waiting = x->next;
  if (!x->next) s->last_waiting = NULL;
  s->done = x->number;
  run_part(x);
  if (!x->last) return;
  SharedB *shared_b = shared_b_of(op->emu);
  shared_b->valid = true;
  FOR_PEERS(peer, w) {
    Multiply *y = waiting(peer, x->number);
    if (!y) continue;
    if (y->b_descriptor != x->b_descriptor || y->n != x->n || y->operands != x->operands ||
        y->b_type != x->b_type || y->mn_major_b != x->mn_major_b || y->negate_b != x->negate_b) {
      finding_with(w, op->insn, y->op->insn, CK_WGMMA, SEV_ERROR,
                   "the warps of a warpgroup disagree: warp %d has B descriptor 0x%016llx and N "
                   "%d, warp %d 0x%016llx and N %d", w->index,
                   (unsigned long long)x->b_descriptor, x->n, peer->index,
                   (unsigned long long)y->b_descriptor, y->n);
      shared_b->valid = false;
    }
    force(y->op);
  }
  shared_b->valid = false;
}

// --------------------------------------------------------------------------------------- issuing

static void check_fenced(Warp *w, const Insn *I, const Operand *o, const char *what) {
  if (o->kind != K_REG || !w->unfenced[o->id]) return;
  finding(w, I, CK_WGMMA, SEV_NOTE,
          "register %d (%s) was written after the last wgmma.fence: it works only because the "
          "assembler puts one in", o->id, what);
  w->unfenced[o->id] = 0;
}

// A wgmma in flight will write register o: another wgmma may use o only with exactly the same
// accumulators.
static void check_chain(Warp *w, const Insn *I, const Multiply *x, const Operand *o) {
  if (!w->npending || o->kind != K_REG || !w->pending[o->id]) return;
  AsyncOp *op = w->pending[o->id];
  if (op->access.agent != agent_of(w, AG_WGMMA)) {
    pending_write(w, I, o);
    return;
  }
  const Multiply *y = op->data;
  if (y->n != x->n || y->f16_result != x->f16_result || y->operands != x->operands)
    finding_with(w, I, op->insn, CK_WGMMA, SEV_ERROR,
                 "accumulates into a register of a wgmma in flight with another shape (N %d, "
                 "then %d): wgmma.wait_group is missing", y->n, x->n);
}

static void take_accumulators(Warp *w, const Insn *I, Mask m, Multiply *x) {
  const Operand *d = list_of(w, &I->op[0]);
  int count = x->f16_result ? x->n / 4 : x->n / 2;
  for (int i = 0; i < count; i++) {
    if (d[i].kind != K_REG) continue;
    check_chain(w, I, x, &d[i]);
    check_fenced(w, I, &d[i], "accumulator");
    Mask bad = m & ~w->defined[d[i].id];
    bool kept = x->accumulate && bad && left_undefined(w, I, d[i].id);
    if (x->accumulate && bad && !kept) undefined_read(w, I, &d[i], bad);
    if (!kept) w->defined[d[i].id] = ALL_LANES;
    set_pending(w, &d[i], x->op);
  }
}

static void hold_register(struct Wgmma *s, int32_t id, uint64_t group, const Insn *I) {
  int i = 0;
  while (i < s->held && s->registers[i].id != id) i++;
  if (i == (int)(sizeof s->registers / sizeof *s->registers)) return;
  if (i == s->held) s->held++;
  s->registers[i] = (HeldRegister){id, group, I};
}

// A in registers is copied now, though the hardware reads A later; see release_registers.
static void take_a_registers(Warp *w, const Insn *I, Mask m, Multiply *x) {
  const Operand *list = list_of(w, &I->op[1]);
  struct Wgmma *s = w->wgmma;
  for (int r = 0; r < 4 && r < count_of(&I->op[1]); r++) {
    uint32_t buffer[32];
    Mask bad = list[r].kind == K_REG ? m & ~defined_in(w, &list[r]) : 0;
    if (bad) w->defined[list[r].id] = ALL_LANES;  // no finding: rows of D are undefined
    const uint32_t *v = src32_of(w, I, &list[r], m, buffer);
    if (bad) w->defined[list[r].id] &= ~bad;
    FOR_SET(l, bad) x->undefined |= (uint16_t)(1u << (l / 4 + r % 2 * 8));
    FOR_LANES(l) memcpy(x->a + (l / 4 + r % 2 * 8) * K_BYTES + l % 4 * 4 + r / 2 * 16, &v[l], 4);
    check_fenced(w, I, &list[r], "operand A");
    if (list[r].kind == K_REG) hold_register(s, list[r].id, w->wgmma_group, I);
  }
}

// Check for registers of A that were overwritten while a wgmma was reading them. Groups up to
// `group` no longer read registers.
static void release_registers(Warp *w, const Insn *I, uint64_t group) {
  struct Wgmma *s = w->wgmma;
  int kept = 0;
  for (int i = 0; i < s->held; i++) {
    HeldRegister *h = &s->registers[i];
    if (w->unfenced[h->id]) {
      finding_with(w, h->insn, I, CK_WGMMA, SEV_ERROR,
                   "register %d of operand A was overwritten while the wgmma was in flight: "
                   "wgmma.wait_group has to come first", h->id);
      continue;
    }
    if (h->group > group) s->registers[kept++] = *h;
  }
  s->held = kept;
}

static uint64_t uniform_descriptor(Warp *w, const Insn *I, Mask m, int k, const char *which) {
  const uint64_t *v = SRC64(k);
  int lane = __builtin_ctz(m);
  FOR_SET(l, m) if (v[l] != v[lane]) {
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "descriptor of %s differs between lanes: 0x%016llx in lane %d, 0x%016llx in lane %d",
            which, (unsigned long long)v[lane], lane, (unsigned long long)v[l], l);
    break;
  }
  return v[lane];
}

static bool scale_d(Warp *w, const Insn *I, Mask m) {
  Mask p = SRCP(3) & m;
  if (p && p != m)
    finding(w, I, CK_WGMMA, SEV_ERROR,
            "scale-d is true in lanes 0x%08x only: it must be the same in the whole warpgroup", p);
  return p >> __builtin_ctz(m) & 1;
}

static bool last_to_issue(Warp *w, uint64_t number) {
  FOR_PEERS(peer, w)
    if (peer != w && !peer->exited && issued_by(peer) < number) return false;
  return true;
}

static bool sensible(Warp *w, const Insn *I, const Multiply *x) {
  int registers = x->f16_result ? x->n / 4 : x->n / 2;
  if (x->n < 8 || x->n > MAX_N || x->n % 8 || count_of(&I->op[0]) != registers) {
    fatal(w, I, CK_WGMMA, "N %d and %d accumulator registers do not go together", x->n,
          count_of(&I->op[0]));
    return false;
  }
  return true;
}

// Operands of all forms: D, A, B, scale-d, then immediates.
static int issue(Warp *w, const Insn *I, Mask m, Multiply x) {
  Emu *e = emu_of(w);
  if (m != ALL_LANES)
    finding(w, I, CK_SYNC, SEV_ERROR,
            "needs all 32 lanes of the warp, but only 0x%08x execute it", m);
  if (!sensible(w, I, &x)) return DONE;
  struct Wgmma *s = state_of(w);
  unfenced_of(w);
  if (w->cta->nwarps < first_peer(w) + 4)
    finding(w, I, CK_WGMMA, SEV_ERROR,
            "warp %d has no complete warpgroup: the CTA has only %d warps", w->index,
            w->cta->nwarps);
  x.accumulate = scale_d(w, I, m);
  x.a_in_registers = I->op[1].kind == K_LIST;
  x.b_descriptor = uniform_descriptor(w, I, m, 2, "B");
  check_descriptor(w, I, "B", x.b_descriptor, x.mn_major_b, x.n);
  if (!x.a_in_registers) {
    x.a_descriptor = uniform_descriptor(w, I, m, 1, "A");
    check_descriptor(w, I, "A", x.a_descriptor, x.mn_major_a, 64);
  } else take_a_registers(w, I, m, &x);

  AsyncOp *op = new_async(w, I, "wgmma", AG_WGMMA, clock_of(w, w->wgmma_group));
  x.op = op;
  x.number = ++s->issued;
  x.last = last_to_issue(w, x.number);
  Multiply *data = malloc(sizeof *data);
  *data = x;
  op->data = data;
  op->run = run_multiply;
  op->queue = queue_of(w, AG_WGMMA);
  op->on_demand = !x.last;
  take_accumulators(w, I, m, data);
  if (s->last_waiting) s->last_waiting->next = data;
  else s->first_waiting = data;
  s->last_waiting = data;
  s->latest = I;
  e->counters[CT_WGMMA_FLOPS] += (uint64_t)(2 * 16 * x.n * x.k);
  e->counters[CT_ASYNC_OPS]++;
  count_mma(e, x.kind, 16, x.n, x.k);
  submit(op);
  stream_event(w, I, STEP_ORDER, x.number, (uint64_t)x.n, (uint64_t)x.a_in_registers);
  progress(e);
  return DONE;
}

// An immediate of 1 or -1.
static bool negative(Warp *w, const Insn *I, int k) {
  int64_t v = (int64_t)(int32_t)I->op[k].imm;
  if (v != 1 && v != -1)
    finding(w, I, CK_WGMMA, SEV_ERROR, "imm-scale is %lld: it must be 1 or -1", (long long)v);
  return v == -1;
}

// Float operands: scale-a and scale-b follow scale-d. For 16-bit operands, trans-a (unless A is in
// registers) and trans-b follow.
static int issue_float(Warp *w, const Insn *I, Mask m, Multiply x) {
  x.negate_a = negative(w, I, 4);
  x.negate_b = negative(w, I, 5);
  if (x.k == 16) {
    bool registers = I->op[1].kind == K_LIST;
    x.mn_major_a = !registers && I->op[6].imm;
    x.mn_major_b = I->op[registers ? 6 : 7].imm;
  }
  return issue(w, I, m, x);
}

static int exec_f16(Warp *w, const Insn *I, Mask m) {
  return issue_float(w, I, m, (Multiply){.kind = "wgmma f16", .a_type = FT_F16, .b_type = FT_F16,
                                         .n = I->mod[0], .k = 16, .f16_result = I->mod[1] == 2});
}
static int exec_bf16(Warp *w, const Insn *I, Mask m) {
  return issue_float(w, I, m, (Multiply){.kind = "wgmma bf16", .a_type = FT_BF16,
                                         .b_type = FT_BF16, .n = I->mod[0], .k = 16});
}
static int exec_tf32(Warp *w, const Insn *I, Mask m) {
  return issue_float(w, I, m, (Multiply){.kind = "wgmma tf32", .a_type = FT_TF32,
                                         .b_type = FT_TF32, .n = I->mod[0], .k = 8});
}
static int exec_fp8(Warp *w, const Insn *I, Mask m) {
  static const FloatType types[] = {0, FT_E4M3, FT_E5M2};
  return issue_float(w, I, m, (Multiply){.kind = "wgmma fp8", .a_type = types[I->mod[2]],
                                         .b_type = types[I->mod[3]], .n = I->mod[0], .k = 32,
                                         .f16_result = I->mod[1] == 2});
}
static int exec_int8(Warp *w, const Insn *I, Mask m) {
  return issue(w, I, m, (Multiply){.kind = "wgmma int8", .operands = OPERANDS_INT,
                                   .n = I->mod[0], .k = 32, .saturate = I->mod[1],
                                   .a_signed = I->mod[2] == 1, .b_signed = I->mod[3] == 1});
}
static int exec_b1(Warp *w, const Insn *I, Mask m) {
  return issue(w, I, m, (Multiply){.kind = "wgmma b1", .operands = OPERANDS_BIT,
                                   .n = I->mod[0], .k = 256});
}

// -------------------------------------------------------------------------------- fence and groups

static int exec_fence(Warp *w, const Insn *I, Mask m) {
  (void)m;
  state_of(w);
  unfenced_of(w);
  release_registers(w, I, 0);
  memset(w->unfenced, 0, sizeof(int32_t) * (size_t)(emu_of(w)->program->nregs + 1));
  return DONE;
}

static int exec_commit(Warp *w, const Insn *I, Mask m) {
  (void)I, (void)m;
  struct Wgmma *s = state_of(w);
  s->group_end[w->wgmma_group % GROUPS] = s->issued;
  w->wgmma_group++;
  w->agent_clock[AG_WGMMA]++;
  return DONE;
}

static void finish_registers(Warp *w, const Insn *I, uint64_t group) {
  if (w->unfenced) release_registers(w, I, group);
  int nregs = emu_of(w)->program->nregs;
  uint32_t agent = agent_of(w, AG_WGMMA);
  Clock clock = clock_of(w, group);
  for (int i = 0; i < nregs && w->npending; i++) {
    AsyncOp *op = w->pending[i];
    if (op && op->access.agent == agent && op->access.clock <= clock)
      clear_pending(w, &(Operand){.kind = K_REG, .id = i});
  }
}

static int exec_wait(Warp *w, const Insn *I, Mask m) {
  (void)m;
  struct Wgmma *s = state_of(w);
  uint64_t left = I->op[0].imm;
  if (left + 1 >= w->wgmma_group) return DONE;
  uint64_t group = w->wgmma_group - 1 - left;
  uint64_t oldest = w->wgmma_group > GROUPS ? w->wgmma_group - GROUPS : 1;
  if (group < oldest) return DONE;  // no longer in the ring; most likely awaited long ago
  uint64_t end = s->group_end[group % GROUPS];
  FOR_PEERS(peer, w)
    if (!peer->exited && issued_by(peer) < end) return wait_for(w, WAIT_WGMMA, group, end);
  FOR_PEERS(peer, w) {
    struct Wgmma *p = peer->wgmma;
    if (issued_by(peer) < end)
      finding_with(w, s->latest, I, CK_WGMMA, SEV_ERROR,
                   "warp %d of the warpgroup has exited without executing it: all four must",
                   peer->index);
    while (p && p->first_waiting && p->first_waiting->number <= end) force(p->first_waiting->op);
    if (p) view_add(&w->view, agent_of(peer, AG_WGMMA), clock_of(peer, group));
  }
  finish_registers(w, I, group);
  stream_event(w, I, STEP_AWAIT, end, 0, 0);
  return DONE;
}

static void wgmma_at_exit(Warp *w) {
  struct Wgmma *s = w->wgmma;
  if (!s || !s->issued) return;
  uint64_t committed = w->wgmma_group > 1 ? s->group_end[(w->wgmma_group - 1) % GROUPS] : 0;
  bool open = false;
  for (int i = 0; w->npending && i < emu_of(w)->program->nregs; i++)
    open |= w->pending[i] && w->pending[i]->access.agent == agent_of(w, AG_WGMMA);
  if (open || committed < s->issued)
    finding(w, s->latest, CK_EXIT, SEV_ERROR,
            "the warp exits with a wgmma %s", committed < s->issued
                ? "that no wgmma.commit_group follows" : "that it has not waited for");
  while (s->first_waiting) force(s->first_waiting->op);
}

#define BOTH(pattern, descriptors, registers, exec)   \
  {pattern, descriptors, exec, F_ALIGNED}, {pattern, registers, exec, F_ALIGNED}
#define WGMMA "wgmma.mma_async.sync.aligned.m64n#"
#define FP8 "(.e4m3|e5m2)"
#define INT8 "(.s8|u8)"

static const Form FORMS[] = {
  BOTH(WGMMA "k16(.f32|f16).f16.f16", "d32l s64 s64 sp i i i i", "d32l s32l s64 sp i i i",
       exec_f16),
  BOTH(WGMMA "k16.f32.bf16.bf16", "d32l s64 s64 sp i i i i", "d32l s32l s64 sp i i i", exec_bf16),
  BOTH(WGMMA "k8.f32.tf32.tf32", "d32l s64 s64 sp i i", "d32l s32l s64 sp i i", exec_tf32),
  BOTH(WGMMA "k32(.f32|f16)" FP8 FP8, "d32l s64 s64 sp i i", "d32l s32l s64 sp i i", exec_fp8),
  BOTH(WGMMA "k32{.satfinite}.s32" INT8 INT8, "d32l s64 s64 sp", "d32l s32l s64 sp", exec_int8),
  BOTH(WGMMA "k256.s32.b1.b1.and.popc", "d32l s64 s64 sp", "d32l s32l s64 sp", exec_b1),
  {"wgmma.fence.sync.aligned", "", exec_fence, F_ALIGNED},
  {"wgmma.commit_group.sync.aligned", "", exec_commit, F_ALIGNED},
  {"wgmma.wait_group.sync.aligned", "i", exec_wait, F_ALIGNED | F_YIELD},
  {0},
};

const Family FAMILY_WGMMA = {.name = "wgmma", .forms = FORMS, .warp_exits = wgmma_at_exit};
