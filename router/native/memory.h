// Plain memory for the index: arrays that grow a little at a time, and a hash table of 4 bytes per entry.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <type_traits>
#include <utility>

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

    /// Room for `more` values, with an eighth to spare where that means growing.
    void reserve(std::size_t more) {
        if (size_ + more > capacity_) set_capacity(size_ + more + size_ / 8);
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

/// Where a hash lands in our tables. Random per process, so that nobody can aim at one place.
inline u64 scatter(u64 hash) {
    struct Keys {
        u64 add, multiply;
        Keys() {
            std::random_device random;
            add = static_cast<u64>(random()) << 32 | random();
            multiply = (static_cast<u64>(random()) << 32 | random()) | 1;
        }
    };
    static const Keys keys;
    return fold(hash ^ keys.add, keys.multiply);
}

/// Open addressing with 4 bytes per slot: the number of an entry that is kept elsewhere, and in the bits above it a
/// part of the entry's hash, so that the entry itself is looked at about once. Takes hashes as `scatter` makes them:
/// bits 24..55 say where to look, bits 0..23 are compared, bits 56..63 are the caller's.
class Slots {
   public:
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
        std::swap(capacity_, other.capacity_);
        std::swap(filled_, other.filled_);
        std::swap(live_, other.live_);
        std::swap(bits_, other.bits_);
    }

    u32 live() const { return live_; }
    std::size_t bytes() const { return 4 * static_cast<std::size_t>(capacity_); }

    PREFETCHES void prefetch(u64 hash) const {
        if (capacity_) __builtin_prefetch(slots_ + home(hash), 1);
    }
    /// The entry that is probably meant, to prefetch it.
    u32 guess(u64 hash) const {
        if (!capacity_) return NONE;
        u32 slot = slots_[home(hash)];
        return slot < TOMB && !((slot ^ tag(hash)) & ~mask()) ? slot & mask() : NONE;
    }

    /// The entry with this hash for which `same(entry)`, else NONE.
    template <class Same>
    u32 find(u64 hash, Same same) const {
        if (!capacity_) return NONE;
        const u32 wanted = tag(hash);
        for (u32 at = home(hash);; at = after(at)) {
            u32 slot = slots_[at];
            if (slot == EMPTY) return NONE;
            if (!((slot ^ wanted) & ~mask()) && slot != TOMB && same(slot & mask())) return slot & mask();
        }
    }

    /// Whether `insert(hash, entry)` needs a `rebuild` first.
    bool is_full_for(u32 entry) const {
        return static_cast<u64>(filled_ + 1) * 5 > static_cast<u64>(capacity_) * 4 || entry + 3 > 1u << bits_;
    }

    /// Add an entry that is not there.
    void insert(u64 hash, u32 entry) {
        for (u32 at = home(hash);; at = after(at)) {
            if (slots_[at] < TOMB) continue;
            filled_ += slots_[at] == EMPTY;
            slots_[at] = tag(hash) | entry;
            live_++;
            return;
        }
    }

    /// Remove an entry that is there.
    void erase(u64 hash, u32 entry) {
        u32 at = home(hash);
        while (slots_[at] != (tag(hash) | entry)) at = after(at);
        slots_[at] = TOMB;
        live_--;
        if (slots_[after(at)] != EMPTY) return;
        for (; slots_[at] == TOMB; at = at ? at - 1 : capacity_ - 1) {  // a search that came here would end anyway
            slots_[at] = EMPTY;
            filled_--;
        }
    }

    /// Make room for `more` entries numbered below `end`. `each(add)` calls `add(hash, entry)` for all there are.
    template <class Each>
    void rebuild(u32 more, u32 end, Each each) {
        Slots fresh;
        u64 wanted = (static_cast<u64>(live_) + more) * 5 / 3 + 8;
        fresh.capacity_ = static_cast<u32>(wanted);
        fresh.bits_ = 8;
        while (static_cast<u64>(end) + 3 > 1ull << fresh.bits_) fresh.bits_++;
        fresh.slots_ = static_cast<u32*>(std::malloc(4 * wanted));
        if (!fresh.slots_) throw std::bad_alloc();
        std::memset(fresh.slots_, 0xFF, 4 * wanted);
        each([&fresh](u64 hash, u32 entry) { fresh.insert(hash, entry); });
        swap(fresh);
    }

    template <class Visit>
    void each(Visit visit) const {
        for (u32 at = 0; at < capacity_; at++) {
            if (slots_[at] < TOMB) visit(slots_[at] & mask());
        }
    }

   private:
    static constexpr u32 EMPTY = 0xFFFFFFFF, TOMB = 0xFFFFFFFE;  // no entry: see is_full_for

    u32 home(u64 hash) const { return static_cast<u32>((hash >> 24 & 0xFFFFFFFF) * capacity_ >> 32); }
    u32 after(u32 at) const { return at + 1 == capacity_ ? 0 : at + 1; }
    u32 mask() const { return (1u << bits_) - 1; }
    u32 tag(u64 hash) const { return static_cast<u32>(hash) << bits_; }

    u32* slots_ = nullptr;
    u32 capacity_ = 0;
    u32 filled_ = 0;  // not EMPTY
    u32 live_ = 0;
    u32 bits_ = 0;  // of the entry's number
};

}  // namespace kvmesh
