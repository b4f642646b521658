// What callers hand over: every field eight bytes, so that a call is an array of 64-bit numbers.
#pragma once
#include <cstdint>

enum Dtype : int64_t { FLOAT32 = 0, FLOAT64 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

// A norm of rows of n entries: see rule.py, whose names these are.
struct Rule {
    int64_t n, k, centred, outside, rounded;
    double inverse_count, eps;
};

// y = norm(x), or of x + residual, which is then written to `sum`. Rows are dense, `*_stride` entries apart;
// outputs are contiguous. gain and bias may be null.
struct ForwardCall {
    const Rule* rule;
    int64_t dtype, parameter_dtype, rows, threads;
    const void* x;
    int64_t x_stride;
    const void* residual;
    int64_t residual_stride;
    const void* gain;
    const void* bias;
    void* sum;
    void* y;
};

// dx = the gradient of norm(x) for dy, plus `extra` where there is one. dgain and dbias may be null.
struct BackwardCall {
    const Rule* rule;
    int64_t dtype, parameter_dtype, rows, threads;
    const void* x;
    int64_t x_stride;
    const void* dy;
    int64_t dy_stride;
    const void* extra;
    int64_t extra_stride;
    const void* gain;
    void* dx;
    void* dgain;
    void* dbias;
};

// A function of this level that callers find by name: rmsrepro_forward_avx2.
#define JOIN_NAMES(name, level) rmsrepro_##name##_##level
#define EXPORT(name, level) extern "C" __attribute__((visibility("default"))) int64_t JOIN_NAMES(name, level)
#define EXPORTED(name) EXPORT(name, LEVEL)
