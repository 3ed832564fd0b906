// What the kernels of the torch engine are told: shapes, strides and addresses. Strides count items, not bytes.
#pragma once

#include <cstdint>

namespace kvmesh::engine {

typedef std::int64_t i64;
typedef std::uint16_t bf16;  // the upper half of a float32

constexpr i64 MAX_GROUP = 64;      // query heads of one KV head
constexpr i64 MAX_AT_ONCE = 4;     // queries that one key is multiplied with
constexpr i64 MAX_HEADS_AT_ONCE = 8;  // KV heads that one task reads
constexpr i64 MAX_HEAD_DIM = 512;  // items
constexpr i64 BLOCK_ROWS = 12;     // of a weight, multiplied with the same tokens: a multiple of every ROWS
constexpr i64 PACKED_DEPTH = 512;  // items of a token, from which on packing pays
constexpr i64 NEVER = i64{1} << 62;
constexpr i64 TILE_TOKENS = 64;    // of a prompt, whose queries one task attends with
constexpr i64 CHUNK_KEYS = 64;     // of a prompt, unpacked at a time

/// One of the matrices that read the same input, [rows, depth]; its outputs begin at a column of the result.
struct Part {
    const void* weight;
    const void* bias;  // null: none
    i64 rows, column;
};

struct Linear {
    const void* x;  // [tokens, depth]
    void* out;      // [tokens, ...]
    i64 tokens, depth, x_stride, out_stride;
};

/// The cache: [blocks, layers, 2, kv_heads, block_size, head_dim], seen from one layer's keys of block 0.
struct Cache {
    void* keys;
    i64 block_stride, kv_heads, block_size, head_dim;
};

/// New tokens: queries, keys and values of each side by side, [tokens, heads + 2 * kv_heads, head_dim].
struct Prepare {
    void *q, *k;                          // [tokens, heads * head_dim], [tokens, kv_heads * head_dim]: in place
    const void* v;                        // as k
    i64 q_stride, k_stride, v_stride;     // items between their rows: all three may be parts of one tensor
    i64 tokens, heads;
    const void* rope;        // [positions, 2, head_dim]: cos and sin; see model.rope_table
    const void* norm;        // [heads + kv_heads, head_dim]; null: none
    const i64* positions;    // [tokens]
    const i64* write_blocks; // [tokens]
    float eps;
    Cache cache;
};

/// A sequence in a step: its new tokens are those of the batch from `first` on, at positions from `start` on.
struct Sequence {
    i64 first, count, start, table;  // `table`: where its block ids begin among those of all sequences
};

/// x += more; out = x normed: all [rows, width].
struct Norm {
    void* x;
    const void* more;  // null: nothing to add
    const void* weight;
    void* out;
    i64 rows, width;
    float eps;
};

/// out = silu(gate) * up: [rows, width] each, gate and up at a stride.
struct Gate {
    const void *gate, *up;
    void* out;
    i64 rows, width, gate_stride, up_stride;
};

struct Attend {
    const void* q;  // [tokens, heads, head_dim] at q_stride a token
    void* out;      // [tokens, heads, head_dim]
    const Sequence* sequences;
    const i64* tables;
    i64 num_sequences, heads, q_stride;
    float scale;
    Cache cache;
};

}  // namespace kvmesh::engine
