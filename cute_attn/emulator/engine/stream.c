// The streams of steps of recorded CTAs, for models of time: runs of instructions in the order of
// issue, waits with what they wait for, asynchronous operations with their bytes, and signals.
#include "core.h"

typedef struct { int32_t kind, cta, warp, insn; uint64_t a, b, c; } Step;
struct Stream { Step *steps; int64_t count, room; };

static Step *new_step(Emu *e, int kind, const Cta *cta, int warp, const Insn *I) {
  if (!e->stream) e->stream = calloc(1, sizeof *e->stream);
  struct Stream *s = e->stream;
  if (s->count == s->room) {
    s->room = s->room ? 2 * s->room : 4096;
    s->steps = realloc(s->steps, sizeof *s->steps * (size_t)s->room);
  }
  Step *step = &s->steps[s->count++];
  *step = (Step){.kind = kind, .cta = (int32_t)cta->linear, .warp = warp,
                 .insn = I ? (int32_t)(I - e->program->code) : -1};
  return step;
}

bool stream_records(const Emu *e, uint64_t cluster) {
  return e->record_every && cluster % (uint64_t)e->record_every == 0;
}

void stream_step(Warp *w, const Insn *I) {
  Emu *e = emu_of(w);
  int32_t at = (int32_t)(I - e->program->code);
  if (w->run >= 0) {
    Step *run = &e->stream->steps[w->run];
    if (run->insn + (int32_t)run->a == at) {
      run->a++;
      return;
    }
  }
  new_step(e, STEP_RUN, w->cta, w->index, I)->a = 1;
  w->run = e->stream->count - 1;
}

void stream_event(Warp *w, const Insn *I, int kind, uint64_t a, uint64_t b, uint64_t c) {
  if (!w->cta->recorded) return;
  Step *step = new_step(emu_of(w), kind, w->cta, w->index, I);
  step->a = a, step->b = b, step->c = c;
  w->run = -1;
}

void stream_signal(Warp *w, const Insn *I, const Cta *cta, uint64_t object, uint64_t phase) {
  Emu *e = cta->emu;
  if (e->running) {
    if (!cta->recorded) return;
    Step *step = new_step(e, STEP_SIGNAL, cta, -1, I);
    step->a = object, step->b = phase, step->c = e->running->number;
    return;
  }
  stream_event(w, I, STEP_ARRIVE, object, phase, 0);
}

void stream_free(Emu *e) {
  if (!e->stream) return;
  free(e->stream->steps);
  free(e->stream);
  e->stream = NULL;
}

#pragma GCC visibility push(default)
int64_t emu_stream(Emu *e, const void **out) {
  *out = e->stream ? e->stream->steps : NULL;
  return e->stream ? e->stream->count : 0;
}
void emu_stream_clear(Emu *e) { stream_free(e); }
#pragma GCC visibility pop
