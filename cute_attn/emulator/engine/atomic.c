// atom and red, and red.async to global memory.
#include "memory.h"
#include "reductions.h"

// The operation on a register; with packed types a register holds two elements. Floating-point
// addition differs between global and shared memory.
typedef struct { Reduction global, shared; uint32_t bytes; } Atomic;

#define QUIET64 (1ull << 51)

// In shared memory a NaN of f64 becomes quiet, and memory's NaN takes precedence.
static void add_f64_shared(uint8_t *to, const uint8_t *from, uint32_t bytes) {
  uint64_t sum;
  memcpy(&sum, from, sizeof sum);
  reduction_of(OP_ADD, TY_F64)((uint8_t *)&sum, to, bytes);
  if ((sum & ~(1ull << 63)) > 0x7FFull << 52) sum |= QUIET64;
  memcpy(to, &sum, sizeof sum);
}

static void exchange(uint8_t *to, const uint8_t *from, uint32_t bytes) { memcpy(to, from, bytes); }

// Modifiers: semantics, scope, space, operation, cache hint, then (vector and) type.
#define SCOPE "{.cta|cluster|gpu|sys}"
#define ATOM "atom{.relaxed|acquire|release|acq_rel}" SCOPE
#define RED "red{.relaxed|release}" SCOPE
#define ANY_SPACE "{.global|shared|shared::cta|shared::cluster}"
#define HINT "{.L2::cache_hint}"
enum { AT_SEM, AT_SCOPE, AT_SPACE, AT_OPERATION, AT_HINT, AT_TYPE };
enum { AT_VECTOR = AT_TYPE, AT_VECTOR_TYPE };

// One lane's share of the instruction: `n` consecutive registers. With `c`, each register is
// compared with b and replaced by c if equal. Returns whether memory changes.
static bool apply(const Atomic *op, bool shared, uint8_t *at, const Values *b, const Values *c,
                  int n, int lane) {
  uint8_t before[MAX_ACCESS];
  memcpy(before, at, op->bytes * (uint32_t)n);
  for (int k = 0; k < n; k++) {
    uint8_t *to = at + op->bytes * (uint32_t)k;
    const uint8_t *operand = b[k].data + lane * b[k].stride;
    if (!c) (shared ? op->shared : op->global)(to, operand, op->bytes);
    else if (!memcmp(to, operand, op->bytes)) memcpy(to, c->data + lane * c->stride, op->bytes);
  }
  return memcmp(before, at, op->bytes * (uint32_t)n) != 0;
}

static const Operand *destination_of(const Insn *I) {  // for atom; red has no destination
  return I->op[0].kind == K_ADDRESS ? NULL : &I->op[0];
}

static int order_of(const Insn *I) {
  static const int atom[] = {0, 0, 1, 2, 3}, red[] = {0, 0, 2};
  return (destination_of(I) ? atom : red)[I->mod[AT_SEM]];
}

static int atomic(Warp *w, const Insn *I, Mask m, const Atomic *op, int vector, bool swaps,
                  int order) {
  Emu *e = emu_of(w);
  const Operand *d = destination_of(I), *o = &I->op[d != NULL];
  Type t = {(uint8_t)op->bytes, false};
  int n = elements_of(w, I, &o[1], SP_GLOBAL, vector, t);
  if (!n || (d && !elements_of(w, I, d, SP_GLOBAL, vector, t))) return DONE;
  const Operand *s = list_of(w, &o[1]);
  Values b[8], c;
  uint64_t buffers[9][64];
  for (int k = 0; k < n; k++) b[k] = values_of(w, I, &s[k], m, t.bytes, buffers[k]);
  if (swaps) c = values_of(w, I, &o[2], m, t.bytes, buffers[8]);
  read_policy(w, I, &o[2 + swaps], m);

  int space = I->mod[AT_SPACE];
  uint32_t bytes = (uint32_t)n * t.bytes;
  // An exchange whose result is discarded does not read.
  bool blind = op->global == exchange && (!d || d->kind == K_NONE);
  Cursor cursor;
  Batch batch;
  start_access(&cursor, w, I, o, m,
               !space ? SP_GENERIC : space == 1 ? SP_GLOBAL : SP_SHARED, bytes, true);
  cursor.own_cta = space == 2 || space == 3;
  uint8_t old[32][MAX_ACCESS];
  memset(old, 0, sizeof old);
  while (next_batch(&cursor, &batch)) {
    if (batch.space == SP_LOCAL) {
      finding(w, I, CK_BOUNDS, SEV_ERROR, "an atomic operation on local memory");
      continue;
    }
    Access access = access_of(w, I, "atomic operation");
    access.atomic = 1;
    announce(w, I, &batch, bytes, blind ? WRITES : READS | WRITES, &access);
    e->counters[CT_ATOMICS] += (uint64_t)__builtin_popcount(batch.m) * bytes;
    synchronise(w, &batch, order, sync_write);
    bool changed = false;
    FOR_SET(l, batch.m) {
      memcpy(old[l], host_of(&batch, l), bytes);
      changed |= apply(op, batch.space == SP_SHARED, host_of(&batch, l), b, swaps ? &c : NULL, n,
                       l);
    }
    synchronise(w, &batch, order, sync_read);
    if (changed) progress(e);
  }
  if (!d) return DONE;
  uint64_t at[32];
  FOR_LANES(l) at[l] = (uint64_t)l * MAX_ACCESS;
  d = list_of(w, d);
  for (int k = 0; k < n; k++) put_from(w, I, &d[k], m, t, old[0] + k * t.bytes, at);
  return DONE;
}

// The operations and types of a form, in the order of its pattern's alternatives.
typedef struct { ReduceOp operations[3]; struct { ElementType type; uint8_t bytes; } types[5]; }
    Choice;
#define B32 {TY_U32, 4}
#define S32 {TY_S32, 4}
#define B64 {TY_U64, 8}
#define S64 {TY_S64, 8}
#define HALF_TYPES {TY_F16, 2}, {TY_BF16, 2}
#define PACKED_TYPES {TY_F16, 4}, {TY_BF16, 4}
static const Choice LOGIC = {{OP_AND, OP_OR, OP_XOR}, {B32, B64}},
                    ADD = {{OP_ADD}, {B32, B32, B64, {TY_F32_FTZ, 4}, {TY_F64, 8}}},
                    ADD_INTEGERS = {{OP_ADD}, {B32, B32, B64, B64}},
                    ADD_F32 = {{OP_ADD}, {{TY_F32_FTZ, 4}}},
                    STEP = {{OP_INC, OP_DEC}, {B32}},
                    EXTREME = {{OP_MIN, OP_MAX}, {B32, S32, B64, S64}},
                    HALVES = {{OP_ADD, OP_MIN, OP_MAX}, {HALF_TYPES}},
                    PACKED = {{OP_ADD, OP_MIN, OP_MAX}, {PACKED_TYPES}};

static int reduce(Warp *w, const Insn *I, Mask m, const Choice *choice, int type, int vector,
                  int order) {
  ReduceOp op = choice->operations[I->mod[AT_OPERATION] - 1];
  ElementType element = choice->types[I->mod[type] - 1].type;
  Reduction global = reduction_of(op, element);
  Atomic a = {global, element == TY_F32_FTZ ? reduction_of(op, TY_F32)
                      : element == TY_F64   ? add_f64_shared : global,
              choice->types[I->mod[type] - 1].bytes};
  return atomic(w, I, m, &a, vector, false, order);
}

#define ATOMIC(name, choice) \
  static int exec_atom_##name(Warp *w, const Insn *I, Mask m) { \
    return reduce(w, I, m, &choice, AT_TYPE, 0, order_of(I)); \
  }
ATOMIC(logic, LOGIC)
ATOMIC(add, ADD)
ATOMIC(step, STEP)
ATOMIC(extreme, EXTREME)
ATOMIC(half, HALVES)
ATOMIC(packed, PACKED)

#define ATOMIC_VECTOR(name, choice) \
  static int exec_atom_vector##name(Warp *w, const Insn *I, Mask m) { \
    return reduce(w, I, m, &choice, AT_VECTOR_TYPE, I->mod[AT_VECTOR], order_of(I)); \
  }
ATOMIC_VECTOR(, ADD_F32)
ATOMIC_VECTOR(_half, HALVES)
ATOMIC_VECTOR(_packed, PACKED)

// red.async on global memory has no cache hint, and always releases; see exec_st_async_release.
#define RELEASING(name, choice) \
  static int exec_red_async_##name(Warp *w, const Insn *I, Mask m) { \
    return reduce(w, I, m, &choice, AT_HINT, 0, 2); \
  }
RELEASING(logic, LOGIC)
RELEASING(add, ADD_INTEGERS)
RELEASING(step, STEP)
RELEASING(extreme, EXTREME)

static int exec_atom_exch(Warp *w, const Insn *I, Mask m) {
  Atomic a = {exchange, exchange, 4u << (I->mod[AT_TYPE] - 1)};  // .b32 .b64 .b128
  return atomic(w, I, m, &a, 0, false, order_of(I));
}
static int exec_atom_cas(Warp *w, const Insn *I, Mask m) {
  Atomic a = {.bytes = 2u << (I->mod[AT_TYPE] - 1)};  // .b16 .b32 .b64 .b128
  return atomic(w, I, m, &a, 0, true, order_of(I));
}

// --------------------------------------------------------------------------------------- forms

#define BOTH(spaces, rest, operands, handler)                        \
  {ATOM spaces rest, "dx " operands " s64?", handler, F_EFFECT},            \
  {RED spaces rest, operands " s64?", handler, F_EFFECT}
#define BOTH_VECTOR(rest, handler)                                   \
  {ATOM "{.global}" rest, "dxl a sxl s64?", handler, F_EFFECT},             \
  {RED "{.global}" rest, "a sxl s64?", handler, F_EFFECT}

static const Form FORMS[] = {
    {"red.async" ASYNC_RELEASE "(.and|or|xor)(.b32|b64)", "a sx", exec_red_async_logic, F_EFFECT},
    {"red.async" ASYNC_RELEASE "(.add)(.u32|s32|u64|s64)", "a sx", exec_red_async_add, F_EFFECT},
    {"red.async" ASYNC_RELEASE "(.inc|dec)(.u32)", "a sx", exec_red_async_step, F_EFFECT},
    {"red.async" ASYNC_RELEASE "(.min|max)(.u32|s32|u64|s64)", "a sx",
     exec_red_async_extreme, F_EFFECT},

    BOTH(ANY_SPACE, "(.and|or|xor)" HINT "(.b32|b64)", "a sx", exec_atom_logic),
    BOTH(ANY_SPACE, "(.add)" HINT "(.u32|s32|u64|f32|f64)", "a sx", exec_atom_add),
    BOTH(ANY_SPACE, "(.inc|dec)" HINT "(.u32)", "a sx", exec_atom_step),
    BOTH(ANY_SPACE, "(.min|max)" HINT "(.u32|s32|u64|s64)", "a sx", exec_atom_extreme),
    BOTH(ANY_SPACE, "(.add).noftz" HINT "(.f16|bf16)", "a sx", exec_atom_half),
    BOTH(ANY_SPACE, "(.add).noftz" HINT "(.f16x2|bf16x2)", "a sx", exec_atom_packed),
    {ATOM ANY_SPACE "(.exch)" HINT "(.b32|b64|b128)", "dx a sx s64?", exec_atom_exch, F_EFFECT},
    {ATOM ANY_SPACE "(.cas)" HINT "(.b16|b32|b64|b128)", "dx a sx sx s64?",
     exec_atom_cas, F_EFFECT},
    BOTH_VECTOR("(.add)" HINT "(.v2|v4)(.f32)", exec_atom_vector),
    BOTH_VECTOR("(.add|min|max).noftz" HINT "(.v2|v4|v8)(.f16|bf16)", exec_atom_vector_half),
    BOTH_VECTOR("(.add|min|max).noftz" HINT "(.v2|v4)(.f16x2|bf16x2)", exec_atom_vector_packed),
    {0},
};

const Family FAMILY_ATOMIC = {.name = "atomic", .forms = FORMS};
