// The norms of fp32 and fp64 rows, the GRU in fp64, and the functions that callers find.
//
// The kernels are two files that take equally long to compile, side by side. More would take longer: a quarter of a
// file's time goes into reading the compiler's header of vector instructions.
#include "gru.hpp"
#include "norms.hpp"

namespace LEVEL {

// In half.cpp.
int64_t forward_half(const ForwardCall& call);
int64_t backward_half(const BackwardCall& call);
int64_t gru_forward_float(const GruForwardCall& call);
int64_t gru_backward_float(const GruBackwardCall& call);

}  // namespace LEVEL

// 0: done; 1: no memory for the sums over rows.
EXPORTED(forward)(const ForwardCall* call) {
    switch (call->dtype) {
        case FLOAT32: return LEVEL::forward<float>(*call);
        case FLOAT64: return LEVEL::forward<double>(*call);
        default: return LEVEL::forward_half(*call);
    }
}

EXPORTED(backward)(const BackwardCall* call) {
    switch (call->dtype) {
        case FLOAT32: return LEVEL::backward<float>(*call);
        case FLOAT64: return LEVEL::backward<double>(*call);
        default: return LEVEL::backward_half(*call);
    }
}

EXPORTED(gru_forward)(const GruForwardCall* call) {
    return call->dtype == FLOAT64 ? LEVEL::gru::forward<double>(*call) : LEVEL::gru_forward_float(*call);
}

// 0: done; 1: no memory for a row's gradients.
EXPORTED(gru_backward)(const GruBackwardCall* call) {
    return call->dtype == FLOAT64 ? LEVEL::gru::backward<double>(*call) : LEVEL::gru_backward_float(*call);
}
