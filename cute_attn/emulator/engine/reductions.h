// Reductions of elements in memory and registers, for atom and red, red.async, cp.reduce.async,
// redux and tcgen05.ld.red.
#ifndef CUTE_ATTN_REDUCTIONS_H
#define CUTE_ATTN_REDUCTIONS_H

#include "engine.h"

#pragma GCC visibility push(hidden)

// From OP_ADD to OP_XOR in the order of REDUCTIONS.
typedef enum {
  OP_COPY, OP_ADD, OP_MIN, OP_MAX, OP_INC, OP_DEC, OP_AND, OP_OR, OP_XOR,
  OP_MIN_NUMBER, OP_MAX_NUMBER, OP_MIN_NAN, OP_MAX_NAN,  // for f32: which wins, a number or a NaN
  OP_COUNT
} ReduceOp;
static inline ReduceOp f32_extreme(bool max, bool nan_wins) {
  return (ReduceOp)(nan_wins ? OP_MIN_NAN + max : OP_MIN_NUMBER + max);
}
#define REDUCTIONS "(.add|min|max|inc|dec|and|or|xor)"

typedef enum {
  TY_U8, TY_U16, TY_U32, TY_S32, TY_U64, TY_S64, TY_F16, TY_F32, TY_F32_FTZ, TY_F64, TY_BF16,
  TY_TF32, TY_TF32_FTZ, TY_B4X16, TY_B4X16_P64, TY_B6X16_P32, TY_COUNT
} ElementType;  // in the order of tensormap.replace's .elemtype

// to = to op from, element by element. `to` and `from` may lie at any address.
typedef void (*Reduction)(uint8_t *to, const uint8_t *from, uint32_t bytes);

Reduction reduction_of(ReduceOp op, ElementType type);  // NULL: no such reduction

static inline void reduce_or_copy(Reduction reduce, uint8_t *to, const uint8_t *from,
                                  uint32_t bytes) {
  if (reduce) reduce(to, from, bytes);
  else memcpy(to, from, bytes);
}

#pragma GCC visibility pop
#endif
