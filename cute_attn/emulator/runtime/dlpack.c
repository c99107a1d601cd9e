// torch's C functions for DLPack, with device memory presented as memory of a CUDA device. torch
// sees CPU tensors; the consumer, TVM-FFI, sees CUDA tensors.
#include <stdint.h>
#include <string.h>

#include "memory.h"

enum { CPU = 1, CUDA = 2 };

typedef struct {
  void *data;
  int32_t device, ordinal, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t offset;
} Tensor;

typedef struct {
  uint32_t major, minor;
  void *context;
  void (*deleter)(void *);
  uint64_t flags;
  Tensor tensor;
} Managed;

typedef struct {
  uint32_t major, minor;
  void *previous;
  int (*allocate)(Tensor *like, Managed **made, void *error, void (*set_error)(void *));
  int (*from_object)(void *object, Managed **made);
  int (*to_object)(Managed *tensor, void **object);
  int (*view)(void *object, Tensor *made);
  int (*stream)(int32_t device, int32_t ordinal, void **stream);
} Exchange;

static const Exchange *torch;
static Exchange exchange;

// An empty tensor has no memory that tells where it is; kernels take tensors of the device.
static int is_empty(const Tensor *tensor) {
  for (int i = 0; i < tensor->ndim; i++)
    if (!tensor->shape[i]) return 1;
  return 0;
}

static void present(Tensor *tensor) {
  if (is_empty(tensor) || emulated_holds((uintptr_t)tensor->data))
    tensor->device = CUDA, tensor->ordinal = 0;
}

static int from_object(void *object, Managed **made) {
  int error = torch->from_object(object, made);
  if (!error) present(&(*made)->tensor);
  return error;
}

static int to_object(Managed *tensor, void **object) {
  tensor->tensor.device = CPU;
  return torch->to_object(tensor, object);
}

static int view(void *object, Tensor *made) {
  int error = torch->view(object, made);
  if (!error) present(made);
  return error;
}

static int allocate(Tensor *like, Managed **made, void *error, void (*set_error)(void *)) {
  Tensor host = *like;
  host.device = CPU;
  int failed = torch->allocate(&host, made, error, set_error);
  if (!failed && like->device == CUDA) {
    emulated_mark((uintptr_t)(*made)->tensor.data, 1);
    present(&(*made)->tensor);
  }
  return failed;
}

static int stream(int32_t device, int32_t ordinal, void **current) {
  (void)device, (void)ordinal;
  *current = NULL;
  return 0;
}

// The functions to use in place of torch's.
const void *emulated_exchange(const void *original) {
  torch = original;
  exchange = *torch;
  exchange.previous = NULL;
  exchange.allocate = torch->allocate ? allocate : NULL;
  exchange.from_object = from_object;
  exchange.to_object = to_object;
  exchange.view = torch->view ? view : NULL;
  exchange.stream = stream;
  return &exchange;
}

// A tensor in a DLPack capsule of either form, which `__dlpack__` has made.
void emulated_present(void *managed, int versioned) {
  present(versioned ? &((Managed *)managed)->tensor : managed);
}
void emulated_to_host(void *managed, int versioned) {
  (versioned ? &((Managed *)managed)->tensor : (Tensor *)managed)->device = CPU;
}
