// The norms of half-precision rows.
#include "norms.hpp"

namespace LEVEL {

int64_t forward_half(const ForwardCall& call) {
    return call.dtype == BFLOAT16 ? forward<bf16>(call) : forward<fp16>(call);
}

int64_t backward_half(const BackwardCall& call) {
    return call.dtype == BFLOAT16 ? backward<bf16>(call) : backward<fp16>(call);
}

}  // namespace LEVEL
