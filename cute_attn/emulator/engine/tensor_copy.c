// Tensor copies (TMA): loads, stores, reductions and prefetches of boxes.
#include "copy.h"
#include "float_bits.h"

// ------------------------------------------------------------------------------- rows of a tensor
//
// A tensor copy moves contiguous runs of bytes. A run has an address in global memory, and a place
// in the box.

typedef struct {
  AsyncOp *op;
  Copy *copy;
  bool writes;
  bool some;                // whether any element of the box exists
  uint64_t address;         // start of the run being gathered
  uint32_t place, bytes;
} Runs;

// Loads round F32 elements of a TF32 tensor map to nearest.
static void round_to_tf32(uint8_t *elements, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += 4) {
    uint32_t v;
    memcpy(&v, elements + i, 4);
    v = is_nan(v) ? 0x7FFFE000 : (v + 0xFFF + (v >> 13 & 1)) & ~0x1FFFu;
    memcpy(elements + i, &v, 4);
  }
}

static void end_run(Runs *r) {
  if (!r->bytes) return;
  AsyncOp *op = r->op;
  uint8_t *p = global_pointer(op->warp, op->insn, r->address, r->bytes, 1, r->writes);
  uint8_t *box = r->copy->buffer + r->place;
  if (p && !r->writes) {
    global_read(&op->access, p, r->bytes);
    memcpy(box, p, r->bytes);
    ElementType type = r->copy->map.type;
    if (type == TY_TF32 || type == TY_TF32_FTZ) round_to_tf32(box, r->bytes);
  } else if (p) {
    global_write(&op->access, p, r->bytes);
    reduce_or_copy(r->copy->reduce, p, box, r->bytes);
  }
  r->bytes = 0;
}

static void add_run(Runs *r, uint64_t address, uint32_t place, uint32_t bytes) {
  if (r->bytes && address == r->address + r->bytes && place == r->place + r->bytes) {
    r->bytes += bytes;
    return;
  }
  end_run(r);
  r->address = address;
  r->place = place;
  r->bytes = bytes;
}

// Units of a packed type with gaps between them in shared memory; only for loads.
static void add_units(Runs *r, const TensorMap *t, uint64_t address, uint32_t place,
                      uint32_t count) {
  AsyncOp *op = r->op;
  const uint8_t *p = global_pointer(op->warp, op->insn, address, count * t->bytes, 1, false);
  if (!p) return;
  global_read(&op->access, p, count * t->bytes);
  for (uint32_t i = 0; i < count; i++)
    memcpy(r->copy->buffer + place + i * t->spread, p + i * t->bytes, t->bytes);
}

// One row of the box: the existing elements from (x, at[1], at[2] ...) on. Stores write all of the
// 16 bytes in which a row ends.
static void add_row(Runs *r, const TensorMap *t, int64_t x, const int64_t at[5], uint32_t row) {
  uint64_t address = t->address;
  for (int d = 1; d < t->rank; d++) {
    if (at[d] < 0 || (uint64_t)at[d] >= t->size[d]) return;
    address += (uint64_t)at[d] * t->stride[d];
  }
  int64_t first = x < 0 ? -x : 0, last = t->box[0];
  if ((int64_t)t->size[0] - x < last) last = (int64_t)t->size[0] - x;
  if (first >= last) return;
  r->some = true;
  address += (uint64_t)(x + first) * t->bytes;
  uint32_t place = row * t->inner + (uint32_t)first * t->spread;
  uint32_t bytes = (uint32_t)(last - first) * t->bytes;
  if (t->spread != t->bytes) add_units(r, t, address, place, (uint32_t)(last - first));
  else add_run(r, address, place, r->writes ? (bytes + 15) & ~15u : bytes);
}

static void tile_rows(Runs *r, const TensorMap *t, const int32_t *start) {
  int step[5] = {0}, extent[5];
  for (int d = 1; d < t->rank; d++) extent[d] = (t->box[d] + t->step[d] - 1) / t->step[d];
  for (uint32_t row = 0; row < t->rows; row++) {
    int64_t at[5];
    for (int d = 1; d < t->rank; d++) at[d] = (int64_t)start[d] + (int64_t)step[d] * t->step[d];
    add_row(r, t, start[0], at, row);
    for (int d = 1; d < t->rank && ++step[d] == extent[d]; d++) step[d] = 0;
  }
}

// tile::gather4 and tile::scatter4: one column, four rows of a matrix.
static void gather_rows(Runs *r, const TensorMap *t, const int32_t *start) {
  for (uint32_t row = 0; row < 4; row++) {
    int64_t at[5] = {0, start[1 + row]};
    add_row(r, t, start[0], at, row);
  }
}

// im2col: pixels one after the other, from the lower to the upper corner of the pixel box.
static void im2col_rows(Runs *r, const TensorMap *t, const int32_t *start, const int32_t *offset) {
  int64_t base[5];
  int axes = t->rank - 2, batch = t->rank - 1;
  for (int d = 1; d < t->rank; d++) base[d] = start[d];
  for (uint32_t row = 0; row < t->rows; row++) {
    int64_t at[5];
    for (int d = 1; d < t->rank; d++) at[d] = base[d] + (d < batch ? offset[d - 1] : 0);
    add_row(r, t, start[0], at, row);
    int i = 0;
    for (; i < axes; i++) {
      base[1 + i] += t->step[1 + i];
      if (base[1 + i] <= (int64_t)t->size[1 + i] - 1 + t->upper[i]) break;
      base[1 + i] = t->lower[i];
    }
    if (i == axes) base[batch]++;
  }
}

void move_tensor(AsyncOp *op, Copy *c, bool writes) {
  Runs r = {.op = op, .copy = c, .writes = writes};
  if (c->mode == MODE_GATHER) gather_rows(&r, &c->map, c->at);
  else if (c->mode == MODE_IM2COL) im2col_rows(&r, &c->map, c->at, c->pixel);
  else tile_rows(&r, &c->map, c->at);
  end_run(&r);
  // Measured on an H200: a load of such a tile is an illegal access; a store of no element does
  // nothing.
  if (!r.some && !writes && c->mode == MODE_TILE &&
      !region_at(emu_of(op->warp), c->map.address, NULL))
    finding(op->warp, op->insn, CK_BOUNDS, SEV_ERROR,
            "no element of the box exists, and the tensor starts at 0x%llx, in no tensor of the "
            "launch: hardware faults if no memory is there", (unsigned long long)c->map.address);
}

void read_tensor(AsyncOp *op, Copy *c) {
  memset(c->buffer, 0, c->buffered);
  if (c->map.nan_fill)  // equal bytes for all types
    for (uint32_t i = 0; i < c->buffered; i += 2) memcpy(c->buffer + i, &(uint16_t){0x7FF7}, 2);
  move_tensor(op, c, false);
}

// ------------------------------------------------------------------------------ the instructions

// Whether an instruction of `dimensions` and this mode may use the map; coordinates.
static bool tensor_use(Warp *w, const Insn *I, Copy *c, int dimensions) {
  const TensorMap *t = &c->map;
  if (t->rank != dimensions) {
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR, "the instruction has %d dimensions, its tensor map %d",
            dimensions, t->rank);
    return false;
  }
  if (t->im2col != (c->mode == MODE_IM2COL)) {
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR, "the instruction is %s, its tensor map %s",
            t->im2col ? "tiled" : "im2col", t->im2col ? "im2col" : "tiled");
    return false;
  }
  if (t->interleave) {
    fatal(w, I, CK_DESCRIPTOR, "tensor maps with an interleaved layout are not emulated");
    return false;
  }
  if (c->mode == MODE_GATHER && t->box[1] != 1) {
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR, "gather4 and scatter4 take a box of 1 row, not %d",
            t->box[1]);
    return false;
  }
  int64_t units = t->spread != t->bytes ? 128 : (int64_t)t->unit * 16 / t->bytes;
  if (c->at[0] % units) {
    finding(w, I, CK_ALIGNMENT, SEV_ERROR,
            "the innermost coordinate %d is not a multiple of %lld (16 bytes of %s)", c->at[0],
            (long long)units, element_name(t->type));
    return false;
  }
  c->at[0] /= t->unit;
  return true;
}

typedef struct { uint64_t map[32]; int32_t at[32][8]; int count; } Coordinates;

static void coordinates_of(Warp *w, const Insn *I, int k, Mask m, Coordinates *c) {
  addresses_of(w, I, &I->op[k], m, c->map);
  const Operand *list = list_of(w, &I->op[k + 1]);
  c->count = count_of(&I->op[k + 1]);
  if (c->count > 8) c->count = 8;
  for (int i = 0; i < c->count; i++) {
    uint32_t buffer[32];
    const uint32_t *v = src32_of(w, I, &list[i], m, buffer);
    FOR_SET(l, m) c->at[l][i] = (int32_t)v[l];
  }
}

// A tensor copy of one lane, with its map and coordinates; NULL after a finding.
static Copy *tensor_copy(Warp *w, const Insn *I, const Coordinates *from, int lane, TensorMode mode,
                         int dimensions) {
  TensorMap t;
  if (!read_tensor_map(w, I, from->map[lane], &t)) return NULL;
  if (mode == MODE_GATHER) t.rows = 4;
  Copy *c = new_copy(t.rows * t.inner);
  c->tensor = true;
  c->map = t;
  c->mode = mode;
  c->bytes = t.rows * (uint32_t)t.box[0] * t.bytes;  // counted as in global memory
  memcpy(c->at, from->at[lane], sizeof c->at);
  int expected = mode == MODE_GATHER ? 5 : dimensions;
  if (from->count != expected)
    fatal(w, I, CK_DESCRIPTOR, "%d coordinates, where %d are wanted", from->count, expected);
  else if (tensor_use(w, I, c, dimensions)) return c;
  drop_copy(c);
  return NULL;
}

// An invalid load never delivers its bytes to the mbarrier; hardware stops at the load.
static int load_tensor(Warp *w, const Insn *I, Mask m, TensorMode mode, const int32_t pixel[32][3],
                       const uint32_t *masks, bool pair) {
  Coordinates from;
  uint64_t to[32], barrier[32];
  addresses_of(w, I, &I->op[0], m, to);
  coordinates_of(w, I, 1, m, &from);
  addresses_of(w, I, &I->op[3], m, barrier);
  FOR_SET(l, m) {
    Copy *c = tensor_copy(w, I, &from, l, mode, I->mod[0]);
    if (!c) continue;
    if (pixel) memcpy(c->pixel, pixel[l], sizeof c->pixel);
    if (set_targets(w, I, c, (uint32_t)to[l], (uint32_t)barrier[l],
                    masks ? (int)(masks[l] & 0xFFFF) : -1, I->mod[2] == 2, pair)) {
      submit_load(w, I, c, "TMA load", CT_TMA_LOAD);
    } else {
      drop_copy(c);
    }
  }
  return DONE;
}

static TensorMode tile_mode(int modifier) { return modifier == 2 ? MODE_GATHER : MODE_TILE; }

static bool pair_of(const Insn *I, int last) {
  bool pair = I->mod[1] == 2;
  for (int i = 4; i <= last; i++) pair |= I->mod[i] == 2;
  return pair;
}

static int exec_tensor_load(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, &I->op[4], m);
  return load_tensor(w, I, m, tile_mode(I->mod[3]), NULL, NULL, pair_of(I, 6));
}
static int exec_tensor_multicast(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, &I->op[5], m);
  return load_tensor(w, I, m, tile_mode(I->mod[3]), NULL, SRC32(4), pair_of(I, 7));
}

static int load_im2col(Warp *w, const Insn *I, Mask m, const uint32_t *masks, bool pair) {
  int32_t pixel[32][3] = {{0}};
  const Operand *list = list_of(w, &I->op[4]);
  int count = count_of(&I->op[4]);
  if (count != I->mod[0] - 2) {
    fatal(w, I, CK_DESCRIPTOR, "%d im2col offsets, where %d are wanted", count, I->mod[0] - 2);
    return DONE;
  }
  for (int i = 0; i < count; i++) {
    uint32_t buffer[32];
    const uint32_t *v = src32_of(w, I, &list[i], m, buffer);
    FOR_SET(l, m) pixel[l][i] = (int32_t)(v[l] & 0xFFFF);
  }
  return load_tensor(w, I, m, MODE_IM2COL, pixel, masks, pair);
}
static int exec_im2col_load(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, &I->op[5], m);
  return load_im2col(w, I, m, NULL, pair_of(I, 6));
}
static int exec_im2col_multicast(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, &I->op[6], m);
  return load_im2col(w, I, m, SRC32(5), pair_of(I, 7));
}

// Restrictions of stores that loads do not have. Hardware stops at a violation of any of these
// restrictions except the last.
static bool storable(Warp *w, const Insn *I, const Copy *c) {
  const TensorMap *t = &c->map;
  for (int d = 0; d < t->rank && c->mode != MODE_GATHER; d++) {
    if (c->at[d] >= 0) continue;
    finding(w, I, CK_BOUNDS, SEV_ERROR,
            "coordinate %d is %d: stores and reductions take no negative ones", d, c->at[d]);
    return false;
  }
  for (int i = 0; i < t->rank - 2 && t->im2col; i++) {
    if (!t->lower[i] && !t->upper[i]) continue;
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR, "an im2col store with a pixel box unlike its tensor");
    return false;
  }
  if (t->spread != t->bytes) {
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR, "elements of type %s are loaded only",
            element_name(t->type));
    return false;
  }
  for (int d = 1; d < t->rank && !c->reduce; d++)
    if (t->stride[d] == 0 && t->box[d] > t->step[d] && t->size[d] > 1)
      finding(w, I, CK_RACE, SEV_ERROR,
              "dimension %d has stride 0: the rows of the box are all stored at one address", d);
  return true;
}

static int store_tensor(Warp *w, const Insn *I, Mask m, ReduceOp op, int modifier) {
  Coordinates to;
  uint64_t from[32];
  coordinates_of(w, I, 0, m, &to);
  addresses_of(w, I, &I->op[2], m, from);
  read_policy(w, I, &I->op[3], m);
  TensorMode mode = modifier == 3 ? MODE_IM2COL : tile_mode(modifier);
  FOR_SET(l, m) {
    uint32_t offset;
    if (!own_shared(w, I, from[l], &offset)) continue;
    Copy *c = tensor_copy(w, I, &to, l, mode, I->mod[0]);
    if (!c) continue;
    c->from = w->cta;
    c->from_offset = offset;
    bool copies = op == OP_COPY;
    if (!copies) c->reduce = reduction_of(op, c->map.type);
    if (!storable(w, I, c) || (!copies && !known_reduction(w, I, op, c->map.type))) {
      drop_copy(c);
      continue;
    }
    submit_store(w, I, c, l, copies ? "TMA store" : "TMA reduction",
                 copies ? CT_TMA_STORE : CT_TMA_REDUCE);
  }
  return DONE;
}

static int exec_tensor_store(Warp *w, const Insn *I, Mask m) {
  return store_tensor(w, I, m, OP_COPY, I->mod[1]);
}
static int exec_tensor_reduce(Warp *w, const Insn *I, Mask m) {
  return store_tensor(w, I, m, (ReduceOp)I->mod[1], I->mod[2]);
}

static int prefetch_tensor(Warp *w, const Insn *I, Mask m, TensorMode mode) {
  Coordinates from;
  coordinates_of(w, I, 0, m, &from);
  FOR_SET(l, m) {
    Copy *c = tensor_copy(w, I, &from, l, mode, I->mod[0]);
    if (!c) continue;
    drop_copy(c);
  }
  return DONE;
}

static int exec_tensor_prefetch(Warp *w, const Insn *I, Mask m) {
  return prefetch_tensor(w, I, m, tile_mode(I->mod[1]));
}
static int exec_im2col_prefetch(Warp *w, const Insn *I, Mask m) {
  return prefetch_tensor(w, I, m, MODE_IM2COL);
}

// --------------------------------------------------------------------------------------- forms

#define CTA_GROUP "{.cta_group::1|cta_group::2}"

static const Form FORMS[] = {
    {"cp.async.bulk.tensor.#d" CTA_GROUP TO_SHARED ".global{.tile|tile::gather4}" BYTES CTA_GROUP
     HINT CTA_GROUP, "a T a s64?", exec_tensor_load, F_UNIFORM | F_EFFECT},
    {"cp.async.bulk.tensor.#d" CTA_GROUP TO_SHARED ".global{.tile|tile::gather4}" BYTES CTA_GROUP
     ".multicast::cluster" CTA_GROUP HINT CTA_GROUP, "a T a s32 s64?", exec_tensor_multicast,
     F_UNIFORM | F_EFFECT},
    {"cp.async.bulk.tensor.#d" CTA_GROUP TO_SHARED ".global(.im2col)" BYTES CTA_GROUP HINT
     CTA_GROUP, "a T a s32l s64?", exec_im2col_load, F_UNIFORM | F_EFFECT},
    {"cp.async.bulk.tensor.#d" CTA_GROUP TO_SHARED ".global(.im2col)" BYTES CTA_GROUP
     ".multicast::cluster" CTA_GROUP HINT CTA_GROUP, "a T a s32l s32 s64?", exec_im2col_multicast,
     F_UNIFORM | F_EFFECT},
    {"cp.async.bulk.tensor.#d.global.shared::cta{.tile|tile::scatter4|im2col_no_offs}.bulk_group"
     HINT, "T a s64?", exec_tensor_store, F_UNIFORM | F_EFFECT},
    {"cp.reduce.async.bulk.tensor.#d.global.shared::cta" REDUCTIONS
     "{.tile|tile::scatter4|im2col_no_offs}.bulk_group" HINT, "T a s64?", exec_tensor_reduce,
     F_UNIFORM | F_EFFECT},
    {"cp.async.bulk.prefetch.tensor.#d.L2.global{.tile|tile::gather4}" HINT, "T s64?",
     exec_tensor_prefetch, F_UNIFORM},
    {"cp.async.bulk.prefetch.tensor.#d.L2.global.im2col" HINT, "T s32l s64?", exec_im2col_prefetch,
     F_UNIFORM},
    {0},
};

const Family FAMILY_TENSOR_COPY = {.name = "tensor_copy", .forms = FORMS};
