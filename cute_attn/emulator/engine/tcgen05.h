// Tensor memory (TMEM) and declarations shared by the tcgen05 instructions. Allocation, loads and
// stores are in tmem.c, matrix operations in tcgen05_mma.c, all other instructions in
// tcgen05_copy.c.
#ifndef CUTE_ATTN_TCGEN05_H
#define CUTE_ATTN_TCGEN05_H

#include "engine.h"
#include "matrix.h"

#pragma GCC visibility push(hidden)

#define GROUP "(.cta_group::1|.cta_group::2)"

#define LANES 128
#define COLUMNS 512
#define SLICE 32  // columns, the unit of allocation
#define SLICES (COLUMNS / SLICE)

typedef struct {
  bool active, done;
  int columns, column;
  Warp *warp;
  const Insn *insn;
} Request;  // the request of a warp that allocates with cta_group::2 and waits for its peer

typedef struct {
  bool filled, in_tmem;
  uint64_t a;  // descriptor or TMEM address of the matrix in the collector
} Collector;

typedef struct {
  AsyncOp **loads;  // the tcgen05.ld operations since the last tcgen05.wait::ld
  int nloads, room;
  AsyncOp *last_store;
  Mask uncommitted;  // lanes whose last operations no tcgen05.commit tracks yet
} WarpState;

struct Tmem {
  uint32_t words[LANES][COLUMNS];
  struct {
    bool used;
    int first, columns;
    Warp *warp;
    const Insn *insn, *freed;  // that allocated, and that freed
  } slices[SLICES];
  Request request;
  int deallocations;  // number of deallocations so far with cta_group::2
  View released;      // effects that deallocations publish to the next allocation
  const Insn *relinquished;
  int group;      // the kernel's cta_group, and the first instruction with this cta_group
  const Insn *group_insn;
  Collector collectors[5];  // a, b0 to b3
  WarpState warps[MAX_WARPS];
};

// ------------------------------------------------------------------------------------ tmem.c

struct Tmem *tmem_of(Warp *w, const Insn *I);  // NULL after a fatal finding
// Report a kernel that uses both cta_groups.
void check_group(Warp *w, const Insn *I, int group);
// The CTAs of a cta_group, the CTA of even rank first. Returns the number of CTAs; 0 after a
// finding.
int ctas_of(Warp *w, const Insn *I, int group, Cta *ctas[2]);
// Whether `lanes` x `columns` words of TMEM exist; reports words that do not exist or are not
// allocated.
bool check_block(const Access *a, Cta *cta, const char *role, int lane, int column, int lanes,
                 int columns);

// ------------------------------------------------------------------------------- tcgen05_copy.c

void check_single_thread(Warp *w, const Insn *I, Mask m, const char *what);
// Submit an operation of the tensor core, in the order of issue.
AsyncOp *issue_tcgen05(Warp *w, const Insn *I, const char *what, int lane, void *data,
                       void (*run)(AsyncOp *, int));
// For the stream of steps: the other CTA of a cta_group and 1, or 0.
static inline uint64_t other_of_pair(const Warp *w, int group) {
  return group == 2 ? 1ull + w->cta->cluster->ctas[w->cta->rank ^ 1]->linear : 0;
}

// The matrix of a descriptor; false after a finding if the matrix cannot be read.
bool read_matrix(Warp *w, const Insn *I, uint64_t descriptor, const char *name, Matrix *m);

// Units of 16 bytes of a CTA's shared memory that an operand reads, to check the units in long
// spans.
typedef struct {
  uint64_t bits[(1 << 18) / 16 / 64];
  int low, high;
  uint32_t outside;
  bool bad;
} Touched;

static inline const uint8_t *fetch(Touched *touched, Cta *cta, uint32_t address) {
  static const uint8_t zeros[16];
  if (address < SHARED_BASE || address - SHARED_BASE + 16 > cta->shared_bytes) {
    touched->bad = true;
    touched->outside = address;
    return zeros;
  }
  int unit = (int)((address - SHARED_BASE) / 16);
  touched->bits[unit / 64] |= 1ull << unit % 64;
  if (unit < touched->low) touched->low = unit;
  if (unit > touched->high) touched->high = unit;
  return cta->shared + (address - SHARED_BASE);
}

Touched *fetch_begin(const Cta *cta);
// Check all units fetched since fetch_begin.
void fetch_end(Touched *touched, const Access *access, Cta *cta, const char *name);

#pragma GCC visibility pop
#endif
