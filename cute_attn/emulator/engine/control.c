// Control flow, setmaxnreg, and dependent launches.
#include "core.h"
#include "external.h"

static int exec_bra(Warp *w, const Insn *I, Mask m) {
  Group *g = group_of(w);
  int32_t target = (int32_t)I->op[0].imm;
  if (m == g->mask) {
    g->pc = target;
    return JUMP;
  }
  g->mask &= ~m;
  g->pc++;
  add_group(w, m, target);
  return JUMP;
}

static int exec_brx(Warp *w, const Insn *I, Mask m) {
  const uint32_t *index = SRC32(0);
  const Operand *targets = list_of(w, &I->op[1]);
  int count = count_of(&I->op[1]);
  Group *g = group_of(w);
  Mask rest = g->mask & ~m;
  int32_t next = g->pc + 1;
  uint32_t chosen[32];
  memcpy(chosen, index, sizeof chosen);
  remove_group(w, w->current);
  if (rest) add_group(w, rest, next);
  while (m) {
    uint32_t at = chosen[__builtin_ctz(m)];
    Mask same = 0;
    FOR_SET(l, m) same |= chosen[l] == at ? 1u << l : 0;
    if (at >= (uint32_t)count) {
      fatal(w, I, CK_BOUNDS, "branch index %u, but there are %d targets", at, count);
      at = 0;
    }
    add_group(w, same, (int32_t)targets[at].imm);
    m &= ~same;
  }
  w->current = 0;
  return JUMP;
}

static int exec_exit(Warp *w, const Insn *I, Mask m) {
  (void)I;
  Group *g = group_of(w);
  if (g->mask != m) g->pc++;
  exit_lanes(w, m);
  return JUMP;
}

static int exec_trap(Warp *w, const Insn *I, Mask m) {
  fatal(w, I, CK_ASSERT, "trap, in lanes 0x%08x", m);
  return DONE;
}

static int exec_call(Warp *w, const Insn *I, Mask m) {
  Emu *e = emu_of(w);
  const Operand *name = &I->op[1];
  if (name->imm >= (uint64_t)e->nstrings) {
    fatal(w, I, CK_ASSERT, "call of an unknown function");
    return DONE;
  }
  return call_external(w, I, m, e->strings[name->imm], list_of(w, &I->op[2]), count_of(&I->op[2]),
                       list_of(w, &I->op[0]));
}

bool jumps(const Insn *I) {
  return I->exec == exec_bra || I->exec == exec_brx || I->exec == exec_exit ||
         I->exec == exec_trap;
}

int32_t next_of(const Program *p, int32_t at, int k) {
  const Insn *I = &p->code[at];
  if (I->exec == exec_bra || I->exec == exec_brx) {
    const Operand *o = &I->op[I->exec == exec_brx];
    const Operand *targets = o->kind == K_LIST ? &p->operands[o->reg] : o;
    if (k < count_of(o)) return (int32_t)targets[k].imm;
    k -= count_of(o);
  } else if (I->exec == exec_exit && k-- == 0) {
    return p->ncode;
  }
  return k == 0 && (I->guard >= 0 || !jumps(I)) ? at + 1 : -1;
}

int exec_nothing(Warp *w, const Insn *I, Mask m) {
  (void)w, (void)I, (void)m;
  return DONE;
}

// ------------------------------------------------------------------------------------ setmaxnreg
//
// All warps of a warpgroup (four consecutive warps) should execute the same sequence of setmaxnreg.
// Otherwise the PTX ISA leaves the behaviour undefined; on hardware each warp gets the registers
// that it asks for.

static void check_warpgroup(Warp *w, const Insn *I, int count) {
  const Cta *cta = w->cta;
  int first = w->index / 4 * 4, last = first + 4 < cta->nwarps ? first + 4 : cta->nwarps;
  for (int i = first; i < last; i++) {
    const Warp *v = &cta->warps[i];
    if (v == w) continue;
    if (v->register_changes < w->register_changes)
      finding(w, I, CK_REGISTERS, SEV_NOTE,
              "warp %d executes setmaxnreg number %d before warp %d of its warpgroup has executed "
              "number %d: all four warps must, and synchronise in between", w->index,
              w->register_changes + 1, v->index, v->register_changes + 1);
    else if (v->register_changes == w->register_changes + 1 && v->registers != count)
      finding(w, I, CK_REGISTERS, SEV_NOTE,
              "warp %d asks for %d registers, but warp %d of its warpgroup has %d: all four warps "
              "must execute the same setmaxnreg", w->index, count, v->index, v->registers);
  }
}

static bool check_registers(Warp *w, const Insn *I, int count, bool increase) {
  check_warpgroup(w, I, count);
  if (count < 24 || count > 256 || count % 8) {
    finding(w, I, CK_REGISTERS, SEV_ERROR,
            "%d registers: it must be 24 to 256, and a multiple of 8", count);
    return false;
  }
  if (increase ? count < w->registers : count > w->registers) {
    finding(w, I, CK_REGISTERS, SEV_ERROR, "%s to %d registers, but the warp has %d",
            increase ? "increases" : "decreases", count, w->registers);
    return false;
  }
  return true;
}

static int exec_setmaxnreg(Warp *w, const Insn *I, Mask m) {
  (void)m;
  Group *g = group_of(w);
  int count = (int)I->op[0].imm;
  bool increase = I->mod[0] == 1;
  if (emu_of(w)->program->keeps_registers) {
    finding(w, I, CK_REGISTERS, SEV_NOTE,
            "the assembler has left it out, as it does where it cannot tell how many registers the "
            "kernel starts with (.maxnreg, or threads with .minnctapersm): the warp keeps %d",
            w->registers);
    return DONE;
  }
  if (g->step == 0 && !check_registers(w, I, count, increase)) {
    w->register_changes++;
    return DONE;
  }
  int need = 32 * (count - w->registers);
  if (need > w->cta->register_pool) {
    g->step = 1;
    return wait_for(w, WAIT_REGISTERS, (uint64_t)need, (uint64_t)w->cta->register_pool);
  }
  w->cta->register_pool -= need;
  w->registers = count;
  w->register_changes++;
  progress(emu_of(w));
  return DONE;
}

// --------------------------------------------------------------------------------------- forms

// call: op 0 is the result (a list of one element, or absent), op 1 the function, op 2 the
// arguments.
static const Form FORMS[] = {
    {"bra{.uni}", "L", exec_bra, F_BRANCH},
    {"brx.idx{.uni}", "s32 sxl", exec_brx, 0},
    {"ret{.uni}", "", exec_exit, 0},
    {"exit", "", exec_exit, 0},
    {"trap", "", exec_trap, 0},
    {"call{.uni}", "sxl? F sxl?", exec_call, F_YIELD},
    {"brkpt", "", exec_nothing, 0},
    {"pmevent{.mask}", "i", exec_nothing, 0},
    {"setmaxnreg(.inc|.dec).sync.aligned.u32", "i", exec_setmaxnreg, F_ALIGNED | F_EFFECT},
    {"griddepcontrol(.launch_dependents|.wait)", "", exec_nothing, 0},
    {0},
};

const Family FAMILY_CONTROL = {.name = "control", .forms = FORMS};
