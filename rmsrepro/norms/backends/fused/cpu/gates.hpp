// The sigmoid and the hyperbolic tangent of whole vectors.
//
// In float both come from one expm1: x = n ln 2 + f with |f| <= ln 2 / 2, expm1(f) by a polynomial whose relative
// error is below 2e-8 there, and 2^n put together from its bits. Results are within 3 units in the last place
// wherever they are normal numbers. In double they are the C library's, one number at a time.
#pragma once
#include "simd.hpp"

namespace LEVEL {

// expm1(x) = s * p + (s - 1) and exp(x) = s * p + s, for |x| up to 87. A NaN stays in p.
struct Exponential {
    vfloat s, p;
};

INLINE Exponential exponential(vfloat x) {
    // Adding 1.5 * 2^23 rounds to the nearest whole number, and leaves it in the lowest bits.
    const vfloat magic = broadcast<float>(0x1.8p23f);
    const vfloat shifted = x * 0x1.715476p+0f + magic, n = shifted - magic;
    // ln 2 in two parts; the first has few bits, so that its product with n is exact.
    const vfloat f = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
    const vfloat q = ((f * 0.00138982322f + 0.00836606691f) * f + 0.0416668545f) * f + 0.166665485f;
    vuint bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;  // the magic number's own bits are shifted out
    Exponential result;
    memcpy(&result.s, &bits, sizeof bits);
    result.p = (f * f) * (f * q + 0.5f) + f;
    return result;
}

// A NaN passes: comparisons with it are false.
INLINE vfloat limited(vfloat x, float limit) {
    const vfloat most = broadcast<float>(limit);
    x = x > most ? most : x;
    return x < -most ? -most : x;
}

// 1/x for x from 1 to 1e38. The widest vectors divide slowly: there a guess of 14 bits is made exact by one step of
// Newton's.
INLINE vfloat inverse(vfloat x) {
#if WIDTH == 64
    const vfloat guess = vfloat(_mm512_rcp14_ps(__m512(x)));
    return guess * (1.0f - x * guess) + guess;
#else
    return 1.0f / x;
#endif
}

INLINE vfloat sigmoid(vfloat x) {
    const Exponential e = exponential(limited(-x, 87.0f));
    return inverse((e.s * e.p + e.s) + 1.0f);
}

// e / (e + 2) with e = expm1(2 x); from 9.1 on it is 1 in float.
INLINE vfloat hyperbolic_tangent(vfloat x) {
    const vfloat twice = limited(x + x, 19.0f);
    const Exponential e = exponential(twice);
    const vfloat below = e.s * e.p + (e.s - 1.0f);
    return below * inverse(below + 2.0f);
}

INLINE vdouble sigmoid(vdouble x) {
    for (unsigned lane = 0; lane < WIDTH / 8; ++lane) x[lane] = 1 / (1 + __builtin_exp(-x[lane]));
    return x;
}

INLINE vdouble hyperbolic_tangent(vdouble x) {
    for (unsigned lane = 0; lane < WIDTH / 8; ++lane) x[lane] = __builtin_tanh(x[lane]);
    return x;
}

}  // namespace LEVEL
