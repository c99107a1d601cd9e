// Happens-before: vector clocks, marks of accesses to memory, and the checks that compare them.
#include "engine.h"
#include <stdio.h>
#include <sys/mman.h>

// A mark records an access to a cell or to parts of a cell: the access's epoch and its kind.
typedef struct {
  Clock clock;  // 0: no access
  uint16_t agent;
  uint16_t parts;  // bytes of a word, lanes of a group in TMEM: one bit each
  uint32_t insn : 28, flags : 4;
} Mark;
enum { MARK_ASYNC = 1, MARK_ATOMIC = 2, MARK_TENSOR = 4, MARK_LATE = 8 };

typedef struct Cell {
  Mark write, read;
  int32_t more_reads;  // first node of the further reads; all reads are unordered with each other
} Cell;

// TMEM has one cell for a group of lanes, because almost all accesses are by whole groups. For
// other accesses, `parts` names the lanes.
#define TMEM_COLUMNS 512
#define TMEM_GROUP 16
#define TMEM_CELLS (128 / TMEM_GROUP * TMEM_COLUMNS)

struct ReadNode { Mark mark; int32_t next; };

static int32_t new_node(Emu *e) {
  if (e->reads.free) {
    int32_t n = e->reads.free;
    e->reads.free = e->reads.nodes[n].next;
    return n;
  }
  if (e->reads.count == 0) e->reads.count = 1;  // index 0 stands for no read
  if (e->reads.count >= e->reads.room) {
    e->reads.room = e->reads.room ? e->reads.room * 2 : 4096;
    e->reads.nodes = realloc(e->reads.nodes, sizeof *e->reads.nodes * (size_t)e->reads.room);
  }
  return e->reads.count++;
}

void marks_reset(Emu *e) { e->reads.count = 0, e->reads.free = 0; }

// --------------------------------------------------------------------------------------- views

View view_new(Emu *e) {
  Clock *block = calloc((size_t)3 * e->nagents, sizeof(Clock));
  return (View){block, block + e->nagents, block + 2 * (size_t)e->nagents};
}

void view_free(View *v) {
  free(v->vc);
  *v = (View){0};
}

void view_clear(Emu *e, View *v) {
  if (v->vc) memset(v->vc, 0, (size_t)3 * e->nagents * sizeof(Clock));
}

void view_copy(Emu *e, View *into, const View *from) {
  size_t used = (size_t)e->agents_used * sizeof(Clock);
  memcpy(into->vc, from->vc, used);
  memcpy(into->pvc, from->pvc, used);
  memcpy(into->tvc, from->tvc, used);
}

static inline void join(Clock *restrict into, const Clock *restrict from, int n) {
  for (int i = 0; i < n; i++) into[i] = into[i] > from[i] ? into[i] : from[i];
}

void view_join(Emu *e, View *into, const View *from) {
  if (into == from || !from->vc) return;
  join(into->vc, from->vc, e->agents_used);
  join(into->pvc, from->pvc, e->agents_used);
  join(into->tvc, from->tvc, e->agents_used);
}

void view_join_flow(Emu *e, View *into, const View *from) {
  int warps = e->nslots * e->warps_per_cta;
  if (from->vc)
    for (int i = AG_FLOW; i < warps * AGENTS_PER_WARP; i += AGENTS_PER_WARP)
      if (into->vc[i] < from->vc[i]) into->vc[i] = from->vc[i];
}

// After a relaxed wait, tcgen05.fence::after_thread_sync orders only tcgen05 operations before the
// thread's own operations. This suffices where only tcgen05 operations matter (dealloc, exit).
View view_with_fenced(Warp *w) {
  Emu *e = emu_of(w);
  View v = view_new(e);
  view_copy(e, &v, &w->view);
  join(v.vc, v.tvc, e->agents_used);
  return v;
}

static inline void raise_to(Clock *c, Clock value) {
  if (*c < value) *c = value;
}

void view_add_generic(View *v, uint32_t agent, Clock clock) {
  raise_to(&v->vc[agent], clock);
  raise_to(&v->tvc[agent], clock);
}

void view_add(View *v, uint32_t agent, Clock clock) {
  view_add_generic(v, agent, clock);
  raise_to(&v->pvc[agent], clock);
}

void view_release(Warp *w, View *into) {
  Emu *e = emu_of(w);
  if (!into->vc) *into = view_new(e);
  join(into->vc, w->view.vc, e->agents_used);
  join(into->pvc, w->view.pvc, e->agents_used);
  join(into->tvc, w->fenced, e->agents_used);
  raise_to(&into->vc[agent_of(w, AG_GENERIC)], w->agent_clock[AG_GENERIC]);
  w->agent_clock[AG_GENERIC]++;
}

// Other threads' effects go to `fenced`, not to `tvc`. Only a fence orders these effects before
// this thread's next tcgen05 operation.
void view_acquire(Warp *w, const View *from) {
  if (!from->vc) return;
  Emu *e = emu_of(w);
  join(w->view.vc, from->vc, e->agents_used);
  join(w->view.pvc, from->pvc, e->agents_used);
  join(w->fenced, from->tvc, e->agents_used);
  for (uint32_t own = agent_of(w, 0); own < agent_of(w, AGENTS_PER_WARP); own++)
    raise_to(&w->view.tvc[own], from->tvc[own]);
}

// All effects of the warp, and all effects ordered before them, become visible to the asynchronous
// proxy.
void proxy_fence(Warp *w) {
  Emu *e = emu_of(w);
  join(w->view.pvc, w->view.vc, e->agents_used);
  raise_to(&w->view.pvc[agent_of(w, AG_GENERIC)], w->agent_clock[AG_GENERIC]);
  w->agent_clock[AG_GENERIC]++;
}

static bool is_tensor_agent(const Emu *e, uint32_t agent) {
  return agent < (uint32_t)(e->nslots * e->warps_per_cta * AGENTS_PER_WARP) &&
         agent % AGENTS_PER_WARP >= AG_TC;
}

static bool is_cp_async_agent(const Emu *e, uint32_t agent) {
  return agent < (uint32_t)(e->nslots * e->warps_per_cta * AGENTS_PER_WARP) &&
         agent % AGENTS_PER_WARP == AG_CP_ASYNC;
}

// Between these two fences relaxed arrivals and waits suffice: hence fence_release, _acquire.
void tcgen05_fence_before(Warp *w) {
  Emu *e = emu_of(w);
  join(w->fenced, w->view.vc, e->agents_used);
  if (!w->fence_release.vc) w->fence_release = view_new(e);
  join(w->fence_release.tvc, w->fenced, e->agents_used);
}

void tcgen05_fence_after(Warp *w) {
  Emu *e = emu_of(w);
  if (w->fence_acquire.vc) join(w->fenced, w->fence_acquire.tvc, e->agents_used);
  for (uint32_t i = 0; i < (uint32_t)e->agents_used; i++)
    raise_to(&w->view.tvc[i], is_tensor_agent(e, i) ? w->fenced[i] : w->view.vc[i]);
}

uint32_t new_mbarrier_agent(Emu *e, Clock *start) {
  *start = 0;
  if (e->nfree_agents) {
    *start = e->free_agents[--e->nfree_agents].clock;
    return e->free_agents[e->nfree_agents].agent;
  }
  if (e->agents_used < e->nagents) return (uint32_t)e->agents_used++;
  return (uint32_t)e->nagents - 1;  // far more words than a kernel has: share the last agent
}

void free_mbarrier_agent(Emu *e, uint32_t agent, Clock clock) {
  if (e->nfree_agents >= e->nagents) return;
  if (!e->free_agents) e->free_agents = calloc((size_t)e->nagents, sizeof *e->free_agents);
  e->free_agents[e->nfree_agents].agent = agent;
  e->free_agents[e->nfree_agents++].clock = clock;
}

// ------------------------------------------------------------- synchronisation through memory

typedef struct { uintptr_t address; View released; } SyncWord;
struct SyncTable { SyncWord *words; int count, room; };

static SyncWord *sync_word(Emu *e, const void *address, bool create) {
  struct SyncTable *t = e->sync;
  if (!t) e->sync = t = calloc(1, sizeof *t);
  if (2 * t->count >= t->room) {
    if (!create && !t->count) return NULL;
    struct SyncTable old = *t;
    t->room = old.room ? 2 * old.room : 64;
    t->words = calloc(t->room, sizeof *t->words);
    for (int i = 0; i < old.room; i++) {
      if (!old.words[i].address) continue;
      unsigned h = (unsigned)(old.words[i].address >> 2) * 2654435761u % (unsigned)t->room;
      while (t->words[h].address) h = (h + 1) % (unsigned)t->room;
      t->words[h] = old.words[i];
    }
    free(old.words);
  }
  uintptr_t a = (uintptr_t)address & ~(uintptr_t)3;
  unsigned h = (unsigned)(a >> 2) * 2654435761u % (unsigned)t->room;
  while (t->words[h].address && t->words[h].address != a) h = (h + 1) % (unsigned)t->room;
  if (!t->words[h].address) {
    if (!create) return NULL;
    t->words[h] = (SyncWord){a, view_new(e)};
    t->count++;
  }
  return &t->words[h];
}

void sync_table_free(Emu *e) {
  if (!e->sync) return;
  for (int i = 0; i < e->sync->room; i++)
    if (e->sync->words[i].address) view_free(&e->sync->words[i].released);
  free(e->sync->words);
  free(e->sync);
  e->sync = NULL;
}

void sync_read(Warp *w, const void *address, int order) {
  Emu *e = emu_of(w);
  if (!checking(e, CK_RACE)) return;
  SyncWord *s = sync_word(e, address, false);
  if (!s) return;
  if (order & 1) {
    view_acquire(w, &s->released);
  } else {  // a later fence turns the access into an acquire
    view_join_flow(e, &w->view, &s->released);
    if (!w->fence_acquire.vc) w->fence_acquire = view_new(e);
    view_join(e, &w->fence_acquire, &s->released);
  }
}

void sync_write(Warp *w, const void *address, int order) {
  Emu *e = emu_of(w);
  if (!checking(e, CK_RACE)) return;
  if (order & 2) {
    view_release(w, &sync_word(e, address, true)->released);
    return;
  }
  // Effects that an earlier fence has released. A word gets a view only for these.
  SyncWord *s = sync_word(e, address, w->fence_release.vc != NULL);
  if (w->fence_release.vc) view_join(e, &s->released, &w->fence_release);
  if (s) view_join_flow(e, &s->released, &w->view);
}

void memory_fence(Warp *w) {
  Emu *e = emu_of(w);
  if (!checking(e, CK_RACE)) return;
  view_acquire(w, &w->fence_acquire);
  view_release(w, &w->fence_release);
}

// -------------------------------------------------------------------------------------- checks

Access access_as(Warp *w, const Insn *I, const char *what, int agent_kind, Clock clock) {
  return (Access){
      .view = &w->view, .agent = agent_of(w, agent_kind), .clock = clock,
      .birth = w->agent_birth[agent_kind], .insn = I, .warp = w, .what = what,
      .async = agent_kind != AG_GENERIC && agent_kind != AG_CP_ASYNC,
  };
}

Access access_of(Warp *w, const Insn *I, const char *what) {
  return access_as(w, I, what, AG_GENERIC, w->agent_clock[AG_GENERIC]);
}

// Whether an agent's own effects are ordered; effects of bulk copies and of mbarriers are not.
static bool in_order(const Emu *e, uint32_t agent) {
  if (agent >= (uint32_t)(e->nslots * e->warps_per_cta * AGENTS_PER_WARP)) return false;
  uint32_t kind = agent % AGENTS_PER_WARP;
  return kind != AG_BULK_READ && kind != AG_BULK_WRITE;
}

static const char *agent_text(const Emu *e, uint32_t agent) {
  static const char *const kinds[] = {"", " cp.async", " bulk copy (source)", " bulk copy",
                                      " wgmma", "", " tcgen05.mma", " tcgen05.ld", " tcgen05.st"};
  uint32_t warps = (uint32_t)(e->nslots * e->warps_per_cta);
  if (agent >= warps * AGENTS_PER_WARP) return "a copy that signals an mbarrier";
  uint32_t slot = agent / AGENTS_PER_WARP;
  return text("SM %u warp %u%s", slot / (uint32_t)e->warps_per_cta,
              slot % (uint32_t)e->warps_per_cta, kinds[agent % AGENTS_PER_WARP]);
}

typedef struct {
  const Access *access;
  Emu *e;
  const char *space;  // "shared memory", "TMEM" ...
  const Cta *cta;     // the owner of shared memory or TMEM
  const Region *region;
  // Precomputed for the check of each word: the clocks that must cover an earlier access, one for
  // writes through the generic proxy and one for all other accesses, and the accessor's own agent.
  const Clock *generic_writes, *others;
  uint32_t own_agent;  // an impossible agent if the accessor's own effects are unordered
  Clock birth;
} Context;

static bool in_order(const Emu *e, uint32_t agent);

static Context context(const Access *a, Emu *e, const char *space, const Cta *cta,
                       const Region *region) {
  bool tmem = space[0] == 'T';
  const Clock *all = tmem && a->tensor && checking(e, CK_TCGEN05) ? a->view->tvc : a->view->vc;
  bool proxies = !tmem && a->async && checking(e, CK_PROXY);
  return (Context){a, e, space, cta, region, proxies ? a->view->pvc : all, all,
                   in_order(e, a->agent) ? a->agent : UINT32_MAX, a->birth};
}

static inline bool ordered(const Context *c, const Mark *m, bool wrote) {
  if (c->access->late || (m->flags & MARK_LATE && !c->access->async)) return true;
  const Clock *clocks = wrote && !(m->flags & MARK_ASYNC) ? c->generic_writes : c->others;
  return m->clock <= clocks[m->agent] || (m->agent == c->own_agent && m->clock >= c->birth);
}

static const char *place(const Context *c, uint64_t word) {
  if (c->region)
    return text("%s+%llu", c->region->name, (unsigned long long)(word * 4));
  if (c->space[0] == 'T')
    return text("TMEM column %llu of CTA %u, lanes from %llu on",
                (unsigned long long)(word % TMEM_COLUMNS), c->cta->linear,
                (unsigned long long)(word / TMEM_COLUMNS * TMEM_GROUP));
  return text("%s of CTA %u", address_name(c->cta, (uint32_t)word * 4), c->cta->linear);
}

// A kernel without any tcgen05.fence::before_thread_sync, or without any ::after_thread_sync, gets
// a single note.
static bool wants_fence(Emu *e, int after) {
  int *n = &e->tcgen05_fences[after];
  if (*n == -1) {
    *n = tcgen05_fences(e->program, after);
    if (!*n) *n = -2;
    return true;
  }
  return *n > 0;
}

static void report_fence(const Context *c, uint64_t word, const Mark *m, const char *kind) {
  const Access *a = c->access;
  const Insn *other = &c->e->program->code[m->insn];
  const char *none = "; the kernel has no such fence";
  if (a->warp->fenced[m->agent] < m->clock && is_tensor_agent(c->e, m->agent)) {
    if (wants_fence(c->e, 0))
      finding_with(a->warp, a->insn, other, CK_TCGEN05, SEV_NOTE,
                   "%s on %s: %s after %s, ordered by a barrier but without "
                   "tcgen05.fence::before_thread_sync before it%s",
                   kind, place(c, word), a->what, agent_text(c->e, m->agent),
                   c->e->tcgen05_fences[0] < 0 ? none : "");
    if (c->e->tcgen05_fences[1] >= 0) return;  // the reader's after-fence may exist
  }
  if (wants_fence(c->e, 1))
    finding(a->warp, a->insn, CK_TCGEN05, SEV_NOTE,  // at the instruction without the fence
            "%s on %s: %s after %s (%s), ordered by a barrier but without "
            "tcgen05.fence::after_thread_sync behind it%s",
            kind, place(c, word), a->what, agent_text(c->e, m->agent), where(other),
            c->e->tcgen05_fences[1] < 0 ? none : "");
}

static const uint8_t *host_word(const Context *c, uint64_t word) {
  if (!c->region) return c->cta->shared + word * 4;
  return (const uint8_t *)c->region->base - c->region->base % 4 + word * 4;
}

static void report(const Context *c, uint64_t word, const Mark *m, bool wrote, bool writes) {
  const Access *a = c->access;
  const Insn *other = &c->e->program->code[m->insn];
  const char *kind = wrote ? (writes ? "write after write" : "read after write")
                           : "write after read";
  bool seen = m->clock <= a->view->vc[m->agent];
  if (m->flags & MARK_LATE) {
    report_overtaken(a, other, place(c, word));
  } else if (seen && a->tensor && c->space[0] == 'T') {
    report_fence(c, word, m, kind);
  } else if (seen) {
    // Peers' kernels, which are right on hardware, have no fence after cp.async.
    int severity = is_cp_async_agent(c->e, m->agent) ? SEV_NOTE : SEV_ERROR;
    finding_with(a->warp, a->insn, other, CK_PROXY, severity,
                 "%s on %s: %s through the asynchronous proxy after a generic write by %s, "
                 "without fence.proxy.async between them",
                 kind, place(c, word), a->what, agent_text(c->e, m->agent));
  } else if (wrote && writes && a->unchanged && a->unchanged(a->data, host_word(c, word))) {
    finding_with(a->warp, a->insn, other, CK_RACE, SEV_NOTE,
                 "%s on %s: %s is not ordered after the access by %s, but both write the same value",
                 kind, place(c, word), a->what, agent_text(c->e, m->agent));
  } else {
    finding_with(a->warp, a->insn, other, CK_RACE, SEV_ERROR,
                 "%s on %s: %s is not ordered after the access by %s", kind, place(c, word),
                 a->what, agent_text(c->e, m->agent));
  }
}

// Two accesses that are not ordered are a race, unless they touch different parts of the word or
// both are atomic.
static __attribute__((noinline)) void collide(const Context *c, uint64_t word, const Mark *m,
                                              uint16_t parts, bool wrote, bool writes) {
  if (!(m->parts & parts) || (c->access->atomic && m->flags & MARK_ATOMIC)) return;
  report(c, word, m, wrote, writes);
}

static inline Mark mark_of(const Emu *e, const Access *a, uint16_t parts) {
  return (Mark){.clock = a->clock, .agent = (uint16_t)a->agent, .parts = parts,
                .flags = (unsigned)((a->async ? MARK_ASYNC : 0) | (a->atomic ? MARK_ATOMIC : 0) |
                                   (a->tensor ? MARK_TENSOR : 0) | (a->late ? MARK_LATE : 0)),
                .insn = (unsigned)(a->insn - e->program->code)};
}

static inline bool same_epoch(const Mark *m, const Mark *n) {
  return m->clock == n->clock && m->agent == n->agent && m->flags == n->flags;
}

// Whether a later read stands for an earlier read: whatever must be ordered after one read must be
// ordered after the other read.
static inline bool covers(const Access *a, const Mark *later, const Mark *earlier) {
  if (later->flags & MARK_LATE && !(earlier->flags & MARK_LATE)) return false;
  return earlier->agent == later->agent || earlier->clock <= a->view->vc[earlier->agent];
}

static void add_read(const Context *c, Cell *cell, Mark m) {
  const Access *a = c->access;
  if (!cell->read.clock || covers(a, &m, &cell->read)) {
    if (same_epoch(&cell->read, &m)) m.parts |= cell->read.parts;
    cell->read = m;
    return;
  }
  int length = 0;
  ReadNode *nodes = c->e->reads.nodes;
  for (int32_t n = cell->more_reads; n; n = nodes[n].next, length++) {
    Mark *old = &nodes[n].mark;
    if (covers(a, &m, old)) {
      if (same_epoch(old, &m)) m.parts |= old->parts;
      *old = m;
      return;
    }
  }
  if (length >= 16) {  // dropping a read can only hide a race, not invent one
    nodes[cell->more_reads].mark = m;
    return;
  }
  int32_t n = new_node(c->e);
  c->e->reads.nodes[n] = (ReadNode){m, cell->more_reads};
  cell->more_reads = n;
}

static __attribute__((noinline)) void drop_reads(const Context *c, Cell *cell, uint64_t word,
                                                 uint16_t parts) {
  ReadNode *nodes = c->e->reads.nodes;
  for (int32_t n = cell->more_reads; n;) {
    if (!ordered(c, &nodes[n].mark, false)) collide(c, word, &nodes[n].mark, parts, false, true);
    int32_t next = nodes[n].next;
    nodes[n].next = c->e->reads.free;
    c->e->reads.free = n;
    n = next;
  }
  cell->more_reads = 0;
}

static inline void touch(const Context *c, Cell *cell, uint64_t word, uint16_t parts, bool writes,
                         const Mark *m) {
  if (!ordered(c, &cell->write, true)) collide(c, word, &cell->write, parts, true, writes);
  Mark mine = *m;
  mine.parts = parts;
  if (!writes) {
    if (!same_epoch(&cell->read, m) || (cell->read.parts & parts) != parts) add_read(c, cell, mine);
    return;
  }
  if (!ordered(c, &cell->read, false)) collide(c, word, &cell->read, parts, false, true);
  cell->read.clock = 0;
  if (cell->more_reads) drop_reads(c, cell, word, parts);
  if (same_epoch(&cell->write, m)) mine.parts |= cell->write.parts;
  cell->write = mine;
}

static size_t cells_bytes(const Region *r) {
  return (size_t)((r->size + r->base % 4) / 4 + 1) * sizeof(Cell);
}

void region_forget(Region *r) {
  if (r->cells) munmap(r->cells, cells_bytes(r));
  r->cells = NULL;
}

// Whether two machines with equal regions have accessed a word of global memory in their latest
// launches, at least one of them by a write.
int emu_met(const Emu *a, const Emu *b) {
  for (int i = 0; i < a->nregions && i < b->nregions; i++) {
    const Region *r = &a->regions[i];
    const Cell *x = r->cells, *y = b->regions[i].cells;
    if (!x || !y) continue;
    for (uint64_t word = 0; word < cells_bytes(r) / sizeof(Cell); word++)
      if ((x[word].write.clock && (y[word].write.clock || y[word].read.clock)) ||
          (x[word].read.clock && y[word].write.clock))
        return 1;
  }
  return 0;
}

// Bytes [first, first + count) of memory whose words have `cells`.
static void touch_bytes(const Context *c, Cell *cells, uint64_t first, uint64_t count, bool writes) {
  Mark m = mark_of(c->e, c->access, 15);
  uint64_t word = first / 4, last = (first + count - 1) / 4;
  uint16_t head = (uint16_t)(15 << first % 4 & 15), tail = 15 >> (3 - (first + count - 1) % 4);
  if (word == last) {
    touch(c, &cells[word], word, head & tail, writes, &m);
    return;
  }
  touch(c, &cells[word], word, head, writes, &m);
  if (writes) for (word++; word < last; word++) touch(c, &cells[word], word, 15, true, &m);
  else for (word++; word < last; word++) touch(c, &cells[word], word, 15, false, &m);
  touch(c, &cells[last], last, tail, writes, &m);
}

static bool races_checked(const Emu *e) {
  return (e->checks & (1ull << CK_RACE | 1ull << CK_PROXY)) != 0;
}

static void shared_access(const Access *a, Cta *cta, uint32_t offset, uint32_t bytes, bool writes) {
  if (!bytes || !races_checked(cta->emu)) return;
  if (!cta->shared_cells) cta->shared_cells = calloc(cta->shared_bytes / 4 + 1, sizeof(Cell));
  Context c = context(a, cta->emu, "shared memory", cta, NULL);
  touch_bytes(&c, cta->shared_cells, offset, bytes, writes);
}

void shared_read(const Access *a, Cta *cta, uint32_t offset, uint32_t bytes) {
  if (bytes && !a->lazy && checking(cta->emu, CK_UNINITIALISED)) {
    const uint8_t *hole = memchr(cta->shared_init + offset, 0, bytes);
    if (hole)
      finding(a->warp, a->insn, CK_UNINITIALISED, SEV_ERROR,
              "%s reads %s of CTA %u, which nothing has written", a->what,
              address_name(cta, (uint32_t)(hole - cta->shared_init)), cta->linear);
  }
  shared_access(a, cta, offset, bytes, false);
}

void shared_write(const Access *a, Cta *cta, uint32_t offset, uint32_t bytes) {
  if (a->async && cta->nloads) check_loads(a, cta, offset, bytes);
  shared_mark_initialised(cta, offset, bytes);
  shared_access(a, cta, offset, bytes, true);
}

void shared_mark_initialised(Cta *cta, uint32_t offset, uint32_t bytes) {
  memset(cta->shared_init + offset, 1, bytes);
}

// Only bar.warp.sync, and barriers that the lanes wait for, order a warp's lanes on shared memory;
// Warp.sync_epoch counts both. A cell covers one epoch of one warp, with the latest write and the
// latest reads of the same bytes: dropping earlier accesses can only hide a race.
typedef struct LaneCell {
  uint64_t epoch;              // counts from 1; 0: no epoch
  int32_t write, read;         // instructions of the latest write and read
  Mask readers;
  uint8_t warp, writer;        // `writer` is a lane
  uint8_t written, read_bytes; // one bit per byte of the word
} LaneCell;

// ldmatrix and stmatrix are accesses of the whole warp: ordered after the lanes' earlier reads, but
// not with one lane's writes or later reads.
#define WHOLE_WARP 32

static void report_lanes(Warp *w, const Insn *I, uint64_t word, int lane, int other,
                         const char *kind, const char *did) {
  Emu *e = emu_of(w);
  finding_with(w, I, &e->program->code[other], CK_RACE, SEV_NOTE,
               "%s on %s of CTA %u: %s %s what another lane has accessed, with no bar.warp.sync "
               "between", kind, address_name(w->cta, (uint32_t)word * 4), w->cta->linear,
               lane == WHOLE_WARP ? "the warp" : text("lane %d", lane), did);
}

static void check_lane(Warp *w, const Insn *I, const LaneCell *c, uint64_t word, int lane,
                       uint8_t bytes, bool writes) {
  if (c->epoch != w->sync_epoch + 1 || c->warp != w->index) return;
  if (lane == WHOLE_WARP && writes) return;
  if (c->written & bytes && c->writer != lane)
    report_lanes(w, I, word, lane, c->write, writes ? "write after write" : "read after write",
                 writes ? "writes" : "reads");
  else if (writes && c->read_bytes & bytes && c->readers & ~(1u << lane))
    report_lanes(w, I, word, lane, c->read, "write after read", "writes");
}

static void mark_lane(Warp *w, const Insn *I, LaneCell *c, int lane, uint8_t bytes, bool writes) {
  int32_t insn = (int32_t)(I - emu_of(w)->program->code);
  if (lane == WHOLE_WARP && !writes) return;
  if (c->epoch != w->sync_epoch + 1 || c->warp != w->index)
    *c = (LaneCell){.epoch = w->sync_epoch + 1, .warp = (uint8_t)w->index};
  if (writes) {
    c->write = insn, c->writer = (uint8_t)lane, c->written = bytes;
    c->read_bytes = 0;
  } else {
    if (c->read_bytes != bytes) c->readers = 0;
    c->read = insn, c->readers |= 1u << lane, c->read_bytes = bytes;
  }
}

static void lane_access(Warp *w, const Insn *I, int lane, uint64_t offset, uint32_t bytes,
                        bool writes, bool marking) {
  LaneCell *cells = w->cta->lane_cells;
  uint64_t end = offset + bytes;
  for (uint64_t word = offset / 4; word * 4 < end; word++) {
    uint64_t low = word * 4 < offset ? offset % 4 : 0, high = end - word * 4;
    uint8_t parts = (uint8_t)((1u << (high < 4 ? high : 4)) - (1u << low));
    if (marking) mark_lane(w, I, &cells[word], lane, parts, writes);
    else check_lane(w, I, &cells[word], word, lane, parts, writes);
  }
}

// Lanes `m` read or write `bytes` of their own CTA's shared memory, each from the lane's offset on;
// `as_one`: as one access of the whole warp.
void lanes_access(Warp *w, const Insn *I, Mask m, const uint64_t *offsets, uint32_t bytes,
                  bool writes, bool as_one) {
  Cta *cta = w->cta;
  if (!checking(cta->emu, CK_RACE)) return;
  if (!cta->lane_cells) cta->lane_cells = calloc(cta->shared_bytes / 4 + 1, sizeof(LaneCell));
  for (int marking = 0; marking < 2; marking++)  // lanes of one instruction do not race
    FOR_SET(l, m) lane_access(w, I, as_one ? WHOLE_WARP : l, offsets[l], bytes, writes, marking);
}

static bool lanes_checked(Cta *cta, uint64_t offset, uint64_t bytes) {
  return checking(cta->emu, CK_RACE) && cta->lane_cells && offset + bytes <= cta->shared_bytes;
}

// One lane starts an asynchronous copy from these bytes of its CTA's shared memory; this counts as
// a read.
void lane_gives(Warp *w, const Insn *I, int lane, uint32_t offset, uint32_t bytes) {
  if (lanes_checked(w->cta, offset, bytes)) lane_access(w, I, lane, offset, bytes, false, false);
}

// The lane has awaited the copy, which `I` started. Other lanes may overwrite the bytes only after
// this lane.
void lane_gets_back(Warp *w, const Insn *I, int lane, uint32_t offset, uint32_t bytes) {
  if (lanes_checked(w->cta, offset, bytes)) lane_access(w, I, lane, offset, bytes, false, true);
}

static void global_access(const Access *a, const void *p, uint64_t bytes, bool writes) {
  Emu *e = emu_of(a->warp);
  if (!bytes) return;
  Region *r = region_at(e, (uint64_t)p, NULL);
  if (!r || (uint64_t)p + bytes > r->base + r->size) return;  // memory.c has reported the access
  uint64_t first = (uint64_t)p - r->base;
  if (r->initialised) {
    if (writes) memset(r->initialised + first, 1, bytes);
    else if (checking(e, CK_UNINITIALISED) && memchr(r->initialised + first, 0, bytes))
      finding(a->warp, a->insn, CK_UNINITIALISED, SEV_ERROR,
              "%s reads %s+%llu, which nothing has written", a->what, r->name,
              (unsigned long long)first);
  }
  if (!races_checked(e)) return;
  // Words count from an aligned address, whatever the region's own base is.
  uint64_t skew = r->base % 4;
  if (!r->cells) {
    // Cells are allocated on use, because a tensor may be larger than this machine's memory.
    void *cells = mmap(NULL, cells_bytes(r), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (cells == MAP_FAILED) {
      finding(a->warp, a->insn, CK_RACE, SEV_NOTE, "%s is too large to be checked for races",
              r->name);
      return;
    }
    r->cells = cells;
  }
  Context c = context(a, e, "global memory", NULL, r);
  touch_bytes(&c, r->cells, first + skew, bytes, writes);
}

void global_read(const Access *a, const void *p, uint64_t bytes) { global_access(a, p, bytes, false); }
void global_write(const Access *a, const void *p, uint64_t bytes) { global_access(a, p, bytes, true); }

// The lanes of [first, end) in the group of `first`, as bits; *next: the first lane of the next
// group.
static uint16_t group_lanes(int first, int end, int *next) {
  int limit = (first / TMEM_GROUP + 1) * TMEM_GROUP;
  *next = limit < end ? limit : end;
  return (uint16_t)(((1u << (*next - first)) - 1) << first % TMEM_GROUP);
}

bool tmem_initialised(const Cta *cta, int lane, int column, int lanes, int columns) {
  if (!cta->tmem_init) return false;
  for (int first = lane, next; first < lane + lanes; first = next) {
    uint16_t parts = group_lanes(first, lane + lanes, &next);
    const uint16_t *row = cta->tmem_init + first / TMEM_GROUP * TMEM_COLUMNS;
    for (int c = column; c < column + columns; c++)
      if (parts & ~row[c]) return false;
  }
  return true;
}

static void tmem_access(const Access *a, Cta *cta, int lane, int column, int lanes, int columns,
                        bool writes) {
  Emu *e = cta->emu;
  if (!cta->tmem_init) cta->tmem_init = calloc(TMEM_CELLS, sizeof *cta->tmem_init);
  bool races = races_checked(e);
  if (races && !cta->tmem_cells) cta->tmem_cells = calloc(TMEM_CELLS, sizeof(Cell));
  Context c = context(a, e, "TMEM", cta, NULL);
  Mark m = mark_of(e, a, 0);
  unsigned missing = 0;
  for (int first = lane, next; first < lane + lanes; first = next) {
    uint16_t parts = group_lanes(first, lane + lanes, &next);
    uint64_t row = (uint64_t)(first / TMEM_GROUP * TMEM_COLUMNS);
    for (uint64_t cell = row + (uint64_t)column; cell < row + (uint64_t)(column + columns); cell++) {
      if (writes) cta->tmem_init[cell] |= parts;
      else missing |= parts & ~cta->tmem_init[cell];
      if (races) touch(&c, &cta->tmem_cells[cell], cell, parts, writes, &m);
    }
  }
  if (missing && checking(e, CK_UNINITIALISED))
    finding(a->warp, a->insn, CK_UNINITIALISED, SEV_ERROR,
            "%s reads TMEM of CTA %u, lanes %d to %d, columns %d to %d, parts of which nothing has "
            "written", a->what, cta->linear, lane, lane + lanes - 1, column, column + columns - 1);
}

void tmem_read(const Access *a, Cta *cta, int lane, int column, int lanes, int columns) {
  tmem_access(a, cta, lane, column, lanes, columns, false);
}

void tmem_write(const Access *a, Cta *cta, int lane, int column, int lanes, int columns) {
  tmem_access(a, cta, lane, column, lanes, columns, true);
}

void tmem_forget(Cta *cta, int column, int columns) {
  if (!cta->tmem_init) return;
  for (int group = 0; group < TMEM_CELLS / TMEM_COLUMNS; group++)
    memset(cta->tmem_init + group * TMEM_COLUMNS + column, 0,
           (size_t)columns * sizeof *cta->tmem_init);
}

// ----------------------------------------------------------------------------------------- exit
//
// When a CTA's last warp exits, other CTAs' accesses to the CTA's shared memory must be ordered
// before the exit.

static bool seen_by_all(const Cta *cta, const Mark *m) {
  for (int i = 0; i < cta->nwarps; i++)
    if (m->clock <= cta->warps[i].view.vc[m->agent] ||
        m->clock <= cta->warps[i].view.tvc[m->agent])
      return true;
  return false;
}

static void check_at_exit(Warp *w, const Insn *I, uint64_t word, const Mark *m, bool wrote) {
  Cta *cta = w->cta;
  Emu *e = cta->emu;
  if (!m->clock) return;
  uint32_t slot = m->agent / AGENTS_PER_WARP / (uint32_t)e->warps_per_cta;
  bool copy = slot >= (uint32_t)e->nslots;  // a copy signals an mbarrier
  if ((!copy && slot == (uint32_t)cta->slot) || seen_by_all(cta, m)) return;
  const Insn *other = &e->program->code[m->insn];
  const char *name = address_name(cta, (uint32_t)word * 4);
  if (copy)
    finding_with(w, I, other, CK_EXIT, SEV_ERROR,
                 "the CTA exits, and none of its warps has waited for the copy %s %s",
                 wrote ? "to" : "from", name);
  else
    finding_with(w, I, other, CK_CLUSTER, SEV_ERROR,
                 "the CTA exits, and that is not ordered after the access to %s by %s", name,
                 agent_text(e, m->agent));
}

void accesses_at_exit(Warp *w, const Insn *I) {
  Cta *cta = w->cta;
  if (!cta->shared_cells || !checking(cta->emu, CK_EXIT) || !races_checked(cta->emu)) return;
  const ReadNode *nodes = cta->emu->reads.nodes;
  for (uint64_t word = 0; word < cta->shared_bytes / 4; word++) {
    const Cell *c = &cta->shared_cells[word];
    check_at_exit(w, I, word, &c->write, true);
    check_at_exit(w, I, word, &c->read, false);
    for (int32_t n = c->more_reads; n; n = nodes[n].next)
      check_at_exit(w, I, word, &nodes[n].mark, false);
  }
}
