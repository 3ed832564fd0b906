// Plain memory for the index: arrays that grow a little at a time, and a hash table of 4 bytes per entry.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <type_traits>
#include <utility>

#include <sys/mman.h>

#include "../../protocol/xxh3.h"

// GCC takes a function that only prefetches for one without effect, and drops calls that it has not inlined.
#define PREFETCHES [[gnu::always_inline]] inline

namespace kvmesh {

constexpr u32 NONE = 0xFFFFFFFF;

/// An array of plain values. Growing is cheap where it is large: the C library then moves pages, not bytes.
template <class T>
class Array {
    static_assert(std::is_trivially_copyable_v<T>);

   public:
    Array() = default;
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    Array(Array&& other) noexcept { swap(other); }
    Array& operator=(Array&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Array() { std::free(data_); }

    void swap(Array& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(capacity_, other.capacity_);
    }

    T& operator[](std::size_t i) { return data_[i]; }
    const T& operator[](std::size_t i) const { return data_[i]; }
    T* data() { return data_; }
    const T* data() const { return data_; }
    std::size_t size() const { return size_; }
    std::size_t capacity() const { return capacity_; }

    /// Room for `more` values, and some to spare where that means growing: the less, the more there are.
    void reserve(std::size_t more) {
        if (size_ + more <= capacity_) return;
        const std::size_t bytes = size_ * sizeof(T);
        set_capacity(size_ + more + size_ / (bytes < 8 << 10 ? 2 : bytes < 128 << 10 ? 4 : 8));
    }
    void set_capacity(std::size_t capacity) {
        if (!capacity) {
            std::free(data_);
            data_ = nullptr;
        } else if (void* moved = std::realloc(static_cast<void*>(data_), capacity * sizeof(T))) {
            data_ = static_cast<T*>(moved);
        } else {
            throw std::bad_alloc();
        }
        capacity_ = capacity;
        if (size_ > capacity) size_ = capacity;
    }
    void push(const T& value) {
        reserve(1);
        data_[size_++] = value;
    }
    /// Values that are new are not initialised.
    void resize(std::size_t size) {
        if (size > size_) reserve(size - size_);
        size_ = size;
    }
    void truncate(std::size_t size) { size_ = size; }

   private:
    T* data_ = nullptr;
    std::size_t size_ = 0;
    std::size_t capacity_ = 0;
};

/// An array that never moves: addresses for `most` values are set aside, memory is taken as they are first written.
/// Large pages, where the system has them, keep random access to it cheap.
template <class T>
class Reserved {
    static_assert(std::is_trivially_copyable_v<T>);

   public:
    explicit Reserved(std::size_t most) : most_(most), bytes_((most * sizeof(T) / LARGE + 1) * LARGE) {
        void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<T*>(at);
#ifdef MADV_HUGEPAGE
        const std::size_t skip = 2 * LARGE - (reinterpret_cast<std::uintptr_t>(at) & (LARGE - 1));
        if (bytes_ > skip) madvise(static_cast<char*>(at) + skip, bytes_ - skip, MADV_HUGEPAGE);
#endif
    }
    Reserved(const Reserved&) = delete;
    Reserved& operator=(const Reserved&) = delete;
    ~Reserved() { munmap(data_, bytes_); }

    T& operator[](std::size_t i) { return data_[i]; }
    const T& operator[](std::size_t i) const { return data_[i]; }
    const T* data() const { return data_; }
    std::size_t size() const { return size_; }
    void push(const T& value) {
        if (size_ == most_) throw std::bad_alloc();
        data_[size_++] = value;
    }

   private:
    static constexpr std::size_t LARGE = 2 << 20;

    const std::size_t most_, bytes_;
    T* data_;
    std::size_t size_ = 0;
};

/// Keys of `scatter`. Random per process, so that nobody can aim at one place in our tables.
struct ScatterKeys {
    u64 add, multiply;
    ScatterKeys() {
        std::random_device random;
        add = static_cast<u64>(random()) << 32 | random();
        multiply = (static_cast<u64>(random()) << 32 | random()) | 1;
    }
};
inline const ScatterKeys SCATTER;

/// Where a hash lands in our tables.
inline u64 scatter(u64 hash) { return fold(hash ^ SCATTER.add, SCATTER.multiply); }

/// A table of 4 bytes per slot: the number of an entry that is kept elsewhere, and in the bits above it a part of the
/// entry's hash, so that the entry itself is looked at about once. 16 slots make a bucket, which is one line of cache
/// and is compared at once; what finds its bucket full goes to the next. Takes hashes as `scatter` makes them: bits
/// 24..55 choose the bucket, bits 0..23 are compared, bits 56..63 are the caller's.
class Slots {
   public:
    /// Where a new entry may be put, as long as nothing changes.
    using Place = u32;

    Slots() = default;
    Slots(Slots&& other) noexcept { swap(other); }
    Slots& operator=(Slots&& other) noexcept {
        swap(other);
        return *this;
    }
    Slots(const Slots&) = delete;
    Slots& operator=(const Slots&) = delete;
    ~Slots() { std::free(slots_); }

    void swap(Slots& other) noexcept {
        std::swap(slots_, other.slots_);
        std::swap(buckets_, other.buckets_);
        std::swap(filled_, other.filled_);
        std::swap(most_filled_, other.most_filled_);
        std::swap(live_, other.live_);
        std::swap(bits_, other.bits_);
        std::swap(mask_, other.mask_);
    }

    u32 live() const { return live_; }
    std::size_t bytes() const { return 4 * SIZE * static_cast<std::size_t>(buckets_); }

    PREFETCHES void prefetch(u64 hash) const { __builtin_prefetch(slots_ + SIZE * home(hash), 1); }
    /// The entry that is probably meant, to prefetch it.
    u32 guess(u64 hash) const {
        if (!buckets_) return NONE;
        const Bucket bucket(slots_ + SIZE * home(hash));
        const u32 hits = bucket.equal(tag(hash), ~mask_);
        return hits ? bucket[__builtin_ctz(hits)] & mask_ : NONE;
    }

    /// The entry with this hash for which `same(entry)`; else NONE, and where to put it.
    template <class Same>
    u32 find(u64 hash, Same same, Place& place) const {
        place = NONE;
        if (!buckets_) return NONE;
        const u32 wanted = tag(hash);
        for (u32 number = home(hash);; number = after(number)) {
            const Bucket bucket(slots_ + SIZE * number);
            for (u32 hits = bucket.equal(wanted, ~mask_); hits; hits &= hits - 1) {
                const u32 slot = bucket[__builtin_ctz(hits)];
                if (slot < TOMB && same(slot & mask_)) return slot & mask_;
            }
            const u32 empty = bucket.equal(EMPTY, EMPTY);
            if (place == NONE) {
                if (const u32 free = empty ? empty : bucket.equal(TOMB, EMPTY)) place = at(number, free);
            }
            if (empty) return NONE;
        }
    }
    template <class Same>
    u32 find(u64 hash, Same same) const {
        Place place;
        return find(hash, same, place);
    }

    /// Whether an entry cannot be put in before a `rebuild`.
    bool is_full_for(u32 entry) const { return filled_ >= most_filled_ || entry + 2 > mask_; }

    void put(Place place, u64 hash, u32 entry) {
        filled_ += slots_[place] == EMPTY;
        slots_[place] = tag(hash) | entry;
        live_++;
    }
    /// Put an entry in that is not there.
    void insert(u64 hash, u32 entry) {
        for (u32 number = home(hash);; number = after(number)) {
            const Bucket bucket(slots_ + SIZE * number);
            if (const u32 free = bucket.equal(EMPTY, EMPTY) | bucket.equal(TOMB, EMPTY)) {
                return put(at(number, free), hash, entry);
            }
        }
    }

    /// Remove an entry that is there.
    void erase(u64 hash, u32 entry) {
        for (u32 number = home(hash);; number = after(number)) {
            const Bucket bucket(slots_ + SIZE * number);
            const u32 hit = bucket.equal(tag(hash) | entry, EMPTY);
            if (!hit) continue;
            const bool is_last_bucket = bucket.equal(EMPTY, EMPTY);  // else some may have gone on to the next
            slots_[at(number, hit)] = is_last_bucket ? EMPTY : TOMB;
            filled_ -= is_last_bucket;
            live_--;
            return;
        }
    }

    /// Make the table anew with `slots` of them, for entries numbered below `end`. `each(add)` calls `add(hash, entry)`
    /// for all there are.
    template <class Each>
    void rebuild(u64 slots, u32 end, Each each) {
        Slots fresh;
        fresh.buckets_ = static_cast<u32>(slots / SIZE + 1);
        fresh.bits_ = 8;
        while (static_cast<u64>(end) + 3 > 1ull << fresh.bits_) fresh.bits_++;
        fresh.mask_ = (1u << fresh.bits_) - 1;
        fresh.most_filled_ = static_cast<u32>(u64{fresh.buckets_} * SIZE * 7 / 8);
        fresh.slots_ = static_cast<u32*>(std::aligned_alloc(4 * SIZE, fresh.bytes()));
        if (!fresh.slots_) throw std::bad_alloc();
        std::memset(fresh.slots_, 0xFF, fresh.bytes());
        Array<u8> used;  // slots of each bucket, always the first ones
        used.resize(fresh.buckets_);
        std::memset(used.data(), 0, used.size());
        // Copies, which the compiler can keep in registers.
        u32* const slots_of_all = fresh.slots_;
        u8* const count = used.data();
        const u32 buckets = fresh.buckets_, bits = fresh.bits_;
        each([=](u64 hash, u32 entry) {
            u32 bucket = home(hash, buckets);
            while (count[bucket] == SIZE) bucket = bucket + 1 == buckets ? 0 : bucket + 1;
            slots_of_all[SIZE * bucket + count[bucket]++] = static_cast<u32>(hash) << bits | entry;
        });
        fresh.live_ = fresh.filled_ = live_;
        swap(fresh);
    }

    template <class Visit>
    void each(Visit visit) const {
        for (u32 number = 0; number < buckets_; number++) {
            const Bucket bucket(slots_ + SIZE * number);
            u32 used = ~(bucket.equal(EMPTY, EMPTY) | bucket.equal(TOMB, EMPTY)) & 0xFFFF;
            for (; used; used &= used - 1) visit(bucket[__builtin_ctz(used)] & mask_);
        }
    }

   private:
    static constexpr u32 SIZE = 16;                               // slots of a bucket
    static constexpr u32 EMPTY = 0xFFFFFFFF, TOMB = 0xFFFFFFFE;  // no entries: see is_full_for

    class Bucket {
       public:
        explicit Bucket(const u32* slots) : slots_(slots) {}

        u32 operator[](int i) const { return slots_[i]; }
        /// One bit per slot: whether it is `wanted` in the bits of `mask`.
        u32 equal(u32 wanted, u32 mask) const {
#if defined(__SSE2__)
            const __m128i want = _mm_set1_epi32(static_cast<int>(wanted));
            const __m128i part = _mm_set1_epi32(static_cast<int>(mask));
            __m128i same[4];
            for (int i = 0; i < 4; i++) {
                const __m128i slots = _mm_load_si128(reinterpret_cast<const __m128i*>(slots_) + i);
                same[i] = _mm_cmpeq_epi32(_mm_and_si128(slots, part), want);
            }
            const __m128i low = _mm_packs_epi32(same[0], same[1]), high = _mm_packs_epi32(same[2], same[3]);
            return static_cast<u32>(_mm_movemask_epi8(_mm_packs_epi16(low, high)));
#else
            u32 bits = 0;
            for (u32 i = 0; i < SIZE; i++) bits |= static_cast<u32>((slots_[i] & mask) == wanted) << i;
            return bits;
#endif
        }

       private:
        const u32* slots_;
    };

    static Place at(u32 bucket, u32 bits) { return SIZE * bucket + static_cast<u32>(__builtin_ctz(bits)); }
    static u32 home(u64 hash, u32 buckets) {
        return static_cast<u32>(u64{static_cast<u32>(hash >> 24)} * buckets >> 32);
    }
    u32 home(u64 hash) const { return home(hash, buckets_); }
    u32 after(u32 bucket) const { return bucket + 1 == buckets_ ? 0 : bucket + 1; }
    u32 tag(u64 hash) const { return static_cast<u32>(hash) << bits_; }

    u32* slots_ = nullptr;
    u32 buckets_ = 0;
    u32 filled_ = 0;  // not EMPTY
    u32 most_filled_ = 0;
    u32 live_ = 0;
    u32 bits_ = 0;  // of an entry's number
    u32 mask_ = 0;
};

}  // namespace kvmesh
