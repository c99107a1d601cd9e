// The machine: launch, scheduling, divergence, control flow, asynchronous work, findings, trace;
// and the C interface that machine.py calls.
#define _GNU_SOURCE  // vasprintf, open_memstream
#include "engine.h"
#include <stdarg.h>
#include <stdio.h>

void marks_reset(Emu *e);           // check.c
void sync_table_free(Emu *e);       // check.c

#define SPIN_INSTRUCTIONS 50000ull        // without progress, before asynchronous effects come
#define LIVELOCK_INSTRUCTIONS 20000000ull  // without progress, before it is called a livelock
#define ASTRAY_INSTRUCTIONS 2000000ull  // on made-up values, before a launch is given up
#define STARVATION_SHIFT 14  // every 2^14 instructions a divergent warp changes which lanes go first

// ------------------------------------------------------------------------------------- names

static const char *const CHECK_NAMES[CK_COUNT + 1] = {
    "deadlock", "race", "proxy-fence", "tcgen05-sync", "uninitialised", "out-of-bounds",
    "misaligned", "descriptor", "barrier", "tmem", "exit", "registers", "warp-sync", "wgmma",
    "cluster", "assert", "counters", NULL};
static const char *const COUNTER_NAMES[CT_COUNT + 1] = {
    "global_load_bytes", "global_store_bytes", "shared_load_bytes", "shared_store_bytes",
    "local_bytes", "cp_async_bytes", "tma_load_bytes", "tma_store_bytes", "tma_reduce_bytes",
    "bulk_bytes", "dsmem_bytes", "tmem_load_bytes", "tmem_store_bytes", "tmem_copy_bytes",
    "atomic_bytes", "shared_wavefronts", "shared_wavefronts_ideal", "global_sectors",
    "global_sectors_ideal", "mma_sync_flops", "wgmma_flops", "tcgen05_flops", "async_operations",
    "barrier_phases", NULL};
static const char *const SPECIAL_NAMES[SR_COUNT + 1] = {
    "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y",
    "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%clusterid.x", "%clusterid.y",
    "%clusterid.z", "%nclusterid.x", "%nclusterid.y", "%nclusterid.z", "%cluster_ctaid.x",
    "%cluster_ctaid.y", "%cluster_ctaid.z", "%cluster_nctaid.x", "%cluster_nctaid.y",
    "%cluster_nctaid.z", "%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster",
    "%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid", "%lanemask_eq",
    "%lanemask_le", "%lanemask_lt", "%lanemask_ge", "%lanemask_gt", "%clock", "%clock_hi",
    "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi", "%dynamic_smem_size",
    "%total_smem_size", "%aggr_smem_size", NULL};

const char *emu_check_name(int i) { return i < CK_COUNT ? CHECK_NAMES[i] : NULL; }
const char *emu_counter_name(int i) { return i < CT_COUNT ? COUNTER_NAMES[i] : NULL; }
const char *emu_special_register_name(int i) { return i < SR_COUNT ? SPECIAL_NAMES[i] : NULL; }

// Each has a file of its name.
static const struct { const char *name; const Form *forms; } FAMILIES[] = {
    {"control", FORMS_CONTROL}, {"integer", FORMS_INTEGER}, {"float", FORMS_FLOAT},
    {"convert", FORMS_CONVERT}, {"warp", FORMS_WARP}, {"barrier", FORMS_BARRIER},
    {"mbarrier", FORMS_MBARRIER}, {"fence", FORMS_FENCE}, {"address", FORMS_ADDRESS},
    {"launch_control", FORMS_LAUNCH_CONTROL}, {"memory", FORMS_MEMORY},
    {"atomic", FORMS_ATOMIC}, {"cp_async", FORMS_CP_ASYNC}, {"bulk_copy", FORMS_BULK_COPY},
    {"tensor_copy", FORMS_TENSOR_COPY}, {"tensor_map", FORMS_TENSOR_MAP},
    {"async_store", FORMS_ASYNC_STORE}, {"mma", FORMS_MMA}, {"wgmma", FORMS_WGMMA},
    {"tmem", FORMS_TMEM}, {"tcgen05_mma", FORMS_TCGEN05_MMA},
    {"tcgen05_copy", FORMS_TCGEN05_COPY}};
#define FAMILY_COUNT ((int)(sizeof FAMILIES / sizeof *FAMILIES))

static const Form *form_at(int i, const char **family) {
  for (int f = 0; f < FAMILY_COUNT; f++)
    for (const Form *form = FAMILIES[f].forms; form->pattern; form++)
      if (i-- == 0) {
        if (family) *family = FAMILIES[f].name;
        return form;
      }
  return NULL;
}

int emu_form_count(void) {
  int n = 0;
  for (int f = 0; f < FAMILY_COUNT; f++)
    for (const Form *form = FAMILIES[f].forms; form->pattern; form++) n++;
  return n;
}
const char *emu_form_pattern(int i) { return form_at(i, NULL)->pattern; }
const char *emu_form_operands(int i) { return form_at(i, NULL)->operands; }
int emu_form_flags(int i) { return (int)form_at(i, NULL)->flags; }
const char *emu_form_family(int i) {
  const char *family = NULL;
  form_at(i, &family);
  return family;
}

// ----------------------------------------------------------------------------------- program

typedef struct {
  int32_t form, guard, guard_id, guard_neg, op_begin, nops, line, file, source_line, opcode;
  int16_t mod[12];
} InsnRecord;

typedef struct {
  int32_t nregs, reg_words, local_bytes, param_bytes, static_shared, reqntid, maxnreg, arch;
  int32_t launch_registers, keeps_registers;
} ProgramHeader;

// How many entries of Insn.op a form's destinations take: they come first.
static uint8_t destinations(const Form *form) {
  uint8_t n = 0;
  for (const char *token = form->operands; *token == 'd';) {
    size_t length = strcspn(token, " ");
    n += length > 2 && token[length - 1] == 'p' ? 2 : 1;  // "d32p", "dpp": a pair
    token += length + strspn(token + length, " ");
  }
  return n;
}

static bool is_arithmetic(const char *family) {
  return !strcmp(family, "integer") || !strcmp(family, "float") || !strcmp(family, "convert");
}

Program *emu_program_new(const InsnRecord *records, int n, const Operand *operands, int noperands,
                         const ProgramHeader *h, const char *name) {
  int nforms = emu_form_count();
  const Form **forms = malloc(sizeof *forms * (size_t)nforms);
  const char **families = malloc(sizeof *families * (size_t)nforms);
  for (int i = 0; i < nforms; i++) forms[i] = form_at(i, &families[i]);
  Program *p = calloc(1, sizeof *p);
  *p = (Program){
      .code = calloc((size_t)n + 1, sizeof(Insn)), .ncode = n,
      .operands = malloc(sizeof(Operand) * (size_t)(noperands + 1)), .noperands = noperands,
      .nregs = h->nregs, .reg_words = h->reg_words, .local_bytes = h->local_bytes,
      .param_bytes = h->param_bytes, .static_shared = h->static_shared, .reqntid = h->reqntid,
      .maxnreg = h->maxnreg, .arch = h->arch, .launch_registers = h->launch_registers,
      .keeps_registers = h->keeps_registers != 0, .name = strdup(name)};
  memcpy(p->operands, operands, sizeof(Operand) * (size_t)noperands);
  for (int i = 0; i < n; i++) {
    const InsnRecord *r = &records[i];
    Insn *I = &p->code[i];
    *I = (Insn){.exec = forms[r->form]->exec, .op = p->operands + r->op_begin, .guard = r->guard,
                .guard_id = r->guard_id, .guard_neg = (uint8_t)r->guard_neg,
                .nops = (uint8_t)r->nops, .flags = (uint16_t)forms[r->form]->flags,
                .form = r->form, .line = r->line, .file = r->file,
                .source_line = r->source_line, .opcode = r->opcode};
    memcpy(I->mod, r->mod, sizeof I->mod);
    I->ndest = destinations(forms[r->form]);
    if (is_arithmetic(families[r->form])) I->flags |= F_PURE;
  }
  free(forms);
  free(families);
  return p;
}

void emu_program_free(Program *p) {
  if (!p) return;
  free(p->code);
  free(p->operands);
  free((void *)p->name);
  free(p);
}

// ------------------------------------------------------------------------ findings and messages

typedef struct {
  int check, severity, insn, other, cta, warp;
  uint64_t count;
  char *message;
} Finding;
struct Findings {
  Finding *list;
  int count, room;
  int severity_count[2];  // each limited by itself: notes do not crowd out errors
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

// Errors behind which the launch goes on with values that no kernel has computed: the access was
// left out, or read what is not there. Loops may then never end.
#define MAKES_UP_VALUES                                                                     \
  (1ull << CK_BOUNDS | 1ull << CK_ALIGNMENT | 1ull << CK_UNINITIALISED | 1ull << CK_DESCRIPTOR | \
   1ull << CK_CLUSTER | 1ull << CK_TMEM)

static void record(Emu *e, Warp *w, const Insn *I, const Insn *other, int check, int severity,
                   const char *format, va_list arguments) {
  if (severity == SEV_ERROR && MAKES_UP_VALUES >> check & 1 && !e->astray) e->astray = e->time + 1;
  if (!checking(e, check)) return;
  struct Findings *f = e->findings;
  int insn = I ? (int)(I - e->program->code) : -1;
  if (insn >= e->program->ncode) insn = e->program->ncode - 1;  // behind the last one: it exits
  int other_insn = other ? (int)(other - e->program->code) : -1;
  for (int i = 0; i < f->count; i++) {
    Finding *x = &f->list[i];
    if (x->check == check && x->severity == severity && x->insn == insn && x->other == other_insn) {
      x->count++;
      return;
    }
  }
  if (f->severity_count[severity] >= e->max_findings && !e->stop) return;  // stop: the last word
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
  e->checks |= 1ull << check;  // what ends a launch is always said
  e->stop = true;
  record(e, w, I, NULL, check, SEV_ERROR, format, arguments);
  va_end(arguments);
}

static void machine_finding(Emu *e, int check, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  e->checks |= 1ull << check;
  e->stop = true;
  record(e, NULL, NULL, NULL, check, SEV_ERROR, format, arguments);
  va_end(arguments);
}

static void report_undefined(Warp *w, const Insn *I, const Operand *o, Mask lanes) {
  int32_t origin = w->origin[o->id];
  if (origin >= 0 && I->flags & F_BRANCH && !(lanes & ~w->chosen[o->id]))
    finding_with(w, I, &emu_of(w)->program->code[origin], CK_UNINITIALISED, SEV_NOTE,
                 "branches on register %d, lanes 0x%08x: its value is one of those that the program "
                 "chooses between, by what the other instruction reads, which nothing has written",
                 o->id, lanes);
  else if (origin >= 0)
    finding_with(w, I, &emu_of(w)->program->code[origin], CK_UNINITIALISED, SEV_ERROR,
                 "depends on register %d, lanes 0x%08x, and so on what the other instruction reads, "
                 "which nothing has written", o->id, lanes);
  else
    finding(w, I, CK_UNINITIALISED, SEV_ERROR,
            "reads register %d, which has no value in lanes 0x%08x", o->id, lanes);
  w->defined[o->id] |= lanes;  // said once
}

void undefined_read(Warp *w, const Insn *I, const Operand *o, Mask lanes) {
  if (I->flags & F_PURE) {  // it matters once something else depends on it
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
    case SR_TOTAL_SMEM_SIZE: return (c->shared_bytes + 127) & ~127u;  // as it is allocated
    case SR_AGGR_SMEM_SIZE: return c->shared_bytes + 1024;            // with the system's part
    default: return 0;  // %gridid
  }
}

// -------------------------------------------------------------------------- asynchronous work

AsyncOp *new_async(Warp *w, const Insn *I, const char *what, int agent_kind, Clock clock) {
  Emu *e = emu_of(w);
  AsyncOp *op = calloc(1, sizeof *op);
  op->emu = e;
  op->cta = w->cta;
  op->warp = w;
  op->insn = I;
  op->what = what;
  op->stages = 1;
  op->issued = e->time;
  op->view = view_new(e);
  view_copy(e, &op->view, &w->view);
  // What the issuing thread itself has done so far comes before what it issues.
  uint32_t own = agent_of(w, AG_GENERIC);
  if (op->view.vc[own] < w->agent_clock[AG_GENERIC]) op->view.vc[own] = w->agent_clock[AG_GENERIC];
  w->agent_clock[AG_GENERIC]++;
  op->access = access_as(w, I, what, agent_kind, clock);
  op->access.view = &op->view;
  return op;
}

void submit(AsyncOp *op) {
  Emu *e = op->emu;
  op->number = ++e->async_number;
  op->previous = e->async_last;
  if (e->async_last) e->async_last->next = op;
  else e->async_first = op;
  e->async_last = op;
  e->async_count += !op->on_demand;
  e->counters[CT_ASYNC_OPS]++;
}

static void free_async(AsyncOp *op) {
  if (op->release) op->release(op);
  else free(op->data);
  view_free(&op->view);
  free(op);
}

static void retire(AsyncOp *op) {
  Emu *e = op->emu;
  if (op->previous) op->previous->next = op->next;
  else e->async_first = op->next;
  if (op->next) op->next->previous = op->previous;
  else e->async_last = op->previous;
  e->async_count -= !op->on_demand;
  op->finished = true;
  if (!op->holders) free_async(op);
}

static void run_stage(AsyncOp *op) {
  Emu *e = op->emu;
  op->run(op, op->stage++);
  progress(e);
  if (op->stage < op->stages) return;
  trace_event(e, 1, op->warp, op->insn, op->issued, e->time, op->number, 0);
  retire(op);
}

static void run_all_stages(AsyncOp *op) {
  for (int left = op->stages - op->stage; left > 0; left--) run_stage(op);
}

void force(AsyncOp *op) {
  if (op->finished) return;
  Emu *e = op->emu;
  uint64_t queue = op->queue, number = op->number;
  for (AsyncOp *o = e->async_first; o && queue;) {
    AsyncOp *next = o->next;
    if (o->number >= number) break;
    if (o->queue == queue) {
      run_all_stages(o);
      next = e->async_first;  // the list may have changed anywhere
    }
    o = next;
  }
  run_all_stages(op);
}

void set_pending(Warp *w, const Operand *o, AsyncOp *op) {
  clear_pending(w, o);
  if (!w->pending) w->pending = calloc((size_t)emu_of(w)->program->nregs + 1, sizeof *w->pending);
  w->pending[o->id] = op;
  w->npending++;
  op->holders++;
}

void clear_pending(Warp *w, const Operand *o) {
  if (!w->npending || !w->pending[o->id]) return;
  AsyncOp *op = w->pending[o->id];
  w->pending[o->id] = NULL;
  w->npending--;
  if (--op->holders == 0 && op->finished) free_async(op);
}

static bool is_wgmma(const AsyncOp *op) {
  return op->access.agent == agent_of(op->warp, AG_WGMMA);
}

// Wait for the operation that owns a register, as the assembler's code would, and free all of its.
static void complete_pending(Warp *w, const Operand *o) {
  AsyncOp *op = w->pending[o->id];
  uint32_t agent = op->access.agent;
  Clock clock = op->access.clock;
  op->holders++;  // kept while it runs
  force(op);
  view_add(&w->view, agent, clock);
  clear_pending(w, o);
  const Operand *results = list_of(w, &op->insn->op[0]);
  for (int i = 0; i < count_of(&op->insn->op[0]); i++)
    if (results[i].kind == K_REG && w->npending && w->pending[results[i].id] == op)
      clear_pending(w, &results[i]);
  if (--op->holders == 0 && op->finished) free_async(op);
}

void pending_read(Warp *w, const Insn *I, const Operand *o) {
  AsyncOp *op = w->pending[o->id];
  if (is_wgmma(op))
    finding_with(w, I, op->insn, CK_WGMMA, SEV_ERROR,
                 "reads a register that a wgmma still owns: wgmma.wait_group is missing");
  else
    finding(w, op->insn, CK_TCGEN05, SEV_NOTE,
            "its registers are read (%s) without tcgen05.wait::ld: it works only because the "
            "assembler waits by itself", where(I));
  complete_pending(w, o);
}

void pending_write(Warp *w, const Insn *I, const Operand *o) {
  AsyncOp *op = w->pending[o->id];
  if (op->insn == I) return;  // its own result
  if (is_wgmma(op))
    finding_with(w, I, op->insn, CK_WGMMA, SEV_ERROR,
                 "overwrites a register that a wgmma still owns: wgmma.wait_group is missing");
  complete_pending(w, o);
}

// An operation may run its next stage unless an earlier one of its queue has not run that yet.
static bool eligible(const AsyncOp *op) {
  if (op->on_demand) return false;
  if (!op->queue) return true;
  for (const AsyncOp *o = op->previous; o; o = o->previous)
    if (o->queue == op->queue && o->stage <= op->stage) return false;
  return true;
}

static void run_some_async(Emu *e) {
  if (!e->async_count) return;
  if (e->schedule == 0) {
    while (e->async_count && !e->stop) {
      AsyncOp *op = e->async_first;
      while (op->on_demand) op = op->next;
      run_all_stages(op);
    }
    return;
  }
  uint32_t count = 0, chosen;
  for (AsyncOp *op = e->async_first; op; op = op->next) count += eligible(op);
  chosen = emu_random(e, count);
  for (AsyncOp *op = e->async_first; op; op = op->next)
    if (eligible(op) && chosen-- == 0) {
      run_stage(op);
      return;
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

// Join groups at the same program counter, and choose which one goes on. False: none can.
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

static void warp_exits(Warp *w) {
  Cta *c = w->cta;
  w->exited = true;
  c->live_warps--;
  if (c->live_warps == 0) {
    c->exited = true;
    if (c->emu->astray) c->emu->astray = c->emu->time + 1;  // it still gets on
    bool all = true;
    for (int i = 0; i < c->cluster->nctas; i++) all &= c->cluster->ctas[i]->exited;
    c->cluster->exited = all;
  }
}

void exit_lanes(Warp *w, Mask m) {
  Cta *c = w->cta;
  copies_at_exit(w, m);
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
  wgmma_at_exit(w);
  warp_exits(w);
}

bool live_cta(const Cta *cta) { return !cta->exited; }

// ------------------------------------------------------------------------------------- execution

// Lanes of an aligned instruction have to arrive together. False: wait for the others.
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

// Lanes of m in which an operand is the same as in `lane`.
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

// One lane for each different set of operands. By the ISA every thread issues an operation of its
// own; what the assembler makes of it issues one for the warp.
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

// Run up to `budget` instructions of a warp; how many were completed.
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
    if (I->guard >= 0) {
      Mask p = w->regs[I->guard], bad = m & ~w->defined[I->guard_id];
      if (__builtin_expect(bad != 0, 0)) {
        Operand o = {.id = I->guard_id};
        report_undefined(w, I, &o, bad);
      }
      m &= I->guard_neg ? ~p : p;
    }
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
// fourth warp; the assembler uses no more than 255, and the hardware allocates them by eights.
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
  *w = (Warp){.cta = c, .index = index, .slot = c->slot * e->warps_per_cta + index};
  int threads = c->nthreads - index * 32;
  w->live = threads >= 32 ? ALL_LANES : (1u << threads) - 1;
  add_group(w, w->live, 0);
  size_t words = (size_t)p->reg_words + 8;
  w->regs = aligned_alloc(64, (words * 4 + 63) & ~(size_t)63);
  memset(w->regs, 0xFF, words * 4);  // NaN, and the same in every run
  w->defined = zeroed(sizeof(Mask) * (size_t)(p->nregs + 1));
  w->chosen = zeroed(sizeof(Mask) * (size_t)(p->nregs + 1));
  w->origin = malloc(sizeof(int32_t) * (size_t)(p->nregs + 1));
  memset(w->origin, 0xFF, sizeof(int32_t) * (size_t)(p->nregs + 1));
  w->local = zeroed((size_t)p->local_bytes * 32);
  w->local_init = zeroed((size_t)p->local_bytes * 32);
  w->view = view_new(e);
  w->fenced = zeroed(sizeof(Clock) * (size_t)e->nagents);
  // Epochs go on where the slot's previous warp left off, which this one does not order.
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
  free(w->regs);
  free(w->defined);
  free(w->chosen);
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
  c->nthreads = (int)(e->block[0] * e->block[1] * e->block[2]);
  c->nwarps = c->live_warps = e->warps_per_cta;
  c->shared_bytes = (uint32_t)e->program->static_shared + e->dynamic_shared;
  c->shared = aligned_alloc(1024, (c->shared_bytes + 1024 + 1023) & ~1023u);
  memset(c->shared, 0xFF, c->shared_bytes);  // NaN, so that a result made of it shows
  c->shared_init = zeroed(c->shared_bytes);
  c->mbarrier_at = malloc(sizeof(int16_t) * (c->shared_bytes / 8 + 1));
  memset(c->mbarrier_at, 0xFF, sizeof(int16_t) * (c->shared_bytes / 8 + 1));
  c->warps = calloc((size_t)c->nwarps, sizeof(Warp));
  for (int i = 0; i < c->nwarps; i++) new_warp(c, i);
  tmem_new(c);
  return c;
}

static void free_cta(Cta *c) {
  tmem_delete(c);
  for (int i = 0; i < c->nwarps; i++) free_warp(&c->warps[i]);
  for (int i = 0; i < c->nmbarriers; i++) {
    view_free(&c->mbarriers[i].next);
    view_free(&c->mbarriers[i].done);
    free_mbarrier_agent(c->emu, c->mbarriers[i].agent, c->mbarriers[i].clock);
  }
  for (int i = 0; i < MAX_NAMED_BARRIERS; i++) {
    view_free(&c->bars[i].next);
  }
  free(c->mbarriers);
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
  for (AsyncOp *op = e->async_first; op;) {  // what is still under way goes first
    AsyncOp *next = op->next;
    if (op->cta->cluster == k) {
      if (op->on_demand) retire(op);
      else force(op);
      next = e->async_first;
    }
    op = next;
  }
  for (int i = 0; i < k->nctas; i++) mbarriers_at_exit(k->ctas[i]);
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
  for (int i = 0; i < 3; i++) id[i] *= e->cluster_dim[i];  // of its first CTA
  return true;
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
      if (!mbarrier_in(c, offset)) return text("waits for %s, which is not a valid mbarrier", name);
      return text("waits for the end of a phase of parity %llu of %s",
                  (unsigned long long)g->wait_detail & 1, name);
    }
    case WAIT_NAMED_BARRIER: {
      const NamedBarrier *b = &w->cta->bars[g->wait_object % MAX_NAMED_BARRIERS];
      uint32_t missing = b->warps_before & ~b->warps;
      if (!b->warps)  // complete: the warp has only not been run since
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

static int list_warps(Emu *e, Warp **warps) {
  int n = 0;
  for (int k = 0; k < e->nclusters; k++)
    for (int c = 0; e->clusters[k] && c < e->clusters[k]->nctas; c++) {
      Cta *cta = e->clusters[k]->ctas[c];
      for (int i = 0; i < cta->nwarps; i++)
        if (!cta->warps[i].exited) warps[n++] = &cta->warps[i];
    }
  return n;
}

// Each mbarrier that somebody waits for, once: what it lacks, and who has signalled it.
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

static void report_deadlock(Emu *e, const char *title) {
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

// --------------------------------------------------------------------------------- the main loop

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

// One pass over the resident warps in the schedule's order; whether anything ran.
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
      if (emu_random(e, 4) == 0) continue;  // let others overtake
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

static void main_loop(Emu *e, int (*report)(uint64_t, uint64_t)) {
  Warp **warps = malloc(sizeof *warps * (size_t)(e->nslots * e->warps_per_cta + 1));
  uint64_t stalled_at = UINT64_MAX, last_progress = 0, progress_time = 0, next_report = 0;
  int idle = 0;
  while (!e->stop) {
    fill_slots(e);
    int n = list_warps(e, warps);
    if (!n) break;
    uint64_t before = e->progress;
    bool ran = run_pass(e, warps, n);
    if (e->stop) break;
    if (e->progress != last_progress) last_progress = e->progress, progress_time = e->time;
    // Warps that spin on memory leave the machine no rest: what they wait for may be asynchronous.
    if (e->async_count && e->time - progress_time > SPIN_INSTRUCTIONS) run_some_async(e);
    if (e->time - progress_time > LIVELOCK_INSTRUCTIONS) {
      report_deadlock(e, "livelock: warps spin, but nothing that they could wait for changes");
      break;
    }
    if (e->astray && e->time > e->astray + ASTRAY_INSTRUCTIONS) {
      report_deadlock(e, "no end in sight: since an error made up values, no block has finished");
      break;
    }
    if (report && e->time >= next_report) {
      next_report = e->time + 500000;
      if (report(e->next_cluster, e->total_clusters)) e->stop = true;
    }
    if (ran || e->progress != before) {
      idle = 0;
      continue;
    }
    if (e->schedule == 1 && ++idle < 8) continue;  // warps may only have been passed over
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
  e->clusters = NULL, e->cluster_order = NULL, e->params = NULL, e->slot_clocks = NULL;
  sync_table_free(e);
  for (int i = 0; i < e->nregions; i++) {
    region_forget(&e->regions[i]);
  }
}

static bool set_up(Emu *e, Program *p, const uint32_t dims[10], const void *params,
                   uint64_t param_bytes) {
  e->program = p;
  memcpy(e->grid, dims, sizeof e->grid);
  memcpy(e->block, dims + 3, sizeof e->block);
  memcpy(e->cluster_dim, dims + 6, sizeof e->cluster_dim);
  e->dynamic_shared = dims[9];
  uint64_t threads = (uint64_t)e->block[0] * e->block[1] * e->block[2];
  uint32_t size = e->cluster_dim[0] * e->cluster_dim[1] * e->cluster_dim[2];
  if (!threads || threads > 1024 || !size || size > 16) {
    machine_finding(e, CK_BOUNDS, "a launch of %llu threads a block and %u blocks a cluster",
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
  e->nclusters = e->num_sms / (int)size > 0 ? e->num_sms / (int)size : 1;
  e->total_clusters = (uint64_t)e->grid[0] * e->grid[1] * e->grid[2] / size;
  if ((uint64_t)e->nclusters > e->total_clusters) e->nclusters = (int)e->total_clusters;
  // A mark has 16 bits for its agent, which is enough for 170 SMs with blocks of 1024 threads.
  int agents_per_slot = e->warps_per_cta * AGENTS_PER_WARP + MBARRIERS_PER_CTA;
  while (e->nclusters > 1 && e->nclusters * (int)size * agents_per_slot > 0xFFF0) e->nclusters--;
  e->nslots = e->nclusters * (int)size;
  e->agents_used = e->nslots * e->warps_per_cta * AGENTS_PER_WARP;
  e->nagents = (e->agents_used + e->nslots * MBARRIERS_PER_CTA + 7) & ~7;
  e->clusters = calloc((size_t)e->nclusters, sizeof *e->clusters);
  e->cluster_order = malloc(sizeof(uint32_t) * e->total_clusters);
  for (uint64_t i = 0; i < e->total_clusters; i++) e->cluster_order[i] = (uint32_t)i;
  e->next_cluster = 0;
  e->pending_clusters = e->total_clusters;
  e->slot_clocks = calloc((size_t)e->agents_used + 1, sizeof(Clock));
  free(e->executed);
  e->executed = calloc((size_t)p->ncode + 1, sizeof(uint64_t));
  e->stop = false;
  e->astray = 0;
  e->tcgen05_fences[0] = e->tcgen05_fences[1] = -1;
  e->rng = e->seed * 0x9E3779B97F4A7C15ull + 0x1234567;
  if (!e->rng) e->rng = 1;
  for (int i = 0; i < 8; i++) emu_random(e, 2);
  marks_reset(e);
  return true;
}

int emu_launch(Emu *e, Program *p, const uint32_t dims[10], const void *params,
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
  e->slice = 64;
  e->max_findings = 100;
  e->numerics = 1;
  e->findings = calloc(1, sizeof *e->findings);
  return e;
}

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
  emu_findings_clear(e);
  emu_names_clear(e);
  emu_regions_clear(e);
  output_clear(e);
  free(e->findings->list);
  free(e->findings->shared);
  free(e->findings->warps);
  free(e->findings);
  free(e->regions);
  free(e->executed);
  free(e->reads.nodes);
  for (int i = 0; i < SCRATCH_COUNT; i++) free(e->scratch[i].memory);
  if (e->trace) free(e->trace->events);
  free(e->trace);
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
  else if (!strcmp(option, "max_findings")) e->max_findings = (int)value;
  else if (!strcmp(option, "numerics")) e->numerics = (int)value;
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
void emu_events_clear(Emu *e) {
  if (e->trace) e->trace->count = 0;
}
int emu_events(Emu *e, const Event **out) {
  *out = e->trace ? e->trace->events : NULL;
  return e->trace ? e->trace->count : 0;
}
const char *emu_output(Emu *e) { return output_text(e); }
void emu_output_clear(Emu *e) { output_clear(e); }
const char *emu_wait_name(int i) {
  return i < (int)(sizeof WAIT_NAMES / sizeof *WAIT_NAMES) ? WAIT_NAMES[i] : NULL;
}
