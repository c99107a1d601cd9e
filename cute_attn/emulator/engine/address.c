// Addresses: cvta and isspacep between state spaces, mapa and getctarank between the CTAs of a
// cluster.
#include "engine.h"

// ---------------------------------------------------------------------------------- state spaces

// The state spaces of cvta and isspacep, in the order of their patterns.
enum { TO_CONST = 1, TO_GLOBAL, TO_LOCAL, TO_SHARED, TO_SHARED_CTA, TO_SHARED_CLUSTER, TO_PARAM };
#define ADDRESS_SPACES "(.const|global|local|shared|shared::cta|shared::cluster|param|param::entry)"

static uint64_t tag_of(int space) {
  if (space == TO_LOCAL) return LOCAL_TAG;
  return space >= TO_SHARED && space <= TO_SHARED_CLUSTER ? SHARED_TAG : 0;
}

static int exec_cvta(Warp *w, const Insn *I, Mask m) {  // to a generic address
  const uint64_t *a = SRC64(1);
  uint64_t r[32], tag = tag_of(I->mod[0]);
  FOR_LANES(l) r[l] = tag ? tag | (uint32_t)a[l] : a[l];
  PUT64(0, r);
  return DONE;
}

static int exec_cvta_to(Warp *w, const Insn *I, Mask m) {
  const uint64_t *a = SRC64(1);
  uint64_t r[32], tag = tag_of(I->mod[0]);
  FOR_LANES(l) r[l] = tag ? (uint32_t)a[l] : a[l];
  PUT64(0, r);
  return DONE;
}

static bool lies_in(Warp *w, uint64_t address, int space) {
  Cta *cta = NULL;
  uint32_t offset;
  Space found = classify(w, address, &cta, &offset);
  switch (space) {
    // The windows of constants and parameters are parts of global memory.
    case TO_GLOBAL: return found == SP_GLOBAL || found == SP_PARAM;
    case TO_LOCAL: return found == SP_LOCAL;
    case TO_SHARED: case TO_SHARED_CTA: return found == SP_SHARED && cta == w->cta;
    case TO_SHARED_CLUSTER: return found == SP_SHARED && cta;
    case TO_CONST: return false;
    default: return found == SP_PARAM;
  }
}

static int exec_isspacep(Warp *w, const Insn *I, Mask m) {
  const uint64_t *a = SRC64(1);
  Mask r = 0;
  FOR_SET(l, m) r |= (Mask)lies_in(w, a[l], I->mod[0]) << l;
  PUTP(0, r);
  return DONE;
}

// ------------------------------------------------------------------------- addresses in a cluster

#define RANK_BITS (0xFFull << SHARED_RANK_SHIFT)

// Using an address of a rank that does not exist is an error; computing one is only a note.
static void check_rank(Warp *w, const Insn *I, Mask m, const uint32_t *rank) {
  FOR_SET(l, m) {
    if (rank[l] < (uint32_t)w->cta->cluster->nctas) continue;
    finding(w, I, CK_CLUSTER, SEV_NOTE, "lane %d: CTA rank %u, but the cluster has %d CTAs", l,
            rank[l], w->cta->cluster->nctas);
    return;
  }
}

static uint32_t rank_bits(uint32_t rank) {
  return (rank < 0xFF ? rank : 0xFF) << SHARED_RANK_SHIFT;
}

static void check_generic_shared(Warp *w, const Insn *I, Mask m, const uint64_t *address) {
  FOR_SET(l, m) {
    if ((address[l] & TAG_MASK) == SHARED_TAG) continue;
    finding(w, I, CK_CLUSTER, SEV_ERROR, "0x%llx is not a generic address of shared memory",
            (unsigned long long)address[l]);
    return;
  }
}

static int exec_mapa32(Warp *w, const Insn *I, Mask m) {
  const uint32_t *a = SRC32(1), *rank = SRC32(2);
  check_rank(w, I, m, rank);
  uint32_t v[32];
  FOR_LANES(l) v[l] = (a[l] & ~(uint32_t)RANK_BITS) | rank_bits(rank[l]);
  PUT32(0, v);
  return DONE;
}

static int exec_mapa64(Warp *w, const Insn *I, Mask m) {
  const uint64_t *a = SRC64(1);
  const uint32_t *rank = SRC32(2);
  check_rank(w, I, m, rank);
  if (I->mod[0] == 0) check_generic_shared(w, I, m, a);
  uint64_t v[32];
  FOR_LANES(l) v[l] = (a[l] & ~RANK_BITS) | rank_bits(rank[l]);
  PUT64(0, v);
  return DONE;
}

static int exec_getctarank32(Warp *w, const Insn *I, Mask m) {
  const uint32_t *a = SRC32(1);
  uint32_t v[32];
  FOR_LANES(l) v[l] = a[l] >> SHARED_RANK_SHIFT;
  PUT32(0, v);
  return DONE;
}

static int exec_getctarank64(Warp *w, const Insn *I, Mask m) {
  const uint64_t *a = SRC64(1);
  if (I->mod[0] == 0) check_generic_shared(w, I, m, a);
  uint32_t v[32];
  FOR_LANES(l) v[l] = (uint32_t)a[l] >> SHARED_RANK_SHIFT;
  PUT32(0, v);
  return DONE;
}

// --------------------------------------------------------------------------------------- forms

static const Form FORMS[] = {
    {"cvta" ADDRESS_SPACES ".u64", "d64 s64", exec_cvta, 0},
    {"cvta.to" ADDRESS_SPACES ".u64", "d64 s64", exec_cvta_to, 0},
    {"isspacep" ADDRESS_SPACES, "dp s64", exec_isspacep, 0},
    {"mapa.shared::cluster.u32", "d32 s32 s32", exec_mapa32, 0},
    {"mapa{.shared::cluster}.u64", "d64 s64 s32", exec_mapa64, 0},
    {"getctarank.shared::cluster.u32", "d32 s32", exec_getctarank32, 0},
    {"getctarank{.shared::cluster}.u64", "d32 s64", exec_getctarank64, 0},
    {0},
};

const Family FAMILY_ADDRESS = {.name = "address", .forms = FORMS};
