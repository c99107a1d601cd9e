// What a kernel prints and asserts: external.c.
#ifndef CUTE_ATTN_EXTERNAL_H
#define CUTE_ATTN_EXTERNAL_H

#include "engine.h"

#pragma GCC visibility push(hidden)

int call_external(Warp *w, const Insn *I, Mask m, const char *name, const Operand *arguments,
                  int count, const Operand *result);  // vprintf, __assertfail
const char *output_text(Emu *e);
void output_clear(Emu *e);

#pragma GCC visibility pop
#endif
