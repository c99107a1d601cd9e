// Branches on chosen values (Warp.chosen) may go either way. Their lanes are undecided.
//
// Both ways of a branch meet at its immediate postdominator. Before the meeting, the branch's lanes
// may compute, but other threads must not see an effect. After the meeting, all that may differ
// between the two ways is undefined: registers and memory that a lane wrote, or would have written
// on the other way. The lane's history tells what the lane would have written: an instruction that
// the lane has always skipped, by a guard or by a branch, counts as skipped; an instruction never
// reached counts as executed.
#include "core.h"

typedef struct { Cta *cta; uint32_t at; uint16_t bytes; uint8_t lane; } Written;  // NULL: local

struct Branches {
  Mask *ran, *skipped;  // by instruction: lanes that reached it with a true guard, or a false one
  int32_t branch[32], meeting[32], origin[32];  // for each undecided lane's outermost branch
  Written *written;     // memory that undecided lanes have written
  int count, room;
};

// ----------------------------------------------------------------------------- postdominators

// The program's graph, reversed: predecessors of i are from[first[i]] to from[first[i + 1] - 1].
// The end of the program is node p->ncode.
typedef struct { int32_t *first, *from, *order, *number; int reached; } Graph;

static Graph reversed(const Program *p) {
  int32_t n = p->ncode + 1, edges = 0, to;
  Graph g = {.first = calloc((size_t)n + 2, sizeof(int32_t))};
  for (int32_t i = 0; i < p->ncode; i++)
    for (int k = 0; (to = next_of(p, i, k)) >= 0; k++) g.first[to + 2]++, edges++;
  for (int32_t i = 2; i <= n; i++) g.first[i] += g.first[i - 1];
  g.from = malloc(sizeof(int32_t) * (size_t)(edges + 1));
  for (int32_t i = 0; i < p->ncode; i++)
    for (int k = 0; (to = next_of(p, i, k)) >= 0; k++) g.from[g.first[to + 1]++] = i;
  return g;
}

// Number the nodes in postorder, from the end of the program on; -1: a node that does not lead to
// the end.
static void number_nodes(Graph *g, int32_t end) {
  size_t bytes = sizeof(int32_t) * (size_t)(end + 1);
  int32_t *stack = malloc(bytes), *edge = malloc(bytes), depth = 0;
  g->order = malloc(bytes), g->number = malloc(bytes);
  memset(g->number, 0xFF, bytes);
  memcpy(edge, g->first, bytes);
  stack[depth++] = end;
  g->number[end] = 0;  // marks the node as on the stack
  while (depth) {
    int32_t i = stack[depth - 1];
    if (edge[i] < g->first[i + 1]) {
      int32_t from = g->from[edge[i]++];
      if (g->number[from] < 0) stack[depth++] = from, g->number[from] = 0;
    } else {
      g->number[i] = g->reached;
      g->order[g->reached++] = i;
      depth--;
    }
  }
  free(stack);
  free(edge);
}

// The first node on all paths from both nodes to the end.
static int32_t common(const Graph *g, const int32_t *meeting, int32_t a, int32_t b) {
  while (a != b) {
    while (g->number[a] < g->number[b]) a = meeting[a];
    while (g->number[b] < g->number[a]) b = meeting[b];
  }
  return a;
}

// By instruction: where all paths from the instruction to the end first meet; -1: no path leads to
// the end. Algorithm: Cooper, Harvey and Kennedy, "A simple, fast dominance algorithm", on the
// reversed graph.
static int32_t *postdominators(const Program *p) {
  int32_t end = p->ncode;
  Graph g = reversed(p);
  number_nodes(&g, end);
  int32_t *meeting = malloc(sizeof(int32_t) * (size_t)(end + 1));
  memset(meeting, 0xFF, sizeof(int32_t) * (size_t)(end + 1));
  meeting[end] = end;
  for (bool changed = true; changed;) {
    changed = false;
    for (int k = g.reached - 2; k >= 0; k--) {  // the last node is the end
      int32_t i = g.order[k], found = -1, to;
      for (int j = 0; (to = next_of(p, i, j)) >= 0; j++)
        if (meeting[to] >= 0) found = found < 0 ? to : common(&g, meeting, found, to);
      changed |= meeting[i] != found;
      meeting[i] = found;
    }
  }
  free(g.first), free(g.from), free(g.order), free(g.number);
  return meeting;
}

// -------------------------------------------------------------------------------- the warp's side

void branches_start(Warp *w) {
  Emu *e = emu_of(w);
  if (!checking(e, CK_UNINITIALISED)) return;
  size_t n = (size_t)e->program->ncode + 1;
  struct Branches *b = w->branches = calloc(1, sizeof *b);
  b->ran = calloc(2 * n, sizeof(Mask));
  b->skipped = b->ran + n;
}

void branches_free(Warp *w) {
  if (!w->branches) return;
  free(w->branches->ran);
  free(w->branches->written);
  free(w->branches);
}

void branches_undecided(Warp *w, const Insn *I, Mask lanes, int32_t origin) {
  Emu *e = emu_of(w);
  struct Branches *b = w->branches;
  if (!b) return;
  int32_t at = (int32_t)(I - e->program->code);
  b->ran[at] |= lanes, b->skipped[at] |= lanes;  // the branch may or may not skip the instruction
  if (!e->meetings) e->meetings = postdominators(e->program);
  FOR_SET(l, lanes & ~w->undecided)
    b->branch[l] = at, b->meeting[l] = e->meetings[at], b->origin[l] = origin;
  w->undecided |= lanes;
}

void branches_wrote(Warp *w, int lane, Cta *cta, uint32_t at, uint32_t bytes) {
  struct Branches *b = w->branches;
  if (b->count == b->room) {
    b->room = b->room ? 2 * b->room : 64;
    b->written = realloc(b->written, sizeof *b->written * (size_t)b->room);
  }
  b->written[b->count++] = (Written){cta, at, (uint16_t)bytes, (uint8_t)lane};
}

int32_t undecided_origin(const Warp *w, int lane) { return w->branches->origin[lane]; }

static void report_effect(Warp *w, const Insn *I, Mask lanes, int32_t origin, const char *how) {
  finding_with(w, I, &emu_of(w)->program->code[origin], CK_UNINITIALISED, SEV_ERROR,
               "a branch on what the other instruction reads, which nothing has written, %s lanes "
               "0x%08x, and other threads see the effect", how, lanes);
}

void report_undecided(Warp *w, const Insn *I, Mask lanes) {
  report_effect(w, I, lanes, w->branches->origin[__builtin_ctz(lanes)], "leads here in");
}

void branches_pass(Warp *w, const Insn *I, Mask m) {
  struct Branches *b = w->branches;
  int32_t at = (int32_t)(I - emu_of(w)->program->code);
  b->ran[at] |= m;
  b->skipped[at] |= group_of(w)->mask & ~m;
  if (I->flags & F_EFFECT && m & w->undecided) report_undecided(w, I, m & w->undecided);
}

// ------------------------------------------------------------------------------- where ways meet

static void make_results_undefined(Warp *w, const Insn *I, Mask lanes) {
  for (int i = 0; i < I->ndest; i++) {
    const Operand *results = list_of(w, &I->op[i]);
    for (int k = 0; k < count_of(&I->op[i]); k++) {
      const Operand *o = &results[k];
      if (o->kind == K_REG || o->kind == K_PRED)
        set_chosen(w, o, lanes, 0, w->defined[o->id] | w->chosen[o->id]);
    }
  }
}

// The ways that lanes may take from a branch to the meeting.
typedef struct { Mask *reached, *next; int32_t *stack; int depth; } Walk;

static void walk_to(Walk *walk, int32_t at, Mask lanes) {
  lanes &= ~walk->reached[at];
  if (!lanes) return;
  if (!walk->next[at]) walk->stack[walk->depth++] = at;
  walk->reached[at] |= lanes;
  walk->next[at] |= lanes;
}

// Make the results of all instructions that the lanes may have executed undefined; or (`surely`)
// report effects that depend only on the branch itself.
static void walk_ways(Warp *w, Mask lanes, int32_t branch, int32_t meeting, bool surely) {
  const struct Branches *b = w->branches;
  const Program *p = emu_of(w)->program;
  size_t n = (size_t)p->ncode + 1;
  Walk walk = {.reached = scratch(emu_of(w), SCRATCH_BRANCHES, 3 * n * sizeof(Mask))};
  walk.next = walk.reached + n;
  walk.stack = (int32_t *)(walk.next + n);
  memset(walk.reached, 0, 2 * n * sizeof(Mask));
  walk_to(&walk, branch, lanes);
  while (walk.depth) {
    int32_t at = walk.stack[--walk.depth], to;
    Mask here = walk.next[at];
    walk.next[at] = 0;
    if (at == meeting || at == p->ncode) continue;
    const Insn *I = &p->code[at];
    Mask unknown = ~(b->ran[at] | b->skipped[at]), runs = here, skips = here;
    if (I->guard >= 0 && at != branch) {
      runs &= surely ? 0 : b->ran[at] | unknown;
      skips &= surely ? 0 : b->skipped[at] | unknown;
    }
    if (!surely) make_results_undefined(w, I, runs);
    else if (runs && I->flags & F_EFFECT)
      report_effect(w, I, runs, b->origin[__builtin_ctz(runs)], "may lead here in");
    for (int k = 0; (to = next_of(p, at, k)) >= 0; k++) {
      bool jumped = jumps(I) && (I->guard < 0 || next_of(p, at, k + 1) >= 0);
      walk_to(&walk, to, !jumps(I) ? here : jumped ? runs : skips);
    }
  }
}

static void undefine_memory(Warp *w, Mask lanes) {
  struct Branches *b = w->branches;
  int kept = 0;
  for (int i = 0; i < b->count; i++) {
    Written x = b->written[i];
    if (!(lanes >> x.lane & 1)) b->written[kept++] = x;
    else if (!x.cta) memset(w->local_init + x.at, 0, x.bytes);
    else for (uint32_t at = x.at; at < x.at + x.bytes; at++)
      if (x.cta->shared_init[at]) make_undefined(x.cta, at, 1, true);
  }
  b->count = kept;
}

void branches_leave(Warp *w, Mask lanes) {
  struct Branches *b = w->branches;
  w->undecided &= ~lanes;
  while (lanes) {
    int first = __builtin_ctz(lanes);
    Mask same = 0;
    FOR_SET(l, lanes) same |= (Mask)(b->branch[l] == b->branch[first]) << l;
    w->taint_origin = b->origin[first];
    walk_ways(w, same, b->branch[first], b->meeting[first], true);
    walk_ways(w, same, b->branch[first], b->meeting[first], false);
    undefine_memory(w, same);
    lanes &= ~same;
  }
}

void branches_meet(Warp *w) {
  Mask arrived = 0;
  FOR_SET(l, w->undecided & group_of(w)->mask)
    arrived |= (Mask)(w->branches->meeting[l] == group_of(w)->pc) << l;
  branches_leave(w, arrived);
}
