// Communication among the lanes of a warp: shfl, vote, match, redux, elect, bar.warp.sync.
#include "engine.h"
#include "float_bits.h"
#include "reductions.h"

// ---------------------------------------------------------------------------------- member masks
//
// The lanes that execute an instruction may name different members: two halves of a warp may work
// separately. A part is a set of lanes that name equal members.

typedef struct { Mask members, lanes; } Part;

// Lanes of the warp that exist. The last warp of a CTA may have fewer than 32 lanes.
static Mask existing(const Warp *w) {
  int threads = w->cta->nthreads - 32 * w->index;
  return threads >= 32 ? ALL_LANES : (1u << threads) - 1;
}

static void require_defined(Warp *w, const Insn *I, const Operand *o, Mask m) {
  if (o->kind != K_REG) return;
  Mask bad = m & ~w->defined[o->id];
  if (bad) undefined_read(w, I, o, bad);
}

// Divide lanes m into parts by the masks in operand o, restricted to lanes in `known`. False: some
// members have not arrived yet, and the group is blocked.
static bool gather(Warp *w, const Insn *I, Mask m, const Operand *o, Mask known, Part parts[32],
                   int *count) {
  uint32_t buffer[32];
  const uint32_t *masks = src32_of(w, I, o, m, buffer);
  require_defined(w, I, o, m);
  *count = 0;
  for (Mask rest = m; rest;) {
    uint32_t members = masks[__builtin_ctz(rest)];
    Mask lanes = 0;
    if (o->kind == K_IMM) lanes = rest;
    else FOR_SET(l, rest) lanes |= masks[l] == members ? 1u << l : 0;
    rest &= ~lanes;
    if (!converged(w, lanes, members & known)) {
      wait_for(w, WAIT_CONVERGENCE, members & known & ~lanes, 0);
      return false;
    }
    parts[(*count)++] = (Part){members, lanes};
  }
  return true;
}

// ------------------------------------------------------------------------------------------ shfl

enum { SHFL_UP, SHFL_DOWN, SHFL_BFLY, SHFL_IDX };

static bool source_lane(int mode, int lane, uint32_t b, uint32_t c, int *source) {
  int value = b & 31, clamp = c & 31, segment = c >> 8 & 31;
  int lowest = lane & segment, limit = lowest | (clamp & ~segment);
  int j = 0;
  bool inside = false;
  switch (mode) {
    case SHFL_UP: j = lane - value; inside = j >= limit; break;
    case SHFL_DOWN: j = lane + value; inside = j <= limit; break;
    case SHFL_BFLY: j = lane ^ value; inside = j <= limit; break;
    default: j = lowest | (value & ~segment); inside = j <= limit; break;
  }
  *source = inside ? j : lane;
  return inside;
}

static int exec_shfl(Warp *w, const Insn *I, Mask m) {
  Part parts[32];
  int count;
  if (!gather(w, I, m, &I->op[5], w->live, parts, &count)) return BLOCK;
  const uint32_t *a = SRC32(2), *b = SRC32(3), *c = SRC32(4);
  require_defined(w, I, &I->op[3], m);
  require_defined(w, I, &I->op[4], m);
  Mask known = defined_in(w, &I->op[2]), defined = 0, inside = 0, chosen = 0;
  uint32_t result[32];
  for (int p = 0; p < count; p++) {
    Mask lanes = parts[p].lanes, astray = 0;
    int bad = 0, from = 0;
    FOR_SET(l, lanes) {
      int j;
      inside |= (Mask)source_lane(I->mod[0] - 1, l, b[l], c[l], &j) << l;
      if (!(lanes >> j & 1)) {
        astray |= 1u << l;
        bad = l, from = j;
      }
      result[l] = a[j];
      if (w->undecided >> j & 1 && !(w->undecided >> l & 1)) {
        w->taint_origin = undecided_origin(w, j);
        chosen |= (known >> j & 1) << l;
        continue;
      }
      defined |= (known >> j & 1) << l;
      chosen |= (chosen_in(w, &I->op[2]) >> j & 1) << l;
    }
    if (astray)
      finding(w, I, CK_SYNC, SEV_ERROR,
              "lane %d reads from lane %d, which is inactive or not in the member mask 0x%08x "
              "(executing: 0x%08x)", bad, from, parts[p].members, lanes);
    defined |= astray;  // already reported
  }
  PUT32(0, result);
  set_chosen(w, &I->op[0], m, defined, chosen);
  PUTP(1, inside);
  return DONE;
}

// ------------------------------------------------------------------------------------------ vote

enum { VOTE_ALL, VOTE_ANY, VOTE_UNI };

static int exec_vote(Warp *w, const Insn *I, Mask m) {
  Part parts[32];
  int count;
  if (!gather(w, I, m, &I->op[2], w->live, parts, &count)) return BLOCK;
  Mask p = SRCP(1), result = 0;
  for (int i = 0; i < count; i++) {
    Mask lanes = parts[i].lanes, yes = p & lanes;
    bool vote = I->mod[0] - 1 == VOTE_ALL ? yes == lanes
              : I->mod[0] - 1 == VOTE_ANY ? yes != 0 : yes == lanes || yes == 0;
    if (vote) result |= lanes;
  }
  PUTP(0, result);
  return DONE;
}

static int exec_ballot(Warp *w, const Insn *I, Mask m) {
  Part parts[32];
  int count;
  if (!gather(w, I, m, &I->op[2], w->live, parts, &count)) return BLOCK;
  Mask p = SRCP(1);
  uint32_t result[32];
  for (int i = 0; i < count; i++) FOR_SET(l, parts[i].lanes) result[l] = p & parts[i].lanes;
  PUT32(0, result);
  return DONE;
}

// ----------------------------------------------------------------------------------------- match

static void match_any(const uint64_t v[32], Mask lanes, uint32_t result[32]) {
  for (Mask rest = lanes; rest;) {
    uint64_t value = v[__builtin_ctz(rest)];
    Mask same = 0;
    FOR_SET(l, rest) same |= v[l] == value ? 1u << l : 0;
    FOR_SET(l, same) result[l] = same;
    rest &= ~same;
  }
}

static Mask match_all(const uint64_t v[32], Mask lanes, uint32_t result[32]) {
  uint64_t value = v[__builtin_ctz(lanes)];
  bool all = true;
  FOR_SET(l, lanes) all &= v[l] == value;
  FOR_SET(l, lanes) result[l] = all ? lanes : 0;
  return all ? lanes : 0;
}

static int match(Warp *w, const Insn *I, Mask m, int source, bool any) {
  Part parts[32];
  int count;
  if (!gather(w, I, m, &I->op[source + 1], w->live, parts, &count)) return BLOCK;
  const uint64_t *v = SRC64(source);
  uint32_t result[32];
  Mask equal = 0;
  for (int i = 0; i < count; i++) {
    if (any) match_any(v, parts[i].lanes, result);
    else equal |= match_all(v, parts[i].lanes, result);
  }
  PUT32(0, result);
  if (!any) PUTP(1, equal);
  return DONE;
}
static int exec_match_any(Warp *w, const Insn *I, Mask m) { return match(w, I, m, 1, true); }
static int exec_match_all(Warp *w, const Insn *I, Mask m) { return match(w, I, m, 2, false); }

// ----------------------------------------------------------------------------------------- redux

static int redux(Warp *w, const Insn *I, Mask m, ReduceOp op, ElementType type, bool absolute) {
  Part parts[32];
  int count;
  if (!gather(w, I, m, &I->op[2], w->live, parts, &count)) return BLOCK;
  const uint32_t *v = SRC32(1);
  Reduction reduce = reduction_of(op, type);
  uint32_t x[32], result[32];
  if (type == TY_F32) {  // a NaN becomes canonical, even in a single lane
    FOR_LANES(l) x[l] = is_nan(v[l]) ? NAN32 : absolute ? v[l] & 0x7FFFFFFF : v[l];
    v = x;
  }
  for (int i = 0; i < count; i++) {
    Mask lanes = parts[i].lanes;
    uint32_t r = v[__builtin_ctz(lanes)];
    for (Mask rest = lanes & (lanes - 1); rest; rest &= rest - 1)
      reduce((uint8_t *)&r, (const uint8_t *)&v[__builtin_ctz(rest)], sizeof r);
    FOR_SET(l, lanes) result[l] = r;
  }
  PUT32(0, result);
  return DONE;
}

static int exec_redux_arithmetic(Warp *w, const Insn *I, Mask m) {
  ReduceOp op = (ReduceOp)(OP_ADD + I->mod[0] - 1);
  return redux(w, I, m, op, I->mod[1] == 1 ? TY_U32 : TY_S32, false);
}
static int exec_redux_logic(Warp *w, const Insn *I, Mask m) {
  return redux(w, I, m, (ReduceOp)(OP_AND + I->mod[0] - 1), TY_U32, false);
}
static int exec_redux_f32(Warp *w, const Insn *I, Mask m) {
  return redux(w, I, m, f32_extreme(I->mod[0] == 2, I->mod[2]), TY_F32, I->mod[1]);
}

// ----------------------------------------------------------------------- elect, activemask, sync

static int exec_elect(Warp *w, const Insn *I, Mask m) {
  Part parts[32];
  int count;
  if (!gather(w, I, m, &I->op[2], existing(w), parts, &count)) return BLOCK;
  uint32_t leader[32];
  Mask elected = 0;
  for (int i = 0; i < count; i++) {
    int first = __builtin_ctz(parts[i].lanes);
    elected |= 1u << first;
    FOR_SET(l, parts[i].lanes) leader[l] = (uint32_t)first;
  }
  PUT32(0, leader);
  PUTP(1, elected);
  return DONE;
}

static int exec_activemask(Warp *w, const Insn *I, Mask m) {
  uint32_t result[32];
  FOR_LANES(l) result[l] = m;
  PUT32(0, result);
  return DONE;
}

static int exec_warp_sync(Warp *w, const Insn *I, Mask m) {
  Part parts[32];
  int count;
  if (!gather(w, I, m, &I->op[0], existing(w), parts, &count)) return BLOCK;
  w->sync_epoch++;
  return DONE;
}

static int exec_nanosleep(Warp *w, const Insn *I, Mask m) {
  (void)SRC32(0);
  return DONE;
}

static const Form FORMS[] = {
    {"shfl.sync(.up|.down|.bfly|.idx).b32", "d32p s32 s32 s32 s32", exec_shfl, F_PROPAGATE},
    {"vote.sync(.all|.any|.uni).pred", "dp sp s32", exec_vote, 0},
    {"vote.sync.ballot.b32", "d32 sp s32", exec_ballot, 0},
    {"match.any.sync.b32", "d32 s32 s32", exec_match_any, 0},
    {"match.any.sync.b64", "d32 s64 s32", exec_match_any, 0},
    {"match.all.sync.b32", "d32p s32 s32", exec_match_all, 0},
    {"match.all.sync.b64", "d32p s64 s32", exec_match_all, 0},
    {"redux.sync(.add|.min|.max)(.u32|.s32)", "d32 s32 s32", exec_redux_arithmetic, 0},
    {"redux.sync(.and|.or|.xor).b32", "d32 s32 s32", exec_redux_logic, 0},
    {"redux.sync(.min|.max){.abs}{.NaN}.f32", "d32 s32 s32", exec_redux_f32, 0},
    {"elect.sync", "d32p s32", exec_elect, 0},
    {"activemask.b32", "d32", exec_activemask, 0},
    {"bar.warp.sync", "s32", exec_warp_sync, 0},
    {"nanosleep.u32", "s32", exec_nanosleep, F_YIELD},
    {0},
};

const Family FAMILY_WARP = {.name = "warp", .forms = FORMS};
