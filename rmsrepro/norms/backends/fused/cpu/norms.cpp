// Forward and backward of the norms over many rows.
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
using Wide = typename Element<E>::Wide;

template <class E>
constexpr bool is_wide = sizeof(E) >= 4;

// A row in the type of the sums: itself, or converted into `room`.
template <class E>
INLINE const Wide<E>* widened(const E* row, Wide<E>* room, int64_t n) {
    if constexpr (is_wide<E>) {
        (void)room, (void)n;
        return row;
    } else {
        walk<E>(0, n, [&](auto how, int64_t j) { how.store(room + j, how.load(row + j)); });
        return room;
    }
}

template <class E>
INLINE void narrowed(const Wide<E>* row, E* to, int64_t n, bool stream) {
    walk<E>(0, n, [&](auto how, int64_t j) {
        if (stream)
            how.stream(to + j, how.load(row + j));
        else
            how.store(to + j, how.load(row + j));
    });
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

// y = round(round(c * r) * gain) + bias in E: `casting=before_gain`.
template <class E>
__attribute__((noinline)) void normalise_rounded(const Wide<E>* a, const Plan<Wide<E>>& plan, const Wide<E>* ones,
                                                 const Wide<E>* gain, const Wide<E>* bias, Wide<E>* room, E* y) {
    typedef typename Element<E>::V V;
    normalise<Wide<E>>(a, plan, ones, nullptr, room, false);
    narrowed<E>(room, y, plan.n, false);
    walk<E>(0, plan.n, [&](auto how, int64_t j) {
        how.store(y + j, how.load(y + j) * how.load(gain + j));
        if (bias != nullptr) {
            const V product = how.load(y + j);
            how.store(y + j, product + how.load(bias + j));
        }
    });
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
    const bool stream =
        rows * n * int64_t(sizeof(E)) >= STREAM_BYTES && aligned(y) && n * int64_t(sizeof(E)) % 64 == 0;
    parallel(threads, [&](int64_t thread, int64_t threads) {
        W* wide_x = room + (3 + 2 * thread) * width;
        W* wide_y = wide_x + width;
        const int64_t last = rows * (thread + 1) / threads;
        for (int64_t row = rows * thread / threads; row < last; ++row) {
            const E* a = x + row * call.x_stride;
            if (residual != nullptr) {
                const E* other = residual + row * call.residual_stride;
                E* to = sum + row * n;
                walk<E>(0, n, [&](auto how, int64_t j) {
                    how.store(to + j, how.load(a + j) + how.load(other + j));
                });
                a = to;
            }
            const W* wide = widened(a, wide_x, n);
            if constexpr (is_wide<E>) {
                normalise<W>(wide, plan, gain, bias, y + row * n, stream);
            } else if (rounded) {
                normalise_rounded<E>(wide, plan, ones, gain, bias, wide_y, y + row * n);
            } else {
                normalise<W>(wide, plan, gain, bias, wide_y, false);
                narrowed<E>(wide_y, y + row * n, n, stream);
            }
        }
        if (stream) finish_streaming();
    });
    return 0;
}

template <class E>
int64_t backward(const BackwardCall& call) {
    typedef Wide<E> W;
    const Plan<W> plan(*call.rule);
    const int64_t n = plan.n, k = plan.k, rows = call.rows, width = padded(n, sizeof(W));
    const int64_t threads = threads_for(rows, n, call.threads);
    W* room = static_cast<W*>(scratch.take(size_t((1 + 6 * threads) * width) * sizeof(W)));
    if (room == nullptr) return 1;
    const W* gain = gain_or_ones(call.gain, call.parameter_dtype, n, room);
    W* gain_sums = room + width;
    W* bias_sums = gain_sums + threads * width;
    const E* x = static_cast<const E*>(call.x);
    const E* upstream = static_cast<const E*>(call.dy);
    const E* more = static_cast<const E*>(call.extra);
    E* dx = static_cast<E*>(call.dx);
    const bool stream = rows * n * int64_t(sizeof(E)) >= STREAM_BYTES && aligned(dx) &&
                        n * int64_t(sizeof(E)) % 64 == 0 && k * int64_t(sizeof(E)) % 64 == 0;
    parallel(threads, [&](int64_t thread, int64_t running) {
        W* buffers = bias_sums + (threads + 4 * thread) * width;
        W* dgain = call.dgain == nullptr ? nullptr : gain_sums + thread * width;
        W* dbias = call.dbias == nullptr ? nullptr : bias_sums + thread * width;
        if (dgain != nullptr) memset(dgain, 0, size_t(width) * sizeof(W));
        if (dbias != nullptr) memset(dbias, 0, size_t(width) * sizeof(W));
        const int64_t last = rows * (thread + 1) / running;
        for (int64_t row = rows * thread / running; row < last; ++row) {
            const W* a = widened(x + row * call.x_stride, buffers, n);
            const W* dy = widened(upstream + row * call.dy_stride, buffers + width, n);
            const W* extra =
                more == nullptr ? nullptr : widened(more + row * call.extra_stride, buffers + 2 * width, n);
            E* to = dx + row * n;
            if constexpr (is_wide<E>) {
                differentiate<W>(a, dy, extra, plan, gain, to, dgain, dbias, stream);
            } else {
                W* wide = buffers + 3 * width;
                differentiate<W>(a, dy, extra, plan, gain, wide, dgain, dbias, false);
                narrowed<E>(wide, to, n, stream);
            }
        }
        if (stream) finish_streaming();
        if (dgain == nullptr && dbias == nullptr) return;
        barrier(running);
        const int64_t begin = n * thread / running, end = n * (thread + 1) / running;
        if (dgain != nullptr) {
            add_up(gain_sums, width, running, begin, end);
            put_parameters(gain_sums, call.dgain, call.parameter_dtype, begin, end);
        }
        if (dbias != nullptr) {
            add_up(bias_sums, width, running, begin, end);
            put_parameters(bias_sums, call.dbias, call.parameter_dtype, begin, end);
        }
    });
    return 0;
}

}  // namespace LEVEL

// 0: done; 1: no memory for the sums over rows.
EXPORTED(forward)(const ForwardCall* call) {
    switch (call->dtype) {
        case FLOAT32: return LEVEL::forward<float>(*call);
        case FLOAT64: return LEVEL::forward<double>(*call);
        case BFLOAT16: return LEVEL::forward<LEVEL::bf16>(*call);
        default: return LEVEL::forward<LEVEL::fp16>(*call);
    }
}

EXPORTED(backward)(const BackwardCall* call) {
    switch (call->dtype) {
        case FLOAT32: return LEVEL::backward<float>(*call);
        case FLOAT64: return LEVEL::backward<double>(*call);
        case BFLOAT16: return LEVEL::backward<LEVEL::bf16>(*call);
        default: return LEVEL::backward<LEVEL::fp16>(*call);
    }
}
