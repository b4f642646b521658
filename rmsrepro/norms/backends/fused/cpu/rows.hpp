// One row of a norm in the type of its sums: its statistics, its output, its gradient. See rule.py for the formula.
//
// E is the type of the row, W that of its sums and of the parameters. What differs from call to call and not from
// row to row is a branch inside the loops, which the processor predicts: every instantiation costs build time.
#pragma once
#include "calls.hpp"
#include "simd.hpp"

namespace LEVEL {

// How a lambda touches the numbers it is called for: a whole vector, or the end of a row.
struct Whole {
    template <class E>
    INLINE typename Element<E>::V load(const E* from) const {
        return Element<E>::load(from);
    }
    template <class E>
    INLINE void store(E* to, typename Element<E>::V value) const {
        Element<E>::store(to, value);
    }
    template <class E>
    INLINE void stream(E* to, typename Element<E>::V value) const {
        Element<E>::stream(to, value);
    }
    template <class V>
    INLINE V keep(V value) const {
        return value;
    }
};

struct Part {
    int64_t count;
    template <class E>
    INLINE typename Element<E>::V load(const E* from) const {
        return load_part(from, count);
    }
    template <class E>
    INLINE void store(E* to, typename Element<E>::V value) const {
        store_part(to, value, count);
    }
    template <class E>
    INLINE void stream(E* to, typename Element<E>::V value) const {
        store_part(to, value, count);
    }
    // Zeros in the lanes beyond the row.
    template <class V>
    INLINE V keep(V value) const {
        constexpr int64_t size = sizeof(V) / sizeof(value[0]);
        for (int64_t lane = 0; lane < size; ++lane)
            if (lane >= count) value[lane] = 0;
        return value;
    }
};

// Calls f(how, j) for the vectors from `begin` to `end`.
template <class E, class F>
INLINE void walk(int64_t begin, int64_t end, F f) {
    int64_t j = begin;
    for (; j + lanes<E> <= end; j += lanes<E>) f(Whole{}, j);
    if (j < end) f(Part{end - j}, j);
}

// The same for sums, with u from 0 to 3: an addition takes about four cycles, so four sums run side by side.
template <class E, class F>
INLINE void walk_sums(int64_t begin, int64_t end, F f) {
    int64_t j = begin;
    for (; j + 4 * lanes<E> <= end; j += 4 * lanes<E>) {
        f(Whole{}, j, 0);
        f(Whole{}, j + lanes<E>, 1);
        f(Whole{}, j + 2 * lanes<E>, 2);
        f(Whole{}, j + 3 * lanes<E>, 3);
    }
    for (; j + lanes<E> <= end; j += lanes<E>) f(Whole{}, j, 0);
    if (j < end) f(Part{end - j}, j, 1);
}

template <class E>
using Wide = typename Element<E>::Wide;

template <class W>
INLINE W total(const typename Element<W>::V (&sum)[4]) {
    return horizontal_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

template <class W>
struct Limits;

template <>
struct Limits<float> {
    // Sums of squares between these are exact enough; other rows are done in double.
    static constexpr float lowest = 1e-30f, highest = 1e37f;
    // An eps so large that it hides what squares lose by underflow, inside and outside the root.
    static constexpr double safe_inside = 1e-24, safe_outside = 1e-12;
    // A smaller denominator counts as zero, as it does in the other backends.
    static constexpr double vanishing = 1e-25;
};

template <>
struct Limits<double> {
    static constexpr double lowest = 1e-260, highest = 1e300;
    static constexpr double safe_inside = 1e-240, safe_outside = 1e-120;
    static constexpr double vanishing = 1e-200;
};

// What a call knows of a rule before it sees a row.
template <class W>
struct Plan {
    int64_t n, k;
    bool centred, outside;
    W inverse_count, inverse_n, eps, root_eps, lowest;

    explicit Plan(const Rule& rule)
        : n(rule.n),
          k(rule.k),
          centred(rule.centred != 0),
          outside(rule.outside != 0),
          inverse_count(W(rule.inverse_count)),
          inverse_n(W(1.0 / double(rule.n))),
          eps(W(rule.eps)),
          root_eps(W(__builtin_sqrt(rule.eps))),
          lowest(rule.eps >= (outside ? Limits<W>::safe_outside : Limits<W>::safe_inside) ? W(-1)
                                                                                          : Limits<W>::lowest) {}
};

// One row's numbers: y = (a - mean) * r * gain + bias; w as in rule.py.
template <class W>
struct Scale {
    W mean, r, w;
    bool fits;  // whether the sums stayed within `Limits`
};

// The sums that a row's gradient needs beside: of h = gain * dy, and of h * c.
template <class W>
struct Sums {
    Scale<W> scale;
    W h, hc;
};

INLINE float root(float value) { return __builtin_sqrtf(value); }
INLINE double root(double value) { return __builtin_sqrt(value); }

// From the mean of the squares to the scale.
template <class W>
INLINE Scale<W> scale_of(W mean, W m, const Plan<W>& plan) {
    const W sqrt_m = plan.outside ? root(m) : W(0);
    const W r = W(1) / (plan.outside ? sqrt_m + plan.eps : root(m + plan.eps));
    W w = plan.inverse_count;
    if (plan.outside) w = sqrt_m > W(0) ? w / (r * sqrt_m) : W(0);
    return {mean, r, w, m >= plan.lowest && m <= Limits<W>::highest};
}

template <class E>
INLINE Wide<E> mean_of(const E* a, const Plan<Wide<E>>& plan) {
    typename Element<E>::V sum[4] = {};
    walk_sums<E>(0, plan.n, [&](auto how, int64_t j, int u) ALWAYS { sum[u] += how.load(a + j); });
    return total<Wide<E>>(sum) * plan.inverse_n;
}

template <class E, bool CENTRED>
Scale<Wide<E>> measure(const E* a, const Plan<Wide<E>>& plan) {
    typedef Wide<E> W;
    typedef typename Element<E>::V V;
    const W mean = CENTRED ? mean_of(a, plan) : W(0);
    const V centre = broadcast<E>(mean);
    V squares[4] = {};
    walk_sums<E>(0, plan.k, [&](auto how, int64_t j, int u) ALWAYS {
        const V c = CENTRED ? how.keep(how.load(a + j) - centre) : how.load(a + j);
        squares[u] += c * c;
    });
    return scale_of(mean, total<W>(squares) * plan.inverse_count, plan);
}

template <class E, bool CENTRED>
Sums<Wide<E>> measure_gradient(const E* a, const E* dy, const Wide<E>* gain, const Plan<Wide<E>>& plan) {
    typedef Wide<E> W;
    typedef typename Element<E>::V V;
    const W mean = CENTRED ? mean_of(a, plan) : W(0);
    const V centre = broadcast<E>(mean);
    V squares[4] = {}, hs[4] = {}, hcs[4] = {};
    walk_sums<E>(0, plan.k, [&](auto how, int64_t j, int u) ALWAYS {
        const V c = CENTRED ? how.keep(how.load(a + j) - centre) : how.load(a + j);
        const V h = how.load(dy + j) * how.load(gain + j);
        squares[u] += c * c;
        hcs[u] += h * c;
        if (CENTRED) hs[u] += h;
    });
    if (!CENTRED)
        walk_sums<E>(plan.k, plan.n, [&](auto how, int64_t j, int u) ALWAYS {
            hcs[u] += how.load(dy + j) * how.load(gain + j) * how.load(a + j);
        });
    const W hc = total<W>(hcs);
    Sums<W> sums = {scale_of(mean, total<W>(squares) * plan.inverse_count, plan), CENTRED ? total<W>(hs) : W(0), hc};
    sums.scale.fits = sums.scale.fits && hc - hc == W(0);  // finite
    return sums;
}

// y = (a - mean) * r * gain + bias, the bias where there is one.
template <class E, bool CENTRED>
void write_row(const E* a, const Scale<Wide<E>>& scale, const Wide<E>* gain, const Wide<E>* bias, E* y, int64_t n,
               bool stream) {
    typedef typename Element<E>::V V;
    const V centre = broadcast<E>(scale.mean), r = broadcast<E>(scale.r);
    walk<E>(0, n, [&](auto how, int64_t j) ALWAYS {
        V value = CENTRED ? how.load(a + j) - centre : how.load(a + j);
        value = value * r * how.load(gain + j);
        if (bias != nullptr) value += how.load(bias + j);
        if (stream)
            how.stream(y + j, value);
        else
            how.store(y + j, value);
    });
}

// dx of one row, plus `extra` where there is one; adds to dgain and dbias where they are.
template <class E, bool CENTRED>
void write_gradient(const E* a, const E* dy, const E* extra, const Sums<Wide<E>>& sums, const Wide<E>* gain, E* dx,
                    Wide<E>* dgain, Wide<E>* dbias, const Plan<Wide<E>>& plan, bool stream) {
    typedef Wide<E> W;
    typedef typename Element<E>::V V;
    const V centre = broadcast<E>(sums.scale.mean), r = broadcast<E>(sums.scale.r);
    const V mean_h = broadcast<E>(sums.h * plan.inverse_n);
    const W factor = sums.scale.w * (sums.scale.r * sums.hc) * sums.scale.r;
    // In two parts: of the entries that the statistic read, and of the others.
    for (int part = 0; part < (CENTRED || plan.k == plan.n ? 1 : 2); ++part) {
        const V q = broadcast<E>(part == 0 ? factor : W(0));
        walk<E>(part == 0 ? 0 : plan.k, part == 0 ? plan.k : plan.n, [&](auto how, int64_t j) ALWAYS {
            const V c = CENTRED ? how.load(a + j) - centre : how.load(a + j);
            const V upstream = how.load(dy + j);
            V value = upstream * how.load(gain + j) - q * c;
            if (CENTRED) value -= mean_h;
            value *= r;
            if (extra != nullptr) value += how.load(extra + j);
            if (stream)
                how.stream(dx + j, value);
            else
                how.store(dx + j, value);
            if (dgain != nullptr) how.store(dgain + j, how.load(dgain + j) + upstream * (c * r));
            if (dbias != nullptr) how.store(dbias + j, how.load(dbias + j) + upstream);
        });
    }
}

// ------------------------------------------------------------- rows whose squares leave the range, one by one

// The scale in double, from squares that are scaled by a power of two.
template <class W>
__attribute__((noinline)) Scale<double> measure_carefully(const W* a, const Plan<W>& plan) {
    double mean = 0;
    if (plan.centred)
        for (int64_t j = 0; j < plan.n; ++j) mean += double(a[j]) / double(plan.n);
    double largest = 0;
    for (int64_t j = 0; j < plan.k; ++j) {
        const double magnitude = __builtin_fabs(double(a[j]) - mean);
        if (magnitude > largest) largest = magnitude;
    }
    double down = 1, up = 1;  // each other's inverse
    if (largest > 0 && largest < __builtin_inf()) {
        int exponent = __builtin_ilogb(largest);
        exponent = exponent < -1000 ? -1000 : exponent > 1000 ? 1000 : exponent;
        down = __builtin_ldexp(1.0, -exponent);
        up = __builtin_ldexp(1.0, exponent);
    }
    double squares = 0;
    for (int64_t j = 0; j < plan.k; ++j) {
        const double c = (double(a[j]) - mean) * down;
        squares += c * c;
    }
    const double count = double(plan.inverse_count), sqrt_m = __builtin_sqrt(squares * count) * up;
    const double d = plan.outside ? sqrt_m + double(plan.eps) : __builtin_hypot(sqrt_m, double(plan.root_eps));
    double w = count;
    if (plan.outside) w = sqrt_m > 0 ? count * (d / sqrt_m) : 0.0;
    return {mean, d < Limits<W>::vanishing ? 0.0 : 1.0 / d, w, true};
}

template <class W>
__attribute__((noinline)) void write_carefully(const W* a, const Plan<W>& plan, const W* gain, const W* bias, W* y) {
    const Scale<double> scale = measure_carefully(a, plan);
    for (int64_t j = 0; j < plan.n; ++j) {
        const double value = (double(a[j]) - scale.mean) * scale.r * double(gain[j]);
        y[j] = W(bias != nullptr ? value + double(bias[j]) : value);
    }
}

template <class W>
__attribute__((noinline)) void differentiate_carefully(const W* a, const W* dy, const W* extra, const Plan<W>& plan,
                                                       const W* gain, W* dx, W* dgain, W* dbias) {
    const Scale<double> scale = measure_carefully(a, plan);
    double hs = 0, hts = 0;
    for (int64_t j = 0; j < plan.n; ++j) {
        const double h = double(dy[j]) * double(gain[j]);
        hs += h;
        hts += h * ((double(a[j]) - scale.mean) * scale.r);
    }
    for (int64_t j = 0; j < plan.n; ++j) {
        const double upstream = double(dy[j]), t = (double(a[j]) - scale.mean) * scale.r;
        double value = upstream * double(gain[j]);
        if (plan.centred) value -= hs / double(plan.n);
        if (j < plan.k) value -= scale.w * t * hts;
        value *= scale.r;
        if (extra != nullptr) value += double(extra[j]);
        dx[j] = W(value);
        if (dgain != nullptr) dgain[j] += W(upstream * t);
        if (dbias != nullptr) dbias[j] += W(upstream);
    }
}

}  // namespace LEVEL
