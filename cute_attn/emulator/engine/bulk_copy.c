// Bulk copies: linear copies, reductions and bulk groups, and code shared with tensor copies: the
// stages that read and write, and the checks when a warp exits.
#include "copy.h"
#include "matrix.h"

void drop_copy(Copy *c) {
  free(c->buffer);
  free(c);
}

static void release_copy(AsyncOp *op) {
  Copy *c = op->data;
  if (c->link) {
    *c->link = c->next;
    if (c->next) c->next->link = c->link;
  }
  drop_copy(c);
}

Copy *new_copy(uint32_t buffered) {
  Copy *c = calloc(1, sizeof *c);
  c->buffered = buffered;
  c->buffer = malloc(buffered ? buffered : 1);
  c->byte_mask = 0xFFFF;
  return c;
}

// ------------------------------------------------------------------------- addresses of a swizzle
//
// The swizzle of 128 bytes has atoms of 16, 32, 32 (with flipped halves) or 64 bytes.
static Swizzle swizzle_of_box(const TensorMap *t) {
  static const uint8_t shifts[] = {4, 5, 5, 6};
  return swizzle_of(16u << t->swizzle, t->swizzle == 3 ? shifts[t->atomicity] : 4);
}

// Copy the rows of a box to or from shared memory; `memory` is where SHARED_BASE lies on the host.
static void move_rows(const TensorMap *t, uint8_t *memory, uint32_t offset, uint8_t *rows,
                      bool to_shared) {
  Swizzle s = swizzle_of_box(t);
  bool flips = t->swizzle == 3 && t->atomicity == 2;
  for (uint32_t row = 0; row < t->rows; row++, rows += t->inner) {
    uint32_t address = SHARED_BASE + offset + row * t->pitch;
    for (uint32_t i = 0; i < t->inner; i += 16) {
      uint8_t *p = memory + (swizzled(s, address + i, 0) - SHARED_BASE);
      uint8_t chunk[16];
      memcpy(chunk, to_shared ? rows + i : p, 16);
      if (flips && (address + i) >> 7 & 1) {
        uint64_t half[2];
        memcpy(half, chunk, 16);
        memcpy(chunk, &half[1], 8);
        memcpy(chunk + 8, &half[0], 8);
      }
      memcpy(to_shared ? p : rows + i, chunk, 16);
    }
  }
}

// ---- shared memory: all of a box, or a linear range

static uint32_t footprint(const Copy *c) {
  if (!c->tensor) return c->buffered;
  uint32_t bytes = c->map.rows * c->map.pitch;
  return c->map.swizzle ? (bytes + 127) & ~127u : bytes;
}

// Check each chunk that a box touches, or the whole range if there are no gaps.
static void touch_shared(const Access *a, const Copy *c, Cta *cta, uint32_t offset, bool writes) {
  void (*touch)(const Access *, Cta *, uint32_t, uint32_t) = writes ? shared_write : shared_read;
  const TensorMap *t = &c->map;
  if (!c->tensor || t->inner == t->pitch || !t->swizzle) {
    uint32_t whole = c->tensor && t->swizzle ? c->buffered & ~127u : c->buffered;
    if (whole) touch(a, cta, offset, whole);
    if (whole == c->buffered) return;
  }
  Swizzle s = swizzle_of_box(t);
  uint32_t first = t->inner == t->pitch ? (c->buffered & ~127u) / t->pitch : 0;
  for (uint32_t row = first; row < t->rows; row++)
    for (uint32_t i = 0; i < t->inner; i += 16)
      touch(a, cta, swizzled(s, SHARED_BASE + offset + row * t->pitch + i, 0) - SHARED_BASE, 16);
}

static uint32_t shared_alignment(const Copy *c) {
  return c->tensor ? 128 : 16;
}

static void move_shared(AsyncOp *op, Copy *c, Cta *cta, uint32_t offset, bool writes) {
  uint8_t *p = shared_pointer(op->warp, op->insn, cta, offset, footprint(c), shared_alignment(c));
  if (!p) {
    if (!writes) memset(c->buffer, 0, c->buffered);
    return;
  }
  touch_shared(&op->access, c, cta, offset, writes);
  if (c->tensor && c->map.swizzle) {
    move_rows(&c->map, p - offset, offset, c->buffer, writes);
  } else if (!writes) {
    memcpy(c->buffer, p, c->buffered);
  } else {
    reduce_or_copy(c->reduce, p, c->buffer, c->buffered);
  }
}

// ---- global memory: a linear range

static void copy_masked(uint8_t *to, const uint8_t *from, uint32_t bytes, uint16_t mask) {
  for (uint32_t i = 0; i < bytes; i++)
    if (mask >> i % 16 & 1) to[i] = from[i];
}

static void write_linear(AsyncOp *op, Copy *c) {
  uint8_t *p = global_pointer(op->warp, op->insn, c->global, c->bytes, 16, true);
  if (!p) return;
  if (c->byte_mask == 0xFFFF) {
    global_write(&op->access, p, c->bytes);
  } else {
    for (uint32_t i = 0; i < c->bytes; i++)
      if (c->byte_mask >> i % 16 & 1) global_write(&op->access, p + i, 1);
  }
  if (c->byte_mask == 0xFFFF) reduce_or_copy(c->reduce, p, c->buffer, c->bytes);
  else copy_masked(p, c->buffer, c->bytes, c->byte_mask);
}

static void read_linear(AsyncOp *op, Copy *c) {
  const uint8_t *p = global_pointer(op->warp, op->insn, c->global, c->bytes, 16, false);
  if (!p) {
    memset(c->buffer, 0, c->bytes);
    return;
  }
  global_read(&op->access, p, c->bytes);
  memcpy(c->buffer, p, c->bytes);
}

// ---- copies into shared memory, which signal an mbarrier; a stage for each destination CTA

static void load_source(AsyncOp *op, Copy *c) {
  if (live_cta(c->signalled[0])) signalled_mbarrier(op, c->signalled[0], c->barrier);
  if (c->from) move_shared(op, c, c->from, c->from_offset, false);
  else if (c->tensor) read_tensor(op, c);
  else read_linear(op, c);
}

bool check_destination(const AsyncOp *op, const Cta *cta) {
  if (live_cta(cta)) return true;
  finding(op->warp, op->insn, CK_CLUSTER, SEV_ERROR,
          "%s writes to the shared memory of CTA %u, which has exited", op->what, cta->linear);
  return false;
}

static void load_target(AsyncOp *op, Copy *c, int target) {
  Cta *cta = c->targets[target];
  if (!check_destination(op, cta)) return;
  Cta *signalled = c->signalled[target];
  Mbarrier *b = live_cta(signalled) ? signalled_mbarrier(op, signalled, c->barrier) : NULL;
  move_shared(op, c, cta, c->to_offset, true);
  if (b) mbarrier_complete_tx(op->warp, op->insn, signalled, b, c->bytes, &op->view);
}

static void run_load(AsyncOp *op, int stage) {
  if (stage == 0) load_source(op, op->data);
  else load_target(op, op->data, stage - 1);
}

// ---- copies out of shared memory, which complete a bulk group

static void run_store(AsyncOp *op, int stage) {
  Copy *c = op->data;
  Warp *w = op->warp;
  if (stage == 0) {
    op->access.agent = agent_of(w, AG_BULK_READ);
    op->access.clock = bulk_clock(w, AG_BULK_READ, c->group);
    move_shared(op, c, c->from, c->from_offset, false);
    c->read = true;
    return;
  }
  op->access.agent = agent_of(w, AG_BULK_WRITE);
  op->access.clock = bulk_clock(w, AG_BULK_WRITE, c->group);
  op->access.atomic = c->reduce != NULL;
  if (c->tensor) move_tensor(op, c, true);
  else write_linear(op, c);
}

static uint64_t first_byte(const Copy *c) {
  if (!c->tensor) return c->global;
  uint64_t address = c->map.address + (uint64_t)((int64_t)c->at[0] * c->map.bytes);
  for (int d = 1; d < c->map.rank; d++)
    address += (uint64_t)((int64_t)c->at[d] * (int64_t)c->map.stride[d]);
  return address;
}

void submit_load(Warp *w, const Insn *I, Copy *c, const char *what, int counter) {
  AsyncOp *op = new_async(w, I, what, AG_BULK_WRITE, bulk_clock(w, AG_BULK_WRITE, 1));
  op->run = run_load;
  op->release = release_copy;
  op->stages = 1 + c->ntargets;
  op->data = c;
  op->access.atomic = c->reduce != NULL;
  emu_of(w)->counters[counter] += c->bytes;
  submit(op);
  stream_event(w, I, STEP_COPY, c->bytes, c->from ? 0 : first_byte(c), 0);
  for (int t = 0; t < c->ntargets; t++)
    if (c->ntargets > 1 && c->targets[t] != w->cta)
      stream_event(w, I, STEP_DELIVER, c->bytes, c->targets[t]->linear, 0);
}

void submit_store(Warp *w, const Insn *I, Copy *c, int lane, const char *what, int counter) {
  struct Copies *state = copies_of(w);
  c->lane = lane;
  c->group = (uint32_t)w->bulk_group;
  state->bulk_issued[lane] = c->group;
  c->next = state->unfinished;
  c->link = &state->unfinished;
  if (c->next) c->next->link = &c->next;
  state->unfinished = c;
  lane_gives(w, I, lane, c->from_offset, footprint(c));
  state->sources[state->nsources++ % SOURCES] =
      (Source){I, c->group, c->from_offset, footprint(c), lane};
  AsyncOp *op = new_async(w, I, what, AG_BULK_READ, bulk_clock(w, AG_BULK_READ, c->group));
  op->run = run_store;
  op->release = release_copy;
  op->stages = 2;
  op->data = c;
  emu_of(w)->counters[counter] += c->bytes;
  submit(op);
  stream_event(w, I, STEP_COPY, c->bytes, first_byte(c), c->group);
}

// ---- destinations and barriers

bool set_targets(Warp *w, const Insn *I, Copy *c, uint32_t to, uint32_t barrier,
                        int multicast, bool own, bool pair) {
  Cluster *k = w->cta->cluster;
  uint32_t offset;
  Cta *cta = shared_target(w, to, &c->to_offset);
  Cta *signalled = shared_target(w, barrier, &offset);
  if (!cta || !signalled) {
    finding(w, I, CK_CLUSTER, SEV_ERROR,
            "no CTA of the cluster has the %s address 0x%x", cta ? "mbarrier's" : "destination",
            cta ? barrier : to);
    return false;
  }
  c->barrier = offset;
  if (own && cta != w->cta)
    finding(w, I, CK_CLUSTER, SEV_ERROR,
            "the destination is .shared::cta, but its address 0x%x belongs to rank %d", to,
            cta->rank);
  if (multicast < 0) {
    if (signalled != cta && !(pair && (signalled->rank ^ 1) == cta->rank))
      finding(w, I, CK_CLUSTER, SEV_ERROR,
              "the destination is in the CTA of rank %d, its mbarrier in that of rank %d%s",
              cta->rank, signalled->rank, pair ? ", which is not of the same pair" : "");
    (void)find_mbarrier(w, I, signalled, offset);
    c->targets[0] = cta;
    c->signalled[0] = signalled;
    c->ntargets = 1;
    return true;
  }
  if (multicast == 0 || multicast >> k->nctas)
    finding(w, I, CK_CLUSTER, SEV_ERROR,
            "the mask 0x%x of a multicast names %s the cluster's %d CTAs", multicast,
            multicast ? "more than" : "none of", k->nctas);
  for (int r = 0; r < k->nctas; r++) {
    if (!(multicast >> r & 1)) continue;
    int other = pair ? (r & ~1) | (signalled->rank & 1) : r;
    c->targets[c->ntargets] = k->ctas[r];
    c->signalled[c->ntargets] = k->ctas[other < k->nctas ? other : r];
    (void)find_mbarrier(w, I, c->signalled[c->ntargets++], offset);
  }
  return c->ntargets > 0;
}

bool own_shared(Warp *w, const Insn *I, uint64_t address, uint32_t *offset) {
  if (shared_target(w, (uint32_t)address, offset) == w->cta) return true;
  finding(w, I, CK_CLUSTER, SEV_ERROR,
          "the source is .shared::cta, but its address 0x%x is not of this CTA",
          (uint32_t)address);
  return false;
}

static bool linear_size(Warp *w, const Insn *I, uint32_t bytes) {
  if (bytes % 16 == 0) return true;
  finding(w, I, CK_ALIGNMENT, SEV_ERROR, "a bulk copy of %u bytes, not a multiple of 16", bytes);
  return false;
}

static const uint32_t *source32(Warp *w, const Insn *I, int k, Mask m, uint32_t buffer[32]) {
  if (I->op[k].kind == K_NONE) return NULL;
  return src32_of(w, I, &I->op[k], m, buffer);
}

// ---- linear copies

static int load_linear(Warp *w, const Insn *I, Mask m, const uint32_t *masks) {
  uint64_t to[32], from[32], barrier[32];
  addresses_of(w, I, &I->op[0], m, to);
  addresses_of(w, I, &I->op[1], m, from);
  addresses_of(w, I, &I->op[3], m, barrier);
  const uint32_t *bytes = SRC32(2);
  FOR_SET(l, m) {
    if (!linear_size(w, I, bytes[l])) continue;
    Copy *c = new_copy(bytes[l]);
    c->global = from[l];
    c->bytes = bytes[l];
    if (set_targets(w, I, c, (uint32_t)to[l], (uint32_t)barrier[l],
                    masks ? (int)(masks[l] & 0xFFFF) : -1, I->mod[0] == 2, false)) {
      submit_load(w, I, c, "bulk copy to shared memory", CT_BULK);
    } else {
      drop_copy(c);
    }
  }
  return DONE;
}

static int exec_bulk_load(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, &I->op[4], m);
  return load_linear(w, I, m, NULL);
}
static int exec_bulk_multicast(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, &I->op[5], m);
  return load_linear(w, I, m, SRC32(4));
}

// Copies and reductions from shared memory to the shared memory of a CTA of the cluster.
static int shared_to_shared(Warp *w, const Insn *I, Mask m, Reduction reduce) {
  uint64_t to[32], from[32], barrier[32];
  addresses_of(w, I, &I->op[0], m, to);
  addresses_of(w, I, &I->op[1], m, from);
  addresses_of(w, I, &I->op[3], m, barrier);
  const uint32_t *bytes = SRC32(2);
  FOR_SET(l, m) {
    uint32_t offset;
    if (!linear_size(w, I, bytes[l]) || !own_shared(w, I, from[l], &offset)) continue;
    Copy *c = new_copy(bytes[l]);
    c->from = w->cta;
    c->from_offset = offset;
    c->bytes = bytes[l];
    c->reduce = reduce;
    lane_gives(w, I, l, offset, bytes[l]);
    if (set_targets(w, I, c, (uint32_t)to[l], (uint32_t)barrier[l], -1, false, false)) {
      submit_load(w, I, c, reduce ? "bulk reduction into a CTA" : "bulk copy between CTAs",
                  CT_DSMEM);
    } else {
      drop_copy(c);
    }
  }
  return DONE;
}

static int exec_bulk_between(Warp *w, const Insn *I, Mask m) {
  return shared_to_shared(w, I, m, NULL);
}

static int store_linear(Warp *w, const Insn *I, Mask m, Reduction reduce,
                        const uint32_t *byte_masks) {
  uint64_t to[32], from[32];
  addresses_of(w, I, &I->op[0], m, to);
  addresses_of(w, I, &I->op[1], m, from);
  const uint32_t *bytes = SRC32(2);
  FOR_SET(l, m) {
    uint32_t offset;
    if (!linear_size(w, I, bytes[l]) || !own_shared(w, I, from[l], &offset)) continue;
    Copy *c = new_copy(bytes[l]);
    c->from = w->cta;
    c->from_offset = offset;
    c->global = to[l];
    c->bytes = bytes[l];
    c->reduce = reduce;
    if (byte_masks) c->byte_mask = (uint16_t)byte_masks[l];
    submit_store(w, I, c, l, reduce ? "bulk reduction" : "bulk copy to global memory",
                 reduce ? CT_TMA_REDUCE : CT_BULK);
  }
  return DONE;
}

static int exec_bulk_store(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, &I->op[3], m);
  return store_linear(w, I, m, NULL, NULL);
}
static int exec_bulk_store_masked(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, &I->op[3], m);
  uint32_t buffer[32];
  return store_linear(w, I, m, NULL, source32(w, I, 4, m, buffer));
}

// Types in the order of the reductions' patterns.
static const ElementType REDUCED[] = {TY_COUNT, TY_U32, TY_S32, TY_U64, TY_S64, TY_F16,
                                      TY_BF16,  TY_F32, TY_F64, TY_U32, TY_U64};

Reduction known_reduction(Warp *w, const Insn *I, ReduceOp op, ElementType type) {
  Reduction reduce = reduction_of(op, type);
  if (!reduce)
    fatal(w, I, CK_DESCRIPTOR, "there is no such reduction of elements of type %s",
          element_name(type));
  return reduce;
}

static int exec_reduce_global(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, &I->op[3], m);
  Reduction reduce = known_reduction(w, I, (ReduceOp)I->mod[1], REDUCED[I->mod[2]]);
  return reduce ? store_linear(w, I, m, reduce, NULL) : DONE;
}
static int exec_reduce_global_noftz(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, &I->op[3], m);
  return store_linear(w, I, m, reduction_of(OP_ADD, I->mod[1] == 1 ? TY_F16 : TY_BF16), NULL);
}
static int exec_reduce_shared(Warp *w, const Insn *I, Mask m) {
  Reduction reduce = known_reduction(w, I, (ReduceOp)I->mod[0], REDUCED[I->mod[1]]);
  return reduce ? shared_to_shared(w, I, m, reduce) : DONE;
}

static int exec_bulk_prefetch(Warp *w, const Insn *I, Mask m) {
  uint64_t from[32];
  addresses_of(w, I, &I->op[0], m, from);
  const uint32_t *bytes = SRC32(1);
  read_policy(w, I, &I->op[2], m);
  FOR_SET(l, m) if (linear_size(w, I, bytes[l]))
    (void)global_pointer(w, I, from[l], bytes[l], 16, false);
  return DONE;
}

// ---- groups of bulk copies

static int exec_bulk_commit(Warp *w, const Insn *I, Mask m) {
  (void)I;
  commit_group(&copies_of(w)->bulk, (uint32_t)w->bulk_group++, m);
  w->agent_clock[AG_BULK_READ] = bulk_clock(w, AG_BULK_READ, (uint32_t)w->bulk_group);
  w->agent_clock[AG_BULK_WRITE] = bulk_clock(w, AG_BULK_WRITE, (uint32_t)w->bulk_group);
  return DONE;
}

// The lane knows that the sources of its copies up to a group have been read; other lanes do not
// yet.
static void sources_awaited(Warp *w, int lane, uint32_t group) {
  struct Copies *state = w->copies;
  for (int i = 0; i < SOURCES; i++) {
    Source *s = &state->sources[i];
    if (!s->insn || s->lane != lane || s->group > group) continue;
    lane_gets_back(w, s->insn, lane, s->offset, s->bytes);
    s->insn = NULL;
  }
}

static int exec_bulk_wait(Warp *w, const Insn *I, Mask m) {
  struct Copies *state = copies_of(w);
  bool sources_only = I->mod[0] == 1;
  uint32_t number[32] = {0}, latest = 0;
  FOR_SET(l, m) {
    number[l] = awaited(&state->bulk, l, I->op[0].imm);
    if (number[l] > latest) latest = number[l];
  }
  for (const Copy *c = state->unfinished; c; c = c->next)
    if (m >> c->lane & 1 && c->group <= number[c->lane] && !(sources_only && c->read))
      return wait_for(w, WAIT_BULK_GROUP, latest, I->op[0].imm);
  FOR_SET(l, m) if (state->bulk_waited[l] < number[l]) {
    state->bulk_waited[l] = number[l];
    sources_awaited(w, l, number[l]);
  }
  if (!latest) return DONE;
  stream_event(w, I, STEP_AWAIT, latest, sources_only, 0);
  view_add(&w->view, agent_of(w, AG_BULK_READ), bulk_clock(w, AG_BULK_READ, latest));
  if (!sources_only)
    view_add(&w->view, agent_of(w, AG_BULK_WRITE), bulk_clock(w, AG_BULK_WRITE, latest));
  return DONE;
}

// ------------------------------------------------------------------------------------ at exit

static const Insn *insn_of(const Emu *e, const Copy *c) {
  for (const AsyncOp *op = e->async_first; op; op = op->next)
    if (op->data == c) return op->insn;
  return NULL;
}

static void bulk_at_exit(Warp *w, int lane) {
  const struct Copies *state = w->copies;
  uint32_t issued = state->bulk_issued[lane];
  if (issued <= state->bulk_waited[lane]) return;
  const Insn *culprit = NULL;
  for (const Copy *c = state->unfinished; c && !culprit; c = c->next)
    if (c->lane == lane) culprit = insn_of(emu_of(w), c);
  const Insn *here = &emu_of(w)->program->code[group_of(w)->pc];
  bool committed = awaited(&state->bulk, lane, 0) >= issued;
  // Only a note, because the SM keeps a CTA's shared memory until these copies have read it.
  finding_with(w, here, culprit, CK_EXIT, SEV_NOTE,
               "lane %d exits while a bulk copy may still read shared memory: %s", lane,
               committed ? "no cp.async.bulk.wait_group awaits its group"
                         : "cp.async.bulk.commit_group is missing");
}

static bool touches(const AsyncOp *op, const Cta *cta) {
  if (op->run != run_load) return false;
  const Copy *c = op->data;
  if (c->from == cta && op->stage == 0) return true;
  for (int i = op->stage ? op->stage - 1 : 0; i < c->ntargets; i++)
    if (c->targets[i] == cta) return true;
  return false;
}

// The CTA's last warp exits: copies into (or out of) its shared memory must have ended.
static void loads_at_exit(Warp *w) {
  Emu *e = emu_of(w);
  for (AsyncOp *op = e->async_first; op;) {
    AsyncOp *next = op->next;
    if (touches(op, w->cta)) {
      finding_with(w, &e->program->code[group_of(w)->pc], op->insn, CK_EXIT, SEV_ERROR,
                   "the CTA exits while a %s that uses its shared memory is under way", op->what);
      force(op);
      next = e->async_first;
    }
    op = next;
  }
}

static void finish_stores(Warp *w, Mask lanes) {
  Emu *e = emu_of(w);
  for (AsyncOp *op = e->async_first; op;) {
    AsyncOp *next = op->next;
    if (op->warp == w && op->run == run_store && lanes >> ((Copy *)op->data)->lane & 1) {
      force(op);
      next = e->async_first;
    }
    op = next;
  }
}

static void copies_at_exit(Warp *w, Mask lanes) {
  if (w->copies) {
    FOR_SET(l, lanes) {
      bulk_at_exit(w, l);
      cp_async_at_exit(w, l);
    }
    if (w->copies->unfinished) finish_stores(w, lanes);
  }
  if (w->live == lanes && w->cta->live_warps == 1) loads_at_exit(w);
}

// --------------------------------------------------------------------------------------- forms

#define REDUCED_TYPES "(.u32|s32|u64|s64|f16|bf16|f32|f64|b32|b64)"

static const Form FORMS[] = {
    {"cp.async.bulk" TO_SHARED ".global" BYTES HINT, "a a s32 a s64?",
     exec_bulk_load, F_UNIFORM | F_EFFECT},
    {"cp.async.bulk" TO_SHARED ".global" BYTES ".multicast::cluster" HINT, "a a s32 a s32 s64?",
     exec_bulk_multicast, F_UNIFORM | F_EFFECT},
    {"cp.async.bulk.shared::cluster.shared::cta" BYTES, "a a s32 a",
     exec_bulk_between, F_UNIFORM | F_EFFECT},
    {"cp.async.bulk.global.shared::cta.bulk_group" HINT, "a a s32 s64?", exec_bulk_store,
     F_UNIFORM | F_EFFECT},
    {"cp.async.bulk.global.shared::cta.bulk_group" HINT ".cp_mask", "a a s32 s64? s32",
     exec_bulk_store_masked, F_UNIFORM | F_EFFECT},
    {"cp.async.bulk.prefetch.L2.global" HINT, "a s32 s64?", exec_bulk_prefetch, F_UNIFORM},
    {"cp.async.bulk.commit_group", "", exec_bulk_commit, 0},
    {"cp.async.bulk.wait_group{.read}", "i", exec_bulk_wait, 0},
    {"cp.reduce.async.bulk.global.shared::cta.bulk_group" HINT REDUCTIONS REDUCED_TYPES,
     "a a s32 s64?", exec_reduce_global, F_UNIFORM | F_EFFECT},
    {"cp.reduce.async.bulk.global.shared::cta.bulk_group" HINT ".add.noftz(.f16|bf16)",
     "a a s32 s64?", exec_reduce_global_noftz, F_UNIFORM | F_EFFECT},
    {"cp.reduce.async.bulk.shared::cluster.shared::cta" BYTES REDUCTIONS REDUCED_TYPES,
     "a a s32 a", exec_reduce_shared, F_UNIFORM | F_EFFECT},
    {0},
};

const Family FAMILY_BULK_COPY = {.name = "bulk_copy", .forms = FORMS, .lanes_exit = copies_at_exit};
