// Vectors of one instruction level, and how the four dtypes are read into and written from them.
//
// Every level compiles this file with its own flags: -DLEVEL=name -DWIDTH=bytes of a vector. All code of a level
// lives in a namespace of that name and calls no inline function of the standard library: the linker keeps one
// copy of such a function for all levels, and that copy might hold instructions the machine does not have.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define ALWAYS __attribute__((always_inline))
#define INLINE ALWAYS inline

namespace LEVEL {

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

typedef float vfloat __attribute__((vector_size(WIDTH)));
typedef double vdouble __attribute__((vector_size(WIDTH)));
typedef int32_t vint __attribute__((vector_size(WIDTH)));
typedef uint32_t vuint __attribute__((vector_size(WIDTH)));
typedef uint16_t vhalf __attribute__((vector_size(WIDTH / 2)));

// ------------------------------------------------------------------------------- one number at a time

INLINE float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float widen(float value) { return value; }
INLINE double widen(double value) { return value; }
INLINE float widen(bf16 value) { return bits_to_float(uint32_t(value.bits) << 16); }

INLINE float widen(fp16 value) {
    const uint32_t sign = uint32_t(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
    // A product with 2^112 moves the exponent from fp16's bias to fp32's, for numbers below the normal ones too.
    const float scaled = bits_to_float(rest << 13) * 0x1p112f;
    const uint32_t special = rest >= 0x7c00 ? 0x7f800000u : 0u;  // infinite or NaN
    return bits_to_float(float_to_bits(scaled) | special | sign);
}

INLINE void narrow(float* to, float value) { *to = value; }
INLINE void narrow(double* to, double value) { *to = value; }
INLINE void narrow(float* to, double value) { *to = float(value); }

INLINE void narrow(bf16* to, float value) {
    const uint32_t bits = float_to_bits(value);
    // To the nearest, ties to even; a NaN must not be rounded into infinity.
    to->bits = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE void narrow(fp16* to, float value) {
    const uint32_t bits = float_to_bits(value), sign = (bits >> 16) & 0x8000;
    const float magnitude = bits_to_float(bits & 0x7fffffff);
    uint32_t half;
    if (!(magnitude < 65520.0f)) {
        half = value != value ? 0x7e00 : 0x7c00;  // 65520 and more round to infinity
    } else if (magnitude < 0x1p-14f) {
        // Adding 1/2 leaves in the lowest bits the multiple of 2^-24 that is nearest.
        half = float_to_bits(magnitude + 0.5f) - float_to_bits(0.5f);
    } else {
        const uint32_t whole = bits & 0x7fffffff;
        half = (whole + 0xfff + ((whole >> 13) & 1) - (112u << 23)) >> 13;
    }
    to->bits = uint16_t(half | sign);
}

INLINE void narrow(bf16* to, double value) { narrow(to, float(value)); }
INLINE void narrow(fp16* to, double value) { narrow(to, float(value)); }

// ---------------------------------------------------------------------------------------- whole vectors

template <class V, class E>
INLINE V load_same(const E* from) {
    V value;
    memcpy(&value, from, sizeof(V));
    return value;
}

template <class V, class E>
INLINE void stream_same(E* to, V value) {
#if WIDTH == 64
    if constexpr (sizeof(E) == 8) {
        _mm512_stream_pd(reinterpret_cast<double*>(to), __m512d(value));
    } else {
        _mm512_stream_ps(reinterpret_cast<float*>(to), __m512(value));
    }
#elif WIDTH == 32
    if constexpr (sizeof(E) == 8) {
        _mm256_stream_pd(reinterpret_cast<double*>(to), __m256d(value));
    } else {
        _mm256_stream_ps(reinterpret_cast<float*>(to), __m256(value));
    }
#else
    memcpy(to, &value, sizeof(V));
#endif
}

// Element<E>: the type its sums are in (Wide), a vector of those (V), and reading and writing one.
template <class E>
struct Element;

template <>
struct Element<float> {
    typedef float Wide;
    typedef vfloat V;
    static INLINE V load(const float* from) { return load_same<V>(from); }
    static INLINE void store(float* to, V value) { memcpy(to, &value, sizeof(V)); }
    static INLINE void stream(float* to, V value) { stream_same(to, value); }
};

template <>
struct Element<double> {
    typedef double Wide;
    typedef vdouble V;
    static INLINE V load(const double* from) { return load_same<V>(from); }
    static INLINE void store(double* to, V value) { memcpy(to, &value, sizeof(V)); }
    static INLINE void stream(double* to, V value) { stream_same(to, value); }
};

template <>
struct Element<bf16> {
    typedef float Wide;
    typedef vfloat V;
    static INLINE V load(const bf16* from) {
#if WIDTH == 64
        const vuint bits = vuint(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))) << 16;
#elif WIDTH == 32
        const vuint bits = vuint(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))) << 16;
#else
        vhalf half;
        memcpy(&half, from, sizeof half);
        const vuint bits = __builtin_convertvector(half, vuint) << 16;
#endif
        V value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    static INLINE vhalf rounded(V value) {
#if defined(__AVX512BF16__)
        // The instruction rounds to the nearest even and flushes numbers below the normal ones to zero.
        const __m256bh half = _mm512_cvtneps_pbh(__m512(value));
        vhalf result;
        memcpy(&result, &half, sizeof result);
        return result;
#else
        vuint bits;
        memcpy(&bits, &value, sizeof bits);
        const vuint up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const vint is_nan = value != value;
        const vuint mask = vuint(is_nan);
        const vuint half = up | (mask & 0x7fc0);
#if WIDTH == 32
        // What the compiler makes of a conversion takes several shuffles more.
        const __m256i whole = __m256i(half);
        return vhalf(_mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1)));
#else
        return __builtin_convertvector(half, vhalf);
#endif
#endif
    }
    static INLINE void store(bf16* to, V value) {
        const vhalf half = rounded(value);
        memcpy(to, &half, sizeof half);
    }
    static INLINE void stream(bf16* to, V value) {
        const vhalf half = rounded(value);
#if WIDTH == 64
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), __m256i(half));
#elif WIDTH == 32
        _mm_stream_si128(reinterpret_cast<__m128i*>(to), __m128i(half));
#else
        memcpy(to, &half, sizeof half);
#endif
    }
};

template <>
struct Element<fp16> {
    typedef float Wide;
    typedef vfloat V;
#if WIDTH == 64
    static INLINE V load(const fp16* from) {
        return V(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
    }
    static INLINE void store(fp16* to, V value) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(__m512(value), 0));
    }
    static INLINE void stream(fp16* to, V value) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(__m512(value), 0));
    }
#elif WIDTH == 32
    static INLINE V load(const fp16* from) {
        return V(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    }
    static INLINE void store(fp16* to, V value) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(__m256(value), 0));
    }
    static INLINE void stream(fp16* to, V value) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(__m256(value), 0));
    }
#else
    static INLINE V load(const fp16* from) {
        V value;
        for (unsigned lane = 0; lane < WIDTH / 4; ++lane) value[lane] = widen(from[lane]);
        return value;
    }
    static INLINE void store(fp16* to, V value) {
        for (unsigned lane = 0; lane < WIDTH / 4; ++lane) narrow(to + lane, float(value[lane]));
    }
    static INLINE void stream(fp16* to, V value) { store(to, value); }
#endif
};

template <class E>
constexpr int64_t lanes = WIDTH / int64_t(sizeof(typename Element<E>::Wide));

template <class E>
INLINE typename Element<E>::V broadcast(typename Element<E>::Wide value) {
    return value - typename Element<E>::V{};
}

// The first `count` numbers, zeros beyond; and back. For the end of a row.
template <class E>
INLINE typename Element<E>::V load_part(const E* from, int64_t count) {
#if WIDTH == 64
    if constexpr (sizeof(E) == 4) {
        return vfloat(_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from));
    } else if constexpr (sizeof(E) == 8) {
        return vdouble(_mm512_maskz_loadu_pd(__mmask8((1u << count) - 1), from));
    } else {
        E part[lanes<E>];
        const __m256i half = _mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1), from);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(part), half);
        return Element<E>::load(part);
    }
#else
    E part[lanes<E>] = {};
    for (int64_t lane = 0; lane < count; ++lane) part[lane] = from[lane];
    return Element<E>::load(part);
#endif
}

template <class E>
INLINE void store_part(E* to, typename Element<E>::V value, int64_t count) {
#if WIDTH == 64
    if constexpr (sizeof(E) == 4) {
        _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), __m512(value));
        return;
    } else if constexpr (sizeof(E) == 8) {
        _mm512_mask_storeu_pd(to, __mmask8((1u << count) - 1), __m512d(value));
        return;
    }
#endif
    E part[lanes<E>];
    Element<E>::store(part, value);
#if WIDTH == 64
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(part));
    _mm256_mask_storeu_epi16(to, __mmask16((1u << count) - 1), half);
#else
    for (int64_t lane = 0; lane < count; ++lane) to[lane] = part[lane];
#endif
}

// The sum over the lanes, halves first: the same order at every width.
#if WIDTH == 64
INLINE float horizontal_sum(vfloat value) { return _mm512_reduce_add_ps(__m512(value)); }
INLINE double horizontal_sum(vdouble value) { return _mm512_reduce_add_pd(__m512d(value)); }
#elif WIDTH == 32
INLINE float horizontal_sum(vfloat value) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(__m256(value)), _mm256_extractf128_ps(__m256(value), 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE double horizontal_sum(vdouble value) {
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(__m256d(value)), _mm256_extractf128_pd(__m256d(value), 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
#else
template <class V>
INLINE auto horizontal_sum(V value) {
    constexpr int64_t size = sizeof(V) / sizeof(value[0]);
    for (int64_t half = size / 2; half > 0; half /= 2)
        for (int64_t lane = 0; lane < half; ++lane) value[lane] += value[lane + half];
    return value[0];
}
#endif

}  // namespace LEVEL
