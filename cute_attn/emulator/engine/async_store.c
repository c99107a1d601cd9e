// st.async and red.async to the shared memory of a cluster.
#include "copy.h"

typedef struct {
  uint32_t bytes;
  Reduction reduce;  // NULL for a store without a reduction
  int count;
  struct { Cta *cta; uint32_t offset, barrier; uint8_t value[32]; } at[32];
} Scatter;

static void scatter_one(AsyncOp *op, const Scatter *s, int i) {
  Cta *cta = s->at[i].cta;
  Warp *w = op->warp;
  if (!check_destination(op, cta)) return;
  Mbarrier *b = signalled_mbarrier(op, cta, s->at[i].barrier);
  uint8_t *p = shared_pointer(w, op->insn, cta, s->at[i].offset, s->bytes, s->bytes);
  if (p) {
    shared_write(&op->access, cta, s->at[i].offset, s->bytes);
    reduce_or_copy(s->reduce, p, s->at[i].value, s->bytes);
  }
  if (b) mbarrier_complete_tx(w, op->insn, cta, b, s->bytes, &op->view);
}

static void run_scatter(AsyncOp *op, int stage) {
  (void)stage;
  const Scatter *s = op->data;
  for (int i = 0; i < s->count; i++) scatter_one(op, s, i);
}

// The elements of operand 1, of `width` bytes each, to every lane's address.
static int scatter(Warp *w, const Insn *I, Mask m, uint32_t width, Reduction reduce) {
  const Operand *list = list_of(w, &I->op[1]);
  uint32_t count = (uint32_t)count_of(&I->op[1]);
  uint64_t to[32], barrier[32], value[4][32];
  addresses_of(w, I, &I->op[0], m, to);
  addresses_of(w, I, &I->op[2], m, barrier);
  for (uint32_t k = 0; k < count && k < 4; k++) {
    uint32_t narrow[32];
    uint64_t wide[32];
    if (width == 8) memcpy(value[k], src64_of(w, I, &list[k], m, wide), sizeof wide);
    else {
      const uint32_t *v = src32_of(w, I, &list[k], m, narrow);
      FOR_LANES(l) value[k][l] = v[l];
    }
  }
  Scatter *s = calloc(1, sizeof *s);
  s->bytes = width * count;
  s->reduce = reduce;
  FOR_SET(l, m) {
    uint32_t offset, mbarrier;
    Cta *cta = shared_target(w, (uint32_t)to[l], &offset);
    Cta *signalled = shared_target(w, (uint32_t)barrier[l], &mbarrier);
    if (!cta || cta != signalled) {
      finding(w, I, CK_CLUSTER, SEV_ERROR,
              "the destination 0x%x and the mbarrier 0x%x are not in the same CTA of the cluster",
              (uint32_t)to[l], (uint32_t)barrier[l]);
      continue;
    }
    int i = s->count++;
    s->at[i].cta = cta;
    s->at[i].offset = offset;
    s->at[i].barrier = mbarrier;
    for (uint32_t k = 0; k < count && k < 4; k++)
      memcpy(s->at[i].value + k * width, &value[k][l], width);
  }
  AsyncOp *a = new_async(w, I, reduce ? "red.async" : "st.async", AG_BULK_WRITE,
                         bulk_clock(w, AG_BULK_WRITE, 1));
  a->run = run_scatter;
  a->access.async = 0;
  a->access.atomic = reduce != NULL;
  a->data = s;
  emu_of(w)->counters[CT_DSMEM] += (uint64_t)s->bytes * (uint32_t)s->count;
  submit(a);
  return DONE;
}

static bool vector_length(Warp *w, const Insn *I, int modifier) {
  int expected = modifier ? 2 * modifier : 1, count = count_of(&I->op[1]);
  if (count == expected) return true;
  fatal(w, I, CK_BOUNDS, "%d values, where %d are wanted", count, expected);
  return false;
}
static int exec_st_async32(Warp *w, const Insn *I, Mask m) {
  return vector_length(w, I, I->mod[3]) ? scatter(w, I, m, 4, NULL) : DONE;
}
static int exec_st_async64(Warp *w, const Insn *I, Mask m) {
  return vector_length(w, I, I->mod[3]) ? scatter(w, I, m, 8, NULL) : DONE;
}
static int exec_red_async32(Warp *w, const Insn *I, Mask m) {
  static const ElementType types[] = {TY_U32, TY_U32, TY_S32, TY_U32};
  Reduction reduce = known_reduction(w, I, (ReduceOp)I->mod[1], types[I->mod[2]]);
  return reduce ? scatter(w, I, m, 4, reduce) : DONE;
}
static int exec_red_async64(Warp *w, const Insn *I, Mask m) {
  Reduction reduce = known_reduction(w, I, (ReduceOp)I->mod[1], TY_U64);
  return reduce ? scatter(w, I, m, 8, reduce) : DONE;
}

// --------------------------------------------------------------------------------------- forms

static const Form FORMS[] = {
    {"st.async{.weak}{.shared::cluster}{" BYTES "}{.v2|v4}(.b32|u32|s32|f32)", "a s32l a",
     exec_st_async32, F_EFFECT},
    {"st.async{.weak}{.shared::cluster}{" BYTES "}{.v2|v4}(.b64|u64|s64|f64)", "a s64l a",
     exec_st_async64, F_EFFECT},
    {"red.async.relaxed.cluster{.shared::cluster}" BYTES REDUCTIONS "(.u32|s32|b32)", "a s32 a",
     exec_red_async32, F_EFFECT},
    {"red.async.relaxed.cluster{.shared::cluster}" BYTES REDUCTIONS "(.u64|s64|b64)", "a s64 a",
     exec_red_async64, F_EFFECT},
    {0},
};

const Family FAMILY_ASYNC_STORE = {.name = "async_store", .forms = FORMS};
