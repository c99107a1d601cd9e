// How instructions access memory (memory.c): lanes in batches, checks, operands. Shared by ld, st,
// atom and red.
#ifndef CUTE_ATTN_MEMORY_H
#define CUTE_ATTN_MEMORY_H

#include "engine.h"

#pragma GCC visibility push(hidden)

#define MAX_ACCESS 32  // bytes per lane and instruction

// ---------------------------------------------------------------- lanes of an access, in batches
//
// A batch is the lanes of an instruction that access one memory: global memory, the shared memory
// of one CTA, or local memory. Lane l accesses origin + at[l]; lanes outside `m` repeat the first
// lane's address, so that loops may run over all 32 lanes.

typedef struct {
  Space space;
  Cta *cta;         // the CTA whose shared memory it is; at[] are then offsets
  bool one_region;  // global memory in one region: checks may take longer runs at once
  uint8_t *origin;
  uint64_t at[32];
  Mask m;
} Batch;

typedef struct {
  Warp *w;
  const Insn *I;
  Space space;
  Mask left, dropped;  // lanes still to be served; lanes whose address is in no memory
  uint32_t bytes;      // bytes of the access per lane
  bool write;
  bool own_cta;        // the state space is .shared::cta
  uint64_t a[32];
} Cursor;

static inline uint8_t *host_of(const Batch *b, int lane) { return b->origin + b->at[lane]; }

void start_access(Cursor *c, Warp *w, const Insn *I, const Operand *address, Mask m, Space space,
                  uint32_t bytes, bool write);
// The next lanes that can be served together. False: all lanes have been served.
bool next_batch(Cursor *c, Batch *b);

// --------------------------------------------------------------------------- checks and counters

// An instruction that both reads and writes is checked for races as a write, which finds at least
// the races of a read.
enum { READS = 1, WRITES = 2 };

// Report an access to the happens-before checker and count its wavefronts or sectors. Returns the
// number of distinct addresses, or 0 if no check needs the number.
int announce(Warp *w, const Insn *I, const Batch *b, uint32_t bytes, int kind,
             const Access *access);
// Synchronisation through the words that a strong operation reads or writes.
void synchronise(Warp *w, const Batch *b, int order, void (*with)(Warp *, const void *, int));

// ---------------------------------------------------------------------------------- operands

typedef struct { uint8_t bytes; bool is_signed; } Type;
// A source as bytes: lane l's value starts at data + l * stride.
typedef struct { const uint8_t *data; int stride; } Values;

Values values_of(Warp *w, const Insn *I, const Operand *o, Mask m, uint32_t bytes,
                 uint64_t buffer[64]);
// Write a destination from origin + at[l], extended to the register's width.
void put_from(Warp *w, const Insn *I, const Operand *o, Mask m, Type t, const uint8_t *origin,
              const uint64_t at[32]);
// The elements of a vector instruction, or its one operand; 0 after a fatal finding.
int elements_of(Warp *w, const Insn *I, const Operand *o, Space space, int vector, Type t);

// st.async and red.async to global memory are releases. In the emulator these stores and reductions
// take effect at once.
#define ASYNC_RELEASE "(.release|mmio.release)(.gpu|sys){.global}"

#pragma GCC visibility pop
#endif
