// tcgen05: tensor memory (TMEM) and the tensor cores of sm_100.
#include "engine.h"
#include "float_bits.h"
#include "matrix.h"
#include "numerics.h"
#include "reductions.h"

#define LANES 128
#define COLUMNS 512
#define SLICE 32  // columns, the unit of allocation
#define SLICES (COLUMNS / SLICE)

typedef struct {
  bool active, done;
  int columns, column;
  Warp *warp;
  const Insn *insn;
} Request;  // of a warp that takes part in a cta_group::2 allocation

typedef struct {
  bool filled, in_tmem;
  uint64_t a;  // what it was filled from
} Collector;

typedef struct {
  AsyncOp **loads;  // that tcgen05.wait::ld has still to see
  int nloads, room;
  AsyncOp *last_store;
  Mask uncommitted;  // lanes that issued operations which no commit tracks yet
} WarpState;

struct Tmem {
  uint32_t words[LANES][COLUMNS];
  struct { bool used, freed; int first, columns; Warp *warp; const Insn *insn; } slices[SLICES];
  Request request;
  int deallocations;  // of cta_group::2
  View released;      // by deallocations
  const Insn *relinquished;
  int group;      // the cta_group that the kernel uses, and where
  const Insn *group_insn;
  Collector collectors[5];  // a, b0 to b3
  WarpState warps[MAX_WARPS];
};

// ------------------------------------------------------------------------ allocation and checks

void tmem_new(Cta *cta) {
  if (cta->emu->program->arch >= 100) cta->tmem = calloc(1, sizeof *cta->tmem);
}

void tmem_delete(Cta *cta) {
  struct Tmem *t = cta->tmem;
  if (!t) return;
  for (int s = 0; s < SLICES && !cta->emu->stop; s++) {
    if (!t->slices[s].used || t->slices[s].first != s) continue;
    finding(t->slices[s].warp, t->slices[s].insn, CK_TMEM, SEV_ERROR,
            "CTA %u ends with %d columns of TMEM, from column %d on, still allocated",
            cta->linear, t->slices[s].columns, s * SLICE);
  }
  for (int i = 0; i < MAX_WARPS; i++) free(t->warps[i].loads);
  if (t->released.vc) view_free(&t->released);
  free(t);
  cta->tmem = NULL;
}

static struct Tmem *tmem_of(Warp *w, const Insn *I) {
  if (!w->cta->tmem) fatal(w, I, CK_TMEM, "this architecture has no tensor memory");
  return w->cta->tmem;
}

// Whether a kernel keeps to one cta_group, as it must.
static void check_group(Warp *w, const Insn *I, int group) {
  struct Tmem *t = w->cta->tmem;
  if (!t->group) t->group = group, t->group_insn = I;
  if (t->group != group)
    finding_with(w, I, t->group_insn, CK_TCGEN05, SEV_ERROR,
                 "cta_group::%d here, cta_group::%d before: all tcgen05 instructions of a kernel "
                 "must use the same", group, t->group);
}

// The CTAs of a cta_group, the even one first; 0 after a finding.
static int ctas_of(Warp *w, const Insn *I, int group, Cta *ctas[2]) {
  Cta *own = w->cta;
  ctas[0] = own;
  if (group == 1) return 1;
  int even = own->rank & ~1;
  if (even + 1 >= own->cluster->nctas) {
    fatal(w, I, CK_CLUSTER, "cta_group::2 needs CTAs in pairs, but the cluster has %d, and this "
          "one has rank %d", own->cluster->nctas, own->rank);
    return 0;
  }
  for (int i = 0; i < 2; i++) {
    ctas[i] = own->cluster->ctas[even + i];
    if (ctas[i] && ctas[i]->tmem && live_cta(ctas[i])) continue;
    finding(w, I, CK_EXIT, SEV_ERROR,
            "cta_group::2 while the CTA of rank %d of the pair has exited", even + i);
    return 0;
  }
  return 2;
}

static int columns_operand(Warp *w, const Insn *I, uint32_t columns) {
  if (columns >= SLICE && columns <= COLUMNS && !(columns & (columns - 1))) return (int)columns;
  finding(w, I, CK_TMEM, SEV_ERROR,
          "%u columns: it must be a power of two from 32 to 512", columns);
  int rounded = SLICE;
  while (rounded < COLUMNS && (uint32_t)rounded < columns) rounded *= 2;
  return rounded;
}

static bool slices_free(const struct Tmem *t, int first, int count) {
  for (int s = first; s < first + count; s++)
    if (t->slices[s].used) return false;
  return true;
}

// Allocate the first free columns that are the same in all of the CTAs; -1 if there are none.
static int allocate(Warp *w, const Insn *I, Cta **ctas, int n, int columns) {
  int count = columns / SLICE;
  for (int first = 0; first + count <= SLICES; first++) {
    bool fits = true;
    for (int c = 0; c < n; c++) fits = fits && slices_free(ctas[c]->tmem, first, count);
    if (!fits) continue;
    for (int c = 0; c < n; c++) {
      struct Tmem *t = ctas[c]->tmem;
      const Request *r = n == 2 ? &t->request : NULL;
      for (int s = first; s < first + count; s++) {
        t->slices[s].used = true;
        t->slices[s].first = first, t->slices[s].columns = columns;
        t->slices[s].warp = r ? r->warp : w, t->slices[s].insn = r ? r->insn : I;
      }
    }
    return first * SLICE;
  }
  return -1;
}

static void write_address(Warp *w, const Insn *I, Mask m, int column) {
  uint64_t address[32];
  addresses_of(w, I, &I->op[0], m, address);
  uint64_t where_to = address[__builtin_ctz(m)];
  uint32_t offset = 0;
  Cta *cta = NULL;
  if (I->mod[1]) cta = shared_target(w, (uint32_t)where_to, &offset);
  else if (classify(w, where_to, &cta, &offset) != SP_SHARED) cta = NULL;
  if (!cta) {
    finding(w, I, CK_BOUNDS, SEV_ERROR, "0x%llx is not an address in shared memory",
            (unsigned long long)where_to);
    return;
  }
  uint8_t *p = shared_pointer(w, I, cta, offset, 4, 4);
  if (!p) return;
  Access a = access_of(w, I, "tcgen05.alloc");
  shared_write(&a, cta, offset, 4);
  uint32_t value = (uint32_t)column;
  memcpy(p, &value, 4);
}

static int exec_alloc(Warp *w, const Insn *I, Mask m) {
  struct Tmem *t = tmem_of(w, I);
  if (!t) return DONE;
  int group = I->mod[0], columns = columns_operand(w, I, SRC32(1)[__builtin_ctz(m)]);
  Group *g = group_of(w);
  if (g->step == 0) {
    check_group(w, I, group);
    if (t->relinquished)
      finding_with(w, I, t->relinquished, CK_TMEM, SEV_ERROR,
                   "tcgen05.alloc after the CTA has relinquished the permit to allocate");
  }
  Cta *ctas[2];
  int n = ctas_of(w, I, group, ctas), column = -1;
  if (!n) return DONE;
  if (n == 1) {
    column = allocate(w, I, ctas, 1, columns);
    if (column < 0) return wait_for(w, WAIT_TMEM_ALLOC, (uint64_t)columns, 0);
  } else {
    Request *mine = &t->request, *theirs = &ctas[!(w->cta->rank & 1)]->tmem->request;
    if (g->step == 0) {
      if (mine->active) return wait_for(w, WAIT_TMEM_ALLOC, (uint64_t)columns, 1);
      *mine = (Request){.active = true, .columns = columns, .warp = w, .insn = I};
      g->step = 1;
      progress(w->cta->emu);
    }
    if (!mine->done && theirs->active && !theirs->done) {
      if (theirs->columns != columns)
        finding_with(w, I, theirs->insn, CK_TMEM, SEV_ERROR,
                     "the two CTAs of the pair allocate %d and %d columns", columns,
                     theirs->columns);
      column = allocate(w, I, ctas, 2, columns > theirs->columns ? columns : theirs->columns);
      if (column >= 0) {
        mine->done = theirs->done = true;
        mine->column = theirs->column = column;
        progress(w->cta->emu);
      }
    }
    if (!mine->done) return wait_for(w, WAIT_TMEM_ALLOC, (uint64_t)columns, theirs->active ? 0 : 2);
    column = mine->column;
    mine->active = mine->done = false;
    progress(w->cta->emu);
  }
  view_acquire(w, &t->released);
  write_address(w, I, m, column);
  return DONE;
}

static void deallocate(Warp *w, const Insn *I, Cta *cta, uint32_t address, int columns) {
  struct Tmem *t = cta->tmem;
  int first = (int)(address & 0xFFFF) / SLICE, s0 = first < SLICES ? first : 0;
  bool known = address % SLICE == 0 && address < COLUMNS && t->slices[s0].used;
  if (!known || t->slices[s0].first != first) {
    finding(w, I, CK_TMEM, SEV_ERROR,
            "tcgen05.dealloc of address 0x%x, at which no allocation of CTA %u starts%s", address,
            cta->linear, known ? "" : t->slices[s0].freed ? " (it has been freed)" : "");
    return;
  }
  if (t->slices[first].columns != columns)
    finding_with(w, I, t->slices[first].insn, CK_TMEM, SEV_ERROR,
                 "tcgen05.dealloc of %d columns at column %d, of which %d were allocated", columns,
                 first * SLICE, t->slices[first].columns);
  int held = t->slices[first].columns;
  Access a = access_of(w, I, "tcgen05.dealloc");
  View seen = view_with_fenced(w);
  a.view = &seen;
  tmem_write(&a, cta, 0, first * SLICE, LANES, held);
  view_free(&seen);
  tmem_forget(cta, first * SLICE, held);
  for (int s = first; s < first + held / SLICE; s++)
    t->slices[s].used = false, t->slices[s].freed = true;
}

static int exec_dealloc(Warp *w, const Insn *I, Mask m) {
  struct Tmem *t = tmem_of(w, I);
  if (!t) return DONE;
  int lane = __builtin_ctz(m), group = I->mod[0];
  uint32_t address = SRC32(0)[lane], columns = SRC32(1)[lane];
  Group *g = group_of(w);
  if (g->step == 0) {
    check_group(w, I, group);
    deallocate(w, I, w->cta, address, columns_operand(w, I, columns));
    view_release(w, &t->released);
    progress(w->cta->emu);
  }
  if (group == 1) return DONE;
  // The first of the pair may block until the other comes; here it always does.
  if (g->step == 0) {
    Cta *ctas[2];
    if (!ctas_of(w, I, 2, ctas)) return DONE;
    g->note[0] = (uint64_t)++t->deallocations;
    g->step = 1;
  }
  Cta *peer = w->cta->cluster->ctas[w->cta->rank ^ 1];
  bool came = !peer || !peer->tmem || peer->tmem->deallocations >= (int)g->note[0];
  return came ? DONE : wait_for(w, WAIT_TMEM_ALLOC, 0, 3);
}

static int exec_relinquish(Warp *w, const Insn *I, Mask m) {
  (void)m;
  struct Tmem *t = tmem_of(w, I);
  if (!t) return DONE;
  check_group(w, I, I->mod[0]);
  t->relinquished = I;
  return DONE;
}

// Whether a block of TMEM exists; says so if it does not, or is not allocated.
static bool check_block(const Access *a, Cta *cta, const char *role, int lane, int column,
                        int lanes, int columns) {
  if (lane < 0 || lane + lanes > LANES || column < 0 || column + columns > COLUMNS) {
    finding(a->warp, a->insn, CK_TMEM, SEV_ERROR,
            "%s: lanes %d to %d, columns %d to %d, are outside the 128 lanes and 512 columns of "
            "TMEM", role, lane, lane + lanes - 1, column, column + columns - 1);
    return false;
  }
  for (int s = column / SLICE; s <= (column + columns - 1) / SLICE; s++) {
    if (cta->tmem->slices[s].used) continue;
    finding(a->warp, a->insn, CK_TMEM, SEV_ERROR,
            "%s: columns %d to %d of CTA %u, of which %d to %d are not allocated%s", role, column,
            column + columns - 1, cta->linear, s * SLICE, s * SLICE + SLICE - 1,
            cta->tmem->slices[s].freed ? " (they have been freed)" : "");
    break;
  }
  return true;
}

// ------------------------------------------------------------------------------ ld and st

enum { SHAPE_16x64b = 1, SHAPE_16x128b, SHAPE_16x256b, SHAPE_32x32b, SHAPE_16x32bx2 };
static const struct { int registers, columns, lanes; } SHAPES[] = {
    [SHAPE_16x64b] = {1, 2, 16}, [SHAPE_16x128b] = {2, 4, 16}, [SHAPE_16x256b] = {4, 8, 16},
    [SHAPE_32x32b] = {1, 1, 32}, [SHAPE_16x32bx2] = {1, 1, 16},
};

// The cells of one ld or st. A cell is a word, or with pack or unpack the low halves of two.
typedef struct {
  int shape, count;        // registers
  int lane, column;        // of the first cell
  int columns;             // of each access, in words
  int split;               // from one access to the other, of 16x32bx2
  bool halves;
} Cells;

static inline void cell_at(const Cells *c, int reg, int thread, int *lane, int *column) {
  int row, col, extra = 0;
  switch (c->shape) {
    case SHAPE_16x64b:
      row = thread / 4 + 8 * (thread & 1), col = 2 * reg + (thread >> 1 & 1);
      break;
    case SHAPE_16x128b:
      row = thread / 4 + 8 * (reg & 1), col = 4 * (reg >> 1) + thread % 4;
      break;
    case SHAPE_16x256b:
      row = thread / 4 + 8 * (reg >> 1 & 1), col = 8 * (reg >> 2) + 2 * (thread % 4) + (reg & 1);
      break;
    case SHAPE_32x32b:
      row = thread, col = reg;
      break;
    default:
      row = thread % 16, col = reg, extra = thread < 16 ? 0 : c->split;
  }
  *lane = c->lane + row;
  *column = c->column + (c->halves ? 2 * col : col) + extra;
}

static inline uint32_t cell_read(const Cells *c, const struct Tmem *t, int lane, int column) {
  if (!c->halves) return t->words[lane][column];
  return (t->words[lane][column] & 0xFFFF) | t->words[lane][column + 1] << 16;
}

static inline void cell_write(const Cells *c, struct Tmem *t, int lane, int column, uint32_t v) {
  if (!c->halves) {
    t->words[lane][column] = v;
    return;
  }
  t->words[lane][column] = v & 0xFFFF;
  t->words[lane][column + 1] = v >> 16;
}

// Decode the operands of ld or st; false after a finding that leaves nothing to do.
static bool cells_of(Warp *w, const Insn *I, Mask m, const Operand *address, int shape, int num,
                     bool halves, int split, int registers, const char *what, Cells *c) {
  uint64_t addresses[32];
  addresses_of(w, I, address, m, addresses);
  uint32_t a = (uint32_t)addresses[__builtin_ctz(m)];
  FOR_SET(l, m) if ((uint32_t)addresses[l] != a) {
    finding(w, I, CK_TCGEN05, SEV_NOTE,
            "%s: the lanes of the warp give different addresses (0x%x and 0x%x): it works only "
            "because the assembler takes that of the first lane", what, a,
            (uint32_t)addresses[l]);
    break;
  }
  if (m != ALL_LANES)
    finding(w, I, CK_TCGEN05, SEV_ERROR,
            "%s by lanes 0x%08x only: all 32 of the warp must take part", what, m);
  *c = (Cells){.shape = shape, .count = num * SHAPES[shape].registers, .lane = (int)(a >> 16),
               .column = (int)(a & 0xFFFF), .columns = num * SHAPES[shape].columns,
               .split = split, .halves = halves};
  if (halves) c->columns *= 2;
  if (num < 1 || num > 128 || num & (num - 1) || c->count > 128 || registers != c->count) {
    fatal(w, I, CK_TCGEN05, "%s: %d registers for .x%d, which takes %d (and at most 128)", what,
          registers, num, c->count);
    return false;
  }
  int own = 32 * (w->index % 4), lanes = SHAPES[shape].lanes;
  if (c->lane != own && !(lanes == 16 && c->lane == own + 16)) {
    // Which quarter is the warp's own the hardware knows by itself: DeepGEMM never names it.
    if (c->lane == 0 || (lanes == 16 && c->lane == 16))
      finding(w, I, CK_TMEM, SEV_NOTE,
              "%s at lane %d by warp %d, whose lanes are %d to %d: it works only because the "
              "hardware takes the warp's own quarter of TMEM", what, c->lane, w->index, own,
              own + 31);
    else
      finding(w, I, CK_TMEM, SEV_ERROR,
              "%s at lane %d by warp %d, which can access lanes %d to %d only", what, c->lane,
              w->index, own, own + 31);
    c->lane = own + (lanes == 16 ? c->lane & 16 : 0);
  }
  return true;
}

static bool check_cells(const Access *a, Cta *cta, const Cells *c, bool write) {
  int lanes = SHAPES[c->shape].lanes, accesses = c->shape == SHAPE_16x32bx2 ? 2 : 1;
  for (int i = 0; i < accesses; i++)
    if (!check_block(a, cta, a->what, c->lane, c->column + i * c->split, lanes, c->columns))
      return false;
  for (int i = 0; i < accesses; i++)
    (write ? tmem_write : tmem_read)(a, cta, c->lane, c->column + i * c->split, lanes, c->columns);
  return true;
}

typedef struct {
  Cells cells;
  Mask lanes;
  const Operand *registers, *reduced;
  Reduction reduce;        // of ld.red; else NULL
  bool absolute;
} Load;

static void write_register(Warp *w, const Operand *o, Mask m, const uint32_t *values) {
  if (o->kind != K_REG) return;
  uint32_t *d = w->regs + o->reg;
  FOR_SET(l, m) d[l] = values[l];
  w->defined[o->id] |= m;
}

static void run_load(AsyncOp *op, int stage) {
  (void)stage;
  Load *d = op->data;
  Warp *w = op->warp;
  struct Tmem *t = op->cta->tmem;
  if (!t || !check_cells(&op->access, op->cta, &d->cells, false)) return;
  op->emu->counters[CT_TMEM_LOAD] += (uint64_t)d->cells.count * 128;
  uint32_t reduced[32];
  for (int r = 0; r < d->cells.count; r++) {
    uint32_t values[32];
    FOR_LANES(l) {
      int lane, column;
      cell_at(&d->cells, r, l, &lane, &column);
      values[l] = cell_read(&d->cells, t, lane, column);
    }
    write_register(w, &d->registers[r], d->lanes, values);
    if (!d->reduce) continue;
    if (d->absolute) FOR_LANES(l) values[l] &= 0x7FFFFFFF;
    reduce_or_copy(r ? d->reduce : NULL, (uint8_t *)reduced, (uint8_t *)values, sizeof values);
  }
  if (d->reduce) write_register(w, d->reduced, d->lanes, reduced);
  progress(op->emu);
}

static void forget_load(AsyncOp *op) {
  struct Tmem *t = op->cta->tmem;
  if (t) {
    WarpState *s = &t->warps[op->warp->index];
    for (int i = 0; i < s->nloads; i++) {
      if (s->loads[i] != op) continue;
      memmove(&s->loads[i], &s->loads[i + 1], sizeof *s->loads * (size_t)(s->nloads - i - 1));
      s->nloads--;
      break;
    }
  }
  free(op->data);
  op->data = NULL;
}

static void mark_pending(Warp *w, const Insn *I, const Operand *o, AsyncOp *op) {
  if (o->kind != K_REG) return;
  if (w->npending && w->pending[o->id]) pending_write(w, I, o);
  set_pending(w, o, op);
}

static int load(Warp *w, const Insn *I, Mask m, Load d, const Operand *address, int shape, int num,
                bool halves, int split, const char *what) {
  struct Tmem *t = tmem_of(w, I);
  if (!t) return DONE;
  d.lanes = m;
  d.registers = list_of(w, &I->op[0]);
  if (!cells_of(w, I, m, address, shape, num, halves, split, count_of(&I->op[0]), what, &d.cells))
    return DONE;
  AsyncOp *op = new_async(w, I, what, AG_TMEM_LD, ++w->agent_clock[AG_TMEM_LD]);
  op->access.tensor = 1;
  op->queue = queue_of(w, AG_TMEM_LD);
  op->stages = 1;
  op->run = run_load;
  op->release = forget_load;
  op->data = malloc(sizeof d);
  memcpy(op->data, &d, sizeof d);
  WarpState *s = &t->warps[w->index];
  if (s->nloads == s->room) {
    s->room = s->room ? 2 * s->room : 16;
    s->loads = realloc(s->loads, sizeof *s->loads * (size_t)s->room);
  }
  s->loads[s->nloads++] = op;
  for (int r = 0; r < d.cells.count; r++) mark_pending(w, I, &d.registers[r], op);
  if (d.reduce) mark_pending(w, I, d.reduced, op);
  submit(op);
  return DONE;
}

static int exec_ld(Warp *w, const Insn *I, Mask m) {
  return load(w, I, m, (Load){0}, &I->op[1], I->mod[0], I->mod[1], I->mod[2], 0, "tcgen05.ld");
}

static int exec_ld_split(Warp *w, const Insn *I, Mask m) {
  return load(w, I, m, (Load){0}, &I->op[1], SHAPE_16x32bx2, I->mod[0], I->mod[1],
              (int)I->op[2].imm, "tcgen05.ld");
}

// type: 1 f32, 2 u32, 3 s32.
static int load_reduce(Warp *w, const Insn *I, Mask m, bool max, int type, bool absolute,
                       bool nan) {
  bool split = I->mod[0] == 2;
  if (I->mod[1] < 2) {
    fatal(w, I, CK_TCGEN05, "tcgen05.ld.red needs at least .x2");
    return DONE;
  }
  if (type != 1 && (absolute || nan)) {
    fatal(w, I, CK_TCGEN05, "tcgen05.ld.red: .abs and .NaN are for .f32 only");
    return DONE;
  }
  ReduceOp op = max ? OP_MAX : OP_MIN;
  Load d = {.reduced = &I->op[1], .absolute = absolute,
            .reduce = type == 1 ? reduction_of(f32_extreme(max, nan), TY_F32)
                                : reduction_of(op, type == 2 ? TY_U32 : TY_S32)};
  return load(w, I, m, d, &I->op[2], split ? SHAPE_16x32bx2 : SHAPE_32x32b, I->mod[1], false,
              split ? (int)I->op[3].imm : 0, "tcgen05.ld.red");
}

static int exec_ld_red(Warp *w, const Insn *I, Mask m) {
  return load_reduce(w, I, m, I->mod[2] == 2, I->mod[5], I->mod[3], I->mod[4]);
}

static int exec_ld_red_type_first(Warp *w, const Insn *I, Mask m) {
  return load_reduce(w, I, m, I->mod[3] == 2, I->mod[2] + 1, false, false);
}

typedef struct {
  Cells cells;
  Mask lanes;
  uint32_t values[][32];
} Store;

static void run_store(AsyncOp *op, int stage) {
  (void)stage;
  Store *d = op->data;
  struct Tmem *t = op->cta->tmem;
  if (!t || !check_cells(&op->access, op->cta, &d->cells, true)) return;
  op->emu->counters[CT_TMEM_STORE] += (uint64_t)d->cells.count * 128;
  for (int r = 0; r < d->cells.count; r++) FOR_SET(l, d->lanes) {
    int lane, column;
    cell_at(&d->cells, r, l, &lane, &column);
    cell_write(&d->cells, t, lane, column, d->values[r][l]);
  }
  progress(op->emu);
}

static void forget_store(AsyncOp *op) {
  struct Tmem *t = op->cta->tmem;
  if (t && t->warps[op->warp->index].last_store == op) t->warps[op->warp->index].last_store = NULL;
  free(op->data);
  op->data = NULL;
}

static int store(Warp *w, const Insn *I, Mask m, int shape, int num, bool halves, int split,
                 const Operand *list) {
  struct Tmem *t = tmem_of(w, I);
  if (!t) return DONE;
  Cells cells;
  if (!cells_of(w, I, m, &I->op[0], shape, num, halves, split, count_of(list), "tcgen05.st",
                &cells))
    return DONE;
  Store *d = malloc(sizeof *d + (size_t)cells.count * sizeof d->values[0]);
  d->cells = cells;
  d->lanes = m;
  const Operand *registers = list_of(w, list);
  for (int r = 0; r < cells.count; r++) {
    uint32_t buffer[32];
    memcpy(d->values[r], src32_of(w, I, &registers[r], m, buffer), sizeof d->values[r]);
  }
  AsyncOp *op = new_async(w, I, "tcgen05.st", AG_TMEM_ST, ++w->agent_clock[AG_TMEM_ST]);
  op->access.tensor = 1;
  op->queue = queue_of(w, AG_TMEM_ST);
  op->stages = 1;
  op->run = run_store;
  op->release = forget_store;
  op->data = d;
  t->warps[w->index].last_store = op;
  submit(op);
  return DONE;
}

static int exec_st(Warp *w, const Insn *I, Mask m) {
  return store(w, I, m, I->mod[0], I->mod[1], I->mod[2], 0, &I->op[1]);
}

static int exec_st_split(Warp *w, const Insn *I, Mask m) {
  return store(w, I, m, SHAPE_16x32bx2, I->mod[0], I->mod[1], (int)I->op[1].imm, &I->op[2]);
}

static int exec_wait_ld(Warp *w, const Insn *I, Mask m) {
  (void)m;
  struct Tmem *t = tmem_of(w, I);
  if (!t) return DONE;
  WarpState *s = &t->warps[w->index];
  while (s->nloads) {
    AsyncOp *op = s->loads[0];
    Load d = *(Load *)op->data;
    force(op);
    // It goes when its last register is no longer pending: off the list first.
    if (s->nloads && s->loads[0] == op)
      memmove(&s->loads[0], &s->loads[1], sizeof *s->loads * (size_t)--s->nloads);
    for (int r = 0; r <= d.cells.count; r++) {
      const Operand *o = r < d.cells.count ? &d.registers[r] : d.reduced;
      if (o && o->kind == K_REG && w->pending[o->id] == op) clear_pending(w, o);
    }
  }
  view_add(&w->view, agent_of(w, AG_TMEM_LD), w->agent_clock[AG_TMEM_LD]);
  return DONE;
}

static int exec_wait_st(Warp *w, const Insn *I, Mask m) {
  (void)m;
  struct Tmem *t = tmem_of(w, I);
  if (!t) return DONE;
  AsyncOp *last = t->warps[w->index].last_store;
  if (last) force(last);
  t->warps[w->index].last_store = NULL;
  view_add(&w->view, agent_of(w, AG_TMEM_ST), w->agent_clock[AG_TMEM_ST]);
  return DONE;
}

static int exec_fence(Warp *w, const Insn *I, Mask m) {
  (void)m;
  if (!checking(emu_of(w), CK_RACE)) return DONE;
  if (I->mod[0] == 1) tcgen05_fence_before(w);
  else tcgen05_fence_after(w);
  return DONE;
}

int tcgen05_fences(const Program *p, int after) {
  int n = 0;
  for (int i = 0; i < p->ncode; i++)
    n += p->code[i].exec == exec_fence && p->code[i].mod[0] == 1 + after;
  return n;
}

// ------------------------------------------------------------------ matrices in shared memory

// The matrix that a descriptor stands for; false after a finding that leaves nothing to read.
static bool read_matrix(Warp *w, const Insn *I, uint64_t descriptor, const char *name, Matrix *m) {
  *m = matrix_of(descriptor);
  unsigned long long text_of = (unsigned long long)descriptor;
  if ((descriptor >> 46 & 7) != 1)
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "descriptor of %s, 0x%016llx: bits 46 to 48 are %u, they must be 1 on sm_100", name,
            text_of, (unsigned)(descriptor >> 46 & 7));
  if (descriptor >> 53 & 0xFF)
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "descriptor of %s, 0x%016llx: bits 53 to 60 must be 0", name, text_of);
  if (descriptor >> 52 & 1)
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "descriptor of %s, 0x%016llx: an absolute leading dimension (bit 52) is for sm_103a "
            "only", name, text_of);
  if (m->mode == 3 || m->mode == 5 || m->mode == 7) {
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "descriptor of %s, 0x%016llx: there is no swizzle mode %d", name, text_of, m->mode);
    return false;
  }
  return true;
}

// Units of 16 bytes of a CTA's shared memory that an operand takes, to check them in long spans.
typedef struct {
  uint64_t bits[(1 << 18) / 16 / 64];
  int low, high;
  uint32_t outside;
  bool bad;
} Touched;

static Touched *touched_of(Emu *e) { return scratch(e, SCRATCH_TOUCHED, sizeof(Touched)); }

static inline const uint8_t *fetch(Touched *touched, Cta *cta, uint32_t address) {
  static const uint8_t zeros[16];
  if (address < SHARED_BASE || address - SHARED_BASE + 16 > cta->shared_bytes) {
    touched->bad = true;
    touched->outside = address;
    return zeros;
  }
  int unit = (int)((address - SHARED_BASE) / 16);
  touched->bits[unit / 64] |= 1ull << unit % 64;
  if (unit < touched->low) touched->low = unit;
  if (unit > touched->high) touched->high = unit;
  return cta->shared + (address - SHARED_BASE);
}

static Touched *fetch_begin(const Cta *cta) {
  Touched *touched = touched_of(cta->emu);
  touched->low = 1 << 14, touched->high = -1;
  touched->bad = false;
  return touched;
}

static void fetch_end(Touched *touched, const Access *access, Cta *cta, const char *name) {
  Access plain = *access, *a = &plain;
  a->tensor = 0;  // in shared memory the fences of the asynchronous proxy count
  if (touched->bad)
    finding(a->warp, a->insn, CK_BOUNDS, SEV_ERROR,
            "%s reaches shared address 0x%x, outside the %u bytes of CTA %u from 0x%x on", name,
            touched->outside, cta->shared_bytes, cta->linear, SHARED_BASE);
  for (int u = touched->low; u <= touched->high; u++) {
    uint64_t rest = touched->bits[u / 64] >> u % 64;
    if (!rest) {
      u |= 63;
      continue;
    }
    u += __builtin_ctzll(rest);
    int end = u;
    while (end <= touched->high && touched->bits[end / 64] >> end % 64 & 1) end++;
    shared_read(a, cta, (uint32_t)u * 16, (uint32_t)(end - u) * 16);
    u = end;
  }
  if (touched->high < 0) return;
  int first = touched->low / 64, last = touched->high / 64;
  memset(&touched->bits[first], 0, sizeof touched->bits[0] * (size_t)(last - first + 1));
}

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
  uint64_t a, b;            // descriptors; a may be an address in TMEM
  Matrix a_matrix, b_matrix;
  uint32_t d;
  int vectors;              // scale factors along K; 0: none
  uint32_t scale_a, scale_b;
  int scale_a_id, scale_b_id;
  FloatType scale_type;
  uint32_t disabled[8];     // lanes of D, CTA by CTA
  uint64_t zero_columns;    // descriptor of the mask of columns of B, of .ws
} Mma;

// Where the rows of D (and of A) lie in the TMEM of one CTA: `folds` groups of columns stand
// below each other; with `half` only 16 of every 32 lanes are used.
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

// The operands of the multiplication under way.
typedef struct {
  _Alignas(64) float a_tile[128 * 64], b_tile[256 * 64], d_tile[128 * 256];
  _Alignas(64) uint8_t a_raw[128][K_BYTES], b_raw[256 + 64][K_BYTES];
  float a_scales[128 * 4], b_scales[256 * 4];
  int16_t wide_a[128 * K_BYTES], wide_b[256 * K_BYTES];  // integers
} Tiles;

static Tiles *tiles_of(Emu *e) { return scratch(e, SCRATCH_TCGEN05, sizeof(Tiles)); }

static int bits_of(FloatType type) {
  return type == FT_E2M1 ? 4 : type == FT_E2M3 || type == FT_E3M2 ? 6 : 8;
}

// In TMEM narrow elements stand alone in a byte, their sign in bit 5.
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

// D into d_tile. A read of what the same operation goes on to write needs no mark of its own.
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

// Scale factors: those of row (or column) i stand in lane i % 32 of a 32-lane partition, in
// column i / 32, one byte each. Every partition has its own copy.
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

static void load_b(const AsyncOp *op, const Mma *m, Cta **ctas, int n) {
  Tiles *t = tiles_of(op->emu);
  int rows = m->N / n, shift = (int)(m->zero_columns >> 56 & 63);
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
  int step = m->group == 2 || (m->kind == KIND_I8 && m->N > 32) ? 16 : 8;
  return !rows || m->N < step || m->N > 256 || m->N % step;
}

// Read the instruction descriptor; false after a finding that leaves nothing to compute.
static bool read_descriptor(Warp *w, const Insn *I, uint32_t d, Mma *m) {
  const char *kind = KINDS[m->kind].name;
  int d_type = d >> 4 & 3, a_type = d >> 7 & 7, b_type = d >> 10 & 7;
  bool scaled = m->kind >= KIND_MXF8F6F4, fp4 = m->kind >= KIND_MXF4;
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
  if (scaled) {
    m->scale_type = d >> 23 & 1 ? FT_UE8M0 : FT_UE4M3;
    m->scale_b_id = d >> 4 & 3, m->scale_a_id = d >> 29 & 3;
    if (fp4 && d >> 31) {
      fatal(w, I, CK_DESCRIPTOR, "instruction descriptor 0x%08x: K = 96 is for sm_103a only", d);
      return false;
    }
    if (m->scale_a_id + m->vectors > 4 || m->scale_b_id + m->vectors > 4) {
      finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
              "instruction descriptor 0x%08x: scale factors %d and %d with %d of them a row", d,
              m->scale_a_id, m->scale_b_id, m->vectors);
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
    if (d >> 23 & 1 || d >> 29 & 1 || (d >> 30 && !m->weight_stationary) || d >> 6 & 1)
      finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
              "instruction descriptor 0x%08x: reserved bits (6, 23, 29 to 31) are not 0", d);
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

// Collector buffers hold nothing of their own here, but what a reuse would take must be in them.
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

static void check_single_thread(Warp *w, const Insn *I, Mask m, const char *what) {
  if (m & (m - 1))
    finding(w, I, CK_TCGEN05, SEV_ERROR,
            "%s executed by %d threads of the warp: each of them issues an operation of its own",
            what, __builtin_popcount(m));
}

static AsyncOp *issue(Warp *w, const Insn *I, const char *what, int lane, void *data,
                      void (*run)(AsyncOp *, int)) {
  AsyncOp *op = new_async(w, I, what, AG_TC, ++w->agent_clock[AG_TC]);
  op->access.tensor = 1;
  op->queue = queue_of(w, AG_TC);
  op->stages = 1;
  op->run = run;
  op->data = data;
  w->cta->tmem->warps[w->index].uncommitted |= 1u << lane;
  submit(op);
  return op;
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
  if (m.shift_a && m.M < 128)
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR, ".ashift with M = %d: it needs 128 or 256", m.M);
  Mma *data = malloc(sizeof m);
  *data = m;
  issue(w, I, "tcgen05.mma", lane, data, run_mma);
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
    // The two top bits may hold the number of the scale factor, which the descriptor repeats.
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

// ------------------------------------------------------------------------------ cp, shift, commit

enum { CP_128x256b = 1, CP_4x256b, CP_128x128b, CP_64x128b_02_13, CP_64x128b_01_23, CP_32x128b };
static const struct { int rows, chunks; } CP_SHAPES[] = {
    [CP_128x256b] = {128, 2}, [CP_4x256b] = {4, 2}, [CP_128x128b] = {128, 1},
    [CP_64x128b_02_13] = {64, 1}, [CP_64x128b_01_23] = {64, 1}, [CP_32x128b] = {32, 1},
};

typedef struct {
  int shape, group, bits;  // of the source's elements, where they are expanded to bytes
  Matrix matrix;
  uint32_t address;
} Copy;

// Lanes that row `row` goes to; how many.
static int copy_lanes(int shape, int row, int lanes[4]) {
  switch (shape) {
    case CP_4x256b: lanes[0] = 32 * row; return 1;
    case CP_64x128b_02_13: lanes[0] = row, lanes[1] = row + 64; return 2;
    case CP_64x128b_01_23: lanes[0] = row / 32 * 64 + row % 32, lanes[1] = lanes[0] + 32; return 2;
    case CP_32x128b: for (int i = 0; i < 4; i++) lanes[i] = row + 32 * i; return 4;
    default: lanes[0] = row; return 1;
  }
}

static void run_copy(AsyncOp *op, int stage) {
  (void)stage;
  const Copy *c = op->data;
  Cta *ctas[2];
  int n = ctas_of(op->warp, op->insn, c->group, ctas);
  if (!n || !op->cta->tmem) return;
  int rows = CP_SHAPES[c->shape].rows, chunks = CP_SHAPES[c->shape].chunks;
  int base = (int)(c->address >> 16), column = (int)(c->address & 0xFFFF), lanes[4];
  for (int i = 0; i < n; i++) {
    uint8_t data[LANES][32];
    Touched *touched = fetch_begin(ctas[i]);
    for (int r = 0; r < rows; r++) {
      for (int k = 0; k < chunks; k++) {
        const uint8_t *p = fetch(touched, ctas[i], k_major(&c->matrix, r, k));
        uint8_t *to = &data[r][16 * k];
        if (c->bits == 8) {
          memcpy(to, p, 16);
          continue;
        }
        unpack_bits(p, c->bits, to);
        for (int j = 0; j < 16; j++) to[j] = (uint8_t)(to[j] << (6 - c->bits));
      }
    }
    fetch_end(touched, &op->access, ctas[i], "source of tcgen05.cp");
    // Each access covers a whole group of lanes, or one of them for 4x256b.
    bool single = c->shape == CP_4x256b;
    for (int l = 0; l < (single ? 4 : 1); l++) {
      int lane = base + 32 * l, count = single ? 1 : LANES;
      if (!check_block(&op->access, ctas[i], "tcgen05.cp", lane, column, count, 4 * chunks)) return;
      tmem_write(&op->access, ctas[i], lane, column, count, 4 * chunks);
    }
    for (int r = 0; r < rows; r++) {
      int copies = copy_lanes(c->shape, r, lanes);
      for (int k = 0; k < copies; k++)
        memcpy(&ctas[i]->tmem->words[base + lanes[k]][column], data[r], (size_t)chunks * 16);
      op->emu->counters[CT_TMEM_CP] += (uint64_t)chunks * 16;
    }
  }
  progress(op->emu);
}

static int exec_cp(Warp *w, const Insn *I, Mask m) {
  if (!tmem_of(w, I)) return DONE;
  int group = I->mod[0];
  check_group(w, I, group);
  check_single_thread(w, I, m, "tcgen05.cp");
  Cta *ctas[2];
  if (!ctas_of(w, I, group, ctas)) return DONE;
  uint64_t address[32];
  addresses_of(w, I, &I->op[0], m, address);
  const uint64_t *descriptor = SRC64(1);
  FOR_SET(l, m) {
    Copy c = {.shape = I->mod[1], .group = group, .address = (uint32_t)address[l] & 0x3FFFFFFF,
              .bits = I->mod[2] == 1 ? 6 : I->mod[2] == 2 ? 4 : 8};
    if (!read_matrix(w, I, descriptor[l], "the source of tcgen05.cp", &c.matrix)) continue;
    Copy *data = malloc(sizeof c);
    *data = c;
    issue(w, I, "tcgen05.cp", l, data, run_copy);
  }
  return DONE;
}

typedef struct { int group; uint32_t address; } Shift;

// Rows 1 to 31 of 32 lanes move to the lane before; the last keeps what it has.
static void run_shift(AsyncOp *op, int stage) {
  (void)stage;
  const Shift *s = op->data;
  Cta *ctas[2];
  int n = ctas_of(op->warp, op->insn, s->group, ctas);
  int lane = (int)(s->address >> 16), column = (int)(s->address & 0xFFFF);
  if (!op->cta->tmem) return;
  for (int i = 0; i < n; i++) {
    if (!check_block(&op->access, ctas[i], "tcgen05.shift", lane, column, 32, 8)) return;
    tmem_read(&op->access, ctas[i], lane, column, 32, 8);
    tmem_write(&op->access, ctas[i], lane, column, 31, 8);
    for (int r = lane; r < lane + 31; r++)
      memcpy(&ctas[i]->tmem->words[r][column], &ctas[i]->tmem->words[r + 1][column], 32);
  }
  progress(op->emu);
}

static int exec_shift(Warp *w, const Insn *I, Mask m) {
  if (!tmem_of(w, I)) return DONE;
  check_group(w, I, I->mod[0]);
  check_single_thread(w, I, m, "tcgen05.shift");
  uint64_t address[32];
  addresses_of(w, I, &I->op[0], m, address);
  FOR_SET(l, m) {
    uint32_t a = (uint32_t)address[l];
    if ((a >> 16) % 32)
      finding(w, I, CK_TMEM, SEV_ERROR, "tcgen05.shift at lane %u, which is not a multiple of 32",
              a >> 16);
    Shift *data = malloc(sizeof *data);
    *data = (Shift){.group = I->mod[0], .address = a & ~(31u << 16)};
    issue(w, I, "tcgen05.shift", l, data, run_shift);
  }
  return DONE;
}

typedef struct { int count; struct { Cta *cta; uint32_t offset; } barriers[16]; } Commit;

static void run_commit(AsyncOp *op, int stage) {
  (void)stage;
  const Commit *c = op->data;
  for (int i = 0; i < c->count; i++) {
    Cta *cta = c->barriers[i].cta;
    if (!live_cta(cta)) {
      if (cta != op->cta)
        finding(op->warp, op->insn, CK_EXIT, SEV_ERROR,
                "tcgen05.commit signals an mbarrier of CTA rank %d of the cluster, which has "
                "exited", cta->rank);
      continue;
    }
    Mbarrier *b = find_mbarrier(op->warp, op->insn, cta, c->barriers[i].offset);
    if (b)
      mbarrier_async_arrive(op->warp, op->insn, cta, b, 1, &op->view, op->access.agent,
                            op->access.clock);
  }
  progress(op->emu);
}

static bool commit_targets(Warp *w, const Insn *I, uint64_t address, bool shared, bool multicast,
                           uint32_t mask, Commit *c) {
  uint32_t offset = 0;
  Cta *cta = NULL;
  if (shared) cta = shared_target(w, (uint32_t)address, &offset);
  else if (classify(w, address, &cta, &offset) != SP_SHARED) cta = NULL;
  if (!cta) {
    finding(w, I, CK_BOUNDS, SEV_ERROR, "0x%llx is not an address in the cluster's shared memory",
            (unsigned long long)address);
    return false;
  }
  c->count = 0;
  if (!multicast) {
    c->barriers[c->count].cta = cta;
    c->barriers[c->count++].offset = offset;
    return true;
  }
  Cluster *cluster = w->cta->cluster;
  for (int i = 0; i < 16; i++) {
    if (!(mask >> i & 1)) continue;
    if (i >= cluster->nctas) {
      finding(w, I, CK_CLUSTER, SEV_ERROR,
              "tcgen05.commit to CTA mask 0x%x in a cluster of %d CTAs", mask, cluster->nctas);
      break;
    }
    c->barriers[c->count].cta = cluster->ctas[i];
    c->barriers[c->count++].offset = offset;
  }
  return true;
}

static int exec_commit(Warp *w, const Insn *I, Mask m) {
  struct Tmem *t = tmem_of(w, I);
  if (!t) return DONE;
  bool multicast = I->mod[2] != 0;
  check_group(w, I, I->mod[0]);
  uint64_t address[32];
  addresses_of(w, I, &I->op[0], m, address);
  if (multicast != (I->op[1].kind != K_NONE)) {
    fatal(w, I, CK_TCGEN05, "tcgen05.commit: a CTA mask goes with .multicast::cluster only");
    return DONE;
  }
  const uint32_t *masks = multicast ? SRC32(1) : NULL;
  FOR_SET(l, m) {
    Mask *uncommitted = &t->warps[w->index].uncommitted;
    if (*uncommitted && !(*uncommitted >> l & 1))
      finding(w, I, CK_TCGEN05, SEV_ERROR,
              "tcgen05.commit by lane %d, which has issued nothing since its last commit, while "
              "lanes 0x%08x have: it tracks the operations of its own thread only", l,
              *uncommitted);
    *uncommitted &= ~(1u << l);
    Commit *c = malloc(sizeof *c);
    if (!commit_targets(w, I, address[l], I->mod[1], multicast, masks ? masks[l] : 0, c)) {
      free(c);
      continue;
    }
    AsyncOp *op = new_async(w, I, "tcgen05.commit", AG_TC, w->agent_clock[AG_TC]);
    op->queue = queue_of(w, AG_TC);
    op->stages = 1;
    op->run = run_commit;
    op->data = c;
    submit(op);
  }
  return DONE;
}

// ----------------------------------------------------------------------------------- forms

#define GROUP "(.cta_group::1|.cta_group::2)"
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
#define SHAPE "(.16x64b|.16x128b|.16x256b|.32x32b)"

const Form FORMS_TCGEN05[] = {
    {"tcgen05.alloc" GROUP ".sync.aligned{.shared::cta}.b32", "a s32", exec_alloc,
     F_ALIGNED | F_YIELD},
    {"tcgen05.dealloc" GROUP ".sync.aligned.b32", "s32 s32", exec_dealloc, F_ALIGNED | F_YIELD},
    {"tcgen05.relinquish_alloc_permit" GROUP ".sync.aligned", "", exec_relinquish, F_ALIGNED},
    {"tcgen05.ld.sync.aligned" SHAPE ".x#{.pack::16b}.b32", "d32l a", exec_ld, F_ALIGNED},
    {"tcgen05.ld.sync.aligned.16x32bx2.x#{.pack::16b}.b32", "d32l a i", exec_ld_split, F_ALIGNED},
    {"tcgen05.ld.red.sync.aligned(.32x32b|.16x32bx2).x#(.min|.max){.abs}{.NaN}(.f32|.u32|.s32)",
     "d32l d32 a i?", exec_ld_red, F_ALIGNED},
    {"tcgen05.ld.red.sync.aligned(.32x32b|.16x32bx2).x#(.u32|.s32)(.min|.max)", "d32l d32 a i?",
     exec_ld_red_type_first, F_ALIGNED},
    {"tcgen05.st.sync.aligned" SHAPE ".x#{.unpack::16b}.b32", "a s32l", exec_st, F_ALIGNED},
    {"tcgen05.st.sync.aligned.16x32bx2.x#{.unpack::16b}.b32", "a i s32l", exec_st_split, F_ALIGNED},
    {"tcgen05.wait::ld.sync.aligned", "", exec_wait_ld, F_ALIGNED},
    {"tcgen05.wait::st.sync.aligned", "", exec_wait_st, F_ALIGNED},
    {"tcgen05(.fence::before_thread_sync|.fence::after_thread_sync)", "", exec_fence, 0},
    {MMA, "a s64 s64 s32 sp i?", exec_mma, 0},
    {MMA, "a a s64 s32 sp i?", exec_mma, 0},
    {MMA, "a s64 s64 s32 s32l sp i?", exec_mma, 0},
    {MMA, "a a s64 s32 s32l sp i?", exec_mma, 0},
    {MMA_SCALED, "a s64 s64 s32 a a sp", exec_mma_scaled, 0},
    {MMA_SCALED, "a a s64 s32 a a sp", exec_mma_scaled, 0},
    {MMA_WS, "a s64 s64 s32 sp s64?", exec_mma_ws, 0},
    {MMA_WS, "a a s64 s32 sp s64?", exec_mma_ws, 0},
    {"tcgen05.cp" GROUP "(.128x256b|.4x256b|.128x128b|.64x128b.warpx2::02_13|"
     ".64x128b.warpx2::01_23|.32x128b.warpx4){.b8x16.b6x16_p32|.b8x16.b4x16_p64}",
     "a s64", exec_cp, F_UNIFORM},
    {"tcgen05.shift" GROUP ".down", "a", exec_shift, F_UNIFORM},
    {"tcgen05.commit" GROUP ".mbarrier::arrive::one{.shared::cluster}{.multicast::cluster}.b64",
     "a s32?", exec_commit, F_UNIFORM},
    {0}};
