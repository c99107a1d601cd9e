// Memory: ld, st and ldu in all state spaces, and cache hints.
#include "memory.h"

#define RANK_MASK ((1u << SHARED_RANK_SHIFT) - 1)
#define SECTOR 32
#define BANKS 32

static int first_lane(Mask m) { return __builtin_ctz(m); }
static int lanes_in(Mask m) { return __builtin_popcount(m); }

// ---------------------------------------------------------------------- regions of global memory

// The region that holds an address, or else the nearest region below the address (`*below`).
Region *region_at(Emu *e, uint64_t address, int *below) {
  int latest = e->latest_region;
  if (latest < e->nregions && address - e->regions[latest].base < e->regions[latest].size)
    return &e->regions[latest];
  int low = 0, high = e->nregions;
  while (low < high) {
    int middle = (low + high) / 2;
    if (e->regions[middle].base <= address) low = middle + 1;
    else high = middle;
  }
  if (below) *below = low - 1;
  if (!low || address - e->regions[low - 1].base >= e->regions[low - 1].size) return NULL;
  e->latest_region = low - 1;
  return &e->regions[low - 1];
}

static uint64_t region_end(const Region *r) { return r->base + r->size; }

static bool in_parameters(const Emu *e, uint64_t address, uint64_t bytes) {
  uint64_t size = (uint64_t)e->program->param_bytes, at = address - (uint64_t)e->params;
  return at < size && bytes <= size - at;
}

// Describe an address by the tensor that holds the address, or by the nearest tensor.
static const char *global_place(Emu *e, uint64_t address, uint64_t bytes) {
  typedef unsigned long long ull;
  if ((address & TAG_MASK) == SHARED_TAG) return "a generic address of shared memory";
  if ((address & TAG_MASK) == LOCAL_TAG) return "a generic address of local memory";
  if (address < 65536) return text("a null pointer plus %llu", (ull)address);
  int below = -1;
  const Region *r = region_at(e, address, &below), *above = NULL;
  if (r && address + bytes <= region_end(r))
    return text("%s+%llu", r->name, (ull)(address - r->base));
  if (r)
    return text("%s+%llu, of which the last %llu bytes lie past its end (%llu bytes)", r->name,
                (ull)(address - r->base), (ull)(address + bytes - region_end(r)), (ull)r->size);
  if (below >= 0) r = &e->regions[below];
  if (below + 1 < e->nregions) above = &e->regions[below + 1];
  if (above && (!r || above->base - address < address - region_end(r)))
    return text("%llu bytes before %s (%llu bytes)", (ull)(above->base - address), above->name,
                (ull)above->size);
  if (r && address == region_end(r))
    return text("right at the end of %s (%llu bytes)", r->name, (ull)r->size);
  if (r)
    return text("%llu bytes past the end of %s (%llu bytes)", (ull)(address - region_end(r)),
                r->name, (ull)r->size);
  return "outside of all tensors: the kernel has none";
}

static bool global_legal(Warp *w, const Insn *I, int lane, uint64_t address, uint64_t bytes,
                         uint32_t alignment, bool write) {
  Emu *e = emu_of(w);
  const char *verb = write ? "writes" : "reads", *by = lane < 0 ? "" : text("lane %d ", lane);
  const Region *r = region_at(e, address, NULL);
  bool inside = r ? bytes <= region_end(r) - address : !write && in_parameters(e, address, bytes);
  if (!inside) {
    finding(w, I, CK_BOUNDS, SEV_ERROR, "%s%s %llu bytes of global memory at 0x%llx: %s", by, verb,
            (unsigned long long)bytes, (unsigned long long)address,
            global_place(e, address, bytes));
    return false;
  }
  if (write && !r->writable) {
    finding(w, I, CK_BOUNDS, SEV_ERROR, "%swrites %s, which is read-only", by,
            global_place(e, address, bytes));
    return false;
  }
  if (alignment > 1 && address % alignment) {
    finding(w, I, CK_ALIGNMENT, SEV_ERROR, "%s%s %s at 0x%llx, which is not a multiple of %u", by,
            verb, global_place(e, address, bytes), (unsigned long long)address, alignment);
    return false;
  }
  return true;
}

uint8_t *global_pointer(Warp *w, const Insn *I, uint64_t address, uint64_t bytes,
                        uint32_t alignment, bool write) {
  return global_legal(w, I, -1, address, bytes, alignment, write) ? (uint8_t *)address : NULL;
}

// ------------------------------------------------------------------------------- shared memory

Cta *shared_target(Warp *w, uint32_t address, uint32_t *offset) {
  const Cluster *k = w->cta->cluster;
  uint32_t rank = address >> SHARED_RANK_SHIFT;
  *offset = (address & RANK_MASK) - SHARED_BASE;
  return rank < (uint32_t)k->nctas ? k->ctas[rank] : NULL;
}

static bool shared_legal(Warp *w, const Insn *I, int lane, const Cta *cta, uint32_t offset,
                         uint32_t bytes, uint32_t alignment) {
  const char *by = lane < 0 ? "" : text("lane %d ", lane);
  uint32_t size = cta->shared_bytes;
  if (offset > size || bytes > size - offset) {
    int64_t past = (int64_t)(int32_t)offset + bytes - size;
    finding(w, I, CK_BOUNDS, SEV_ERROR,
            "%saccesses %u bytes at shared address 0x%x: %s the %u bytes of shared memory that "
            "CTA %u has", by, bytes, offset + SHARED_BASE,
            (int32_t)offset < 0 ? "before" : text("%lld bytes past", (long long)past), size,
            cta->linear);
    return false;
  }
  if (alignment > 1 && (offset + SHARED_BASE) % alignment) {
    finding(w, I, CK_ALIGNMENT, SEV_ERROR,
            "%saccesses %u bytes of %s at shared address 0x%x, which is not a multiple of %u", by,
            bytes, address_name(cta, offset), offset + SHARED_BASE, alignment);
    return false;
  }
  return true;
}

// Shared memory of a CTA exists only until the CTA exits.
static void check_alive(Warp *w, const Insn *I, const Cta *cta) {
  if (cta != w->cta && !live_cta(cta))
    finding(w, I, CK_CLUSTER, SEV_ERROR,
            "accesses shared memory of CTA %u (rank %d of the cluster), which has exited: a "
            "cluster barrier before its exit is missing", cta->linear, cta->rank);
}

uint8_t *shared_pointer(Warp *w, const Insn *I, Cta *cta, uint32_t offset, uint32_t bytes,
                        uint32_t alignment) {
  check_alive(w, I, cta);
  return shared_legal(w, I, -1, cta, offset, bytes, alignment) ? cta->shared + offset : NULL;
}

Cta *any_shared_target(Warp *w, uint64_t address, bool generic, uint32_t *offset) {
  if (!generic) return shared_target(w, (uint32_t)address, offset);
  Cta *cta = NULL;
  return classify(w, address, &cta, offset) == SP_SHARED ? cta : NULL;
}

Space classify(Warp *w, uint64_t generic, Cta **cta, uint32_t *offset) {
  switch (generic & TAG_MASK) {
    case SHARED_TAG:
      *cta = shared_target(w, (uint32_t)generic, offset);
      return SP_SHARED;
    case LOCAL_TAG:
      *offset = (uint32_t)generic;
      return SP_LOCAL;
    default: return in_parameters(emu_of(w), generic, 1) ? SP_PARAM : SP_GLOBAL;
  }
}

// ---------------------------------------------------------------- lanes of an access, in batches

static Mask lanes_like(const uint64_t a[32], Mask m, int shift, uint64_t value) {
  Mask same = 0;
  FOR_LANES(l) same |= (Mask)(a[l] >> shift == value) << l;
  return same & m;
}

// The smallest and the largest address, and the bitwise or of all addresses.
typedef struct { uint64_t low, high, bits; } Range;
static Range range_of(const uint64_t a[32]) {
  Range r = {a[0], a[0], 0};
  FOR_LANES(l) {
    r.low = a[l] < r.low ? a[l] : r.low;
    r.high = a[l] > r.high ? a[l] : r.high;
    r.bits |= a[l];
  }
  return r;
}

static void fill(Batch *b, const uint64_t a[32], Mask m, uint64_t minus) {
  uint64_t instead = a[first_lane(m)] - minus;
  FOR_LANES(l) b->at[l] = m >> l & 1 ? a[l] - minus : instead;
  b->m = m;
}

static void keep_only(Batch *b, Mask good) {
  b->m = good;
  if (!good) return;
  uint64_t instead = b->at[first_lane(good)];
  FOR_LANES(l) if (!(good >> l & 1)) b->at[l] = instead;
}

static void batch_global(Cursor *c, Batch *b, Mask lanes) {
  Emu *e = emu_of(c->w);
  *b = (Batch){.space = SP_GLOBAL, .one_region = true};
  fill(b, c->a, lanes, 0);
  Range r = range_of(b->at);
  const Region *region = region_at(e, r.low, NULL);
  if (region && r.high - region->base < region->size && c->bytes <= region_end(region) - r.high &&
      (region->writable || !c->write) && r.bits % c->bytes == 0)
    return;
  b->one_region = false;
  Mask good = 0;
  FOR_SET(l, lanes)
    good |= (Mask)global_legal(c->w, c->I, l, b->at[l], c->bytes, c->bytes, c->write) << l;
  keep_only(b, good);
}

static void batch_shared(Cursor *c, Batch *b, Mask lanes) {
  uint32_t address = (uint32_t)c->a[first_lane(lanes)], offset;
  Cta *cta = shared_target(c->w, address, &offset);
  b->m = 0;
  if (!cta) {
    finding(c->w, c->I, CK_CLUSTER, SEV_ERROR,
            "shared address 0x%x is of rank %u, but the cluster has %d CTAs", address,
            address >> SHARED_RANK_SHIFT, c->w->cta->cluster->nctas);
    return;
  }
  if (c->own_cta && cta != c->w->cta)
    finding(c->w, c->I, CK_CLUSTER, SEV_ERROR,
            "state space .shared::cta, but address 0x%x is in the shared memory of CTA rank %d; "
            "the warp's own is rank %d", address, cta->rank, c->w->cta->rank);
  check_alive(c->w, c->I, cta);
  *b = (Batch){.space = SP_SHARED, .cta = cta, .origin = cta->shared};
  uint64_t high = c->a[first_lane(lanes)] & ~(uint64_t)RANK_MASK;
  fill(b, c->a, lanes, high + SHARED_BASE);
  Range r = range_of(b->at);
  if (r.high < cta->shared_bytes && c->bytes <= cta->shared_bytes - r.high &&
      r.bits % c->bytes == 0)
    return;
  Mask good = 0;
  FOR_SET(l, lanes)
    good |= (Mask)shared_legal(c->w, c->I, l, cta, (uint32_t)b->at[l], c->bytes, c->bytes) << l;
  keep_only(b, good);
}

static void batch_local(Cursor *c, Batch *b, Mask lanes) {
  Warp *w = c->w;
  uint32_t size = (uint32_t)emu_of(w)->program->local_bytes;
  *b = (Batch){.space = SP_LOCAL, .origin = w->local};
  Mask good = 0;
  FOR_SET(l, lanes) {
    uint32_t offset = (uint32_t)c->a[l];
    b->at[l] = offset + (uint64_t)l * size;
    if (offset > size || c->bytes > size - offset)
      finding(w, c->I, CK_BOUNDS, SEV_ERROR,
              "lane %d accesses %u bytes of local memory at %u, but a thread has %u bytes", l,
              c->bytes, offset, size);
    else if (offset % c->bytes)
      finding(w, c->I, CK_ALIGNMENT, SEV_ERROR,
              "lane %d accesses local memory at %u, which is not a multiple of %u", l, offset,
              c->bytes);
    else good |= 1u << l;
  }
  keep_only(b, good);
}

static void batch_parameters(Cursor *c, Batch *b, Mask lanes) {
  const Emu *e = emu_of(c->w);
  *b = (Batch){.space = SP_PARAM};
  fill(b, c->a, lanes, 0);
  Mask good = 0;
  FOR_SET(l, lanes) {
    uint64_t at = b->at[l] - (uint64_t)e->params;
    if (c->write)
      finding(c->w, c->I, CK_BOUNDS, SEV_ERROR, "writes the kernel's parameters");
    else if (!in_parameters(e, b->at[l], c->bytes))
      finding(c->w, c->I, CK_BOUNDS, SEV_ERROR,
              "lane %d reads %u bytes at %lld of the kernel's parameters, which have %d bytes", l,
              c->bytes, (long long)at, e->program->param_bytes);
    else if (at % c->bytes)
      finding(c->w, c->I, CK_ALIGNMENT, SEV_ERROR,
              "lane %d reads parameters at %lld, which is not a multiple of %u", l, (long long)at,
              c->bytes);
    else good |= 1u << l;
  }
  keep_only(b, good);
}

bool next_batch(Cursor *c, Batch *b) {
  while (c->left) {
    uint64_t address = c->a[first_lane(c->left)];
    Space space = c->space;
    Mask lanes = c->left;
    if (space == SP_GENERIC) {
      uint64_t tag = address & TAG_MASK;
      lanes = lanes_like(c->a, lanes, 56, tag >> 56);
      space = tag == SHARED_TAG ? SP_SHARED : tag == LOCAL_TAG ? SP_LOCAL : SP_GLOBAL;
    }
    if (space == SP_SHARED)
      lanes = lanes_like(c->a, lanes, SHARED_RANK_SHIFT, address >> SHARED_RANK_SHIFT);
    switch (space) {
      case SP_SHARED: batch_shared(c, b, lanes); break;
      case SP_LOCAL: batch_local(c, b, lanes); break;
      case SP_PARAM: batch_parameters(c, b, lanes); break;
      default: batch_global(c, b, lanes);
    }
    c->left &= ~lanes;
    c->dropped |= lanes & ~b->m;
    if (b->m) return true;
  }
  return false;
}

// The memory of an address operand of ld.param and st.param: the kernel's parameters, or a call's
// parameters, which are in local memory.
static Space parameter_space(Warp *w, const Operand *o, uint64_t address) {
  if (o->sub == K_LOCAL_SYM) return SP_LOCAL;
  if (o->sub == K_REG && address < (uint64_t)emu_of(w)->program->local_bytes) return SP_LOCAL;
  return SP_PARAM;
}

void start_access(Cursor *c, Warp *w, const Insn *I, const Operand *address, Mask m,
                  Space space, uint32_t bytes, bool write) {
  c->w = w, c->I = I, c->space = space, c->left = m, c->dropped = 0;
  c->bytes = bytes, c->write = write, c->own_cta = false;
  addresses_of(w, I, address, m, c->a);
  if (I->flags & F_PROPAGATE && address->sub == K_REG && m & ~w->defined[address->id])
    undefined_read(w, I, address, m & ~w->defined[address->id]);  // F_PROPAGATE is for the data
  if (space == SP_SHARED) FOR_LANES(l) c->a[l] = (uint32_t)c->a[l];
  if (space == SP_PARAM) c->space = parameter_space(w, address, c->a[first_lane(m)]);
  if (space == SP_CONST) c->space = SP_GLOBAL;
}

// --------------------------------------------------------------------------- checks and counters

// The runs of bytes that the lanes access, in ascending order and without overlaps.
typedef struct {
  int count, distinct;  // runs; different addresses
  struct { uint64_t start, bytes; } run[32];
} Runs;

static int sorted(uint64_t out[32], const Batch *b) {
  int n = 0;
  FOR_SET(l, b->m) {
    int i = n++;
    for (; i > 0 && out[i - 1] > b->at[l]; i--) out[i] = out[i - 1];
    out[i] = b->at[l];
  }
  return n;
}

static void find_runs(Runs *r, const Batch *b, uint32_t bytes) {
  uint64_t a[32];
  int n = sorted(a, b);
  r->count = r->distinct = 0;
  for (int i = 0; i < n; i++) {
    if (i && a[i] == a[i - 1]) continue;
    r->distinct++;
    int last = r->count - 1;
    bool joins = i && a[i] == r->run[last].start + r->run[last].bytes;
    if (joins && (b->space == SP_SHARED || b->one_region)) {
      r->run[last].bytes += bytes;
    } else {
      r->run[r->count].start = a[i];
      r->run[r->count++].bytes = bytes;
    }
  }
}

// Shared memory serves 32 words of different banks at a time; accesses of 8 and 16 bytes per lane
// are split into half and quarter warps.
static void count_banks(Emu *e, const Batch *b, uint32_t bytes) {
  int lanes = bytes <= 4 ? 32 : 128 / (int)bytes, words = bytes <= 4 ? 1 : (int)bytes / 4;
  for (int group = 0; group < 32; group += lanes) {
    uint32_t word[BANKS][32];
    int used[BANKS] = {0}, most = 0;
    for (int l = group; l < group + lanes; l++) {
      if (!(b->m >> l & 1)) continue;
      for (int k = 0; k < words; k++) {
        uint32_t at = (uint32_t)(b->at[l] / 4) + (uint32_t)k, bank = at % BANKS;
        int i = 0;
        while (i < used[bank] && word[bank][i] != at) i++;
        if (i < used[bank]) continue;
        word[bank][used[bank]++] = at;
        most = used[bank] > most ? used[bank] : most;
      }
    }
    e->counters[CT_BANK_WAVEFRONTS] += (uint64_t)most;
    e->counters[CT_BANK_IDEAL] += most > 0;
  }
}

static void count_sectors(Emu *e, const Runs *r, uint32_t bytes) {
  if (r->count) e->latest_address = r->run[0].start;
  uint64_t next = 0;
  for (int i = 0; i < r->count; i++) {
    uint64_t from = r->run[i].start / SECTOR;
    uint64_t past = (r->run[i].start + r->run[i].bytes + SECTOR - 1) / SECTOR;
    if (from < next) from = next;
    e->counters[CT_GLOBAL_SECTORS] += past - from;
    next = past;
  }
  e->counters[CT_GLOBAL_IDEAL] += ((uint64_t)r->distinct * bytes + SECTOR - 1) / SECTOR;
}

static void count_bytes(Warp *w, const Batch *b, uint32_t bytes, int global, int shared) {
  uint64_t total = (uint64_t)lanes_in(b->m) * bytes;
  uint64_t *counters = emu_of(w)->counters;
  switch (b->space) {
    case SP_GLOBAL: counters[global] += total; break;
    case SP_SHARED: counters[b->cta == w->cta ? shared : CT_DSMEM] += total; break;
    case SP_LOCAL: counters[CT_LOCAL] += total; break;
    default: break;
  }
}

// A barrier object is opaque, so a store over a barrier object corrupts the barrier.
static void check_barriers(Warp *w, const Insn *I, const Cta *cta, uint64_t start, uint64_t bytes) {
  for (uint64_t i = start / 8; i <= (start + bytes - 1) / 8; i++) {
    if (cta->mbarrier_at[i] < 0 || !cta->mbarriers[cta->mbarrier_at[i]].valid) continue;
    finding(w, I, CK_BARRIER, SEV_ERROR,
            "overwrites the mbarrier %s of CTA %u, which is in use (mbarrier.inval it first)",
            address_name(cta, (uint32_t)i * 8), cta->linear);
    return;
  }
}

// Lanes that store different values to one address: which value stays is unspecified.
static void check_conflicts(Warp *w, const Insn *I, const Batch *b, const uint8_t *values,
                            uint32_t bytes) {
  FOR_SET(l, b->m)
    for (int k = 0; k < l; k++) {
      if (!(b->m >> k & 1) || b->at[k] != b->at[l]) continue;
      if (!memcmp(values + k * MAX_ACCESS, values + l * MAX_ACCESS, bytes)) continue;
      finding(w, I, CK_RACE, SEV_ERROR,
              "lanes %d and %d store different values to the same address, %s; which of them stays "
              "is not defined", k, l,
              b->space == SP_SHARED ? address_name(b->cta, (uint32_t)b->at[l])
                                    : global_place(emu_of(w), b->at[l], bytes));
      return;
    }
}

static bool all_written(Emu *e, const Batch *b, uint64_t start, uint64_t bytes) {
  if (b->space == SP_SHARED) return !memchr(b->cta->shared_init + start, 0, bytes);
  const Region *r = region_at(e, start, NULL);
  return !r || !r->initialised || !memchr(r->initialised + (start - r->base), 0, bytes);
}

int announce(Warp *w, const Insn *I, const Batch *b, uint32_t bytes, int kind,
                    const Access *access) {
  Emu *e = emu_of(w);
  const uint64_t wanted = 1ull << CK_RACE | 1ull << CK_PROXY | 1ull << CK_UNINITIALISED |
                          1ull << CK_COUNTERS | 1ull << CK_BARRIER;
  if (b->space != SP_GLOBAL && b->space != SP_SHARED) return 0;
  if (!(e->checks & wanted)) {  // later launches need to know which bytes are written
    if (b->space == SP_GLOBAL && kind & WRITES)
      FOR_SET(l, b->m) global_write(access, host_of(b, l), bytes);
    return 0;
  }
  if (b->space == SP_SHARED && b->cta == w->cta && !access->atomic)
    lanes_access(w, I, b->m, b->at, bytes, kind & WRITES, false);
  Runs r;
  find_runs(&r, b, bytes);
  for (int i = 0; i < r.count; i++) {
    uint64_t at = r.run[i].start, n = r.run[i].bytes;
    bool reads = kind == READS || (kind & READS && !all_written(e, b, at, n));
    if (b->space == SP_SHARED) {
      if (reads) shared_read(access, b->cta, (uint32_t)at, (uint32_t)n);
      if (kind & WRITES) {
        if (b->cta->nmbarriers) check_barriers(w, I, b->cta, at, n);
        shared_write(access, b->cta, (uint32_t)at, (uint32_t)n);
      }
    } else {
      if (reads) global_read(access, (void *)at, n);
      if (kind & WRITES) global_write(access, (void *)at, n);
    }
  }
  if (checking(e, CK_COUNTERS)) {
    if (b->space == SP_SHARED) count_banks(e, b, bytes);
    else count_sectors(e, &r, bytes);
  }
  return r.distinct;
}

void synchronise(Warp *w, const Batch *b, int order,
                        void (*with)(Warp *, const void *, int)) {
  if (b->space != SP_GLOBAL && b->space != SP_SHARED) return;
  const uint8_t *last = NULL;
  FOR_SET(l, b->m) {
    if (host_of(b, l) != last) with(w, host_of(b, l), order);
    last = host_of(b, l);
  }
}

// ---------------------------------------------------------------------------------- operands

#define TYPES "(.b8|b16|b32|b64|b128|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64)"
static const Type TYPE[] = {{1, 0}, {2, 0}, {4, 0}, {8, 0}, {16, 0}, {1, 0}, {2, 0}, {4, 0},
                            {8, 0}, {1, 1}, {2, 1}, {4, 1}, {8, 1}, {4, 0}, {8, 0}};

Values values_of(Warp *w, const Insn *I, const Operand *o, Mask m, uint32_t bytes,
                        uint64_t buffer[64]) {
  if (o->kind == K_REG && o->bits >= 8 * bytes) {
    check_read(w, I, o, m);
    int stride = o->bits == 128 ? 16 : o->bits == 64 ? 8 : 4;
    return (Values){(const uint8_t *)(w->regs + o->reg), stride};
  }
  uint64_t low[32];
  const uint64_t *v = src64_of(w, I, o, m, low);
  int stride = bytes == 16 ? 16 : 8;
  FOR_LANES(l) {
    if (stride == 16) buffer[2 * l] = v[l], buffer[2 * l + 1] = 0;
    else buffer[l] = v[l];
  }
  return (Values){(const uint8_t *)buffer, stride};
}

#define FETCH(type) ({ type v_; memcpy(&v_, origin + at[l], sizeof v_); v_; })

void put_from(Warp *w, const Insn *I, const Operand *o, Mask m, Type t,
                     const uint8_t *origin, const uint64_t at[32]) {
  if (o->kind != K_REG) return;
  if (t.bytes == 16) {
    note_write(w, I, o, m);
    FOR_SET(l, m) memcpy(reg128(w, o) + 4 * l, origin + at[l], o->bits / 8);
    return;
  }
  if (t.bytes == 8 || (t.is_signed && o->bits == 64)) {
    uint64_t v[32];
    switch (t.bytes) {
      case 8: FOR_LANES(l) v[l] = FETCH(uint64_t); break;
      case 4: FOR_LANES(l) v[l] = (uint64_t)FETCH(int32_t); break;
      case 2: FOR_LANES(l) v[l] = (uint64_t)FETCH(int16_t); break;
      default: FOR_LANES(l) v[l] = (uint64_t)FETCH(int8_t);
    }
    put64_of(w, I, o, m, v);
    return;
  }
  uint32_t v[32];
  switch (t.bytes) {
    case 4: FOR_LANES(l) v[l] = FETCH(uint32_t); break;
    case 2: FOR_LANES(l) v[l] = t.is_signed ? (uint32_t)FETCH(int16_t) : FETCH(uint16_t); break;
    default: FOR_LANES(l) v[l] = t.is_signed ? (uint32_t)FETCH(int8_t) : FETCH(uint8_t);
  }
  if (o->bits < 32) FOR_LANES(l) v[l] &= (1u << o->bits) - 1;
  put32_of(w, I, o, m, v);
}

static void put_zero(Warp *w, const Insn *I, const Operand *o, Mask m, Type t) {
  static const uint8_t zeros[16];
  static const uint64_t at[32];
  put_from(w, I, o, m, t, zeros, at);
}

int elements_of(Warp *w, const Insn *I, const Operand *o, Space space, int vector, Type t) {
  int n = vector ? 1 << vector : 1;
  if (count_of(o) == n || (n == 1 && o->kind == K_NONE)) {
    if (n * t.bytes <= (space == SP_GLOBAL ? MAX_ACCESS : MAX_ACCESS / 2)) return n;
    fatal(w, I, CK_BOUNDS, "%d elements of %d bytes are wider than any access", n, t.bytes);
  } else {
    fatal(w, I, CK_BOUNDS, "a vector of %d elements, but %d registers are given", n, count_of(o));
  }
  return 0;
}

// ---------------------------------------------------------------------------------- ld and ldu

// Modifiers: semantics and scope, state space, cache operator, .nc, L1 and L2 priorities, cache
// hint, prefetch size, vector, type.
#define PRIORITIES                                                                           \
  "{.L1::evict_normal|L1::evict_unchanged|L1::evict_first|L1::evict_last|L1::no_allocate}" \
  "{.L2::evict_normal|L2::evict_first|L2::evict_last}"
#define LD_SEMANTICS                                                            \
  "{.weak|volatile|relaxed.cta|relaxed.cluster|relaxed.gpu|relaxed.sys"         \
  "|acquire.cta|acquire.cluster|acquire.gpu|acquire.sys|mmio.relaxed.sys}"
#define LD_CACHE "{.ca|cg|cs|lu|cv}{.nc}" PRIORITIES "{.L2::cache_hint}{.L2::64B|L2::128B|L2::256B}"
#define VECTOR "{.v2|v4|v8}"
enum { LD_SEM, LD_SPACE, LD_VECTOR = 8, LD_TYPE };
enum { SEM_WEAK = 1, SEM_RELAXED = 3, SEM_ORDERED = 7, SEM_MMIO = 11 };

static bool is_strong(int semantics) { return semantics > SEM_WEAK; }
static bool is_ordered(int semantics) { return semantics >= SEM_ORDERED && semantics < SEM_MMIO; }

// Lanes that load unwritten bytes. Their registers become undefined. A finding follows once
// anything depends on these registers.
static Mask undefined_lanes(Warp *w, const Batch *b, uint32_t at, uint32_t bytes) {
  const uint8_t *written = b->space == SP_LOCAL ? w->local_init : b->cta->shared_init;
  Mask bad = 0;
  FOR_SET(l, b->m)
    if (memchr(written + b->at[l] + at, 0, bytes)) bad |= 1u << l;
  return bad;
}

// The lanes among these that load a chosen value (Warp.chosen).
static Mask chosen_lanes(const Batch *b, uint32_t at, uint32_t bytes) {
  if (b->space != SP_SHARED || !b->cta->shared_chosen) return 0;
  Mask chosen = b->m;
  FOR_SET(l, b->m)
    for (uint32_t i = b->at[l] + at; i < b->at[l] + at + bytes; i++)
      if (!b->cta->shared_init[i] && !b->cta->shared_chosen[i]) chosen &= ~(1u << l);
  return chosen;
}

static int load(Warp *w, const Insn *I, Mask m, Space space, int semantics, int vector, Type t) {
  int n = elements_of(w, I, &I->op[0], space, vector, t);
  if (!n) return DONE;
  const Operand *d = list_of(w, &I->op[0]);
  uint32_t bytes = (uint32_t)n * t.bytes;
  Cursor c;
  Batch b;
  start_access(&c, w, I, &I->op[1], m, space, bytes, false);
  c.own_cta = space == SP_SHARED && I->mod[LD_SPACE] < 3;
  read_policy(w, I, &I->op[2], m);
  while (next_batch(&c, &b)) {
    Access access = access_of(w, I, "load");
    access.atomic = is_strong(semantics);
    access.lazy = true;
    announce(w, I, &b, bytes, READS, &access);
    count_bytes(w, &b, bytes, CT_GLOBAL_LOAD, CT_SHARED_LOAD);
    for (int k = 0; k < n; k++) {
      uint32_t at = (uint32_t)k * t.bytes;
      put_from(w, I, &d[k], b.m, t, b.origin + at, b.at);
      if ((b.space != SP_LOCAL && b.space != SP_SHARED) || !checking(emu_of(w), CK_UNINITIALISED))
        continue;
      w->taint_origin = (int32_t)(I - emu_of(w)->program->code);
      Mask undefined = undefined_lanes(w, &b, at, t.bytes);
      set_chosen(w, &d[k], b.m, ~undefined, undefined ? chosen_lanes(&b, at, t.bytes) : 0);
    }
    if (is_strong(semantics)) synchronise(w, &b, is_ordered(semantics) ? 1 : 0, sync_read);
  }
  if (c.dropped)
    for (int k = 0; k < n; k++) put_zero(w, I, &d[k], c.dropped, t);
  return DONE;
}

// Generic forms have no modifier for the space, so that later modifiers come one place earlier.
#define NO_SPACE(space) ((space) == SP_GENERIC)
#define LOAD(name, space)                                                       \
  static int name(Warp *w, const Insn *I, Mask m) {                             \
    const int16_t *mod = I->mod - NO_SPACE(space);                              \
    return load(w, I, m, space, I->mod[LD_SEM], mod[LD_VECTOR], TYPE[mod[LD_TYPE] - 1]); \
  }
LOAD(exec_ld_generic, SP_GENERIC)
LOAD(exec_ld_global, SP_GLOBAL)
LOAD(exec_ld_shared, SP_SHARED)
LOAD(exec_ld_local, SP_LOCAL)
LOAD(exec_ld_param, SP_PARAM)
LOAD(exec_ld_const, SP_CONST)

// ldu: space, vector, type.
static int exec_ldu(Warp *w, const Insn *I, Mask m) {
  return load(w, I, m, I->mod[0] ? SP_GLOBAL : SP_GENERIC, 0, I->mod[1], TYPE[I->mod[2] - 1]);
}

// ------------------------------------------------------------------------------------------ st

#define ST_SEMANTICS                                                            \
  "{.weak|volatile|relaxed.cta|relaxed.cluster|relaxed.gpu|relaxed.sys"         \
  "|release.cta|release.cluster|release.gpu|release.sys|mmio.relaxed.sys}"
#define ST_CACHE "{.wb|cg|cs|wt}" PRIORITIES "{.L2::cache_hint}"
enum { ST_SEM, ST_SPACE, ST_VECTOR = 6, ST_TYPE };

static void store_element(const Batch *b, uint32_t at, Values v, uint32_t bytes) {
  uint8_t *origin = b->origin + at;
  switch (bytes) {
    case 4: FOR_SET(l, b->m) memcpy(origin + b->at[l], v.data + l * v.stride, 4); break;
    case 8: FOR_SET(l, b->m) memcpy(origin + b->at[l], v.data + l * v.stride, 8); break;
    default: FOR_SET(l, b->m) memcpy(origin + b->at[l], v.data + l * v.stride, bytes);
  }
}

static void gather(uint8_t *out, Mask m, const Values *v, int n, uint32_t bytes) {
  FOR_SET(l, m)
    for (int k = 0; k < n; k++)
      memcpy(out + l * MAX_ACCESS + (uint32_t)k * bytes, v[k].data + l * v[k].stride, bytes);
}

// The data that a batch of a store writes.
typedef struct { const Batch *batch; const Values *values; int n; uint32_t bytes; } Stored;

static bool already_there(const void *data, const uint8_t *word) {
  const Stored *s = data;
  FOR_SET(l, s->batch->m)
    for (int k = 0; k < s->n; k++) {
      const uint8_t *at = host_of(s->batch, l) + (uint32_t)k * s->bytes;
      if (at < word + 4 && word < at + s->bytes &&
          memcmp(at, s->values[k].data + l * s->values[k].stride, s->bytes))
        return false;
    }
  return true;
}

void make_undefined(Cta *cta, uint32_t offset, uint32_t bytes, bool chosen) {
  if (!cta->shared_chosen) cta->shared_chosen = calloc(cta->shared_bytes, 1);
  memset(cta->shared_init + offset, 0, bytes);
  memset(cta->shared_chosen + offset, chosen, bytes);
}

// Local and shared memory that undecided lanes (Warp.undecided) store to becomes undefined later; a
// store to other memory is an error.
static void note_undecided(Warp *w, const Insn *I, const Batch *b, uint32_t bytes) {
  Mask lanes = w->undecided & b->m;
  if (b->space == SP_LOCAL || b->space == SP_SHARED) {
    Cta *cta = b->space == SP_SHARED ? b->cta : NULL;
    FOR_SET(l, lanes) branches_wrote(w, l, cta, (uint32_t)b->at[l], bytes);
  } else if (lanes) {
    report_undecided(w, I, lanes);
  }
}

// Storing undefined values makes local and shared memory undefined; in other memory it is an error.
static void note_definedness(Warp *w, const Insn *I, const Batch *b, const Operand *value,
                             uint32_t at, uint32_t bytes) {
  Mask defined = I->flags & F_PROPAGATE ? defined_in(w, value) : ALL_LANES;
  if (b->space == SP_LOCAL) {
    FOR_SET(l, b->m) memset(w->local_init + b->at[l] + at, defined >> l & 1, bytes);
  } else if (b->m & ~defined) {
    if (b->space != SP_SHARED) {
      undefined_read(w, I, value, b->m & ~defined);
      return;
    }
    Mask chosen = chosen_in(w, value);
    FOR_SET(l, b->m & ~defined)
      make_undefined(b->cta, (uint32_t)b->at[l] + at, bytes, chosen >> l & 1);
  }
}

static int store_as(Warp *w, const Insn *I, Mask m, Space space, int semantics, int vector,
                    Type t) {
  int n = elements_of(w, I, &I->op[1], space, vector, t);
  if (!n) return DONE;
  const Operand *s = list_of(w, &I->op[1]);
  uint32_t bytes = (uint32_t)n * t.bytes;
  Values v[8];
  uint64_t buffers[8][64];
  for (int k = 0; k < n; k++) v[k] = values_of(w, I, &s[k], m, t.bytes, buffers[k]);
  Cursor c;
  Batch b;
  start_access(&c, w, I, &I->op[0], m, space, bytes, true);
  c.own_cta = space == SP_SHARED && I->mod[ST_SPACE] < 3;
  read_policy(w, I, &I->op[2], m);
  while (next_batch(&c, &b)) {
    Access access = access_of(w, I, "store");
    access.atomic = is_strong(semantics);
    access.unchanged = already_there;
    access.data = &(Stored){&b, v, n, t.bytes};
    int distinct = announce(w, I, &b, bytes, WRITES, &access);
    if (distinct && distinct < lanes_in(b.m) && !access.atomic && checking(emu_of(w), CK_RACE)) {
      uint8_t all[32 * MAX_ACCESS];
      gather(all, b.m, v, n, t.bytes);
      check_conflicts(w, I, &b, all, bytes);
    }
    count_bytes(w, &b, bytes, CT_GLOBAL_STORE, CT_SHARED_STORE);
    if (is_strong(semantics)) synchronise(w, &b, is_ordered(semantics) ? 2 : 0, sync_write);
    if (__builtin_expect(w->undecided != 0, 0)) note_undecided(w, I, &b, bytes);
    for (int k = 0; k < n; k++) {
      uint32_t at = (uint32_t)k * t.bytes;
      store_element(&b, at, v[k], t.bytes);
      note_definedness(w, I, &b, &s[k], at, t.bytes);
    }
    if (b.space != SP_LOCAL) progress(emu_of(w));
  }
  return DONE;
}

static int store(Warp *w, const Insn *I, Mask m, Space space) {
  const int16_t *mod = I->mod - NO_SPACE(space);
  return store_as(w, I, m, space, I->mod[ST_SEM], mod[ST_VECTOR], TYPE[mod[ST_TYPE] - 1]);
}

// st.async to global memory is a release. The store may take effect at any later time; in the
// emulator it takes effect at once.
static int exec_st_async_release(Warp *w, const Insn *I, Mask m) {
  static const uint8_t bytes[] = {2, 4, 8, 2, 4, 8, 2, 4, 8, 4, 8};
  Type t = {bytes[I->mod[3] - 1], false};
  return store_as(w, I, m, I->mod[2] ? SP_GLOBAL : SP_GENERIC, SEM_ORDERED, 0, t);
}

#define STORE(name, space)                                                      \
  static int name(Warp *w, const Insn *I, Mask m) { return store(w, I, m, space); }
STORE(exec_st_generic, SP_GENERIC)
STORE(exec_st_global, SP_GLOBAL)
STORE(exec_st_shared, SP_SHARED)
STORE(exec_st_local, SP_LOCAL)
STORE(exec_st_param, SP_PARAM)

// st.bulk: zeros over a range of shared memory.
static int exec_st_bulk(Warp *w, const Insn *I, Mask m) {
  const uint64_t *size = SRC64(1);
  uint64_t a[32];
  addresses_of(w, I, &I->op[0], m, a);
  FOR_SET(l, m) {
    uint32_t offset;
    Cta *cta = any_shared_target(w, a[l], !I->mod[1], &offset);
    if (!cta) {
      finding(w, I, CK_BOUNDS, SEV_ERROR, "lane %d: 0x%llx is not in shared memory", l,
              (unsigned long long)a[l]);
      continue;
    }
    if (size[l] % 8 || size[l] > 1u << 24) {
      finding(w, I, CK_BOUNDS, SEV_ERROR, "lane %d: %llu bytes, which is not a multiple of 8 up to "
              "16 MiB", l, (unsigned long long)size[l]);
      continue;
    }
    uint32_t bytes = (uint32_t)size[l];
    uint8_t *p = shared_pointer(w, I, cta, offset, bytes, 8);
    if (!p || !bytes) continue;
    Access access = access_of(w, I, "bulk store");
    if (cta->nmbarriers) check_barriers(w, I, cta, offset, bytes);
    shared_write(&access, cta, offset, bytes);
    memset(p, 0, bytes);
    emu_of(w)->counters[cta == w->cta ? CT_SHARED_STORE : CT_DSMEM] += bytes;
    progress(emu_of(w));
  }
  return DONE;
}

// ------------------------------------------------------------------------------------- caches

// Hints have no effect; only their address has to be defined.
static int exec_hint(Warp *w, const Insn *I, Mask m) {
  uint64_t a[32];
  addresses_of(w, I, &I->op[0], m, a);
  return DONE;
}

#define LINE 128

static int exec_applypriority(Warp *w, const Insn *I, Mask m) {
  uint64_t a[32];
  addresses_of(w, I, &I->op[0], m, a);
  FOR_SET(l, m) global_legal(w, I, l, a[l], LINE, LINE, false);
  return DONE;
}

// The contents of discarded lines are undefined until they are written again.
static int exec_discard(Warp *w, const Insn *I, Mask m) {
  Emu *e = emu_of(w);
  uint64_t a[32];
  addresses_of(w, I, &I->op[0], m, a);
  FOR_SET(l, m) {
    if (!global_legal(w, I, l, a[l], LINE, LINE, true)) continue;
    Access access = access_of(w, I, "discard");
    global_write(&access, (void *)a[l], LINE);
    Region *r = region_at(e, a[l], NULL);
    if (!r->initialised) {
      r->initialised = malloc(r->size);
      memset(r->initialised, 1, r->size);
    }
    memset(r->initialised + (a[l] - r->base), 0, LINE);
  }
  return DONE;
}

// A policy's bits are opaque; here they hold the primary priority.
static int put_policy(Warp *w, const Insn *I, Mask m, int primary) {
  uint64_t r[32];
  FOR_LANES(l) r[l] = 0x10F0000000000000ull | (uint64_t)primary << 57;
  PUT64(0, r);
  return DONE;
}

static int exec_policy_fractional(Warp *w, const Insn *I, Mask m) {
  return put_policy(w, I, m, I->mod[0]);
}

static int exec_policy_range(Warp *w, const Insn *I, Mask m) {
  uint64_t a[32];
  addresses_of(w, I, &I->op[1], m, a);
  (void)SRC32(2), (void)SRC32(3);
  return put_policy(w, I, m, I->mod[1]);
}

static int exec_policy_cvt(Warp *w, const Insn *I, Mask m) {
  (void)SRC64(1);
  return put_policy(w, I, m, 0);
}

// ---------------------------------------------------------------------------------------- forms

#define LD(semantics, space, handler) \
  {"ld" semantics space LD_CACHE VECTOR TYPES, "dxl a s64?", handler, 0}
#define ST(semantics, space, handler, flags) \
  {"st" semantics space ST_CACHE VECTOR TYPES, "a sxl s64?", handler, flags}
#define PRIMARY "(.L2::evict_last|L2::evict_normal|L2::evict_first|L2::evict_unchanged)"
#define SECONDARY "{.L2::evict_first|L2::evict_unchanged}"

static const Form FORMS[] = {
    LD(LD_SEMANTICS, "", exec_ld_generic),
    LD(LD_SEMANTICS, "(.global)", exec_ld_global),
    LD(LD_SEMANTICS, "(.shared|shared::cta|shared::cluster)", exec_ld_shared),
    LD("{.weak}", "(.local)", exec_ld_local),
    LD("{.weak}", "(.param|param::entry|param::func)", exec_ld_param),
    LD("{.weak}", "(.const)", exec_ld_const),
    {"ldu{.global}" VECTOR TYPES, "dxl a s64?", exec_ldu, 0},  // load() needs the policy operand

    ST(ST_SEMANTICS, "", exec_st_generic, F_PROPAGATE),
    ST(ST_SEMANTICS, "(.global)", exec_st_global, F_EFFECT),
    ST(ST_SEMANTICS, "(.shared|shared::cta|shared::cluster)", exec_st_shared, F_PROPAGATE),
    ST("{.weak}", "(.local)", exec_st_local, F_PROPAGATE),
    ST("{.weak}", "(.param|param::func)", exec_st_param, F_PROPAGATE),
    {"st.bulk{.weak}{.shared::cta}", "a s64 i", exec_st_bulk, F_EFFECT},
    {"st.async" ASYNC_RELEASE "(.b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64)", "a sx",
     exec_st_async_release, F_EFFECT},
    {"prefetch{.global|local}(.L1|L2)", "a", exec_hint, 0},
    {"prefetch{.global}(.L2::evict_last|L2::evict_normal)", "a", exec_hint, 0},
    {"prefetchu.L1", "a", exec_hint, 0},
    {"applypriority{.global}.L2::evict_normal", "a i", exec_applypriority, 0},
    {"discard{.global}.L2", "a i", exec_discard, F_EFFECT},
    {"createpolicy.fractional" PRIMARY SECONDARY ".b64", "d64 s32?", exec_policy_fractional, 0},
    {"createpolicy.range{.global}" PRIMARY SECONDARY ".b64", "d64 a s32 s32", exec_policy_range, 0},
    {"createpolicy.cvt.L2.b64", "d64 s64", exec_policy_cvt, 0},
    {0},
};

const Family FAMILY_MEMORY = {.name = "memory", .forms = FORMS};
