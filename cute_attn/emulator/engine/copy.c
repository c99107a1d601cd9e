// Asynchronous copies: cp.async, bulk copies and their reductions, tensor copies (TMA) and tensor
// maps, st.async and red.async.
#include "engine.h"
#include "float_bits.h"
#include "matrix.h"
#include "reductions.h"

// ------------------------------------------------------------------ groups of a thread's copies
//
// Groups are a thread's own. A commit closes the group of every lane that executes it: what these
// lanes have issued up to `number` (of cp.async: an instruction; of bulk copies: a bulk group).
typedef struct { uint32_t number; Mask lanes; } Commit;
enum { COMMITS = 64 };  // a wait names one of the latest few
typedef struct { Commit ring[COMMITS]; uint32_t count; } Commits;

typedef struct Copy Copy;
struct Copies {
  Commits bulk, cp;
  Copy *unfinished;                                  // of bulk groups
  uint32_t bulk_issued[32], bulk_waited[32];         // a lane's last group with a copy in it, and
  uint32_t cp_issued[32], cp_waited[32];             // the last one whose sources it waited for
};

static struct Copies *copies_of(Warp *w) {
  if (!w->copies) w->copies = calloc(1, sizeof *w->copies);
  return w->copies;
}

static void commit(Commits *c, uint32_t number, Mask lanes) {
  c->ring[c->count++ % COMMITS] = (Commit){number, lanes};
}

// What a lane waits for when it lets `pending` of its groups go on: all up to this number.
static uint32_t awaited(const Commits *c, int lane, uint64_t pending) {
  uint32_t oldest = c->count > COMMITS ? c->count - COMMITS : 0;
  for (uint32_t i = c->count; i > oldest; i--) {
    const Commit *group = &c->ring[(i - 1) % COMMITS];
    if (!(group->lanes >> lane & 1)) continue;
    if (pending == 0) return group->number;
    pending--;
  }
  return oldest ? c->ring[oldest % COMMITS].number - 1 : 0;
}

static Clock cp_clock(const Warp *w, uint32_t number) {
  return w->agent_birth[AG_CP_ASYNC] + number;
}
static Clock bulk_clock(const Warp *w, int agent_kind, uint32_t group) {
  return w->agent_birth[agent_kind] + group - 1;
}

// ------------------------------------------------------------------------------------ cp.async

typedef struct {
  Cta *cta;
  Mask lanes;
  uint32_t number, size;         // bytes of each lane's copy
  uint32_t to[32], taken[32];    // taken: bytes read; zeros follow
  uint64_t from[32];
  uint8_t bytes[32 * 16];
} CpAsync;

// Lanes from `l` on whose copies follow each other in memory.
static int global_run(const CpAsync *c, int l) {
  int end = l + 1;
  while (end < 32 && c->lanes >> end & 1 && c->taken[end - 1] == c->size &&
         c->taken[end] == c->size && c->from[end] == c->from[end - 1] + c->size) end++;
  return end;
}
static int shared_run(const CpAsync *c, int l) {
  int end = l + 1;
  while (end < 32 && c->lanes >> end & 1 && c->to[end] == c->to[end - 1] + c->size) end++;
  return end;
}

static void cp_async_read(AsyncOp *op, CpAsync *c) {
  for (int l = 0, end; l < 32; l = end) {
    end = l + 1;
    if (!(c->lanes >> l & 1) || !c->taken[l]) continue;
    end = global_run(c, l);
    uint32_t bytes = (uint32_t)(end - l - 1) * c->size + c->taken[l];
    const uint8_t *p = global_pointer(op->warp, op->insn, c->from[l], bytes, c->size, false);
    if (!p) continue;
    global_read(&op->access, p, bytes);
    memcpy(c->bytes + (size_t)l * c->size, p, bytes);
    op->emu->counters[CT_CP_ASYNC] += bytes;
  }
}

static void cp_async_write(AsyncOp *op, CpAsync *c) {
  for (int l = 0, end; l < 32; l = end) {
    end = l + 1;
    if (!(c->lanes >> l & 1)) continue;
    end = shared_run(c, l);
    uint32_t bytes = (uint32_t)(end - l) * c->size;
    uint8_t *p = shared_pointer(op->warp, op->insn, c->cta, c->to[l], bytes, c->size);
    if (!p) continue;
    shared_write(&op->access, c->cta, c->to[l], bytes);
    memcpy(p, c->bytes + (size_t)l * c->size, bytes);
  }
  op->warp->cp_done = c->number;
}

static void run_cp_async(AsyncOp *op, int stage) {
  if (stage == 0) cp_async_read(op, op->data);
  else cp_async_write(op, op->data);
}

static int start_cp_async(Warp *w, const Insn *I, Mask m, const uint32_t *source_bytes,
                          Mask ignored) {
  if (I->nops > 4) (void)SRC64(4);  // the cache policy
  CpAsync *c = calloc(1, sizeof *c);
  c->cta = w->cta;
  c->size = (uint32_t)I->op[2].imm;
  uint64_t to[32];
  addresses_of(w, I, &I->op[0], m, to);
  addresses_of(w, I, &I->op[1], m, c->from);
  bool cg = I->mod[0] == 2;
  if (c->size != 16 && (cg || (c->size != 4 && c->size != 8))) {
    fatal(w, I, CK_ALIGNMENT, "cp.async copies %s bytes, not %u", cg ? "16" : "4, 8 or 16",
          c->size);
    free(c);
    return DONE;
  }
  FOR_SET(l, m) {
    Cta *cta = shared_target(w, (uint32_t)to[l], &c->to[l]);
    if (cta != w->cta) {
      finding(w, I, CK_CLUSTER, SEV_ERROR,
              "cp.async writes to its own CTA's shared memory, but lane %d gives address 0x%x",
              l, (uint32_t)to[l]);
      continue;
    }
    c->lanes |= 1u << l;
    c->taken[l] = ignored >> l & 1 ? 0 : source_bytes ? source_bytes[l] : c->size;
    if (c->taken[l] > c->size) {
      finding(w, I, CK_BOUNDS, SEV_ERROR,
              "cp.async takes %u bytes of the source for a copy of %u bytes (lane %d)",
              c->taken[l], c->size, l);
      c->taken[l] = c->size;
    }
  }
  struct Copies *state = copies_of(w);
  c->number = (uint32_t)++w->cp_issued;
  w->agent_clock[AG_CP_ASYNC] = cp_clock(w, c->number);
  FOR_SET(l, m) state->cp_issued[l] = c->number;
  AsyncOp *op = new_async(w, I, "cp.async", AG_CP_ASYNC, cp_clock(w, c->number));
  op->run = run_cp_async;
  op->stages = 2;
  op->queue = queue_of(w, AG_CP_ASYNC);
  op->access.async = 0;
  op->data = c;
  submit(op);
  return DONE;
}

static int exec_cp_async(Warp *w, const Insn *I, Mask m) {
  const uint32_t *bytes = I->op[3].kind == K_NONE ? NULL : SRC32(3);
  return start_cp_async(w, I, m, bytes, 0);
}
static int exec_cp_async_ignore(Warp *w, const Insn *I, Mask m) {
  return start_cp_async(w, I, m, NULL, SRCP(3) & m);
}

static int exec_cp_async_commit(Warp *w, const Insn *I, Mask m) {
  (void)I;
  commit(&copies_of(w)->cp, (uint32_t)w->cp_issued, m);
  return DONE;
}

static int wait_cp_async(Warp *w, Mask m, const uint32_t number[32], uint64_t pending) {
  uint32_t latest = 0;
  FOR_SET(l, m) latest = number[l] > latest ? number[l] : latest;
  if (w->cp_done < latest) return wait_for(w, WAIT_CP_ASYNC, latest, pending);
  struct Copies *state = copies_of(w);
  FOR_SET(l, m) if (state->cp_waited[l] < number[l]) state->cp_waited[l] = number[l];
  if (latest) view_add(&w->view, agent_of(w, AG_CP_ASYNC), cp_clock(w, latest));
  return DONE;
}

static int exec_cp_async_wait_group(Warp *w, const Insn *I, Mask m) {
  uint32_t number[32] = {0};
  FOR_SET(l, m) number[l] = awaited(&copies_of(w)->cp, l, I->op[0].imm);
  return wait_cp_async(w, m, number, I->op[0].imm);
}
static int exec_cp_async_wait_all(Warp *w, const Insn *I, Mask m) {
  (void)I;
  return wait_cp_async(w, m, copies_of(w)->cp_issued, 0);
}

// cp.async.mbarrier.arrive: lanes that name the same mbarrier arrive together.
typedef struct { int count; Clock clock; struct { Cta *cta; uint32_t offset; int lanes; } at[32]; }
    LateArrival;

static void run_late_arrival(AsyncOp *op, int stage) {
  if (stage == 0) return;  // so that it comes after the writes of the copies before it
  LateArrival *a = op->data;
  for (int i = 0; i < a->count; i++) {
    Mbarrier *b = find_mbarrier(op->warp, op->insn, a->at[i].cta, a->at[i].offset);
    if (b)
      mbarrier_async_arrive(op->warp, op->insn, a->at[i].cta, b, a->at[i].lanes, &op->view,
                            op->access.agent, op->access.clock);
  }
}

static int exec_cp_async_arrive(Warp *w, const Insn *I, Mask m) {
  bool counted = I->mod[0] == 1;  // .noinc: the barrier's count includes these arrivals
  uint64_t address[32];
  addresses_of(w, I, &I->op[0], m, address);
  struct Copies *state = copies_of(w);
  LateArrival *a = calloc(1, sizeof *a);
  FOR_SET(l, m) {
    uint32_t offset;
    state->cp_waited[l] = state->cp_issued[l];
    Cta *cta = shared_target(w, (uint32_t)address[l], &offset);
    Mbarrier *b = cta ? find_mbarrier(w, I, cta, offset) : NULL;
    if (!b) continue;
    if (!counted) {  // one arrival more is awaited, and comes with the copies
      b->pending++;
      mbarrier_expect_tx(w, I, cta, b, 0);
    }
    int i = 0;
    while (i < a->count && (a->at[i].cta != cta || a->at[i].offset != offset)) i++;
    if (i == a->count) a->at[a->count++].cta = cta;
    a->at[i].offset = offset;
    a->at[i].lanes++;
  }
  AsyncOp *op = new_async(w, I, "cp.async.mbarrier.arrive", AG_CP_ASYNC,
                          cp_clock(w, (uint32_t)w->cp_issued));
  op->run = run_late_arrival;
  op->stages = 2;
  op->queue = queue_of(w, AG_CP_ASYNC);
  op->access.async = 0;
  op->data = a;
  submit(op);
  return DONE;
}

// -------------------------------------------------------------------------------- tensor maps
//
// A tensor map as the hardware reads it: the first 16 of its 32 words. (The driver puts further
// ones behind them, the DSL's host code leaves them undefined: nothing depends on them.)
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
typedef struct {
  uint64_t address;
  int rank;                     // 1 to 5
  ElementType type;
  int interleave;               // 0 none, 1: 16 bytes, 2: 32 bytes
  int swizzle;                  // 0 none, 1: 32 bytes, 2: 64 bytes, 3: 128 bytes
  int atomicity;                // of the latter: 0: 16 bytes, 1: 32, 2: 32 and 8-byte flip, 3: 64
  bool nan_fill, im2col;
  uint64_t size[5], stride[5];  // elements (innermost: units); bytes
  int box[5], step[5];          // the same; step: the element strides
  int lower[3], upper[3], pixels;  // im2col
  int unit;                     // elements of a unit: 1, of packed types more
  uint32_t bytes, spread;       // of a unit in global and in shared memory
  uint32_t inner, pitch, rows;  // of the box in shared memory: bytes of a row, to the next; rows
} TensorMap;

static const struct { const char *name; uint8_t unit, bytes, spread; } ELEMENTS[TY_COUNT] = {
    {"u8", 1, 1, 1},        {"u16", 1, 2, 2},          {"u32", 1, 4, 4},
    {"s32", 1, 4, 4},       {"u64", 1, 8, 8},          {"s64", 1, 8, 8},
    {"f16", 1, 2, 2},       {"f32", 1, 4, 4},          {"f32.ftz", 1, 4, 4},
    {"f64", 1, 8, 8},       {"bf16", 1, 2, 2},         {"tf32", 1, 4, 4},
    {"tf32.ftz", 1, 4, 4},  {"b4x16", 2, 1, 1},        {"b4x16_p64", 16, 8, 16},
    {"b6x16_p32", 16, 12, 16},
};
static const char *element_name(ElementType type) {
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

// False for what is no tensor map at all, or none of a kind known here.
static bool decode(TensorMap *t, const uint32_t words[16]) {
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

// What is read out of a tensor map, for comparisons: address, rank, type, im2col, interleave,
// swizzle, fill, pixels; sizes, strides, box sizes, element strides (5 each); lower and upper
// corners (3 each). False: it is none.
int emu_tensor_map(const char *map, int64_t out[MAP_FIELDS]) {
  uint32_t words[16];
  TensorMap t;
  memcpy(words, map, sizeof words);
  if (!decode(&t, words)) return 0;
  int64_t head[] = {(int64_t)t.address, t.rank, t.type, t.im2col, t.interleave, t.swizzle,
                    t.nan_fill, t.pixels};
  memcpy(out, head, sizeof head);
  for (int d = 0; d < 5; d++) {
    out[8 + d] = (int64_t)t.size[d];
    out[13 + d] = (int64_t)t.stride[d];
    out[18 + d] = t.im2col && d ? 0 : t.box[d];  // there the word holds the corners
    out[23 + d] = t.step[d];
  }
  for (int i = 0; i < 3; i++) out[28 + i] = t.lower[i], out[31 + i] = t.upper[i];
  return 1;
}

// What is wrong with a tensor map whatever it is used for; NULL: nothing.
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

// ------------------------------------------------------------------------- addresses of a swizzle
//
// Atoms are of 16 bytes, or by the atomicity of 16, 32, 32 (their halves flipped) or 64.
static Swizzle swizzle_of_box(const TensorMap *t) {
  static const uint8_t shifts[] = {4, 5, 5, 6};
  return swizzle_of(16u << t->swizzle, t->swizzle == 3 ? shifts[t->atomicity] : 4);
}

// Rows of a box to (or from) shared memory: `memory` is the host's copy of address SHARED_BASE.
static void move_rows(const TensorMap *t, uint8_t *memory, uint32_t offset, uint8_t *rows,
                      bool to_shared) {
  Swizzle s = swizzle_of_box(t);
  bool flips = t->swizzle == 3 && t->atomicity == 2;
  for (uint32_t row = 0; row < t->rows; row++, rows += t->inner) {
    uint32_t address = SHARED_BASE + offset + row * t->pitch;
    for (uint32_t i = 0; i < t->inner; i += 16) {
      uint8_t *p = memory + (swizzled(s, address + i, 0) - SHARED_BASE);
      uint8_t chunk[16];
      memcpy(chunk, to_shared ? rows + i : p, 16);
      if (flips && (address + i) >> 7 & 1) {
        uint64_t half[2];
        memcpy(half, chunk, 16);
        memcpy(chunk, &half[1], 8);
        memcpy(chunk + 8, &half[0], 8);
      }
      memcpy(to_shared ? p : rows + i, chunk, 16);
    }
  }
}

// ---------------------------------------------------------------------------------- bulk copies

typedef enum { MODE_TILE, MODE_GATHER, MODE_IM2COL } TensorMode;

struct Copy {
  Copy *next, **link;      // the warp's unfinished copies of bulk groups
  int lane;
  uint32_t group;
  bool read;               // the source has been read
  bool tensor;
  uint64_t global;         // of a copy that is not a tensor's
  uint32_t bytes;          // that it signals
  uint32_t buffered;       // in `buffer`
  Cta *from; uint32_t from_offset;  // source in shared memory
  uint32_t to_offset;               // destination in shared memory, of each target
  int ntargets; Cta *targets[16], *signalled[16];
  uint32_t barrier;                 // its offset
  Reduction reduce;                 // NULL: a copy
  uint16_t byte_mask;
  TensorMap map;
  TensorMode mode;
  int32_t at[8];           // coordinates
  int32_t pixel[3];        // im2col: offsets
  uint8_t *buffer;
};

static void drop_copy(Copy *c) {
  free(c->buffer);
  free(c);
}

static void release_copy(AsyncOp *op) {
  Copy *c = op->data;
  if (c->link) {
    *c->link = c->next;
    if (c->next) c->next->link = c->link;
  }
  drop_copy(c);
}

static Copy *new_copy(uint32_t buffered) {
  Copy *c = calloc(1, sizeof *c);
  c->buffered = buffered;
  c->buffer = malloc(buffered ? buffered : 1);
  c->byte_mask = 0xFFFF;
  return c;
}

// ---- rows of a tensor: contiguous runs of bytes in global memory, and where they are in the box

typedef struct {
  AsyncOp *op;
  Copy *copy;
  bool writes;
  uint64_t address;         // the run being gathered
  uint32_t place, bytes;
} Runs;

// What a load makes of F32 elements of a TF32 tensor map: rounded to nearest.
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

// Units of a packed type that lie apart in shared memory; loads alone.
static void add_units(Runs *r, const TensorMap *t, uint64_t address, uint32_t place,
                      uint32_t count) {
  AsyncOp *op = r->op;
  const uint8_t *p = global_pointer(op->warp, op->insn, address, count * t->bytes, 1, false);
  if (!p) return;
  global_read(&op->access, p, count * t->bytes);
  for (uint32_t i = 0; i < count; i++)
    memcpy(r->copy->buffer + place + i * t->spread, p + i * t->bytes, t->bytes);
}

// One row of the box: the elements from (x, at[1], at[2] ...) on, as far as they exist. Stores do
// not cut the 16 bytes in which a row ends.
static void add_row(Runs *r, const TensorMap *t, int64_t x, const int64_t at[5], uint32_t row) {
  uint64_t address = t->address;
  for (int d = 1; d < t->rank; d++) {
    if (at[d] < 0 || (uint64_t)at[d] >= t->size[d]) return;
    address += (uint64_t)at[d] * t->stride[d];
  }
  int64_t first = x < 0 ? -x : 0, last = t->box[0];
  if ((int64_t)t->size[0] - x < last) last = (int64_t)t->size[0] - x;
  if (first >= last) return;
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

static void move_tensor(AsyncOp *op, Copy *c, bool writes) {
  Runs r = {.op = op, .copy = c, .writes = writes};
  if (c->mode == MODE_GATHER) gather_rows(&r, &c->map, c->at);
  else if (c->mode == MODE_IM2COL) im2col_rows(&r, &c->map, c->at, c->pixel);
  else tile_rows(&r, &c->map, c->at);
  end_run(&r);
}

static void read_tensor(AsyncOp *op, Copy *c) {
  memset(c->buffer, 0, c->buffered);
  if (c->map.nan_fill)  // the same bytes whatever the type
    for (uint32_t i = 0; i < c->buffered; i += 2) memcpy(c->buffer + i, &(uint16_t){0x7FF7}, 2);
  move_tensor(op, c, false);
}

// ---- shared memory: all of a box, or a linear range

static uint32_t footprint(const Copy *c) {
  if (!c->tensor) return c->buffered;
  uint32_t bytes = c->map.rows * c->map.pitch;
  return c->map.swizzle ? (bytes + 127) & ~127u : bytes;
}

// Checks each chunk that a box touches, or the whole where it leaves no gaps.
static void touch_shared(const Access *a, const Copy *c, Cta *cta, uint32_t offset, bool writes) {
  void (*touch)(const Access *, Cta *, uint32_t, uint32_t) = writes ? shared_write : shared_read;
  const TensorMap *t = &c->map;
  if (!c->tensor || t->inner == t->pitch || !t->swizzle) {
    uint32_t whole = c->tensor && t->swizzle ? c->buffered & ~127u : c->buffered;
    if (whole) touch(a, cta, offset, whole);
    if (whole == c->buffered) return;
  }
  Swizzle s = swizzle_of_box(t);
  uint32_t first = t->inner == t->pitch ? (c->buffered & ~127u) / t->pitch : 0;
  for (uint32_t row = first; row < t->rows; row++)
    for (uint32_t i = 0; i < t->inner; i += 16)
      touch(a, cta, swizzled(s, SHARED_BASE + offset + row * t->pitch + i, 0) - SHARED_BASE, 16);
}

static uint32_t shared_alignment(const Copy *c) {
  return c->tensor ? 128 : 16;
}

static void move_shared(AsyncOp *op, Copy *c, Cta *cta, uint32_t offset, bool writes) {
  uint8_t *p = shared_pointer(op->warp, op->insn, cta, offset, footprint(c), shared_alignment(c));
  if (!p) {
    if (!writes) memset(c->buffer, 0, c->buffered);
    return;
  }
  touch_shared(&op->access, c, cta, offset, writes);
  if (c->tensor && c->map.swizzle) {
    move_rows(&c->map, p - offset, offset, c->buffer, writes);
  } else if (!writes) {
    memcpy(c->buffer, p, c->buffered);
  } else {
    reduce_or_copy(c->reduce, p, c->buffer, c->buffered);
  }
}

// ---- global memory: a linear range

static void copy_masked(uint8_t *to, const uint8_t *from, uint32_t bytes, uint16_t mask) {
  for (uint32_t i = 0; i < bytes; i++)
    if (mask >> i % 16 & 1) to[i] = from[i];
}

static void write_linear(AsyncOp *op, Copy *c) {
  uint8_t *p = global_pointer(op->warp, op->insn, c->global, c->bytes, 16, true);
  if (!p) return;
  if (c->byte_mask == 0xFFFF) {
    global_write(&op->access, p, c->bytes);
  } else {
    for (uint32_t i = 0; i < c->bytes; i++)
      if (c->byte_mask >> i % 16 & 1) global_write(&op->access, p + i, 1);
  }
  if (c->byte_mask == 0xFFFF) reduce_or_copy(c->reduce, p, c->buffer, c->bytes);
  else copy_masked(p, c->buffer, c->bytes, c->byte_mask);
}

static void read_linear(AsyncOp *op, Copy *c) {
  const uint8_t *p = global_pointer(op->warp, op->insn, c->global, c->bytes, 16, false);
  if (!p) {
    memset(c->buffer, 0, c->bytes);
    return;
  }
  global_read(&op->access, p, c->bytes);
  memcpy(c->buffer, p, c->bytes);
}

// ---- copies into shared memory, which signal an mbarrier; a stage for each destination CTA

// Effects take the epoch of the barrier's current phase: known to whoever observes its end.
static Mbarrier *stamp(AsyncOp *op, const Copy *c, int target) {
  if (!live_cta(c->signalled[target])) return NULL;
  Mbarrier *b = find_mbarrier(op->warp, op->insn, c->signalled[target], c->barrier);
  if (b) op->access.agent = b->agent, op->access.clock = b->clock + 1;
  return b;
}

static void load_source(AsyncOp *op, Copy *c) {
  stamp(op, c, 0);
  if (c->from) move_shared(op, c, c->from, c->from_offset, false);
  else if (c->tensor) read_tensor(op, c);
  else read_linear(op, c);
}

static void load_target(AsyncOp *op, Copy *c, int target) {
  Cta *cta = c->targets[target];
  if (!live_cta(cta)) {
    finding(op->warp, op->insn, CK_CLUSTER, SEV_ERROR,
            "%s writes to the shared memory of CTA %u, which has exited", op->what, cta->linear);
    return;
  }
  Mbarrier *b = stamp(op, c, target);
  move_shared(op, c, cta, c->to_offset, true);
  if (b)
    mbarrier_complete_tx(op->warp, op->insn, c->signalled[target], b, c->bytes, &op->view);
}

static void run_load(AsyncOp *op, int stage) {
  if (stage == 0) load_source(op, op->data);
  else load_target(op, op->data, stage - 1);
}

// ---- copies out of shared memory, which complete a bulk group

static void run_store(AsyncOp *op, int stage) {
  Copy *c = op->data;
  Warp *w = op->warp;
  if (stage == 0) {
    op->access.agent = agent_of(w, AG_BULK_READ);
    op->access.clock = bulk_clock(w, AG_BULK_READ, c->group);
    move_shared(op, c, c->from, c->from_offset, false);
    c->read = true;
    return;
  }
  op->access.agent = agent_of(w, AG_BULK_WRITE);
  op->access.clock = bulk_clock(w, AG_BULK_WRITE, c->group);
  op->access.atomic = c->reduce != NULL;
  if (c->tensor) move_tensor(op, c, true);
  else write_linear(op, c);
}

static void submit_load(Warp *w, const Insn *I, Copy *c, const char *what, int counter) {
  AsyncOp *op = new_async(w, I, what, AG_BULK_WRITE, bulk_clock(w, AG_BULK_WRITE, 1));
  op->run = run_load;
  op->release = release_copy;
  op->stages = 1 + c->ntargets;
  op->data = c;
  op->access.atomic = c->reduce != NULL;
  emu_of(w)->counters[counter] += c->bytes;
  submit(op);
}

static void submit_store(Warp *w, const Insn *I, Copy *c, int lane, const char *what, int counter) {
  struct Copies *state = copies_of(w);
  c->lane = lane;
  c->group = (uint32_t)w->bulk_group;
  state->bulk_issued[lane] = c->group;
  c->next = state->unfinished;
  c->link = &state->unfinished;
  if (c->next) c->next->link = &c->next;
  state->unfinished = c;
  AsyncOp *op = new_async(w, I, what, AG_BULK_READ, bulk_clock(w, AG_BULK_READ, c->group));
  op->run = run_store;
  op->release = release_copy;
  op->stages = 2;
  op->data = c;
  emu_of(w)->counters[counter] += c->bytes;
  submit(op);
}

// ---- destinations and barriers

// The CTAs that a copy into shared memory goes to, and the barriers that it signals, which must
// be there by now.
// `multicast`: mask of CTAs, or -1. `pair`: cta_group::2, whose barrier may be in the other CTA of
// the destination's pair; with multicast its rank's parity tells which CTA of each pair.
static bool set_targets(Warp *w, const Insn *I, Copy *c, uint32_t to, uint32_t barrier,
                        int multicast, bool own, bool pair) {
  Cluster *k = w->cta->cluster;
  uint32_t offset;
  Cta *cta = shared_target(w, to, &c->to_offset);
  Cta *signalled = shared_target(w, barrier, &offset);
  if (!cta || !signalled) {
    finding(w, I, CK_CLUSTER, SEV_ERROR,
            "no CTA of the cluster has the %s address 0x%x", cta ? "mbarrier's" : "destination",
            cta ? barrier : to);
    return false;
  }
  c->barrier = offset;
  if (own && cta != w->cta)
    finding(w, I, CK_CLUSTER, SEV_ERROR,
            "the destination is .shared::cta, but its address 0x%x belongs to rank %d", to,
            cta->rank);
  if (multicast < 0) {
    if (signalled != cta && !(pair && (signalled->rank ^ 1) == cta->rank))
      finding(w, I, CK_CLUSTER, SEV_ERROR,
              "the destination is in the CTA of rank %d, its mbarrier in that of rank %d%s",
              cta->rank, signalled->rank, pair ? ", which is not of the same pair" : "");
    (void)find_mbarrier(w, I, signalled, offset);
    c->targets[0] = cta;
    c->signalled[0] = signalled;
    c->ntargets = 1;
    return true;
  }
  if (multicast == 0 || multicast >> k->nctas)
    finding(w, I, CK_CLUSTER, SEV_ERROR,
            "the mask 0x%x of a multicast names %s the cluster's %d CTAs", multicast,
            multicast ? "more than" : "none of", k->nctas);
  for (int r = 0; r < k->nctas; r++) {
    if (!(multicast >> r & 1)) continue;
    int other = pair ? (r & ~1) | (signalled->rank & 1) : r;
    c->targets[c->ntargets] = k->ctas[r];
    c->signalled[c->ntargets] = k->ctas[other < k->nctas ? other : r];
    (void)find_mbarrier(w, I, c->signalled[c->ntargets++], offset);
  }
  return c->ntargets > 0;
}

// Offset of a source in the CTA's own shared memory.
static bool own_shared(Warp *w, const Insn *I, uint64_t address, uint32_t *offset) {
  if (shared_target(w, (uint32_t)address, offset) == w->cta) return true;
  finding(w, I, CK_CLUSTER, SEV_ERROR,
          "the source is .shared::cta, but its address 0x%x is not of this CTA",
          (uint32_t)address);
  return false;
}

static bool linear_size(Warp *w, const Insn *I, uint32_t bytes) {
  if (bytes % 16 == 0) return true;
  finding(w, I, CK_ALIGNMENT, SEV_ERROR, "a bulk copy of %u bytes, not a multiple of 16", bytes);
  return false;
}

static const uint32_t *source32(Warp *w, const Insn *I, int k, Mask m, uint32_t buffer[32]) {
  if (I->op[k].kind == K_NONE) return NULL;
  return src32_of(w, I, &I->op[k], m, buffer);
}
static void read_policy(Warp *w, const Insn *I, int k, Mask m) {
  if (I->op[k].kind != K_NONE) (void)src64_of(w, I, &I->op[k], m, (uint64_t[32]){0});
}

// ---- linear copies

static int load_linear(Warp *w, const Insn *I, Mask m, const uint32_t *masks) {
  uint64_t to[32], from[32], barrier[32];
  addresses_of(w, I, &I->op[0], m, to);
  addresses_of(w, I, &I->op[1], m, from);
  addresses_of(w, I, &I->op[3], m, barrier);
  const uint32_t *bytes = SRC32(2);
  FOR_SET(l, m) {
    if (!linear_size(w, I, bytes[l])) continue;
    Copy *c = new_copy(bytes[l]);
    c->global = from[l];
    c->bytes = bytes[l];
    if (set_targets(w, I, c, (uint32_t)to[l], (uint32_t)barrier[l],
                    masks ? (int)(masks[l] & 0xFFFF) : -1, I->mod[0] == 2, false)) {
      submit_load(w, I, c, "bulk copy to shared memory", CT_BULK);
    } else {
      drop_copy(c);
    }
  }
  return DONE;
}

static int exec_bulk_load(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, 4, m);
  return load_linear(w, I, m, NULL);
}
static int exec_bulk_multicast(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, 5, m);
  return load_linear(w, I, m, SRC32(4));
}

// Shared memory to that of a CTA of the cluster; reductions too.
static int shared_to_shared(Warp *w, const Insn *I, Mask m, Reduction reduce) {
  uint64_t to[32], from[32], barrier[32];
  addresses_of(w, I, &I->op[0], m, to);
  addresses_of(w, I, &I->op[1], m, from);
  addresses_of(w, I, &I->op[3], m, barrier);
  const uint32_t *bytes = SRC32(2);
  FOR_SET(l, m) {
    uint32_t offset;
    if (!linear_size(w, I, bytes[l]) || !own_shared(w, I, from[l], &offset)) continue;
    Copy *c = new_copy(bytes[l]);
    c->from = w->cta;
    c->from_offset = offset;
    c->bytes = bytes[l];
    c->reduce = reduce;
    if (set_targets(w, I, c, (uint32_t)to[l], (uint32_t)barrier[l], -1, false, false)) {
      submit_load(w, I, c, reduce ? "bulk reduction into a CTA" : "bulk copy between CTAs",
                  CT_DSMEM);
    } else {
      drop_copy(c);
    }
  }
  return DONE;
}

static int exec_bulk_between(Warp *w, const Insn *I, Mask m) {
  return shared_to_shared(w, I, m, NULL);
}

static int store_linear(Warp *w, const Insn *I, Mask m, Reduction reduce,
                        const uint32_t *byte_masks) {
  uint64_t to[32], from[32];
  addresses_of(w, I, &I->op[0], m, to);
  addresses_of(w, I, &I->op[1], m, from);
  const uint32_t *bytes = SRC32(2);
  FOR_SET(l, m) {
    uint32_t offset;
    if (!linear_size(w, I, bytes[l]) || !own_shared(w, I, from[l], &offset)) continue;
    Copy *c = new_copy(bytes[l]);
    c->from = w->cta;
    c->from_offset = offset;
    c->global = to[l];
    c->bytes = bytes[l];
    c->reduce = reduce;
    if (byte_masks) c->byte_mask = (uint16_t)byte_masks[l];
    submit_store(w, I, c, l, reduce ? "bulk reduction" : "bulk copy to global memory",
                 reduce ? CT_TMA_REDUCE : CT_BULK);
  }
  return DONE;
}

static int exec_bulk_store(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, 3, m);
  return store_linear(w, I, m, NULL, NULL);
}
static int exec_bulk_store_masked(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, 3, m);
  uint32_t buffer[32];
  return store_linear(w, I, m, NULL, source32(w, I, 4, m, buffer));
}

// Types as the patterns of reductions list them.
static const ElementType REDUCED[] = {TY_COUNT, TY_U32, TY_S32, TY_U64, TY_S64, TY_F16,
                                      TY_BF16,  TY_F32, TY_F64, TY_U32, TY_U64};
#define REDUCED_TYPES "(.u32|s32|u64|s64|f16|bf16|f32|f64|b32|b64)"

// NULL after a fatal finding.
static Reduction known_reduction(Warp *w, const Insn *I, ReduceOp op, ElementType type) {
  Reduction reduce = reduction_of(op, type);
  if (!reduce)
    fatal(w, I, CK_DESCRIPTOR, "there is no such reduction of elements of type %s",
          element_name(type));
  return reduce;
}

static int exec_reduce_global(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, 3, m);
  Reduction reduce = known_reduction(w, I, (ReduceOp)I->mod[1], REDUCED[I->mod[2]]);
  return reduce ? store_linear(w, I, m, reduce, NULL) : DONE;
}
static int exec_reduce_global_noftz(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, 3, m);
  return store_linear(w, I, m, reduction_of(OP_ADD, I->mod[1] == 1 ? TY_F16 : TY_BF16), NULL);
}
static int exec_reduce_shared(Warp *w, const Insn *I, Mask m) {
  Reduction reduce = known_reduction(w, I, (ReduceOp)I->mod[0], REDUCED[I->mod[1]]);
  return reduce ? shared_to_shared(w, I, m, reduce) : DONE;
}

static int exec_bulk_prefetch(Warp *w, const Insn *I, Mask m) {
  uint64_t from[32];
  addresses_of(w, I, &I->op[0], m, from);
  const uint32_t *bytes = SRC32(1);
  read_policy(w, I, 2, m);
  FOR_SET(l, m) if (linear_size(w, I, bytes[l]))
    (void)global_pointer(w, I, from[l], bytes[l], 16, false);
  return DONE;
}

// ---- groups of bulk copies

static int exec_bulk_commit(Warp *w, const Insn *I, Mask m) {
  (void)I;
  commit(&copies_of(w)->bulk, (uint32_t)w->bulk_group++, m);
  w->agent_clock[AG_BULK_READ] = bulk_clock(w, AG_BULK_READ, (uint32_t)w->bulk_group);
  w->agent_clock[AG_BULK_WRITE] = bulk_clock(w, AG_BULK_WRITE, (uint32_t)w->bulk_group);
  return DONE;
}

static int exec_bulk_wait(Warp *w, const Insn *I, Mask m) {
  struct Copies *state = copies_of(w);
  bool sources_only = I->mod[0] == 1;
  uint32_t number[32] = {0}, latest = 0;
  FOR_SET(l, m) {
    number[l] = awaited(&state->bulk, l, I->op[0].imm);
    if (number[l] > latest) latest = number[l];
  }
  for (const Copy *c = state->unfinished; c; c = c->next)
    if (m >> c->lane & 1 && c->group <= number[c->lane] && !(sources_only && c->read))
      return wait_for(w, WAIT_BULK_GROUP, latest, I->op[0].imm);
  FOR_SET(l, m) if (state->bulk_waited[l] < number[l]) state->bulk_waited[l] = number[l];
  if (!latest) return DONE;
  view_add(&w->view, agent_of(w, AG_BULK_READ), bulk_clock(w, AG_BULK_READ, latest));
  if (!sources_only)
    view_add(&w->view, agent_of(w, AG_BULK_WRITE), bulk_clock(w, AG_BULK_WRITE, latest));
  return DONE;
}

// -------------------------------------------------------------------------------- tensor copies

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

static bool tensor_map(Warp *w, const Insn *I, uint64_t address, TensorMap *t) {
  uint32_t words[16];
  if (!fetch_map(w, I, address, words)) return false;
  if (!decode(t, words)) {
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "what is at the tensor map's address 0x%llx is no tensor map known here (word 2 is "
            "0x%08x)", (unsigned long long)address, words[2]);
    return false;
  }
  const char *fault = map_fault(t);
  if (fault) finding(w, I, CK_DESCRIPTOR, SEV_ERROR, "tensor map: %s", fault);
  return !fault;
}

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
  if (!tensor_map(w, I, from->map[lane], &t)) return NULL;
  if (mode == MODE_GATHER) t.rows = 4;
  Copy *c = new_copy(t.rows * t.inner);
  c->tensor = true;
  c->map = t;
  c->mode = mode;
  c->bytes = t.rows * (uint32_t)t.box[0] * t.bytes;  // counted as they lie in global memory
  memcpy(c->at, from->at[lane], sizeof c->at);
  int expected = mode == MODE_GATHER ? 5 : dimensions;
  if (from->count != expected)
    fatal(w, I, CK_DESCRIPTOR, "%d coordinates, where %d are wanted", from->count, expected);
  else if (tensor_use(w, I, c, dimensions)) return c;
  drop_copy(c);
  return NULL;
}

// A load that cannot be done at all leaves its barrier without the bytes, as hardware (which
// stops) would.
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
  read_policy(w, I, 4, m);
  return load_tensor(w, I, m, tile_mode(I->mod[3]), NULL, NULL, pair_of(I, 6));
}
static int exec_tensor_multicast(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, 5, m);
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
  read_policy(w, I, 5, m);
  return load_im2col(w, I, m, NULL, pair_of(I, 6));
}
static int exec_im2col_multicast(Warp *w, const Insn *I, Mask m) {
  read_policy(w, I, 6, m);
  return load_im2col(w, I, m, SRC32(5), pair_of(I, 7));
}

// What loads allow and stores do not: hardware stops at these, but for the last.
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
  read_policy(w, I, 3, m);
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

// 128 bytes of a tensor map that an instruction changes: in shared memory, or else global.
typedef struct { uint32_t *words; Cta *cta; uint32_t offset; } MapMemory;

static bool map_memory(Warp *w, const Insn *I, int space, uint64_t address, MapMemory *at) {
  *at = (MapMemory){0};
  if (space == 2) at->cta = shared_target(w, (uint32_t)address, &at->offset);
  else if (space == 0) (void)classify(w, address, &at->cta, &at->offset);
  at->words = (uint32_t *)(at->cta ? shared_pointer(w, I, at->cta, at->offset, 128, 64)
                                   : global_pointer(w, I, address, 128, 64, true));
  return at->words != NULL;
}

static bool unchanged_map(const void *data, const uint8_t *word) {
  return !memcmp(data, word, 4);
}

// Set a word of a map. `v`: what it will be.
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
  shared_read(&a, cta, offset, 64);  // what follows may be undefined
  global_write(&a, p, 128);
  memcpy(p, source, 128);
  sync_write(w, p, 2);
  progress(emu_of(w));
  return DONE;
}

static int exec_tensormap_release(Warp *w, const Insn *I, Mask m) {
  (void)I, (void)m;
  memory_fence(w);
  return DONE;
}

static int exec_tensormap_acquire(Warp *w, const Insn *I, Mask m) {
  uint64_t address[32];
  addresses_of(w, I, &I->op[0], m, address);
  memory_fence(w);
  FOR_SET(l, m) sync_read(w, (const void *)address[l], 1);
  return DONE;
}

// -------------------------------------------------------------------------- st.async, red.async

typedef struct {
  uint32_t bytes;
  Reduction reduce;  // NULL: a copy
  int count;
  struct { Cta *cta; uint32_t offset, barrier; uint8_t value[32]; } at[32];
} Scatter;

static void scatter_one(AsyncOp *op, const Scatter *s, int i) {
  Cta *cta = s->at[i].cta;
  Warp *w = op->warp;
  if (!live_cta(cta)) {
    finding(w, op->insn, CK_CLUSTER, SEV_ERROR,
            "%s writes to the shared memory of CTA %u, which has exited", op->what, cta->linear);
    return;
  }
  Mbarrier *b = find_mbarrier(w, op->insn, cta, s->at[i].barrier);
  if (b) op->access.agent = b->agent, op->access.clock = b->clock + 1;
  uint8_t *p = shared_pointer(w, op->insn, cta, s->at[i].offset, s->bytes, s->bytes);
  if (p) {
    shared_write(&op->access, cta, s->at[i].offset, s->bytes);
    reduce_or_copy(s->reduce, p, s->at[i].value, s->bytes);
  }
  if (b) mbarrier_complete_tx(w, op->insn, cta, b, s->bytes, &op->view);
}

static void run_scatter(AsyncOp *op, int stage) {
  (void)stage;
  const Scatter *s = op->data;
  for (int i = 0; i < s->count; i++) scatter_one(op, s, i);
}

// The elements of operand 1, of `width` bytes each, to every lane's address.
static int scatter(Warp *w, const Insn *I, Mask m, uint32_t width, Reduction reduce) {
  const Operand *list = list_of(w, &I->op[1]);
  uint32_t count = (uint32_t)count_of(&I->op[1]);
  uint64_t to[32], barrier[32], value[4][32];
  addresses_of(w, I, &I->op[0], m, to);
  addresses_of(w, I, &I->op[2], m, barrier);
  for (uint32_t k = 0; k < count && k < 4; k++) {
    uint32_t narrow[32];
    uint64_t wide[32];
    if (width == 8) memcpy(value[k], src64_of(w, I, &list[k], m, wide), sizeof wide);
    else {
      const uint32_t *v = src32_of(w, I, &list[k], m, narrow);
      FOR_LANES(l) value[k][l] = v[l];
    }
  }
  Scatter *s = calloc(1, sizeof *s);
  s->bytes = width * count;
  s->reduce = reduce;
  FOR_SET(l, m) {
    uint32_t offset, mbarrier;
    Cta *cta = shared_target(w, (uint32_t)to[l], &offset);
    Cta *signalled = shared_target(w, (uint32_t)barrier[l], &mbarrier);
    if (!cta || cta != signalled) {
      finding(w, I, CK_CLUSTER, SEV_ERROR,
              "the destination 0x%x and the mbarrier 0x%x are not in the same CTA of the cluster",
              (uint32_t)to[l], (uint32_t)barrier[l]);
      continue;
    }
    int i = s->count++;
    s->at[i].cta = cta;
    s->at[i].offset = offset;
    s->at[i].barrier = mbarrier;
    for (uint32_t k = 0; k < count && k < 4; k++)
      memcpy(s->at[i].value + k * width, &value[k][l], width);
  }
  AsyncOp *a = new_async(w, I, reduce ? "red.async" : "st.async", AG_BULK_WRITE,
                         bulk_clock(w, AG_BULK_WRITE, 1));
  a->run = run_scatter;
  a->access.async = 0;
  a->access.atomic = reduce != NULL;
  a->data = s;
  emu_of(w)->counters[CT_DSMEM] += (uint64_t)s->bytes * (uint32_t)s->count;
  submit(a);
  return DONE;
}

static bool vector_length(Warp *w, const Insn *I, int modifier) {
  int expected = modifier ? 2 * modifier : 1, count = count_of(&I->op[1]);
  if (count == expected) return true;
  fatal(w, I, CK_BOUNDS, "%d values, where %d are wanted", count, expected);
  return false;
}
static int exec_st_async32(Warp *w, const Insn *I, Mask m) {
  return vector_length(w, I, I->mod[3]) ? scatter(w, I, m, 4, NULL) : DONE;
}
static int exec_st_async64(Warp *w, const Insn *I, Mask m) {
  return vector_length(w, I, I->mod[3]) ? scatter(w, I, m, 8, NULL) : DONE;
}
static int exec_red_async32(Warp *w, const Insn *I, Mask m) {
  static const ElementType types[] = {TY_U32, TY_U32, TY_S32, TY_U32};
  Reduction reduce = known_reduction(w, I, (ReduceOp)I->mod[1], types[I->mod[2]]);
  return reduce ? scatter(w, I, m, 4, reduce) : DONE;
}
static int exec_red_async64(Warp *w, const Insn *I, Mask m) {
  Reduction reduce = known_reduction(w, I, (ReduceOp)I->mod[1], TY_U64);
  return reduce ? scatter(w, I, m, 8, reduce) : DONE;
}

// ------------------------------------------------------------------------------------ at exit

static const Insn *insn_of(const Emu *e, const Copy *c) {
  for (const AsyncOp *op = e->async_first; op; op = op->next)
    if (op->data == c) return op->insn;
  return NULL;
}

static void bulk_at_exit(Warp *w, int lane) {
  const struct Copies *state = w->copies;
  uint32_t issued = state->bulk_issued[lane];
  if (issued <= state->bulk_waited[lane]) return;
  const Insn *culprit = NULL;
  for (const Copy *c = state->unfinished; c && !culprit; c = c->next)
    if (c->lane == lane) culprit = insn_of(emu_of(w), c);
  const Insn *here = &emu_of(w)->program->code[group_of(w)->pc];
  bool committed = awaited(&state->bulk, lane, 0) >= issued;
  // The SM keeps a CTA's shared memory until such copies have read it.
  finding_with(w, here, culprit, CK_EXIT, SEV_NOTE,
               "lane %d exits while a bulk copy may still read shared memory: %s", lane,
               committed ? "no cp.async.bulk.wait_group awaits its group"
                         : "cp.async.bulk.commit_group is missing");
}

static void cp_async_at_exit(Warp *w, int lane) {
  const struct Copies *state = w->copies;
  if (state->cp_issued[lane] <= state->cp_waited[lane]) return;
  finding(w, &emu_of(w)->program->code[group_of(w)->pc], CK_EXIT, SEV_NOTE,
          "lane %d exits without having waited for its last cp.async", lane);
}

static bool touches(const AsyncOp *op, const Cta *cta) {
  if (op->run != run_load) return false;
  const Copy *c = op->data;
  if (c->from == cta && op->stage == 0) return true;
  for (int i = op->stage ? op->stage - 1 : 0; i < c->ntargets; i++)
    if (c->targets[i] == cta) return true;
  return false;
}

// The CTA's last warp exits: copies into (or out of) its shared memory must have ended.
static void loads_at_exit(Warp *w) {
  Emu *e = emu_of(w);
  for (AsyncOp *op = e->async_first; op;) {
    AsyncOp *next = op->next;
    if (touches(op, w->cta)) {
      finding_with(w, &e->program->code[group_of(w)->pc], op->insn, CK_EXIT, SEV_ERROR,
                   "the CTA exits while a %s that uses its shared memory is under way", op->what);
      force(op);
      next = e->async_first;
    }
    op = next;
  }
}

static void finish_stores(Warp *w, Mask lanes) {
  Emu *e = emu_of(w);
  for (AsyncOp *op = e->async_first; op;) {
    AsyncOp *next = op->next;
    if (op->warp == w && op->run == run_store && lanes >> ((Copy *)op->data)->lane & 1) {
      force(op);
      next = e->async_first;
    }
    op = next;
  }
}

void copies_at_exit(Warp *w, Mask lanes) {
  if (w->copies) {
    FOR_SET(l, lanes) {
      bulk_at_exit(w, l);
      cp_async_at_exit(w, l);
    }
    if (w->copies->unfinished) finish_stores(w, lanes);
  }
  if (w->live == lanes && w->cta->live_warps == 1) loads_at_exit(w);
}

// --------------------------------------------------------------------------------------- forms

#define TO_SHARED "(.shared::cluster|shared::cta)"
#define CTA_GROUP "{.cta_group::1|cta_group::2}"
#define HINT "{.L2::cache_hint}"
#define BYTES ".mbarrier::complete_tx::bytes"
#define CP_ASYNC "cp.async(.ca|cg)(.shared|shared::cta).global"
#define L2_SIZE "{.L2::64B|L2::128B|L2::256B}"
#define SPACE "{.global|shared::cta}"
#define SCOPE "(.cta|cluster|gpu|sys)"

const Form FORMS_COPY[] = {
    {CP_ASYNC L2_SIZE, "a a i s32?", exec_cp_async, 0},
    {CP_ASYNC L2_SIZE, "a a i sp", exec_cp_async_ignore, 0},
    {CP_ASYNC ".L2::cache_hint" L2_SIZE, "a a i s32? s64", exec_cp_async, 0},
    {CP_ASYNC ".L2::cache_hint" L2_SIZE, "a a i sp s64", exec_cp_async_ignore, 0},
    {"cp.async.commit_group", "", exec_cp_async_commit, 0},
    {"cp.async.wait_group", "i", exec_cp_async_wait_group, 0},
    {"cp.async.wait_all", "", exec_cp_async_wait_all, 0},
    {"cp.async.mbarrier.arrive{.noinc}{.shared|shared::cta}.b64", "a", exec_cp_async_arrive, 0},

    {"cp.async.bulk" TO_SHARED ".global" BYTES HINT, "a a s32 a s64?", exec_bulk_load, F_UNIFORM},
    {"cp.async.bulk" TO_SHARED ".global" BYTES ".multicast::cluster" HINT, "a a s32 a s32 s64?",
     exec_bulk_multicast, F_UNIFORM},
    {"cp.async.bulk.shared::cluster.shared::cta" BYTES, "a a s32 a", exec_bulk_between, F_UNIFORM},
    {"cp.async.bulk.global.shared::cta.bulk_group" HINT, "a a s32 s64?", exec_bulk_store,
     F_UNIFORM},
    {"cp.async.bulk.global.shared::cta.bulk_group" HINT ".cp_mask", "a a s32 s64? s32",
     exec_bulk_store_masked, F_UNIFORM},
    {"cp.async.bulk.prefetch.L2.global" HINT, "a s32 s64?", exec_bulk_prefetch, F_UNIFORM},
    {"cp.async.bulk.commit_group", "", exec_bulk_commit, 0},
    {"cp.async.bulk.wait_group{.read}", "i", exec_bulk_wait, 0},
    {"cp.reduce.async.bulk.global.shared::cta.bulk_group" HINT REDUCTIONS REDUCED_TYPES,
     "a a s32 s64?", exec_reduce_global, F_UNIFORM},
    {"cp.reduce.async.bulk.global.shared::cta.bulk_group" HINT ".add.noftz(.f16|bf16)",
     "a a s32 s64?", exec_reduce_global_noftz, F_UNIFORM},
    {"cp.reduce.async.bulk.shared::cluster.shared::cta" BYTES REDUCTIONS REDUCED_TYPES,
     "a a s32 a", exec_reduce_shared, F_UNIFORM},

    {"cp.async.bulk.tensor.#d" CTA_GROUP TO_SHARED ".global{.tile|tile::gather4}" BYTES CTA_GROUP
     HINT CTA_GROUP, "a T a s64?", exec_tensor_load, F_UNIFORM},
    {"cp.async.bulk.tensor.#d" CTA_GROUP TO_SHARED ".global{.tile|tile::gather4}" BYTES CTA_GROUP
     ".multicast::cluster" CTA_GROUP HINT CTA_GROUP, "a T a s32 s64?", exec_tensor_multicast,
     F_UNIFORM},
    {"cp.async.bulk.tensor.#d" CTA_GROUP TO_SHARED ".global(.im2col)" BYTES CTA_GROUP HINT
     CTA_GROUP, "a T a s32l s64?", exec_im2col_load, F_UNIFORM},
    {"cp.async.bulk.tensor.#d" CTA_GROUP TO_SHARED ".global(.im2col)" BYTES CTA_GROUP
     ".multicast::cluster" CTA_GROUP HINT CTA_GROUP, "a T a s32l s32 s64?", exec_im2col_multicast,
     F_UNIFORM},
    {"cp.async.bulk.tensor.#d.global.shared::cta{.tile|tile::scatter4|im2col_no_offs}.bulk_group"
     HINT, "T a s64?", exec_tensor_store, F_UNIFORM},
    {"cp.reduce.async.bulk.tensor.#d.global.shared::cta" REDUCTIONS
     "{.tile|tile::scatter4|im2col_no_offs}.bulk_group" HINT, "T a s64?", exec_tensor_reduce,
     F_UNIFORM},
    {"cp.async.bulk.prefetch.tensor.#d.L2.global{.tile|tile::gather4}" HINT, "T s64?",
     exec_tensor_prefetch, F_UNIFORM},
    {"cp.async.bulk.prefetch.tensor.#d.L2.global.im2col" HINT, "T s32l s64?", exec_im2col_prefetch,
     F_UNIFORM},
    {"prefetch{.param|const}.tensormap", "a", exec_prefetch_tensormap, 0},

    {"tensormap.replace.tile.global_address" SPACE ".b1024.b64", "a s64", exec_replace_address, 0},
    {"tensormap.replace.tile.global_stride" SPACE ".b1024.b64", "a i s64", exec_replace_stride, 0},
    {"tensormap.replace.tile(.box_dim|global_dim|element_stride)" SPACE ".b1024.b32", "a i s32",
     exec_replace_size, 0},
    {"tensormap.replace.tile(.rank|elemtype|interleave_layout|swizzle_mode|swizzle_atomicity|"
     "fill_mode)" SPACE ".b1024.b32", "a s32", exec_replace_mode, 0},
    {"tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release" SCOPE
     ".sync.aligned", "a a i", exec_tensormap_copy, F_ALIGNED | F_YIELD},
    {"fence.proxy.tensormap::generic.release" SCOPE, "", exec_tensormap_release, F_YIELD},
    {"fence.proxy.tensormap::generic.acquire" SCOPE, "a i", exec_tensormap_acquire, F_YIELD},

    {"st.async{.weak}{.shared::cluster}{" BYTES "}{.v2|v4}(.b32|u32|s32|f32)", "a s32l a",
     exec_st_async32, 0},
    {"st.async{.weak}{.shared::cluster}{" BYTES "}{.v2|v4}(.b64|u64|s64|f64)", "a s64l a",
     exec_st_async64, 0},
    {"red.async.relaxed.cluster{.shared::cluster}" BYTES REDUCTIONS "(.u32|s32|b32)", "a s32 a",
     exec_red_async32, 0},
    {"red.async.relaxed.cluster{.shared::cluster}" BYTES REDUCTIONS "(.u64|s64|b64)", "a s64 a",
     exec_red_async64, 0},
    {0},
};
