// Prefixes by their sequence hash.
#pragma once

#include "memory.h"

namespace kvmesh {

/// A table of `Node`s (plain, with `hash()`, `set_free()` and `next_free()`), by what `hash()` gives and `scatter` takes.
/// Numbers of nodes that are gone are used again.
///
/// The slots are in 256 parts that double one by one, each at sizes of its own, so that no single insertion has to
/// move many of them and the memory grows evenly.
template <class Node>
class Nodes {
   public:
    using Hash = decltype(std::declval<const Node&>().hash());

    /// There are never more than `most` nodes.
    explicit Nodes(std::size_t most) : nodes_(most) {}

    Node& operator[](u32 number) { return nodes_[number]; }
    const Node& operator[](u32 number) const { return nodes_[number]; }
    u32 live() const { return live_; }
    /// One more than the largest number in use.
    u32 end() const { return static_cast<u32>(nodes_.size()); }

    /// Of the next node that is added.
    u32 next_number() const { return free_ != NONE ? free_ : end(); }

    PREFETCHES void prefetch(u64 scattered) const { parts_[scattered >> 56].prefetch(scattered); }
    PREFETCHES void prefetch_node(u64 scattered) const {
        u32 number = parts_[scattered >> 56].guess(scattered);
        if (number != NONE) prefetch_number(number);
    }
    PREFETCHES void prefetch_number(u32 number) const { __builtin_prefetch(nodes_.data() + number, 1); }

    u32 find(Hash hash, u64 scattered, Slots::Place& place) const {
        auto same = [this, hash](u32 number) { return nodes_[number].hash() == hash; };
        return parts_[scattered >> 56].find(scattered, same, place);
    }
    u32 find(Hash hash, u64 scattered) const {
        Slots::Place place;
        return find(hash, scattered, place);
    }

    /// Add a node whose hash is not there, at the place that `find` told.
    u32 add(const Node& node, u64 scattered, Slots::Place place) {
        const u32 number = next_number();
        Slots& part = parts_[scattered >> 56];
        const bool is_full = part.is_full_for(number);
        if (is_full) grow(part, scattered >> 56);
        if (free_ != NONE) {
            free_ = nodes_[number].next_free();
            nodes_[number] = node;
        } else {
            nodes_.push(node);
        }
        if (is_full) {
            part.insert(scattered, number);
        } else {
            part.put(place, scattered, number);
        }
        live_++;
        return number;
    }

    /// Let `change(node)` give a node a hash that is not there; it keeps its number.
    template <class Change>
    void rename(u32 number, Change change) {
        const u64 before = scatter(nodes_[number].hash());
        parts_[before >> 56].erase(before, number);
        change(nodes_[number]);
        const u64 now = scatter(nodes_[number].hash());
        Slots& part = parts_[now >> 56];
        if (part.is_full_for(number)) grow(part, now >> 56);
        part.insert(now, number);
    }

    /// `Node::set_free` marks it and keeps the list of free ones.
    void remove(u32 number) {
        u64 scattered = scatter(nodes_[number].hash());
        parts_[scattered >> 56].erase(scattered, number);
        nodes_[number].set_free(free_);
        free_ = number;
        live_--;
    }

   private:
    void grow(Slots& part, u64 number_of_part) {
        u64 slots = 16 + (number_of_part >> 4);  // times a power of two: 16 sequences of sizes
        while (slots * 3 < u64{part.live()} * 4 + 4) slots *= 2;
        Array<u32> numbers;
        numbers.reserve(part.live());
        part.each([&numbers](u32 number) { numbers.push(number); });
        part.rebuild(slots, end() + end() / 2, [&](auto add) {
            constexpr std::size_t AHEAD = 32;
            for (std::size_t i = 0; i < numbers.size(); i++) {
                if (i + AHEAD < numbers.size()) prefetch_number(numbers[i + AHEAD]);
                add(scatter(nodes_[numbers[i]].hash()), numbers[i]);
            }
        });
    }

    Reserved<Node> nodes_;
    Slots parts_[256];
    u32 free_ = NONE;
    u32 live_ = 0;
};

}  // namespace kvmesh
