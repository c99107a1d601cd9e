// Tensor memory (TMEM) of sm_100: allocation, loads and stores.
#include "reductions.h"
#include "tcgen05.h"

// ------------------------------------------------------------------------ allocation and checks

static void tmem_new(Cta *cta) {
  if (cta->emu->program->arch >= 100) cta->tmem = calloc(1, sizeof *cta->tmem);
}

static void tmem_delete(Cta *cta) {
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

struct Tmem *tmem_of(Warp *w, const Insn *I) {
  if (!w->cta->tmem) fatal(w, I, CK_TMEM, "this architecture has no tensor memory");
  return w->cta->tmem;
}

void check_group(Warp *w, const Insn *I, int group) {
  struct Tmem *t = w->cta->tmem;
  if (!t->group) t->group = group, t->group_insn = I;
  if (t->group != group)
    finding_with(w, I, t->group_insn, CK_TCGEN05, SEV_ERROR,
                 "cta_group::%d here, cta_group::%d before: all tcgen05 instructions of a kernel "
                 "must use the same", group, t->group);
}

int ctas_of(Warp *w, const Insn *I, int group, Cta *ctas[2]) {
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

// Allocate the first columns that are free in all of the CTAs; -1 if no columns are free.
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
  uint32_t offset;
  Cta *cta = any_shared_target(w, where_to, !I->mod[1], &offset);
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
    const Insn *freed = known ? NULL : t->slices[s0].freed;
    finding_with(w, I, freed, CK_TMEM, SEV_ERROR,
                 "tcgen05.dealloc of address 0x%x, at which no allocation of CTA %u starts%s",
                 address, cta->linear, freed ? " (it has been freed)" : "");
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
    t->slices[s].used = false, t->slices[s].freed = I;
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
  // The first CTA of the pair may block until the second CTA comes; in the emulator the first CTA
  // always blocks.
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

bool check_block(const Access *a, Cta *cta, const char *role, int lane, int column,
                        int lanes, int columns) {
  if (lane < 0 || lane + lanes > LANES || column < 0 || column + columns > COLUMNS) {
    finding(a->warp, a->insn, CK_TMEM, SEV_ERROR,
            "%s: lanes %d to %d, columns %d to %d, are outside the 128 lanes and 512 columns of "
            "TMEM", role, lane, lane + lanes - 1, column, column + columns - 1);
    return false;
  }
  for (int s = column / SLICE; s <= (column + columns - 1) / SLICE; s++) {
    if (cta->tmem->slices[s].used) continue;
    const Insn *freed = cta->tmem->slices[s].freed;
    finding_with(a->warp, a->insn, freed, CK_TMEM, SEV_ERROR,
                 "%s: columns %d to %d of CTA %u, of which %d to %d are not allocated%s", role,
                 column, column + columns - 1, cta->linear, s * SLICE, s * SLICE + SLICE - 1,
                 freed ? " (they have been freed)" : "");
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

// The cells of one ld or st. A cell is a word, or with pack or unpack the low halves of two words.
typedef struct {
  int shape, count;        // shape; number of registers
  int lane, column;        // lane and column of the first cell
  int columns;             // columns of each access, in words
  int split;               // distance between the two accesses of 16x32bx2
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

// Decode the operands of ld or st; false after a finding if the operands cannot be decoded.
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
    // The hardware uses the warp's own quarter of the lanes. DeepGEMM relies on this, as its
    // addresses never name the quarter.
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
  Reduction reduce;        // for ld.red; else NULL
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
  stream_event(w, I, STEP_TENSOR, (uint64_t)d.cells.count * 128, 0, 0);
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
  stream_event(w, I, STEP_TENSOR, (uint64_t)cells.count * 128, 0, 0);
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
    // An operation is freed once no register is pending on it, so take the operation off the list
    // first.
    if (s->nloads && s->loads[0] == op)
      memmove(&s->loads[0], &s->loads[1], sizeof *s->loads * (size_t)--s->nloads);
    for (int r = 0; r <= d.cells.count; r++) {
      const Operand *o = r < d.cells.count ? &d.registers[r] : d.reduced;
      if (o && o->kind == K_REG && w->pending[o->id] == op) clear_pending(w, o);
    }
  }
  view_add(&w->view, agent_of(w, AG_TMEM_LD), w->agent_clock[AG_TMEM_LD]);
  stream_event(w, I, STEP_AWAIT, 0, 0, 0);
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
  stream_event(w, I, STEP_AWAIT, 0, 0, 0);
  return DONE;
}

// ----------------------------------------------------------------------------------- forms

#define SHAPE "(.16x64b|.16x128b|.16x256b|.32x32b)"

static const Form FORMS[] = {
    {"tcgen05.alloc" GROUP ".sync.aligned{.shared::cta}.b32", "a s32", exec_alloc,
     F_ALIGNED | F_YIELD | F_EFFECT},
    {"tcgen05.dealloc" GROUP ".sync.aligned.b32", "s32 s32",
     exec_dealloc, F_ALIGNED | F_YIELD | F_EFFECT},
    {"tcgen05.relinquish_alloc_permit" GROUP ".sync.aligned", "",
     exec_relinquish, F_ALIGNED | F_EFFECT},
    {"tcgen05.ld.sync.aligned" SHAPE ".x#{.pack::16b}.b32", "d32l a", exec_ld, F_ALIGNED},
    {"tcgen05.ld.sync.aligned.16x32bx2.x#{.pack::16b}.b32", "d32l a i", exec_ld_split, F_ALIGNED},
    {"tcgen05.ld.red.sync.aligned(.32x32b|.16x32bx2).x#(.min|.max){.abs}{.NaN}(.f32|.u32|.s32)",
     "d32l d32 a i?", exec_ld_red, F_ALIGNED},
    {"tcgen05.ld.red.sync.aligned(.32x32b|.16x32bx2).x#(.u32|.s32)(.min|.max)", "d32l d32 a i?",
     exec_ld_red_type_first, F_ALIGNED},
    {"tcgen05.st.sync.aligned" SHAPE ".x#{.unpack::16b}.b32", "a s32l",
     exec_st, F_ALIGNED | F_EFFECT},
    {"tcgen05.st.sync.aligned.16x32bx2.x#{.unpack::16b}.b32", "a i s32l",
     exec_st_split, F_ALIGNED | F_EFFECT},
    {"tcgen05.wait::ld.sync.aligned", "", exec_wait_ld, F_ALIGNED},
    {"tcgen05.wait::st.sync.aligned", "", exec_wait_st, F_ALIGNED},
    {0},
};

const Family FAMILY_TMEM = {.name = "tmem", .forms = FORMS,
    .cta_starts = tmem_new, .cta_freed = tmem_delete};
