// Loads in flight: ldmatrix has certainly read memory only once an instruction uses its registers,
// or after a fence or a barrier. An arrival at an mbarrier may overtake the load, and the
// asynchronous proxy may then overwrite the bytes (an H200 does; see docs/emulator.md).
//
// Suppose that the load's warp releases its accesses before the load has certainly read. For later
// writes through the asynchronous proxy, the load then counts as a read at the time of its first
// use.
#include "engine.h"

typedef struct InFlight {
  struct InFlight *previous, *next;  // list of the warp's loads
  const Insn *insn;
  Clock clock;          // the warp's clock at the issue
  int holders;          // registers that hold the load's results
  int rows;
  uint32_t bytes;       // bytes per row
  uint32_t offset[32];  // offsets of the rows in the CTA's shared memory
} InFlight;

static void forget(Warp *w, InFlight *f) {
  if (f->previous) f->previous->next = f->next;
  else w->in_flight = f->next;
  if (f->next) f->next->previous = f->previous;
  free(f);
}

static void let_go(Warp *w, int id) {
  InFlight *f = w->loads[id];
  w->loads[id] = NULL;
  w->nloads--;
  w->cta->nloads--;
  if (--f->holders == 0) forget(w, f);
}

static void hold(Warp *w, int id, InFlight *f) {
  if (w->loads[id]) let_go(w, id);
  w->loads[id] = f;
  f->holders++;
  w->nloads++;
  w->cta->nloads++;
}

void start_load(Warp *w, const Insn *I, const uint32_t offset[32], int rows, uint32_t bytes) {
  if (!checking(emu_of(w), CK_PROXY) || rows == 0) return;
  if (!w->loads) w->loads = calloc((size_t)emu_of(w)->program->nregs + 1, sizeof *w->loads);
  InFlight *f = calloc(1, sizeof *f);
  *f = (InFlight){.next = w->in_flight, .insn = I, .clock = w->agent_clock[AG_GENERIC],
                  .rows = rows, .bytes = bytes};
  memcpy(f->offset, offset, sizeof f->offset);
  if (f->next) f->next->previous = f;
  w->in_flight = f;
  const Operand *d = list_of(w, &I->op[0]);
  f->holders = 1;  // keeps f while registers may be replaced
  for (int i = 0; i < count_of(&I->op[0]); i++)
    if (d[i].kind == K_REG) hold(w, d[i].id, f);
  if (--f->holders == 0) forget(w, f);
}

// The load has read memory by now.
static void done(Warp *w, InFlight *f) {
  if (w->agent_clock[AG_GENERIC] != f->clock) {
    Access a = access_of(w, f->insn, "ldmatrix");
    a.late = a.lazy = true;  // unwritten bytes were a finding at the issue
    for (int i = 0; i < f->rows; i++) shared_read(&a, w->cta, f->offset[i], f->bytes);
  }
  const Operand *d = list_of(w, &f->insn->op[0]);
  f->holders++;
  for (int i = 0; i < count_of(&f->insn->op[0]) && f->holders > 1; i++)
    if (d[i].kind == K_REG && w->loads[d[i].id] == f) let_go(w, d[i].id);
  for (int id = 0; id < emu_of(w)->program->nregs && f->holders > 1; id++)  // and the copies of d
    if (w->loads[id] == f) let_go(w, id);
  forget(w, f);
}

void load_read(Warp *w, const Insn *I, const Operand *o) {
  InFlight *f = w->loads[o->id];
  if (!f) return;
  if (I->flags & F_MOVE && I->op[0].kind == K_REG) hold(w, I->op[0].id, f);
  else done(w, f);
}

// A written register no longer holds a load's result, unless the instruction is the load itself, or
// copies another register that holds a result.
void load_overwritten(Warp *w, const Insn *I, const Operand *o) {
  if (!w->loads[o->id] || I->op == NULL) return;
  bool copied = I->flags & F_MOVE && I->op[1].kind == K_REG && w->loads[I->op[1].id];
  if (w->loads[o->id]->insn != I && !copied) let_go(w, o->id);
}

void finish_loads(Warp *w) {
  while (w->in_flight) done(w, w->in_flight);
}

void drop_loads(Warp *w) {
  for (int id = 0; w->nloads && id < emu_of(w)->program->nregs; id++)
    if (w->loads[id]) let_go(w, id);
  free(w->loads);
  w->loads = NULL;
}

void report_overtaken(const Access *a, const Insn *load, const char *place) {
  finding_with(a->warp, a->insn, load, CK_PROXY, SEV_ERROR,
               "write after read on %s: %s may come before the ldmatrix has read, as its warp "
               "arrives before it uses a register of it, without fence.proxy.async before that",
               place, a->what);
}

void check_loads(const Access *a, Cta *cta, uint32_t offset, uint32_t bytes) {
  for (int i = 0; i < cta->nwarps; i++) {
    Warp *w = &cta->warps[i];
    for (InFlight *f = w->in_flight; f; f = f->next) {
      if (f->clock == w->agent_clock[AG_GENERIC]) continue;  // the warp has not arrived since
      if (f->clock > a->view->vc[agent_of(w, AG_GENERIC)]) continue;  // a race, reported elsewhere
      for (int row = 0; row < f->rows; row++) {
        if (f->offset[row] + f->bytes <= offset || f->offset[row] >= offset + bytes) continue;
        report_overtaken(a, f->insn, text("%s of CTA %u", address_name(cta, f->offset[row]),
                                          cta->linear));
        break;
      }
    }
  }
}
