// A stand-in for the CUDA runtime: the functions that a compiled function's host code calls.
// This file is linked with the function's object file. Launches go to the hook that host.py sets;
// all other calls succeed as on a real device.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  uint32_t id, padding;
  union {
    uint32_t dims[3];
    int32_t value;
    uint8_t bytes[64];
  } value;
} Attribute;

typedef struct {
  uint32_t grid[3], block[3];
  size_t dynamic_shared;
  void *stream;
  const Attribute *attributes;
  uint32_t count;
} Configuration;

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, LAUNCH_FAILURE = 719 };
enum { ATTRIBUTE_COOPERATIVE = 2, ATTRIBUTE_CLUSTER = 4 };
enum {  // of the device
  MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76, SHARED_MEMORY_LIMIT = 97
};
#define SHARED_BYTES 232448  // most bytes of one CTA on sm_90 and sm_100

// A kernel's handle. The name is a copy, because the caller's name lies on the stack.
typedef struct {
  const void *image;
  char name[];
} Kernel;

// the module's image, kernel, grid + block + cluster + dynamic shared memory + whether all CTAs
// have to be resident together, pointers to the arguments; returns a CUDA error
typedef int (*Hook)(const void *image, const char *kernel, const uint32_t *dims, void **arguments);
static Hook hook;
static int device_values[4];  // number of SMs, major, minor, shared memory

void emulator_set_hook(Hook h, int num_sms, int major, int minor) {
  hook = h;
  device_values[0] = num_sms;
  device_values[1] = major;
  device_values[2] = minor;
}

int _cudaLaunchKernelEx(const Configuration *c, const Kernel *kernel, void **arguments) {
  uint32_t dims[11];
  for (int i = 0; i < 3; i++) {
    dims[i] = c->grid[i];
    dims[3 + i] = c->block[i];
    dims[6 + i] = 1;
  }
  dims[9] = (uint32_t)c->dynamic_shared;
  dims[10] = 0;
  for (uint32_t a = 0; a < c->count; a++) {
    const Attribute *attribute = &c->attributes[a];
    for (int i = 0; i < 3 && attribute->id == ATTRIBUTE_CLUSTER; i++)
      dims[6 + i] = attribute->value.dims[i];
    if (attribute->id == ATTRIBUTE_COOPERATIVE) dims[10] = attribute->value.value != 0;
  }
  for (int i = 0; i < 6; i++)
    if (!dims[i]) return 1;  // invalid value, as on a device
  return hook ? hook(kernel->image, kernel->name, dims, arguments) : LAUNCH_FAILURE;
}

// A library's handle is its image.
int _cudaLibraryLoadData(void **library, const void *image) {
  *library = (void *)image;
  return SUCCESS;
}

int _cudaLibraryGetKernel(Kernel **kernel, void *library, const char *name) {
  size_t bytes = strlen(name) + 1;
  *kernel = malloc(sizeof(Kernel) + bytes);
  if (!*kernel) return OUT_OF_MEMORY;
  (*kernel)->image = library;
  memcpy((*kernel)->name, name, bytes);
  return SUCCESS;
}

int _cudaGetDevice(int *device) {
  *device = 0;
  return SUCCESS;
}

int _cudaSetDevice(int device) {
  (void)device;
  return SUCCESS;
}

int _cudaGetDeviceCount(int *count) {
  *count = 1;
  return SUCCESS;
}

int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case MULTIPROCESSORS: *value = device_values[0]; break;
    case MAJOR: *value = device_values[1]; break;
    case MINOR: *value = device_values[2]; break;
    case SHARED_MEMORY_LIMIT: *value = SHARED_BYTES; break;
    default: *value = 1;
  }
  return SUCCESS;
}

int _cudaFuncSetAttribute(const void *function, int attribute, int value) {
  (void)function, (void)attribute, (void)value;
  return SUCCESS;
}

int _cudaKernelSetAttributeForDevice(const void *kernel, int attribute, int value, int device) {
  (void)kernel, (void)attribute, (void)value, (void)device;
  return SUCCESS;
}

int _cuKernelGetAttribute(int *value, int attribute, const void *kernel, int device) {
  (void)attribute, (void)kernel, (void)device;
  *value = 0;
  return SUCCESS;
}

int _cudaStreamSynchronize(void *stream) {
  (void)stream;
  return SUCCESS;
}

// The first 16 words of a tensor map, see engine/tensor_map.c; element types and swizzles are in
// the driver's order, and the engine checks the sizes that the driver refuses.
int _cuTensorMapEncodeTiled(uint32_t *map, uint32_t type, uint32_t rank, const void *address,
                            const uint64_t *sizes, const uint64_t *strides, const uint32_t *box,
                            const uint32_t *steps, uint32_t interleave, uint32_t swizzle,
                            uint32_t promotion, uint32_t fill) {
  enum { ROUNDED = 1 << 16 };
  static const uint32_t types[] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 7 | ROUNDED >> 7,
                                   8 | ROUNDED >> 7, 11, 12, 13};
  static const uint32_t swizzles[] = {0, 1, 2, 3, 3 | 1 << 6, 3 | 2 << 6, 3 | 3 << 6};
  uint64_t at = (uint64_t)(uintptr_t)address;
  if (rank - 1 > 4 || type > 15 || swizzle > 6 || at % 16) return 1;  // invalid value
  memset(map, 0, 128);
  map[0] = (uint32_t)at, map[1] = (uint32_t)(at >> 32);
  map[2] = (rank - 1) << 4 | types[type] << 7 | interleave << 11 | swizzles[swizzle] << 13 |
           fill << 15 | promotion << 17;
  for (uint32_t d = 0; d < rank; d++) {
    map[8 + d] = (uint32_t)(sizes[d] - 1);
    map[13] |= (steps[d] - 1) << 3 * d;
    if (d == 0) {
      map[13] |= (box[0] - 1) << 24;
      continue;
    }
    uint64_t stride = strides[d - 1] >> 4;
    map[2 + d] = (uint32_t)stride;
    map[7] |= (uint32_t)(stride >> 32) << 4 * (d - 1);
    map[14] |= (box[d] - 1) << 8 * (d - 1);
  }
  return SUCCESS;
}

void cuda_dialect_assert_success(int error) {
  if (!error) return;
  fprintf(stderr, "the host code asserts success, but a call gave CUDA error %d\n", error);
  abort();
}

typedef int (*Init)(void **handle);
typedef int (*LoadToDevice)(void **handle, int device);
typedef void (*OnError)(int error);

int cuda_dialect_init_library_once(void **handle, Init init, LoadToDevice load, OnError on_error) {
  (void)on_error;
  if (*handle) return SUCCESS;
  void *made = NULL;
  int error = init(&made);
  if (!error) error = load(&made, 0);
  if (!error) *handle = made ? made : (void *)1;
  return error;
}

int cuda_dialect_unload_library_once(void **handle) {
  *handle = NULL;
  return SUCCESS;
}

// The function of libtvm_ffi.so, which the process may load after this file.
static void set_raised_error(const char *kind, const char *message) {
  void (*set)(const char *, const char *) =
      (void (*)(const char *, const char *))dlsym(RTLD_DEFAULT, "TVMFFIErrorSetRaisedFromCStr");
  if (set) set(kind, message);
}

void CuteDSLRT_TVMFFISetRaisedCudaError(void *set_raised, int error) {
  (void)set_raised;
  char message[64];  // kind and format as in the DSL's own runtime
  snprintf(message, sizeof message, "CUDA Error Code: %d", error);
  set_raised_error("CUDADialectError", message);
}
