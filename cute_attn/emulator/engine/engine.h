// Declarations shared by all parts of the emulator: program, machine state, and the services of
// core.c, report.c, async.c and check.c. An instruction's meaning is written once, in the file of
// its family, which registers its form.
#ifndef CUTE_ATTN_ENGINE_H
#define CUTE_ATTN_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// Only the C interface, emu_..., is visible outside the library, so that internal calls are direct.
#pragma GCC visibility push(hidden)

typedef uint32_t Mask;   // one bit per lane
typedef uint32_t Clock;  // a component of a vector clock

#define ALL_LANES 0xFFFFFFFFu
#define FOR_LANES(l) for (int l = 0; l < 32; l++)
#define FOR_SET(l, mask) for (int l = 0; l < 32; l++) if ((mask) >> l & 1)

typedef struct Emu Emu;
typedef struct Cta Cta;
typedef struct Cluster Cluster;
typedef struct Warp Warp;
typedef struct Insn Insn;
typedef struct AsyncOp AsyncOp;
typedef struct Mbarrier Mbarrier;
typedef struct ReadNode ReadNode;  // check.c

// ------------------------------------------------------------------------------------ program
//
// A form is a pattern of opcode and modifiers, with the operands it takes:
//   "add{.rn|rz|rm|rp}{.ftz}{.sat}.f32", "d32 s32 s32"
// .x       literal
// {.a|b}   optional: at most one of these
// (.a|b)   exactly one of these
// #        a decimal number, inside a literal: ".m64n#k16"
// Every {} and () group, and every #, fills one entry of Insn.mod, in order of appearance: 0 for
// absent, the 1-based index of the alternative, or the number itself.
//
// Operands, in the order in which PTX writes them; Insn.op has one entry for each token:
//   d32 s32    destination, source in a register of at most 32 bits (b8..b32, f16, f16x2, f32)
//   d64 s64 d128 s128   in wider registers;  dp sp   predicates (sp may be negated: op.neg)
//   dx sx      a register of any width, op.bits
//   d32l ...   the suffix l: a list in braces, or one operand; op.count elements at list_of(w, op)
//   d32p       "d|p": TWO entries, the register and the predicate (K_NONE if absent)
//   a          address "[reg+imm]", "[symbol+imm]" or "[imm]"
//   T          tensor address "[desc, {c0, c1 ...}]": TWO entries, an address and a list s32l
//   i          immediate;  L   label (op.imm is the index of the instruction it marks)
//   F          name of a function (op.imm: index in Emu.strings)
//   a suffix ? marks an operand that may be missing: its entry is then K_NONE
// A destination written "_" is K_NONE as well.
typedef enum {
  K_NONE, K_REG, K_PRED, K_IMM, K_LIST,
  K_SREG,        // special register: op.reg is an SR_ value
  K_ADDRESS,     // base (op.sub: K_REG, K_IMM or K_xxx_SYM) plus op.imm
  K_SHARED_SYM,  // offset op.imm in the CTA's shared memory
  K_LOCAL_SYM,   // offset op.imm in the thread's local memory
  K_PARAM_SYM,   // offset op.imm in the kernel's parameters
} OperandKind;

typedef struct {
  uint8_t kind, bits, neg, sub;
  int32_t count;  // number of elements of a list
  int32_t reg;    // word offset in Warp.regs; for a list: index in Program.operands
  int32_t id;     // register number: index in Warp.defined
  uint64_t imm;
} Operand;  // 24 bytes; Python packs it as "<BBBBiiiQ"

// The results of a handler.
enum {
  DONE,   // go on with the next instruction
  JUMP,   // the instruction has set the program counters itself
  BLOCK,  // the handler called wait_for() and runs again later; Group.step has its progress
};
typedef int (*Exec)(Warp *w, const Insn *I, Mask m);

typedef struct { const char *pattern, *operands; Exec exec; unsigned flags; } Form;

// A family of instructions: its forms, and functions that the engine calls as CTAs and threads come
// and go. A NULL function is not called.
typedef struct {
  const char *name;   // name of the family's file
  const Form *forms;  // the last form has no pattern
  void (*cta_starts)(Cta *cta);
  void (*lanes_exit)(Warp *w, Mask lanes);
  void (*warp_exits)(Warp *w);
  void (*cta_exits)(Cta *cta);  // the CTA's last warp has exited
  void (*cta_ends)(Cta *cta);   // the asynchronous operations of its cluster are done
  void (*cta_freed)(Cta *cta);
} Family;
int exec_nothing(Warp *w, const Insn *I, Mask m);  // control.c: instructions without effect here
enum {
  // The handler is called even if the guard is false in all lanes.
  F_ALWAYS = 1,
  // .sync.aligned: the engine makes sure that all live lanes of the warp arrive together.
  F_ALIGNED = 2,
  // Undefined sources are no finding, because the handler makes its results undefined (mov, selp).
  F_PROPAGATE = 4,
  // Ends a time slice, because other warps see the effect (barriers, fences, exit).
  F_YIELD = 8,
  // Issued on the uniform datapath: lanes with equal operands issue one operation together.
  F_UNIFORM = 16,
  // Arithmetic: results of undefined values are undefined, without a finding. Set by program.c.
  F_PURE = 32,
  F_BRANCH = 64,  // a guard with a chosen value (Warp.chosen) gives only a note
  F_MOVE = 128,   // a copy of a register; machine code may have none
  F_EFFECT = 256,  // visible to other threads: no unwritten value may decide whether it runs
};

struct Insn {
  Exec exec;
  const Operand *op;
  int32_t guard;      // word offset of the guard predicate in Warp.regs, or -1
  int32_t guard_id;
  uint8_t guard_neg, nops;
  uint16_t flags;
  uint8_t ndest;      // number of destinations, which come first
  int16_t mod[12];
  int32_t form, line;         // index of the form; line of the PTX text
  int32_t file, source_line;  // file and line of the Python source, from .loc; -1 without .loc
  int32_t opcode;             // index of the opcode's text in Program.opcodes
};

typedef struct {
  Insn *code; int ncode;
  Operand *operands; int noperands;
  int nregs, reg_words;      // number of registers; 32-bit words that all registers take per warp
  int local_bytes, param_bytes, static_shared;
  int reqntid, maxnreg;      // the directives' values; 0 without the directive
  int arch;                  // architecture: 80, 90, 100 ...
  int launch_registers;      // registers of a thread at launch, from the machine code; 0 if unknown
  bool keeps_registers;      // the assembler has dropped setmaxnreg
  const char *name;
} Program;

// Special registers (op.reg of K_SREG). The order is as in SPECIAL_REGISTERS of program.py.
enum {
  SR_TID_X, SR_TID_Y, SR_TID_Z, SR_NTID_X, SR_NTID_Y, SR_NTID_Z,
  SR_CTAID_X, SR_CTAID_Y, SR_CTAID_Z, SR_NCTAID_X, SR_NCTAID_Y, SR_NCTAID_Z,
  SR_CLUSTERID_X, SR_CLUSTERID_Y, SR_CLUSTERID_Z,
  SR_NCLUSTERID_X, SR_NCLUSTERID_Y, SR_NCLUSTERID_Z,
  SR_CLUSTER_CTAID_X, SR_CLUSTER_CTAID_Y, SR_CLUSTER_CTAID_Z,
  SR_CLUSTER_NCTAID_X, SR_CLUSTER_NCTAID_Y, SR_CLUSTER_NCTAID_Z,
  SR_CLUSTER_CTARANK, SR_CLUSTER_NCTARANK, SR_IS_EXPLICIT_CLUSTER,
  SR_LANEID, SR_WARPID, SR_NWARPID, SR_SMID, SR_NSMID, SR_GRIDID,
  SR_LANEMASK_EQ, SR_LANEMASK_LE, SR_LANEMASK_LT, SR_LANEMASK_GE, SR_LANEMASK_GT,
  SR_CLOCK, SR_CLOCK_HI, SR_CLOCK64, SR_GLOBALTIMER, SR_GLOBALTIMER_LO, SR_GLOBALTIMER_HI,
  SR_DYNAMIC_SMEM_SIZE, SR_TOTAL_SMEM_SIZE, SR_AGGR_SMEM_SIZE, SR_COUNT
};

// ------------------------------------------------------------------------------------- memory
//
// Addresses of global memory, parameters and module variables are host pointers. A shared address
// is 32 bits: rank of the CTA in its cluster << 24 | offset, where offset counts from SHARED_BASE,
// as on hardware (the first KiB is the system's). Generic addresses of shared and local memory
// carry a tag in the top byte.
#define SHARED_BASE 1024u
#define SHARED_RANK_SHIFT 24
#define SHARED_TAG (0x11ull << 56)
#define LOCAL_TAG (0x22ull << 56)
#define TAG_MASK (0xFFull << 56)

typedef enum { SP_GENERIC, SP_GLOBAL, SP_SHARED, SP_LOCAL, SP_PARAM, SP_CONST } Space;

typedef struct { uint64_t base, size; const char *name; uint8_t *initialised; struct Cell *cells;
                 bool writable; } Region;

// --------------------------------------------------------------------------- happens-before
//
// Every ordered sequence of effects is an agent with a component in all vector clocks: the
// threads of a warp (AG_GENERIC), each of a warp's asynchronous queues, and each mbarrier (its
// clock counts completed phases: a wait for a phase orders the writes of copies that signal it).
enum {
  AG_GENERIC,
  AG_CP_ASYNC,    // cp.async of the warp: clock = number of the operation
  AG_BULK_READ,   // sources of bulk copies: clock = number of the bulk group
  AG_BULK_WRITE,  // destinations of bulk copies
  AG_WGMMA,       // clock = number of the wgmma group
  AG_FLOW,        // waits for mbarriers and initialisations: events that relaxed operations order too
  AG_TC,          // tcgen05.mma, cp, shift: executed in the order of issue
  AG_TMEM_LD, AG_TMEM_ST,
  AGENTS_PER_WARP
};
#define MBARRIERS_PER_CTA 128  // agents reserved for mbarriers in each CTA slot

typedef struct {
  Clock *vc;   // effects ordered before the next effect
  Clock *pvc;  // the part of vc that the asynchronous proxy sees (proxy fences)
  // The part of vc that tcgen05 operations are ordered after (tcgen05 fences). In a released view:
  // the part that tcgen05.fence::before_thread_sync or a commit covers, for a fence after the wait.
  Clock *tvc;
} View;

// An access to check and to record. `view` holds the effects ordered before the access; (agent,
// clock) is its epoch.
typedef struct {
  const View *view;
  uint32_t agent;
  Clock clock, birth;  // effects of the same agent since `birth` are ordered
  uint8_t async;       // the access is through the asynchronous proxy (TMA, wgmma, tcgen05)
  uint8_t tensor;      // a tcgen05 operation: ordered by view->tvc on TMEM
  uint8_t lazy;        // unwritten bytes are no finding, but make the destination undefined
  uint8_t late;        // a read that only the asynchronous proxy may overtake (in_flight.c)
  uint8_t atomic;      // a strong or atomic operation: such operations do not race with each other
  const Insn *insn;
  Warp *warp;          // the issuing warp; for messages
  const char *what;    // "TMA load", "store" ...; for messages
  // Whether a store leaves the word unchanged; given if the store's data are not in memory yet.
  bool (*unchanged)(const void *data, const uint8_t *word);
  const void *data;
} Access;

// Checks, as bits of Emu.checks; CHECK_NAMES in program.c names them in this order.
enum {
  CK_DEADLOCK, CK_RACE, CK_PROXY, CK_TCGEN05, CK_UNINITIALISED, CK_BOUNDS, CK_ALIGNMENT,
  CK_DESCRIPTOR, CK_BARRIER, CK_TMEM, CK_EXIT, CK_REGISTERS, CK_SYNC, CK_WGMMA, CK_CLUSTER,
  CK_ASSERT, CK_COUNTERS, CK_COUNT
};
enum { SEV_ERROR, SEV_NOTE };

// ------------------------------------------------------------------------------ machine state

#define MAX_WARPS 32
#define MAX_NAMED_BARRIERS 16

// The kind of object that a warp, or a group of a warp's lanes, waits for. Reports name the kind.
typedef enum {
  WAIT_NONE, WAIT_MBARRIER, WAIT_NAMED_BARRIER, WAIT_CLUSTER_BARRIER, WAIT_CONVERGENCE,
  WAIT_CP_ASYNC, WAIT_BULK_GROUP, WAIT_WGMMA, WAIT_TMEM_ALLOC, WAIT_TCGEN05, WAIT_REGISTERS,
  WAIT_MEMORY, WAIT_SLEEP
} WaitKind;

// Lanes of a warp that share a program counter.
typedef struct {
  Mask mask;
  int32_t pc;
  int32_t step;          // progress inside a blocking instruction; 0 when the instruction starts
  uint64_t note[2];      // values that the blocking instruction keeps while it blocks
  WaitKind wait;         // the object that the group waits for; WAIT_NONE: the group can run
  WaitKind waited;       // the previous wait
  uint64_t wait_object;  // which object: the barrier's address, the bulk group's number ...
  uint64_t wait_detail;  // the awaited phase, or another detail of the wait
  bool timed_wait;       // may time out (try_wait): woken when nothing else can run
  bool timed_out;        // set by the scheduler on a time-out
  uint64_t wait_since;
} Group;

// An instruction that has arrived at an mbarrier or completed bytes of the mbarrier; for reports.
#define SIGNALS 8
typedef struct {
  const Insn *insn;
  const Cta *cta;        // the signalling CTA; the pointer is only compared
  int rank;
  uint32_t warps;        // warps that executed the instruction, one bit each
  Clock phase;           // latest phase that the instruction has signalled
} Signal;

// A warp's latest wait for an mbarrier.
typedef struct {
  Clock clock;           // of the warp's AG_FLOW
  Clock phase;           // the phase that it waited for
  const Insn *insn;      // NULL: the warp has not waited
} Wait;

struct Mbarrier {
  uint32_t offset;       // offset in shared memory, without rank and base
  bool valid;
  int32_t expected;      // arrivals per phase
  int32_t pending;       // arrivals still missing in the current phase
  int64_t tx;            // bytes that the current phase still expects
  int64_t received;      // bytes that the current phase has received
  Clock phase;           // number of phases completed since the initialisation
  Clock clock;           // number of phases ever completed: the clock of the mbarrier's agent
  uint32_t agent;
  View next;             // published when the current phase completes
  View done;             // published by the completed phases
  Clock init_clock;      // clock of the initialisation, an event of the mbarrier's own agent
  int init_warp;
  Clock init_flow;       // clock of that warp's AG_FLOW
  uint64_t init_epoch;   // sync_epoch of that warp
  const Insn *init_insn;
  View also;             // further initialisations by the same instruction, to the same count
  const Insn *expect_insn;  // the latest instruction with an expect_tx
  int nsignals;
  Signal signals[SIGNALS];  // in order; the latest signal is the last
  uint32_t waited;          // warps that have waited for the phase before the current one
  Wait waits[MAX_WARPS];    // of the CTA's warps
};

typedef struct {
  int expected, arrived;   // numbers of threads
  uint64_t generation;
  uint32_t warps;          // warps that have arrived in this generation, one bit each
  uint32_t warps_before;   // warps that arrived in the last generation
  View next;
  const Insn *first;       // the instruction of this generation's first arrival
  Mask gathered[MAX_WARPS];  // lanes that wait for their warp at an unaligned barrier
  int threads, true_threads;
  bool red;
  bool all;                // no thread count was given: exited warps do not count
} NamedBarrier;

struct Warp {
  Cta *cta;
  int index;               // index in the CTA
  int slot;                // in the machine: number of the warp's agents / AGENTS_PER_WARP
  Mask live;               // lanes that have not exited
  int ngroups, current;    // groups[current] is executing
  Group groups[32];
  uint32_t *regs;          // the register file; Operand.reg counts its words
  Mask *defined;           // by Operand.id: lanes in which the register is defined
  // Undefined lanes whose value selp has chosen among defined values by an undefined condition. A
  // branch on such a value is only a note.
  Mask *chosen;
  struct Branches *branches;  // NULL: the warp has had no chosen value
  Mask undecided;             // lanes behind a branch on a chosen value
  AsyncOp **pending;       // by Operand.id: the operation yet to write the register, or NULL
  int npending;            // registers with a pending operation
  struct InFlight **loads;  // by Operand.id: the ldmatrix in flight that writes the register
  struct InFlight *in_flight;
  int nloads;              // registers with a load in flight
  uint8_t *local;          // 32 x local_bytes
  uint8_t *local_init;     // same layout: 1 where written
  Mask carry;              // carry bits of add.cc and similar instructions
  Mask tainted;            // lanes in which the current instruction has read an undefined value
  Mask tainted_raw;        // lanes of `tainted` in which the value was no chosen value
  int32_t taint_origin;    // the instruction that the undefined value comes from, or -1
  int32_t *origin;         // taint_origin of each undefined register
  int32_t *unfenced;       // by Operand.id: written since the last wgmma.fence (NULL: not tracked)
  View view, fence_release, fence_acquire;   // fence_*: check.c, for fences
  Clock *fenced;           // view.vc at the last tcgen05.fence::before_thread_sync
  Clock agent_clock[AGENTS_PER_WARP], agent_birth[AGENTS_PER_WARP];
  // asynchronous queues of the warp
  uint64_t cp_issued, cp_done, cp_committed[64]; int cp_groups;       // cp.async
  uint64_t bulk_group;                                                 // open group, from 1 on
  uint64_t wgmma_group;
  int registers;           // registers of each thread (setmaxnreg)
  uint64_t executed;       // number of warp-instructions
  int64_t run;             // the open run of instructions in the stream, or -1 (stream.c)
  uint64_t sync_epoch;     // counts bar.warp.sync and barriers, which order the lanes' accesses
  Mask cluster_arrived, cluster_unwaited;
  int register_changes;
  struct Copies *copies;   // copy.h
  struct Wgmma *wgmma;     // wgmma.c: its wgmmas in flight
  bool exited;
};

struct Cta {
  Emu *emu;
  Cluster *cluster;
  int rank;                // rank in the cluster
  uint32_t id[3], linear;
  int slot;                // index of the CTA's SM
  int nwarps, nthreads, live_warps;
  int nloads;              // the sum of Warp.nloads over the CTA's warps
  Warp *warps;
  uint8_t *shared;         // shared_bytes
  uint32_t shared_bytes;   // size of static and dynamic memory; offset 0 is address SHARED_BASE
  uint8_t *shared_init;    // per byte: 1 where written
  uint8_t *shared_chosen;  // per byte: 1 for a chosen value (Warp.chosen); NULL: no such byte
  struct Cell *shared_cells;  // one per word
  struct LaneCell *lane_cells;  // one per word, for races between the lanes of a warp
  NamedBarrier bars[MAX_NAMED_BARRIERS];
  Mbarrier *mbarriers; int nmbarriers;   // find_mbarrier looks up an entry
  int16_t *mbarrier_at;    // for each offset / 8: index in mbarriers, or -1
  struct Tmem *tmem;       // tcgen05.h
  struct Cell *tmem_cells; uint16_t *tmem_init;  // check.c: [groups of 16 lanes][columns]
  bool recorded;           // its warps' steps are kept (stream.c)
  int register_pool;       // registers of the SM that setmaxnreg can still take
  bool cancel_failed_seen;
  bool exited;
};

struct Cluster {
  Emu *emu;
  uint32_t id[3], linear;
  int nctas; Cta *ctas[16];
  // barrier.cluster
  int arrived, live_threads; uint64_t generation; View next, done;
  bool cancel_refused;
  bool exited;
};

// ------------------------------------------------------------------------- asynchronous work
//
// An operation runs in stages, such as: read the source, write the destination and signal. The
// schedule chooses when each stage runs; operations with the same `queue` (not 0) run a stage only
// after all earlier operations of the queue have run that stage. `release` frees the contents of
// `data`.
struct AsyncOp {
  AsyncOp *next, *previous;
  uint64_t number, queue;
  const char *what;
  int stage, stages;
  void (*run)(AsyncOp *op, int stage);
  void (*release)(AsyncOp *op);   // NULL: data is one malloc block, or NULL
  Emu *emu; Cta *cta; Warp *warp; const Insn *insn;
  View view;                      // a copy of the issuer's view at the issue
  Access access;                  // prepared: view, agent, clock, async = 1, insn, warp, what
  uint64_t issued;
  void *data;
  int holders;                    // registers that are pending on the operation, and keep it alive
  bool finished;
  bool on_demand;                 // only force() runs the operation, never the schedule
};

typedef struct { uint64_t start, end; int32_t kind, cta, warp, insn; uint64_t object, detail; } Event;

// Each machine runs in its own thread, so instructions write only memory of their machine. These
// pieces of working memory are kept from one instruction to the next:
enum { SCRATCH_NUMERICS, SCRATCH_LATEST = SCRATCH_NUMERICS + 6, SCRATCH_WGMMA, SCRATCH_TCGEN05,
       SCRATCH_TOUCHED, SCRATCH_BRANCHES, SCRATCH_COUNT };

struct Emu {
  Program *program;
  const char **strings; int nstrings;
  // options
  uint64_t checks;                 // 1 << CK_...
  int schedule;                    // 0 fair, 1 random, 2 adversarial, 3 starving
  int num_sms, slice;
  uint64_t seed, rng;
  bool spurious_cancel, tracing;
  int record_every;                // record every such cluster's steps; 0: of none
  bool noted_inits;                // of mbarriers, by several threads
  int tcgen05_fences[2];  // before-fences, after-fences; -1: not counted, -2: none, reported
  int numerics;                    // arithmetic of tensor cores: 0 fast float, 1 bit-accurate
  int max_findings;
  // launch
  uint32_t grid[3], block[3], cluster_dim[3];
  uint32_t dynamic_shared;
  uint8_t *params;
  // machine
  int warps_per_cta, nslots;
  int nagents, agents_used;               // capacity; number handed out so far
  struct { uint32_t agent; Clock clock; } *free_agents; int nfree_agents;
  Cluster **clusters; int nclusters;      // the resident clusters
  uint64_t next_cluster, total_clusters;  // for the work distributor; cluster_order has the order
  uint32_t *cluster_order;
  // The machine runs clusters first_cluster, first_cluster + cluster_stride ..., while machines of
  // other cores run the rest. With a stride above 1 the launch ends at the first finding, because
  // the launch is then run again as a whole.
  uint32_t first_cluster, cluster_stride;
  uint64_t pending_clusters;              // clusters that are neither launched nor cancelled
  Region *regions; int nregions;
  AsyncOp *async_first, *async_last; uint64_t async_count, async_number;
  uint64_t time;                          // warp-instructions so far
  uint64_t progress;                      // number of effects that other warps may wait for
  uint64_t astray;                        // when made-up values first came up (core.c), or 0
  bool stop;                              // the launch ends; set by a fatal finding
  // counters
  uint64_t *executed;                     // executions, by instruction
  uint64_t counters[64];
  uint64_t warp_executed[MAX_WARPS];      // executions, by the warp's index in its CTA
  struct { const char *kind; int m, n, k; uint64_t count; } mma[64];
  struct Findings *findings;
  struct SyncTable *sync;                 // release/acquire on memory words (check.c)
  struct Trace *trace;
  struct Stream *stream;                  // steps of recorded CTAs (stream.c)
  AsyncOp *running;                       // the operation of which a stage runs
  uint64_t latest_address;                // of the latest access to global memory
  struct Output *output;                  // output of the kernel's printf
  Clock *slot_clocks;                     // clocks of each slot's agents
  struct { ReadNode *nodes; int32_t count, room, free; } reads;  // check.c
  int latest_region;                      // found by region_at
  int32_t *meetings;                      // by instruction: postdominator; NULL: not computed yet
  struct { void *memory; size_t size; } scratch[SCRATCH_COUNT];
};
enum {  // Emu.counters; names are COUNTER_NAMES in program.c, same order
  CT_GLOBAL_LOAD, CT_GLOBAL_STORE, CT_SHARED_LOAD, CT_SHARED_STORE, CT_LOCAL, CT_CP_ASYNC,
  CT_TMA_LOAD, CT_TMA_STORE, CT_TMA_REDUCE, CT_BULK, CT_DSMEM, CT_TMEM_LOAD, CT_TMEM_STORE,
  CT_TMEM_CP, CT_ATOMICS,                                        // up to here, bytes
  CT_BANK_WAVEFRONTS, CT_BANK_IDEAL, CT_GLOBAL_SECTORS, CT_GLOBAL_IDEAL,
  CT_MMA_SYNC_FLOPS, CT_WGMMA_FLOPS, CT_TCGEN05_FLOPS, CT_ASYNC_OPS, CT_BARRIER_PHASES, CT_COUNT
};

static inline Emu *emu_of(const Warp *w) { return w->cta->emu; }
static inline bool checking(const Emu *e, int check) { return e->checks >> check & 1; }

// ---------------------------------------------------------------------------- operands (inline)
//
// Sources are 32 lanes, in the register file, or in `buffer` for anything but a register. 16-bit
// values are zero-extended in 32-bit lanes. Reading an undefined lane is a finding
// (undefined_read). Reading a register that an asynchronous operation will still write is a finding
// too.

void undefined_read(Warp *w, const Insn *I, const Operand *o, Mask lanes);   // report.c
void pending_read(Warp *w, const Insn *I, const Operand *o);                 // async.c
void pending_write(Warp *w, const Insn *I, const Operand *o);                // async.c
void load_read(Warp *w, const Insn *I, const Operand *o);                    // in_flight.c
void load_overwritten(Warp *w, const Insn *I, const Operand *o);             // in_flight.c
uint64_t special_register(Warp *w, int sr, int lane);                        // core.c
uint64_t operand_constant(Warp *w, const Operand *o);   // core.c: K_IMM and symbols

static inline Group *group_of(Warp *w) { return &w->groups[w->current]; }
static inline const Operand *list_of(Warp *w, const Operand *o) {
  return o->kind == K_LIST ? &emu_of(w)->program->operands[o->reg] : o;
}
static inline int count_of(const Operand *o) {
  return o->kind == K_LIST ? o->count : o->kind != K_NONE;
}
static inline void check_read(Warp *w, const Insn *I, const Operand *o, Mask m) {
  if (__builtin_expect(w->npending != 0, 0) && w->pending[o->id]) pending_read(w, I, o);
  if (__builtin_expect(w->nloads != 0, 0)) load_read(w, I, o);
  Mask bad = m & ~w->defined[o->id];
  if (__builtin_expect(bad == 0, 1)) return;
  if (I->flags & F_PROPAGATE) w->taint_origin = w->origin[o->id];
  else undefined_read(w, I, o, bad);
}
static inline const uint32_t *src32_of(Warp *w, const Insn *I, const Operand *o, Mask m,
                                       uint32_t buffer[32]) {
  if (o->kind == K_REG) { check_read(w, I, o, m); return w->regs + o->reg; }
  if (o->kind == K_SREG) FOR_LANES(l) buffer[l] = (uint32_t)special_register(w, o->reg, l);
  else { uint32_t v = (uint32_t)operand_constant(w, o); FOR_LANES(l) buffer[l] = v; }
  return buffer;
}
static inline const uint64_t *src64_of(Warp *w, const Insn *I, const Operand *o, Mask m,
                                       uint64_t buffer[32]) {
  if (o->kind == K_REG && o->bits == 64) {
    check_read(w, I, o, m);
    return (const uint64_t *)(w->regs + o->reg);
  }
  if (o->kind == K_REG) {  // a narrower register, zero-extended
    check_read(w, I, o, m);
    FOR_LANES(l) buffer[l] = w->regs[o->reg + l];
  } else if (o->kind == K_SREG) FOR_LANES(l) buffer[l] = special_register(w, o->reg, l);
  else { uint64_t v = operand_constant(w, o); FOR_LANES(l) buffer[l] = v; }
  return buffer;
}
static inline Mask srcp_of(Warp *w, const Insn *I, const Operand *o, Mask m) {
  Mask v = 0;
  if (o->kind == K_PRED) {
    Mask bad = m & ~w->defined[o->id];
    if (__builtin_expect(bad != 0, 0)) {
      if (I->flags & F_PROPAGATE) w->taint_origin = w->origin[o->id];
      else undefined_read(w, I, o, bad);
    }
    v = w->regs[o->reg];
  } else if (o->kind == K_SREG) {
    FOR_LANES(l) v |= (Mask)(special_register(w, o->reg, l) != 0) << l;
  } else if (o->kind != K_NONE) v = o->imm ? ALL_LANES : 0;
  return o->neg ? ~v : v;
}
#define SRC32(k) (src32_of(w, I, &I->op[k], m, (uint32_t[32]){0}))
#define SRC64(k) (src64_of(w, I, &I->op[k], m, (uint64_t[32]){0}))
#define SRCP(k) (srcp_of(w, I, &I->op[k], m))

static inline void note_write(Warp *w, const Insn *I, const Operand *o, Mask m) {
  if (__builtin_expect(w->npending != 0, 0) && w->pending[o->id]) pending_write(w, I, o);
  if (__builtin_expect(w->nloads != 0, 0)) load_overwritten(w, I, o);
  w->defined[o->id] |= m;
  if (__builtin_expect(w->unfenced != NULL, 0)) w->unfenced[o->id] = 1;
}
static inline void put32_of(Warp *w, const Insn *I, const Operand *o, Mask m, const uint32_t *v) {
  if (o->kind != K_REG) return;
  note_write(w, I, o, m);
  uint32_t *d = w->regs + o->reg;
  if (o->bits == 64) {  // relaxed widths: zero-extend
    uint64_t *d64 = (uint64_t *)d;
    FOR_SET(l, m) d64[l] = v[l];
  } else if (m == ALL_LANES) memcpy(d, v, 128);
  else FOR_LANES(l) d[l] = (m >> l & 1) ? v[l] : d[l];
}
static inline void put64_of(Warp *w, const Insn *I, const Operand *o, Mask m, const uint64_t *v) {
  if (o->kind != K_REG) return;
  note_write(w, I, o, m);
  if (o->bits != 64) { FOR_SET(l, m) w->regs[o->reg + l] = (uint32_t)v[l]; return; }
  uint64_t *d = (uint64_t *)(w->regs + o->reg);
  if (m == ALL_LANES) memcpy(d, v, 256);
  else FOR_LANES(l) d[l] = (m >> l & 1) ? v[l] : d[l];
}
static inline void putp_of(Warp *w, const Insn *I, const Operand *o, Mask m, Mask v) {
  (void)I;
  if (o->kind != K_PRED) return;
  w->regs[o->reg] = (w->regs[o->reg] & ~m) | (v & m);
  w->defined[o->id] |= m;
}
#define PUT32(k, v) put32_of(w, I, &I->op[k], m, v)
#define PUT64(k, v) put64_of(w, I, &I->op[k], m, v)
#define PUTP(k, v) putp_of(w, I, &I->op[k], m, v)
// 128-bit registers: 4 words per lane, lane l's at regs[reg + 4*l].
static inline uint32_t *reg128(Warp *w, const Operand *o) { return w->regs + o->reg; }
// For F_PROPAGATE: lanes in which a source is defined.
static inline Mask defined_in(Warp *w, const Operand *o) {
  if (o->kind != K_REG && o->kind != K_PRED) return ALL_LANES;
  return w->npending && w->pending[o->id] ? ALL_LANES : w->defined[o->id];
}
static inline Mask chosen_in(Warp *w, const Operand *o) {
  return o->kind == K_REG || o->kind == K_PRED ? w->chosen[o->id] : 0;
}
void branches_start(Warp *w);  // branches.c: the warp has a chosen value
// `chosen` matters only in lanes that are not defined.
static inline void set_chosen(Warp *w, const Operand *o, Mask m, Mask defined, Mask chosen) {
  if (o->kind != K_REG && o->kind != K_PRED) return;
  w->defined[o->id] = (w->defined[o->id] & ~m) | (defined & m);
  if (__builtin_expect((m & ~defined) == 0, 1)) return;
  w->origin[o->id] = w->taint_origin;
  w->chosen[o->id] = (w->chosen[o->id] & ~m) | (chosen & m);
  if (__builtin_expect((chosen & m & ~defined) && !w->branches, 0)) branches_start(w);
}
static inline void set_defined(Warp *w, const Operand *o, Mask m, Mask defined) {
  set_chosen(w, o, m, defined, 0);
}
// A cache policy is read like any operand, and then ignored.
static inline void read_policy(Warp *w, const Insn *I, const Operand *o, Mask m) {
  if (o->kind == K_REG) check_read(w, I, o, m);
}
// The address of an `a` operand per lane, in the form of the instruction's state space (shared: 32
// bits with rank; local: offset; generic and global: 64 bits).
void addresses_of(Warp *w, const Insn *I, const Operand *o, Mask m, uint64_t out[32]);  // core.c

// --------------------------------------------- services of core.c, report.c and async.c

// Report a finding. `check` is a CK_ value; the position is added to the text. A repeated finding,
// with equal check, instruction and `other`, is only counted.
void finding(Warp *w, const Insn *I, int check, int severity, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
void finding_with(Warp *w, const Insn *I, const Insn *other, int check, int severity,
                  const char *format, ...) __attribute__((format(printf, 6, 7)));
// Report a finding after which the launch cannot go on. The launch ends after this instruction.
void fatal(Warp *w, const Insn *I, int check, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
// Working memory of at least `bytes`, aligned to 64 bytes. The memory is zeroed when it is made or
// grows.
void *scratch(Emu *e, int which, size_t bytes);
// printf into a ring of buffers of the thread, for parts of messages.
const char *text(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *where(const Insn *I);         // "PTX line 123 (kernel.py:45)"
const char *warp_name(const Warp *w);     // "CTA 3 (rank 1 of cluster 1) warp 5"
const char *address_name(const Cta *cta, uint32_t shared_offset);  // "s_full[1]" or "shared+0x40"

// Block the current group: `return wait_for(...)`. The handler runs again, with the same
// Group.step and note, whenever something may have changed.
int wait_for(Warp *w, WaitKind kind, uint64_t object, uint64_t detail);
// True if all live lanes of `members` are in the current group (m: lanes executing). Otherwise the
// handler must `return wait_for(w, WAIT_CONVERGENCE, members, 0)`; the engine reports members that
// never come.
bool converged(Warp *w, Mask m, Mask members);
void exit_lanes(Warp *w, Mask m);
// Create, and delete, a group of a warp's lanes.
void add_group(Warp *w, Mask mask, int32_t pc);
void remove_group(Warp *w, int i);
static inline void progress(Emu *e) { e->progress++; }
// check.c: take an agent for an mbarrier, and the clock at which the agent starts; give the agent
// back.
uint32_t new_mbarrier_agent(Emu *e, Clock *start);
void free_mbarrier_agent(Emu *e, uint32_t agent, Clock clock);
uint32_t emu_random(Emu *e, uint32_t below);   // deterministic in the seed
bool live_cta(const Cta *cta);

// Asynchronous operations. new_async copies the warp's view and prepares op->access with
// `agent_kind` (an AG_ value of warp w) at `clock`; set run, stages, queue and data, then submit.
AsyncOp *new_async(Warp *w, const Insn *I, const char *what, int agent_kind, Clock clock);
void submit(AsyncOp *op);
// Run the remaining stages of an operation, and of the operations before it in its queue, now.
void force(AsyncOp *op);
static inline uint32_t agent_of(const Warp *w, int kind) {
  return (uint32_t)w->slot * AGENTS_PER_WARP + kind;
}
static inline uint64_t queue_of(const Warp *w, int kind) { return 1 + agent_of(w, kind); }
// Mark register o as pending on op. Later op writes o by put32_of and calls clear_pending.
void set_pending(Warp *w, const Operand *o, AsyncOp *op);
void clear_pending(Warp *w, const Operand *o);

// Loads in flight: rows of shared memory that the registers of I come from.
void start_load(Warp *w, const Insn *I, const uint32_t offset[32], int rows, uint32_t bytes);
void finish_loads(Warp *w);  // all loads in flight have read
void drop_loads(Warp *w);
// A write through the asynchronous proxy, which may overwrite bytes that a load has not read yet.
void check_loads(const Access *a, Cta *cta, uint32_t offset, uint32_t bytes);
void report_overtaken(const Access *a, const Insn *load, const char *place);

// Count a matrix instruction of the whole M x N x K shape (a warp's share of wgmma: M = 16).
void count_mma(Emu *e, const char *kind, int m, int n, int k);

// Trace: an interval on a row. kind: 0 wait, 1 async operation, 2 MMA, 3 instant.
void trace_event(Emu *e, int kind, const Warp *w, const Insn *I, uint64_t start, uint64_t end,
                 uint64_t object, uint64_t detail);

// --------------------------------------------------------------------------- streams (stream.c)
//
// What a recorded warp does, in order. Phases of mbarriers and generations of other barriers are
// numbered so that a wait names the arrivals that it awaits.
enum {
  STEP_RUN,     // a: number of instructions, from `insn` on
  STEP_ARRIVE,  // the warp signals object a, phase b
  STEP_WAIT,    // the warp waits for phase b of object a
  STEP_POLL,    // a test of object a failed: the warp tests again
  STEP_ISSUE,   // the asynchronous operation of number a starts
  STEP_COPY,    // the latest operation moves a bytes of global address b; c: its bulk group, or 0
  STEP_ORDER,   // the latest operation has number a among the warp's of its kind
  STEP_AWAIT,   // the warp waits for its operations up to number a, or up to bulk group a
  STEP_SHARED,  // the next instruction takes a wavefronts of shared memory
  STEP_GLOBAL,  // the next instruction accesses a sectors of global memory, from address b on
  STEP_ATOMIC,  // the next instruction updates a bytes of global memory, from address b on
  STEP_SIGNAL,  // operation c signals object a, phase b; no warp's step
  // The latest operation is one of the tensor core's, with shape a and traits b (stream_shape and
  // stream_traits), or moves a bytes of tensor memory. c: the pair's other CTA and 1, or 0.
  STEP_TENSOR,
  STEP_DELIVER,  // the latest operation, a copy, moves a bytes to CTA b as well
};
enum { OBJECT_NAMED = 1, OBJECT_CLUSTER };  // in the top byte of an object; 0 is an mbarrier
static inline uint64_t stream_object(int kind, uint64_t linear, uint64_t which) {
  return (uint64_t)kind << 56 | linear << 32 | which;
}
static inline uint64_t stream_shape(int m, int n, int k) {
  return (uint64_t)m | (uint64_t)n << 16 | (uint64_t)k << 32;
}
static inline uint64_t stream_traits(int kind, bool a_in_tmem) {
  return (uint64_t)kind | (uint64_t)a_in_tmem << 8;
}
bool stream_records(const Emu *e, uint64_t cluster);
void stream_step(Warp *w, const Insn *I);  // an instruction has completed
void stream_event(Warp *w, const Insn *I, int kind, uint64_t a, uint64_t b, uint64_t c);
// A signal of the warp, or of the operation that runs.
void stream_signal(Warp *w, const Insn *I, const Cta *cta, uint64_t object, uint64_t phase);
void stream_free(Emu *e);

// --------------------------------------------------------------------------- memory (memory.c)

// CTA and offset of a shared address, as seen from w's CTA; NULL if no CTA has the address.
Cta *shared_target(Warp *w, uint32_t address, uint32_t *offset);
// Host pointers for `bytes` at an address, or NULL after a finding (bounds, alignment).
// Findings name `I`. `offset` counts from the start of the CTA's shared memory.
uint8_t *shared_pointer(Warp *w, const Insn *I, Cta *cta, uint32_t offset, uint32_t bytes,
                        uint32_t alignment);
uint8_t *global_pointer(Warp *w, const Insn *I, uint64_t address, uint64_t bytes,
                        uint32_t alignment, bool write);
// The state space of a generic address. For SP_SHARED *cta and *offset are set.
Space classify(Warp *w, uint64_t generic, Cta **cta, uint32_t *offset);
// The CTA and offset of an operand's address, generic or shared; NULL if not in shared memory.
Cta *any_shared_target(Warp *w, uint64_t address, bool generic, uint32_t *offset);
static inline uint32_t shared_address(const Cta *cta, uint32_t offset) {
  return (uint32_t)cta->rank << SHARED_RANK_SHIFT | (offset + SHARED_BASE);
}

// ------------------------------------------------------------------- happens-before (check.c)
//
// Each function returns quickly if its checks are off. Addresses of shared memory are (cta,
// offset).

Access access_of(Warp *w, const Insn *I, const char *what);   // a generic access, now
Access access_as(Warp *w, const Insn *I, const char *what, int agent_kind, Clock clock);
void shared_read(const Access *a, Cta *cta, uint32_t offset, uint32_t bytes);
void shared_write(const Access *a, Cta *cta, uint32_t offset, uint32_t bytes);
// The region that holds an address, or NULL and the nearest region below (`below` may be NULL).
Region *region_at(Emu *e, uint64_t address, int *below);
void global_read(const Access *a, const void *p, uint64_t bytes);
void global_write(const Access *a, const void *p, uint64_t bytes);
void region_forget(Region *r);  // drop the record of accesses to r
// TMEM of a CTA: `lanes` x `columns` words from (lane, column).
void tmem_read(const Access *a, Cta *cta, int lane, int column, int lanes, int columns);
void tmem_write(const Access *a, Cta *cta, int lane, int column, int lanes, int columns);
void tmem_forget(Cta *cta, int column, int columns);  // freed: contents are undefined
bool tmem_initialised(const Cta *cta, int lane, int column, int lanes, int columns);

View view_new(Emu *e);
void view_free(View *v);
void view_clear(Emu *e, View *v);
void view_copy(Emu *e, View *into, const View *from);
View view_with_fenced(Warp *w);  // a copy that includes effects ordered only by tcgen05 fences
void view_join(Emu *e, View *into, const View *from);
void view_join_flow(Emu *e, View *into, const View *from);  // the clocks of AG_FLOW alone
// Component-wise maximum of one agent, in all three clocks.
void view_add(View *v, uint32_t agent, Clock clock);
// As view_add, of effects that the asynchronous proxy sees only after a fence.
void view_add_generic(View *v, uint32_t agent, Clock clock);
// A release by the warp ends its current epoch: joins w's view and own clock into `into`, then
// ticks. An acquire joins `from` into w's view.
void view_release(Warp *w, View *into);
void view_acquire(Warp *w, const View *from);
void proxy_fence(Warp *w);                 // fence.proxy.async, mbarrier_init fence: pvc = vc
void tcgen05_fence_after(Warp *w);         // tvc becomes what earlier before-fences cover
void tcgen05_fence_before(Warp *w);        // sets fenced to vc
int tcgen05_fences(const Program *p, int after);  // number of after-fences (or before-fences)
// Synchronisation through memory words (flags, semaphores): call on strong accesses.
// order: 0 relaxed/volatile, 1 acquire, 2 release, 3 acq_rel / seq_cst.
void sync_read(Warp *w, const void *host_address, int order);
void sync_write(Warp *w, const void *host_address, int order);
void memory_fence(Warp *w);                // fence.acq_rel / fence.sc / membar
// The last warp of a CTA is about to exit by instruction I.
void accesses_at_exit(Warp *w, const Insn *I);
// Words kept for initialisation (also used by copies): mark without a race check.
void lanes_access(Warp *w, const Insn *I, Mask m, const uint64_t *offsets, uint32_t bytes,
                  bool writes, bool as_one);
// A lane starts an asynchronous copy of its CTA's shared memory, by I, and later awaits it.
void lane_gives(Warp *w, const Insn *I, int lane, uint32_t offset, uint32_t bytes);
void lane_gets_back(Warp *w, const Insn *I, int lane, uint32_t offset, uint32_t bytes);
void shared_mark_initialised(Cta *cta, uint32_t offset, uint32_t bytes);

void make_undefined(Cta *cta, uint32_t offset, uint32_t bytes, bool chosen);  // memory.c

// ------------------------------------------------------ branches on chosen values (branches.c)

// An undecided lane has written shared memory of `cta`, or the warp's local memory if `cta` is
// NULL.
void branches_wrote(Warp *w, int lane, Cta *cta, uint32_t at, uint32_t bytes);
// Report an effect by undecided lanes.
void report_undecided(Warp *w, const Insn *I, Mask lanes);
// The instruction that the branch of an undecided lane depends on.
int32_t undecided_origin(const Warp *w, int lane);

// ------------------------------------------------------------------------ mbarriers (mbarrier.c)

// The mbarrier at an offset, or NULL after a CK_BARRIER finding (not initialised, outside).
Mbarrier *find_mbarrier(Warp *w, const Insn *I, Cta *cta, uint32_t offset);
void mbarrier_arrive(Warp *w, const Insn *I, Cta *cta, Mbarrier *b, int count);
void mbarrier_expect_tx(Warp *w, const Insn *I, Cta *cta, Mbarrier *b, int64_t bytes);
// The mbarrier that an asynchronous operation signals next, or NULL after a finding. The
// operation's later accesses belong to the barrier's current phase, so a wait for that phase orders
// these accesses.
Mbarrier *signalled_mbarrier(AsyncOp *op, Cta *cta, uint32_t offset);
// The next two functions are for asynchronous operations. The phase publishes `from`.
void mbarrier_complete_tx(Warp *w, const Insn *I, Cta *cta, Mbarrier *b, int64_t bytes,
                          const View *from);
void mbarrier_async_arrive(Warp *w, const Insn *I, Cta *cta, Mbarrier *b, int count,
                           const View *from, uint32_t agent, Clock clock, bool generic);
// The signals that an mbarrier has received; for reports.
const char *mbarrier_history(const Cta *cta, const Mbarrier *b);
const char *warps_text(uint32_t warps);   // "warps 0, 4 to 7"

// ---------------------------------------------------------------------- CLC (launch_control.c)
// Cancel a cluster that has not been launched; false: no cluster is left.
bool cancel_cluster(Emu *e, uint32_t id[3]);   // core.c

#pragma GCC visibility pop
#endif
