// The rest of the stand-in for libcute_dsl_runtime.so: what host code calls beside the functions of
// cuda.c, in a process whose whole CUDA device is emulated. Launches run at once, so that streams
// and events have nothing to order.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "memory.h"

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801 };

typedef struct Kernel Kernel;
int _cudaLibraryGetKernel(Kernel **kernel, void *library, const char *name);
int _cudaLibraryLoadData(void **library, const void *image);
void CuteDSLRT_TVMFFISetRaisedCudaError(void *set_raised, int error);

int _cuLibraryGetKernel(Kernel **kernel, void *library, const char *name) {
  return _cudaLibraryGetKernel(kernel, library, name);
}
int _cuLibraryLoadData(void **library, const void *image) {
  return _cudaLibraryLoadData(library, image);
}
int _cudaLibraryUnload(void *library) { return (void)library, SUCCESS; }
int _cuLibraryUnload(void *library) { return (void)library, SUCCESS; }
int _cuDeviceGet(int *device, int ordinal) { return *device = 0, ordinal ? INVALID_VALUE : SUCCESS; }
int _cudaDeviceSynchronize(void) { return SUCCESS; }
int _cudaProfilerStart(void) { return SUCCESS; }
int _cudaProfilerStop(void) { return SUCCESS; }

// -- memory

int _cudaMalloc(void **memory, size_t bytes) {
  return emulated_allocate(memory, bytes) ? SUCCESS : OUT_OF_MEMORY;
}
int _cudaMallocAsync(void **memory, size_t bytes, void *stream) {
  return (void)stream, _cudaMalloc(memory, bytes);
}
int _cudaMallocManaged(void **memory, size_t bytes, unsigned flags) {
  return (void)flags, _cudaMalloc(memory, bytes);
}
int _cudaMallocHost(void **memory, size_t bytes) {  // the device can access pinned memory
  return _cudaMalloc(memory, bytes);
}
int _cudaFree(void *memory) { return free(memory), SUCCESS; }
int _cudaFreeAsync(void *memory, void *stream) { return (void)stream, _cudaFree(memory); }
int _cudaFreeHost(void *memory) { return _cudaFree(memory); }
int _cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
  return (void)kind, memcpy(to, from, bytes), SUCCESS;
}
int _cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
  return (void)stream, _cudaMemcpy(to, from, bytes, kind);
}
int _cudaMemset(void *memory, int value, size_t bytes) {
  return memset(memory, value, bytes), SUCCESS;
}
int _cudaMemsetAsync(void *memory, int value, size_t bytes, void *stream) {
  return (void)stream, _cudaMemset(memory, value, bytes);
}

// -- streams and events

int _cudaStreamCreate(void **stream) { return *stream = NULL, SUCCESS; }
int _cudaStreamDestroy(void *stream) { return (void)stream, SUCCESS; }
int _cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
  return (void)stream, (void)event, (void)flags, SUCCESS;
}
int _cudaEventCreate(void **event) {
  *event = calloc(1, sizeof(struct timespec));
  return *event ? SUCCESS : OUT_OF_MEMORY;
}
int _cudaEventDestroy(void *event) { return free(event), SUCCESS; }
int _cudaEventRecord(void *event, void *stream) {
  return (void)stream, clock_gettime(CLOCK_MONOTONIC, event), SUCCESS;
}
int _cudaEventElapsedTime(float *milliseconds, const struct timespec *from,
                          const struct timespec *to) {
  *milliseconds = (float)(to->tv_sec - from->tv_sec) * 1e3f +
                  (float)(to->tv_nsec - from->tv_nsec) * 1e-6f;
  return SUCCESS;
}
int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads,
                                                   size_t shared) {
  return (void)kernel, (void)threads, (void)shared, *blocks = 1, SUCCESS;
}

// -- what is not emulated says so

static int refused(const char *call) {
  fprintf(stderr, "the emulator has no stand-in for %s\n", call);
  return NOT_SUPPORTED;
}
#define REFUSED(name) \
  int _##name(void) { return refused(#name); }
REFUSED(cudaStreamBeginCapture)
REFUSED(cudaStreamEndCapture)
REFUSED(cudaStreamAddCallback)
REFUSED(cudaGraphInstantiate)
REFUSED(cudaGraphLaunch)
REFUSED(cudaGraphDestroy)
REFUSED(cudaGraphExecDestroy)
REFUSED(cudaLaunchKernel)
REFUSED(cudaGetDeviceProperties)
REFUSED(cudaLibraryGetGlobal)
REFUSED(cudaLibraryGetKernelCount)
REFUSED(cudaLibraryGetManaged)
REFUSED(cudaLibraryGetUnifiedFunction)
REFUSED(cudaLibraryLoadFromFile)
REFUSED(cuLibraryGetGlobal)
REFUSED(cuLibraryGetKernelCount)
REFUSED(cuLibraryGetManaged)
REFUSED(cuLibraryGetModule)
REFUSED(cuLibraryGetUnifiedFunction)
REFUSED(cuLibraryLoadFromFile)

// -- errors

const char *cuda_dialect_get_error_name(int error) {
  return error ? "cudaErrorLaunchFailure" : "cudaSuccess";
}
void cuda_dialect_print_on_error(int error) {
  if (error) fprintf(stderr, "CUDA error %d\n", error);
}
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(void *set_raised, int error) {
  CuteDSLRT_TVMFFISetRaisedCudaError(set_raised, error);
}
