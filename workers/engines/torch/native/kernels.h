// The arithmetic of the torch engine, once per instruction set: _native.cpp includes this file in a namespace and under
// a target of its own each time. Before, it defines the vector `vf` of LANES floats and what GCC's vectors lack:
// load, store, sum and highest, for float and bf16, and says from how many tokens on a product packs them. No templates
// of the standard library here: their code would be shared with files for processors that lack these instructions.

// --- items ------------------------------------------------------------------------------------------------

inline float widen(float value) { return value; }

inline float widen(bf16 value) {
    std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
    float wide;
    __builtin_memcpy(&wide, &bits, 4);
    return wide;
}

inline void narrow(float value, float* to) { *to = value; }

inline void narrow(float value, bf16* to) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    *to = value != value ? 0x7fc0 : static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void put(vf value, float* to) { store(value, to); }

inline void put(vf value, bf16* to) {
    const vu bits = (vu)value;
    const vu near = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const vh half = __builtin_convertvector(value != value ? vu{} + 0x7fc0u : near, vh);
    __builtin_memcpy(to, &half, sizeof half);
}

/// Not "vf{} + value": that is an addition, which turns -0 into 0.
inline vf spread(float value) { return value - vf{}; }

/// e^x for x <= 0; 0 where x is below float's range.
inline vf exp_of(vf x) {
    const vf lowest = spread(-87.3f);
    vf bounded = x < lowest ? lowest : x;
    vf shifted = bounded * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer part is in the lowest bits
    vf whole = shifted - 12582912.0f;
    vf rest = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
    vf sum = spread(1.9875691500e-4f);
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    vi bits = __builtin_convertvector(whole, vi) << 23;
    sum = (vf)((vi)sum + bits);
    return x < lowest ? spread(0.0f) : sum;
}

// --- matrix products --------------------------------------------------------------------------------------

/// What a product reads tokens from: floats where `multiply` wants bf16 tokens unpacked.
template <class T, bool Unpacked = UNPACKED>
struct TokensOf {
    typedef T item;
};
template <>
struct TokensOf<bf16, true> {
    typedef float item;
};

/// Widen a token as `multiply` wants it: of each 2 * LANES items those with an even place, then the others.
inline void unpack(const bf16* token, i64 depth, float* to) {
    i64 k = 0;
    for (; k + 2 * LANES <= depth; k += 2 * LANES) {
        const vu pairs = load_pairs(token + k);
        store((vf)(pairs << 16), to + k);
        store((vf)(pairs & (vu{} + 0xffff0000u)), to + k + LANES);
    }
    for (; k < depth; k++) to[k] = widen(token[k]);
}

/// Fetch [from, from + count) from memory, of what will be read soon.
template <class T>
inline void fetch_ahead(const T* from, i64 count) {
    constexpr i64 LINE = 64 / static_cast<i64>(sizeof(T));
    for (i64 i = 0; i < count; i += LINE) __builtin_prefetch(from + i, 0, 2);
}

/// Items of a row at a time. With 5 to 7 tokens of 3,072 items, twice as many took up to 1.7 times as long, in some runs.
constexpr i64 fetched(int tokens) { return (tokens > 4 && tokens < 8 ? 2 : 4) * LANES; }

/// Rows that come from memory during a product. Several products share them: each fetches every `every`-th part, from
/// its own on.
template <class T>
struct Ahead {
    const T* rows = nullptr;  // null: none
    i64 part = 0, every = 1;
};

/// NR rows of a weight with MR tokens: every item of the weight is read once, and in its own order. Meanwhile as many rows
/// come from memory.
template <int NR, int MR, int ALONG = 1, class T>
inline void product(const T* weight, i64 weight_stride, const typename TokensOf<T>::item* x, i64 x_stride, i64 depth,
                    const T* bias, T* out, i64 out_stride, Ahead<T> ahead) {
    vf sums[NR][MR];
    for (int n = 0; n < NR; n++)
        for (int m = 0; m < MR; m++) sums[n][m] = vf{};
    constexpr i64 FETCHED = fetched(MR);
    i64 k = 0;
    if (ahead.rows) {
        i64 wait = ahead.part;
        for (; k + FETCHED <= depth; k += FETCHED) {
            if (--wait < 0) {
                for (int n = 0; n < NR; n++) fetch_ahead(ahead.rows + n * weight_stride + k, FETCHED);
                wait = ahead.every - 1;
            }
            multiply<NR, MR, ALONG>(weight + k, weight_stride, x + k * ALONG, x_stride, FETCHED, sums);
        }
    }
    k += multiply<NR, MR, ALONG>(weight + k, weight_stride, x + k * ALONG, x_stride, depth - k, sums);
    alignas(64) float totals[NR * MR + 16];
    sums_of<NR * MR>(&sums[0][0], totals);
    for (int n = 0; n < NR; n++) {
        for (int m = 0; m < MR; m++) {
            float total = totals[n * MR + m];
            for (i64 tail = k; tail < depth; tail++)
                total += widen(weight[n * weight_stride + tail]) * widen(x[m * x_stride + tail]);
            narrow(bias ? total + widen(bias[n]) : total, out + m * out_stride + n);
        }
    }
}

/// NR rows of a weight with the tokens from `m` on. `next`: rows that come from memory meanwhile.
template <int NR, class T>
inline void rows_product(const Linear& l, i64 m, const T* weight, const T* next, const T* bias, T* out) {
    const auto* x = static_cast<const typename TokensOf<T>::item*>(l.x);
    for (; m + 4 <= l.tokens; m += 4)
        product<NR, 4>(weight, l.depth, x + m * l.x_stride, l.x_stride, l.depth, bias, out + m * l.out_stride,
                       l.out_stride, Ahead<T>{next}), next = nullptr;
    for (; m + 2 <= l.tokens; m += 2)
        product<NR, 2>(weight, l.depth, x + m * l.x_stride, l.x_stride, l.depth, bias, out + m * l.out_stride,
                       l.out_stride, Ahead<T>{next}), next = nullptr;
    for (; m < l.tokens; m++)
        product<NR, 1>(weight, l.depth, x + m * l.x_stride, l.x_stride, l.depth, bias, out + m * l.out_stride,
                       l.out_stride, Ahead<T>{next}), next = nullptr;
}

constexpr i64 TOKENS_TOGETHER = 1024 / static_cast<i64>(sizeof(vf)) / 4 * 4;  // whose sums stay in the first cache
constexpr i64 ITEMS_TOGETHER = 4096;                                           // of these tokens: too
constexpr i64 LEAST_TOKENS = 16;                                               // that the size of a span is made for

/// How many of the tokens are multiplied in blocks, by fours: in float32 none, for that is no faster, and of tokens that
/// are few or short none, for they stay in the first cache anyhow.
template <class T>
inline i64 in_blocks(const Linear& l) {
    if (sizeof(T) != sizeof(bf16)) return 0;
    return l.tokens < PACKED_TOKENS || l.depth < PACKED_DEPTH ? 0 : l.tokens / 4 * 4;
}

/// Of the tokens of one block, how many items each lie side by side.
inline i64 span_of(i64 tokens) {
    return ITEMS_TOGETHER / (tokens < LEAST_TOKENS ? LEAST_TOKENS : tokens) / (4 * LANES) * (4 * LANES);
}

template <class T>
inline void copy_items(const T* from, i64 count, T* to) {
    __builtin_memcpy(to, from, sizeof(T) * static_cast<std::size_t>(count));
}
inline void copy_items(const bf16* from, i64 count, float* to) { unpack(from, count, to); }

/// Put a token where `linear` reads it: [blocks of tokens, spans, tokens of the block, items of the span], then the tokens
/// of no block. Rows of a power of two of bytes would share few places of the first cache.
inline void pack(const Linear& l, i64 token, void* to) {
    auto* packed = static_cast<typename TokensOf<bf16>::item*>(to);
    const bf16* from = static_cast<const bf16*>(l.x) + token * l.x_stride;
    const i64 blocks = in_blocks<bf16>(l), first = token / TOKENS_TOGETHER * TOKENS_TOGETHER;
    if (token >= blocks) return copy_items(from, l.depth, packed + token * l.depth);
    const i64 tokens = blocks - first < TOKENS_TOGETHER ? blocks - first : TOKENS_TOGETHER, span = span_of(tokens);
    for (i64 k = 0; k < l.depth; k += span) {
        const i64 count = l.depth - k < span ? l.depth - k : span;
        copy_items(from + k, count, packed + first * l.depth + k * tokens + (token - first) * count);
    }
}

/// Sums of TILES * NR rows of a weight with a block of tokens, by groups of 4.
template <int NR, int TILES>
struct Sums {
    vf of[TILES][TOKENS_TOGETHER / 4][NR][4];

    /// Add `count` items of each. Return how many of them filled vectors. Those of `next`, `depth` apart, are fetched.
    template <class X>
    inline i64 add(const X* rows, const X* x, i64 count, i64 groups, bool is_first, const bf16* next, i64 depth) {
        i64 done = 0;
        for (i64 g = 0; g < groups; g++) {
            for (i64 n = g * TILES * NR / groups; next && n < (g + 1) * TILES * NR / groups; n++)
                fetch_ahead(next + n * depth, count);
            for (i64 t = 0; t < TILES; t++) {
                vf here[NR][4];  // in registers
                for (int n = 0; n < NR; n++)
                    for (int m = 0; m < 4; m++) here[n][m] = is_first ? vf{} : of[t][g][n][m];
                done = multiply<NR, 4>(rows + t * NR * count, count, x + 4 * g * count, count, count, here);
                for (int n = 0; n < NR; n++)
                    for (int m = 0; m < 4; m++) of[t][g][n][m] = here[n][m];
            }
        }
        return done;
    }
};

/// TILES * NR rows of a weight with the block of `tokens` tokens from `first` on. Some items of rows and tokens are
/// multiplied before the next items are, so that all of them are read from the first cache. Meanwhile the rows after
/// these, `next`, come from memory; null: there are none.
template <int NR, int TILES>
inline void block_product(const Linear& l, i64 first, i64 tokens, const bf16* weight, const bf16* next, const bf16* bias,
                          bf16* out) {
    typedef typename TokensOf<bf16>::item X;
    Sums<NR, TILES> sums;
    alignas(64) X rows[TILES * NR * ITEMS_TOGETHER / LEAST_TOKENS];
    const X* x = static_cast<const X*>(l.x) + first * l.depth;
    const i64 span = span_of(tokens);
    i64 tail = 0, count = 0;  // items of the last span from `tail` on fill no vectors
    for (i64 from = 0; from < l.depth; from += count) {
        if (from) x += tokens * count;
        count = l.depth - from < span ? l.depth - from : span;
        for (i64 n = 0; n < TILES * NR; n++) copy_items(weight + n * l.depth + from, count, rows + n * count);
        tail = sums.add(rows, x, count, tokens / 4, !from, next ? next + from : nullptr, l.depth);
    }
    for (i64 n = 0; n < TILES * NR; n++) {
        for (i64 m = 0; m < tokens; m++) {
            float total = sum_of(sums.of[n / NR][m / 4][n % NR][m % 4]);
            for (i64 k = tail; k < count; k++) total += widen(rows[n * count + k]) * widen(x[m * count + k]);
            narrow(bias ? total + widen(bias[n]) : total, out + (first + m) * l.out_stride + n);
        }
    }
}

/// TILES * NR rows of a part, for all tokens.
template <int NR, int TILES, class T>
inline void tokens_product(const Linear& l, const T* weight, const T* next, const T* bias, T* out) {
    const i64 blocks = in_blocks<T>(l);
    if constexpr (sizeof(T) == sizeof(bf16)) {
        for (i64 m = 0; m < blocks; m += TOKENS_TOGETHER) {
            const i64 tokens = blocks - m < TOKENS_TOGETHER ? blocks - m : TOKENS_TOGETHER;
            block_product<NR, TILES>(l, m, tokens, weight, m ? nullptr : next, bias, out);
        }
    }
    for (i64 n = 0; n < TILES * NR && blocks < l.tokens; n += NR)
        rows_product<NR>(l, blocks, weight + n * l.depth, blocks ? nullptr : next, bias ? bias + n : nullptr, out + n);
}

/// Items that `multiply` takes of a row at a time.
template <class T>
constexpr i64 WOVEN = sizeof(T) == sizeof(bf16) ? BF16_ITEMS : LANES;

/// Woven tokens, in groups of up to 8: of each group WOVEN items of every token in turn. A group is multiplied by
/// one `product`, which so reads every row once, and from few places of the cache: rows of a power of two of bytes share
/// them.
template <class T>
inline bool is_woven(const Linear& l) {
    constexpr i64 MOST = sizeof(T) == sizeof(bf16) ? NEVER : 16;  // more are slower woven
    return WEAVES && l.tokens > 1 && l.tokens <= MOST && l.depth % WOVEN<T> == 0;
}

inline i64 woven_groups(i64 tokens) { return (tokens + 7) / 8; }

template <class T>
void weave(const Linear& l, void* to) {
    constexpr i64 SOME = WOVEN<T>;
    const i64 groups = woven_groups(l.tokens);
    T* woven = static_cast<T*>(to);
    for (i64 g = 0; g < groups; g++)
        for (i64 k = 0; k < l.depth; k += SOME)
            for (i64 m = l.tokens * g / groups; m < l.tokens * (g + 1) / groups; m++, woven += SOME)
                __builtin_memcpy(woven, static_cast<const T*>(l.x) + m * l.x_stride + k, SOME * sizeof(T));
}

/// NR rows of a weight with a group of woven tokens.
template <int NR, class T>
inline void group_product(i64 tokens, const T* weight, i64 depth, const T* x, const T* bias, T* out, i64 out_stride,
                          Ahead<T> ahead) {
    constexpr i64 SOME = WOVEN<T>;
    if (tokens == 8) return product<NR, 8, 8>(weight, depth, x, SOME, depth, bias, out, out_stride, ahead);
    if (tokens == 7) return product<NR, 7, 7>(weight, depth, x, SOME, depth, bias, out, out_stride, ahead);
    if (tokens == 6) return product<NR, 6, 6>(weight, depth, x, SOME, depth, bias, out, out_stride, ahead);
    if (tokens == 5) return product<NR, 5, 5>(weight, depth, x, SOME, depth, bias, out, out_stride, ahead);
    product<NR, 4, 4>(weight, depth, x, SOME, depth, bias, out, out_stride, ahead);
}

/// The rows [first, last) of a part, for MR woven tokens.
template <int NR, int MR, class T>
void woven_few(const Linear& l, const Part& part, i64 first, i64 last) {
    constexpr i64 SOME = WOVEN<T>;
    const T *weight = static_cast<const T*>(part.weight), *bias = static_cast<const T*>(part.bias);
    const T* x = static_cast<const T*>(l.x);
    T* out = static_cast<T*>(l.out) + part.column;
    i64 n = first;
    for (; n + NR <= last; n += NR) {
        const T *rows = weight + n * l.depth, *next = n + 2 * NR <= part.rows ? rows + NR * l.depth : nullptr;
        product<NR, MR, MR>(rows, l.depth, x, SOME, l.depth, bias ? bias + n : nullptr, out + n, l.out_stride,
                            Ahead<T>{next, 0, 1});
    }
    for (; n < last; n++)
        product<1, MR, MR>(weight + n * l.depth, l.depth, x, SOME, l.depth, bias ? bias + n : nullptr, out + n,
                           l.out_stride, Ahead<T>{});
}

/// The rows [first, last) of a part, for more woven tokens than 4.
template <class T>
void woven_many(const Linear& l, const Part& part, i64 first, i64 last) {
    constexpr int NR = 3;
    const T *weight = static_cast<const T*>(part.weight), *bias = static_cast<const T*>(part.bias);
    const i64 groups = woven_groups(l.tokens);
    for (i64 n = first; n < last;) {
        const i64 some = n + NR <= last ? NR : 1;
        const T *rows = weight + n * l.depth, *next = n + 2 * some <= part.rows ? rows + some * l.depth : nullptr;
        for (i64 g = 0; g < groups; g++) {
            const i64 m = l.tokens * g / groups, count = l.tokens * (g + 1) / groups - m;
            T* out = static_cast<T*>(l.out) + part.column + m * l.out_stride + n;
            auto multiplied = some == NR ? &group_product<NR, T> : &group_product<1, T>;
            multiplied(count, rows, l.depth, static_cast<const T*>(l.x) + m * l.depth, bias ? bias + n : nullptr, out,
                       l.out_stride, Ahead<T>{next, g, groups});
        }
        n += some;
    }
}

/// The rows [first, last) of a part, for all tokens.
template <class T>
void linear(const Linear& l, const Part& part, i64 first, i64 last) {
    if constexpr (WEAVES) {
        if (is_woven<T>(l)) {
            if (l.tokens == 2) return woven_few<ROWS, 2, T>(l, part, first, last);
            if (l.tokens == 3) return woven_few<ROWS, 3, T>(l, part, first, last);
            if (l.tokens == 4) return woven_few<ROWS, 4, T>(l, part, first, last);
            return woven_many<T>(l, part, first, last);
        }
    }
    constexpr i64 TILES = BLOCK_ROWS / ROWS;
    const T* weight = static_cast<const T*>(part.weight);
    const T* bias = static_cast<const T*>(part.bias);
    T* out = static_cast<T*>(l.out) + part.column;
    i64 n = first;
    for (; in_blocks<T>(l) && n + BLOCK_ROWS <= last; n += BLOCK_ROWS) {
        const T* rows = weight + n * l.depth;
        const T* next = n + 2 * BLOCK_ROWS <= part.rows ? rows + BLOCK_ROWS * l.depth : nullptr;
        tokens_product<ROWS, TILES>(l, rows, next, bias ? bias + n : nullptr, out + n);
    }
    for (; n + ROWS <= last; n += ROWS) {
        const T* rows = weight + n * l.depth;
        const T* next = FETCHES && n + 2 * ROWS <= last ? rows + ROWS * l.depth : nullptr;
        tokens_product<ROWS, 1, T>(l, rows, next, bias ? bias + n : nullptr, out + n);
    }
    for (; n < last; n++)
        tokens_product<1, 1, T>(l, weight + n * l.depth, nullptr, bias ? bias + n : nullptr, out + n);
}

// --- norm -------------------------------------------------------------------------------------------------

/// Rows [first, last): add `more` to x, where there is any, then norm it.
template <class T>
void add_and_norm(const Norm& n, i64 first, i64 last) {
    const T *weight = static_cast<const T*>(n.weight);
    for (i64 row = first; row < last; row++) {
        T* x = static_cast<T*>(n.x) + row * n.width;
        const T* more = n.more ? static_cast<const T*>(n.more) + row * n.width : nullptr;
        T* out = static_cast<T*>(n.out) + row * n.width;
        if (more)
            for (i64 i = 0; i < n.width; i++) narrow(widen(x[i]) + widen(more[i]), x + i);
        vf squares{};
        i64 i = 0;
        for (; i + LANES <= n.width; i += LANES) {
            const vf part = load(x + i);
            squares += part * part;
        }
        float total = sum_of(squares);
        for (; i < n.width; i++) total += widen(x[i]) * widen(x[i]);
        const float by = 1.0f / __builtin_sqrtf(total / static_cast<float>(n.width) + n.eps);
        for (i = 0; i < n.width; i++) narrow(widen(x[i]) * by * widen(weight[i]), out + i);
    }
}

// --- the gate of the feed-forward layer -------------------------------------------------------------------

inline vf silu(vf x) {
    const vf below = exp_of(x < spread(0.0f) ? x : -x);  // e^-|x|
    return x * (x < spread(0.0f) ? below : spread(1.0f)) / (1.0f + below);
}

/// Rows [first, last).
template <class T>
void gate(const Gate& g, i64 first, i64 last) {
    for (i64 row = first; row < last; row++) {
        const T* left = static_cast<const T*>(g.gate) + row * g.gate_stride;
        const T* right = static_cast<const T*>(g.up) + row * g.up_stride;
        T* out = static_cast<T*>(g.out) + row * g.width;
        i64 i = 0;
        for (; i + LANES <= g.width; i += LANES) put(silu(load(left + i)) * load(right + i), out + i);
        for (; i < g.width; i++) narrow(silu(spread(widen(left[i])))[0] * widen(right[i]), out + i);
    }
}

// --- new tokens: norm, rotation, write --------------------------------------------------------------------

template <class T>
inline void norm_and_rotate(T* head, const T* norm, float eps, const T* rope, i64 dim) {
    float wide[MAX_HEAD_DIM];
    float squares = 0.0f;
    for (i64 d = 0; d < dim; d++) wide[d] = widen(head[d]);
    if (norm) {
        vf total{};
        for (i64 d = 0; d + LANES <= dim; d += LANES) {
            vf part = load(wide + d);
            total += part * part;
        }
        squares = sum_of(total);
        const float by = 1.0f / __builtin_sqrtf(squares / static_cast<float>(dim) + eps);
        for (i64 d = 0; d < dim; d++) wide[d] = wide[d] * by * widen(norm[d]);
    }
    const T *cos = rope, *sin = rope + dim;
    const i64 half = dim / 2;
    for (i64 d = 0; d < half; d++) {
        narrow(wide[d] * widen(cos[d]) + wide[d + half] * widen(sin[d]), head + d);
        narrow(wide[d + half] * widen(cos[d + half]) + wide[d] * widen(sin[d + half]), head + d + half);
    }
}

/// The tokens [first, last): queries and keys in place, then keys and values to the cache.
template <class T>
void prepare(const Prepare& p, i64 first, i64 last) {
    const Cache& c = p.cache;
    const i64 dim = c.head_dim;
    const T* norm = static_cast<const T*>(p.norm);
    const T* key_norm = norm ? norm + p.heads * dim : nullptr;
    for (i64 t = first; t < last; t++) {
        T *q = static_cast<T*>(p.q) + t * p.q_stride, *k = static_cast<T*>(p.k) + t * p.k_stride;
        const T* v = static_cast<const T*>(p.v) + t * p.v_stride;
        const T* rope = static_cast<const T*>(p.rope) + p.positions[t] * 2 * dim;
        for (i64 h = 0; h < p.heads; h++)
            norm_and_rotate(q + h * dim, norm ? norm + h * dim : nullptr, p.eps, rope, dim);
        for (i64 h = 0; h < c.kv_heads; h++)
            norm_and_rotate(k + h * dim, key_norm ? key_norm + h * dim : nullptr, p.eps, rope, dim);
        T* slot = static_cast<T*>(c.keys) + p.write_blocks[t] * c.block_stride + p.positions[t] % c.block_size * dim;
        const i64 head = c.block_size * dim;  // values follow the keys of all heads
        for (i64 h = 0; h < c.kv_heads; h++) {
            __builtin_memcpy(slot + h * head, k + h * dim, sizeof(T) * dim);
            __builtin_memcpy(slot + (c.kv_heads + h) * head, v + h * dim, sizeof(T) * dim);
        }
    }
}

// --- attention --------------------------------------------------------------------------------------------

template <class T>
inline const T* head_of(const Cache& c, i64 block, i64 head) {
    return static_cast<const T*>(c.keys) + block * c.block_stride + head * c.block_size * c.head_dim;
}

/// Turn scores [count] into weights. Return what earlier sums are to be multiplied with.
inline float soften(float* scores, i64 count, float& highest, float& total) {
    const i64 padded = (count + LANES - 1) / LANES * LANES;
    for (i64 j = count; j < padded; j++) scores[j] = -__builtin_inff();
    vf most = spread(highest);
    for (i64 j = 0; j < padded; j += LANES) {
        vf part = load(scores + j);
        most = part > most ? part : most;
    }
    const float now = highest_of(most);
    if (now == -__builtin_inff()) {  // every key so far is masked: no weight yet
        for (i64 j = 0; j < padded; j += LANES) store(vf{}, scores + j);
        return 1.0f;
    }
    vf sum{};
    for (i64 j = 0; j < padded; j += LANES) {
        vf weight = exp_of(load(scores + j) - now);
        store(weight, scores + j);
        sum += weight;
    }
    const vf before = exp_of(spread(highest == -__builtin_inff() ? -100.0f : highest - now));
    const float scale = before[0];
    total = total * scale + sum_of(sum);
    highest = now;
    return scale;
}

/// Scores of KEYS keys from key `j` on; a row of the next keys is fetched for each.
template <int R, int KEYS, class T, class Q>
inline void score_some(const T* keys, i64 j, const Q* q, float by, i64 dim, float* scores, i64 scores_stride,
                       const T* next_keys) {
    vf sums[KEYS][R];
    alignas(64) float totals[KEYS * R + 16];
    for (int n = 0; n < KEYS; n++)
        for (int r = 0; r < R; r++) sums[n][r] = vf{};
    for (int n = 0; n < KEYS; n++) fetch_ahead(next_keys + (j + n) * dim, dim);
    const i64 done = multiply<KEYS, R>(keys + j * dim, dim, q, dim, dim, sums);
    sums_of<KEYS * R>(&sums[0][0], totals);
    for (int n = 0; n < KEYS; n++) {
        for (int r = 0; r < R; r++) {
            float total = totals[n * R + r];
            for (i64 d = done; d < dim; d++) total += widen(keys[(j + n) * dim + d]) * widen(q[r * dim + d]);
            scores[r * scores_stride + j + n] = total * by;
        }
    }
}

/// Scores of `count` keys.
template <int R, class T, class Q>
inline void score(const T* keys, i64 count, const Q* q, float by, i64 dim, float* scores, i64 scores_stride,
                  const T* next_keys) {
    constexpr int KEYS = R <= 2 || ROWS * 4 > 16 ? 4 : 2;  // so that the sums stay in registers
    i64 j = 0;
    for (; j + KEYS <= count; j += KEYS) score_some<R, KEYS>(keys, j, q, by, dim, scores, scores_stride, next_keys);
    for (; j < count; j++) score_some<R, 1>(keys, j, q, by, dim, scores, scores_stride, next_keys);
}

/// WIDE vectors of R answers, from item `d` on: add `count` weighted values to what was there, scaled.
template <int R, int WIDE, class T>
inline void mix_some(const T* values, i64 count, const float* weights, i64 weights_stride, const float* scale, float* out,
                     i64 dim, i64 d, const T* next) {
    vf sums[R][WIDE];
    for (int r = 0; r < R; r++)
        for (int w = 0; w < WIDE; w++) sums[r][w] = load(out + r * dim + d + w * LANES) * scale[r];
    for (i64 j = 0; j < count; j++) {
        if (next) fetch_ahead(next + j * dim + d, WIDE * LANES);
        vf value[WIDE];
        for (int w = 0; w < WIDE; w++) value[w] = load(values + j * dim + d + w * LANES);
        for (int r = 0; r < R; r++) {
            const vf weight = spread(weights[r * weights_stride + j]);
            for (int w = 0; w < WIDE; w++) sums[r][w] += value[w] * weight;
        }
    }
    for (int r = 0; r < R; r++)
        for (int w = 0; w < WIDE; w++) store(sums[r][w], out + r * dim + d + w * LANES);
}

/// Mix `count` values; for each, a row of the next values is fetched. Null: there are none.
template <int R, class T>
inline void mix(const T* values, i64 count, const float* weights, i64 weights_stride, const float* scale, float* out,
                i64 dim, const T* next = nullptr) {
    constexpr int WIDE = R <= 2 ? 2 * MIXED : MIXED;  // so that the sums stay in registers
    i64 d = 0;
    for (; d + WIDE * LANES <= dim; d += WIDE * LANES)
        mix_some<R, WIDE>(values, count, weights, weights_stride, scale, out, dim, d, next);
    for (; d < dim; d += LANES) mix_some<R, 1>(values, count, weights, weights_stride, scale, out, dim, d, next);
}

/// Some queries of one KV head and what they have seen so far.
struct Seen {
    float highest[MAX_AT_ONCE], total[MAX_AT_ONCE];
};

template <int R, class T>
inline void see(const T* keys, const T* values, i64 count, const T* next_keys, const T* next_values,
                const typename TokensOf<T>::item* q, float by, float* out, Seen& seen, i64 dim) {
    alignas(64) float scores[R * CHUNK_KEYS];
    float scale[R];
    score<R>(keys, count, q, by, dim, scores, CHUNK_KEYS, next_keys);
    for (int r = 0; r < R; r++) scale[r] = soften(scores + r * CHUNK_KEYS, count, seen.highest[r], seen.total[r]);
    mix<R>(values, count, scores, CHUNK_KEYS, scale, out, dim, next_values);
}

/// One new token: the queries of KV heads [first, last) read keys and values where they lie, in the order of memory.
/// scratch: float [2 * (last - first) * group * dim].
template <class T>
void attend_one(const Attend& a, const Sequence& s, i64 first, i64 last, float* scratch) {
    const Cache& c = a.cache;
    const i64 dim = c.head_dim, group = a.heads / c.kv_heads, keys = s.start + 1;
    const i64 rows = (last - first) * group, parts = (group + MAX_AT_ONCE - 1) / MAX_AT_ONCE;
    typedef typename TokensOf<T>::item Q;
    Q* q = reinterpret_cast<Q*>(scratch);
    float* out = scratch + rows * dim;
    Seen seen[MAX_HEADS_AT_ONCE * MAX_GROUP / MAX_AT_ONCE];
    const T* from = static_cast<const T*>(a.q) + s.first * a.q_stride + first * group * dim;
    for (i64 row = 0; row < rows; row++) copy_items(from + row * dim, dim, q + row * dim);
    for (i64 i = 0; i < rows * dim; i++) out[i] = 0.0f;
    for (i64 i = 0; i < (last - first) * parts; i++)
        for (i64 r = 0; r < MAX_AT_ONCE; r++) seen[i].highest[r] = -__builtin_inff(), seen[i].total[r] = 0.0f;
    for (i64 key = 0; key < keys;) {
        const i64 inside = key % c.block_size;
        i64 count = c.block_size - inside;
        if (count > keys - key) count = keys - key;
        if (count > CHUNK_KEYS) count = CHUNK_KEYS;
        const i64 block = a.tables[s.table + key / c.block_size], then = key + count;
        const i64 next_block = then < keys ? a.tables[s.table + then / c.block_size] : block;
        const i64 next_inside = then < keys ? then % c.block_size : inside;
        for (i64 head = first; head < last; head++) {
            const T* k = head_of<T>(c, block, head) + inside * dim;
            const T* v = head_of<T>(c, block, c.kv_heads + head) + inside * dim;
            const bool is_last = head + 1 == last;
            const i64 ahead = is_last ? first : head + 1;
            const T* next_k = head_of<T>(c, is_last ? next_block : block, ahead) + (is_last ? next_inside : inside) * dim;
            const T* next_v = next_k + c.kv_heads * c.block_size * dim;
            for (i64 part = 0; part < parts; part++) {
                const i64 row = (head - first) * group + part * MAX_AT_ONCE, left = group - part * MAX_AT_ONCE;
                Seen& here = seen[(head - first) * parts + part];
                if (left >= 4) see<4>(k, v, count, next_k, next_v, q + row * dim, a.scale, out + row * dim, here, dim);
                if (left == 3) see<3>(k, v, count, next_k, next_v, q + row * dim, a.scale, out + row * dim, here, dim);
                if (left == 2) see<2>(k, v, count, next_k, next_v, q + row * dim, a.scale, out + row * dim, here, dim);
                if (left == 1) see<1>(k, v, count, next_k, next_v, q + row * dim, a.scale, out + row * dim, here, dim);
            }
        }
        key = then;
    }
    T* to = static_cast<T*>(a.out) + (s.first * a.heads + first * group) * dim;
    for (i64 row = 0; row < rows; row++) {
        const Seen& here = seen[row / group * parts + row % group / MAX_AT_ONCE];
        const float by = 1.0f / here.total[row % group % MAX_AT_ONCE];
        for (i64 d = 0; d < dim; d++) narrow(out[row * dim + d] * by, to + row * dim + d);
    }
}

/// CHUNK_KEYS keys and values of a KV head, unpacked for many queries: [dim, CHUNK_KEYS] and [CHUNK_KEYS, dim].
struct WideChunk {
    typedef float query;
    float *turned, *values;

    WideChunk(float* scratch, i64 dim) : turned(scratch), values(scratch + CHUNK_KEYS * dim) {}

    template <class T>
    static void take_query(const T* from, float scale, i64 dim, float* to) {
        for (i64 d = 0; d < dim; d++) to[d] = widen(from[d]) * scale;
    }

    template <class T>
    void take_key(i64 j, const T* key, i64 dim) {
        for (i64 d = 0; d < dim; d++) turned[d * CHUNK_KEYS + j] = widen(key[d]);
    }

    template <class T>
    void take_value(i64 j, const T* value, i64 dim) {
        for (i64 d = 0; d < dim; d++) values[j * dim + d] = widen(value[d]);
    }

    void end(i64 count, i64 dim) {
        for (i64 j = count; j < CHUNK_KEYS; j++)
            for (i64 d = 0; d < dim; d++) turned[d * CHUNK_KEYS + j] = 0.0f;
    }

    template <int R>
    void score(const float* q, float, i64 dim, float* scores) const {
        constexpr int WIDE = CHUNK_KEYS / LANES < 4 ? CHUNK_KEYS / LANES : 4;
        for (i64 j = 0; j < CHUNK_KEYS; j += WIDE * LANES) {
            vf sums[R][WIDE] = {};
            for (i64 d = 0; d < dim; d++) {
                for (int w = 0; w < WIDE; w++) {
                    const vf key = load(turned + d * CHUNK_KEYS + j + w * LANES);
                    for (int r = 0; r < R; r++) sums[r][w] += key * spread(q[r * dim + d]);
                }
            }
            for (int r = 0; r < R; r++)
                for (int w = 0; w < WIDE; w++) store(sums[r][w], scores + r * CHUNK_KEYS + j + w * LANES);
        }
    }

    template <int R>
    void mixed(const float* weights, i64 count, const float* scale, float* out, i64 dim) const {
        mix<R>(values, count, weights, CHUNK_KEYS, scale, out, dim);
    }
};

template <class T>
struct ChunkOf {
    typedef WideChunk chunk;
};

#if defined(KVMESH_PAIRS)
/// CHUNK_KEYS keys and values of a KV head in bf16, in pairs: [dim / 2, CHUNK_KEYS, 2] and [CHUNK_KEYS / 2, dim, 2]. The
/// weights of the values are rounded to bf16.
struct PairChunk {
    typedef bf16 query;
    typedef std::uint32_t pair __attribute__((may_alias));
    pair *turned, *values;

    PairChunk(float* scratch, i64 dim)
        : turned(reinterpret_cast<pair*>(scratch)), values(turned + CHUNK_KEYS / 2 * dim) {}

    static void take_query(const bf16* from, float, i64 dim, bf16* to) {
        __builtin_memcpy(to, from, sizeof(bf16) * static_cast<std::size_t>(dim));
    }

    void take_key(i64 j, const bf16* key, i64 dim) {
        const pair* pairs = reinterpret_cast<const pair*>(key);
        for (i64 d = 0; d < dim / 2; d++) turned[d * CHUNK_KEYS + j] = pairs[d];
    }

    void take_value(i64 j, const bf16* value, i64 dim) {
        pair* to = values + j / 2 * dim;
        if (j % 2)
            for (i64 d = 0; d < dim; d++) to[d] |= static_cast<pair>(value[d]) << 16;
        else
            for (i64 d = 0; d < dim; d++) to[d] = value[d];
    }

    void end(i64 count, i64 dim) {
        for (i64 d = 0; d < dim / 2; d++)
            for (i64 j = count; j < CHUNK_KEYS; j++) turned[d * CHUNK_KEYS + j] = 0;
    }

    template <int R>
    void score(const bf16* q, float by, i64 dim, float* scores) const {
        constexpr int WIDE = CHUNK_KEYS / LANES;
        vf sums[R][WIDE] = {};
        for (i64 d = 0; d < dim / 2; d++) {
            __m512bh keys[WIDE];
            for (int w = 0; w < WIDE; w++) keys[w] = pairs_at(turned + d * CHUNK_KEYS + w * LANES);
            for (int r = 0; r < R; r++) {
                const __m512bh both = pair_of(q + r * dim + 2 * d);
                for (int w = 0; w < WIDE; w++) sums[r][w] = (vf)_mm512_dpbf16_ps((__m512)sums[r][w], keys[w], both);
            }
        }
        for (int r = 0; r < R; r++)
            for (int w = 0; w < WIDE; w++) store(sums[r][w] * by, scores + r * CHUNK_KEYS + w * LANES);
    }

    template <int R>
    void mixed(const float* weights, i64 count, const float* scale, float* out, i64 dim) const {
        alignas(64) bf16 rounded[R * CHUNK_KEYS];
        for (i64 j = 0; j < R * CHUNK_KEYS; j += LANES) put(load(weights + j), rounded + j);
        i64 d = 0;
        for (; d + MIXED * LANES <= dim; d += MIXED * LANES) mix_pairs<R, MIXED>(rounded, count, scale, out, dim, d);
        for (; d < dim; d += LANES) mix_pairs<R, 1>(rounded, count, scale, out, dim, d);
    }

   private:
    static __m512bh pairs_at(const pair* from) { return (__m512bh)_mm512_loadu_si512(from); }

    static __m512bh pair_of(const bf16* from) {
        int both;
        __builtin_memcpy(&both, from, sizeof both);
        return (__m512bh)_mm512_set1_epi32(both);
    }

    template <int R, int WIDE>
    void mix_pairs(const bf16* weights, i64 count, const float* scale, float* out, i64 dim, i64 d) const {
        vf sums[R][WIDE];
        for (int r = 0; r < R; r++)
            for (int w = 0; w < WIDE; w++) sums[r][w] = load(out + r * dim + d + w * LANES) * scale[r];
        for (i64 j = 0; j < count; j += 2) {
            __m512bh value[WIDE];
            for (int w = 0; w < WIDE; w++) value[w] = pairs_at(values + j / 2 * dim + d + w * LANES);
            for (int r = 0; r < R; r++) {
                const __m512bh both = pair_of(weights + r * CHUNK_KEYS + j);
                for (int w = 0; w < WIDE; w++) sums[r][w] = (vf)_mm512_dpbf16_ps((__m512)sums[r][w], value[w], both);
            }
        }
        for (int r = 0; r < R; r++)
            for (int w = 0; w < WIDE; w++) store(sums[r][w], out + r * dim + d + w * LANES);
    }
};

template <>
struct ChunkOf<bf16> {
    typedef PairChunk chunk;
};
#endif

/// R rows of queries, [R, dim], with a chunk. A row of `seen` keys at least 0, at most CHUNK_KEYS.
template <int R, class Chunk>
inline void see_chunk(const Chunk& chunk, const typename Chunk::query* q, float by, const i64* seen, float* highest,
                      float* total, float* out, i64 dim) {
    alignas(64) float scores[R * CHUNK_KEYS];
    float scale[R];
    i64 most = 0;
    chunk.template score<R>(q, by, dim, scores);
    for (int r = 0; r < R; r++) {
        scale[r] = soften(scores + r * CHUNK_KEYS, seen[r], highest[r], total[r]);
        for (i64 j = (seen[r] + LANES - 1) / LANES * LANES; j < CHUNK_KEYS; j++) scores[r * CHUNK_KEYS + j] = 0.0f;
        most = seen[r] > most ? seen[r] : most;
    }
    chunk.template mixed<R>(scores, most, scale, out, dim);
}

/// Several new tokens [first, last) of a sequence: the queries of one KV head. Keys and values are unpacked once for all
/// of them. scratch: float [(2 * CHUNK_KEYS + 2 * rows + 2 * rows / dim) * dim] for their `rows` queries.
template <class Chunk, class T>
void attend_chunks(const Attend& a, const Sequence& s, i64 first, i64 last, i64 kv_head, float* scratch) {
    const Cache& c = a.cache;
    const i64 dim = c.head_dim, group = a.heads / c.kv_heads, rows = (last - first) * group;
    const i64 keys = s.start + last;  // that the last token sees
    Chunk chunk(scratch, dim);
    float *out = scratch + 2 * CHUNK_KEYS * dim, *highest = out + rows * dim, *total = highest + rows;
    auto* q = reinterpret_cast<typename Chunk::query*>(total + rows);
    const T* from = static_cast<const T*>(a.q) + (s.first + first) * a.q_stride + kv_head * group * dim;
    for (i64 row = 0; row < rows; row++) {
        Chunk::take_query(from + row / group * a.q_stride + row % group * dim, a.scale, dim, q + row * dim);
        for (i64 d = 0; d < dim; d++) out[row * dim + d] = 0.0f;
        highest[row] = -__builtin_inff(), total[row] = 0.0f;
    }
    for (i64 key = 0; key < keys; key += CHUNK_KEYS) {
        const i64 count = keys - key < CHUNK_KEYS ? keys - key : CHUNK_KEYS;
        for (i64 j = 0; j < count; j++) {
            const i64 block = a.tables[s.table + (key + j) / c.block_size], inside = (key + j) % c.block_size;
            chunk.take_key(j, head_of<T>(c, block, kv_head) + inside * dim, dim);
            chunk.take_value(j, head_of<T>(c, block, c.kv_heads + kv_head) + inside * dim, dim);
        }
        chunk.end(count, dim);
        i64 row = (key - s.start - first) * group;  // earlier tokens see none of these keys
        row = row < 0 ? 0 : row;
        while (row < rows) {
            const i64 some = rows - row < 4 ? 1 : 4;
            i64 seen[4];
            for (i64 r = 0; r < some; r++) {
                seen[r] = s.start + first + (row + r) / group + 1 - key;
                seen[r] = seen[r] > count ? count : seen[r] < 0 ? 0 : seen[r];
            }
            auto see = some == 4 ? &see_chunk<4, Chunk> : &see_chunk<1, Chunk>;
            see(chunk, q + row * dim, a.scale, seen, highest + row, total + row, out + row * dim, dim);
            row += some;
        }
    }
    T* to = static_cast<T*>(a.out) + ((s.first + first) * a.heads + kv_head * group) * dim;
    for (i64 row = 0; row < rows; row++) {
        T* answer = to + row / group * a.heads * dim + row % group * dim;
        for (i64 d = 0; d < dim; d++) narrow(out[row * dim + d] / total[row], answer + d);
    }
}

template <class T>
void attend_tile(const Attend& a, const Sequence& s, i64 first, i64 last, i64 kv_head, float* scratch) {
    attend_chunks<typename ChunkOf<T>::chunk, T>(a, s, first, last, kv_head, scratch);
}

const Kernels KERNELS = {NAME,
                         LANES,
                         &linear<float>,
                         &linear<bf16>,
                         &prepare<float>,
                         &prepare<bf16>,
                         &attend_one<float>,
                         &attend_one<bf16>,
                         &attend_tile<float>,
                         &attend_tile<bf16>,
                         &add_and_norm<float>,
                         &add_and_norm<bf16>,
                         &pack,
                         &is_woven<float>,
                         &is_woven<bf16>,
                         &weave<float>,
                         &weave<bf16>,
                         PACKED_TOKENS,
                         sizeof(TokensOf<bf16>::item),
                         &gate<float>,
                         &gate<bf16>};
