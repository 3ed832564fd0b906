// kvmesh.workers.engines.torch._native: one step's arithmetic on CPUs. Its specification is workers/engines/torch/model.py.
//
// The same kernels (native/kernels.h) are compiled for several instruction sets; what this processor has is asked at
// run time. Threads are those of torch: the OpenMP library that torch has loaded is found by name when this module is
// imported, so that there is one pool and not two that wait for each other. Import torch first.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdlib>

#include "native/arguments.h"

namespace kvmesh::engine {
namespace {

struct Kernels {
    const char* name;
    i64 lanes;  // head dimensions have to be a multiple
    void (*linear_f32)(const Linear&, const Part&, i64, i64);
    void (*linear_bf16)(const Linear&, const Part&, i64, i64);
    void (*prepare_f32)(const Prepare&, i64, i64);
    void (*prepare_bf16)(const Prepare&, i64, i64);
    void (*one_f32)(const Attend&, const Sequence&, i64, i64, float*);
    void (*one_bf16)(const Attend&, const Sequence&, i64, i64, float*);
    void (*tile_f32)(const Attend&, const Sequence&, i64, i64, i64, float*);
    void (*tile_bf16)(const Attend&, const Sequence&, i64, i64, i64, float*);
    void (*norm_f32)(const Norm&, i64, i64);
    void (*norm_bf16)(const Norm&, i64, i64);
    void (*pack)(const Linear&, i64, void*);  // a token of bf16
    bool (*is_woven_f32)(const Linear&);
    bool (*is_woven_bf16)(const Linear&);
    void (*weave_f32)(const Linear&, void*);
    void (*weave_bf16)(const Linear&, void*);
    i64 packed_tokens;                        // a product of so many packs them
    std::size_t packed_bytes;                 // of an item
    void (*gate_f32)(const Gate&, i64, i64);
    void (*gate_bf16)(const Gate&, i64, i64);
};

#define KVMESH_VECTORS(BYTES)                                                                \
    typedef float vf __attribute__((vector_size(BYTES)));                                    \
    typedef int vi __attribute__((vector_size(BYTES)));                                      \
    typedef unsigned vu __attribute__((vector_size(BYTES)));                                 \
    typedef bf16 vh __attribute__((vector_size(BYTES / 2)));                                 \
    constexpr i64 LANES = BYTES / 4;                                                         \
    inline vf load(const float* from) {                                                      \
        vf value;                                                                            \
        __builtin_memcpy(&value, from, sizeof value);                                        \
        return value;                                                                        \
    }                                                                                        \
    inline vf load(const bf16* from) {                                                       \
        vh half;                                                                             \
        __builtin_memcpy(&half, from, sizeof half);                                          \
        return (vf)(__builtin_convertvector(half, vu) << 16);                                \
    }                                                                                        \
    inline vu load_pairs(const bf16* from) {                                                 \
        vu pairs;                                                                            \
        __builtin_memcpy(&pairs, from, sizeof pairs);                                        \
        return pairs;                                                                        \
    }                                                                                        \
    inline void store(vf value, float* to) { __builtin_memcpy(to, &value, sizeof value); }

/// For processors without instructions for bf16: tokens come as floats, `unpack`ed once for all rows of the weight, so
/// that two vectors of a row take one load, a shift and a mask.
#define KVMESH_UNPACKED                                                                                          \
    constexpr bool UNPACKED = true;                                                                              \
    template <int NR, int MR, int ALONG = 1>                                                                     \
    inline i64 multiply(const bf16* weight, i64 weight_stride, const float* x, i64 x_stride, i64 depth,          \
                        vf (&sums)[NR][MR]) {                                                                    \
        const vu upper = vu{} + 0xffff0000u;                                                                     \
        i64 k = 0;                                                                                              \
        for (; k + 2 * LANES <= depth; k += 2 * LANES) {                                                         \
            vf rows[NR];                                                                                         \
            for (int n = 0; n < NR; n++) rows[n] = (vf)(load_pairs(weight + n * weight_stride + k) << 16);       \
            for (int m = 0; m < MR; m++) {                                                                       \
                const vf token = load(x + m * x_stride + k * ALONG);                                                  \
                for (int n = 0; n < NR; n++) sums[n][m] += rows[n] * token;                                      \
            }                                                                                                    \
            for (int n = 0; n < NR; n++) rows[n] = (vf)(load_pairs(weight + n * weight_stride + k) & upper);     \
            for (int m = 0; m < MR; m++) {                                                                       \
                const vf token = load(x + m * x_stride + k * ALONG + LANES);                                          \
                for (int n = 0; n < NR; n++) sums[n][m] += rows[n] * token;                                      \
            }                                                                                                    \
        }                                                                                                        \
        return k;                                                                                                \
    }

/// The sums of COUNT vectors, one after another.
#define KVMESH_SUMS_ONE_BY_ONE                                                          \
    template <int COUNT>                                                                \
    inline void sums_of(const vf* vectors, float* to) {                                 \
        for (int i = 0; i < COUNT; i++) to[i] = sum_of(vectors[i]);                     \
    }

/// The same, 16 at a time: their halves are added until a vector holds the 16 sums. `to` has room for COUNT rounded up.
#define KVMESH_SUMS_OF_16                                                                                          \
    inline __m512 sums_of_4(const vf* v, int count) {                                                              \
        const __m512 none = _mm512_setzero_ps();                                                                   \
        const __m512 a = (__m512)v[0], b = count > 1 ? (__m512)v[1] : none, c = count > 2 ? (__m512)v[2] : none,   \
                     d = count > 3 ? (__m512)v[3] : none;                                                          \
        const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));    \
        const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));    \
        return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),                                         \
                             _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));                                        \
    }                                                                                                              \
    inline __m512 lanes_added(__m512 a, __m512 b) {                                                                \
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));                  \
    }                                                                                                              \
    template <int COUNT>                                                                                           \
    inline void sums_of(const vf* vectors, float* to) {                                                            \
        constexpr int SOME = COUNT < 16 ? COUNT : 16;                                                              \
        const __m512 none = _mm512_setzero_ps();                                                                   \
        const __m512 a = sums_of_4(vectors, SOME), b = SOME > 4 ? sums_of_4(vectors + 4, SOME - 4) : none;         \
        const __m512 c = SOME > 8 ? sums_of_4(vectors + 8, SOME - 8) : none;                                       \
        const __m512 d = SOME > 12 ? sums_of_4(vectors + 12, SOME - 12) : none;                                    \
        store((vf)lanes_added(lanes_added(a, b), lanes_added(c, d)), to);                                          \
        if constexpr (COUNT > 16) sums_of<COUNT - 16>(vectors + 16, to + 16);                                      \
    }

#define KVMESH_MULTIPLY(T)                                                                              \
    template <int NR, int MR, int ALONG = 1>                                                            \
    inline i64 multiply(const T* weight, i64 weight_stride, const T* x, i64 x_stride, i64 depth,        \
                        vf (&sums)[NR][MR]) {                                                           \
        i64 k = 0;                                                                                      \
        for (; k + LANES <= depth; k += LANES) {                                                        \
            vf tokens[MR];                                                                              \
            for (int m = 0; m < MR; m++) tokens[m] = load(x + m * x_stride + k * ALONG);                \
            for (int n = 0; n < NR; n++) {                                                              \
                const vf row = load(weight + n * weight_stride + k);                                    \
                for (int m = 0; m < MR; m++) sums[n][m] += row * tokens[m];                             \
            }                                                                                           \
        }                                                                                               \
        return k;                                                                                       \
    }

namespace any {
constexpr const char* NAME = "any";
constexpr int ROWS = 3;
constexpr bool FETCHES = false;
constexpr int MIXED = 1;
constexpr bool WEAVES = false;
constexpr i64 BF16_ITEMS = 8;
constexpr i64 PACKED_TOKENS = 16;
KVMESH_VECTORS(16)
inline float sum_of(vf v) { return (v[0] + v[1]) + (v[2] + v[3]); }
inline float highest_of(vf v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}
KVMESH_SUMS_ONE_BY_ONE
KVMESH_MULTIPLY(float)
KVMESH_UNPACKED
#include "native/kernels.h"
}  // namespace any

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
constexpr const char* NAME = "avx2";
constexpr int ROWS = 3;
constexpr bool FETCHES = false;
constexpr int MIXED = 1;
constexpr bool WEAVES = false;
constexpr i64 BF16_ITEMS = 16;
constexpr i64 PACKED_TOKENS = 16;
KVMESH_VECTORS(32)
inline float sum_of(vf v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float highest_of(vf v) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
KVMESH_SUMS_ONE_BY_ONE
KVMESH_MULTIPLY(float)
KVMESH_UNPACKED
#include "native/kernels.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
namespace avx512 {
constexpr const char* NAME = "avx512";
constexpr int ROWS = 6;
constexpr bool FETCHES = true;
constexpr int MIXED = 4;
constexpr bool WEAVES = true;
constexpr i64 BF16_ITEMS = 16;
constexpr i64 PACKED_TOKENS = NEVER;
KVMESH_VECTORS(64)
inline float sum_of(vf v) { return _mm512_reduce_add_ps((__m512)v); }
inline float highest_of(vf v) { return _mm512_reduce_max_ps((__m512)v); }
KVMESH_SUMS_OF_16
KVMESH_MULTIPLY(float)
KVMESH_MULTIPLY(bf16)
constexpr bool UNPACKED = false;
#include "native/kernels.h"
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")
namespace avx512_bf16 {
constexpr const char* NAME = "avx512_bf16";
constexpr int ROWS = 6;
constexpr bool FETCHES = true;
constexpr int MIXED = 4;
constexpr bool WEAVES = true;
constexpr i64 BF16_ITEMS = 32;
constexpr i64 PACKED_TOKENS = NEVER;
KVMESH_VECTORS(64)
inline float sum_of(vf v) { return _mm512_reduce_add_ps((__m512)v); }
inline float highest_of(vf v) { return _mm512_reduce_max_ps((__m512)v); }
KVMESH_SUMS_OF_16
KVMESH_MULTIPLY(float)
constexpr bool UNPACKED = false;
template <int NR, int MR, int ALONG = 1>
inline i64 multiply(const bf16* weight, i64 weight_stride, const bf16* x, i64 x_stride, i64 depth, vf (&sums)[NR][MR]) {
    i64 k = 0;
    for (; k + 2 * LANES <= depth; k += 2 * LANES) {
        __m512bh tokens[MR];
        for (int m = 0; m < MR; m++) tokens[m] = (__m512bh)_mm512_loadu_si512(x + m * x_stride + k * ALONG);
        for (int n = 0; n < NR; n++) {
            const __m512bh row = (__m512bh)_mm512_loadu_si512(weight + n * weight_stride + k);
            for (int m = 0; m < MR; m++) sums[n][m] = (vf)_mm512_dpbf16_ps((__m512)sums[n][m], row, tokens[m]);
        }
    }
    return k;
}
#define KVMESH_PAIRS
#include "native/kernels.h"
#undef KVMESH_PAIRS
}  // namespace avx512_bf16
#pragma GCC pop_options

#endif

// --- which of them ----------------------------------------------------------------------------------------

/// From the slowest to the fastest; null where this processor lacks it.
const Kernels* kernels_at(i64 level) {
    switch (level) {
        case 0:
            return &any::KERNELS;
#if defined(__x86_64__)
        case 1:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &avx2::KERNELS : nullptr;
        case 2:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
                       ? &avx512::KERNELS
                       : nullptr;
        case 3:
            return kernels_at(2) && __builtin_cpu_supports("avx512bf16") ? &avx512_bf16::KERNELS : nullptr;
#endif
    }
    return nullptr;
}

constexpr i64 LEVELS = 4;

// --- threads ----------------------------------------------------------------------------------------------

/// Call task(0) ... task(count - 1), each by the thread that is free first.
template <class Task>
void share(i64 count, i64 threads, const Task& task) {
    if (threads > count) threads = count;
    if (threads <= 1) {
        for (i64 i = 0; i < count; i++) task(i);
        return;
    }
    i64 next = 0;
#pragma omp parallel num_threads(static_cast<int>(threads))
    for (;;) {
        const i64 i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
        if (i >= count) break;
        task(i);
    }
}

// --- calls from Python ------------------------------------------------------------------------------------

constexpr i64 ROWS_AT_ONCE = 48;      // of a weight, for a thread
constexpr i64 TOKENS_AT_ONCE = 16;    // prepared by a thread
constexpr i64 MAX_PARTS = 4;

/// Read integers; false: a Python error is set.
bool take(PyObject* const* args, Py_ssize_t count, Py_ssize_t wanted, i64* into) {
    if (count != wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arguments, expected %zd", count, wanted);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        into[i] = PyLong_AsLongLong(args[i]);
        if (into[i] == -1 && PyErr_Occurred()) return false;
    }
    return true;
}

const Kernels* chosen(i64 level) {
    const Kernels* kernels = kernels_at(level);
    if (!kernels) PyErr_Format(PyExc_ValueError, "this processor has no level %lld", static_cast<long long>(level));
    return kernels;
}

void* at(i64 address) { return reinterpret_cast<void*>(address); }

PyObject* levels(PyObject*, PyObject*) {
    PyObject* list = PyList_New(0);
    for (i64 level = 0; list && level < LEVELS; level++) {
        const Kernels* kernels = kernels_at(level);
        if (!kernels) continue;
        PyObject* entry = Py_BuildValue("(Lsi)", static_cast<long long>(level), kernels->name,
                                        static_cast<int>(kernels->lanes));
        if (!entry || PyList_Append(list, entry) < 0) Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    return list;
}

/// level, threads, is_bf16, x, tokens, depth, x_stride, out, out_stride, then (weight, bias, rows) of each part
PyObject* linear(PyObject*, PyObject* const* args, Py_ssize_t count) {
    i64 v[9 + 3 * MAX_PARTS];
    const i64 parts_given = (count - 9) / 3;
    if (count < 12 || parts_given > MAX_PARTS || !take(args, count, 9 + 3 * parts_given, v)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a product takes one to four weights");
        return nullptr;
    }
    const Kernels* kernels = chosen(v[0]);
    if (!kernels) return nullptr;
    Linear job{at(v[3]), at(v[7]), v[4], v[5], v[6], v[8]};
    Part parts[MAX_PARTS];
    i64 first_task[MAX_PARTS + 1] = {0}, column = 0;
    for (i64 p = 0; p < parts_given; p++) {
        const i64* given = v + 9 + 3 * p;
        parts[p] = Part{at(given[0]), at(given[1]), given[2], column};
        column += given[2];
        first_task[p + 1] = first_task[p] + (given[2] + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    }
    auto run = v[2] ? kernels->linear_bf16 : kernels->linear_f32;
    void* packed = nullptr;
    const bool woven = (v[2] ? kernels->is_woven_bf16 : kernels->is_woven_f32)(job);
    const bool in_blocks = job.tokens >= kernels->packed_tokens && job.depth >= PACKED_DEPTH;
    if (v[2] && (in_blocks || kernels->packed_bytes != sizeof(bf16))) {
        packed = std::malloc(kernels->packed_bytes * static_cast<std::size_t>(job.tokens * job.depth));
        if (!packed) return PyErr_NoMemory();
    }
    if (woven) {
        const std::size_t bytes = static_cast<std::size_t>(job.tokens * job.depth) * (v[2] ? 2 : 4);
        packed = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
        if (!packed) return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS;
    if (woven) {
        (v[2] ? kernels->weave_bf16 : kernels->weave_f32)(job, packed);
        job.x = packed;
    } else if (packed) {
        share(job.tokens, job.tokens < TOKENS_AT_ONCE ? 1 : v[1], [&](i64 token) { kernels->pack(job, token, packed); });
        job.x = packed, job.x_stride = job.depth;
    }
    share(first_task[parts_given], v[1], [&](i64 task) {
        i64 p = 0;
        while (task >= first_task[p + 1]) p++;
        const i64 first = (task - first_task[p]) * ROWS_AT_ONCE, last = first + ROWS_AT_ONCE;
        run(job, parts[p], first, last < parts[p].rows ? last : parts[p].rows);
    });
    std::free(packed);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

Cache cache_of(const i64* v) { return Cache{at(v[0]), v[1], v[2], v[3], v[4]}; }

/// level, threads, is_bf16, q, k, v, their strides (3), tokens, heads, rope, norm, positions, write_blocks, cache (5), eps
PyObject* prepare(PyObject*, PyObject* const* args, Py_ssize_t count) {
    i64 v[20];
    if (count != 21) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 21", count);
    if (!take(args, 20, 20, v)) return nullptr;
    const double eps = PyFloat_AsDouble(args[20]);
    if (eps == -1.0 && PyErr_Occurred()) return nullptr;
    const Kernels* kernels = chosen(v[0]);
    if (!kernels) return nullptr;
    const Prepare job{at(v[3]),
                      at(v[4]),
                      at(v[5]),
                      v[6],
                      v[7],
                      v[8],
                      v[9],
                      v[10],
                      at(v[11]),
                      at(v[12]),
                      static_cast<const i64*>(at(v[13])),
                      static_cast<const i64*>(at(v[14])),
                      static_cast<float>(eps),
                      cache_of(v + 15)};
    auto run = v[2] ? kernels->prepare_bf16 : kernels->prepare_f32;
    const i64 tasks = (job.tokens + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE;
    Py_BEGIN_ALLOW_THREADS;
    share(tasks, v[1], [&](i64 task) {
        const i64 last = (task + 1) * TOKENS_AT_ONCE;
        run(job, task * TOKENS_AT_ONCE, last < job.tokens ? last : job.tokens);
    });
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/// level, threads, is_bf16, x, more, weight, out, rows, width, eps
PyObject* add_and_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
    i64 v[9];
    if (count != 10) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 10", count);
    if (!take(args, 9, 9, v)) return nullptr;
    const double eps = PyFloat_AsDouble(args[9]);
    if (eps == -1.0 && PyErr_Occurred()) return nullptr;
    const Kernels* kernels = chosen(v[0]);
    if (!kernels) return nullptr;
    const Norm job{at(v[3]), at(v[4]), at(v[5]), at(v[6]), v[7], v[8], static_cast<float>(eps)};
    auto run = v[2] ? kernels->norm_bf16 : kernels->norm_f32;
    const i64 tasks = (job.rows + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE;
    Py_BEGIN_ALLOW_THREADS;
    share(tasks, v[1], [&](i64 task) {
        const i64 last = (task + 1) * TOKENS_AT_ONCE;
        run(job, task * TOKENS_AT_ONCE, last < job.rows ? last : job.rows);
    });
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/// level, threads, is_bf16, gate, up, out, rows, width, gate_stride, up_stride
PyObject* gate(PyObject*, PyObject* const* args, Py_ssize_t count) {
    i64 v[10];
    if (!take(args, count, 10, v)) return nullptr;
    const Kernels* kernels = chosen(v[0]);
    if (!kernels) return nullptr;
    const Gate job{at(v[3]), at(v[4]), at(v[5]), v[6], v[7], v[8], v[9]};
    auto run = v[2] ? kernels->gate_bf16 : kernels->gate_f32;
    Py_BEGIN_ALLOW_THREADS;
    share(job.rows, job.rows < TOKENS_AT_ONCE ? 1 : v[1], [&](i64 row) { run(job, row, row + 1); });
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/// Queries that one task attends with: those of tokens [first, last), of KV heads [head, head_end).
struct Tile {
    const Sequence* sequence;
    i64 first, last, head, head_end;
};

/// level, threads, is_bf16, q, out, sequences, tables, num_sequences, heads, q_stride, cache (5), scale
PyObject* attend(PyObject*, PyObject* const* args, Py_ssize_t count) {
    i64 v[15];
    if (count != 16) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 16", count);
    if (!take(args, 15, 15, v)) return nullptr;
    const double scale = PyFloat_AsDouble(args[15]);
    if (scale == -1.0 && PyErr_Occurred()) return nullptr;
    const Kernels* kernels = chosen(v[0]);
    if (!kernels) return nullptr;
    const Attend job{at(v[3]), at(v[4]), static_cast<const Sequence*>(at(v[5])),
                     static_cast<const i64*>(at(v[6])), v[7], v[8], v[9], static_cast<float>(scale), cache_of(v + 10)};
    const Cache& c = job.cache;
    if (c.kv_heads < 1 || c.head_dim < 1 || c.head_dim > MAX_HEAD_DIM || c.head_dim % kernels->lanes ||
        job.heads % c.kv_heads)
        return PyErr_Format(PyExc_ValueError, "heads of %lld dimensions at level %s",
                            static_cast<long long>(c.head_dim), kernels->name);
    const i64 group = job.heads / c.kv_heads;
    if (group > MAX_GROUP) return PyErr_Format(PyExc_ValueError, "more than %lld query heads of a KV head",
                                               static_cast<long long>(MAX_GROUP));
    const i64 tokens = group >= 2 * TILE_TOKENS / 4 ? 4 : 2 * TILE_TOKENS / group;  // about as many queries each
    i64 heads = MAX_HEADS_AT_ONCE;  // of a task with one token: fewer if some threads would have no task
    while (heads > 1 && job.num_sequences * (c.kv_heads / heads) < 3 * v[1]) heads /= 2;
    i64 most = 0, task = 0;
    for (i64 i = 0; i < job.num_sequences; i++) most += (job.sequences[i].count + tokens - 1) / tokens * c.kv_heads;
    Tile* todo = static_cast<Tile*>(std::malloc(sizeof(Tile) * static_cast<std::size_t>(most)));
    if (!todo) return PyErr_NoMemory();
    for (i64 i = 0; i < job.num_sequences; i++) {
        const Sequence& s = job.sequences[i];
        const i64 step = s.count == 1 ? heads : 1;
        for (i64 last = s.count; last > 0; last = (last - 1) / tokens * tokens)  // last tokens first: they take longest
            for (i64 head = 0; head < c.kv_heads; head += step)
                todo[task++] = Tile{&s, (last - 1) / tokens * tokens, last, head,
                                    head + step < c.kv_heads ? head + step : c.kv_heads};
    }
    auto one = v[2] ? kernels->one_bf16 : kernels->one_f32;
    auto tile = v[2] ? kernels->tile_bf16 : kernels->tile_f32;
    const i64 rows = tokens * group > heads * group ? tokens * group : heads * group;
    const i64 scratch_bytes = static_cast<i64>(sizeof(float)) * ((2 * CHUNK_KEYS + 2 * rows) * c.head_dim + 2 * rows);
    bool no_memory = false;
    Py_BEGIN_ALLOW_THREADS;
    share(task, v[1], [&](i64 number) {
        const Tile& t = todo[number];
        float* scratch = static_cast<float*>(std::malloc(static_cast<std::size_t>(scratch_bytes)));
        if (!scratch) {
            no_memory = true;
        } else if (t.sequence->count == 1) {
            one(job, *t.sequence, t.head, t.head_end, scratch);
        } else {
            tile(job, *t.sequence, t.first, t.last, t.head, scratch);
        }
        std::free(scratch);
    });
    std::free(todo);
    Py_END_ALLOW_THREADS;
    if (no_memory) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

template <class Function>
PyCFunction method(Function function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"levels", levels, METH_NOARGS, nullptr},
    {"linear", method(linear), METH_FASTCALL, nullptr},
    {"prepare", method(prepare), METH_FASTCALL, nullptr},
    {"add_and_norm", method(add_and_norm), METH_FASTCALL, nullptr},
    {"gate", method(gate), METH_FASTCALL, nullptr},
    {"attend", method(attend), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "kvmesh.workers.engines.torch._native", nullptr, 0, methods, nullptr, nullptr,
                      nullptr, nullptr};

}  // namespace
}  // namespace kvmesh::engine

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&kvmesh::engine::module); }
