// Threads and the memory they work in.
#pragma once
#include <cstdint>
#include <cstdlib>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "simd.hpp"

namespace LEVEL {

constexpr int64_t LEAST_WORK = 16384;  // entries that are worth a thread

INLINE int64_t threads_for(int64_t rows, int64_t n, int64_t most) {
    const int64_t worth = rows * n / LEAST_WORK + 1;
    const int64_t threads = worth < most ? worth : most;
    return threads < rows ? threads : rows < 1 ? 1 : rows;
}

// Runs f(thread, threads) on each of `threads` threads; the rows of a thread depend on these two numbers alone, so
// that results do not change from call to call.
template <class F>
INLINE void parallel(int64_t threads, F f) {
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(int(threads))
        f(int64_t(omp_get_thread_num()), int64_t(omp_get_num_threads()));
        return;
    }
#endif
    f(int64_t(0), int64_t(1));
}

INLINE void barrier(int64_t threads) {
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp barrier
    }
#endif
    (void)threads;
}

// Memory that each calling thread keeps between calls, 64-byte aligned; null when there is none to be had.
struct Scratch {
    void* memory = nullptr;
    size_t size = 0;
    ~Scratch() { free(memory); }
    void* take(size_t bytes) {
        if (bytes > size) {
            free(memory);
            size = (bytes + 4095) / 4096 * 4096;
            memory = aligned_alloc(64, size);
            if (memory == nullptr) size = 0;
        }
        return memory;
    }
};
static thread_local Scratch scratch;

// n numbers of `item` bytes, made up to whole cache lines, so that no two threads share one.
INLINE int64_t padded(int64_t n, int64_t item) { return (n * item + 63) / 64 * 64 / item; }

INLINE bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 64 == 0; }

// Adds the columns from `begin` to `end` of what each thread summed up, in the order of the threads.
template <class W>
INLINE void add_up(W* partial, int64_t width, int64_t threads, int64_t begin, int64_t end) {
    for (int64_t other = 1; other < threads; ++other)
        for (int64_t j = begin; j < end; ++j) partial[j] += partial[other * width + j];
}

}  // namespace LEVEL
