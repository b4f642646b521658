// One step of a GRU over the rows of a batch, the two products with its weights apart: norms, gates and new state
// forwards, and all their gradients backwards. models/gru.py has the equations.
//
// A row of each product is [gates r and u (2 d), candidate (d)]. Its two parts are the sites of the four norms:
// gates of x, candidate of x, gates of the state, candidate of the state. A site without a norm may have a bias.
#pragma once
#include "gates.hpp"
#include "rows.hpp"
#include "threads.hpp"

// Gain and bias are places in the vector of parameters, -1 where there is none.
struct GruSite {
    Rule rule;  // its n is the site's width, whether it has a norm or not
    int64_t normed, gain, bias;
};

// All are contiguous. `sites` are four. mask, scales and `direct` may be null.
struct GruForwardCall {
    const GruSite* sites;
    int64_t dtype, rows, width, threads;
    const void* parameters;
    const void* x;  // (rows, 3 width): the raw product with the input
    const void* h;  // (rows, 3 width): that with the state
    const void* state;
    const unsigned char* mask;  // (rows): 0 keeps the state
    void* scales;               // (rows, 12), for the backward pass
    void* new_state;
};

// The gradient with respect to the new state is upstream + direct + product: what comes from outside, and from the
// next step, on the direct way and through the product with the state's weights.
struct GruBackwardCall {
    const GruSite* sites;
    int64_t dtype, rows, width, threads;
    const void* parameters;
    const void* x;
    const void* h;
    const void* state;
    const unsigned char* mask;
    const void* scales;
    const void* upstream;
    int64_t upstream_stride;
    const void* product;  // null with `direct` at the last step
    void* direct;         // read and overwritten: the old state's gradient but for its product's
    int64_t first;        // whether direct and product hold nothing yet
    void* dx;             // (rows, 3 width)
    void* dh;
    void* sums;  // (threads, sums_stride): added to, each thread its own; as the vector of parameters
    int64_t sums_stride;
};

namespace LEVEL {
namespace gru {

enum { GATES_X, CANDIDATE_X, GATES_H, CANDIDATE_H, SITES };
constexpr int64_t SCALE = 3;        // numbers that are kept of a norm of a row
constexpr int64_t WORK = 8;         // an entry of the state costs as much as so many of a norm
constexpr int64_t TEMPORARIES = 4;  // rows that the backward pass keeps for itself

template <class W>
struct Site {
    Plan<W> plan;
    bool normed;
    int64_t gain_at, bias_at;
    const W* gain;
    const W* bias;

    Site(const GruSite& site, const W* parameters)
        : plan(site.rule),
          normed(site.normed != 0),
          gain_at(site.gain),
          bias_at(site.bias),
          gain(site.gain < 0 ? nullptr : parameters + site.gain),
          bias(site.bias < 0 ? nullptr : parameters + site.bias) {}
};

template <class W>
struct Sites {
    Site<W> gates_x, candidate_x, gates_h, candidate_h;

    Sites(const GruSite* sites, const void* parameters)
        : gates_x(sites[GATES_X], static_cast<const W*>(parameters)),
          candidate_x(sites[CANDIDATE_X], static_cast<const W*>(parameters)),
          gates_h(sites[GATES_H], static_cast<const W*>(parameters)),
          candidate_h(sites[CANDIDATE_H], static_cast<const W*>(parameters)) {}
};

// What a row's norm at one site comes down to; t = (a - mean) * r.
template <class W>
struct Normed {
    W mean, r, w;
};

template <class W>
INLINE Normed<W> scale_row(const Site<W>& site, const W* a) {
    if (!site.normed) return {0, 1, 0};
    const Scale<W> scale = site.plan.centred ? measure<W, true>(a, site.plan) : measure<W, false>(a, site.plan);
    if (scale.fits) return {scale.mean, scale.r, scale.w};
    const Scale<double> careful = measure_carefully(a, site.plan);
    return {W(careful.mean), W(careful.r), W(careful.w)};
}

template <class W>
struct Row {
    Normed<W> gates_x, candidate_x, gates_h, candidate_h;

    void put(W* to) const { memcpy(to, this, sizeof *this); }
    void get(const W* from) { memcpy(this, from, sizeof *this); }
};

// t of a vector of entries of a site.
template <class W, class V>
INLINE V scaled(const Site<W>& site, const Normed<W>& row, V a) {
    return site.normed ? (a - row.mean) * row.r : a;
}

// The site's output from t; j counts within the site.
template <class W, class How, class V>
INLINE V finished(const Site<W>& site, How how, V t, int64_t j) {
    if (site.gain != nullptr) t = t * how.load(site.gain + j);
    if (site.bias != nullptr) t = t + how.load(site.bias + j);
    return t;
}

// Asks for what the next row has where this one's three parts are read, the row after `row` of a product. Rows come
// from a memory that they have long left the caches for, and the processor's own guesses end with a page.
template <class W>
INLINE void expect(const W* row, int64_t d, int64_t j) {
    for (int part = 3; part < 6; ++part) __builtin_prefetch(row + part * d + j);
}

template <class W>
int64_t forward(const GruForwardCall& call) {
    typedef typename Element<W>::V V;
    const Sites<W> sites(call.sites, call.parameters);
    const int64_t rows = call.rows, d = call.width;
    parallel(threads_for(rows, WORK * d, call.threads), [&](int64_t thread, int64_t threads) {
        const int64_t last = rows * (thread + 1) / threads;
        for (int64_t row = rows * thread / threads; row < last; ++row) {
            const W* state = static_cast<const W*>(call.state) + row * d;
            W* to = static_cast<W*>(call.new_state) + row * d;
            if (call.mask != nullptr && call.mask[row] == 0) {
                memcpy(to, state, size_t(d) * sizeof(W));
                continue;
            }
            const W* x = static_cast<const W*>(call.x) + row * 3 * d;
            const W* h = static_cast<const W*>(call.h) + row * 3 * d;
            const Row<W> scales = {scale_row(sites.gates_x, x), scale_row(sites.candidate_x, x + 2 * d),
                                   scale_row(sites.gates_h, h), scale_row(sites.candidate_h, h + 2 * d)};
            if (call.scales != nullptr) scales.put(static_cast<W*>(call.scales) + row * SITES * SCALE);
            walk<W>(0, d, [&](auto how, int64_t j) ALWAYS {
                const auto side = [&](const Site<W>& site, const Normed<W>& scale, const W* a, int64_t at) ALWAYS {
                    return finished(site, how, scaled<W, V>(site, scale, how.load(a + at)), at);
                };
                expect(x, d, j);
                expect(h, d, j);
                const V reset = sigmoid(side(sites.gates_x, scales.gates_x, x, j) +
                                        side(sites.gates_h, scales.gates_h, h, j));
                const V update = sigmoid(side(sites.gates_x, scales.gates_x, x, d + j) +
                                         side(sites.gates_h, scales.gates_h, h, d + j));
                const V candidate =
                    hyperbolic_tangent(side(sites.candidate_x, scales.candidate_x, x + 2 * d, j) +
                                       reset * side(sites.candidate_h, scales.candidate_h, h + 2 * d, j));
                how.store(to + j, candidate + update * (how.load(state + j) - candidate));
            });
        }
    });
    return 0;
}

// The gradient of a row at one site for `upstream`; adds to the parameters' sums. `h` and `ht` are the sums over
// the row of h = gain * upstream and of h t.
template <class W>
void write_site(const Site<W>& site, const Normed<W>& scale, const W* a, const W* upstream, W h, W ht, W* da,
                W* sums) {
    typedef typename Element<W>::V V;
    const int64_t n = site.plan.n, k = site.plan.k;
    W* dgain = site.gain_at < 0 ? nullptr : sums + site.gain_at;
    W* dbias = site.bias_at < 0 ? nullptr : sums + site.bias_at;
    if (!site.normed) {
        walk<W>(0, n, [&](auto how, int64_t j) ALWAYS {
            const V up = how.load(upstream + j);
            how.store(da + j, up);
            if (dbias != nullptr) how.store(dbias + j, how.load(dbias + j) + up);
        });
        return;
    }
    const W mean_h = site.plan.centred ? h * site.plan.inverse_n : W(0);
    // In two parts: of the entries that the statistic read, and of the others.
    for (int part = 0; part < (k == n ? 1 : 2); ++part) {
        const W factor = part == 0 ? scale.w * ht : W(0);
        walk<W>(part == 0 ? 0 : k, part == 0 ? k : n, [&](auto how, int64_t j) ALWAYS {
            const V up = how.load(upstream + j), t = (how.load(a + j) - scale.mean) * scale.r;
            const V scaled_up = site.gain == nullptr ? up : up * how.load(site.gain + j);
            how.store(da + j, (scaled_up - mean_h - factor * t) * scale.r);
            if (dgain != nullptr) how.store(dgain + j, how.load(dgain + j) + up * t);
            if (dbias != nullptr) how.store(dbias + j, how.load(dbias + j) + up);
        });
    }
}

// The two sums over a row that a norm's gradient needs: of h = gain * upstream, and of h t.
template <class W>
struct Pair {
    typename Element<W>::V h = {}, ht = {};

    template <class How, class V>
    INLINE void add(const Site<W>& site, How how, V up, V t, int64_t j) {
        if (!site.normed) return;
        if (site.gain != nullptr) up = up * how.load(site.gain + j);
        h += up;
        ht += up * t;
    }
};

template <class W>
void differentiate_row(const GruBackwardCall& call, const Sites<W>& sites, int64_t row, W* room, W* sums) {
    typedef typename Element<W>::V V;
    const int64_t d = call.width;
    const W* upstream = static_cast<const W*>(call.upstream) + row * call.upstream_stride;
    const W* product = static_cast<const W*>(call.product) + row * d;
    W* direct = static_cast<W*>(call.direct) + row * d;
    W* dx = static_cast<W*>(call.dx) + row * 3 * d;
    W* dh = static_cast<W*>(call.dh) + row * 3 * d;
    const bool first = call.first != 0;
    if (call.mask != nullptr && call.mask[row] == 0) {
        walk<W>(0, d, [&](auto how, int64_t j) ALWAYS {
            V total = how.load(upstream + j);
            if (!first) total += how.load(direct + j) + how.load(product + j);
            how.store(direct + j, total);
        });
        memset(dx, 0, size_t(3 * d) * sizeof(W));
        memset(dh, 0, size_t(3 * d) * sizeof(W));
        return;
    }
    const W* x = static_cast<const W*>(call.x) + row * 3 * d;
    const W* h = static_cast<const W*>(call.h) + row * 3 * d;
    const W* state = static_cast<const W*>(call.state) + row * d;
    Row<W> scales;
    scales.get(static_cast<const W*>(call.scales) + row * SITES * SCALE);
    // The gradients at the gates' sums, r and u as in the products, and at the candidate's two terms.
    W* d_gates = room;
    W* d_candidate = room + 2 * d;
    W* d_other = room + 3 * d;
    Pair<W> gates_x, candidate_x, gates_h, candidate_h;
    walk<W>(0, d, [&](auto how, int64_t j) ALWAYS {
        expect(x, d, j);
        expect(h, d, j);
        __builtin_prefetch(upstream + call.upstream_stride + j);
        const V x_r = scaled<W, V>(sites.gates_x, scales.gates_x, how.load(x + j));
        const V h_r = scaled<W, V>(sites.gates_h, scales.gates_h, how.load(h + j));
        const V x_u = scaled<W, V>(sites.gates_x, scales.gates_x, how.load(x + d + j));
        const V h_u = scaled<W, V>(sites.gates_h, scales.gates_h, how.load(h + d + j));
        const V x_n = scaled<W, V>(sites.candidate_x, scales.candidate_x, how.load(x + 2 * d + j));
        const V h_n = scaled<W, V>(sites.candidate_h, scales.candidate_h, how.load(h + 2 * d + j));
        const V reset = sigmoid(finished(sites.gates_x, how, x_r, j) + finished(sites.gates_h, how, h_r, j));
        const V update =
            sigmoid(finished(sites.gates_x, how, x_u, d + j) + finished(sites.gates_h, how, h_u, d + j));
        const V inner = finished(sites.candidate_h, how, h_n, j);
        const V candidate = hyperbolic_tangent(finished(sites.candidate_x, how, x_n, j) + reset * inner);
        // Lanes beyond the row are zeros in `total`, and so in all that follows.
        V total = how.load(upstream + j);
        if (!first) total += how.load(direct + j) + how.load(product + j);
        how.store(direct + j, total * update);
        const V at_candidate = total * (1 - update) * (1 - candidate * candidate);
        const V at_reset = at_candidate * inner * (reset * (1 - reset));
        const V at_update = total * (how.load(state + j) - candidate) * (update * (1 - update));
        const V at_inner = at_candidate * reset;
        how.store(d_gates + j, at_reset);
        how.store(d_gates + d + j, at_update);
        how.store(d_candidate + j, at_candidate);
        how.store(d_other + j, at_inner);
        gates_x.add(sites.gates_x, how, at_reset, x_r, j);
        gates_x.add(sites.gates_x, how, at_update, x_u, d + j);
        gates_h.add(sites.gates_h, how, at_reset, h_r, j);
        gates_h.add(sites.gates_h, how, at_update, h_u, d + j);
        candidate_x.add(sites.candidate_x, how, at_candidate, x_n, j);
        candidate_h.add(sites.candidate_h, how, at_inner, h_n, j);
    });
    const auto write = [&](const Site<W>& site, const Normed<W>& scale, const Pair<W>& pair, const W* a, const W* up,
                           W* da) {
        const W sum_h = site.normed ? horizontal_sum(pair.h) : W(0);
        const W sum_ht = site.normed ? horizontal_sum(pair.ht) : W(0);
        write_site<W>(site, scale, a, up, sum_h, sum_ht, da, sums);
    };
    write(sites.gates_x, scales.gates_x, gates_x, x, d_gates, dx);
    write(sites.candidate_x, scales.candidate_x, candidate_x, x + 2 * d, d_candidate, dx + 2 * d);
    write(sites.gates_h, scales.gates_h, gates_h, h, d_gates, dh);
    write(sites.candidate_h, scales.candidate_h, candidate_h, h + 2 * d, d_other, dh + 2 * d);
}

template <class W>
int64_t backward(const GruBackwardCall& call) {
    const Sites<W> sites(call.sites, call.parameters);
    const int64_t rows = call.rows, width = padded(TEMPORARIES * call.width, sizeof(W));
    const int64_t threads = threads_for(rows, WORK * call.width, call.threads);
    W* room = static_cast<W*>(scratch.take(size_t(threads * width) * sizeof(W)));
    if (room == nullptr) return 1;
    parallel(threads, [&](int64_t thread, int64_t threads) {
        W* sums = static_cast<W*>(call.sums) + thread * call.sums_stride;
        const int64_t last = rows * (thread + 1) / threads;
        for (int64_t row = rows * thread / threads; row < last; ++row)
            differentiate_row(call, sites, row, room + thread * width, sums);
    });
    return 0;
}

}  // namespace gru
}  // namespace LEVEL
