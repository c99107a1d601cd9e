// Memory of an emulated process, see memory.c.
#pragma once
#include <stddef.h>
#include <stdint.h>

int emulated_mark(uintptr_t base, int device);
int emulated_on_device(uintptr_t base);
int emulated_holds(uintptr_t address);
size_t emulated_allocations(uint64_t *pairs, size_t room);
int emulated_allocate(void **memory, size_t bytes);
