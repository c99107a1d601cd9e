// Programs (packed by lowering.py), the table of all forms, and the names of all enumerations.
#include "core.h"

// ------------------------------------------------------------------------------------- names

static const char *const CHECK_NAMES[CK_COUNT + 1] = {
    "deadlock", "race", "proxy-fence", "tcgen05-sync", "uninitialised", "out-of-bounds",
    "misaligned", "descriptor", "barrier", "tmem", "exit", "registers", "warp-sync", "wgmma",
    "cluster", "assert", "counters", NULL};
static const char *const COUNTER_NAMES[CT_COUNT + 1] = {
    "global_load_bytes", "global_store_bytes", "shared_load_bytes", "shared_store_bytes",
    "local_bytes", "cp_async_bytes", "tma_load_bytes", "tma_store_bytes", "tma_reduce_bytes",
    "bulk_bytes", "dsmem_bytes", "tmem_load_bytes", "tmem_store_bytes", "tmem_copy_bytes",
    "atomic_bytes", "shared_wavefronts", "shared_wavefronts_ideal", "global_sectors",
    "global_sectors_ideal", "mma_sync_flops", "wgmma_flops", "tcgen05_flops", "async_operations",
    "barrier_phases", NULL};
static const char *const SPECIAL_NAMES[SR_COUNT + 1] = {
    "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y",
    "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%clusterid.x", "%clusterid.y",
    "%clusterid.z", "%nclusterid.x", "%nclusterid.y", "%nclusterid.z", "%cluster_ctaid.x",
    "%cluster_ctaid.y", "%cluster_ctaid.z", "%cluster_nctaid.x", "%cluster_nctaid.y",
    "%cluster_nctaid.z", "%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster",
    "%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid", "%lanemask_eq",
    "%lanemask_le", "%lanemask_lt", "%lanemask_ge", "%lanemask_gt", "%clock", "%clock_hi",
    "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi", "%dynamic_smem_size",
    "%total_smem_size", "%aggr_smem_size", NULL};

const char *emu_check_name(int i) { return i < CK_COUNT ? CHECK_NAMES[i] : NULL; }
const char *emu_counter_name(int i) { return i < CT_COUNT ? COUNTER_NAMES[i] : NULL; }
const char *emu_special_register_name(int i) { return i < SR_COUNT ? SPECIAL_NAMES[i] : NULL; }

static const Form *form_at(int i, const char **family) {
  for (const Family *const *f = FAMILIES; *f; f++)
    for (const Form *form = (*f)->forms; form->pattern; form++)
      if (i-- == 0) {
        if (family) *family = (*f)->name;
        return form;
      }
  return NULL;
}

int emu_form_count(void) {
  int n = 0;
  for (const Family *const *f = FAMILIES; *f; f++)
    for (const Form *form = (*f)->forms; form->pattern; form++) n++;
  return n;
}
const char *emu_form_pattern(int i) { return form_at(i, NULL)->pattern; }
const char *emu_form_operands(int i) { return form_at(i, NULL)->operands; }
int emu_form_flags(int i) { return (int)form_at(i, NULL)->flags; }
const char *emu_form_family(int i) {
  const char *family = NULL;
  form_at(i, &family);
  return family;
}

// ----------------------------------------------------------------------------------- program

typedef struct {
  int32_t form, guard, guard_id, guard_neg, op_begin, nops, line, file, source_line, opcode;
  int16_t mod[12];
} InsnRecord;

typedef struct {
  int32_t nregs, reg_words, local_bytes, param_bytes, static_shared, reqntid, maxnreg, arch;
  int32_t launch_registers, keeps_registers;
} ProgramHeader;

// The number of entries of Insn.op for a form's destinations; destinations come first.
static uint8_t destinations(const Form *form) {
  uint8_t n = 0;
  for (const char *token = form->operands; *token == 'd';) {
    size_t length = strcspn(token, " ");
    n += length > 2 && token[length - 1] == 'p' ? 2 : 1;  // "d32p", "dpp": a pair
    token += length + strspn(token + length, " ");
  }
  return n;
}

static bool is_arithmetic(const char *family) {
  return !strcmp(family, "integer") || !strcmp(family, "float") || !strcmp(family, "convert");
}

Program *emu_program_new(const InsnRecord *records, int n, const Operand *operands, int noperands,
                         const ProgramHeader *h, const char *name) {
  int nforms = emu_form_count();
  const Form **forms = malloc(sizeof *forms * (size_t)nforms);
  const char **families = malloc(sizeof *families * (size_t)nforms);
  for (int i = 0; i < nforms; i++) forms[i] = form_at(i, &families[i]);
  Program *p = calloc(1, sizeof *p);
  *p = (Program){
      .code = calloc((size_t)n + 1, sizeof(Insn)), .ncode = n,
      .operands = malloc(sizeof(Operand) * (size_t)(noperands + 1)), .noperands = noperands,
      .nregs = h->nregs, .reg_words = h->reg_words, .local_bytes = h->local_bytes,
      .param_bytes = h->param_bytes, .static_shared = h->static_shared, .reqntid = h->reqntid,
      .maxnreg = h->maxnreg, .arch = h->arch, .launch_registers = h->launch_registers,
      .keeps_registers = h->keeps_registers != 0, .name = strdup(name)};
  memcpy(p->operands, operands, sizeof(Operand) * (size_t)noperands);
  for (int i = 0; i < n; i++) {
    const InsnRecord *r = &records[i];
    Insn *I = &p->code[i];
    *I = (Insn){.exec = forms[r->form]->exec, .op = p->operands + r->op_begin, .guard = r->guard,
                .guard_id = r->guard_id, .guard_neg = (uint8_t)r->guard_neg,
                .nops = (uint8_t)r->nops, .flags = (uint16_t)forms[r->form]->flags,
                .form = r->form, .line = r->line, .file = r->file,
                .source_line = r->source_line, .opcode = r->opcode};
    memcpy(I->mod, r->mod, sizeof I->mod);
    I->ndest = destinations(forms[r->form]);
    if (is_arithmetic(families[r->form])) I->flags |= F_PURE;
  }
  free(forms);
  free(families);
  return p;
}

void emu_program_free(Program *p) {
  if (!p) return;
  free(p->code);
  free(p->operands);
  free((void *)p->name);
  free(p);
}
