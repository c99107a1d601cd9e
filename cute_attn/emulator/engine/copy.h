// Shared by all asynchronous copies: groups of a thread's copies (cp_async.c, bulk_copy.c), the
// copies themselves (bulk_copy.c), and tensor maps (tensor_map.c, tensor_copy.c).
#ifndef CUTE_ATTN_COPY_H
#define CUTE_ATTN_COPY_H

#include "engine.h"
#include "reductions.h"

#pragma GCC visibility push(hidden)

#define HINT "{.L2::cache_hint}"
#define BYTES ".mbarrier::complete_tx::bytes"
#define TO_SHARED "(.shared::cluster|shared::cta)"

// ------------------------------------------------------------------ groups of a thread's copies
//
// Threads commit and await cp.async and bulk copies in groups of their own. A commit closes the
// open group of every lane that executes the commit. The group holds the lane's copies up to
// `number`, which counts instructions (cp.async) or bulk groups of the warp.
typedef struct { uint32_t number; Mask lanes; } Commit;
enum { COMMITS = 64 };  // the latest commits: enough, since waits leave only a few groups pending
typedef struct { Commit ring[COMMITS]; uint32_t count; } Commits;

// The source of a bulk group's copy, in the CTA's own shared memory, until its lane awaits it.
typedef struct { const Insn *insn; uint32_t group, offset, bytes; int lane; } Source;
enum { SOURCES = 64 };  // the latest sources

typedef struct Copy Copy;
struct Copies {
  Commits bulk, cp;
  Copy *unfinished;                           // the warp's unfinished copies of bulk groups
  Source sources[SOURCES];
  uint32_t nsources;
  // By lane: the last number with a copy of the lane, and the last number whose sources the lane
  // awaited.
  uint32_t bulk_issued[32], bulk_waited[32], cp_issued[32], cp_waited[32];
};

static inline struct Copies *copies_of(Warp *w) {
  if (!w->copies) w->copies = calloc(1, sizeof *w->copies);
  return w->copies;
}

static inline void commit_group(Commits *c, uint32_t number, Mask lanes) {
  c->ring[c->count++ % COMMITS] = (Commit){number, lanes};
}

// The number up to which a lane that may leave `pending` groups pending awaits all copies.
static inline uint32_t awaited(const Commits *c, int lane, uint64_t pending) {
  uint32_t oldest = c->count > COMMITS ? c->count - COMMITS : 0;
  for (uint32_t i = c->count; i > oldest; i--) {
    const Commit *group = &c->ring[(i - 1) % COMMITS];
    if (!(group->lanes >> lane & 1)) continue;
    if (pending == 0) return group->number;
    pending--;
  }
  return oldest ? c->ring[oldest % COMMITS].number - 1 : 0;
}

static inline Clock bulk_clock(const Warp *w, int agent_kind, uint32_t group) {
  return w->agent_birth[agent_kind] + group - 1;
}

void cp_async_at_exit(Warp *w, int lane);

// -------------------------------------------------------------------------------- tensor maps

typedef struct {
  uint64_t address;
  int rank;                     // 1 to 5
  ElementType type;
  int interleave;               // 0: none, 1: 16 bytes, 2: 32 bytes
  int swizzle;                  // 0: none, 1: 32 bytes, 2: 64 bytes, 3: 128 bytes
  int atomicity;                // of swizzle 3; 0: 16 bytes, 1: 32, 2: 32 with 8-byte flip, 3: 64
  bool nan_fill, im2col;
  uint64_t size[5], stride[5];  // sizes in elements (innermost: units), strides in bytes
  int box[5], step[5];          // sizes of the box (innermost: units); element strides
  int lower[3], upper[3], pixels;  // im2col
  int unit;                     // elements packed together: more than 1 in packed types
  uint32_t bytes, spread;       // bytes of a unit in global and in shared memory
  uint32_t inner, pitch, rows;  // the box in shared memory: bytes of a row, bytes from row to row
} TensorMap;

const char *element_name(ElementType type);
// The map at an address; false after a finding.
bool read_tensor_map(Warp *w, const Insn *I, uint64_t address, TensorMap *t);

// ---------------------------------------------------------------------------------- bulk copies

typedef enum { MODE_TILE, MODE_GATHER, MODE_IM2COL } TensorMode;

struct Copy {
  Copy *next, **link;      // list of the warp's unfinished copies of bulk groups
  int lane;
  uint32_t group;
  bool read;               // the source has been read
  bool tensor;
  uint64_t global;         // global address of a linear copy
  uint32_t bytes;          // bytes that complete_tx reports to the mbarrier
  uint32_t buffered;       // size of `buffer`
  Cta *from; uint32_t from_offset;  // CTA and offset of a source in shared memory
  uint32_t to_offset;               // offset of the destination in each target's shared memory
  int ntargets; Cta *targets[16], *signalled[16];
  uint32_t barrier;                 // offset of the mbarrier in each signalled CTA
  Reduction reduce;                 // NULL for a copy without a reduction
  uint16_t byte_mask;
  TensorMap map;
  TensorMode mode;
  int32_t at[8];           // coordinates of the box
  int32_t pixel[3];        // offsets of im2col
  uint8_t *buffer;
};

Copy *new_copy(uint32_t buffered);
void drop_copy(Copy *c);
// Set a copy's target CTAs, and the initialised mbarriers that the copy signals. `multicast`: mask
// of CTAs, or -1. `pair`: cta_group::2, whose mbarrier may be in the other CTA of the pair; with
// multicast, the parity of the mbarrier's rank chooses the CTA of each pair.
bool set_targets(Warp *w, const Insn *I, Copy *c, uint32_t to, uint32_t barrier, int multicast,
                 bool own, bool pair);
// Whether a CTA that an operation writes to still exists; reports a CTA that does not.
bool check_destination(const AsyncOp *op, const Cta *cta);
// Issue a copy: into shared memory, or out of shared memory as part of the lane's open bulk group.
void submit_load(Warp *w, const Insn *I, Copy *c, const char *what, int counter);
void submit_store(Warp *w, const Insn *I, Copy *c, int lane, const char *what, int counter);
// Offset of a source in the CTA's own shared memory.
bool own_shared(Warp *w, const Insn *I, uint64_t address, uint32_t *offset);
// The reduction; NULL after a fatal finding.
Reduction known_reduction(Warp *w, const Insn *I, ReduceOp op, ElementType type);

// tensor_copy.c moves a whole box between global memory and the copy's buffer.
void read_tensor(AsyncOp *op, Copy *c);
void move_tensor(AsyncOp *op, Copy *c, bool writes);

#pragma GCC visibility pop
#endif
