// Reports of a launch: findings and their texts, deadlocks, the trace.
#define _GNU_SOURCE  // vasprintf, open_memstream
#include "core.h"
#include <stdarg.h>
#include <stdio.h>

// ------------------------------------------------------------------------ findings and messages

typedef struct {
  int check, severity, insn, other, cta, warp;
  uint64_t count;
  char *message;
} Finding;
struct Findings {
  Finding *list;
  int count, room;
  int severity_count[2];  // separate limits: notes must not crowd out errors
  struct { uint32_t offset, bytes, element; char *name; } *shared;
  int nshared;
  struct { int first, last; char *name; } *warps;
  int nwarps;
};

const char *text(const char *format, ...) {
  static _Thread_local char ring[16][1280];
  static _Thread_local unsigned next;
  char *buffer = ring[next++ % 16];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(buffer, sizeof ring[0], format, arguments);
  va_end(arguments);
  return buffer;
}

const char *where(const Insn *I) { return text("PTX line %d", I->line); }

static const char *role_name(const Emu *e, int warp) {
  for (int i = 0; i < e->findings->nwarps; i++)
    if (warp >= e->findings->warps[i].first && warp <= e->findings->warps[i].last)
      return e->findings->warps[i].name;
  return NULL;
}

const char *warp_name(const Warp *w) {
  const Cta *c = w->cta;
  const char *role = role_name(c->emu, w->index);
  const char *rank = c->cluster->nctas > 1
                         ? text(" (rank %d of cluster %u)", c->rank, c->cluster->linear) : "";
  if (role) return text("CTA %u%s warp %d, %s", c->linear, rank, w->index, role);
  return text("CTA %u%s warp %d", c->linear, rank, w->index);
}

const char *address_name(const Cta *cta, uint32_t offset) {
  const struct Findings *f = cta->emu->findings;
  uint32_t address = offset + SHARED_BASE;
  for (int i = 0; i < f->nshared; i++) {
    if (address - f->shared[i].offset >= f->shared[i].bytes) continue;
    uint32_t into = address - f->shared[i].offset, element = f->shared[i].element;
    if (!element) return text("%s+%u", f->shared[i].name, into);
    if (into % element)
      return text("%s[%u]+%u", f->shared[i].name, into / element, into % element);
    return text("%s[%u]", f->shared[i].name, into / element);
  }
  return text("shared memory at 0x%x", address);
}

// Errors after which the launch goes on with made-up values, because the access was skipped or read
// nothing. Loops on made-up values may never end.
#define MAKES_UP_VALUES                                                                     \
  (1ull << CK_BOUNDS | 1ull << CK_ALIGNMENT | 1ull << CK_UNINITIALISED | 1ull << CK_DESCRIPTOR | \
   1ull << CK_CLUSTER | 1ull << CK_TMEM)

static void record(Emu *e, Warp *w, const Insn *I, const Insn *other, int check, int severity,
                   const char *format, va_list arguments) {
  if (severity == SEV_ERROR && MAKES_UP_VALUES >> check & 1 && !e->astray) e->astray = e->time + 1;
  if (e->cluster_stride > 1 && (e->astray || checking(e, check))) e->stop = true;
  if (!checking(e, check)) return;
  struct Findings *f = e->findings;
  int insn = I ? (int)(I - e->program->code) : -1;
  if (insn >= e->program->ncode) insn = e->program->ncode - 1;  // past the end counts as the exit
  int other_insn = other ? (int)(other - e->program->code) : -1;
  for (int i = 0; i < f->count; i++) {
    Finding *x = &f->list[i];
    if (x->check == check && x->severity == severity && x->insn == insn && x->other == other_insn) {
      x->count++;
      return;
    }
  }
  if (f->severity_count[severity] >= e->max_findings && !e->stop) return;  // keep the last finding
  f->severity_count[severity]++;
  if (f->count == f->room) {
    f->room = f->room ? 2 * f->room : 16;
    f->list = realloc(f->list, sizeof *f->list * (size_t)f->room);
  }
  char *message = NULL;
  if (vasprintf(&message, format, arguments) < 0) message = strdup("(no memory for the message)");
  f->list[f->count++] = (Finding){check, severity, insn, other_insn,
                                  w ? (int)w->cta->linear : -1, w ? w->index : -1, 1, message};
}

void finding(Warp *w, const Insn *I, int check, int severity, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record(emu_of(w), w, I, NULL, check, severity, format, arguments);
  va_end(arguments);
}

void finding_with(Warp *w, const Insn *I, const Insn *other, int check, int severity,
                  const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record(emu_of(w), w, I, other, check, severity, format, arguments);
  va_end(arguments);
}

void fatal(Warp *w, const Insn *I, int check, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  Emu *e = emu_of(w);
  e->checks |= 1ull << check;  // a finding that ends the launch is always reported
  e->stop = true;
  record(e, w, I, NULL, check, SEV_ERROR, format, arguments);
  va_end(arguments);
}

void machine_finding(Emu *e, int check, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  e->checks |= 1ull << check;
  e->stop = true;
  record(e, NULL, NULL, NULL, check, SEV_ERROR, format, arguments);
  va_end(arguments);
}

void report_undefined(Warp *w, const Insn *I, const Operand *o, Mask lanes) {
  int32_t origin = w->origin[o->id];
  if (origin >= 0 && I->flags & F_BRANCH && !(lanes & ~w->chosen[o->id])) {
    branches_undecided(w, I, lanes, origin);
    finding_with(w, I, &emu_of(w)->program->code[origin], CK_UNINITIALISED, SEV_NOTE,
                 "branches on register %d, lanes 0x%08x: its value is one of those that the program "
                 "chooses between, by what the other instruction reads, which nothing has written",
                 o->id, lanes);
    return;
  }
  if (origin >= 0)
    finding_with(w, I, &emu_of(w)->program->code[origin], CK_UNINITIALISED, SEV_ERROR,
                 "depends on register %d, lanes 0x%08x, and so on what the other instruction reads, "
                 "which nothing has written", o->id, lanes);
  else
    finding(w, I, CK_UNINITIALISED, SEV_ERROR,
            "reads register %d, which has no value in lanes 0x%08x", o->id, lanes);
  w->defined[o->id] |= lanes;  // report an undefined register only once
}

void undefined_read(Warp *w, const Insn *I, const Operand *o, Mask lanes) {
  if (I->flags & F_PURE) {  // no finding until something depends on the result
    w->tainted |= lanes;
    w->tainted_raw |= lanes & ~w->chosen[o->id];
    w->taint_origin = w->origin[o->id] >= 0 ? w->origin[o->id]
                                            : (int32_t)(I - emu_of(w)->program->code);
  } else {
    report_undefined(w, I, o, lanes);
  }
}

// ------------------------------------------------------------------------------------ trace

struct Trace { Event *events; int count, room; };

void trace_event(Emu *e, int kind, const Warp *w, const Insn *I, uint64_t start, uint64_t end,
                 uint64_t object, uint64_t detail) {
  if (!e->tracing) return;
  if (!e->trace) e->trace = calloc(1, sizeof *e->trace);
  struct Trace *t = e->trace;
  if (t->count == t->room) {
    t->room = t->room ? 2 * t->room : 4096;
    t->events = realloc(t->events, sizeof *t->events * (size_t)t->room);
  }
  t->events[t->count++] = (Event){start, end, kind, w ? (int)w->cta->linear : -1,
                                  w ? w->index : -1, I ? (int)(I - e->program->code) : -1,
                                  object, detail};
}

// ------------------------------------------------------------------------------------ deadlock

static const char *const WAIT_NAMES[] = {
    "nothing", "mbarrier", "named barrier", "cluster barrier", "other lanes", "cp.async group",
    "bulk group", "wgmma group", "TMEM columns", "tcgen05 operations", "registers", "memory",
    "a sleep"};

// The CTA and offset of the mbarrier that a group waits for.
static const Cta *awaited_mbarrier(const Warp *w, const Group *g, uint32_t *offset) {
  uint32_t address = (uint32_t)g->wait_object, rank = address >> SHARED_RANK_SHIFT;
  *offset = (address & ((1u << SHARED_RANK_SHIFT) - 1)) - SHARED_BASE;
  const Cluster *k = w->cta->cluster;
  return rank < (uint32_t)k->nctas ? k->ctas[rank] : w->cta;
}

static const Mbarrier *mbarrier_in(const Cta *c, uint32_t offset) {
  for (int i = 0; i < c->nmbarriers; i++)
    if (c->mbarriers[i].offset == offset && c->mbarriers[i].valid) return &c->mbarriers[i];
  return NULL;
}

static const char *wait_text(const Warp *w, const Group *g) {
  switch (g->wait) {
    case WAIT_NONE:
      return "runs";
    case WAIT_MBARRIER: {
      uint32_t offset;
      const Cta *c = awaited_mbarrier(w, g, &offset);
      const char *name = address_name(c, offset);
      if (c != w->cta) name = text("%s of CTA %u", name, c->linear);
      const Mbarrier *b = mbarrier_in(c, offset);
      if (!b) return text("waits for %s, which is not a valid mbarrier", name);
      const Wait *last = c == w->cta && b->waits[w->index].insn ? &b->waits[w->index] : NULL;
      bool waited = last && last->phase != UINT32_MAX;  // not only for the phase before the first
      return text("waits for the end of a phase of parity %llu of %s%s",
                  (unsigned long long)g->wait_detail & 1, name,
                  waited ? text(", after a wait for phase %u", last->phase) : "");
    }
    case WAIT_NAMED_BARRIER: {
      const NamedBarrier *b = &w->cta->bars[g->wait_object % MAX_NAMED_BARRIERS];
      uint32_t missing = b->warps_before & ~b->warps;
      if (!b->warps)  // the barrier has completed; the warp has not run since
        return text("goes on from named barrier %llu", (unsigned long long)g->wait_object);
      return text("waits at named barrier %llu: %d of %d threads have arrived, of %s, first at %s%s%s",
                  (unsigned long long)g->wait_object, b->arrived, b->expected,
                  warps_text(b->warps), where(b->first),
                  missing ? "; the last time also " : "", missing ? warps_text(missing) : "");
    }
    case WAIT_CLUSTER_BARRIER:
      return text("waits at the cluster barrier: %d of %d live threads have arrived",
                  w->cta->cluster->arrived, w->cta->cluster->live_threads);
    case WAIT_CONVERGENCE:
      return text("lanes 0x%08x wait for lanes 0x%08x to reach the same instruction", g->mask,
                  (uint32_t)g->wait_object);
    case WAIT_REGISTERS:
      return text("waits for %llu registers more, of which %llu are free: other warps have to give "
                  "theirs back", (unsigned long long)g->wait_object,
                  (unsigned long long)g->wait_detail);
    default:
      return text("waits for %s (%llu, %llu)", WAIT_NAMES[g->wait],
                  (unsigned long long)g->wait_object, (unsigned long long)g->wait_detail);
  }
}

// List each awaited mbarrier once, with its missing arrivals, missing bytes and signals.
static void list_mbarriers(FILE *out, Emu *e) {
  const Mbarrier *listed[64];
  int count = 0;
  Warp **warps = malloc(sizeof *warps * (size_t)(e->nslots * e->warps_per_cta + 1));
  int n = list_warps(e, warps);
  for (int i = 0; i < n; i++)
    for (int g = 0; g < warps[i]->ngroups && count < 64; g++) {
      const Group *group = &warps[i]->groups[g];
      if (group->wait != WAIT_MBARRIER) continue;
      uint32_t offset;
      const Cta *c = awaited_mbarrier(warps[i], group, &offset);
      const Mbarrier *b = mbarrier_in(c, offset);
      int k = 0;
      while (k < count && listed[k] != b) k++;
      if (!b || k < count) continue;
      listed[count++] = b;
      fprintf(out, "\n  %s of CTA %u, initialised at %s: in phase %u (parity %u) %d of %d arrivals "
              "and %lld bytes are missing; %s", address_name(c, offset), c->linear,
              where(b->init_insn), b->phase, b->phase & 1, b->pending, b->expected,
              (long long)b->tx, mbarrier_history(c, b));
    }
  free(warps);
}

void report_deadlock(Emu *e, const char *title) {
  char *message = NULL;
  size_t length = 0;
  FILE *out = open_memstream(&message, &length);
  fprintf(out, "%s", title);
  Warp *first = NULL;
  const Insn *at = NULL;
  int listed = 0, resident = (int)(e->cluster_dim[0] * e->cluster_dim[1] * e->cluster_dim[2]);
  for (int k = 0; k < e->nclusters; k++) {
    if (!e->clusters[k]) continue;
    for (int c = 0; c < resident; c++) {
      Cta *cta = e->clusters[k]->ctas[c];
      uint32_t exited = 0;
      for (int i = 0; i < cta->nwarps; i++) {
        Warp *w = &cta->warps[i];
        exited |= (uint32_t)w->exited << i;
        for (int g = 0; g < w->ngroups && !w->exited; g++) {
          const Insn *I = &e->program->code[w->groups[g].pc];
          if (!first) first = w, at = I;
          if (listed++ < 128)
            fprintf(out, "\n  %s, %s: %s", warp_name(w), where(I), wait_text(w, &w->groups[g]));
        }
      }
      if (exited) fprintf(out, "\n  CTA %u: %s exited", cta->linear, warps_text(exited));
    }
  }
  if (listed > 128) fprintf(out, "\n  and %d more", listed - 128);
  list_mbarriers(out, e);
  if (e->next_cluster < e->total_clusters)
    fprintf(out, "\n  %llu clusters have not been launched yet",
            (unsigned long long)(e->total_clusters - e->next_cluster));
  fclose(out);
  if (first) fatal(first, at, CK_DEADLOCK, "%s", message);
  else machine_finding(e, CK_DEADLOCK, "%s", message);
  e->stop = true;
  free(message);
}

// -------------------------------------------------------------------------------- C interface

struct Findings *findings_new(void) { return calloc(1, sizeof(struct Findings)); }

void emu_findings_clear(Emu *e) {
  for (int i = 0; i < e->findings->count; i++) free(e->findings->list[i].message);
  e->findings->count = 0;
  memset(e->findings->severity_count, 0, sizeof e->findings->severity_count);
}

void emu_names_clear(Emu *e) {
  for (int i = 0; i < e->findings->nshared; i++) free(e->findings->shared[i].name);
  for (int i = 0; i < e->findings->nwarps; i++) free(e->findings->warps[i].name);
  e->findings->nshared = e->findings->nwarps = 0;
}

void findings_free(Emu *e) {
  emu_findings_clear(e);
  emu_names_clear(e);
  free(e->findings->list);
  free(e->findings->shared);
  free(e->findings->warps);
  free(e->findings);
}

void emu_name_shared(Emu *e, uint32_t offset, uint32_t bytes, uint32_t element, const char *name) {
  struct Findings *f = e->findings;
  f->shared = realloc(f->shared, sizeof *f->shared * (size_t)(f->nshared + 1));
  f->shared[f->nshared].offset = offset;
  f->shared[f->nshared].bytes = bytes;
  f->shared[f->nshared].element = element;
  f->shared[f->nshared++].name = strdup(name);
}

void emu_name_warps(Emu *e, int first, int last, const char *name) {
  struct Findings *f = e->findings;
  f->warps = realloc(f->warps, sizeof *f->warps * (size_t)(f->nwarps + 1));
  f->warps[f->nwarps].first = first;
  f->warps[f->nwarps].last = last;
  f->warps[f->nwarps++].name = strdup(name);
}

typedef struct {
  int32_t check, severity, insn, other, cta, warp;
  uint64_t count;
  const char *message;
} FindingRecord;

int emu_finding_count(Emu *e) { return e->findings->count; }
void emu_finding(Emu *e, int i, FindingRecord *out) {
  const Finding *f = &e->findings->list[i];
  *out = (FindingRecord){f->check, f->severity, f->insn, f->other,
                         f->cta, f->warp, f->count, f->message};
}

void emu_events_clear(Emu *e) {
  if (e->trace) e->trace->count = 0;
}
int emu_events(Emu *e, const Event **out) {
  *out = e->trace ? e->trace->events : NULL;
  return e->trace ? e->trace->count : 0;
}
void trace_free(Emu *e) {
  if (e->trace) free(e->trace->events);
  free(e->trace);
}

const char *emu_wait_name(int i) {
  return i < (int)(sizeof WAIT_NAMES / sizeof *WAIT_NAMES) ? WAIT_NAMES[i] : NULL;
}
