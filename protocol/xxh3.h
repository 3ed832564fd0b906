// XXH3-64, seeded, one shot: the hash of our block and sequence names. Written from the algorithm's specification
// (github.com/Cyan4973/xxHash, doc/xxhash_spec.md); tests/protocol/test_hashing.py holds it to python-xxhash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "written for little-endian machines");

namespace kvmesh {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
__extension__ typedef unsigned __int128 u128;

inline u32 read32(const void* at) {
    u32 value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

inline u64 read64(const void* at) {
    u64 value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

/// Both halves of the 128-bit product, folded into one.
inline u64 fold(u64 a, u64 b) {
    u128 product = static_cast<u128>(a) * b;
    return static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
}

namespace xxh3 {

constexpr u64 P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
constexpr u64 P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F, P64_3 = 0x165667B19E3779F9;
constexpr u64 P64_4 = 0x85EBCA77C2B2AE63, P64_5 = 0x27D4EB2F165667C5;
constexpr u64 MIX_1 = 0x165667919E3779F9, MIX_2 = 0x9FB21C651E98DF25;
constexpr std::size_t SECRET_BYTES = 192, STRIPE_BYTES = 64, BLOCK_STRIPES = (SECRET_BYTES - STRIPE_BYTES) / 8;

alignas(64) constexpr u8 SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

inline u64 rotate(u64 value, int bits) { return value << bits | value >> (64 - bits); }

inline u64 avalanche(u64 h) {
    h = (h ^ h >> 37) * MIX_1;
    return h ^ h >> 32;
}

inline u64 avalanche_64(u64 h) {
    h = (h ^ h >> 33) * P64_2;
    h = (h ^ h >> 29) * P64_3;
    return h ^ h >> 32;
}

/// `secret` is the one derived from the seed, or it is shifted and the seed has to be given.
inline u64 mix_16(const u8* in, const u8* secret) {
    return fold(read64(in) ^ read64(secret), read64(in + 8) ^ read64(secret + 8));
}
inline u64 mix_16(const u8* in, const u8* secret, u64 seed) {
    return fold(read64(in) ^ (read64(secret) + seed), read64(in + 8) ^ (read64(secret + 8) - seed));
}

inline u64 hash_0_to_8(const u8* in, std::size_t size, u64 seed) {
    if (size >= 4) {
        seed ^= static_cast<u64>(__builtin_bswap32(static_cast<u32>(seed))) << 32;
        u64 flip = (read64(SECRET + 8) ^ read64(SECRET + 16)) - seed;
        u64 h = (read32(in + size - 4) + (static_cast<u64>(read32(in)) << 32)) ^ flip;
        h = (h ^ rotate(h, 49) ^ rotate(h, 24)) * MIX_2;
        h = (h ^ ((h >> 35) + size)) * MIX_2;
        return h ^ h >> 28;
    }
    if (size) {
        u32 all = static_cast<u32>(in[0]) << 16 | static_cast<u32>(in[size >> 1]) << 24 | in[size - 1] |
                  static_cast<u32>(size) << 8;
        return avalanche_64(all ^ ((read32(SECRET) ^ read32(SECRET + 4)) + seed));
    }
    return avalanche_64(seed ^ read64(SECRET + 56) ^ read64(SECRET + 64));
}

inline u64 hash_9_to_16(const u8* in, std::size_t size, u64 seed) {
    u64 low = read64(in) ^ ((read64(SECRET + 24) ^ read64(SECRET + 32)) + seed);
    u64 high = read64(in + size - 8) ^ ((read64(SECRET + 40) ^ read64(SECRET + 48)) - seed);
    return avalanche(size + __builtin_bswap64(low) + high + fold(low, high));
}

inline u64 hash_17_to_128(const u8* in, std::size_t size, const u8* secret) {
    u64 sum = size * P64_1;
    for (std::size_t i = (size - 1) / 32; i > 0; i--) {
        sum += mix_16(in + 16 * i, secret + 32 * i);
        sum += mix_16(in + size - 16 * (i + 1), secret + 32 * i + 16);
    }
    sum += mix_16(in, secret) + mix_16(in + size - 16, secret + 16);
    return avalanche(sum);
}

inline u64 hash_129_to_240(const u8* in, std::size_t size, const u8* secret, u64 seed) {
    u64 sum = size * P64_1;
    for (std::size_t i = 0; i < 8; i++) sum += mix_16(in + 16 * i, secret + 16 * i);
    sum = avalanche(sum);
    for (std::size_t i = 8; i < size / 16; i++) sum += mix_16(in + 16 * i, SECRET + 16 * (i - 8) + 3, seed);
    return avalanche(sum + mix_16(in + size - 16, SECRET + 136 - 17, seed));
}

#if defined(__SSE2__)

struct Lanes {
    __m128i lane[4];

    Lanes() {
        const u64 start[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
        for (int i = 0; i < 4; i++) lane[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(start + 2 * i));
    }
    void take(const u8* in, const u8* secret) {
        for (int i = 0; i < 4; i++) {
            __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in) + i);
            __m128i key = _mm_xor_si128(value, _mm_loadu_si128(reinterpret_cast<const __m128i*>(secret) + i));
            __m128i product = _mm_mul_epu32(key, _mm_shuffle_epi32(key, 0x31));
            __m128i swapped = _mm_shuffle_epi32(value, 0x4E);
            lane[i] = _mm_add_epi64(lane[i], _mm_add_epi64(product, swapped));
        }
    }
    void scramble(const u8* secret) {
        const __m128i prime = _mm_set1_epi32(static_cast<int>(P32_1));
        for (int i = 0; i < 4; i++) {
            __m128i key = _mm_loadu_si128(reinterpret_cast<const __m128i*>(secret) + i);
            __m128i value = _mm_xor_si128(_mm_xor_si128(lane[i], _mm_srli_epi64(lane[i], 47)), key);
            __m128i high = _mm_mul_epu32(_mm_shuffle_epi32(value, 0x31), prime);
            lane[i] = _mm_add_epi64(_mm_mul_epu32(value, prime), _mm_slli_epi64(high, 32));
        }
    }
    void store(u64* out) const {
        for (int i = 0; i < 4; i++) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i), lane[i]);
    }
};

#else

struct Lanes {
    u64 lane[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};

    void take(const u8* in, const u8* secret) {
        for (int i = 0; i < 8; i++) {
            u64 value = read64(in + 8 * i), key = value ^ read64(secret + 8 * i);
            lane[i ^ 1] += value;
            lane[i] += (key & 0xFFFFFFFF) * (key >> 32);
        }
    }
    void scramble(const u8* secret) {
        for (int i = 0; i < 8; i++) lane[i] = (lane[i] ^ lane[i] >> 47 ^ read64(secret + 8 * i)) * P32_1;
    }
    void store(u64* out) const { std::memcpy(out, lane, sizeof lane); }
};

#endif

/// More than 240 bytes; `secret` is the one derived from the seed.
inline u64 hash_long(const u8* in, std::size_t size, const u8* secret) {
    Lanes lanes;
    const std::size_t whole_blocks = (size - 1) / (STRIPE_BYTES * BLOCK_STRIPES);
    const u8* at = in;
    for (std::size_t block = 0; block < whole_blocks; block++) {
        for (std::size_t i = 0; i < BLOCK_STRIPES; i++, at += STRIPE_BYTES) lanes.take(at, secret + 8 * i);
        lanes.scramble(secret + SECRET_BYTES - STRIPE_BYTES);
    }
    const std::size_t stripes = (size - 1 - static_cast<std::size_t>(at - in)) / STRIPE_BYTES;
    for (std::size_t i = 0; i < stripes; i++, at += STRIPE_BYTES) lanes.take(at, secret + 8 * i);
    lanes.take(in + size - STRIPE_BYTES, secret + SECRET_BYTES - STRIPE_BYTES - 7);
    u64 lane[8];
    lanes.store(lane);
    u64 sum = size * P64_1;
    for (int i = 0; i < 4; i++) {
        const u8* key = secret + 11 + 16 * i;
        sum += fold(lane[2 * i] ^ read64(key), lane[2 * i + 1] ^ read64(key + 8));
    }
    return avalanche(sum);
}

}  // namespace xxh3

/// Hashes under one seed. Making one derives a secret from it, so keep it where many are hashed.
class Xxh3 {
   public:
    explicit Xxh3(u64 seed) : seed_(seed) {
        for (std::size_t i = 0; i < xxh3::SECRET_BYTES; i += 16) {
            u64 pair[2] = {read64(xxh3::SECRET + i) + seed, read64(xxh3::SECRET + i + 8) - seed};
            std::memcpy(secret_ + i, pair, sizeof pair);
        }
    }

    u64 seed() const { return seed_; }

    u64 operator()(const void* data, std::size_t size) const {
        const u8* in = static_cast<const u8*>(data);
        if (size <= 16) return size <= 8 ? xxh3::hash_0_to_8(in, size, seed_) : xxh3::hash_9_to_16(in, size, seed_);
        if (size <= 128) return xxh3::hash_17_to_128(in, size, secret_);
        if (size <= 240) return xxh3::hash_129_to_240(in, size, secret_, seed_);
        return xxh3::hash_long(in, size, secret_);
    }

   private:
    u64 seed_;
    alignas(64) u8 secret_[xxh3::SECRET_BYTES];
};

// --- names of prefixes: docs/architecture.md, "Hashing" ---

constexpr u64 CHAIN_SEED = 1337;

/// The sequence hash of a block that follows the prefix `parent`.
inline u64 follow(u64 parent, u64 block) {
    u64 pair[2] = {parent, block};
    return xxh3::hash_9_to_16(reinterpret_cast<const u8*>(pair), sizeof pair, CHAIN_SEED);
}

/// Sequence hashes of `count` blocks of `block_bytes` each, the first after `*parent` (null: it starts a sequence).
inline void hash_chain(const Xxh3& hash, const u8* tokens, std::size_t block_bytes, std::size_t count,
                       const u64* parent, u64* out) {
    if (!count) return;
    u64 block = hash(tokens, block_bytes);
    u64 name = parent ? follow(*parent, block) : block;
    out[0] = name;
    for (std::size_t i = 1; i < count; i++) {
        __builtin_prefetch(tokens + (i + 8) * block_bytes);
        name = follow(name, hash(tokens + i * block_bytes, block_bytes));
        out[i] = name;
    }
}

/// What keeps adapters and tenants apart.
inline u64 hash_seed(const void* lora, std::size_t lora_bytes, const void* salt, std::size_t salt_bytes) {
    u64 seed = CHAIN_SEED;
    if (lora_bytes) seed += Xxh3(0)(lora, lora_bytes);
    if (salt_bytes) seed += Xxh3(1)(salt, salt_bytes);
    return seed;
}

}  // namespace kvmesh
