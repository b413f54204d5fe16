// One forward pass of a decoder over a flat batch of tokens, for CPUs: packed weights, paged keys and values.
//
// Every token's numbers are the same whatever else is in the batch: each output is one sum, taken in one order by one
// thread. Weights and cache are float32 or bfloat16; everything else is float32, but for the inputs of bfloat16 layers
// on a CPU that multiplies those.
//
// Threads start with the pass and end with it. Between phases they meet at a barrier that spins for some microseconds
// and then yields, so that a busy machine loses little.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#endif

// CPUs that multiply bfloat16 get inputs in bfloat16 too. ROLLYARD_DOT does the same arithmetic anywhere, for tests.
#if defined(__AVX512BF16__) || defined(ROLLYARD_DOT)
constexpr bool DOT = true;
#else
constexpr bool DOT = false;
#endif
#if defined(__AVX512F__)
constexpr int V = 16, MR = 12;  // floats of a vector; rows of a tile, so that its sums stay in registers
#else
constexpr int V = 8, MR = 6;
#endif
constexpr int NR = 2 * V;  // outputs of a panel

typedef float vec __attribute__((vector_size(4 * V), aligned(4)));
typedef uint32_t bits __attribute__((vector_size(4 * V), aligned(4)));
typedef uint16_t half __attribute__((vector_size(2 * V), aligned(2)));
typedef int32_t ints __attribute__((vector_size(4 * V), aligned(4)));
struct bf16 { uint16_t raw; };

static inline vec load(const float* p) { return *(const vec*)p; }
static inline vec load(const bf16* p) {
    bits wide = __builtin_convertvector(*(const half*)p, bits) << 16;
    vec out; std::memcpy(&out, &wide, sizeof out); return out;
}
static inline void store(float* p, vec v) { *(vec*)p = v; }
static inline void store(float* p, float v) { *p = v; }
static inline void store(bf16* p, float v) {  // round to nearest even
    uint32_t u; std::memcpy(&u, &v, 4);
    if (v != v) u = 0x7fc00000;
    p->raw = (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static inline vec fill(float x) { return x - vec{}; }
static inline float total(vec v) { float s = 0; for (int i = 0; i < V; i++) s += v[i]; return s; }

// exp to about 1e-7 relative between the ends of float32; beyond them that of the end. Cody-Waite reduction and the degree-5 polynomial of Cephes' expf.
static inline vec vexp(vec x) {
    x = x < -87.3f ? fill(-87.3f) : x;
    x = x > 88.0f ? fill(88.0f) : x;
    vec n = x * 1.44269504088896341f;
    vec k = n + 12582912.0f; k = k - 12582912.0f;  // nearest integer
    vec r = x - k * 0.693359375f; r = r + k * 2.12194440e-4f;
    vec p = fill(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f; p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f; p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ints e = (__builtin_convertvector(k, ints) + 127) << 23;
    vec scale; std::memcpy(&scale, &e, sizeof scale);
    return p * scale;
}

// ------------------------------------------------------------------------------------------------ the team

struct Team {
    int size;
    std::atomic<int> arrived{0}, round{0};
    std::vector<std::atomic<long>> next;  // of each phase: the first piece of work nobody took yet
    Team(int size, int phases) : size(size), next(phases) { for (auto& n : next) n = 0; }
    void meet() {
        if (size == 1) return;
        int now = round.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round.load(std::memory_order_acquire) == now; spins++)
            if (spins > 2000) std::this_thread::yield();
#if defined(__x86_64__)
            else __builtin_ia32_pause();
#endif
    }
    template <class F> void share(int phase, long pieces, F work) {  // every thread of the team calls it; all are done after it
        for (long i; (i = next[phase].fetch_add(1, std::memory_order_relaxed)) < pieces;) work(i);
        meet();
    }
    template <class F> void run(F work) {  // with fewer threads where the system gives no more
        std::atomic<bool> open{false};
        std::vector<std::thread> others;
        others.reserve(size);
        try {
            while ((int)others.size() + 1 < size)
                others.emplace_back([&] { while (!open.load(std::memory_order_acquire)) std::this_thread::yield(); work(); });
        } catch (const std::system_error&) {
            size = (int)others.size() + 1;
        }
        open.store(true, std::memory_order_release);
        work();
        for (auto& other : others) other.join();
    }
};

// ------------------------------------------------------------------------------------------------ linear layers

enum Ending : int { STORE = 0, ADD = 1, SWIGLU = 2 };

constexpr int AHEAD = 8;  // inputs computed for each cache line that is fetched of panels to come

// One step along `in` of a panel: float32 holds [in][NR]; bfloat16 holds pairs, [in / 2][NR][2], so that two shifts widen
// them. Both give the same order of sums.
template <int M> static inline void step(const float* x, long in, long k, vec a, vec b, vec (&sum)[M][2]) {
    for (int m = 0; m < M; m++) { float s = x[m * in + k]; sum[m][0] += s * a; sum[m][1] += s * b; }
}
static inline void pair(const bf16* p, vec& even, vec& odd) {
    bits both = *(const bits*)p, low = both << 16, high = both & 0xffff0000u;
    std::memcpy(&even, &low, sizeof even); std::memcpy(&odd, &high, sizeof odd);
}
template <int M> static inline void sums(const float* x, long in, const float* w, const char* next, vec (&sum)[M][2]) {
    long k = 0;
    for (; k + AHEAD <= in; k += AHEAD, next += 64) {
        __builtin_prefetch(next, 0, 2);
        for (int j = 0; j < AHEAD; j++) step<M>(x, in, k + j, load(w + (k + j) * NR), load(w + (k + j) * NR + V), sum);
    }
    for (; k < in; k++) step<M>(x, in, k, load(w + k * NR), load(w + k * NR + V), sum);
}
template <int M> static inline void sums(const float* x, long in, const bf16* w, const char*, vec (&sum)[M][2]) {
    for (long k = 0; k < in; k += 2) {
        vec a, a_next, b, b_next;
        pair(w + k * NR, a, a_next); pair(w + k * NR + NR, b, b_next);
        step<M>(x, in, k, a, b, sum); step<M>(x, in, k + 1, a_next, b_next, sum);
    }
}
static inline vec dot(vec sum, uint32_t x, const bf16* w) {  // adds x[0] * w[i][0] + x[1] * w[i][1] to each sum[i]
#if defined(__AVX512BF16__)
    __m512 out; __m512i weights;
    std::memcpy(&out, &sum, sizeof out); std::memcpy(&weights, w, sizeof weights);
    out = _mm512_dpbf16_ps(out, (__m512bh)_mm512_set1_epi32((int)x), (__m512bh)weights);
    std::memcpy(&sum, &out, sizeof sum);
    return sum;
#else
    vec even, odd;
    pair(w, even, odd);
    uint32_t low = x << 16, high = x & 0xffff0000u;
    float first, second;
    std::memcpy(&first, &low, 4); std::memcpy(&second, &high, 4);
    return sum + first * even + second * odd;
#endif
}
template <int M> static inline void sums(const bf16* x, long in, const bf16* w, const char*, vec (&sum)[M][2]) {
    for (long k = 0; k < in; k += 2)
        for (int m = 0; m < M; m++) {
            uint32_t both;
            std::memcpy(&both, x + m * in + k, 4);
            sum[m][0] = dot(sum[m][0], both, w + k * NR);
            sum[m][1] = dot(sum[m][1], both, w + k * NR + NR);
        }
}

template <int M, class X, class W>
static void tile(const X* x, long in, const W* w, const char* next, const float* bias, float* y, long ldy, int width, int ending) {
    vec sum[M][2];
    for (int m = 0; m < M; m++) sum[m][0] = sum[m][1] = vec{};
    sums<M>(x, in, w, next, sum);
    for (int m = 0; m < M; m++) {
        vec a = sum[m][0], b = sum[m][1];
        if (bias) { a += load(bias); b += load(bias + V); }
        float* out = y + m * ldy;
        if (ending == SWIGLU) {
            vec gated = a / (1.0f + vexp(-a)) * b;
            if (width == V) store(out, gated); else for (int i = 0; i < width; i++) out[i] = gated[i];
        } else if (width == NR) {
            if (ending == ADD) { a += load(out); b += load(out + V); }
            store(out, a); store(out + V, b);
        } else for (int i = 0; i < width; i++) {
            float s = i < V ? a[i] : b[i - V];
            out[i] = ending == ADD ? out[i] + s : s;
        }
    }
}

// A packed matrix: [panels][in][NR], the last panel filled up with zeros. SWIGLU panels hold V gates, then their V ups.
struct Linear { const void* weight; const float* bias; long in, out; int half; };

// Panels [first, last) for rows in order, so that a few rows and a few panels stay in the caches while they meet.
template <class X, class W>
static void strip(const Linear& l, const X* x, const W* weights, long rows, float* y, int ending, long first, long last, int team) {
    const int each = ending == SWIGLU ? V : NR;
    for (long m = 0; m < rows; m += MR)
        for (long p = first; p < last; p++) {
            const X* row = x + m * l.in;
            const W* w = weights + (p - first) * l.in * NR;
            // Each block of rows fetches a part of the panel that this thread is likely to take next.
            long line = ((p + team * (last - first)) * l.in * NR * (l.half ? 2 : 4)) / 64 + m / MR * (l.in / AHEAD);
            const char* next = (const char*)l.weight + 64 * line;
            const float* bias = l.bias ? l.bias + p * NR : nullptr;
            float* out = y + m * l.out + p * each;
            int width = (int)std::min<long>(each, l.out - p * each);
            switch (std::min<long>(rows - m, MR)) {
#define CASE(n) case n: tile<n>(row, l.in, w, next, bias, out, l.out, width, ending); break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if defined(__AVX512F__)
                CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
            }
        }
}

static void panels_of(const Linear& l, const float* x, const bf16* half, long rows, float* y, int ending, long first, long last, int team) {
    static thread_local std::vector<float> wide;
    if (!l.half) return strip(l, x, (const float*)l.weight + first * l.in * NR, rows, y, ending, first, last, team);
    const bf16* w = (const bf16*)l.weight + first * l.in * NR;
    if (DOT) return strip(l, half, w, rows, y, ending, first, last, team);
    if (rows <= MR) return strip(l, x, w, rows, y, ending, first, last, team);
    wide.resize((last - first) * l.in * NR);  // the panels widened, once for all rows
    for (long k = 0; k < (last - first) * l.in; k += 2)
        for (int n = 0; n < NR; n += V) {
            vec even, odd;
            pair(w + k * NR + 2 * n, even, odd);
            store(&wide[k * NR + n], even); store(&wide[(k + 1) * NR + n], odd);
        }
    strip(l, x, wide.data(), rows, y, ending, first, last, team);
}

constexpr long FEW = 16;          // rows of a piece of work that is small
constexpr long CACHED = 40960;    // floats of the panels that one thread works with at a time: a third of a usual L2 cache

// Takes phases 2 * phase and the one after. `half` [rows, in]: room for the inputs in bfloat16.
static void linear(Team& team, int phase, const Linear& l, const float* x, bf16* half, long rows, float* y, int ending) {
    if (DOT && l.half)
        team.share(2 * phase, (rows + FEW - 1) / FEW, [&](long piece) {
            for (long i = piece * FEW * l.in; i < std::min(rows, (piece + 1) * FEW) * l.in; i++) store(half + i, x[i]);
        });
    long each = ending == SWIGLU ? V : NR, panels = (l.out + each - 1) / each;
    long group = std::max<long>(1, std::min<long>(panels / (4 * team.size), CACHED / (l.in * NR)));
    team.share(2 * phase + 1, (panels + group - 1) / group, [&](long piece) {
        panels_of(l, x, half, rows, y, ending, piece * group, std::min(panels, (piece + 1) * group), team.size);
    });
}

// --------------------------------------------------------------------------------------- norms and positions

static void rms_norm(const float* x, const float* weight, long n, float eps, float* y) {
    vec sum{};
    long i = 0;
    for (; i + V <= n; i += V) { vec v = load(x + i); sum += v * v; }
    float squares = total(sum);
    for (; i < n; i++) squares += x[i] * x[i];
    float scale = 1.0f / std::sqrt(squares / (float)n + eps);
    for (i = 0; i + V <= n; i += V) store(y + i, load(x + i) * scale * load(weight + i));
    for (; i < n; i++) y[i] = x[i] * scale * weight[i];
}

// Rotary positions: pairs are (i, i + n / 2). `rope`: n cosines, then n sines of which the first half is negated.
static void rotate(float* x, const float* rope, long n, float scale) {
    for (long i = 0; i < n / 2; i++) {
        float a = x[i], b = x[i + n / 2];
        x[i] = (a * rope[i] + b * rope[n + i]) * scale;
        x[i + n / 2] = (b * rope[i + n / 2] + a * rope[n + i + n / 2]) * scale;
    }
}

// --------------------------------------------------------------------------------------------------- the model

struct Layer {
    const float *input_norm, *post_norm, *q_norm, *k_norm;  // the last two may be null
    Linear qkv, o, gate_up, down;
    void* cache;  // [pages][kv_heads]: keys [head_dim][page], then values [page][head_dim]
};
struct Model {
    const Layer* layer;
    const float *norm, *rope;
    long layers, width, heads, kv_heads, head_dim, ffn;
    long page_tokens, page;  // tokens of a page; the same rounded up to whole vectors
    float eps;
    int half_cache;
};
struct Batch {
    const int64_t *positions, *places, *rows, *tables;  // of each token: position, page x page_tokens + offset, row of `tables`
    long tokens, table_width;
    float *x, *normed, *qkv, *attended, *active;  // x: embeddings in, the residual stream; normed: hidden states out
    bf16* half;  // [tokens, most inputs of a layer]
};

template <class C>
static void place(const Model& m, const Layer& l, const Batch& b, long t) {
    long d = m.head_dim, kv = m.kv_heads;
    float* q = b.qkv + t * (m.heads + 2 * kv) * d;
    const float* rope = m.rope + b.positions[t] * 2 * d;
    float scale = 1.0f / std::sqrt((float)d);
    for (long h = 0; h < m.heads; h++) {
        if (l.q_norm) rms_norm(q + h * d, l.q_norm, d, m.eps, q + h * d);
        rotate(q + h * d, rope, d, scale);
    }
    long page = b.places[t] / m.page_tokens, offset = b.places[t] % m.page_tokens;
    for (long h = 0; h < kv; h++) {
        float *k = q + (m.heads + h) * d, *v = q + (m.heads + kv + h) * d;
        if (l.k_norm) rms_norm(k, l.k_norm, d, m.eps, k);
        rotate(k, rope, d, 1.0f);
        C* keys = (C*)l.cache + (page * kv + h) * 2 * d * m.page;
        C* values = keys + d * m.page + offset * d;
        for (long i = 0; i < d; i++) { store(keys + i * m.page + offset, k[i]); store(values + i, v[i]); }
    }
}

// --------------------------------------------------------------------------------------------------- attention

// Scores of G queries against the keys of COLS vectors of a page. `next`: what is read after it, fetched meanwhile.
template <int G, int COLS, class C>
static void score(const float* q, const C* keys, const C* next, long d, long page, float* out, long stride) {
    vec sum[G][COLS];
    for (int g = 0; g < G; g++) for (int c = 0; c < COLS; c++) sum[g][c] = vec{};
    for (long i = 0; i < d; i++) {
        vec k[COLS];
        __builtin_prefetch(next + i * page);
        for (int c = 0; c < COLS; c++) k[c] = load(keys + i * page + c * V);
        for (int g = 0; g < G; g++) { float s = q[g * d + i]; for (int c = 0; c < COLS; c++) sum[g][c] += s * k[c]; }
    }
    for (int g = 0; g < G; g++) for (int c = 0; c < COLS; c++) store(out + g * stride + c * V, sum[g][c]);
}

constexpr int LINE = 16 / V;  // vectors of a cache line of float32

// Adds G rows of weights x the values of `count` tokens, on BLOCK vectors of the head.
template <int G, int BLOCK, class C>
static void mix(const float* weights, long stride, const C* values, const C* next, long count, long d, float* out) {
    vec sum[G][BLOCK];
    for (int g = 0; g < G; g++) for (int c = 0; c < BLOCK; c++) sum[g][c] = load(out + g * d + c * V);
    for (long t = 0; t < count; t++) {
        vec v[BLOCK];
        for (int c = 0; c < BLOCK; c += LINE) __builtin_prefetch(next + t * d + c * V);
        for (int c = 0; c < BLOCK; c++) v[c] = load(values + t * d + c * V);
        for (int g = 0; g < G; g++) { float s = weights[g * stride + t]; for (int c = 0; c < BLOCK; c++) sum[g][c] += s * v[c]; }
    }
    for (int g = 0; g < G; g++) for (int c = 0; c < BLOCK; c++) store(out + g * d + c * V, sum[g][c]);
}

// G queries of one token, which share a key-value head.
template <int G, class C>
static void attend(const Model& m, const C* cache, const int64_t* table, long head, long length, const float* q, float* out) {
    static thread_local std::vector<float> scores;
    long d = m.head_dim, page = m.page, stride = (length + m.page_tokens - 1) / m.page_tokens * m.page_tokens + page;
    scores.resize(G * stride);
    float* s = scores.data();
    auto keys = [&](long first) { return cache + (table[first / m.page_tokens] * m.kv_heads + head) * 2 * d * page; };
    for (long first = 0; first < length; first += m.page_tokens) {
        const C *k = keys(first), *next = first + m.page_tokens < length ? keys(first + m.page_tokens) : keys(0) + d * page;
        long c = 0;
        for (; c + 2 * V <= page; c += 2 * V) score<G, 2>(q, k + c, next + c, d, page, s + first + c, stride);
        for (; c < page; c += V) score<G, 1>(q, k + c, next + c, d, page, s + first + c, stride);
    }
    float inverse[G];
    for (int g = 0; g < G; g++) {
        float* row = s + g * stride;
        for (long i = length; i < (length + V - 1) / V * V; i++) row[i] = -INFINITY;
        vec most = load(row), sum{};
        for (long i = V; i < length; i += V) { vec v = load(row + i); most = v > most ? v : most; }
        float top = most[0];
        for (int i = 1; i < V; i++) top = std::max(top, most[i]);
        for (long i = 0; i < length; i += V) { vec e = vexp(load(row + i) - top); sum += e; store(row + i, e); }
        float tail = 0;  // vexp gives no exact 0
        for (long i = length; i < (length + V - 1) / V * V; i++) tail += row[i];
        inverse[g] = 1.0f / (total(sum) - tail);
    }
    std::fill(out, out + G * d, 0.0f);
    for (long first = 0; first < length; first += m.page_tokens) {
        const C *v = keys(first) + d * page, *next = keys(std::min(first + m.page_tokens, length - 1)) + d * page;
        long count = std::min(m.page_tokens, length - first), i = 0;
        for (; i + 4 * V <= d; i += 4 * V) mix<G, 4>(s + first, stride, v + i, next + i, count, d, out + i);
        for (; i < d; i += V) mix<G, 1>(s + first, stride, v + i, next + i, count, d, out + i);
    }
    for (int g = 0; g < G; g++) for (long i = 0; i < d; i += V) store(out + g * d + i, load(out + g * d + i) * inverse[g]);
}

template <class C>
static void attend_token(const Model& m, const Layer& l, const Batch& b, long t, long head) {
    long d = m.head_dim, group = m.heads / m.kv_heads, length = b.positions[t] + 1;
    const int64_t* table = b.tables + b.rows[t] * b.table_width;
    for (long g = 0; g < group;) {
        const float* q = b.qkv + t * (m.heads + 2 * m.kv_heads) * d + (head * group + g) * d;
        float* out = b.attended + t * m.heads * d + (head * group + g) * d;
        const C* cache = (const C*)l.cache;
        switch (std::min<long>(group - g, 4)) {
            case 4: attend<4>(m, cache, table, head, length, q, out); g += 4; break;
            case 3: attend<3>(m, cache, table, head, length, q, out); g += 3; break;
            case 2: attend<2>(m, cache, table, head, length, q, out); g += 2; break;
            default: attend<1>(m, cache, table, head, length, q, out); g += 1;
        }
    }
}

// -------------------------------------------------------------------------------------------------- the pass

constexpr int PHASES = 8;  // of a layer, each of two shares at most

static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Returns the seconds that this thread was in linear layers.
static double forward(Team& team, const Model& m, const Batch& b) {
    double spent = 0;
    auto apply = [&](int phase, const Linear& l, const float* x, float* y, Ending ending) {
        double began = seconds();
        linear(team, phase, l, x, b.half, b.tokens, y, ending);
        spent += seconds() - began;
    };
    long small = (b.tokens + FEW - 1) / FEW;
    auto each_token = [&](int phase, auto work) {
        team.share(2 * phase, small, [&](long piece) {
            for (long t = piece * FEW; t < std::min(b.tokens, (piece + 1) * FEW); t++) work(t);
        });
    };
    auto norm = [&](int phase, const float* weight) {
        each_token(phase, [&](long t) { rms_norm(b.x + t * m.width, weight, m.width, m.eps, b.normed + t * m.width); });
    };
    for (long i = 0; i < m.layers; i++) {
        const Layer& l = m.layer[i];
        int phase = (int)i * PHASES;
        norm(phase, l.input_norm);
        apply(phase + 1, l.qkv, b.normed, b.qkv, STORE);
        each_token(phase + 2, [&](long t) { m.half_cache ? place<bf16>(m, l, b, t) : place<float>(m, l, b, t); });
        team.share(2 * (phase + 3), b.tokens * m.kv_heads, [&](long piece) {
            long t = piece / m.kv_heads, head = piece % m.kv_heads;
            m.half_cache ? attend_token<bf16>(m, l, b, t, head) : attend_token<float>(m, l, b, t, head);
        });
        apply(phase + 4, l.o, b.attended, b.x, ADD);
        norm(phase + 5, l.post_norm);
        apply(phase + 6, l.gate_up, b.normed, b.active, SWIGLU);
        apply(phase + 7, l.down, b.active, b.x, ADD);
    }
    norm((int)m.layers * PHASES, m.norm);
    return spent;
}

// ---------------------------------------------------------------------------------------------------- drawing

constexpr long BLOCK_TOKENS = 256;  // of the vocabulary

// The first token whose cumulative share of exp(logit) exceeds `noise`, in two levels: whole blocks, then one block.
// Never one whose logit is -inf. `near`: the draw is closer to a border between tokens than `edge` of the whole.
static void draw_row(const float* logits, long vocab, double noise, double edge, int64_t* token, double* logprob, int8_t* near) {
    static thread_local std::vector<double> ends;
    vec most = fill(-INFINITY);
    long i = 0;
    for (; i + V <= vocab; i += V) { vec v = load(logits + i); most = v > most ? v : most; }
    float top = most[0];
    for (int j = 1; j < V; j++) top = std::max(top, most[j]);
    for (; i < vocab; i++) top = std::max(top, logits[i]);
    ends.clear();
    double all = 0;
    for (long first = 0; first < vocab; first += BLOCK_TOKENS) {
        long last = std::min(vocab, first + BLOCK_TOKENS);
        vec sum{};
        for (i = first; i + V <= last; i += V) { vec x = load(logits + i) - top, e = vexp(x); sum += x < -80.0f ? vec{} : e; }
        float rest = 0;
        for (; i < last; i++) rest += logits[i] - top < -80.0f ? 0.0f : std::exp(logits[i] - top);
        ends.push_back(all += total(sum) + rest);
    }
    if (!(all < INFINITY)) { *token = 0; *logprob = NAN; *near = 1; return; }  // the logprob says so
    long block = std::upper_bound(ends.begin(), ends.end(), noise * all) - ends.begin();
    while (block == (long)ends.size() || (block && ends[block] == ends[block - 1])) block--;  // it adds to the sum
    double before = block ? ends[block - 1] : 0, target = noise * all - before, sum = 0, below = 0, above = 0;
    long chosen = -1;
    for (i = block * BLOCK_TOKENS; i < std::min(vocab, (block + 1) * BLOCK_TOKENS); i++) {
        double weight = logits[i] - top < -80.0f ? 0.0 : std::exp((double)(logits[i] - top));
        if (!weight) continue;
        chosen = i; below = sum; above = sum += weight;
        if (sum > target) break;
    }
    *token = chosen;
    *logprob = (double)(logits[chosen] - top) - std::log(all);
    *near = std::min(target - below, above - target) < edge * all;
}

// ------------------------------------------------------------------------------------------------ packing

// Eight rows by eight inputs at a time, turned in registers: one by one, numbers would take longer than the memory.
constexpr long T = 8;
typedef float eight __attribute__((vector_size(4 * T), aligned(4)));
typedef uint32_t eight_bits __attribute__((vector_size(4 * T), aligned(4)));
typedef uint16_t eight_halves __attribute__((vector_size(2 * T), aligned(2)));
#if defined(__clang__)
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(a, b, ...) __builtin_shuffle(a, b, (eight_bits){__VA_ARGS__})
#endif

static inline float widen(float v) { return v; }
static inline float widen(bf16 v) { uint32_t u = (uint32_t)v.raw << 16; float out; std::memcpy(&out, &u, 4); return out; }
static inline eight widen_all(const float* p) { return *(const eight*)p; }
static inline eight widen_all(const bf16* p) {
    eight_bits wide = __builtin_convertvector(*(const eight_halves*)p, eight_bits) << 16;
    eight out; std::memcpy(&out, &wide, sizeof out); return out;
}
static inline eight_bits rounded(eight v) {  // bfloat16 in the upper halves, as `store` rounds
    eight_bits u; std::memcpy(&u, &v, sizeof u);
    u = v != v ? (eight_bits{} + 0x7fc00000u) : u;
    return (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u;
}
static inline void put(float* panel, long k, long column, float v) { panel[k * NR + column] = v; }
static inline void put(bf16* panel, long k, long column, float v) { store(panel + (k & ~1L) * NR + 2 * column + (k & 1), v); }
static inline void put_all(float* panel, long k, long column, const eight (&t)[T]) {
    for (int j = 0; j < T; j++) *(eight*)(panel + (k + j) * NR + column) = t[j];
}
static inline void put_all(bf16* panel, long k, long column, const eight (&t)[T]) {
    for (int j = 0; j < T; j += 2) *(eight_bits*)(panel + (k + j) * NR + 2 * column) = rounded(t[j]) >> 16 | rounded(t[j + 1]);
}
static inline void turn(eight (&t)[T]) {  // t[i][j] becomes t[j][i]: halves, quarters and single numbers change places
    for (int i = 0; i < 4; i++) {
        eight a = t[i], b = t[i + 4];
        t[i] = MIX(a, b, 0, 1, 2, 3, 8, 9, 10, 11); t[i + 4] = MIX(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int i : {0, 1, 4, 5}) {
        eight a = t[i], b = t[i + 2];
        t[i] = MIX(a, b, 0, 1, 8, 9, 4, 5, 12, 13); t[i + 2] = MIX(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int i : {0, 2, 4, 6}) {
        eight a = t[i], b = t[i + 1];
        t[i] = MIX(a, b, 0, 8, 2, 10, 4, 12, 6, 14); t[i + 1] = MIX(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    }
}

// Rows of a weight [.., in], some inputs of each, into the columns of a block from `column` on.
template <class P, class S> static void pack(P* block, const S* source, long in, long inputs, long rows, long column) {
    for (long row = 0; row < rows; row += T, column += T) {
        long here = std::min(T, rows - row), k = 0;
        for (; here == T && k + T <= inputs; k += T) {
            eight t[T];
            for (int i = 0; i < T; i++) t[i] = widen_all(source + (row + i) * in + k);
            turn(t);
            put_all(block, k, column, t);
        }
        for (; k < inputs; k++)
            for (long i = 0; i < here; i++) put(block, k, column + i, widen(source[(row + i) * in + k]));
    }
}

// A weight [rows, in] to be packed: its rows are the outputs from `first` on, of which each panel takes `each`, from column
// `offset` on.
struct Job {
    void* panels; const void* source;
    int half, half_source;
    long rows, in, first, each, offset;
    long until() const { return (first + rows - 1) / each + 1; }  // panels
};

template <class P, class S> static void pack_part(const Job& job, long panel, long k, long inputs, void* block) {
    long from = std::max(0L, panel * job.each - job.first), to = std::min(job.rows, (panel + 1) * job.each - job.first);
    long column = job.offset + job.first + from - panel * job.each;
    if (from < to) pack((P*)block, (const S*)job.source + from * job.in + k, job.in, inputs, to - from, column);
}

// Copies whole cache lines past the cache: fetching them, only to overwrite them, would be a third of the traffic.
static inline void stream(void* to, const void* from, long bytes) {
#if defined(__AVX__)
    if ((uintptr_t)to % 32 == 0) {
        for (long i = 0; i < bytes; i += 32) _mm256_stream_si256((__m256i*)((char*)to + i), *(const __m256i*)((const char*)from + i));
        _mm_sfence();
        return;
    }
#endif
    std::memcpy(to, from, bytes);
}

// One panel from all the weights that share it, put together in the cache, some inputs at a time.
static void pack_panel(const Job* jobs, const Job* end, long panel) {
    constexpr long INPUTS = 512;
    alignas(64) char block[INPUTS * NR * sizeof(float)];
    std::memset(block, 0, sizeof block);  // the columns that nobody has
    long in = jobs->in, width = NR * (jobs->half ? sizeof(bf16) : sizeof(float));
    for (long k = 0; k < in; k += INPUTS) {
        long inputs = std::min(INPUTS, in - k);
        for (const Job* job = jobs; job < end; job++) {
            if (job->half) (job->half_source ? pack_part<bf16, bf16> : pack_part<bf16, float>)(*job, panel, k, inputs, block);
            else (job->half_source ? pack_part<float, bf16> : pack_part<float, float>)(*job, panel, k, inputs, block);
        }
        stream((char*)jobs->panels + (panel * in + k) * width, block, inputs * width);
    }
}

extern "C" {

int rollyard_vector() { return V; }

int rollyard_dot() { return DOT; }  // do inputs of bfloat16 layers become bfloat16?

// Jobs that fill the same panels stand side by side.
void rollyard_pack(const Job* jobs, long count, int threads) {
    struct Group { const Job *begin, *end; long until; };  // panels of all groups up to and with this one
    std::vector<Group> groups;
    for (const Job* job = jobs; job < jobs + count;) {
        const Job* begin = job;
        long panels = 0;
        for (; job < jobs + count && job->panels == begin->panels; job++) panels = std::max(panels, job->until());
        groups.push_back({begin, job, panels + (groups.empty() ? 0 : groups.back().until)});
    }
    Team team(threads, 1);
    team.run([&] {
        team.share(0, groups.back().until, [&](long i) {
            auto group = std::upper_bound(groups.begin(), groups.end(), i, [](long i, const Group& g) { return i < g.until; });
            pack_panel(group->begin, group->end, i - (group == groups.begin() ? 0 : std::prev(group)->until));
        });
    });
}

void rollyard_linear(const Linear* l, const float* x, long rows, float* y, int ending, int threads) {
    Team team(threads, 2);
    std::vector<bf16> half(DOT ? rows * l->in : 0);
    team.run([&] { linear(team, 0, *l, x, half.data(), rows, y, ending); });
}

// Layers one after the other, for a benchmark; all read `x` [rows, most inputs] and write `y` [rows, most outputs].
void rollyard_linears(const Linear* l, const int* endings, long count, const float* x, long rows, float* y, int threads) {
    Team team(threads, 2 * (int)count);
    long most = 0;
    for (long i = 0; i < count; i++) most = std::max(most, l[i].in);
    std::vector<bf16> half(DOT ? rows * most : 0);
    team.run([&] { for (long i = 0; i < count; i++) linear(team, (int)i, l[i], x, half.data(), rows, y, endings[i]); });
}

double rollyard_forward(const Model* m, const Batch* b, int threads) {  // seconds in linear layers
    Team team(threads, 2 * ((int)m->layers * PHASES + 1));
    double spent = 0;
    auto caller = std::this_thread::get_id();
    team.run([&] {
        double found = forward(team, *m, *b);
        if (std::this_thread::get_id() == caller) spent = found;
    });
    return spent;
}

// logits [rows, vocab] -> tokens, logprobs, near ties [rows].
void rollyard_draw(const float* logits, long rows, long vocab, const double* noise, double edge, int64_t* tokens,
                   double* logprobs, int8_t* near, int threads) {
    Team team(threads, 1);
    team.run([&] {
        team.share(0, rows, [&](long r) {
            draw_row(logits + r * vocab, vocab, noise[r], edge, tokens + r, logprobs + r, near + r);
        });
    });
}

}
