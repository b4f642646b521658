// Forward and backward of the norms over many rows.
#pragma once
#include "rows.hpp"
#include "threads.hpp"

namespace LEVEL {

constexpr int64_t STREAM_BYTES = int64_t(8) << 20;  // outputs from this size on would push all else out of the cache

INLINE void finish_streaming() {
#if WIDTH >= 32
    _mm_sfence();
#endif
}

template <class E>
constexpr bool is_wide = sizeof(E) >= 4;

// A row in the type of the sums: itself, or converted into `room`.
template <class E>
INLINE const Wide<E>* widened(const E* row, Wide<E>* room, int64_t n) {
    if constexpr (is_wide<E>) {
        (void)room, (void)n;
        return row;
    } else {
        walk<E>(0, n, [&](auto how, int64_t j) ALWAYS { how.store(room + j, how.load(row + j)); });
        return room;
    }
}

template <class E>
INLINE void narrowed(const Wide<E>* row, E* to, int64_t n) {
    walk<E>(0, n, [&](auto how, int64_t j) ALWAYS { how.store(to + j, how.load(row + j)); });
}

// Parameters in the type of the sums: as they are where they have it, else converted into `room`.
template <class W>
const W* parameters(const void* given, int64_t dtype, int64_t n, W* room) {
    if (dtype == (sizeof(W) == 8 ? FLOAT64 : FLOAT32)) return static_cast<const W*>(given);
    for (int64_t j = 0; j < n; ++j) {
        switch (dtype) {
            case FLOAT32: room[j] = W(static_cast<const float*>(given)[j]); break;
            case FLOAT64: room[j] = W(static_cast<const double*>(given)[j]); break;
            case BFLOAT16: room[j] = W(widen(static_cast<const bf16*>(given)[j])); break;
            default: room[j] = W(widen(static_cast<const fp16*>(given)[j])); break;
        }
    }
    return room;
}

template <class W>
const W* gain_or_ones(const void* given, int64_t dtype, int64_t n, W* room) {
    if (given != nullptr) return parameters(given, dtype, n, room);
    for (int64_t j = 0; j < n; ++j) room[j] = 1;
    return room;
}

template <class W>
void put_parameters(const W* from, void* to, int64_t dtype, int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
        switch (dtype) {
            case FLOAT32: narrow(static_cast<float*>(to) + j, from[j]); break;
            case FLOAT64: static_cast<double*>(to)[j] = double(from[j]); break;
            case BFLOAT16: narrow(static_cast<bf16*>(to) + j, from[j]); break;
            default: narrow(static_cast<fp16*>(to) + j, from[j]); break;
        }
    }
}

// Rows are taken some at a time: first the statistics of all, then the outputs. The roots and divisions of one row
// then wait for nothing that the others do, which is most of the time of a narrow row.
constexpr int64_t MOST_ROWS = 8;
constexpr int64_t BLOCK_BYTES = 16384;  // of a block's inputs, which are to be still in the first cache

template <class E>
INLINE int64_t rows_at_once(int64_t n, int64_t streams) {
    const int64_t fitting = BLOCK_BYTES / (n * streams * int64_t(sizeof(E)) + 1);
    return fitting < 1 ? 1 : fitting > MOST_ROWS ? MOST_ROWS : fitting;
}

template <class E>
INLINE Scale<Wide<E>> measured(const E* a, const Plan<Wide<E>>& plan) {
    return plan.centred ? measure<E, true>(a, plan) : measure<E, false>(a, plan);
}

// One row's output; `room` holds two more rows in the type of the sums. `ones` is given where c * r is rounded to E
// before the product with the gain, and that before the bias: `casting=before_gain`.
template <class E>
void normalise(const E* a, const Scale<Wide<E>>& scale, const Plan<Wide<E>>& plan, const Wide<E>* ones,
               const Wide<E>* gain, const Wide<E>* bias, Wide<E>* room, E* y, bool stream) {
    const Wide<E>* factor = ones != nullptr ? ones : gain;
    const Wide<E>* shift = ones != nullptr ? nullptr : bias;
    const bool past = stream && ones == nullptr;
    if (!scale.fits) {
        Wide<E>* wide = room + padded(plan.n, sizeof(*room));
        write_carefully(widened(a, room, plan.n), plan, factor, shift, wide);
        narrowed(wide, y, plan.n);
    } else if (plan.centred) {
        write_row<E, true>(a, scale, factor, shift, y, plan.n, past);
    } else {
        write_row<E, false>(a, scale, factor, shift, y, plan.n, past);
    }
    if (ones == nullptr) return;
    walk<E>(0, plan.n, [&](auto how, int64_t j) ALWAYS {
        how.store(y + j, how.load(y + j) * how.load(gain + j));
        if (bias != nullptr) how.store(y + j, how.load(y + j) + how.load(bias + j));
    });
}

template <class E>
INLINE Sums<Wide<E>> summed(const E* a, const E* dy, const Plan<Wide<E>>& plan, const Wide<E>* gain) {
    return plan.centred ? measure_gradient<E, true>(a, dy, gain, plan) : measure_gradient<E, false>(a, dy, gain, plan);
}

// One row's gradient; `room` holds four more rows in the type of the sums.
template <class E>
void differentiate(const E* a, const E* dy, const E* extra, const Sums<Wide<E>>& sums, const Plan<Wide<E>>& plan,
                   const Wide<E>* gain, Wide<E>* room, E* dx, Wide<E>* dgain, Wide<E>* dbias, bool stream) {
    if (!sums.scale.fits) {
        const int64_t n = plan.n, width = padded(n, sizeof(*room));
        Wide<E>* wide = room + 3 * width;
        differentiate_carefully(widened(a, room, n), widened(dy, room + width, n),
                                extra == nullptr ? nullptr : widened(extra, room + 2 * width, n), plan, gain, wide,
                                dgain, dbias);
        narrowed(wide, dx, n);
    } else if (plan.centred) {
        write_gradient<E, true>(a, dy, extra, sums, gain, dx, dgain, dbias, plan, stream);
    } else {
        write_gradient<E, false>(a, dy, extra, sums, gain, dx, dgain, dbias, plan, stream);
    }
}

// Asks for a row that comes up soon. The processor's own guesses end with the page, and none are made while a
// row is gone over for the second time.
template <class E>
INLINE void expect(const E* row, int64_t n) {
    const char* at = reinterpret_cast<const char*>(row);
    for (int64_t byte = 0; byte < n * int64_t(sizeof(E)); byte += 64) __builtin_prefetch(at + byte);
}

template <class E>
INLINE int64_t rows_ahead(int64_t n) {
    return 1 + 4096 / (n * int64_t(sizeof(E)) + 1);
}

template <class E>
int64_t forward(const ForwardCall& call) {
    typedef Wide<E> W;
    const Plan<W> plan(*call.rule);
    const int64_t n = plan.n, rows = call.rows, width = padded(n, sizeof(W));
    const int64_t threads = threads_for(rows, n, call.threads);
    W* room = static_cast<W*>(scratch.take(size_t((3 + 2 * threads) * width) * sizeof(W)));
    if (room == nullptr) return 1;
    const W* gain = gain_or_ones(call.gain, call.parameter_dtype, n, room);
    const W* bias =
        call.bias == nullptr ? nullptr : parameters(call.bias, call.parameter_dtype, n, room + width);
    const bool rounded = !is_wide<E> && call.rule->rounded != 0;
    const W* ones = rounded ? gain_or_ones<W>(nullptr, 0, n, room + 2 * width) : nullptr;
    const E* x = static_cast<const E*>(call.x);
    const E* residual = static_cast<const E*>(call.residual);
    E* sum = static_cast<E*>(call.sum);
    E* y = static_cast<E*>(call.y);
    const int64_t ahead = rows_ahead<E>(n), block = rows_at_once<E>(n, residual == nullptr ? 1 : 2);
    const bool stream =
        rows * n * int64_t(sizeof(E)) >= STREAM_BYTES && aligned(y) && n * int64_t(sizeof(E)) % 64 == 0;
    parallel(threads, [&](int64_t thread, int64_t threads) {
        W* rows_room = room + (3 + 2 * thread) * width;
        const int64_t last = rows * (thread + 1) / threads;
        for (int64_t row = rows * thread / threads; row < last; row += block) {
            const int64_t count = last - row < block ? last - row : block;
            Scale<W> scales[MOST_ROWS];
            for (int64_t i = 0; i < count; ++i) {
                const E* a = x + (row + i) * call.x_stride;
                const bool more = row + i + ahead < last;
                if (more) expect(a + ahead * call.x_stride, n);
                if (residual != nullptr) {
                    const E* other = residual + (row + i) * call.residual_stride;
                    if (more) expect(other + ahead * call.residual_stride, n);
                    E* to = sum + (row + i) * n;
                    walk<E>(0, n, [&](auto how, int64_t j) ALWAYS {
                        how.store(to + j, how.load(a + j) + how.load(other + j));
                    });
                    a = to;
                }
                scales[i] = measured(a, plan);
            }
            for (int64_t i = 0; i < count; ++i) {
                const E* a = residual != nullptr ? sum + (row + i) * n : x + (row + i) * call.x_stride;
                normalise(a, scales[i], plan, ones, gain, bias, rows_room, y + (row + i) * n, stream);
            }
        }
        if (stream) finish_streaming();
    });
    return 0;
}

// A parameter's gradient, added up over the rows in two stages: one sum over many thousand rows would lose digits.
constexpr int64_t SETTLE_ROWS = 256;

template <class W>
struct ColumnSums {
    W* now;      // over the last rows; null where the gradient is not wanted
    W* settled;  // over those before
    int64_t width;

    ColumnSums(bool wanted, W* now, W* settled, int64_t width)
        : now(wanted ? now : nullptr), settled(settled), width(width) {
        if (!wanted) return;
        memset(now, 0, size_t(width) * sizeof(W));
        memset(settled, 0, size_t(width) * sizeof(W));
    }
    void settle() {
        if (now == nullptr) return;
        for (int64_t j = 0; j < width; ++j) settled[j] += now[j], now[j] = 0;
    }
};

template <class E>
int64_t backward(const BackwardCall& call) {
    typedef Wide<E> W;
    const Plan<W> plan(*call.rule);
    const int64_t n = plan.n, k = plan.k, rows = call.rows, width = padded(n, sizeof(W));
    const int64_t threads = threads_for(rows, n, call.threads);
    W* room = static_cast<W*>(scratch.take(size_t((1 + 8 * threads) * width) * sizeof(W)));
    if (room == nullptr) return 1;
    const W* gain = gain_or_ones(call.gain, call.parameter_dtype, n, room);
    W* gain_sums = room + width;
    W* bias_sums = gain_sums + threads * width;
    const E* x = static_cast<const E*>(call.x);
    const E* upstream = static_cast<const E*>(call.dy);
    const E* more = static_cast<const E*>(call.extra);
    E* dx = static_cast<E*>(call.dx);
    const int64_t ahead = rows_ahead<E>(n), block = rows_at_once<E>(n, 2);
    const bool stream = rows * n * int64_t(sizeof(E)) >= STREAM_BYTES && aligned(dx) &&
                        n * int64_t(sizeof(E)) % 64 == 0 && k * int64_t(sizeof(E)) % 64 == 0;
    parallel(threads, [&](int64_t thread, int64_t running) {
        W* own = bias_sums + (threads + 6 * thread) * width;
        W* rows_room = own + 2 * width;
        ColumnSums<W> dgain(call.dgain != nullptr, own, gain_sums + thread * width, width);
        ColumnSums<W> dbias(call.dbias != nullptr, own + width, bias_sums + thread * width, width);
        int64_t unsettled = 0;
        const int64_t last = rows * (thread + 1) / running;
        for (int64_t row = rows * thread / running; row < last; row += block) {
            const int64_t count = last - row < block ? last - row : block;
            Sums<W> sums[MOST_ROWS];
            for (int64_t i = 0; i < count; ++i) {
                const E* a = x + (row + i) * call.x_stride;
                const E* dy = upstream + (row + i) * call.dy_stride;
                if (row + i + ahead < last) {
                    expect(a + ahead * call.x_stride, n);
                    expect(dy + ahead * call.dy_stride, n);
                    if (more != nullptr) expect(more + (row + i + ahead) * call.extra_stride, n);
                }
                sums[i] = summed(a, dy, plan, gain);
            }
            for (int64_t i = 0; i < count; ++i) {
                const int64_t now = row + i;
                differentiate(x + now * call.x_stride, upstream + now * call.dy_stride,
                              more == nullptr ? nullptr : more + now * call.extra_stride, sums[i], plan, gain,
                              rows_room, dx + now * n, dgain.now, dbias.now, stream);
            }
            unsettled += count;
            if (unsettled >= SETTLE_ROWS || row + count == last) {
                dgain.settle();
                dbias.settle();
                unsettled = 0;
            }
        }
        if (stream) finish_streaming();
        if (dgain.now == nullptr && dbias.now == nullptr) return;
        barrier(running);
        const int64_t begin = n * thread / running, end = n * (thread + 1) / running;
        if (dgain.now != nullptr) {
            add_up(gain_sums, width, running, begin, end);
            put_parameters(gain_sums, call.dgain, call.parameter_dtype, begin, end);
        }
        if (dbias.now != nullptr) {
            add_up(bias_sums, width, running, begin, end);
            put_parameters(bias_sums, call.dbias, call.parameter_dtype, begin, end);
        }
    });
    return 0;
}

}  // namespace LEVEL
