// Tensor maps: reading them, tensormap.replace and tensormap.cp_fenceproxy.
//
// A tensor map as the hardware reads it: the first 16 of its 32 words. (The driver writes further
// words, the DSL's host code leaves them undefined: nothing depends on them.)
//   words 0, 1  global address
//   word 2      bit 0: im2col; 1: set by the DSL, not by the driver; 4-6: rank - 1;
//               7-10: element type as .elemtype counts them, but TF32 is F32 with bit 16 set, and
//               the packed types come behind BF16;
//               11-12: interleave; 13-14: swizzle; 15: fill with NaN; 17-18: L2 promotion;
//               19-20: swizzle atomicity; 21: a hint for large tensors
//   words 3-6   strides of dimensions 1 to 4 in units of 16 bytes, bits 0-31
//   word 7      their bits 32-35, four bits each
//   words 8-12  sizes - 1, innermost first
//   word 13     bits 0-14: element strides - 1, three bits each; 24-31: size of the box - 1
//               (im2col: channels of a pixel - 1)
//   word 14     sizes of the box - 1 of dimensions 1 to 4, a byte each; im2col: lower corner, then
//               upper corner of the pixel box, two's complement: 16 bits each in 3D; 8 bits for
//               each of two coordinates in 4D; 5 bits in 5D, the upper ones from bit 16 on
//   word 15     im2col: pixels of a column - 1
#include "copy.h"

static const struct { const char *name; uint8_t unit, bytes, spread; } ELEMENTS[TY_COUNT] = {
    {"u8", 1, 1, 1},        {"u16", 1, 2, 2},          {"u32", 1, 4, 4},
    {"s32", 1, 4, 4},       {"u64", 1, 8, 8},          {"s64", 1, 8, 8},
    {"f16", 1, 2, 2},       {"f32", 1, 4, 4},          {"f32.ftz", 1, 4, 4},
    {"f64", 1, 8, 8},       {"bf16", 1, 2, 2},         {"tf32", 1, 4, 4},
    {"tf32.ftz", 1, 4, 4},  {"b4x16", 2, 1, 1},        {"b4x16_p64", 16, 8, 16},
    {"b6x16_p32", 16, 12, 16},
};
const char *element_name(ElementType type) {
  return type < TY_COUNT ? ELEMENTS[type].name : "?";
}

static int element_type(uint32_t flags) {
  uint32_t code = flags >> 7 & 15;
  if (flags >> 16 & 1)
    return code == TY_F32 ? TY_TF32 : code == TY_F32_FTZ ? TY_TF32_FTZ : TY_COUNT;
  if (code > TY_BF16) code += TY_B4X16 - TY_BF16 - 1;
  return code < TY_COUNT ? (int)code : TY_COUNT;
}

static int32_t signed_bits(uint32_t word, int first, int count) {
  return (int32_t)(word << (32 - first - count)) >> (32 - count);
}

static void decode_corners(TensorMap *t, uint32_t word) {
  int axes = t->rank - 2, bits = axes == 1 ? 16 : axes == 2 ? 8 : 5;
  for (int i = 0; i < axes; i++) {
    t->lower[i] = signed_bits(word, i * bits, bits);
    t->upper[i] = signed_bits(word, 16 + i * bits, bits);
  }
}

// False if the bytes are no tensor map, or a tensor map of an unknown kind.
static bool decode_tensor_map(TensorMap *t, const uint32_t words[16]) {
  uint32_t flags = words[2];
  int type = element_type(flags);
  *t = (TensorMap){
      .address = words[0] | (uint64_t)words[1] << 32, .rank = (int)(flags >> 4 & 7) + 1,
      .type = (ElementType)type, .im2col = flags & 1, .interleave = (int)(flags >> 11 & 3),
      .swizzle = (int)(flags >> 13 & 3), .nan_fill = flags >> 15 & 1,
      .atomicity = (int)(flags >> 19 & 3), .pixels = (int)words[15] + 1, .rows = 1,
  };
  if (flags & 12 || t->rank > 5 || type >= TY_COUNT || t->interleave == 3) return false;
  if (t->im2col && t->rank < 3) return false;
  t->unit = ELEMENTS[type].unit;
  t->bytes = ELEMENTS[type].bytes;
  t->spread = ELEMENTS[type].spread;
  t->stride[0] = t->bytes;
  for (int d = 0; d < t->rank; d++) {
    t->size[d] = (uint64_t)words[8 + d] + 1;
    t->box[d] = (int)(d ? words[14] >> 8 * (d - 1) & 255 : words[13] >> 24) + 1;
    t->step[d] = (int)(words[13] >> 3 * d & 7) + 1;
    if (d) t->stride[d] = (words[2 + d] | (uint64_t)(words[7] >> 4 * (d - 1) & 15) << 32) * 16;
    if (d && !t->im2col) t->rows *= (uint32_t)((t->box[d] + t->step[d] - 1) / t->step[d]);
  }
  if (t->im2col) {
    t->rows = (uint32_t)t->pixels;
    decode_corners(t, words[14]);
  }
  t->size[0] /= (uint32_t)t->unit;
  t->box[0] /= t->unit;
  t->inner = (uint32_t)t->box[0] * t->spread;
  t->pitch = t->swizzle ? 16u << t->swizzle : t->inner;
  return true;
}

enum { MAP_FIELDS = 34 };

// The fields of a tensor map, for comparisons: address, rank, type, im2col, interleave,
// swizzle, fill, pixels; sizes, strides, box sizes, element strides (5 each); lower and upper
// corners (3 each). False: the bytes are no tensor map.
int emu_tensor_map(const char *map, int64_t out[MAP_FIELDS]) {
  uint32_t words[16];
  TensorMap t;
  memcpy(words, map, sizeof words);
  if (!decode_tensor_map(&t, words)) return 0;
  int64_t head[] = {(int64_t)t.address, t.rank, t.type, t.im2col, t.interleave, t.swizzle,
                    t.nan_fill, t.pixels};
  memcpy(out, head, sizeof head);
  for (int d = 0; d < 5; d++) {
    out[8 + d] = (int64_t)t.size[d];
    out[13 + d] = (int64_t)t.stride[d];
    out[18 + d] = t.im2col && d ? 0 : t.box[d];  // the word holds the corners instead
    out[23 + d] = t.step[d];
  }
  for (int i = 0; i < 3; i++) out[28 + i] = t.lower[i], out[31 + i] = t.upper[i];
  return 1;
}

// An error of the tensor map that any use meets; NULL without an error.
static const char *map_fault(const TensorMap *t) {
  if (t->address % (t->interleave == 2 ? 32 : 16))
    return text("the global address 0x%llx is not a multiple of %d",
                (unsigned long long)t->address, t->interleave == 2 ? 32 : 16);
  if (t->inner % 16)
    return text("a row of the box has %u bytes, not a multiple of 16", t->inner);
  if (t->inner > t->pitch)
    return text("a row of the box has %u bytes, but the swizzle spans %u", t->inner, t->pitch);
  if (t->atomicity && t->swizzle != 3)
    return text("swizzle atomicity %d goes with the swizzle of 128 bytes alone", t->atomicity);
  if (t->interleave && t->rank < 3) return "interleaving takes a rank of 3 or more";
  return NULL;
}

static bool fetch_map(Warp *w, const Insn *I, uint64_t address, uint32_t words[16]) {
  const Emu *e = emu_of(w);
  uint64_t in_params = address - (uint64_t)e->params;
  if (e->params && in_params + 64 <= (uint64_t)e->program->param_bytes) {
    if (in_params % 64)
      finding(w, I, CK_ALIGNMENT, SEV_ERROR,
              "a tensor map at offset %llu of the parameters, not a multiple of 64",
              (unsigned long long)in_params);
    memcpy(words, (const void *)address, 64);
    return true;
  }
  const uint8_t *p = global_pointer(w, I, address, 128, 64, false);
  if (!p) return false;
  Access a = access_of(w, I, "read of a tensor map");
  global_read(&a, p, 64);
  memcpy(words, p, 64);
  return true;
}

bool read_tensor_map(Warp *w, const Insn *I, uint64_t address, TensorMap *t) {
  uint32_t words[16];
  if (!fetch_map(w, I, address, words)) return false;
  if (!decode_tensor_map(t, words)) {
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "what is at the tensor map's address 0x%llx is no tensor map known here (word 2 is "
            "0x%08x)", (unsigned long long)address, words[2]);
    return false;
  }
  const char *fault = map_fault(t);
  if (fault) finding(w, I, CK_DESCRIPTOR, SEV_ERROR, "tensor map: %s", fault);
  return !fault;
}

static int exec_prefetch_tensormap(Warp *w, const Insn *I, Mask m) {
  uint64_t address[32];
  addresses_of(w, I, &I->op[0], m, address);
  const Emu *e = emu_of(w);
  FOR_SET(l, m) {
    uint64_t in_params = address[l] - (uint64_t)e->params;
    if (e->params && in_params < (uint64_t)e->program->param_bytes) continue;
    (void)global_pointer(w, I, address[l], 128, 64, false);
  }
  return DONE;
}

// ------------------------------------------------------------------- tensor maps made on device

enum {  // in the order of the patterns
  FIELD_RANK = 1, FIELD_ELEMTYPE, FIELD_INTERLEAVE, FIELD_SWIZZLE, FIELD_ATOMICITY, FIELD_FILL,
  FIELD_BOX = 1, FIELD_SIZE, FIELD_STEP,
};

static void set_bits(uint32_t *word, int first, int count, uint32_t value) {
  uint32_t mask = (count < 32 ? (1u << count) - 1 : ~0u) << first;
  *word = (*word & ~mask) | (value << first & mask);
}

// The 128 bytes of a tensor map that an instruction changes, in shared or global memory.
typedef struct { uint32_t *words; Cta *cta; uint32_t offset; } MapMemory;

static bool map_memory(Warp *w, const Insn *I, int space, uint64_t address, MapMemory *at) {
  *at = (MapMemory){0};
  if (space != 1) at->cta = any_shared_target(w, address, space == 0, &at->offset);
  at->words = (uint32_t *)(at->cta ? shared_pointer(w, I, at->cta, at->offset, 128, 64)
                                   : global_pointer(w, I, address, 128, 64, true));
  return at->words != NULL;
}

static bool unchanged_map(const void *data, const uint8_t *word) {
  return !memcmp(data, word, 4);
}

// Set a word of a map to `v`.
static void map_write(Warp *w, const Insn *I, const MapMemory *at, int word, uint32_t v) {
  Access a = access_of(w, I, "tensormap.replace");
  a.unchanged = unchanged_map;
  a.data = &v;
  if (at->cta) shared_write(&a, at->cta, at->offset + 4 * (uint32_t)word, 4);
  else global_write(&a, at->words + word, 4);
  at->words[word] = v;
}

static void map_write_bits(Warp *w, const Insn *I, const MapMemory *at, int word, int first,
                           int count, uint32_t value) {
  uint32_t v = at->words[word];
  set_bits(&v, first, count, value);
  map_write(w, I, at, word, v);
}

static int exec_replace_address(Warp *w, const Insn *I, Mask m) {
  uint64_t address[32];
  addresses_of(w, I, &I->op[0], m, address);
  const uint64_t *value = SRC64(1);
  FOR_SET(l, m) {
    MapMemory at;
    if (!map_memory(w, I, I->mod[0], address[l], &at)) continue;
    for (int i = 0; i < 2; i++) map_write(w, I, &at, i, (uint32_t)(value[l] >> 32 * i));
  }
  return DONE;
}

static int exec_replace_stride(Warp *w, const Insn *I, Mask m) {
  uint64_t address[32];
  addresses_of(w, I, &I->op[0], m, address);
  int dimension = (int)I->op[1].imm;
  const uint64_t *value = SRC64(2);
  FOR_SET(l, m) {
    MapMemory at;
    if (dimension > 3 || value[l] % 16 || value[l] >> 40) {
      finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
              "stride %d of a tensor map: %llu is no multiple of 16 below 2^40", dimension,
              (unsigned long long)value[l]);
      continue;
    }
    if (!map_memory(w, I, I->mod[0], address[l], &at)) continue;
    map_write(w, I, &at, 3 + dimension, (uint32_t)(value[l] >> 4));
    map_write_bits(w, I, &at, 7, 4 * dimension, 4, (uint32_t)(value[l] >> 36));
  }
  return DONE;
}

static int exec_replace_size(Warp *w, const Insn *I, Mask m) {
  uint64_t address[32];
  addresses_of(w, I, &I->op[0], m, address);
  int d = (int)I->op[1].imm, field = I->mod[0];
  const uint32_t *value = SRC32(2);
  uint32_t limit = field == FIELD_BOX ? 256 : field == FIELD_STEP ? 8 : 0;
  FOR_SET(l, m) {
    MapMemory at;
    if (d > 4 || (limit && value[l] - 1 >= limit)) {
      finding(w, I, CK_DESCRIPTOR, SEV_ERROR, "dimension %d of a tensor map: %u is not in 1 to %u",
              d, value[l], limit);
      continue;
    }
    if (!map_memory(w, I, I->mod[1], address[l], &at)) continue;
    int word = field == FIELD_SIZE ? 8 + d : field == FIELD_STEP || d == 0 ? 13 : 14;
    if (field == FIELD_SIZE) map_write(w, I, &at, word, value[l] - 1);
    else if (field == FIELD_STEP) map_write_bits(w, I, &at, word, 3 * d, 3, value[l] - 1);
    else map_write_bits(w, I, &at, word, d ? 8 * (d - 1) : 24, 8, value[l] - 1);
  }
  return DONE;
}

static int exec_replace_mode(Warp *w, const Insn *I, Mask m) {
  static const struct { int first, count, values; } FIELDS[] = {
      [FIELD_RANK] = {4, 3, 5},        [FIELD_ELEMTYPE] = {7, 4, TY_COUNT},
      [FIELD_INTERLEAVE] = {11, 2, 3},
      [FIELD_SWIZZLE] = {13, 2, 4}, [FIELD_ATOMICITY] = {19, 2, 4}, [FIELD_FILL] = {15, 1, 2},
  };
  uint64_t address[32];
  addresses_of(w, I, &I->op[0], m, address);
  int field = I->mod[0];
  const uint32_t *value = SRC32(1);
  FOR_SET(l, m) {
    MapMemory at;
    uint32_t v = value[l];
    if (v >= (uint32_t)FIELDS[field].values) {
      finding(w, I, CK_DESCRIPTOR, SEV_ERROR, "a tensor map's field takes 0 to %d, not %u",
              FIELDS[field].values - 1, v);
      continue;
    }
    if (!map_memory(w, I, I->mod[1], address[l], &at)) continue;
    if (field == FIELD_ELEMTYPE) {
      map_write_bits(w, I, &at, 2, 16, 1, v == TY_TF32 || v == TY_TF32_FTZ);
      v = v == TY_TF32       ? TY_F32
          : v == TY_TF32_FTZ ? TY_F32_FTZ
          : v >= TY_B4X16    ? v - TY_B4X16 + TY_BF16 + 1
                             : v;
    }
    map_write_bits(w, I, &at, 2, FIELDS[field].first, FIELDS[field].count, v);
  }
  return DONE;
}

static int exec_tensormap_copy(Warp *w, const Insn *I, Mask m) {
  uint64_t to[32], from[32];
  addresses_of(w, I, &I->op[0], m, to);
  addresses_of(w, I, &I->op[1], m, from);
  int l = __builtin_ctz(m);
  uint32_t offset;
  Cta *cta = shared_target(w, (uint32_t)from[l], &offset);
  if (!cta) {
    finding(w, I, CK_BOUNDS, SEV_ERROR, "no shared memory has the address 0x%x",
            (uint32_t)from[l]);
    return DONE;
  }
  const uint8_t *source = shared_pointer(w, I, cta, offset, 128, 128);
  uint8_t *p = global_pointer(w, I, to[l], 128, 128, true);
  if (!source || !p) return DONE;
  Access a = access_of(w, I, "tensormap.cp_fenceproxy");
  shared_read(&a, cta, offset, 64);  // the words after these may be undefined
  global_write(&a, p, 128);
  memcpy(p, source, 128);
  sync_write(w, p, 2);
  progress(emu_of(w));
  return DONE;
}

// --------------------------------------------------------------------------------------- forms

#define SPACE "{.global|shared::cta}"
#define SCOPE "(.cta|cluster|gpu|sys)"

static const Form FORMS[] = {
    {"prefetch{.param|const}.tensormap", "a", exec_prefetch_tensormap, 0},

    {"tensormap.replace.tile.global_address" SPACE ".b1024.b64", "a s64",
     exec_replace_address, F_EFFECT},
    {"tensormap.replace.tile.global_stride" SPACE ".b1024.b64", "a i s64",
     exec_replace_stride, F_EFFECT},
    {"tensormap.replace.tile(.box_dim|global_dim|element_stride)" SPACE ".b1024.b32", "a i s32",
     exec_replace_size, F_EFFECT},
    {"tensormap.replace.tile(.rank|elemtype|interleave_layout|swizzle_mode|swizzle_atomicity|"
     "fill_mode)" SPACE ".b1024.b32", "a s32", exec_replace_mode, F_EFFECT},
    {"tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release" SCOPE
     ".sync.aligned", "a a i", exec_tensormap_copy, F_ALIGNED | F_YIELD | F_EFFECT},
    {0},
};

const Family FAMILY_TENSOR_MAP = {.name = "tensor_map", .forms = FORMS};
