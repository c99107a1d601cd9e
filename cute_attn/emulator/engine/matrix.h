// Matrices and tiles in shared memory: swizzles, and the matrix descriptors of wgmma and tcgen05.
#ifndef CUTE_ATTN_MATRIX_H
#define CUTE_ATTN_MATRIX_H

#include "engine.h"

#define K_BYTES 32  // bytes of K in one operation, for every type

// A swizzle permutes atoms of 1 << shift bytes within each line of 128 bytes. The swizzle xors the
// line's number, masked by `mask`, into the atom's number.
typedef struct { uint32_t mask, shift; } Swizzle;

// The pattern that repeats after `width` bytes: 16 (none), 32, 64 or 128.
static inline Swizzle swizzle_of(uint32_t width, uint32_t shift) {
  return (Swizzle){(width >> shift) - 1, shift};
}
// `base`: the number of the first line of the pattern.
static inline uint32_t swizzled(Swizzle s, uint32_t address, uint32_t base) {
  return address ^ (((address >> 7) - base) & s.mask) << s.shift;
}

// The modes of tcgen05 descriptors. wgmma's descriptors lack the lowest bit, and so the odd modes.
enum { SWIZZLE_NONE = 0, SWIZZLE_128B_32B = 1, SWIZZLE_128B = 2, SWIZZLE_64B = 4, SWIZZLE_32B = 6 };

typedef struct {
  uint32_t start, leading, stride, base;
  int mode, width;  // SWIZZLE_ value; bytes of a line of the swizzled pattern
  Swizzle swizzle;
} Matrix;

static inline Matrix matrix_of(uint64_t descriptor) {
  static const uint8_t widths[] = {16, 128, 128, 128, 64, 128, 32, 128};
  int mode = (int)(descriptor >> 61);
  return (Matrix){
      .start = (descriptor & 0x3FFF) << 4, .leading = (descriptor >> 16 & 0x3FFF) << 4,
      .stride = (descriptor >> 32 & 0x3FFF) << 4, .base = descriptor >> 49 & 7,
      .mode = mode, .width = widths[mode],
      .swizzle = swizzle_of(widths[mode], mode == SWIZZLE_128B_32B ? 5 : 4)};
}

static inline uint32_t matrix_address(const Matrix *m, uint32_t address) {
  return swizzled(m->swizzle, address, m->base) & 0x3FFFF;
}

// Address of 16 bytes of a K-major matrix: chunk `c` of row `row`.
static inline uint32_t k_major(const Matrix *m, int row, int c) {
  uint32_t a = m->start + (uint32_t)(row / 8) * m->stride + (uint32_t)(row % 8 * m->width);
  return matrix_address(m, a + (uint32_t)c * (m->mode ? 16 : m->leading));
}

// Address of 16 bytes of an MN-major matrix: chunk `c` along M or N, at index k.
static inline uint32_t mn_major(const Matrix *m, int c, int k) {
  uint32_t a = m->start;
  if (!m->mode) {
    a += (uint32_t)c * m->stride + (uint32_t)(k / 8) * m->leading + (uint32_t)(k % 8 * 16);
  } else {
    int chunks = m->width / 16, rows = m->mode == SWIZZLE_128B_32B ? 4 : 8;
    a += (uint32_t)(c / chunks) * m->leading + (uint32_t)(c % chunks * 16) +
         (uint32_t)(k / rows) * m->stride + (uint32_t)(k % rows * m->width);
  }
  return matrix_address(m, a);
}

#endif
