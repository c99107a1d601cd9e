// Asynchronous operations: their queues, the stages that the schedule runs, and their pending
// registers.
#include "core.h"

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
  // The issuing thread's earlier effects are ordered before the operation.
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
  stream_event(op->warp, op->insn, STEP_ISSUE, op->number, 0, 0);
}

void free_async(AsyncOp *op) {
  if (op->release) op->release(op);
  else free(op->data);
  view_free(&op->view);
  free(op);
}

void retire(AsyncOp *op) {
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
  AsyncOp *outer = e->running;
  e->running = op;
  op->run(op, op->stage++);
  e->running = outer;
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

// Wait for the operation that will write a register, as machine code does, and release the
// operation's other registers.
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
  if (op->insn == I) return;  // the instruction's own result
  if (is_wgmma(op))
    finding_with(w, I, op->insn, CK_WGMMA, SEV_ERROR,
                 "overwrites a register that a wgmma still owns: wgmma.wait_group is missing");
  complete_pending(w, o);
}

// An operation may run its next stage once all earlier operations of its queue have run that stage.
static bool eligible(const AsyncOp *op) {
  if (op->on_demand) return false;
  if (!op->queue) return true;
  for (const AsyncOp *o = op->previous; o; o = o->previous)
    if (o->queue == op->queue && o->stage <= op->stage) return false;
  return true;
}

void run_some_async(Emu *e) {
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
