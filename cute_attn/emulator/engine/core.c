// The machine: operands, divergence, execution, launch, scheduling, and the part of the C interface
// (library.py) that makes machines and launches kernels.
#include "core.h"
#include "external.h"

#define SPIN_INSTRUCTIONS 50000ull        // without progress, after which asynchronous effects run
#define LIVELOCK_INSTRUCTIONS 20000000ull  // without progress, after which a livelock is reported
#define ASTRAY_INSTRUCTIONS 2000000ull  // on made-up values, after which the launch stops
#define PATIENCE_INSTRUCTIONS 16384ull  // without progress, after which low priorities run too
#define STARVATION_SHIFT 14  // every 2^14 instructions a divergent warp prefers other lanes

// ----------------------------------------------------------------------- operands and registers

uint32_t emu_random(Emu *e, uint32_t below) {
  e->rng ^= e->rng << 13;
  e->rng ^= e->rng >> 7;
  e->rng ^= e->rng << 17;
  return below ? (uint32_t)((e->rng >> 32) % below) : 0;
}

uint64_t operand_constant(Warp *w, const Operand *o) {
  switch (o->kind) {
    case K_SHARED_SYM: return shared_address(w->cta, (uint32_t)o->imm);
    case K_PARAM_SYM: return (uint64_t)emu_of(w)->params + o->imm;
    default: return o->imm;
  }
}

void addresses_of(Warp *w, const Insn *I, const Operand *o, Mask m, uint64_t out[32]) {
  if (o->sub == K_REG) {
    Operand base = *o;
    base.kind = K_REG;
    if (o->bits == 64) {
      const uint64_t *v = src64_of(w, I, &base, m, out);
      FOR_LANES(l) out[l] = v[l] + o->imm;
    } else {
      uint32_t buffer[32];
      const uint32_t *v = src32_of(w, I, &base, m, buffer);
      FOR_LANES(l) out[l] = (uint32_t)(v[l] + (uint32_t)o->imm);
    }
    return;
  }
  Operand constant = *o;
  constant.kind = o->sub;
  uint64_t v = operand_constant(w, &constant);
  FOR_LANES(l) out[l] = v;
}

static uint32_t axis(const uint32_t size[3], uint32_t linear, int i) {
  if (i == 0) return linear % size[0];
  if (i == 1) return linear / size[0] % size[1];
  return linear / size[0] / size[1];
}

uint64_t special_register(Warp *w, int sr, int lane) {
  const Cta *c = w->cta;
  Emu *e = c->emu;
  switch (sr) {
    case SR_TID_X: case SR_TID_Y: case SR_TID_Z:
      return axis(e->block, (uint32_t)(w->index * 32 + lane), sr - SR_TID_X);
    case SR_NTID_X: case SR_NTID_Y: case SR_NTID_Z: return e->block[sr - SR_NTID_X];
    case SR_CTAID_X: case SR_CTAID_Y: case SR_CTAID_Z: return c->id[sr - SR_CTAID_X];
    case SR_NCTAID_X: case SR_NCTAID_Y: case SR_NCTAID_Z: return e->grid[sr - SR_NCTAID_X];
    case SR_CLUSTERID_X: case SR_CLUSTERID_Y: case SR_CLUSTERID_Z:
      return c->cluster->id[sr - SR_CLUSTERID_X];
    case SR_NCLUSTERID_X: case SR_NCLUSTERID_Y: case SR_NCLUSTERID_Z:
      return e->grid[sr - SR_NCLUSTERID_X] / e->cluster_dim[sr - SR_NCLUSTERID_X];
    case SR_CLUSTER_CTAID_X: case SR_CLUSTER_CTAID_Y: case SR_CLUSTER_CTAID_Z:
      return axis(e->cluster_dim, (uint32_t)c->rank, sr - SR_CLUSTER_CTAID_X);
    case SR_CLUSTER_NCTAID_X: case SR_CLUSTER_NCTAID_Y: case SR_CLUSTER_NCTAID_Z:
      return e->cluster_dim[sr - SR_CLUSTER_NCTAID_X];
    case SR_CLUSTER_CTARANK: return (uint64_t)c->rank;
    case SR_CLUSTER_NCTARANK: return (uint64_t)c->cluster->nctas;
    case SR_IS_EXPLICIT_CLUSTER: return c->cluster->nctas > 1;
    case SR_LANEID: return (uint64_t)lane;
    case SR_WARPID: return (uint64_t)w->index;
    case SR_NWARPID: return (uint64_t)c->nwarps;
    case SR_SMID: return (uint64_t)c->slot;
    case SR_NSMID: return (uint64_t)e->nslots;
    case SR_LANEMASK_EQ: return 1u << lane;
    case SR_LANEMASK_LE: return 0xFFFFFFFFu >> (31 - lane);
    case SR_LANEMASK_LT: return (1u << lane) - 1;
    case SR_LANEMASK_GE: return 0xFFFFFFFFu << lane;
    case SR_LANEMASK_GT: return ~(0xFFFFFFFFu >> (31 - lane));
    case SR_CLOCK: case SR_GLOBALTIMER_LO: return (uint32_t)e->time;
    case SR_CLOCK_HI: case SR_GLOBALTIMER_HI: return e->time >> 32;
    case SR_CLOCK64: case SR_GLOBALTIMER: return e->time;
    case SR_DYNAMIC_SMEM_SIZE: return e->dynamic_shared;
    case SR_TOTAL_SMEM_SIZE: return (c->shared_bytes + 127) & ~127u;  // allocation granularity
    case SR_AGGR_SMEM_SIZE: return c->shared_bytes + 1024;            // includes the system's part
    default: return 0;  // %gridid
  }
}

// ------------------------------------------------------------------------- blocking, divergence

int wait_for(Warp *w, WaitKind kind, uint64_t object, uint64_t detail) {
  Group *g = group_of(w);
  if (!g->wait_since) g->wait_since = emu_of(w)->time + 1;
  g->wait = g->waited = kind;
  g->wait_object = object;
  g->wait_detail = detail;
  return BLOCK;
}

bool converged(Warp *w, Mask m, Mask members) {
  const Insn *I = &emu_of(w)->program->code[group_of(w)->pc];
  if (members & ~w->live && !w->exited) {
    finding(w, I, CK_SYNC, SEV_ERROR,
            "member mask 0x%08x names lanes 0x%08x, which have exited", members,
            members & ~w->live);
    members &= w->live;
  }
  if (m & ~members)
    finding(w, I, CK_SYNC, SEV_ERROR,
            "lanes 0x%08x execute it, but the member mask is 0x%08x", m & ~members, members);
  Mask here = group_of(w)->mask;
  if ((members & ~here) == 0 && (members & ~m) != 0) {
    finding(w, I, CK_SYNC, SEV_ERROR,
            "member mask 0x%08x names lanes 0x%08x, whose guard predicate is false", members,
            members & ~m);
    return true;
  }
  return (members & ~m) == 0;
}

void add_group(Warp *w, Mask mask, int32_t pc) {
  w->groups[w->ngroups++] = (Group){.mask = mask, .pc = pc};
}

void remove_group(Warp *w, int i) {
  w->groups[i] = w->groups[--w->ngroups];
  if (w->current >= w->ngroups) w->current = i < w->ngroups ? i : 0;
}

// Join groups at equal program counters, and choose a group to run. False: no group can run.
static bool pick_group(Warp *w) {
  for (int i = 0; i < w->ngroups; i++)
    for (int j = w->ngroups - 1; j > i; j--) {
      Group *a = &w->groups[i], *b = &w->groups[j];
      if (a->pc != b->pc || a->step || b->step) continue;
      a->mask |= b->mask;
      a->wait = WAIT_NONE;
      a->wait_since = 0;
      remove_group(w, j);
    }
  int best = -1;
  bool high = w->executed >> STARVATION_SHIFT & 1;
  for (int i = 0; i < w->ngroups; i++) {
    if (w->groups[i].wait != WAIT_NONE) continue;
    if (best < 0 || (w->groups[i].pc < w->groups[best].pc) != high) best = i;
  }
  if (best < 0) return false;
  w->current = best;
  return true;
}

// Call a function of all families that have it.
#define FOR_FAMILIES(function, ...)                  \
  for (const Family *const *f = FAMILIES; *f; f++)   \
    if ((*f)->function) (*f)->function(__VA_ARGS__)

static void warp_exits(Warp *w) {
  Cta *c = w->cta;
  w->exited = true;
  c->live_warps--;
  if (c->live_warps == 0) {
    c->exited = true;
    FOR_FAMILIES(cta_exits, c);
    if (c->emu->astray) c->emu->astray = c->emu->time + 1;  // the launch makes progress
    bool all = true;
    for (int i = 0; i < c->cluster->nctas; i++) all &= c->cluster->ctas[i]->exited;
    c->cluster->exited = all;
  }
}

void exit_lanes(Warp *w, Mask m) {
  Cta *c = w->cta;
  FOR_FAMILIES(lanes_exit, w, m);
  if (w->undecided & m) branches_leave(w, w->undecided & m);
  if (w->live == m && c->live_warps == 1)
    accesses_at_exit(w, &c->emu->program->code[group_of(w)->pc]);
  w->live &= ~m;
  c->cluster->live_threads -= __builtin_popcount(m);
  for (int i = w->ngroups - 1; i >= 0; i--) {
    w->groups[i].mask &= ~m;
    if (!w->groups[i].mask) remove_group(w, i);
  }
  progress(c->emu);
  if (w->live) return;
  FOR_FAMILIES(warp_exits, w);
  warp_exits(w);
}

bool live_cta(const Cta *cta) { return !cta->exited; }

// ------------------------------------------------------------------------------------- execution

// Lanes of an aligned instruction have to arrive together. False: wait for the other lanes.
static bool aligned_ready(Warp *w, const Insn *I, Mask m) {
  const Group *g = group_of(w);
  if (g->mask != w->live) return false;
  if (m != g->mask)
    finding(w, I, CK_SYNC, SEV_ERROR,
            "is .aligned, so all lanes must execute it; the guard holds only in lanes 0x%08x", m);
  return true;
}

static Mask same_words(const uint32_t *words, int size, int lane, Mask m) {
  Mask same = 0;
  FOR_SET(l, m) {
    bool equal = true;
    for (int i = 0; i < size; i++) equal &= words[l * size + i] == words[lane * size + i];
    same |= (Mask)equal << l;
  }
  return same;
}

// Lanes of m in which an operand equals the operand in `lane`.
static Mask same_operand(Warp *w, const Operand *o, int lane, Mask m) {
  if (o->kind == K_REG || (o->kind == K_ADDRESS && o->sub == K_REG))
    return same_words(w->regs + o->reg, o->bits == 128 ? 4 : o->bits == 64 ? 2 : 1, lane, m);
  if (o->kind == K_PRED) {
    Mask p = w->regs[o->reg];
    return m & (p >> lane & 1 ? p : ~p);
  }
  if (o->kind == K_LIST)
    for (int i = 0; i < o->count; i++) m &= same_operand(w, &list_of(w, o)[i], lane, m);
  return m;
}

// One lane for each distinct set of operands. By the ISA every thread issues its own operation, but
// ptxas's machine code issues one operation for the warp.
static Mask issuing_lanes(Warp *w, const Insn *I, Mask m) {
  Mask left = m, chosen = 0;
  while (left) {
    int lane = __builtin_ctz(left);
    Mask same = left;
    for (int i = 0; i < I->nops; i++) same &= same_operand(w, &I->op[i], lane, same);
    chosen |= 1u << lane;
    left &= ~(same | 1u << lane);
  }
  if (chosen != m)
    finding(w, I, CK_SYNC, SEV_NOTE,
            "%d lanes execute it with the same operands: each would issue it, by the ISA; the "
            "assembler makes one operation of it", __builtin_popcount(m));
  return chosen;
}

// The results of arithmetic on undefined values are undefined.
static void spread_taint(Warp *w, const Insn *I) {
  for (int i = 0; i < I->ndest; i++) {
    const Operand *results = list_of(w, &I->op[i]);
    for (int k = 0; k < count_of(&I->op[i]); k++)
      set_chosen(w, &results[k], w->tainted, 0, ~w->tainted_raw);
  }
  w->tainted = w->tainted_raw = 0;
}

static void end_wait(Emu *e, Warp *w, Group *g, const Insn *I) {
  if (g->wait_since)
    trace_event(e, 0, w, I, g->wait_since - 1, e->time, g->wait_object,
                g->wait_detail << 8 | (uint64_t)g->waited);
  g->step = 0;
  g->wait_since = 0;
  g->timed_wait = g->timed_out = false;
}

// Run up to `budget` instructions of a warp. Returns how many were completed.
static int run_slice(Emu *e, Warp *w, int budget) {
  int done = 0;
  for (int i = 0; i < w->ngroups; i++) w->groups[i].wait = WAIT_NONE;
  while (done < budget && !w->exited && !e->stop) {
    if ((w->ngroups > 1 || group_of(w)->wait != WAIT_NONE) && !pick_group(w)) break;
    Group *g = group_of(w);
    if (__builtin_expect(g->pc >= e->program->ncode, 0)) {
      exit_lanes(w, g->mask);
      continue;
    }
    const Insn *I = &e->program->code[g->pc];
    Mask m = g->mask;
    if (__builtin_expect(w->undecided != 0, 0)) branches_meet(w);
    if (I->guard >= 0) {
      Mask p = w->regs[I->guard], bad = m & ~w->defined[I->guard_id];
      if (__builtin_expect(bad != 0, 0)) {
        Operand o = {.id = I->guard_id};
        report_undefined(w, I, &o, bad);
      }
      m &= I->guard_neg ? ~p : p;
    }
    if (__builtin_expect(w->branches != NULL, 0)) branches_pass(w, I, m);
    uint64_t wavefronts = e->counters[CT_BANK_WAVEFRONTS];
    uint64_t sectors = e->counters[CT_GLOBAL_SECTORS], atomics = e->counters[CT_ATOMICS];
    int result = DONE;
    if (m || I->flags & F_ALWAYS) {
      if (I->flags & F_ALIGNED && !aligned_ready(w, I, m))
        result = wait_for(w, WAIT_CONVERGENCE, w->live & ~g->mask, 0);
      else
        result = I->exec(w, I, I->flags & F_UNIFORM && m & (m - 1) ? issuing_lanes(w, I, m) : m);
    }
    if (result == BLOCK) continue;
    if (__builtin_expect(w->tainted != 0, 0)) spread_taint(w, I);
    done++;
    e->time++;
    w->executed++;
    e->executed[I - e->program->code]++;
    if (__builtin_expect(w->cta->recorded, 0)) {
      wavefronts = e->counters[CT_BANK_WAVEFRONTS] - wavefronts;
      sectors = e->counters[CT_GLOBAL_SECTORS] - sectors;
      atomics = e->counters[CT_ATOMICS] - atomics;
      if (wavefronts) stream_event(w, I, STEP_SHARED, wavefronts, 0, 0);
      if (atomics) stream_event(w, I, STEP_ATOMIC, atomics, e->latest_address, 0);
      else if (sectors) stream_event(w, I, STEP_GLOBAL, sectors, e->latest_address, 0);
      stream_step(w, I);
    }
    if (result == DONE) {
      g = group_of(w);
      if (g->step || g->wait_since) end_wait(e, w, g, I);
      g->pc++;
    }
    if (I->flags & F_YIELD) break;
  }
  e->warp_executed[w->index] += (uint64_t)done;
  return done;
}

// --------------------------------------------------------------------------------- launching CTAs

void *scratch(Emu *e, int which, size_t bytes) {
  if (__builtin_expect(e->scratch[which].size < bytes, 0)) {
    size_t size = (bytes + 4095) & ~(size_t)4095;
    free(e->scratch[which].memory);
    e->scratch[which].memory = memset(aligned_alloc(64, size), 0, size);
    e->scratch[which].size = size;
  }
  return e->scratch[which].memory;
}

static void *zeroed(size_t bytes) { return calloc(bytes ? bytes : 1, 1); }

// Registers of a thread at launch. Each quarter of an SM has its own 16384 registers and every
// fourth warp; the assembler uses at most 255, and the hardware allocates registers in units of 8.
static int registers_at_launch(const Program *p, int nwarps) {
  int most = 65536 / 4 / (32 * ((nwarps + 3) / 4)), count = p->launch_registers;
  if (!count) {
    count = p->maxnreg && p->maxnreg < most ? p->maxnreg : most / 8 * 8;
    if (count > 255) count = 255;
  }
  return (count + 7) / 8 * 8;
}

static void new_warp(Cta *c, int index) {
  Emu *e = c->emu;
  const Program *p = e->program;
  Warp *w = &c->warps[index];
  *w = (Warp){.cta = c, .index = index, .slot = c->slot * e->warps_per_cta + index, .run = -1};
  int threads = c->nthreads - index * 32;
  w->live = threads >= 32 ? ALL_LANES : (1u << threads) - 1;
  add_group(w, w->live, 0);
  size_t words = (size_t)p->reg_words + 8;
  w->regs = aligned_alloc(64, (words * 4 + 63) & ~(size_t)63);
  memset(w->regs, 0xFF, words * 4);  // every register starts as NaN, so that all runs are alike
  w->defined = zeroed(sizeof(Mask) * (size_t)(p->nregs + 1));
  w->chosen = zeroed(sizeof(Mask) * (size_t)(p->nregs + 1));
  w->origin = malloc(sizeof(int32_t) * (size_t)(p->nregs + 1));
  memset(w->origin, 0xFF, sizeof(int32_t) * (size_t)(p->nregs + 1));
  w->local = zeroed((size_t)p->local_bytes * 32);
  w->local_init = zeroed((size_t)p->local_bytes * 32);
  w->view = view_new(e);
  w->fenced = zeroed(sizeof(Clock) * (size_t)e->nagents);
  // Epochs continue the epochs of the slot's previous warp, whose effects are unordered with this
  // warp's.
  static const Clock first = 1;
  Clock *clocks = e->slot_clocks + (size_t)w->slot * AGENTS_PER_WARP;
  for (int k = 0; k < AGENTS_PER_WARP; k++) {
    if (clocks[k] < first) clocks[k] = first;
    w->agent_clock[k] = w->agent_birth[k] = clocks[k] + 1;
  }
  w->bulk_group = w->wgmma_group = 1;
  w->registers = registers_at_launch(p, c->nwarps);
}

static void free_warp(Warp *w) {
  Emu *e = emu_of(w);
  Clock *clocks = e->slot_clocks + (size_t)w->slot * AGENTS_PER_WARP;
  for (int k = 0; k < AGENTS_PER_WARP; k++) clocks[k] = w->agent_clock[k];
  if (w->npending)
    for (int i = 0; i < e->program->nregs; i++) clear_pending(w, &(Operand){.id = i});
  if (w->loads) drop_loads(w);
  free(w->regs);
  free(w->defined);
  free(w->chosen);
  branches_free(w);
  free(w->origin);
  free(w->pending);
  free(w->local);
  free(w->local_init);
  free(w->unfenced);
  free(w->copies);
  free(w->wgmma);
  view_free(&w->view);
  free(w->fenced);
  view_free(&w->fence_release);
  view_free(&w->fence_acquire);
}

static Cta *new_cta(Cluster *cluster, int rank, int slot, const uint32_t id[3]) {
  Emu *e = cluster->emu;
  Cta *c = calloc(1, sizeof *c);
  c->emu = e;
  c->cluster = cluster;
  c->rank = rank;
  c->slot = slot;
  memcpy(c->id, id, sizeof c->id);
  c->linear = (id[2] * e->grid[1] + id[1]) * e->grid[0] + id[0];
  c->recorded = stream_records(e, cluster->linear);
  c->nthreads = (int)(e->block[0] * e->block[1] * e->block[2]);
  c->nwarps = c->live_warps = e->warps_per_cta;
  c->shared_bytes = (uint32_t)e->program->static_shared + e->dynamic_shared;
  c->shared = aligned_alloc(1024, (c->shared_bytes + 1024 + 1023) & ~1023u);
  memset(c->shared, 0xFF, c->shared_bytes);  // NaN, so that reads of unwritten bytes show
  c->shared_init = zeroed(c->shared_bytes);
  c->mbarrier_at = malloc(sizeof(int16_t) * (c->shared_bytes / 8 + 1));
  memset(c->mbarrier_at, 0xFF, sizeof(int16_t) * (c->shared_bytes / 8 + 1));
  c->warps = calloc((size_t)c->nwarps, sizeof(Warp));
  for (int i = 0; i < c->nwarps; i++) new_warp(c, i);
  FOR_FAMILIES(cta_starts, c);
  return c;
}

static void free_cta(Cta *c) {
  FOR_FAMILIES(cta_freed, c);
  for (int i = 0; i < c->nwarps; i++) free_warp(&c->warps[i]);
  free(c->mbarrier_at);
  free(c->warps);
  free(c->shared);
  free(c->shared_init);
  free(c->shared_chosen);
  free(c->shared_cells);
  free(c->lane_cells);
  free(c->tmem_cells);
  free(c->tmem_init);
  free(c);
}

static void cluster_id(const Emu *e, uint32_t linear, uint32_t id[3]) {
  uint32_t size[3];
  for (int i = 0; i < 3; i++) size[i] = e->grid[i] / e->cluster_dim[i];
  for (int i = 0; i < 3; i++) id[i] = axis(size, linear, i);
}

static void launch_cluster(Emu *e, int first_slot) {
  uint32_t linear = e->cluster_order[e->next_cluster++];
  Cluster *k = calloc(1, sizeof *k);
  k->emu = e;
  k->linear = linear;
  cluster_id(e, linear, k->id);
  k->nctas = (int)(e->cluster_dim[0] * e->cluster_dim[1] * e->cluster_dim[2]);
  for (int rank = 0; rank < k->nctas; rank++) {
    uint32_t id[3];
    for (int i = 0; i < 3; i++)
      id[i] = k->id[i] * e->cluster_dim[i] + axis(e->cluster_dim, (uint32_t)rank, i);
    k->ctas[rank] = new_cta(k, rank, first_slot + rank, id);
    k->live_threads += k->ctas[rank]->nthreads;
  }
  e->clusters[first_slot / k->nctas] = k;
  e->pending_clusters--;
  progress(e);
}

static void retire_cluster(Emu *e, int place) {
  Cluster *k = e->clusters[place];
  for (AsyncOp *op = e->async_first; op;) {  // drop unfinished operations first
    AsyncOp *next = op->next;
    if (op->cta->cluster == k) {
      if (op->on_demand) retire(op);
      else force(op);
      next = e->async_first;
    }
    op = next;
  }
  for (int i = 0; i < k->nctas; i++) FOR_FAMILIES(cta_ends, k->ctas[i]);
  for (int i = 0; i < k->nctas; i++) free_cta(k->ctas[i]);
  view_free(&k->next);
  view_free(&k->done);
  free(k);
  e->clusters[place] = NULL;
}

bool cancel_cluster(Emu *e, uint32_t id[3]) {
  if (e->next_cluster >= e->total_clusters) return false;
  uint64_t left = e->total_clusters - e->next_cluster;
  uint64_t at = e->next_cluster + (e->schedule ? emu_random(e, (uint32_t)left) : 0);
  cluster_id(e, e->cluster_order[at], id);
  for (uint64_t i = at; i > e->next_cluster; i--) e->cluster_order[i] = e->cluster_order[i - 1];
  e->next_cluster++;
  e->pending_clusters--;
  for (int i = 0; i < 3; i++) id[i] *= e->cluster_dim[i];  // id of the cluster's first CTA
  return true;
}

// --------------------------------------------------------------------------------- the main loop

int list_warps(Emu *e, Warp **warps) {
  int n = 0;
  for (int k = 0; k < e->nclusters; k++)
    for (int c = 0; e->clusters[k] && c < e->clusters[k]->nctas; c++) {
      Cta *cta = e->clusters[k]->ctas[c];
      for (int i = 0; i < cta->nwarps; i++)
        if (!cta->warps[i].exited) warps[n++] = &cta->warps[i];
    }
  return n;
}

static bool wake_timed_waits(Emu *e) {
  bool any = false;
  for (int k = 0; k < e->nclusters; k++)
    for (int c = 0; e->clusters[k] && c < e->clusters[k]->nctas; c++) {
      Cta *cta = e->clusters[k]->ctas[c];
      for (int i = 0; i < cta->nwarps; i++)
        for (int g = 0; g < cta->warps[i].ngroups && !cta->warps[i].exited; g++) {
          Group *group = &cta->warps[i].groups[g];
          if (group->timed_wait) group->timed_out = any = true;
        }
    }
  return any;
}

static void fill_slots(Emu *e) {
  int size = (int)(e->cluster_dim[0] * e->cluster_dim[1] * e->cluster_dim[2]);
  for (int k = 0; k < e->nclusters; k++) {
    if (e->clusters[k] && e->clusters[k]->exited) retire_cluster(e, k);
    if (!e->clusters[k] && e->next_cluster < e->total_clusters) launch_cluster(e, k * size);
  }
}

// One pass over the resident warps in the schedule's order. Returns whether any warp ran.
static bool run_pass(Emu *e, Warp **warps, int n) {
  bool ran = false;
  if (e->schedule)
    for (int i = n - 1; i > 0; i--) {
      int j = (int)emu_random(e, (uint32_t)i + 1);
      Warp *w = warps[i];
      warps[i] = warps[j];
      warps[j] = w;
    }
  for (int i = 0; i < n && !e->stop; i++) {
    if (warps[i]->exited) continue;
    int budget = e->slice;
    if (e->schedule == 1) {
      if (emu_random(e, 4) == 0) continue;  // let other warps overtake
      budget = 1 + (int)emu_random(e, (uint32_t)e->slice * 2);
    } else if (e->schedule == 2) {
      budget = e->slice * 64;
    }
    ran |= run_slice(e, warps[i], budget) > 0;
    if (e->schedule == 0) run_some_async(e);
    else if (e->schedule == 1 && emu_random(e, 2)) {
      ran |= e->async_count > 0;
      run_some_async(e);
    }
  }
  return ran;
}

// A priority that the launch's seed gives to a warp's slot, or to the asynchronous operations.
static uint32_t priority(const Emu *e, uint64_t which) {
  uint64_t x = (e->seed + 1) * 0x9E3779B97F4A7C15ull + which * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 31) * 0x94D049BB133111EBull;
  return (uint32_t)(x >> 32);
}

// One pass of the schedule "starving": the warp of the highest priority that can run. A warp below
// the asynchronous operations runs only where none of them is left. Where warps spin, all warps run.
static bool run_starving(Emu *e, Warp **warps, int n, bool spinning) {
  for (int i = 1; i < n; i++)
    for (int j = i; j > 0; j--) {
      Warp *high = warps[j - 1], *low = warps[j];
      if (priority(e, (uint64_t)high->slot) >= priority(e, (uint64_t)low->slot)) break;
      warps[j - 1] = low, warps[j] = high;
    }
  uint32_t asynchronous = priority(e, UINT64_MAX);
  bool ran = false;
  for (int i = 0; i < n && !e->stop; i++) {
    if (e->async_count && priority(e, (uint64_t)warps[i]->slot) < asynchronous) {
      run_some_async(e);
      ran = true;
      if (!spinning) break;
    }
    if (warps[i]->exited) continue;
    ran |= run_slice(e, warps[i], e->slice * 64) > 0;
    if (ran && !spinning) break;
  }
  return ran;
}

static uint64_t ended_clusters(const Emu *e) {
  uint64_t ended = e->next_cluster;
  for (int k = 0; k < e->nclusters; k++) ended -= e->clusters[k] && !e->clusters[k]->exited;
  return ended;
}

static void main_loop(Emu *e, int (*report)(uint64_t, uint64_t)) {
  Warp **warps = malloc(sizeof *warps * (size_t)(e->nslots * e->warps_per_cta + 1));
  uint64_t stalled_at = UINT64_MAX, last_progress = 0, progress_time = 0, next_report = 0;
  int idle = 0;
  while (!e->stop) {
    fill_slots(e);
    int n = list_warps(e, warps);
    if (!n) break;
    uint64_t before = e->progress;
    bool ran = e->schedule == 3
                   ? run_starving(e, warps, n, e->time - progress_time > PATIENCE_INSTRUCTIONS)
                   : run_pass(e, warps, n);
    if (e->stop) break;
    if (e->progress != last_progress) last_progress = e->progress, progress_time = e->time;
    // Warps that spin on memory always run, and may wait for a delayed asynchronous effect.
    if (e->async_count && e->time - progress_time > SPIN_INSTRUCTIONS) run_some_async(e);
    if (e->time - progress_time > LIVELOCK_INSTRUCTIONS) {
      report_deadlock(e, "livelock: warps spin, but nothing that they could wait for changes");
      break;
    }
    if (e->astray && e->time > e->astray + ASTRAY_INSTRUCTIONS) {
      report_deadlock(e, "no end in sight: since an error made up values, no CTA has finished");
      break;
    }
    if (report && e->time >= next_report) {
      next_report = e->time + 500000;
      if (report(ended_clusters(e), e->total_clusters)) e->stop = true;
    }
    if (ran || e->progress != before) {
      idle = 0;
      continue;
    }
    if (e->schedule == 1 && ++idle < 8) continue;  // the random pass may have skipped warps
    idle = 0;
    if (e->async_count) {
      run_some_async(e);
    } else if (stalled_at != e->progress && wake_timed_waits(e)) {
      stalled_at = e->progress;
    } else {
      report_deadlock(e, "deadlock: no warp can go on");
    }
  }
  free(warps);
}

static void clear_machine(Emu *e) {
  for (AsyncOp *op = e->async_first; op;) {
    AsyncOp *next = op->next;
    op->finished = true;
    if (!op->holders) free_async(op);
    op = next;
  }
  e->async_first = e->async_last = NULL;
  e->async_count = 0;
  for (int k = 0; k < e->nclusters; k++) {
    if (!e->clusters[k]) continue;
    for (int i = 0; i < e->clusters[k]->nctas; i++) free_cta(e->clusters[k]->ctas[i]);
    view_free(&e->clusters[k]->next);
    view_free(&e->clusters[k]->done);
    free(e->clusters[k]);
  }
  free(e->clusters);
  free(e->cluster_order);
  free(e->params);
  free(e->slot_clocks);
  free(e->free_agents);
  e->free_agents = NULL, e->nfree_agents = 0;
  free(e->meetings);
  e->meetings = NULL;
  e->clusters = NULL, e->cluster_order = NULL, e->params = NULL, e->slot_clocks = NULL;
  sync_table_free(e);
  for (int i = 0; i < e->nregions && e->cluster_stride == 1; i++)  // else emu_met compares them
    region_forget(&e->regions[i]);
}

static bool set_up(Emu *e, Program *p, const uint32_t dims[11], const void *params,
                   uint64_t param_bytes) {
  e->program = p;
  e->nclusters = 0;  // until there is room for them
  memcpy(e->grid, dims, sizeof e->grid);
  memcpy(e->block, dims + 3, sizeof e->block);
  memcpy(e->cluster_dim, dims + 6, sizeof e->cluster_dim);
  e->dynamic_shared = dims[9];
  uint64_t threads = (uint64_t)e->block[0] * e->block[1] * e->block[2];
  uint32_t size = e->cluster_dim[0] * e->cluster_dim[1] * e->cluster_dim[2];
  if (!threads || threads > 1024 || !size || size > 16) {
    machine_finding(e, CK_BOUNDS, "a launch of %llu threads a CTA and %u CTAs a cluster",
                    (unsigned long long)threads, size);
    return false;
  }
  for (int i = 0; i < 3; i++)
    if (!e->grid[i] || e->grid[i] % e->cluster_dim[i]) {
      machine_finding(e, CK_BOUNDS, "grid dimension %d is %u, which is not a positive multiple of "
                      "the cluster's %u", i, e->grid[i], e->cluster_dim[i]);
      return false;
    }
  if (param_bytes < (uint64_t)p->param_bytes) {
    machine_finding(e, CK_BOUNDS, "%llu bytes of parameters, but the kernel takes %d",
                    (unsigned long long)param_bytes, p->param_bytes);
    return false;
  }
  e->params = aligned_alloc(128, (param_bytes + 255) & ~127ull);
  memcpy(e->params, params, param_bytes);
  e->warps_per_cta = (int)((threads + 31) / 32);
  uint64_t all = (uint64_t)e->grid[0] * e->grid[1] * e->grid[2] / size, stride = e->cluster_stride;
  e->total_clusters = all > e->first_cluster ? (all - e->first_cluster + stride - 1) / stride : 0;
  // A mark has 16 bits for its agent: enough for 170 SMs with CTAs of 1024 threads.
  int agents_per_slot = e->warps_per_cta * AGENTS_PER_WARP + MBARRIERS_PER_CTA;
  uint64_t most = 0xFFF0 / (size * (uint64_t)agents_per_slot), resident = (uint64_t)e->num_sms / size;
  if (dims[10]) resident = e->total_clusters;  // a cooperative launch
  if (dims[10] && resident > most) {
    machine_finding(e, CK_BOUNDS, "a cooperative launch of %llu clusters, of which the emulator can "
                    "hold %llu", (unsigned long long)resident, (unsigned long long)most);
    return false;
  }
  if (resident > e->total_clusters) resident = e->total_clusters;
  if (resident > most) resident = most;
  e->nclusters = resident ? (int)resident : 1;
  e->nslots = e->nclusters * (int)size;
  e->agents_used = e->nslots * e->warps_per_cta * AGENTS_PER_WARP;
  e->nagents = (e->agents_used + e->nslots * MBARRIERS_PER_CTA + 7) & ~7;
  e->clusters = calloc((size_t)e->nclusters, sizeof *e->clusters);
  e->cluster_order = malloc(sizeof(uint32_t) * e->total_clusters);
  for (uint64_t i = 0; i < e->total_clusters; i++)
    e->cluster_order[i] = (uint32_t)(e->first_cluster + i * stride);
  e->next_cluster = 0;
  e->pending_clusters = e->total_clusters;
  e->slot_clocks = calloc((size_t)e->agents_used + 1, sizeof(Clock));
  free(e->executed);
  e->executed = calloc((size_t)p->ncode + 1, sizeof(uint64_t));
  e->stop = false;
  e->astray = 0;
  e->noted_inits = false;
  e->tcgen05_fences[0] = e->tcgen05_fences[1] = -1;
  e->rng = e->seed * 0x9E3779B97F4A7C15ull + 0x1234567;
  if (!e->rng) e->rng = 1;
  for (int i = 0; i < 8; i++) emu_random(e, 2);
  marks_reset(e);
  return true;
}

int emu_launch(Emu *e, Program *p, const uint32_t dims[11], const void *params,
               uint64_t param_bytes, int (*report)(uint64_t, uint64_t)) {
  bool good = set_up(e, p, dims, params, param_bytes);
  if (good) main_loop(e, report);
  clear_machine(e);
  return !good ? -1 : e->stop ? 1 : 0;
}

// -------------------------------------------------------------------------------- C interface

Emu *emu_new(void) {
  Emu *e = calloc(1, sizeof *e);
  e->checks = ~0ull;
  e->num_sms = 4;
  e->cluster_stride = 1;
  e->slice = 64;
  e->max_findings = 100;
  e->numerics = 1;
  e->findings = findings_new();
  return e;
}

void emu_regions_clear(Emu *e) {
  for (int i = 0; i < e->nregions; i++) {
    free((void *)e->regions[i].name);
    free(e->regions[i].initialised);
    region_forget(&e->regions[i]);
  }
  e->nregions = 0;
}

void emu_free(Emu *e) {
  if (!e) return;
  findings_free(e);
  emu_regions_clear(e);
  output_clear(e);
  free(e->regions);
  free(e->executed);
  free(e->reads.nodes);
  for (int i = 0; i < SCRATCH_COUNT; i++) free(e->scratch[i].memory);
  trace_free(e);
  stream_free(e);
  free(e);
}

void emu_set(Emu *e, const char *option, int64_t value) {
  if (!strcmp(option, "checks")) e->checks = (uint64_t)value;
  else if (!strcmp(option, "schedule")) e->schedule = (int)value;
  else if (!strcmp(option, "num_sms")) e->num_sms = (int)value;
  else if (!strcmp(option, "slice")) e->slice = (int)value;
  else if (!strcmp(option, "seed")) e->seed = (uint64_t)value;
  else if (!strcmp(option, "spurious_cancel")) e->spurious_cancel = value != 0;
  else if (!strcmp(option, "tracing")) e->tracing = value != 0;
  else if (!strcmp(option, "record_every")) e->record_every = (int)value;
  else if (!strcmp(option, "max_findings")) e->max_findings = (int)value;
  else if (!strcmp(option, "numerics")) e->numerics = (int)value;
  else if (!strcmp(option, "first_cluster")) e->first_cluster = (uint32_t)value;
  else if (!strcmp(option, "cluster_stride")) e->cluster_stride = (uint32_t)value;
}

void emu_strings(Emu *e, const char **strings, int n) {
  e->strings = strings;
  e->nstrings = n;
}

int emu_region(Emu *e, uint64_t base, uint64_t size, const char *name, int initialised,
               int writable) {
  e->regions = realloc(e->regions, sizeof *e->regions * (size_t)(e->nregions + 1));
  int at = e->nregions;
  while (at > 0 && e->regions[at - 1].base > base) {
    e->regions[at] = e->regions[at - 1];
    at--;
  }
  e->regions[at] = (Region){base, size, strdup(name), initialised ? NULL : calloc(size, 1), NULL,
                            writable != 0};
  e->nregions++;
  return at;
}

// ---- counters

void count_mma(Emu *e, const char *kind, int m, int n, int k) {
  for (size_t i = 0; i < sizeof e->mma / sizeof *e->mma; i++) {
    if (!e->mma[i].kind) {
      e->mma[i].kind = kind;
      e->mma[i].m = m, e->mma[i].n = n, e->mma[i].k = k;
    }
    if (e->mma[i].m != m || e->mma[i].n != n || e->mma[i].k != k || strcmp(e->mma[i].kind, kind))
      continue;
    e->mma[i].count++;
    return;
  }
}

const uint64_t *emu_counters(Emu *e) { return e->counters; }
const uint64_t *emu_executed(Emu *e) { return e->executed; }
const uint64_t *emu_warp_executed(Emu *e) { return e->warp_executed; }
void emu_counters_clear(Emu *e) {
  memset(e->counters, 0, sizeof e->counters);
  memset(e->warp_executed, 0, sizeof e->warp_executed);
  memset(e->mma, 0, sizeof e->mma);
}
uint64_t emu_mma(Emu *e, int i, const char **kind, int32_t shape[3]) {
  if (i >= (int)(sizeof e->mma / sizeof *e->mma) || !e->mma[i].kind) return 0;
  *kind = e->mma[i].kind;
  shape[0] = e->mma[i].m, shape[1] = e->mma[i].n, shape[2] = e->mma[i].k;
  return e->mma[i].count;
}
const char *emu_output(Emu *e) { return output_text(e); }
void emu_output_clear(Emu *e) { output_clear(e); }
