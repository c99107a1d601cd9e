// Declarations shared by the parts of the machine: core.c, report.c, async.c and check.c.
#ifndef CUTE_ATTN_CORE_H
#define CUTE_ATTN_CORE_H

#include "engine.h"

#pragma GCC visibility push(hidden)

// ------------------------------------------------------------------------------------- core.c

// The warps that have not exited; `warps` has room for all resident warps.
int list_warps(Emu *e, Warp **warps);

// --------------------------------------------------------------------------------- families.c

extern const Family *const FAMILIES[];  // NULL ends the list

// ----------------------------------------------------------------------------------- report.c

struct Findings *findings_new(void);
void findings_free(Emu *e);
void trace_free(Emu *e);
void report_undefined(Warp *w, const Insn *I, const Operand *o, Mask lanes);
// A finding about the launch and not about an instruction. The launch ends.
void machine_finding(Emu *e, int check, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
// A finding that lists what each warp waits for. The launch ends.
void report_deadlock(Emu *e, const char *title);

// ------------------------------------------------------------------------------------ async.c

// Run the operations that the schedule chooses: under "fair" all operations, else the next stage of
// some operations.
void run_some_async(Emu *e);
void retire(AsyncOp *op);       // drop an operation, finished or not
void free_async(AsyncOp *op);

// --------------------------------------------------------------------------------- control.c

// The k-th possible successor of an instruction, or -1. Jump targets come first. The end of the
// program stands for the end of the thread; nothing follows a trap.
int32_t next_of(const Program *p, int32_t at, int k);
bool jumps(const Insn *I);

// -------------------------------------------------------------------------------- branches.c

// Lanes have branched on a chosen value, which comes from a read of instruction `origin`.
void branches_undecided(Warp *w, const Insn *I, Mask lanes, int32_t origin);
void branches_meet(Warp *w);  // called before the current group executes its instruction
void branches_leave(Warp *w, Mask lanes);  // undecided lanes reach their meeting point, or exit
void branches_pass(Warp *w, const Insn *I, Mask m);  // the group executes I in lanes m
void branches_free(Warp *w);

// ------------------------------------------------------------------------------------ check.c

void marks_reset(Emu *e);
void sync_table_free(Emu *e);

#pragma GCC visibility pop
#endif
