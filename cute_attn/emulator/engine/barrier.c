// Barriers: named barriers of a CTA, the cluster's barrier, mbarriers; fences; setmaxnreg; the
// address arithmetic of clusters; cluster launch control.
#include "engine.h"
#include <stdio.h>

// Happens-before is only kept up to date when something looks at it.
static bool ordering(const Emu *e) {
  return (e->checks & (1ull << CK_RACE | 1ull << CK_PROXY | 1ull << CK_TCGEN05)) != 0;
}

static void join_into(Emu *e, View *into, const View *from) {
  if (!from || !from->vc) return;
  if (!into->vc) *into = view_new(e);
  view_join(e, into, from);
}

static void release_into(Warp *w, View *into) {
  if (ordering(emu_of(w))) view_release(w, into);
}

// A relaxed arrival publishes what an earlier fence has released, and no more.
static void relaxed_release_into(Warp *w, View *into) {
  if (ordering(emu_of(w))) join_into(emu_of(w), into, &w->fence_release);
}

static void acquire_from(Warp *w, const View *from) {
  w->sync_epoch++;
  if (ordering(emu_of(w))) view_acquire(w, from);
}

// A relaxed wait acquires nothing until a fence follows.
static void relaxed_acquire_from(Warp *w, const View *from) {
  if (ordering(emu_of(w))) join_into(emu_of(w), &w->fence_acquire, from);
}

// The value of an operand that has to be the same in all lanes.
static uint32_t uniform(Warp *w, const Insn *I, int k, Mask m, const char *name) {
  const uint32_t *v = SRC32(k);
  int first = __builtin_ctz(m);
  FOR_SET(l, m) {
    if (v[l] == v[first]) continue;
    finding(w, I, CK_SYNC, SEV_ERROR, "%s must be the same in all lanes: lane %d has %u, lane %d "
            "has %u", name, first, v[first], l, v[l]);
    break;
  }
  return v[first];
}

// ------------------------------------------------------------------------------- named barriers
//
// A warp arrives once all of its live lanes have come; the counts are in units of whole warps. It
// may do so more than once in a generation (bar.arrive, then bar.sync): arrivals are only counted.
// The warp that completes a generation hands the result to the groups that wait for it, which
// carry the barrier and the generation in note[0].

enum { BAR_SYNC, BAR_ARRIVE, BAR_POPC, BAR_AND, BAR_OR };
enum { BAR_GATHERING = 1, BAR_WAITING, BAR_COMPLETE };  // Group.step

static uint64_t bar_ticket(int id, uint64_t generation) {
  return 0xBA52ull << 48 | (uint64_t)id << 40 | (generation & 0xFFFFFFFFFFull);
}

static bool all_warps_there(const Cta *cta, const NamedBarrier *b) {
  if (!b->all) return false;
  for (int i = 0; i < cta->nwarps; i++)
    if (!cta->warps[i].exited && !(b->warps >> i & 1)) return false;
  return true;
}

static void complete_named(Cta *cta, int id) {
  NamedBarrier *b = &cta->bars[id];
  uint64_t ticket = bar_ticket(id, b->generation);
  uint64_t result = (uint64_t)b->true_threads << 32 | (uint32_t)b->threads;
  for (int i = 0; i < cta->nwarps; i++) {
    Warp *v = &cta->warps[i];
    for (int g = 0; g < v->ngroups && !v->exited; g++) {
      Group *group = &v->groups[g];
      if (group->step != BAR_WAITING || group->note[0] != ticket) continue;
      if (group->note[1] == BAR_ARRIVE) continue;  // learns nothing of the others
      group->step = BAR_COMPLETE;
      group->note[1] = result;
      acquire_from(v, &b->next);
    }
  }
  b->generation++;
  b->arrived = b->threads = b->true_threads = 0;
  b->warps_before = b->warps;
  b->warps = 0;
  view_clear(cta->emu, &b->next);
  cta->emu->counters[CT_BARRIER_PHASES]++;
  progress(cta->emu);
}

static void try_complete_named(Cta *cta, int id) {
  NamedBarrier *b = &cta->bars[id];
  if (b->arrived && (b->arrived >= b->expected || all_warps_there(cta, b))) complete_named(cta, id);
}

// The thread count in operand k; *all_live: none is given, it is all threads that have not exited.
static int thread_count(Warp *w, const Insn *I, int k, Mask m, int kind, bool *all_live) {
  int all = 32 * w->cta->nwarps;
  uint32_t count = 0;
  *all_live = k < 0 || I->op[k].kind == K_NONE;
  if (!*all_live) count = uniform(w, I, k, m, "the thread count");
  *all_live |= count == 0 && kind != BAR_ARRIVE;
  if (*all_live) return all;
  if (count == 0 || count % 32)
    finding(w, I, CK_BARRIER, SEV_ERROR,
            "thread count %u: it must be a positive multiple of 32", count);
  return count ? (int)((count + 31) / 32 * 32) : 32;
}

// Check an arrival against those before it in this generation.
static void check_arrival(Warp *w, const Insn *I, int id, int expected, bool all, bool red) {
  NamedBarrier *b = &w->cta->bars[id];
  if (!b->arrived) {
    b->expected = expected;
    b->all = all;
    b->first = I;
    b->red = red;
    return;
  }
  if (b->expected != expected)
    finding_with(w, I, b->first, CK_BARRIER, SEV_ERROR,
                 "thread count %d at named barrier %d, but the first to arrive gave %d (%s)",
                 expected, id, b->expected, where(b->first));
  if (b->red != red)
    finding_with(w, I, b->first, CK_BARRIER, SEV_ERROR,
                 "named barrier %d: .red and .sync or .arrive are mixed in one generation (%s)", id,
                 where(b->first));
}

// All live lanes of the warp have come: it arrives. Groups of its lanes that gathered go on.
static void warp_arrives(Warp *w, const Insn *I, int id, int expected, bool all, bool red) {
  Cta *cta = w->cta;
  NamedBarrier *b = &cta->bars[id];
  check_arrival(w, I, id, expected, all, red);
  uint64_t gathering = bar_ticket(id, 0), ticket = bar_ticket(id, b->generation);
  for (int g = 0; g < w->ngroups; g++) {
    Group *group = &w->groups[g];
    if (group->step != BAR_GATHERING || group->note[0] != gathering) continue;
    group->step = BAR_WAITING;
    group->note[0] = ticket;
  }
  b->gathered[w->index] = 0;
  b->warps |= 1u << w->index;
  b->arrived += 32;
  release_into(w, &b->next);
  progress(cta->emu);
  try_complete_named(cta, id);
}

// Lanes whose guard is false do not stop at an unaligned barrier.
static void leave_behind(Warp *w, Mask m) {
  Group *g = group_of(w);
  if (g->mask == m) return;
  w->groups[w->ngroups++] = (Group){.mask = g->mask & ~m, .pc = g->pc + 1};
  g->mask = m;
}

typedef struct { int kind, id, count, predicate; } BarrierOperands;  // indices; -1: none

static void deliver(Warp *w, const Insn *I, Mask m, int kind) {
  uint64_t result = group_of(w)->note[1];
  uint32_t yes = (uint32_t)(result >> 32), threads = (uint32_t)result, v[32];
  if (kind == BAR_POPC) {
    FOR_LANES(l) v[l] = yes;
    PUT32(0, v);
  } else if (kind == BAR_AND) {
    PUTP(0, yes == threads ? ALL_LANES : 0);
  } else if (kind == BAR_OR) {
    PUTP(0, yes ? ALL_LANES : 0);
  }
}

static int named_barrier(Warp *w, const Insn *I, Mask m, BarrierOperands operands) {
  Group *g = group_of(w);
  bool red = operands.kind >= BAR_POPC;
  uint32_t id = uniform(w, I, operands.id, m, "the barrier's number");
  if (id >= MAX_NAMED_BARRIERS) {
    finding(w, I, CK_BARRIER, SEV_ERROR, "named barrier %u: the numbers are 0 to 15", id);
    return DONE;
  }
  bool all;
  int expected = thread_count(w, I, operands.count, m, operands.kind, &all);
  NamedBarrier *b = &w->cta->bars[id];
  if (g->step == 0) {
    if (!(I->flags & F_ALIGNED)) leave_behind(w, m);
    b->gathered[w->index] |= m;
    if (red) {
      b->threads += __builtin_popcount(m);
      b->true_threads += __builtin_popcount(SRCP(operands.predicate) & m);
    }
    g->step = BAR_GATHERING;
    g->note[0] = bar_ticket((int)id, 0);
    g->note[1] = (uint64_t)operands.kind;
  }
  if (g->step == BAR_GATHERING) {
    Mask missing = w->live & ~b->gathered[w->index];
    if (missing && !(I->flags & F_ALIGNED)) return wait_for(w, WAIT_CONVERGENCE, missing, 0);
    warp_arrives(w, I, (int)id, expected, all, red);
  }
  if (operands.kind == BAR_ARRIVE) return DONE;
  if (g->step == BAR_WAITING) try_complete_named(w->cta, (int)id);
  if (g->step == BAR_WAITING) return wait_for(w, WAIT_NAMED_BARRIER, id, b->generation);
  deliver(w, I, m, operands.kind);
  return DONE;
}

#define BARRIER(name, ...) \
  static int exec_##name(Warp *w, const Insn *I, Mask m) { \
    return named_barrier(w, I, m, (BarrierOperands){__VA_ARGS__}); \
  }
BARRIER(bar_sync, BAR_SYNC, 0, 1, -1)
BARRIER(bar_arrive, BAR_ARRIVE, 0, 1, -1)
BARRIER(bar_popc, BAR_POPC, 1, -1, 2)
BARRIER(bar_popc_count, BAR_POPC, 1, 2, 3)
BARRIER(bar_red, I->mod[1] == 1 ? BAR_AND : BAR_OR, 1, -1, 2)
BARRIER(bar_red_count, I->mod[1] == 1 ? BAR_AND : BAR_OR, 1, 2, 3)

// ------------------------------------------------------------------------- the cluster's barrier
//
// Counts threads. Warp.cluster_arrived: lanes that have arrived in the current generation;
// Warp.cluster_unwaited: lanes that have arrived, in this one or the last, and not waited yet.

static bool cluster_complete(const Cluster *k) {
  if (!k->arrived || k->arrived < k->live_threads) return false;
  for (int c = 0; c < k->nctas; c++)
    for (int i = 0; i < k->ctas[c]->nwarps; i++) {
      const Warp *w = &k->ctas[c]->warps[i];
      if (w->live & ~w->cluster_arrived) return false;
    }
  return true;
}

static void try_complete_cluster(Cluster *k) {
  if (!cluster_complete(k)) return;
  Emu *e = k->emu;
  for (int c = 0; c < k->nctas; c++)
    for (int i = 0; i < k->ctas[c]->nwarps; i++) k->ctas[c]->warps[i].cluster_arrived = 0;
  k->arrived = 0;
  k->generation++;
  view_clear(e, &k->done);
  join_into(e, &k->done, &k->next);
  view_clear(e, &k->next);
  e->counters[CT_BARRIER_PHASES]++;
  progress(e);
}

static int exec_cluster_arrive(Warp *w, const Insn *I, Mask m) {
  Cluster *k = w->cta->cluster;
  Mask twice = m & w->cluster_unwaited;
  if (twice)
    finding(w, I, CK_CLUSTER, SEV_ERROR, "lanes 0x%08x arrive at the cluster barrier again, "
            "without barrier.cluster.wait after their last arrival", twice);
  Mask fresh = m & ~w->cluster_arrived;
  w->cluster_arrived |= fresh;
  w->cluster_unwaited |= m;
  k->arrived += __builtin_popcount(fresh);
  if (I->mod[0] == 2) relaxed_release_into(w, &k->next);
  else release_into(w, &k->next);
  progress(k->emu);
  try_complete_cluster(k);
  return DONE;
}

static int exec_cluster_wait(Warp *w, const Insn *I, Mask m) {
  Cluster *k = w->cta->cluster;
  Group *g = group_of(w);
  if (g->step == 0) {
    Mask stray = m & ~w->cluster_unwaited;
    if (stray)
      finding(w, I, CK_CLUSTER, SEV_ERROR,
              "lanes 0x%08x wait at the cluster barrier without having arrived", stray);
    if (!(I->flags & F_ALIGNED)) leave_behind(w, m);
    g->step = 1;
  }
  if (m & w->cluster_arrived) try_complete_cluster(k);
  if (m & w->cluster_arrived)
    return wait_for(w, WAIT_CLUSTER_BARRIER, k->linear, k->generation);
  w->cluster_unwaited &= ~m;
  acquire_from(w, &k->done);
  return DONE;
}

// ------------------------------------------------------------------------------------- mbarriers

#define COUNT_LIMIT ((1 << 20) - 1)  // of arrivals, and of bytes either way
#define PHASE_BITS 23

// What the 8 bytes hold, and what an arrival returns: pending and expected arrivals, the phase,
// and a bit that is always set.
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

static void check_initialised(Warp *w, const Insn *I, Cta *cta, Mbarrier *b) {
  if (!ordering(cta->emu) || w->view.vc[b->agent] >= b->init_clock) return;
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
  }
  e->counters[CT_BARRIER_PHASES]++;
  trace_event(e, 3, w, I, e->time, e->time, shared_address(cta, b->offset), b->phase);
  progress(e);
}

// -- who has signalled an mbarrier

static void note_signal(Warp *w, const Insn *I, Mbarrier *b) {
  int i = b->nsignals - 1;
  while (i >= 0 && (b->signals[i].insn != I || b->signals[i].cta != w->cta)) i--;
  Signal s = {.insn = I, .cta = w->cta, .rank = w->cta->rank, .phase = b->phase};
  if (i >= 0 && b->signals[i].phase == b->phase) s.warps = b->signals[i].warps;
  s.warps |= 1u << w->index;
  if (i < 0 && b->nsignals < SIGNALS) i = b->nsignals++;
  else if (i < 0) i = 0;  // forget the oldest
  if (i == b->nsignals - 1) {
    b->signals[i] = s;
    return;
  }
  memmove(&b->signals[i], &b->signals[i + 1], sizeof s * (size_t)(b->nsignals - 1 - i));
  b->signals[b->nsignals - 1] = s;
}

// The instruction behind the latest signal but `I` itself, for findings to refer to.
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

// Signals of the current phase, or of those before it; the number of them.
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

// After a change of the counts.
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

void mbarrier_complete_tx(Warp *w, const Insn *I, Cta *cta, Mbarrier *b, int64_t bytes,
                          const View *from) {
  Emu *e = cta->emu;
  if (ordering(e) && from) {
    if (checking(e, CK_PROXY) && from->vc[b->agent] >= b->init_clock &&
        from->pvc[b->agent] < b->init_clock)
      finding_with(w, I, b->init_insn, CK_PROXY, SEV_ERROR,
                   "signals %s through the asynchronous proxy, but neither fence.mbarrier_init nor "
                   "fence.proxy.async follows its initialisation (%s)",
                   mbarrier_name(w, cta, b->offset), where(b->init_insn));
    join_into(e, &b->next, from);
  }
  add_bytes(w, I, cta, b, -bytes);
  settle(w, I, cta, b);
}

void mbarrier_async_arrive(Warp *w, const Insn *I, Cta *cta, Mbarrier *b, int count,
                           const View *from, uint32_t agent, Clock clock) {
  Emu *e = cta->emu;
  if (ordering(e)) {
    join_into(e, &b->next, from);
    if (!b->next.vc) b->next = view_new(e);
    view_add(&b->next, agent, clock);
  }
  take_arrivals(w, I, cta, b, count);
}

// A producer may announce bytes at the end that it never sends; bytes of which some have come are
// another matter.
void mbarriers_at_exit(Cta *cta) {
  for (int i = 0; i < cta->nmbarriers; i++) {
    Mbarrier *b = &cta->mbarriers[i];
    if (!b->valid || b->tx == 0 || b->received == 0) continue;
    finding(&cta->warps[b->init_warp], b->init_insn, CK_BARRIER, SEV_ERROR,
            "the CTA exits while phase %u of %s has got %lld bytes, which is %lld %s than expected",
            b->phase, address_name(cta, b->offset), (long long)b->received,
            (long long)(b->tx > 0 ? b->tx : -b->tx), b->tx > 0 ? "less" : "more");
  }
}

// -------------------------------------------------------------------- mbarriers: the instructions

enum { SPACE_GENERIC, SPACE_SHARED, SPACE_SHARED_CTA, SPACE_SHARED_CLUSTER };
#define SHARED_CTA "{.shared|.shared::cta}"
#define SHARED_ANY "{.shared|.shared::cta|.shared::cluster}"

// Lanes of an instruction that name the same address.
typedef struct { Cta *cta; uint32_t offset; Mask lanes; } Target;

static bool resolve(Warp *w, const Insn *I, uint64_t address, int space, Target *t) {
  if (space == SPACE_GENERIC) {
    t->cta = NULL;
    if (classify(w, address, &t->cta, &t->offset) != SP_SHARED) t->cta = NULL;
  } else {
    t->cta = shared_target(w, (uint32_t)address, &t->offset);
  }
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
    if (resolve(w, I, address, space, t)) count++;
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

static void initialise(Warp *w, const Insn *I, Cta *cta, uint32_t offset, uint32_t count) {
  if (count == 0 || count > COUNT_LIMIT)
    finding(w, I, CK_BARRIER, SEV_ERROR, "%s is initialised with a count of %u: it must be 1 to %d",
            address_name(cta, offset), count, COUNT_LIMIT);
  if (!shared_pointer(w, I, cta, offset, 8, 8)) return;
  Mbarrier *b = mbarrier_at(cta, offset);
  if (b->valid) check_reuse(w, I, cta, b);
  Access a = access_of(w, I, "mbarrier.init");
  shared_write(&a, cta, offset, 8);
  b->valid = true;
  b->expected = b->pending = (int32_t)(count & COUNT_LIMIT);
  b->tx = b->received = 0;
  b->phase = 0;
  b->init_clock = ++b->clock;
  b->init_insn = I;
  b->init_warp = w->index;
  b->nsignals = 0;
  b->expect_insn = NULL;
  view_clear(cta->emu, &b->next);
  view_clear(cta->emu, &b->done);
  // The asynchronous proxy learns of it by a fence.
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

// One thread's arrival; what the thread gets is the state before it.
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
      if (b->phase != phase) {  // once for each phase that the lanes arrive in
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

// Whether the phase with this parity, the current one or the one before, has completed.
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

// A waiter by parity that sleeps through a whole phase would wait for ever.
static bool missed_a_phase(Warp *w, const Insn *I, const Target *t, const Mbarrier *b) {
  Clock since = b->phase - (Clock)group_of(w)->note[1];
  if (since < 2) return false;
  finding_with(w, I, last_signal(b, I), CK_BARRIER, SEV_ERROR,
               "%u more phases of %s have completed while this thread waited for one of them: "
               "nothing made them wait for it; %s", since, mbarrier_name(w, t->cta, b->offset),
               mbarrier_history(t->cta, b));
  return true;
}

// A waiting thread may be told "not yet" at any time: seldom, where the schedule is not fair.
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
  Mask done = m;  // also lanes whose address means nothing: they would wait for ever
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
    if (form.parity && n == 1 && g->step && missed_a_phase(w, I, t, b)) ready = t->lanes;
    if (ready && form.relaxed) relaxed_acquire_from(w, &b->done);
    else if (ready) acquire_from(w, &b->done);
    done |= ready;
  }
  if (form.blocks && !done && !gives_up(w))
    return block_on(w, I, m, &targets[0], first, form.parity);
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

// ---------------------------------------------------------------------------------------- fences

static int exec_fence(Warp *w, const Insn *I, Mask m) {
  (void)I, (void)m;
  memory_fence(w);
  return DONE;
}

static int exec_proxy_fence(Warp *w, const Insn *I, Mask m) {
  (void)I, (void)m;
  if (ordering(emu_of(w))) proxy_fence(w);
  return DONE;
}

// The one-way forms: a release or an acquire, and the ordering of the proxies with it.
static int exec_proxy_fence_release(Warp *w, const Insn *I, Mask m) {
  exec_proxy_fence(w, I, m);
  return exec_fence(w, I, m);
}
static int exec_proxy_fence_acquire(Warp *w, const Insn *I, Mask m) {
  exec_fence(w, I, m);
  return exec_proxy_fence(w, I, m);
}

// fence.mbarrier_init: of all that the thread has done, it publishes the initialisations.
static int exec_mbarrier_init_fence(Warp *w, const Insn *I, Mask m) {
  (void)I, (void)m;
  Emu *e = emu_of(w);
  if (!ordering(e)) return DONE;
  if (!w->fence_release.vc) w->fence_release = view_new(e);
  for (int i = 0; i < w->cta->nmbarriers; i++) {
    Mbarrier *b = &w->cta->mbarriers[i];
    if (!b->valid || b->init_warp != w->index) continue;
    view_add(&w->view, b->agent, b->init_clock);
    view_add(&w->fence_release, b->agent, b->init_clock);
  }
  return DONE;
}

static int exec_nothing(Warp *w, const Insn *I, Mask m) {
  (void)w, (void)I, (void)m;
  return DONE;
}

// ------------------------------------------------------------------------------------ setmaxnreg
//
// All warps of a warpgroup (four consecutive ones) should execute the same sequence. Otherwise the
// behaviour is undefined on paper; on hardware each warp gets what it asks for.

static void check_warpgroup(Warp *w, const Insn *I, int count) {
  const Cta *cta = w->cta;
  int first = w->index / 4 * 4, last = first + 4 < cta->nwarps ? first + 4 : cta->nwarps;
  for (int i = first; i < last; i++) {
    const Warp *v = &cta->warps[i];
    if (v == w) continue;
    if (v->register_changes < w->register_changes)
      finding(w, I, CK_REGISTERS, SEV_NOTE,
              "warp %d executes setmaxnreg number %d before warp %d of its warpgroup has executed "
              "number %d: all four warps must, and synchronise in between", w->index,
              w->register_changes + 1, v->index, v->register_changes + 1);
    else if (v->register_changes == w->register_changes + 1 && v->registers != count)
      finding(w, I, CK_REGISTERS, SEV_NOTE,
              "warp %d asks for %d registers, but warp %d of its warpgroup has %d: all four warps "
              "must execute the same setmaxnreg", w->index, count, v->index, v->registers);
  }
}

static bool check_registers(Warp *w, const Insn *I, int count, bool increase) {
  check_warpgroup(w, I, count);
  if (count < 24 || count > 256 || count % 8) {
    finding(w, I, CK_REGISTERS, SEV_ERROR,
            "%d registers: it must be 24 to 256, and a multiple of 8", count);
    return false;
  }
  if (increase ? count < w->registers : count > w->registers) {
    finding(w, I, CK_REGISTERS, SEV_ERROR, "%s to %d registers, but the warp has %d",
            increase ? "increases" : "decreases", count, w->registers);
    return false;
  }
  return true;
}

static int exec_setmaxnreg(Warp *w, const Insn *I, Mask m) {
  (void)m;
  Group *g = group_of(w);
  int count = (int)I->op[0].imm;
  bool increase = I->mod[0] == 1;
  if (emu_of(w)->program->keeps_registers) {
    finding(w, I, CK_REGISTERS, SEV_NOTE,
            "the assembler has left it out, as it does where it cannot tell how many registers the "
            "kernel starts with (.maxnreg, or threads with .minnctapersm): the warp keeps %d",
            w->registers);
    return DONE;
  }
  if (g->step == 0 && !check_registers(w, I, count, increase)) {
    w->register_changes++;
    return DONE;
  }
  int need = 32 * (count - w->registers);
  if (need > w->cta->register_pool) {
    g->step = 1;
    return wait_for(w, WAIT_REGISTERS, (uint64_t)need, (uint64_t)w->cta->register_pool);
  }
  w->cta->register_pool -= need;
  w->registers = count;
  w->register_changes++;
  progress(emu_of(w));
  return DONE;
}

// ------------------------------------------------------------------------- addresses in a cluster

#define RANK_MASK (0xFFull << SHARED_RANK_SHIFT)

// An address of a rank that is not there is a finding where it is used; here it is noted.
static void check_rank(Warp *w, const Insn *I, Mask m, const uint32_t *rank) {
  FOR_SET(l, m) {
    if (rank[l] < (uint32_t)w->cta->cluster->nctas) continue;
    finding(w, I, CK_CLUSTER, SEV_NOTE, "lane %d: CTA rank %u, but the cluster has %d CTAs", l,
            rank[l], w->cta->cluster->nctas);
    return;
  }
}

static uint32_t rank_bits(uint32_t rank) {
  return (rank < 0xFF ? rank : 0xFF) << SHARED_RANK_SHIFT;
}

static void check_generic_shared(Warp *w, const Insn *I, Mask m, const uint64_t *address) {
  FOR_SET(l, m) {
    if ((address[l] & TAG_MASK) == SHARED_TAG) continue;
    finding(w, I, CK_CLUSTER, SEV_ERROR, "0x%llx is not a generic address of shared memory",
            (unsigned long long)address[l]);
    return;
  }
}

static int exec_mapa32(Warp *w, const Insn *I, Mask m) {
  const uint32_t *a = SRC32(1), *rank = SRC32(2);
  check_rank(w, I, m, rank);
  uint32_t v[32];
  FOR_LANES(l) v[l] = (a[l] & ~(uint32_t)RANK_MASK) | rank_bits(rank[l]);
  PUT32(0, v);
  return DONE;
}

static int exec_mapa64(Warp *w, const Insn *I, Mask m) {
  const uint64_t *a = SRC64(1);
  const uint32_t *rank = SRC32(2);
  check_rank(w, I, m, rank);
  if (I->mod[0] == 0) check_generic_shared(w, I, m, a);
  uint64_t v[32];
  FOR_LANES(l) v[l] = (a[l] & ~RANK_MASK) | rank_bits(rank[l]);
  PUT64(0, v);
  return DONE;
}

static int exec_getctarank32(Warp *w, const Insn *I, Mask m) {
  const uint32_t *a = SRC32(1);
  uint32_t v[32];
  FOR_LANES(l) v[l] = a[l] >> SHARED_RANK_SHIFT;
  PUT32(0, v);
  return DONE;
}

static int exec_getctarank64(Warp *w, const Insn *I, Mask m) {
  const uint64_t *a = SRC64(1);
  if (I->mod[0] == 0) check_generic_shared(w, I, m, a);
  uint32_t v[32];
  FOR_LANES(l) v[l] = (uint32_t)a[l] >> SHARED_RANK_SHIFT;
  PUT32(0, v);
  return DONE;
}

// -------------------------------------------------------------------------- cluster launch control
//
// A response holds the coordinates of the cancelled cluster's first CTA, and what became of it.

#define RESPONSE_BYTES 16
#define RESPONSE_GRANTED 0xC1C00001u
#define RESPONSE_REFUSED 0xC1C00000u

typedef struct {
  int ndestinations;
  Cta *destinations[16];
  uint32_t response_offset, mbarrier_offset;
  uint32_t response[4];
} Request;

// The distributor's answer. Where the option says so, it may be "none left" while there are some;
// a cluster that has been told so gets no other answer from then on.
static void ask_distributor(AsyncOp *op, Request *r) {
  Emu *e = op->emu;
  Cluster *k = op->cta->cluster;
  uint32_t id[3] = {UINT32_MAX, UINT32_MAX, UINT32_MAX};
  if (e->spurious_cancel && emu_random(e, 4) == 0) k->cancel_refused = true;
  bool granted = !k->cancel_refused && cancel_cluster(e, id);
  memcpy(r->response, id, sizeof id);
  r->response[3] = granted ? RESPONSE_GRANTED : RESPONSE_REFUSED;
}

static void deliver_response(AsyncOp *op, Request *r, Cta *cta) {
  if (!live_cta(cta)) {
    finding(op->warp, op->insn, CK_CLUSTER, SEV_ERROR,
            "the response goes to CTA rank %d, which has exited", cta->rank);
    return;
  }
  Mbarrier *b = find_mbarrier(op->warp, op->insn, cta, r->mbarrier_offset);
  Access a = op->access;
  if (b) a.agent = b->agent, a.clock = b->clock + 1;
  shared_write(&a, cta, r->response_offset, RESPONSE_BYTES);
  memcpy(cta->shared + r->response_offset, r->response, RESPONSE_BYTES);
  if (b) mbarrier_complete_tx(op->warp, op->insn, cta, b, RESPONSE_BYTES, &op->view);
}

static void run_request(AsyncOp *op, int stage) {
  Request *r = op->data;
  if (stage == 0) ask_distributor(op, r);
  else deliver_response(op, r, r->destinations[stage - 1]);
}

static void request_cancel(Warp *w, const Insn *I, const Target *response, const Target *barrier) {
  Cta *cta = w->cta;
  bool multicast = I->mod[1];
  if (response->cta != cta || barrier->cta != cta)
    finding(w, I, CK_CLUSTER, SEV_ERROR, "the response and the mbarrier must be in the CTA's own "
            "shared memory");
  if (cta->cancel_failed_seen)
    finding(w, I, CK_CLUSTER, SEV_ERROR, "asks for another cluster after the CTA has seen that "
            "none is left: what happens then is undefined");
  if (!shared_pointer(w, I, cta, response->offset, RESPONSE_BYTES, 16)) return;
  find_mbarrier(w, I, cta, barrier->offset);
  Request *r = calloc(1, sizeof *r);
  r->response_offset = response->offset;
  r->mbarrier_offset = barrier->offset;
  if (!multicast) r->destinations[r->ndestinations++] = cta;
  for (int i = 0; multicast && i < cta->cluster->nctas; i++)
    r->destinations[r->ndestinations++] = cta->cluster->ctas[i];
  AsyncOp *op = new_async(w, I, "clusterlaunchcontrol.try_cancel", AG_BULK_WRITE, 0);
  op->run = run_request;
  op->stages = 1 + r->ndestinations;
  op->data = r;
  submit(op);
}

static int exec_try_cancel(Warp *w, const Insn *I, Mask m) {
  uint64_t response[32], barrier[32];
  addresses_of(w, I, &I->op[0], m, response);
  addresses_of(w, I, &I->op[1], m, barrier);
  int space = I->mod[0] ? SPACE_SHARED : SPACE_GENERIC;
  FOR_SET(l, m) {
    Target to, at;
    if (resolve(w, I, response[l], space, &to) && resolve(w, I, barrier[l], space, &at))
      request_cancel(w, I, &to, &at);
  }
  return DONE;
}

// The response in operand k, 4 words a lane, after checks; NULL if it is no 128-bit register.
static const uint32_t *response_of(Warp *w, const Insn *I, Mask m, int k) {
  const Operand *o = &I->op[k];
  check_read(w, I, o, m);
  const uint32_t *v = reg128(w, o);
  FOR_SET(l, m) {
    uint32_t status = v[4 * l + 3];
    if (status == RESPONSE_GRANTED || status == RESPONSE_REFUSED) continue;
    finding(w, I, CK_CLUSTER, SEV_ERROR,
            "lane %d: the operand is not a response of clusterlaunchcontrol.try_cancel", l);
    break;
  }
  return v;
}

static int exec_is_canceled(Warp *w, const Insn *I, Mask m) {
  const uint32_t *v = response_of(w, I, m, 1);
  Mask granted = 0;
  FOR_SET(l, m) {
    granted |= v[4 * l + 3] == RESPONSE_GRANTED ? 1u << l : 0;
    if (v[4 * l + 3] == RESPONSE_REFUSED) w->cta->cancel_failed_seen = true;
  }
  PUTP(0, granted);
  return DONE;
}

static int exec_first_ctaid(Warp *w, const Insn *I, Mask m) {
  const uint32_t *v = response_of(w, I, m, 1);
  uint32_t x[32];
  FOR_LANES(l) x[l] = v[4 * l + I->mod[0] - 1];
  PUT32(0, x);
  return DONE;
}

static int exec_first_ctaid_v4(Warp *w, const Insn *I, Mask m) {
  const uint32_t *v = response_of(w, I, m, 1);
  const Operand *list = list_of(w, &I->op[0]);
  for (int k = 0; k < count_of(&I->op[0]); k++) {
    uint32_t x[32];
    FOR_LANES(l) x[l] = k < 3 ? v[4 * l + k] : 0;
    put32_of(w, I, &list[k], m, x);
  }
  return DONE;
}

// ----------------------------------------------------------------------------------------- forms

#define SEM_SCOPE(sem) "{" sem "}{.cta|.cluster}"
#define ARRIVE_MODIFIERS "{.expect_tx|.noComplete}" SEM_SCOPE(".release|.relaxed") SHARED_ANY ".b64"
#define WAIT_MODIFIERS SEM_SCOPE(".acquire|.relaxed") SHARED_CTA ".b64"
#define TX_MODIFIERS SEM_SCOPE(".relaxed") SHARED_ANY ".b64"
#define CLC "clusterlaunchcontrol."

const Form FORMS_BARRIER[] = {
    {"bar{.cta}.sync", "s32 s32?", exec_bar_sync, F_ALIGNED | F_YIELD},
    {"bar{.cta}.arrive", "s32 s32", exec_bar_arrive, F_ALIGNED | F_YIELD},
    {"bar{.cta}.red.popc.u32", "d32 s32 sp", exec_bar_popc, F_ALIGNED | F_YIELD},
    {"bar{.cta}.red.popc.u32", "d32 s32 s32 sp", exec_bar_popc_count, F_ALIGNED | F_YIELD},
    {"bar{.cta}.red(.and|.or).pred", "dp s32 sp", exec_bar_red, F_ALIGNED | F_YIELD},
    {"bar{.cta}.red(.and|.or).pred", "dp s32 s32 sp", exec_bar_red_count, F_ALIGNED | F_YIELD},
    {"barrier{.cta}.sync.aligned", "s32 s32?", exec_bar_sync, F_ALIGNED | F_YIELD},
    {"barrier{.cta}.arrive.aligned", "s32 s32", exec_bar_arrive, F_ALIGNED | F_YIELD},
    {"barrier{.cta}.red.popc.aligned.u32", "d32 s32 sp", exec_bar_popc, F_ALIGNED | F_YIELD},
    {"barrier{.cta}.red.popc.aligned.u32", "d32 s32 s32 sp", exec_bar_popc_count,
     F_ALIGNED | F_YIELD},
    {"barrier{.cta}.red(.and|.or).aligned.pred", "dp s32 sp", exec_bar_red, F_ALIGNED | F_YIELD},
    {"barrier{.cta}.red(.and|.or).aligned.pred", "dp s32 s32 sp", exec_bar_red_count,
     F_ALIGNED | F_YIELD},
    {"barrier{.cta}.sync", "s32 s32?", exec_bar_sync, F_YIELD},
    {"barrier{.cta}.arrive", "s32 s32", exec_bar_arrive, F_YIELD},
    {"barrier{.cta}.red.popc.u32", "d32 s32 sp", exec_bar_popc, F_YIELD},
    {"barrier{.cta}.red.popc.u32", "d32 s32 s32 sp", exec_bar_popc_count, F_YIELD},
    {"barrier{.cta}.red(.and|.or).pred", "dp s32 sp", exec_bar_red, F_YIELD},
    {"barrier{.cta}.red(.and|.or).pred", "dp s32 s32 sp", exec_bar_red_count, F_YIELD},

    {"barrier.cluster.arrive{.release|.relaxed}", "", exec_cluster_arrive, F_YIELD},
    {"barrier.cluster.arrive{.release|.relaxed}.aligned", "", exec_cluster_arrive,
     F_ALIGNED | F_YIELD},
    {"barrier.cluster.wait{.acquire}", "", exec_cluster_wait, F_YIELD},
    {"barrier.cluster.wait{.acquire}.aligned", "", exec_cluster_wait, F_ALIGNED | F_YIELD},

    {"mbarrier.init" SHARED_CTA ".b64", "a s32", exec_mbarrier_init, 0},
    {"mbarrier.inval" SHARED_CTA ".b64", "a", exec_mbarrier_inval, 0},
    {"mbarrier.arrive" ARRIVE_MODIFIERS, "d64 a s32?", exec_mbarrier_arrive, 0},
    {"mbarrier.arrive_drop" ARRIVE_MODIFIERS, "d64 a s32?", exec_mbarrier_drop, 0},
    {"mbarrier.expect_tx" TX_MODIFIERS, "a s32", exec_mbarrier_expect_tx, 0},
    {"mbarrier.complete_tx" TX_MODIFIERS, "a s32", exec_mbarrier_complete_tx, 0},
    {"mbarrier.pending_count.b64", "d32 s64", exec_mbarrier_pending_count, 0},
    {"mbarrier.test_wait" WAIT_MODIFIERS, "dp a s64", exec_test_wait, F_YIELD},
    {"mbarrier.test_wait.parity" WAIT_MODIFIERS, "dp a s32", exec_test_wait_parity, F_YIELD},
    {"mbarrier.try_wait" WAIT_MODIFIERS, "dp a s64 s32?", exec_try_wait, 0},
    {"mbarrier.try_wait.parity" WAIT_MODIFIERS, "dp a s32 s32?", exec_try_wait_parity, 0},

    {"fence{.sc|.acq_rel|.acquire|.release}(.cta|.cluster|.gpu|.sys)", "", exec_fence, 0},
    {"fence.acquire.sync_restrict::shared::cluster.cluster", "", exec_fence, 0},
    {"fence.release.sync_restrict::shared::cta.cluster", "", exec_fence, 0},
    {"fence.mbarrier_init.release.cluster", "", exec_mbarrier_init_fence, 0},
    {"fence.proxy.async{.global|.shared::cta|.shared::cluster}", "", exec_proxy_fence, 0},
    {"fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster", "",
     exec_proxy_fence_release, 0},
    {"fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster", "",
     exec_proxy_fence_acquire, 0},
    {"fence.proxy.alias", "", exec_nothing, 0},
    {"membar(.cta|.gl|.sys)", "", exec_fence, 0},
    {"membar.proxy.alias", "", exec_nothing, 0},

    {"setmaxnreg(.inc|.dec).sync.aligned.u32", "i", exec_setmaxnreg, F_ALIGNED},
    {"griddepcontrol(.launch_dependents|.wait)", "", exec_nothing, 0},
    {"mapa.shared::cluster.u32", "d32 s32 s32", exec_mapa32, 0},
    {"mapa{.shared::cluster}.u64", "d64 s64 s32", exec_mapa64, 0},
    {"getctarank.shared::cluster.u32", "d32 s32", exec_getctarank32, 0},
    {"getctarank{.shared::cluster}.u64", "d32 s64", exec_getctarank64, 0},

    {CLC "try_cancel.async{.shared::cta}.mbarrier::complete_tx::bytes"
         "{.multicast::cluster::all}.b128", "a a", exec_try_cancel, F_YIELD},
    {CLC "query_cancel.is_canceled.pred.b128", "dp s128", exec_is_canceled, 0},
    {CLC "query_cancel(.get_first_ctaid::x|.get_first_ctaid::y|.get_first_ctaid::z).b32.b128",
     "d32 s128", exec_first_ctaid, 0},
    {CLC "query_cancel.get_first_ctaid.v4.b32.b128", "d32l s128", exec_first_ctaid_v4, 0},
    {0},
};
