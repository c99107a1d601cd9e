// tcgen05.cp, shift, commit and fences, and the issue of tensor core operations.
#include "numerics.h"
#include "tcgen05.h"

// -------------------------------------------------------------------- matrices in shared memory

bool read_matrix(Warp *w, const Insn *I, uint64_t descriptor, const char *name, Matrix *m) {
  *m = matrix_of(descriptor);
  unsigned long long text_of = (unsigned long long)descriptor;
  if ((descriptor >> 46 & 7) != 1)
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "descriptor of %s, 0x%016llx: bits 46 to 48 are %u, they must be 1 on sm_100", name,
            text_of, (unsigned)(descriptor >> 46 & 7));
  if (descriptor >> 53 & 0xFF)
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "descriptor of %s, 0x%016llx: bits 53 to 60 must be 0", name, text_of);
  if (descriptor >> 52 & 1)
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "descriptor of %s, 0x%016llx: an absolute leading dimension (bit 52) is for sm_103a "
            "only", name, text_of);
  if (m->mode == 3 || m->mode == 5 || m->mode == 7) {
    finding(w, I, CK_DESCRIPTOR, SEV_ERROR,
            "descriptor of %s, 0x%016llx: there is no swizzle mode %d", name, text_of, m->mode);
    return false;
  }
  return true;
}

Touched *fetch_begin(const Cta *cta) {
  Touched *touched = scratch(cta->emu, SCRATCH_TOUCHED, sizeof(Touched));
  touched->low = 1 << 14, touched->high = -1;
  touched->bad = false;
  return touched;
}

void fetch_end(Touched *touched, const Access *access, Cta *cta, const char *name) {
  Access plain = *access, *a = &plain;
  a->tensor = 0;  // for shared memory only fences of the asynchronous proxy matter
  if (touched->bad)
    finding(a->warp, a->insn, CK_BOUNDS, SEV_ERROR,
            "%s reaches shared address 0x%x, outside the %u bytes of CTA %u from 0x%x on", name,
            touched->outside, cta->shared_bytes, cta->linear, SHARED_BASE);
  for (int u = touched->low; u <= touched->high; u++) {
    uint64_t rest = touched->bits[u / 64] >> u % 64;
    if (!rest) {
      u |= 63;
      continue;
    }
    u += __builtin_ctzll(rest);
    int end = u;
    while (end <= touched->high && touched->bits[end / 64] >> end % 64 & 1) end++;
    shared_read(a, cta, (uint32_t)u * 16, (uint32_t)(end - u) * 16);
    u = end;
  }
  if (touched->high < 0) return;
  int first = touched->low / 64, last = touched->high / 64;
  memset(&touched->bits[first], 0, sizeof touched->bits[0] * (size_t)(last - first + 1));
}

// -------------------------------------------------------------------------------------- issue

void check_single_thread(Warp *w, const Insn *I, Mask m, const char *what) {
  if (m & (m - 1))
    finding(w, I, CK_TCGEN05, SEV_ERROR,
            "%s executed by %d threads of the warp: each of them issues an operation of its own",
            what, __builtin_popcount(m));
}

AsyncOp *issue_tcgen05(Warp *w, const Insn *I, const char *what, int lane, void *data,
                       void (*run)(AsyncOp *, int)) {
  AsyncOp *op = new_async(w, I, what, AG_TC, ++w->agent_clock[AG_TC]);
  op->access.tensor = 1;
  op->queue = queue_of(w, AG_TC);
  op->stages = 1;
  op->run = run;
  op->data = data;
  w->cta->tmem->warps[w->index].uncommitted |= 1u << lane;
  submit(op);
  return op;
}

// ---------------------------------------------------------------------------------- cp and shift

enum { CP_128x256b = 1, CP_4x256b, CP_128x128b, CP_64x128b_02_13, CP_64x128b_01_23, CP_32x128b };
static const struct { int rows, chunks; } CP_SHAPES[] = {
    [CP_128x256b] = {128, 2}, [CP_4x256b] = {4, 2}, [CP_128x128b] = {128, 1},
    [CP_64x128b_02_13] = {64, 1}, [CP_64x128b_01_23] = {64, 1}, [CP_32x128b] = {32, 1},
};

typedef struct {
  int shape, group, bits;  // bits of the source's elements, if expanded to bytes
  Matrix matrix;
  uint32_t address;
} Copy;

// The lanes to which row `row` is copied. Returns their number.
static int copy_lanes(int shape, int row, int lanes[4]) {
  switch (shape) {
    case CP_4x256b: lanes[0] = 32 * row; return 1;
    case CP_64x128b_02_13: lanes[0] = row, lanes[1] = row + 64; return 2;
    case CP_64x128b_01_23: lanes[0] = row / 32 * 64 + row % 32, lanes[1] = lanes[0] + 32; return 2;
    case CP_32x128b: for (int i = 0; i < 4; i++) lanes[i] = row + 32 * i; return 4;
    default: lanes[0] = row; return 1;
  }
}

static void run_copy(AsyncOp *op, int stage) {
  (void)stage;
  const Copy *c = op->data;
  Cta *ctas[2];
  int n = ctas_of(op->warp, op->insn, c->group, ctas);
  if (!n || !op->cta->tmem) return;
  int rows = CP_SHAPES[c->shape].rows, chunks = CP_SHAPES[c->shape].chunks;
  int base = (int)(c->address >> 16), column = (int)(c->address & 0xFFFF), lanes[4];
  for (int i = 0; i < n; i++) {
    uint8_t data[LANES][32];
    Touched *touched = fetch_begin(ctas[i]);
    for (int r = 0; r < rows; r++) {
      for (int k = 0; k < chunks; k++) {
        const uint8_t *p = fetch(touched, ctas[i], k_major(&c->matrix, r, k));
        uint8_t *to = &data[r][16 * k];
        if (c->bits == 8) {
          memcpy(to, p, 16);
          continue;
        }
        unpack_bits(p, c->bits, to);
        for (int j = 0; j < 16; j++) to[j] = (uint8_t)(to[j] << (6 - c->bits));
      }
    }
    fetch_end(touched, &op->access, ctas[i], "source of tcgen05.cp");
    // Each access covers a whole group of lanes, or one lane for 4x256b.
    bool single = c->shape == CP_4x256b;
    for (int l = 0; l < (single ? 4 : 1); l++) {
      int lane = base + 32 * l, count = single ? 1 : LANES;
      if (!check_block(&op->access, ctas[i], "tcgen05.cp", lane, column, count, 4 * chunks)) return;
      tmem_write(&op->access, ctas[i], lane, column, count, 4 * chunks);
    }
    for (int r = 0; r < rows; r++) {
      int copies = copy_lanes(c->shape, r, lanes);
      for (int k = 0; k < copies; k++)
        memcpy(&ctas[i]->tmem->words[base + lanes[k]][column], data[r], (size_t)chunks * 16);
      op->emu->counters[CT_TMEM_CP] += (uint64_t)chunks * 16;
    }
  }
  progress(op->emu);
}

static int exec_cp(Warp *w, const Insn *I, Mask m) {
  if (!tmem_of(w, I)) return DONE;
  int group = I->mod[0];
  check_group(w, I, group);
  check_single_thread(w, I, m, "tcgen05.cp");
  Cta *ctas[2];
  if (!ctas_of(w, I, group, ctas)) return DONE;
  uint64_t address[32];
  addresses_of(w, I, &I->op[0], m, address);
  const uint64_t *descriptor = SRC64(1);
  FOR_SET(l, m) {
    Copy c = {.shape = I->mod[1], .group = group, .address = (uint32_t)address[l] & 0x3FFFFFFF,
              .bits = I->mod[2] == 1 ? 6 : I->mod[2] == 2 ? 4 : 8};
    if (!read_matrix(w, I, descriptor[l], "the source of tcgen05.cp", &c.matrix)) continue;
    Copy *data = malloc(sizeof c);
    *data = c;
    issue_tcgen05(w, I, "tcgen05.cp", l, data, run_copy);
    stream_event(w, I, STEP_TENSOR, (uint64_t)CP_SHAPES[c.shape].rows * CP_SHAPES[c.shape].chunks * 16,
                 0, other_of_pair(w, group));
  }
  return DONE;
}

typedef struct { int group; uint32_t address; } Shift;

// Rows 1 to 31 of 32 lanes move down by one lane; the last lane keeps its row.
static void run_shift(AsyncOp *op, int stage) {
  (void)stage;
  const Shift *s = op->data;
  Cta *ctas[2];
  int n = ctas_of(op->warp, op->insn, s->group, ctas);
  int lane = (int)(s->address >> 16), column = (int)(s->address & 0xFFFF);
  if (!op->cta->tmem) return;
  for (int i = 0; i < n; i++) {
    if (!check_block(&op->access, ctas[i], "tcgen05.shift", lane, column, 32, 8)) return;
    tmem_read(&op->access, ctas[i], lane, column, 32, 8);
    tmem_write(&op->access, ctas[i], lane, column, 31, 8);
    for (int r = lane; r < lane + 31; r++)
      memcpy(&ctas[i]->tmem->words[r][column], &ctas[i]->tmem->words[r + 1][column], 32);
  }
  progress(op->emu);
}

static int exec_shift(Warp *w, const Insn *I, Mask m) {
  if (!tmem_of(w, I)) return DONE;
  check_group(w, I, I->mod[0]);
  check_single_thread(w, I, m, "tcgen05.shift");
  uint64_t address[32];
  addresses_of(w, I, &I->op[0], m, address);
  FOR_SET(l, m) {
    uint32_t a = (uint32_t)address[l];
    if ((a >> 16) % 32)
      finding(w, I, CK_TMEM, SEV_ERROR, "tcgen05.shift at lane %u, which is not a multiple of 32",
              a >> 16);
    Shift *data = malloc(sizeof *data);
    *data = (Shift){.group = I->mod[0], .address = a & ~(31u << 16)};
    issue_tcgen05(w, I, "tcgen05.shift", l, data, run_shift);
  }
  return DONE;
}

// ------------------------------------------------------------------------------ commit and fences

typedef struct { int count; struct { Cta *cta; uint32_t offset; } barriers[16]; } Commit;

static void run_commit(AsyncOp *op, int stage) {
  (void)stage;
  const Commit *c = op->data;
  for (int i = 0; i < c->count; i++) {
    Cta *cta = c->barriers[i].cta;
    if (!live_cta(cta)) {
      if (cta != op->cta)
        finding(op->warp, op->insn, CK_EXIT, SEV_ERROR,
                "tcgen05.commit signals an mbarrier of CTA rank %d of the cluster, which has "
                "exited", cta->rank);
      continue;
    }
    Mbarrier *b = find_mbarrier(op->warp, op->insn, cta, c->barriers[i].offset);
    if (b)
      mbarrier_async_arrive(op->warp, op->insn, cta, b, 1, &op->view, op->access.agent,
                            op->access.clock, false);
  }
  progress(op->emu);
}

static bool commit_targets(Warp *w, const Insn *I, uint64_t address, bool shared, bool multicast,
                           uint32_t mask, Commit *c) {
  uint32_t offset;
  Cta *cta = any_shared_target(w, address, !shared, &offset);
  if (!cta) {
    finding(w, I, CK_BOUNDS, SEV_ERROR, "0x%llx is not an address in the cluster's shared memory",
            (unsigned long long)address);
    return false;
  }
  c->count = 0;
  if (!multicast) {
    c->barriers[c->count].cta = cta;
    c->barriers[c->count++].offset = offset;
    return true;
  }
  Cluster *cluster = w->cta->cluster;
  for (int i = 0; i < 16; i++) {
    if (!(mask >> i & 1)) continue;
    if (i >= cluster->nctas) {
      finding(w, I, CK_CLUSTER, SEV_ERROR,
              "tcgen05.commit to CTA mask 0x%x in a cluster of %d CTAs", mask, cluster->nctas);
      break;
    }
    c->barriers[c->count].cta = cluster->ctas[i];
    c->barriers[c->count++].offset = offset;
  }
  return true;
}

static int exec_commit(Warp *w, const Insn *I, Mask m) {
  struct Tmem *t = tmem_of(w, I);
  if (!t) return DONE;
  bool multicast = I->mod[2] != 0;
  check_group(w, I, I->mod[0]);
  uint64_t address[32];
  addresses_of(w, I, &I->op[0], m, address);
  if (multicast != (I->op[1].kind != K_NONE)) {
    fatal(w, I, CK_TCGEN05, "tcgen05.commit: a CTA mask goes with .multicast::cluster only");
    return DONE;
  }
  const uint32_t *masks = multicast ? SRC32(1) : NULL;
  FOR_SET(l, m) {
    Mask *uncommitted = &t->warps[w->index].uncommitted;
    if (*uncommitted && !(*uncommitted >> l & 1))
      finding(w, I, CK_TCGEN05, SEV_ERROR,
              "tcgen05.commit by lane %d, which has issued nothing since its last commit, while "
              "lanes 0x%08x have: it tracks the operations of its own thread only", l,
              *uncommitted);
    *uncommitted &= ~(1u << l);
    Commit *c = malloc(sizeof *c);
    if (!commit_targets(w, I, address[l], I->mod[1], multicast, masks ? masks[l] : 0, c)) {
      free(c);
      continue;
    }
    AsyncOp *op = new_async(w, I, "tcgen05.commit", AG_TC, w->agent_clock[AG_TC]);
    op->queue = queue_of(w, AG_TC);
    op->stages = 1;
    op->run = run_commit;
    op->data = c;
    submit(op);
  }
  return DONE;
}

static int exec_fence(Warp *w, const Insn *I, Mask m) {
  (void)m;
  if (!checking(emu_of(w), CK_RACE)) return DONE;
  if (I->mod[0] == 1) tcgen05_fence_before(w);
  else tcgen05_fence_after(w);
  return DONE;
}

int tcgen05_fences(const Program *p, int after) {
  int n = 0;
  for (int i = 0; i < p->ncode; i++)
    n += p->code[i].exec == exec_fence && p->code[i].mod[0] == 1 + after;
  return n;
}

// ----------------------------------------------------------------------------------- forms

static const Form FORMS[] = {
    {"tcgen05.cp" GROUP "(.128x256b|.4x256b|.128x128b|.64x128b.warpx2::02_13|"
     ".64x128b.warpx2::01_23|.32x128b.warpx4){.b8x16.b6x16_p32|.b8x16.b4x16_p64}",
     "a s64", exec_cp, F_UNIFORM | F_EFFECT},
    {"tcgen05.shift" GROUP ".down", "a", exec_shift, F_UNIFORM | F_EFFECT},
    {"tcgen05.commit" GROUP ".mbarrier::arrive::one{.shared::cluster}{.multicast::cluster}.b64",
     "a s32?", exec_commit, F_UNIFORM | F_EFFECT},
    {"tcgen05(.fence::before_thread_sync|.fence::after_thread_sync)", "", exec_fence, 0},
    {0},
};

const Family FAMILY_TCGEN05_COPY = {.name = "tcgen05_copy", .forms = FORMS};
