// Memory of an emulated process, for LD_PRELOAD. Aligned allocations, such as torch's CPU tensors,
// begin at multiples of 512 bytes, as on a CUDA device, and are listed. An allocation that was
// marked is memory of the emulated device.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "memory.h"

enum { ALIGNMENT = 512, FIRST_CAPACITY = 1 << 14 };

typedef struct {
  uintptr_t base;  // 0: the slot is free
  size_t bytes;
  int device;
} Allocation;

// A hash table with linear probing, at most half full. It lies in pages of its own, because `free`
// is called with the lock held by nobody but is also called by every other library.
static Allocation *table;
static size_t capacity, used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void (*libc_free)(void *);

static size_t home(uintptr_t base) {
  return (size_t)((base / ALIGNMENT * 0x9E3779B97F4A7C15ull) >> 20) & (capacity - 1);
}

static Allocation *find(uintptr_t base) {  // the base's slot, or the free slot where it belongs
  size_t i = home(base);
  while (table[i].base && table[i].base != base) i = (i + 1) & (capacity - 1);
  return &table[i];
}

static int grow(void) {
  size_t before = capacity, wanted = capacity ? 2 * capacity : FIRST_CAPACITY;
  Allocation *old = table;
  Allocation *made = mmap(NULL, wanted * sizeof *made, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return 0;
  table = made, capacity = wanted;
  for (size_t i = 0; i < before; i++)
    if (old[i].base) *find(old[i].base) = old[i];
  if (old) munmap(old, before * sizeof *old);
  return 1;
}

static void forget(uintptr_t base) {
  if (!capacity) return;
  Allocation *slot = find(base);
  if (!slot->base) return;
  used--;
  // Later entries move up, so that no search ends at the free slot before them.
  size_t hole = (size_t)(slot - table), i = hole;
  for (;;) {
    i = (i + 1) & (capacity - 1);
    if (!table[i].base) break;
    size_t distance = (i - home(table[i].base)) & (capacity - 1);
    if (distance >= ((i - hole) & (capacity - 1))) table[hole] = table[i], hole = i;
  }
  table[hole].base = 0;
}

int posix_memalign(void **memory, size_t alignment, size_t bytes) {
  if (alignment < sizeof(void *) || alignment & (alignment - 1)) return EINVAL;
  void *made = memalign(alignment < ALIGNMENT ? ALIGNMENT : alignment, bytes ? bytes : 1);
  if (!made) return ENOMEM;
  pthread_mutex_lock(&lock);
  if (2 * used < capacity || grow()) {
    Allocation *slot = find((uintptr_t)made);
    used += !slot->base;
    *slot = (Allocation){(uintptr_t)made, bytes, 0};
  }
  pthread_mutex_unlock(&lock);
  *memory = made;
  return 0;
}

void free(void *memory) {
  if (!libc_free) libc_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
  if (memory && (uintptr_t)memory % ALIGNMENT == 0) {
    pthread_mutex_lock(&lock);
    forget((uintptr_t)memory);
    pthread_mutex_unlock(&lock);
  }
  libc_free(memory);
}

// 1 if `base` begins an allocation, which is now memory of the device (or of the host)
int emulated_mark(uintptr_t base, int device) {
  pthread_mutex_lock(&lock);
  Allocation *slot = capacity ? find(base) : NULL;
  int found = slot && slot->base;
  if (found) slot->device = device;
  pthread_mutex_unlock(&lock);
  return found;
}

// 1 if `base` begins an allocation of the device
int emulated_on_device(uintptr_t base) {
  pthread_mutex_lock(&lock);
  int device = capacity && find(base)->device && find(base)->base;
  pthread_mutex_unlock(&lock);
  return device;
}

// 1 if an allocation of the device holds the address
int emulated_holds(uintptr_t address) {
  int found = 0;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < capacity && !found; i++)
    found = table[i].base && table[i].device && address - table[i].base < table[i].bytes;
  pthread_mutex_unlock(&lock);
  return found;
}

// base and bytes of the device's allocations; returns their number, which may exceed `room`
size_t emulated_allocations(uint64_t *pairs, size_t room) {
  size_t count = 0;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < capacity; i++) {
    if (!table[i].base || !table[i].device || !table[i].bytes) continue;
    if (count < room) pairs[2 * count] = table[i].base, pairs[2 * count + 1] = table[i].bytes;
    count++;
  }
  pthread_mutex_unlock(&lock);
  return count;
}

int emulated_allocate(void **memory, size_t bytes) {
  if (posix_memalign(memory, ALIGNMENT, bytes)) return 0;
  return emulated_mark((uintptr_t)*memory, 1);
}

// A process may fork while another thread allocates.
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void start(void) {
  pthread_atfork(before_fork, after_fork, after_fork);
}
