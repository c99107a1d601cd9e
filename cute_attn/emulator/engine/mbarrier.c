// mbarriers, and the instructions on them.
#include "barrier.h"
#include <stdio.h>

// ------------------------------------------------------------------------------------- mbarriers

#define COUNT_LIMIT ((1 << 20) - 1)  // for arrivals, and for bytes in either direction
#define PHASE_BITS 23

// The 8 bytes of an mbarrier, which an arrival returns: pending and expected arrivals, the phase,
// and a bit that is always 1.
static uint64_t packed(const Mbarrier *b) {
  uint64_t phase = b->phase & ((1u << PHASE_BITS) - 1);
  return 1ull << 63 | phase << 40 | ((uint64_t)b->expected & COUNT_LIMIT) << 20 |
         ((uint64_t)b->pending & COUNT_LIMIT);
}

static void store_packed(Cta *cta, const Mbarrier *b) {
  uint64_t v = packed(b);
  memcpy(cta->shared + b->offset, &v, 8);
}

static const char *mbarrier_name(Warp *w, const Cta *cta, uint32_t offset) {
  const char *name = address_name(cta, offset);
  return cta == w->cta ? name : text("%s of CTA rank %d", name, cta->rank);
}

static Mbarrier *known_mbarrier(Cta *cta, uint32_t offset) {
  if (offset % 8 || (uint64_t)offset + 8 > cta->shared_bytes) return NULL;
  int index = cta->mbarrier_at[offset / 8];
  return index < 0 ? NULL : &cta->mbarriers[index];
}

// The entry for an mbarrier at an offset, made at its first initialisation. Entries never move.
static Mbarrier *mbarrier_at(Cta *cta, uint32_t offset) {
  Mbarrier *b = known_mbarrier(cta, offset);
  if (b) return b;
  if (!cta->mbarriers) cta->mbarriers = calloc(cta->shared_bytes / 8 + 1, sizeof(Mbarrier));
  cta->mbarrier_at[offset / 8] = (int16_t)cta->nmbarriers;
  b = &cta->mbarriers[cta->nmbarriers++];
  *b = (Mbarrier){.offset = offset};
  b->agent = new_mbarrier_agent(cta->emu, &b->clock);
  return b;
}

// Whether all initialisations are ordered before what the warp does next.
static bool initialised_before(Warp *w, const Mbarrier *b) {
  if (w->view.vc[b->agent] < b->init_clock) return false;
  if (!b->also.vc) return true;
  uint32_t own = agent_of(w, AG_GENERIC), count = (uint32_t)emu_of(w)->agents_used;
  for (uint32_t agent = 0; agent < count; agent++)
    if (agent != own && w->view.vc[agent] < b->also.vc[agent]) return false;
  return true;
}

// Relaxed operations order the initialisation, but nothing publishes it. fence.mbarrier_init, which
// would, is no instruction of the machine: with and without it kernels are alike.
static bool initialised_unfenced(const Warp *w, const Cta *cta, const Mbarrier *b) {
  if (w->view.vc[agent_of(&cta->warps[b->init_warp], AG_FLOW)] < b->init_flow) return false;
  int warps = cta->emu->nslots * cta->emu->warps_per_cta;
  for (int i = AG_FLOW; b->also.vc && i < warps * AGENTS_PER_WARP; i += AGENTS_PER_WARP)
    if (w->view.vc[i] < b->also.vc[i]) return false;
  return true;
}

static void check_initialised(Warp *w, const Insn *I, Cta *cta, Mbarrier *b) {
  if (!ordering(cta->emu) || initialised_before(w, b)) return;
  if (initialised_unfenced(w, cta, b)) {
    finding_with(w, I, b->init_insn, CK_BARRIER, SEV_NOTE,
                 "uses %s, whose initialisation by warp %d (%s) comes before, but is published by "
                 "no fence.mbarrier_init", mbarrier_name(w, cta, b->offset), b->init_warp,
                 where(b->init_insn));
    return;
  }
  finding_with(w, I, b->init_insn, CK_BARRIER, SEV_ERROR,
               "uses %s, whose initialisation by warp %d (%s) is not ordered before: a barrier "
               "between them is missing", mbarrier_name(w, cta, b->offset), b->init_warp,
               where(b->init_insn));
}

static void check_contents(Warp *w, const Insn *I, Cta *cta, Mbarrier *b) {
  uint64_t stored;
  memcpy(&stored, cta->shared + b->offset, 8);
  if (stored == packed(b)) return;
  finding_with(w, I, b->init_insn, CK_BARRIER, SEV_ERROR,
               "the 8 bytes of %s have been overwritten since its last use",
               mbarrier_name(w, cta, b->offset));
  store_packed(cta, b);
}

static void report_missing(Warp *w, const Insn *I, Cta *cta, uint32_t offset, const Mbarrier *b) {
  const char *name = mbarrier_name(w, cta, offset);
  if (b)
    finding_with(w, I, b->init_insn, CK_BARRIER, SEV_ERROR, "uses %s after mbarrier.inval", name);
  else if (offset % 8)
    finding(w, I, CK_BARRIER, SEV_ERROR, "an mbarrier at %s: it must be aligned to 8 bytes", name);
  else if ((uint64_t)offset + 8 > cta->shared_bytes)
    finding(w, I, CK_BARRIER, SEV_ERROR, "an mbarrier at %s, outside the %u bytes of shared memory",
            name, cta->shared_bytes);
  else
    finding(w, I, CK_BARRIER, SEV_ERROR, "uses %s, where no mbarrier has been initialised", name);
}

Mbarrier *find_mbarrier(Warp *w, const Insn *I, Cta *cta, uint32_t offset) {
  if (cta != w->cta && !live_cta(cta))
    finding(w, I, CK_CLUSTER, SEV_ERROR, "uses %s, but that CTA has exited",
            mbarrier_name(w, cta, offset));
  Mbarrier *b = known_mbarrier(cta, offset);
  if (!b || !b->valid) {
    report_missing(w, I, cta, offset, b);
    return NULL;
  }
  check_initialised(w, I, cta, b);
  check_contents(w, I, cta, b);
  return b;
}

// A phase has completed that does not need the waits for the phase before: a thread that looks late
// finds both phases completed, and waits for one phase more. Waits are events of AG_FLOW.
static void check_waits(const Insn *I, Cta *cta, const Mbarrier *b) {
  for (int i = 0; i < cta->nwarps; i++) {
    Warp *v = &cta->warps[i];
    const Wait *wait = &b->waits[i];
    if (!(b->waited >> i & 1) || b->done.vc[agent_of(v, AG_FLOW)] >= wait->clock) continue;
    finding_with(v, wait->insn, I, CK_BARRIER, SEV_ERROR,
                 "waits for phase %u of %s, but phase %u ends without it: where this warp looks "
                 "later than that, it misses both phases, and waits for phase %u", wait->phase,
                 address_name(cta, b->offset), wait->phase + 1, wait->phase + 2);
  }
}

static void complete_phase(Warp *w, const Insn *I, Cta *cta, Mbarrier *b) {
  Emu *e = cta->emu;
  b->pending = b->expected;
  b->received = 0;
  b->phase++;
  b->clock++;
  if (ordering(e)) {
    join_into(e, &b->done, &b->next);
    if (!b->done.vc) b->done = view_new(e);
    view_add(&b->done, b->agent, b->clock);
    view_clear(e, &b->next);
    if (b->waited) check_waits(I, cta, b);
  }
  b->waited = 0;
  e->counters[CT_BARRIER_PHASES]++;
  trace_event(e, 3, w, I, e->time, e->time, shared_address(cta, b->offset), b->phase);
  progress(e);
}

// -- the signals of an mbarrier

static void note_signal(Warp *w, const Insn *I, Mbarrier *b) {
  int i = b->nsignals - 1;
  while (i >= 0 && (b->signals[i].insn != I || b->signals[i].cta != w->cta)) i--;
  Signal s = {.insn = I, .cta = w->cta, .rank = w->cta->rank, .phase = b->phase};
  if (i >= 0 && b->signals[i].phase == b->phase) s.warps = b->signals[i].warps;
  s.warps |= 1u << w->index;
  if (i < 0 && b->nsignals < SIGNALS) i = b->nsignals++;
  else if (i < 0) i = 0;  // drop the oldest signal
  if (i == b->nsignals - 1) {
    b->signals[i] = s;
    return;
  }
  memmove(&b->signals[i], &b->signals[i + 1], sizeof s * (size_t)(b->nsignals - 1 - i));
  b->signals[b->nsignals - 1] = s;
}

// The instruction of the latest signal from an instruction other than `I`, for findings.
static const Insn *last_signal(const Mbarrier *b, const Insn *I) {
  for (int i = b->nsignals - 1; i >= 0; i--)
    if (b->signals[i].insn != I) return b->signals[i].insn;
  return b->init_insn;
}

const char *warps_text(uint32_t warps) {
  char out[256];
  size_t n = 0;
  for (int i = 0, end; i < MAX_WARPS; i = end) {
    for (end = i + 1; end < MAX_WARPS && warps >> i & 1 && warps >> end & 1;) end++;
    if (!(warps >> i & 1) || n > sizeof out - 16) continue;
    n += (size_t)snprintf(out + n, sizeof out - n, "%s%d", n ? ", " : "", i);
    if (end > i + 1)
      n += (size_t)snprintf(out + n, sizeof out - n, "%s%d", end > i + 2 ? " to " : ", ", end - 1);
  }
  out[n] = 0;
  return text("warp%s %s", warps & (warps - 1) ? "s" : "", out);
}

// The signals of the current phase, or of earlier phases. Returns their number.
static int list_signals(FILE *out, const Cta *cta, const Mbarrier *b, bool current) {
  int n = 0;
  for (int i = 0; i < b->nsignals; i++) {
    const Signal *s = &b->signals[i];
    if ((s->phase == b->phase) != current) continue;
    fprintf(out, "%s%s", n++ ? ", " : "", warps_text(s->warps));
    if (s->cta != cta) fprintf(out, " of CTA rank %d", s->rank);
    fprintf(out, " at %s", where(s->insn));
    if (!current) fprintf(out, " (phase %u)", s->phase);
  }
  return n;
}

const char *mbarrier_history(const Cta *cta, const Mbarrier *b) {
  char buffer[1024] = "";
  FILE *out = fmemopen(buffer, sizeof buffer - 1, "w");
  if (!b->nsignals) fprintf(out, "nothing has signalled it yet");
  else {
    fprintf(out, "signalled in this phase by ");
    if (!list_signals(out, cta, b, true)) fprintf(out, "nothing");
    fprintf(out, "; last before it by ");
    if (!list_signals(out, cta, b, false)) fprintf(out, "nothing");
  }
  fclose(out);
  return text("%s", buffer);
}

// Complete the phase if no arrivals and bytes are missing; called after each change of the counts.
static void settle(Warp *w, const Insn *I, Cta *cta, Mbarrier *b) {
  if (b->pending == 0 && b->tx == 0) {
    complete_phase(w, I, cta, b);
  } else if (b->pending == 0 && b->tx < 0) {
    const Insn *other = b->expect_insn && b->expect_insn != I ? b->expect_insn : last_signal(b, I);
    finding_with(w, I, other, CK_BARRIER, SEV_ERROR,
                 "all %d arrivals of phase %u of %s are in, but %lld bytes more have been "
                 "completed than expected", b->expected, b->phase, mbarrier_name(w, cta, b->offset),
                 -(long long)b->tx);
  }
  store_packed(cta, b);
}

static void take_arrivals(Warp *w, const Insn *I, Cta *cta, Mbarrier *b, int count) {
  if (count > b->pending) {
    finding_with(w, I, last_signal(b, I), CK_BARRIER, SEV_ERROR,
                 "%d arrivals at %s, but %d of the %d of phase %u are pending (and %lld bytes): %s",
                 count, mbarrier_name(w, cta, b->offset), b->pending, b->expected, b->phase,
                 (long long)b->tx, mbarrier_history(cta, b));
    count = b->pending;
  }
  note_signal(w, I, b);
  stream_signal(w, I, cta, stream_object(0, cta->linear, b->offset), b->clock + 1);
  b->pending -= count;
  settle(w, I, cta, b);
}

static void add_bytes(Warp *w, const Insn *I, Cta *cta, Mbarrier *b, int64_t bytes) {
  b->tx += bytes;
  if (bytes >= 0) {
    b->expect_insn = I;
  } else {
    b->received -= bytes;
    note_signal(w, I, b);
  }
  if (b->tx > COUNT_LIMIT || b->tx < -COUNT_LIMIT)
    finding_with(w, I, b->init_insn, CK_BARRIER, SEV_ERROR,
                 "the transaction count of %s becomes %lld, beyond the limit of %d",
                 mbarrier_name(w, cta, b->offset), (long long)b->tx, COUNT_LIMIT);
}

void mbarrier_arrive(Warp *w, const Insn *I, Cta *cta, Mbarrier *b, int count) {
  release_into(w, &b->next);
  take_arrivals(w, I, cta, b, count);
}

void mbarrier_expect_tx(Warp *w, const Insn *I, Cta *cta, Mbarrier *b, int64_t bytes) {
  add_bytes(w, I, cta, b, bytes);
  settle(w, I, cta, b);
}

Mbarrier *signalled_mbarrier(AsyncOp *op, Cta *cta, uint32_t offset) {
  Mbarrier *b = find_mbarrier(op->warp, op->insn, cta, offset);
  if (b) op->access.agent = b->agent, op->access.clock = b->clock + 1;
  return b;
}

void mbarrier_complete_tx(Warp *w, const Insn *I, Cta *cta, Mbarrier *b, int64_t bytes,
                          const View *from) {
  Emu *e = cta->emu;
  if (ordering(e) && from) {
    if (checking(e, CK_PROXY) && from->vc[b->agent] >= b->init_clock &&
        from->pvc[b->agent] < b->init_clock)
      finding_with(w, I, b->init_insn, CK_PROXY, SEV_NOTE,
                   "signals %s through the asynchronous proxy, but neither fence.mbarrier_init nor "
                   "fence.proxy.async follows its initialisation (%s)",
                   mbarrier_name(w, cta, b->offset), where(b->init_insn));
    join_into(e, &b->next, from);
  }
  stream_signal(w, I, cta, stream_object(0, cta->linear, b->offset), b->clock + 1);
  add_bytes(w, I, cta, b, -bytes);
  settle(w, I, cta, b);
}

void mbarrier_async_arrive(Warp *w, const Insn *I, Cta *cta, Mbarrier *b, int count,
                           const View *from, uint32_t agent, Clock clock, bool generic) {
  Emu *e = cta->emu;
  if (ordering(e)) {
    join_into(e, &b->next, from);
    if (!b->next.vc) b->next = view_new(e);
    (generic ? view_add_generic : view_add)(&b->next, agent, clock);
  }
  take_arrivals(w, I, cta, b, count);
}

// A producer's last expect_tx may have no copies at all. A phase with only some of its bytes is an
// error.
static void mbarriers_at_exit(Cta *cta) {
  for (int i = 0; i < cta->nmbarriers; i++) {
    Mbarrier *b = &cta->mbarriers[i];
    if (!b->valid || b->tx == 0 || b->received == 0) continue;
    finding(&cta->warps[b->init_warp], b->init_insn, CK_BARRIER, SEV_ERROR,
            "the CTA exits while phase %u of %s has got %lld bytes, which is %lld %s than expected",
            b->phase, address_name(cta, b->offset), (long long)b->received,
            (long long)(b->tx > 0 ? b->tx : -b->tx), b->tx > 0 ? "less" : "more");
  }
}

// ------------------------------------------------------------------------------ the instructions

bool resolve_target(Warp *w, const Insn *I, uint64_t address, int space, Target *t) {
  t->cta = any_shared_target(w, address, space == SPACE_GENERIC, &t->offset);
  if (!t->cta) {
    bool shared = space != SPACE_GENERIC || (address & TAG_MASK) == SHARED_TAG;
    finding(w, I, shared ? CK_CLUSTER : CK_BARRIER, SEV_ERROR,
            "address 0x%llx is not in the shared memory of the "
            "cluster", (unsigned long long)address);
    return false;
  }
  if (t->cta != w->cta && (space == SPACE_SHARED || space == SPACE_SHARED_CTA))
    finding(w, I, CK_CLUSTER, SEV_ERROR, "address 0x%llx is in CTA rank %d, but the instruction "
            "takes one of its own CTA (rank %d)", (unsigned long long)address, t->cta->rank,
            w->cta->rank);
  return true;
}

// The distinct targets of operand k, in the order of their first lanes.
static int targets_of(Warp *w, const Insn *I, int k, Mask m, int space, Target targets[32]) {
  uint64_t addresses[32];
  addresses_of(w, I, &I->op[k], m, addresses);
  int count = 0;
  for (Mask rest = m; rest;) {
    uint64_t address = addresses[__builtin_ctz(rest)];
    Target *t = &targets[count];
    t->lanes = 0;
    FOR_SET(l, rest) t->lanes |= addresses[l] == address ? 1u << l : 0;
    rest &= ~t->lanes;
    if (resolve_target(w, I, address, space, t)) count++;
  }
  return count;
}

static bool someone_waits(const Cta *cta, uint32_t offset) {
  for (int i = 0; i < cta->nwarps; i++) {
    const Warp *v = &cta->warps[i];
    for (int g = 0; g < v->ngroups && !v->exited; g++)
      if (v->groups[g].wait == WAIT_MBARRIER &&
          v->groups[g].wait_object == shared_address(cta, offset))
        return true;
  }
  return false;
}

static void check_reuse(Warp *w, const Insn *I, Cta *cta, const Mbarrier *b) {
  const char *name = mbarrier_name(w, cta, b->offset);
  if (someone_waits(cta, b->offset))
    finding_with(w, I, b->init_insn, CK_BARRIER, SEV_ERROR, "%s is in use: threads wait for it",
                 name);
  else if (b->pending != b->expected || b->tx)
    finding_with(w, I, b->init_insn, CK_BARRIER, SEV_ERROR,
                 "%s is in use: %d of %d arrivals and %lld bytes are pending in phase %u", name,
                 b->pending, b->expected, (long long)b->tx, b->phase);
  else
    finding_with(w, I, b->init_insn, CK_BARRIER, SEV_NOTE,
                 "%s is initialised again without mbarrier.inval", name);
}

// Whether threads initialise an unused mbarrier at one place of the program, to one count. Which of
// them is last does not matter.
static bool again_the_same(const Warp *w, const Insn *I, const Cta *cta, const Mbarrier *b,
                           uint32_t count) {
  bool unused = b->clock == b->init_clock && b->pending == b->expected && !b->tx && !b->nsignals;
  bool unordered = b->init_warp == w->index ? b->init_epoch == w->sync_epoch
                   : !ordering(cta->emu) || w->view.vc[b->agent] < b->init_clock;
  return b->valid && b->init_insn == I && b->expected == (int32_t)count && unused && unordered &&
         !someone_waits(cta, b->offset);
}

static void initialise(Warp *w, const Insn *I, Cta *cta, uint32_t offset, uint32_t count) {
  if (count == 0 || count > COUNT_LIMIT)
    finding(w, I, CK_BARRIER, SEV_ERROR, "%s is initialised with a count of %u: it must be 1 to %d",
            address_name(cta, offset), count, COUNT_LIMIT);
  if (!shared_pointer(w, I, cta, offset, 8, 8)) return;
  Mbarrier *b = mbarrier_at(cta, offset);
  if (again_the_same(w, I, cta, b, count)) {
    if (!b->also.vc) b->also = view_new(cta->emu);
    if (ordering(cta->emu)) {
      view_add(&b->also, agent_of(w, AG_GENERIC), w->agent_clock[AG_GENERIC]);
      view_add(&b->also, agent_of(w, AG_FLOW), flow_event(w));
    }
    if (!cta->emu->noted_inits)
      finding(w, I, CK_BARRIER, SEV_NOTE, "several threads initialise %s, to the same count: one "
              "thread should. Further mbarriers like it are not reported",
              address_name(cta, offset));
    cta->emu->noted_inits = true;
    return;
  }
  if (b->valid) check_reuse(w, I, cta, b);
  view_clear(cta->emu, &b->also);
  Access a = access_of(w, I, "mbarrier.init");
  shared_write(&a, cta, offset, 8);
  b->valid = true;
  b->expected = b->pending = (int32_t)(count & COUNT_LIMIT);
  b->tx = b->received = 0;
  b->phase = 0;
  b->init_clock = ++b->clock;
  b->init_insn = I;
  b->init_warp = w->index;
  b->init_epoch = w->sync_epoch;
  b->init_flow = flow_event(w);
  b->nsignals = 0;
  b->waited = 0;
  memset(b->waits, 0, sizeof b->waits);
  b->expect_insn = NULL;
  view_clear(cta->emu, &b->next);
  view_clear(cta->emu, &b->done);
  // The asynchronous proxy sees the initialisation only after a fence.
  if (ordering(cta->emu)) w->view.vc[b->agent] = b->clock;
  store_packed(cta, b);
  progress(cta->emu);
}

static int exec_mbarrier_init(Warp *w, const Insn *I, Mask m) {
  Target targets[32];
  int n = targets_of(w, I, 0, m, I->mod[0], targets);
  const uint32_t *count = SRC32(1);
  for (int i = 0; i < n; i++)
    FOR_SET(l, targets[i].lanes) initialise(w, I, targets[i].cta, targets[i].offset, count[l]);
  return DONE;
}

static int exec_mbarrier_inval(Warp *w, const Insn *I, Mask m) {
  Target targets[32];
  int n = targets_of(w, I, 0, m, I->mod[0], targets);
  for (int i = 0; i < n; i++) {
    Cta *cta = targets[i].cta;
    Mbarrier *b = find_mbarrier(w, I, cta, targets[i].offset);
    if (!b) continue;
    if (someone_waits(cta, b->offset))
      finding_with(w, I, b->init_insn, CK_BARRIER, SEV_ERROR,
                   "%s is invalidated while threads wait for it",
                   mbarrier_name(w, cta, b->offset));
    Access a = access_of(w, I, "mbarrier.inval");
    shared_write(&a, cta, b->offset, 8);
    b->valid = false;
  }
  return DONE;
}

enum { ARRIVE_PLAIN, ARRIVE_EXPECT_TX, ARRIVE_NO_COMPLETE };

static int arrival_count(Warp *w, const Insn *I, Cta *cta, const Mbarrier *b, uint32_t count) {
  if (count && count <= COUNT_LIMIT) return (int)count;
  finding(w, I, CK_BARRIER, SEV_ERROR, "arrives at %s with a count of %u: it must be 1 to %d",
          mbarrier_name(w, cta, b->offset), count, COUNT_LIMIT);
  return count ? COUNT_LIMIT : 0;
}

static void drop_expected(Warp *w, const Insn *I, Cta *cta, Mbarrier *b, int count) {
  if (count > b->expected) {
    finding_with(w, I, b->init_insn, CK_BARRIER, SEV_ERROR,
                 "drops %d arrivals of %s, which expects only %d", count,
                 mbarrier_name(w, cta, b->offset), b->expected);
    count = b->expected;
  }
  b->expected -= count;
}

// One thread's arrival. Returns the state before the arrival.
static uint64_t arrive_once(Warp *w, const Insn *I, Target *t, Mbarrier *b, uint32_t operand,
                            bool drop) {
  int kind = I->mod[0];
  uint64_t before = packed(b);
  int count = kind == ARRIVE_EXPECT_TX ? 1 : arrival_count(w, I, t->cta, b, operand);
  if (kind == ARRIVE_EXPECT_TX) add_bytes(w, I, t->cta, b, (int32_t)operand);
  if (kind == ARRIVE_NO_COMPLETE && count >= b->pending && b->tx == 0)
    finding_with(w, I, b->init_insn, CK_BARRIER, SEV_ERROR,
                 "arrives at %s with .noComplete, but completes phase %u",
                 mbarrier_name(w, t->cta, b->offset), b->phase);
  if (drop) drop_expected(w, I, t->cta, b, count);
  take_arrivals(w, I, t->cta, b, count);
  return before;
}

static int arrive(Warp *w, const Insn *I, Mask m, bool drop) {
  bool relaxed = I->mod[1] == 2;
  Target targets[32];
  int n = targets_of(w, I, 1, m, I->mod[3], targets);
  uint32_t ones[32];
  FOR_LANES(l) ones[l] = 1;
  const uint32_t *operand = I->op[2].kind == K_NONE ? ones : SRC32(2);
  uint64_t states[32] = {0};
  for (int i = 0; i < n; i++) {
    Target *t = &targets[i];
    Mbarrier *b = find_mbarrier(w, I, t->cta, t->offset);
    if (!b) continue;
    Clock phase = b->phase - 1;
    FOR_SET(l, t->lanes) {
      if (b->phase != phase) {  // release once per phase in which lanes arrive
        if (relaxed) relaxed_release_into(w, &b->next);
        else release_into(w, &b->next);
        phase = b->phase;
      }
      states[l] = arrive_once(w, I, t, b, operand[l], drop);
    }
  }
  PUT64(0, states);
  progress(emu_of(w));
  return DONE;
}
static int exec_mbarrier_arrive(Warp *w, const Insn *I, Mask m) { return arrive(w, I, m, false); }
static int exec_mbarrier_drop(Warp *w, const Insn *I, Mask m) { return arrive(w, I, m, true); }

static int change_bytes(Warp *w, const Insn *I, Mask m, int sign) {
  Target targets[32];
  int n = targets_of(w, I, 0, m, I->mod[2], targets);
  const uint32_t *bytes = SRC32(1);
  for (int i = 0; i < n; i++) {
    Mbarrier *b = find_mbarrier(w, I, targets[i].cta, targets[i].offset);
    if (!b) continue;
    if (sign < 0) relaxed_release_into(w, &b->next);
    FOR_SET(l, targets[i].lanes)
      mbarrier_expect_tx(w, I, targets[i].cta, b, sign * (int64_t)(int32_t)bytes[l]);
  }
  progress(emu_of(w));
  return DONE;
}
static int exec_mbarrier_expect_tx(Warp *w, const Insn *I, Mask m) {
  return change_bytes(w, I, m, 1);
}
static int exec_mbarrier_complete_tx(Warp *w, const Insn *I, Mask m) {
  return change_bytes(w, I, m, -1);
}

static int exec_mbarrier_pending_count(Warp *w, const Insn *I, Mask m) {
  const uint64_t *state = SRC64(1);
  uint32_t v[32];
  FOR_LANES(l) v[l] = (uint32_t)state[l] & COUNT_LIMIT;
  PUT32(0, v);
  return DONE;
}

// Whether the phase with this parity, the current or the previous phase, has completed.
static bool parity_complete(Warp *w, const Insn *I, const Mbarrier *b, uint32_t parity) {
  if (parity > 1)
    finding(w, I, CK_BARRIER, SEV_ERROR, "the phase's parity must be 0 or 1: it is %u", parity);
  return (b->phase & 1) != (parity & 1);
}

static bool state_complete(Warp *w, const Insn *I, Cta *cta, const Mbarrier *b, uint64_t state) {
  const uint32_t mask = (1u << PHASE_BITS) - 1;
  uint32_t behind = (b->phase - (uint32_t)(state >> 40)) & mask;
  if (!(state >> 63) || behind > 1)
    finding_with(w, I, b->init_insn, CK_BARRIER, SEV_ERROR,
                 "state 0x%llx is not of the current phase of %s (%u) or the one before",
                 (unsigned long long)state, mbarrier_name(w, cta, b->offset), b->phase);
  return behind != 0;
}

typedef struct { bool parity, blocks, relaxed; } WaitForm;

// Lanes of a target whose phase has completed. Missing barriers never complete.
static Mask complete_lanes(Warp *w, const Insn *I, Mask m, const Target *t, Mbarrier *b,
                           bool parity) {
  Mask done = 0;
  if (parity) {
    const uint32_t *v = SRC32(2);
    FOR_SET(l, t->lanes) done |= parity_complete(w, I, b, v[l]) ? 1u << l : 0;
  } else {
    const uint64_t *v = SRC64(2);
    FOR_SET(l, t->lanes) done |= state_complete(w, I, t->cta, b, v[l]) ? 1u << l : 0;
  }
  return done;
}

// A thread that waits by parity and misses a whole phase would wait forever.
static bool missed_a_phase(Warp *w, const Insn *I, const Target *t, const Mbarrier *b) {
  Clock since = b->phase - (Clock)group_of(w)->note[1];
  if (since < 2) return false;
  finding_with(w, I, last_signal(b, I), CK_BARRIER, SEV_ERROR,
               "%u more phases of %s have completed while this thread waited for one of them: "
               "nothing made them wait for it; %s", since, mbarrier_name(w, t->cta, b->offset),
               mbarrier_history(t->cta, b));
  return true;
}

static void note_wait(Warp *w, const Insn *I, Mbarrier *b) {
  b->waited |= 1u << w->index;
  b->waits[w->index] = (Wait){flow_event(w), b->phase - 1, I};
}

// A try_wait may fail at any time. In the emulator a try_wait fails rarely, and never under the
// fair schedule.
static bool gives_up(Warp *w) {
  Group *g = group_of(w);
  return g->timed_out || (g->step == 0 && emu_of(w)->schedule && emu_random(emu_of(w), 8) == 0);
}

static int block_on(Warp *w, const Insn *I, Mask m, const Target *t, const Mbarrier *b,
                    bool parity) {
  Group *g = group_of(w);
  if (g->step == 0) {
    g->step = 1;
    g->note[0] = shared_address(t->cta, t->offset);
    g->note[1] = b ? b->phase : 0;
  }
  int lane = __builtin_ctz(t->lanes);
  uint64_t detail = parity ? SRC32(2)[lane] & 1 : SRC64(2)[lane] >> 40 & 1;
  g->timed_wait = true;
  return wait_for(w, WAIT_MBARRIER, g->note[0], detail);
}

static int mbarrier_wait(Warp *w, const Insn *I, Mask m, WaitForm form) {
  Group *g = group_of(w);
  Target targets[32];
  int n = targets_of(w, I, 1, m, I->mod[2], targets);
  Mask done = m;  // includes lanes with invalid addresses, which would wait forever
  for (int i = 0; i < n; i++) done &= ~targets[i].lanes;
  Mbarrier *first = NULL;
  for (int i = 0; i < n; i++) {
    Target *t = &targets[i];
    Mbarrier *b = g->step ? known_mbarrier(t->cta, t->offset)
                          : find_mbarrier(w, I, t->cta, t->offset);
    if (b && !b->valid) b = NULL;
    if (i == 0) first = b;
    if (!b) continue;
    Mask ready = complete_lanes(w, I, m, t, b, form.parity);
    bool missed = form.parity && n == 1 && g->step && missed_a_phase(w, I, t, b);
    if (missed) ready = t->lanes;
    else if (ready && t->cta == w->cta) note_wait(w, I, b);
    if (ready && form.relaxed) relaxed_acquire_from(w, &b->done);
    else if (ready) acquire_from(w, &b->done);
    done |= ready;
  }
  if (form.blocks && !done && !gives_up(w))
    return block_on(w, I, m, &targets[0], first, form.parity);
  if (first)
    stream_event(w, I, done ? STEP_WAIT : STEP_POLL,
                 stream_object(0, targets[0].cta->linear, first->offset), first->clock, 0);
  PUTP(0, done);
  return DONE;
}

#define MBARRIER_WAIT(name, parity, blocks) \
  static int exec_##name(Warp *w, const Insn *I, Mask m) { \
    return mbarrier_wait(w, I, m, (WaitForm){parity, blocks, I->mod[0] == 2}); \
  }
MBARRIER_WAIT(test_wait, false, false)
MBARRIER_WAIT(test_wait_parity, true, false)
MBARRIER_WAIT(try_wait, false, true)
MBARRIER_WAIT(try_wait_parity, true, true)

// --------------------------------------------------------------------------------------- forms

#define SEM_SCOPE(sem) "{" sem "}{.cta|.cluster}"
#define ARRIVE_MODIFIERS "{.expect_tx|.noComplete}" SEM_SCOPE(".release|.relaxed") SHARED_ANY ".b64"
#define WAIT_MODIFIERS SEM_SCOPE(".acquire|.relaxed") SHARED_CTA ".b64"
#define TX_MODIFIERS SEM_SCOPE(".relaxed") SHARED_ANY ".b64"

static void free_mbarriers(Cta *c) {
  for (int i = 0; i < c->nmbarriers; i++) {
    view_free(&c->mbarriers[i].next);
    view_free(&c->mbarriers[i].done);
    view_free(&c->mbarriers[i].also);
    free_mbarrier_agent(c->emu, c->mbarriers[i].agent, c->mbarriers[i].clock);
  }
  free(c->mbarriers);
}

static const Form FORMS[] = {
    {"mbarrier.init" SHARED_CTA ".b64", "a s32", exec_mbarrier_init, F_EFFECT},
    {"mbarrier.inval" SHARED_CTA ".b64", "a", exec_mbarrier_inval, F_EFFECT},
    {"mbarrier.arrive" ARRIVE_MODIFIERS, "d64 a s32?", exec_mbarrier_arrive, F_EFFECT},
    {"mbarrier.arrive_drop" ARRIVE_MODIFIERS, "d64 a s32?", exec_mbarrier_drop, F_EFFECT},
    {"mbarrier.expect_tx" TX_MODIFIERS, "a s32", exec_mbarrier_expect_tx, F_EFFECT},
    {"mbarrier.complete_tx" TX_MODIFIERS, "a s32", exec_mbarrier_complete_tx, F_EFFECT},
    {"mbarrier.pending_count.b64", "d32 s64", exec_mbarrier_pending_count, 0},
    {"mbarrier.test_wait" WAIT_MODIFIERS, "dp a s64", exec_test_wait, F_YIELD},
    {"mbarrier.test_wait.parity" WAIT_MODIFIERS, "dp a s32", exec_test_wait_parity, F_YIELD},
    {"mbarrier.try_wait" WAIT_MODIFIERS, "dp a s64 s32?", exec_try_wait, 0},
    {"mbarrier.try_wait.parity" WAIT_MODIFIERS, "dp a s32 s32?", exec_try_wait_parity, 0},
    {0},
};

const Family FAMILY_MBARRIER = {.name = "mbarrier", .forms = FORMS,
    .cta_ends = mbarriers_at_exit, .cta_freed = free_mbarriers};
