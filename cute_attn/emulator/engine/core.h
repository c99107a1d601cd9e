// What the parts of the machine share: core.c, report.c, async.c and check.c.
#ifndef CUTE_ATTN_CORE_H
#define CUTE_ATTN_CORE_H

#include "engine.h"

#pragma GCC visibility push(hidden)

// ------------------------------------------------------------------------------------- core.c

// The warps that have not exited; `warps` has room for all that are resident.
int list_warps(Emu *e, Warp **warps);

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

// Run what the schedule chooses: under "fair" all operations, else the next stage of some.
void run_some_async(Emu *e);
void retire(AsyncOp *op);       // drop it, whether it is finished or not
void free_async(AsyncOp *op);

// ------------------------------------------------------------------------------------ check.c

void marks_reset(Emu *e);
void sync_table_free(Emu *e);

#pragma GCC visibility pop
#endif
