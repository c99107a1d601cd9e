// Fences.
#include "barrier.h"

static int exec_fence(Warp *w, const Insn *I, Mask m) {
  (void)I, (void)m;
  finish_loads(w);
  memory_fence(w);
  return DONE;
}

static int exec_proxy_fence(Warp *w, const Insn *I, Mask m) {
  (void)I, (void)m;
  finish_loads(w);
  if (ordering(emu_of(w))) proxy_fence(w);
  return DONE;
}

// The one-way fences: a release or an acquire that also orders the proxies.
static int exec_proxy_fence_release(Warp *w, const Insn *I, Mask m) {
  exec_proxy_fence(w, I, m);
  return exec_fence(w, I, m);
}
static int exec_proxy_fence_acquire(Warp *w, const Insn *I, Mask m) {
  exec_fence(w, I, m);
  return exec_proxy_fence(w, I, m);
}

// fence.mbarrier_init publishes only this thread's initialisations of mbarriers.
static int exec_mbarrier_init_fence(Warp *w, const Insn *I, Mask m) {
  (void)I, (void)m;
  Emu *e = emu_of(w);
  if (!ordering(e)) return DONE;
  if (!w->fence_release.vc) w->fence_release = view_new(e);
  for (int i = 0; i < w->cta->nmbarriers; i++) {
    Mbarrier *b = &w->cta->mbarriers[i];
    if (!b->valid || b->init_warp != w->index) continue;
    view_add(&w->view, b->agent, b->init_clock);
    view_add(&w->fence_release, b->agent, b->init_clock);
  }
  return DONE;
}

static int exec_tensormap_acquire(Warp *w, const Insn *I, Mask m) {
  uint64_t address[32];
  addresses_of(w, I, &I->op[0], m, address);
  memory_fence(w);
  FOR_SET(l, m) sync_read(w, (const void *)address[l], 1);
  return DONE;
}

// --------------------------------------------------------------------------------------- forms

#define SCOPE "(.cta|cluster|gpu|sys)"

static const Form FORMS[] = {
    {"fence{.sc|.acq_rel|.acquire|.release}(.cta|.cluster|.gpu|.sys)", "", exec_fence, 0},
    {"fence.acquire.sync_restrict::shared::cluster.cluster", "", exec_fence, 0},
    {"fence.release.sync_restrict::shared::cta.cluster", "", exec_fence, 0},
    {"fence.mbarrier_init.release.cluster", "", exec_mbarrier_init_fence, 0},
    {"fence.proxy.async{.global|.shared::cta|.shared::cluster}", "", exec_proxy_fence, 0},
    {"fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster", "",
     exec_proxy_fence_release, 0},
    {"fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster", "",
     exec_proxy_fence_acquire, 0},
    {"fence.proxy.alias", "", exec_nothing, 0},
    {"membar(.cta|.gl|.sys)", "", exec_fence, 0},
    {"membar.proxy.alias", "", exec_nothing, 0},
    {"fence.proxy.tensormap::generic.release" SCOPE, "", exec_fence, F_YIELD},
    {"fence.proxy.tensormap::generic.acquire" SCOPE, "a i", exec_tensormap_acquire, F_YIELD},
    {0},
};

const Family FAMILY_FENCE = {.name = "fence", .forms = FORMS};
