// Cluster launch control: clusterlaunchcontrol takes over the work of a cluster not yet launched. A
// response holds the coordinates of the cancelled cluster's first CTA, and whether the cancellation
// succeeded.
#include "barrier.h"

#define RESPONSE_BYTES 16
#define RESPONSE_GRANTED 0xC1C00001u
#define RESPONSE_REFUSED 0xC1C00000u

typedef struct {
  int ndestinations;
  Cta *destinations[16];
  uint32_t response_offset, mbarrier_offset;
  uint32_t response[4];
} Request;

// The distributor's answer. With spurious_cancel the answer may be "none left" although clusters
// are left; a cluster that got this answer gets the same answer to all later requests.
static void ask_distributor(AsyncOp *op, Request *r) {
  Emu *e = op->emu;
  Cluster *k = op->cta->cluster;
  uint32_t id[3] = {UINT32_MAX, UINT32_MAX, UINT32_MAX};
  if (e->spurious_cancel && emu_random(e, 4) == 0) k->cancel_refused = true;
  bool granted = !k->cancel_refused && cancel_cluster(e, id);
  memcpy(r->response, id, sizeof id);
  r->response[3] = granted ? RESPONSE_GRANTED : RESPONSE_REFUSED;
}

static void deliver_response(AsyncOp *op, Request *r, Cta *cta) {
  if (!live_cta(cta)) {
    finding(op->warp, op->insn, CK_CLUSTER, SEV_ERROR,
            "the response goes to CTA rank %d, which has exited", cta->rank);
    return;
  }
  Mbarrier *b = signalled_mbarrier(op, cta, r->mbarrier_offset);
  shared_write(&op->access, cta, r->response_offset, RESPONSE_BYTES);
  memcpy(cta->shared + r->response_offset, r->response, RESPONSE_BYTES);
  if (b) mbarrier_complete_tx(op->warp, op->insn, cta, b, RESPONSE_BYTES, &op->view);
}

static void run_request(AsyncOp *op, int stage) {
  Request *r = op->data;
  if (stage == 0) ask_distributor(op, r);
  else deliver_response(op, r, r->destinations[stage - 1]);
}

static void request_cancel(Warp *w, const Insn *I, const Target *response, const Target *barrier) {
  Cta *cta = w->cta;
  bool multicast = I->mod[1];
  if (response->cta != cta || barrier->cta != cta)
    finding(w, I, CK_CLUSTER, SEV_ERROR, "the response and the mbarrier must be in the CTA's own "
            "shared memory");
  if (cta->cancel_failed_seen)
    finding(w, I, CK_CLUSTER, SEV_ERROR, "asks for another cluster after the CTA has seen that "
            "none is left: what happens then is undefined");
  if (!shared_pointer(w, I, cta, response->offset, RESPONSE_BYTES, 16)) return;
  find_mbarrier(w, I, cta, barrier->offset);
  Request *r = calloc(1, sizeof *r);
  r->response_offset = response->offset;
  r->mbarrier_offset = barrier->offset;
  if (!multicast) r->destinations[r->ndestinations++] = cta;
  for (int i = 0; multicast && i < cta->cluster->nctas; i++)
    r->destinations[r->ndestinations++] = cta->cluster->ctas[i];
  AsyncOp *op = new_async(w, I, "clusterlaunchcontrol.try_cancel", AG_BULK_WRITE, 0);
  op->run = run_request;
  op->stages = 1 + r->ndestinations;
  op->data = r;
  submit(op);
}

static int exec_try_cancel(Warp *w, const Insn *I, Mask m) {
  uint64_t response[32], barrier[32];
  addresses_of(w, I, &I->op[0], m, response);
  addresses_of(w, I, &I->op[1], m, barrier);
  int space = I->mod[0] ? SPACE_SHARED : SPACE_GENERIC;
  FOR_SET(l, m) {
    Target to, at;
    if (resolve_target(w, I, response[l], space, &to) && resolve_target(w, I, barrier[l], space, &at))
      request_cancel(w, I, &to, &at);
  }
  return DONE;
}

// The checked response in operand k, 4 words per lane; NULL if it is no 128-bit register.
static const uint32_t *response_of(Warp *w, const Insn *I, Mask m, int k) {
  const Operand *o = &I->op[k];
  check_read(w, I, o, m);
  const uint32_t *v = reg128(w, o);
  FOR_SET(l, m) {
    uint32_t status = v[4 * l + 3];
    if (status == RESPONSE_GRANTED || status == RESPONSE_REFUSED) continue;
    finding(w, I, CK_CLUSTER, SEV_ERROR,
            "lane %d: the operand is not a response of clusterlaunchcontrol.try_cancel", l);
    break;
  }
  return v;
}

static int exec_is_canceled(Warp *w, const Insn *I, Mask m) {
  const uint32_t *v = response_of(w, I, m, 1);
  Mask granted = 0;
  FOR_SET(l, m) {
    granted |= v[4 * l + 3] == RESPONSE_GRANTED ? 1u << l : 0;
    if (v[4 * l + 3] == RESPONSE_REFUSED) w->cta->cancel_failed_seen = true;
  }
  PUTP(0, granted);
  return DONE;
}

static int exec_first_ctaid(Warp *w, const Insn *I, Mask m) {
  const uint32_t *v = response_of(w, I, m, 1);
  uint32_t x[32];
  FOR_LANES(l) x[l] = v[4 * l + I->mod[0] - 1];
  PUT32(0, x);
  return DONE;
}

static int exec_first_ctaid_v4(Warp *w, const Insn *I, Mask m) {
  const uint32_t *v = response_of(w, I, m, 1);
  const Operand *list = list_of(w, &I->op[0]);
  for (int k = 0; k < count_of(&I->op[0]); k++) {
    uint32_t x[32];
    FOR_LANES(l) x[l] = k < 3 ? v[4 * l + k] : 0;
    put32_of(w, I, &list[k], m, x);
  }
  return DONE;
}

// --------------------------------------------------------------------------------------- forms

#define CLC "clusterlaunchcontrol."

static const Form FORMS[] = {
    {CLC "try_cancel.async{.shared::cta}.mbarrier::complete_tx::bytes"
         "{.multicast::cluster::all}.b128", "a a", exec_try_cancel, F_YIELD | F_EFFECT},
    {CLC "query_cancel.is_canceled.pred.b128", "dp s128", exec_is_canceled, 0},
    {CLC "query_cancel(.get_first_ctaid::x|.get_first_ctaid::y|.get_first_ctaid::z).b32.b128",
     "d32 s128", exec_first_ctaid, 0},
    {CLC "query_cancel.get_first_ctaid.v4.b32.b128", "d32l s128", exec_first_ctaid_v4, 0},
    {0},
};

const Family FAMILY_LAUNCH_CONTROL = {.name = "launch_control", .forms = FORMS};
