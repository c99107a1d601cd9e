// cp.async and its groups.
#include "copy.h"

static Clock cp_clock(const Warp *w, uint32_t number) {
  return w->agent_birth[AG_CP_ASYNC] + number;
}
typedef struct {
  Cta *cta;
  Mask lanes;
  uint32_t number;               // counts the warp's cp.async instructions
  uint32_t size;                 // bytes that each lane copies
  uint32_t to[32], taken[32];    // taken: bytes read; zeros follow
  uint64_t from[32];
  uint8_t bytes[32 * 16];
} CpAsync;

// The run of lanes from `l` on whose copies are adjacent in memory.
static int global_run(const CpAsync *c, int l) {
  int end = l + 1;
  while (end < 32 && c->lanes >> end & 1 && c->taken[end - 1] == c->size &&
         c->taken[end] == c->size && c->from[end] == c->from[end - 1] + c->size) end++;
  return end;
}
static int shared_run(const CpAsync *c, int l) {
  int end = l + 1;
  while (end < 32 && c->lanes >> end & 1 && c->to[end] == c->to[end - 1] + c->size) end++;
  return end;
}

static void cp_async_read(AsyncOp *op, CpAsync *c) {
  for (int l = 0, end; l < 32; l = end) {
    end = l + 1;
    if (!(c->lanes >> l & 1) || !c->taken[l]) continue;
    end = global_run(c, l);
    uint32_t bytes = (uint32_t)(end - l - 1) * c->size + c->taken[l];
    const uint8_t *p = global_pointer(op->warp, op->insn, c->from[l], bytes, c->size, false);
    if (!p) continue;
    global_read(&op->access, p, bytes);
    memcpy(c->bytes + (size_t)l * c->size, p, bytes);
    op->emu->counters[CT_CP_ASYNC] += bytes;
  }
}

static void cp_async_write(AsyncOp *op, CpAsync *c) {
  for (int l = 0, end; l < 32; l = end) {
    end = l + 1;
    if (!(c->lanes >> l & 1)) continue;
    end = shared_run(c, l);
    uint32_t bytes = (uint32_t)(end - l) * c->size;
    uint8_t *p = shared_pointer(op->warp, op->insn, c->cta, c->to[l], bytes, c->size);
    if (!p) continue;
    shared_write(&op->access, c->cta, c->to[l], bytes);
    memcpy(p, c->bytes + (size_t)l * c->size, bytes);
  }
  op->warp->cp_done = c->number;
}

static void run_cp_async(AsyncOp *op, int stage) {
  if (stage == 0) cp_async_read(op, op->data);
  else cp_async_write(op, op->data);
}

// Submit an operation of two stages that runs after the warp's earlier operations, at the clock of
// the warp's latest cp.async.
static int submit_in_turn(Warp *w, const Insn *I, const char *what,
                          void (*run)(AsyncOp *, int), void *data) {
  AsyncOp *op = new_async(w, I, what, AG_CP_ASYNC, cp_clock(w, (uint32_t)w->cp_issued));
  op->run = run;
  op->stages = 2;
  op->queue = queue_of(w, AG_CP_ASYNC);
  op->access.async = 0;
  op->data = data;
  submit(op);
  return DONE;
}

static int start_cp_async(Warp *w, const Insn *I, Mask m, const uint32_t *source_bytes,
                          Mask ignored) {
  if (I->nops > 4) read_policy(w, I, &I->op[4], m);
  CpAsync *c = calloc(1, sizeof *c);
  c->cta = w->cta;
  c->size = (uint32_t)I->op[2].imm;
  uint64_t to[32];
  addresses_of(w, I, &I->op[0], m, to);
  addresses_of(w, I, &I->op[1], m, c->from);
  bool cg = I->mod[0] == 2;
  if (c->size != 16 && (cg || (c->size != 4 && c->size != 8))) {
    fatal(w, I, CK_ALIGNMENT, "cp.async copies %s bytes, not %u", cg ? "16" : "4, 8 or 16",
          c->size);
    free(c);
    return DONE;
  }
  FOR_SET(l, m) {
    Cta *cta = shared_target(w, (uint32_t)to[l], &c->to[l]);
    if (cta != w->cta) {
      finding(w, I, CK_CLUSTER, SEV_ERROR,
              "cp.async writes to its own CTA's shared memory, but lane %d gives address 0x%x",
              l, (uint32_t)to[l]);
      continue;
    }
    c->lanes |= 1u << l;
    c->taken[l] = ignored >> l & 1 ? 0 : source_bytes ? source_bytes[l] : c->size;
    if (c->taken[l] > c->size) {
      finding(w, I, CK_BOUNDS, SEV_ERROR,
              "cp.async takes %u bytes of the source for a copy of %u bytes (lane %d)",
              c->taken[l], c->size, l);
      c->taken[l] = c->size;
    }
  }
  struct Copies *state = copies_of(w);
  c->number = (uint32_t)++w->cp_issued;
  w->agent_clock[AG_CP_ASYNC] = cp_clock(w, c->number);
  FOR_SET(l, m) state->cp_issued[l] = c->number;
  submit_in_turn(w, I, "cp.async", run_cp_async, c);
  uint64_t bytes = 0;
  FOR_SET(l, c->lanes) bytes += c->taken[l];
  stream_event(w, I, STEP_COPY, bytes, c->lanes ? c->from[__builtin_ctz(c->lanes)] : 0, 0);
  stream_event(w, I, STEP_ORDER, c->number, 0, 0);
  return DONE;
}

static int exec_cp_async(Warp *w, const Insn *I, Mask m) {
  const uint32_t *bytes = I->op[3].kind == K_NONE ? NULL : SRC32(3);
  return start_cp_async(w, I, m, bytes, 0);
}
static int exec_cp_async_ignore(Warp *w, const Insn *I, Mask m) {
  return start_cp_async(w, I, m, NULL, SRCP(3) & m);
}

static int exec_cp_async_commit(Warp *w, const Insn *I, Mask m) {
  (void)I;
  commit_group(&copies_of(w)->cp, (uint32_t)w->cp_issued, m);
  return DONE;
}

static int wait_cp_async(Warp *w, Mask m, const uint32_t number[32], uint64_t pending) {
  uint32_t latest = 0;
  FOR_SET(l, m) latest = number[l] > latest ? number[l] : latest;
  if (w->cp_done < latest) return wait_for(w, WAIT_CP_ASYNC, latest, pending);
  struct Copies *state = copies_of(w);
  FOR_SET(l, m) if (state->cp_waited[l] < number[l]) state->cp_waited[l] = number[l];
  if (latest) view_add_generic(&w->view, agent_of(w, AG_CP_ASYNC), cp_clock(w, latest));
  if (latest) stream_event(w, &emu_of(w)->program->code[group_of(w)->pc], STEP_AWAIT, latest, 0, 0);
  return DONE;
}

static int exec_cp_async_wait_group(Warp *w, const Insn *I, Mask m) {
  uint32_t number[32] = {0};
  FOR_SET(l, m) number[l] = awaited(&copies_of(w)->cp, l, I->op[0].imm);
  return wait_cp_async(w, m, number, I->op[0].imm);
}
static int exec_cp_async_wait_all(Warp *w, const Insn *I, Mask m) {
  (void)I;
  return wait_cp_async(w, m, copies_of(w)->cp_issued, 0);
}

// cp.async.mbarrier.arrive: lanes that name one mbarrier arrive together.
typedef struct { int count; Clock clock; struct { Cta *cta; uint32_t offset; int lanes; } at[32]; }
    LateArrival;

static void run_late_arrival(AsyncOp *op, int stage) {
  if (stage == 0) return;  // arrive in stage 1, after the writes of earlier copies
  LateArrival *a = op->data;
  for (int i = 0; i < a->count; i++) {
    Mbarrier *b = find_mbarrier(op->warp, op->insn, a->at[i].cta, a->at[i].offset);
    if (b)
      mbarrier_async_arrive(op->warp, op->insn, a->at[i].cta, b, a->at[i].lanes, &op->view,
                            op->access.agent, op->access.clock, true);
  }
}

static int exec_cp_async_arrive(Warp *w, const Insn *I, Mask m) {
  bool counted = I->mod[0] == 1;  // .noinc: the barrier's count includes these arrivals
  uint64_t address[32];
  addresses_of(w, I, &I->op[0], m, address);
  struct Copies *state = copies_of(w);
  LateArrival *a = calloc(1, sizeof *a);
  FOR_SET(l, m) {
    uint32_t offset;
    state->cp_waited[l] = state->cp_issued[l];
    Cta *cta = shared_target(w, (uint32_t)address[l], &offset);
    Mbarrier *b = cta ? find_mbarrier(w, I, cta, offset) : NULL;
    if (!b) continue;
    if (!counted) {  // the copies' later arrival is added to the pending count
      b->pending++;
      mbarrier_expect_tx(w, I, cta, b, 0);
    }
    int i = 0;
    while (i < a->count && (a->at[i].cta != cta || a->at[i].offset != offset)) i++;
    if (i == a->count) a->at[a->count++].cta = cta;
    a->at[i].offset = offset;
    a->at[i].lanes++;
  }
  return submit_in_turn(w, I, "cp.async.mbarrier.arrive", run_late_arrival, a);
}

// ------------------------------------------------------------------------------------ at exit

void cp_async_at_exit(Warp *w, int lane) {
  const struct Copies *state = w->copies;
  if (state->cp_issued[lane] <= state->cp_waited[lane]) return;
  finding(w, &emu_of(w)->program->code[group_of(w)->pc], CK_EXIT, SEV_NOTE,
          "lane %d exits without having waited for its last cp.async", lane);
}

// --------------------------------------------------------------------------------------- forms

#define CP_ASYNC "cp.async(.ca|cg)(.shared|shared::cta).global"
#define L2_SIZE "{.L2::64B|L2::128B|L2::256B}"

static const Form FORMS[] = {
    {CP_ASYNC L2_SIZE, "a a i s32?", exec_cp_async, 0},
    {CP_ASYNC L2_SIZE, "a a i sp", exec_cp_async_ignore, 0},
    {CP_ASYNC ".L2::cache_hint" L2_SIZE, "a a i s32? s64", exec_cp_async, 0},
    {CP_ASYNC ".L2::cache_hint" L2_SIZE, "a a i sp s64", exec_cp_async_ignore, 0},
    {"cp.async.commit_group", "", exec_cp_async_commit, 0},
    {"cp.async.wait_group", "i", exec_cp_async_wait_group, 0},
    {"cp.async.wait_all", "", exec_cp_async_wait_all, 0},
    {"cp.async.mbarrier.arrive{.noinc}{.shared|shared::cta}.b64", "a",
     exec_cp_async_arrive, F_EFFECT},
    {0},
};

const Family FAMILY_CP_ASYNC = {.name = "cp_async", .forms = FORMS};
