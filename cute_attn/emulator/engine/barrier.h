// Helpers for all barriers: releases and acquires, skipped if no check needs them, and addresses of
// mbarriers.
#ifndef CUTE_ATTN_BARRIER_H
#define CUTE_ATTN_BARRIER_H

#include "engine.h"

#pragma GCC visibility push(hidden)

// Whether a check needs the happens-before relation; otherwise the relation is not kept up to date.
static inline bool ordering(const Emu *e) {
  return (e->checks & (1ull << CK_RACE | 1ull << CK_PROXY | 1ull << CK_TCGEN05)) != 0;
}

static inline void join_into(Emu *e, View *into, const View *from) {
  if (!from || !from->vc) return;
  if (!into->vc) *into = view_new(e);
  view_join(e, into, from);
}

static inline void release_into(Warp *w, View *into) {
  if (ordering(emu_of(w))) view_release(w, into);
}

// A relaxed arrival publishes only effects that an earlier fence has released.
static inline void relaxed_release_into(Warp *w, View *into) {
  Emu *e = emu_of(w);
  if (!ordering(e)) return;
  join_into(e, into, &w->fence_release);
  if (!into->vc) *into = view_new(e);
  view_join_flow(e, into, &w->view);
}

static inline void acquire_from(Warp *w, const View *from) {
  w->sync_epoch++;
  if (ordering(emu_of(w))) view_acquire(w, from);
}

// A relaxed wait acquires nothing until a fence follows.
static inline void relaxed_acquire_from(Warp *w, const View *from) {
  if (!ordering(emu_of(w))) return;
  join_into(emu_of(w), &w->fence_acquire, from);
  view_join_flow(emu_of(w), &w->view, from);
}

// The clock of a new event of the warp's AG_FLOW.
static inline Clock flow_event(Warp *w) {
  Clock clock = ++w->agent_clock[AG_FLOW];
  if (ordering(emu_of(w))) w->view.vc[agent_of(w, AG_FLOW)] = clock;
  return clock;
}

// ------------------------------------------------------------------------------------ mbarrier.c

enum { SPACE_GENERIC, SPACE_SHARED, SPACE_SHARED_CTA, SPACE_SHARED_CLUSTER };
#define SHARED_CTA "{.shared|.shared::cta}"
#define SHARED_ANY "{.shared|.shared::cta|.shared::cluster}"

// Lanes of an instruction that name one address.
typedef struct { Cta *cta; uint32_t offset; Mask lanes; } Target;

// The CTA and offset of an address in shared memory; false after a finding.
bool resolve_target(Warp *w, const Insn *I, uint64_t address, int space, Target *t);

#pragma GCC visibility pop
#endif
