// The norms of half-precision rows, and the GRU in fp32: see wide.cpp.
#include "gru.hpp"
#include "norms.hpp"

namespace LEVEL {

int64_t forward_half(const ForwardCall& call) {
    return call.dtype == BFLOAT16 ? forward<bf16>(call) : forward<fp16>(call);
}

int64_t backward_half(const BackwardCall& call) {
    return call.dtype == BFLOAT16 ? backward<bf16>(call) : backward<fp16>(call);
}

int64_t gru_forward_float(const GruForwardCall& call) { return gru::forward<float>(call); }

int64_t gru_backward_float(const GruBackwardCall& call) { return gru::backward<float>(call); }

}  // namespace LEVEL
