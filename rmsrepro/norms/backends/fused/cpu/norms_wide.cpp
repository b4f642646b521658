// The norms of fp32 and fp64 rows, and the functions that callers find.
#include "norms.hpp"

namespace LEVEL {

int64_t forward_half(const ForwardCall& call);  // in norms_half.cpp
int64_t backward_half(const BackwardCall& call);

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
