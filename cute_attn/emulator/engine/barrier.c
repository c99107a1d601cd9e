// The numbered barriers of a CTA (bar.sync), and the barrier of a cluster.
#include "barrier.h"

// The value of an operand that must be equal in all lanes.
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
// A warp arrives once all of its live lanes have come; thread counts are multiples of a warp. A
// warp may arrive more than once in a generation (bar.arrive, then bar.sync): arrivals are only
// counted. The warp that completes a generation passes the result to the waiting groups, which hold
// the barrier and the generation in note[0].

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
      if (group->note[1] == BAR_ARRIVE) continue;  // no wait, so nothing is ordered
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

// The thread count in operand k. *all_live: without a count, all live threads count.
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

// Check an arrival against the earlier arrivals of this generation.
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

// The warp arrives once all of its live lanes have come. Its groups of lanes then wait for the
// barrier itself.
static void warp_arrives(Warp *w, const Insn *I, int id, int expected, bool all, bool red,
                         bool waits) {
  Cta *cta = w->cta;
  NamedBarrier *b = &cta->bars[id];
  finish_loads(w);
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
  uint64_t object = stream_object(OBJECT_NAMED, cta->linear, (uint64_t)id);
  stream_event(w, I, STEP_ARRIVE, object, b->generation + 1, 0);
  if (waits) stream_event(w, I, STEP_WAIT, object, b->generation + 1, 0);
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

typedef struct { int kind, id, count, predicate; } BarrierOperands;  // operand indices; -1: absent

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
    warp_arrives(w, I, (int)id, expected, all, red, operands.kind != BAR_ARRIVE);
  }
  if (operands.kind == BAR_ARRIVE) return DONE;
  if (g->step == BAR_WAITING) try_complete_named(w->cta, (int)id);
  if (g->step == BAR_WAITING) return wait_for(w, WAIT_NAMED_BARRIER, id, b->generation);
  deliver(w, I, m, operands.kind);
  return DONE;
}

// PTX does not say what becomes of leftover arrivals; FlashAttention-4 leaves some, and works.
static void named_barriers_at_exit(Cta *cta) {
  for (int id = 0; id < MAX_NAMED_BARRIERS; id++) {
    NamedBarrier *b = &cta->bars[id];
    if (!b->arrived) continue;
    finding(&cta->warps[__builtin_ctz(b->warps)], b->first, CK_BARRIER, SEV_NOTE,
            "the CTA exits while named barrier %d has %d of the %d threads that it waits for", id,
            b->arrived, b->expected);
  }
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
// Warp.cluster_unwaited: lanes that have arrived, in the current or the last generation, and not
// waited yet.

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
  finish_loads(w);
  Mask twice = m & w->cluster_unwaited;
  if (twice)
    finding(w, I, CK_CLUSTER, SEV_ERROR, "lanes 0x%08x arrive at the cluster barrier again, "
            "without barrier.cluster.wait after their last arrival", twice);
  Mask fresh = m & ~w->cluster_arrived;
  w->cluster_arrived |= fresh;
  w->cluster_unwaited |= m;
  k->arrived += __builtin_popcount(fresh);
  stream_event(w, I, STEP_ARRIVE, stream_object(OBJECT_CLUSTER, k->linear, 0), k->generation + 1, 0);
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
  stream_event(w, I, STEP_WAIT, stream_object(OBJECT_CLUSTER, k->linear, 0), k->generation, 0);
  acquire_from(w, &k->done);
  return DONE;
}

// --------------------------------------------------------------------------------------- forms

static void free_named_barriers(Cta *c) {
  for (int i = 0; i < MAX_NAMED_BARRIERS; i++) view_free(&c->bars[i].next);
}

static const Form FORMS[] = {
    {"bar{.cta}.sync", "s32 s32?", exec_bar_sync, F_ALIGNED | F_YIELD | F_EFFECT},
    {"bar{.cta}.arrive", "s32 s32", exec_bar_arrive, F_ALIGNED | F_YIELD | F_EFFECT},
    {"bar{.cta}.red.popc.u32", "d32 s32 sp", exec_bar_popc, F_ALIGNED | F_YIELD | F_EFFECT},
    {"bar{.cta}.red.popc.u32", "d32 s32 s32 sp",
     exec_bar_popc_count, F_ALIGNED | F_YIELD | F_EFFECT},
    {"bar{.cta}.red(.and|.or).pred", "dp s32 sp", exec_bar_red, F_ALIGNED | F_YIELD | F_EFFECT},
    {"bar{.cta}.red(.and|.or).pred", "dp s32 s32 sp",
     exec_bar_red_count, F_ALIGNED | F_YIELD | F_EFFECT},
    {"barrier{.cta}.sync.aligned", "s32 s32?", exec_bar_sync, F_ALIGNED | F_YIELD | F_EFFECT},
    {"barrier{.cta}.arrive.aligned", "s32 s32", exec_bar_arrive, F_ALIGNED | F_YIELD | F_EFFECT},
    {"barrier{.cta}.red.popc.aligned.u32", "d32 s32 sp",
     exec_bar_popc, F_ALIGNED | F_YIELD | F_EFFECT},
    {"barrier{.cta}.red.popc.aligned.u32", "d32 s32 s32 sp", exec_bar_popc_count,
     F_ALIGNED | F_YIELD | F_EFFECT},
    {"barrier{.cta}.red(.and|.or).aligned.pred", "dp s32 sp",
     exec_bar_red, F_ALIGNED | F_YIELD | F_EFFECT},
    {"barrier{.cta}.red(.and|.or).aligned.pred", "dp s32 s32 sp", exec_bar_red_count,
     F_ALIGNED | F_YIELD | F_EFFECT},
    {"barrier{.cta}.sync", "s32 s32?", exec_bar_sync, F_YIELD | F_EFFECT},
    {"barrier{.cta}.arrive", "s32 s32", exec_bar_arrive, F_YIELD | F_EFFECT},
    {"barrier{.cta}.red.popc.u32", "d32 s32 sp", exec_bar_popc, F_YIELD | F_EFFECT},
    {"barrier{.cta}.red.popc.u32", "d32 s32 s32 sp", exec_bar_popc_count, F_YIELD | F_EFFECT},
    {"barrier{.cta}.red(.and|.or).pred", "dp s32 sp", exec_bar_red, F_YIELD | F_EFFECT},
    {"barrier{.cta}.red(.and|.or).pred", "dp s32 s32 sp", exec_bar_red_count, F_YIELD | F_EFFECT},

    {"barrier.cluster.arrive{.release|.relaxed}", "", exec_cluster_arrive, F_YIELD | F_EFFECT},
    {"barrier.cluster.arrive{.release|.relaxed}.aligned", "", exec_cluster_arrive,
     F_ALIGNED | F_YIELD | F_EFFECT},
    {"barrier.cluster.wait{.acquire}", "", exec_cluster_wait, F_YIELD | F_EFFECT},
    {"barrier.cluster.wait{.acquire}.aligned", "",
     exec_cluster_wait, F_ALIGNED | F_YIELD | F_EFFECT},
    {0},
};

const Family FAMILY_BARRIER = {.name = "barrier", .forms = FORMS,
    .cta_exits = named_barriers_at_exit, .cta_freed = free_named_barriers};
