// External functions that kernels call: vprintf and __assertfail.
#include "external.h"
#include "float_bits.h"
#include <stdio.h>

struct Output { char *text; size_t used, room; };

const char *output_text(Emu *e) { return e->output ? e->output->text : ""; }

void output_clear(Emu *e) {
  if (!e->output) return;
  free(e->output->text);
  free(e->output);
  e->output = NULL;
}

static void append(Emu *e, const char *part, size_t length) {
  if (!e->output) e->output = calloc(1, sizeof *e->output);
  struct Output *o = e->output;
  if (o->used + length + 1 > o->room) {
    o->room = 2 * (o->used + length + 1) + 256;
    o->text = realloc(o->text, o->room);
  }
  memcpy(o->text + o->used, part, length);
  o->used += length;
  o->text[o->used] = 0;
}

// One lane's memory at a generic address, and the number of bytes that may be read there.
static const uint8_t *readable(Warp *w, int lane, uint64_t address, uint64_t *bytes) {
  Emu *e = emu_of(w);
  Cta *cta = NULL;
  uint32_t offset = 0, local = (uint32_t)e->program->local_bytes;
  *bytes = 0;
  switch (classify(w, address, &cta, &offset)) {
    case SP_LOCAL:
      if (offset < local) *bytes = local - offset;
      return w->local + (size_t)lane * local + offset;
    case SP_SHARED:
      if (!cta || offset >= cta->shared_bytes) return NULL;
      *bytes = cta->shared_bytes - offset;
      return cta->shared + offset;
    case SP_PARAM:
      *bytes = (uint64_t)e->params + (uint64_t)e->program->param_bytes - address;
      return (const uint8_t *)address;
    default: {
      const Region *r = region_at(e, address, NULL);
      if (r) *bytes = r->base + r->size - address;
      return (const uint8_t *)address;
    }
  }
}

// A copy of a string in emulated memory, to be freed.
static char *string_at(Warp *w, int lane, uint64_t address) {
  uint64_t bytes;
  const uint8_t *p = readable(w, lane, address, &bytes);
  if (!bytes || !memchr(p, 0, bytes)) return strdup("(bad string)");
  return strdup((const char *)p);
}

typedef struct {
  Warp *w;
  const Insn *I;
  int lane;
  uint64_t next;  // generic address of the next argument
} VarArgs;

// Variable arguments are consecutive, each aligned to its size.
static uint64_t next_argument(VarArgs *v, uint32_t size) {
  uint64_t value = 0, bytes;
  v->next = (v->next + size - 1) & ~(uint64_t)(size - 1);
  const uint8_t *p = readable(v->w, v->lane, v->next, &bytes);
  if (bytes < size)
    finding(v->w, v->I, CK_BOUNDS, SEV_ERROR,
            "printf reads an argument at 0x%llx, outside of memory", (unsigned long long)v->next);
  else memcpy(&value, p, size);
  v->next += size;
  return value;
}

// Append one conversion; `spec` is the text from % to the length modifier.
static void print_value(VarArgs *v, const char *spec, const char *length, char conversion) {
  char format[64], out[512];
  bool wide = length[0] && strchr("ljztq", length[0]);
  int printed = 0;
  if (strchr("di", conversion) || strchr("uoxX", conversion)) {
    uint64_t raw = next_argument(v, wide ? 8 : 4);
    bool is_signed = strchr("di", conversion) != NULL;
    if (!wide && is_signed) raw = (uint64_t)(int64_t)(int32_t)raw;
    if (!strcmp(length, "h")) raw = is_signed ? (uint64_t)(int16_t)raw : (uint16_t)raw;
    if (!strcmp(length, "hh")) raw = is_signed ? (uint64_t)(int8_t)raw : (uint8_t)raw;
    snprintf(format, sizeof format, "%%%sll%c", spec, conversion);
    printed = snprintf(out, sizeof out, format, (unsigned long long)raw);
  } else if (strchr("fFeEgGaA", conversion)) {
    snprintf(format, sizeof format, "%%%s%c", spec, conversion);
    printed = snprintf(out, sizeof out, format, as_double(next_argument(v, 8)));
  } else if (conversion == 'c') {
    snprintf(format, sizeof format, "%%%sc", spec);
    printed = snprintf(out, sizeof out, format, (int)next_argument(v, 4));
  } else if (conversion == 'p') {
    snprintf(format, sizeof format, "%%#%sllx", spec);
    printed = snprintf(out, sizeof out, format, (unsigned long long)next_argument(v, 8));
  } else if (conversion == 's') {
    char *string = string_at(v->w, v->lane, next_argument(v, 8));
    if (!*spec) {
      append(emu_of(v->w), string, strlen(string));
    } else {
      snprintf(format, sizeof format, "%%%ss", spec);
      printed = snprintf(out, sizeof out, format, string);
    }
    free(string);
  } else {
    printed = snprintf(out, sizeof out, "%%%s%s%c", spec, length, conversion);
  }
  if (printed >= (int)sizeof out) printed = sizeof out - 1;
  if (printed > 0) append(emu_of(v->w), out, (size_t)printed);
}

// Parse the specification after a %. Returns the text after the specification.
static const char *print_conversion(VarArgs *v, const char *at) {
  char spec[48], length[3] = "";
  size_t n = 0;
  while (*at && strchr("-+ #0123456789.*", *at) && n < 32) {
    if (*at == '*') n += (size_t)snprintf(spec + n, 12, "%d", (int32_t)next_argument(v, 4));
    else spec[n++] = *at;
    at++;
  }
  spec[n] = 0;
  for (n = 0; *at && strchr("hlLqjzt", *at); at++)
    if (n < 2) length[n++] = *at, length[n] = 0;
  if (!*at) return at;
  print_value(v, spec, length, *at);
  return at + 1;
}

// Returns the number of conversions.
static uint32_t print_formatted(Warp *w, const Insn *I, int lane, uint64_t format,
                                uint64_t arguments) {
  uint32_t count = 0;
  VarArgs v = {w, I, lane, arguments};
  char *string = string_at(w, lane, format);
  for (const char *at = string; *at;) {
    size_t plain = strcspn(at, "%");
    append(emu_of(w), at, plain);
    at += plain;
    if (at[0] == '%' && at[1] == '%') {
      append(emu_of(w), "%", 1);
      at += 2;
    } else if (*at == '%') {
      at = print_conversion(&v, at + 1);
      count++;
    }
  }
  free(string);
  return count;
}

// The k-th argument of a call: in the memory of call parameters, or in a register.
static uint64_t argument(Warp *w, const Insn *I, int lane, const Operand *o, uint32_t size) {
  uint64_t buffer[32];
  if (o->kind != K_LOCAL_SYM) return src64_of(w, I, o, 1u << lane, buffer)[lane];
  uint64_t value = 0;
  uint32_t local = (uint32_t)emu_of(w)->program->local_bytes;
  if (o->imm + size <= local) memcpy(&value, w->local + (size_t)lane * local + o->imm, size);
  return value;
}

static void put_result(Warp *w, const Insn *I, Mask m, const Operand *o, const uint32_t r[32]) {
  uint32_t local = (uint32_t)emu_of(w)->program->local_bytes;
  if (o->kind == K_REG) put32_of(w, I, o, m, r);
  if (o->kind != K_LOCAL_SYM || o->imm + 4 > local) return;
  FOR_SET(l, m) {
    size_t at = (size_t)l * local + o->imm;
    memcpy(w->local + at, &r[l], 4);
    memset(w->local_init + at, 1, 4);
  }
}

static void call_printf(Warp *w, const Insn *I, Mask m, const Operand *arguments,
                        const Operand *result) {
  uint32_t r[32] = {0};
  FOR_SET(l, m)
    r[l] = print_formatted(w, I, l, argument(w, I, l, &arguments[0], 8),
                           argument(w, I, l, &arguments[1], 8));
  put_result(w, I, m, result, r);
}

static void call_assertfail(Warp *w, const Insn *I, Mask m, const Operand *arguments) {
  int l = __builtin_ctz(m);
  char *part[3];  // message, file, function
  for (int k = 0; k < 3; k++)
    part[k] = string_at(w, l, argument(w, I, l, &arguments[k == 2 ? 3 : k], 8));
  fatal(w, I, CK_ASSERT, "assertion failed in lanes 0x%08x: %s (%s:%u, %s)", m, part[0], part[1],
        (uint32_t)argument(w, I, l, &arguments[2], 4), part[2]);
  for (int k = 0; k < 3; k++) free(part[k]);
}

int call_external(Warp *w, const Insn *I, Mask m, const char *name, const Operand *arguments,
                  int count, const Operand *result) {
  if (!strcmp(name, "vprintf") && count == 2) call_printf(w, I, m, arguments, result);
  else if (!strcmp(name, "__assertfail") && count >= 4) call_assertfail(w, I, m, arguments);
  else fatal(w, I, CK_ASSERT, "call of '%s' with %d arguments, which is not emulated", name, count);
  return DONE;
}
