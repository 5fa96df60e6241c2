// What chooses the instruction set and the threads, for those who run kernels.
#pragma once
#include "api.h"

// The best instruction set that cuts `width` into pairs of vectors, or null. 0: the best of all.
const Kernels* choose(int64_t width);

// Runs the kernel by so many threads, or by fewer if OpenMP has no more to give.
void run(void (*kernel)(void*), void* job, int threads);

// Inside of what `run` runs: the threads that do.
int num_threads();
