// Prefixes by their sequence hash.
#pragma once

#include "memory.h"

namespace kvmesh {

/// A table of `Node`s (plain, with `hash()`, `set_free()` and `next_free()`), by hash. Numbers of nodes that are gone are used again.
///
/// The slots are in 256 parts that grow one by one, so that no single insertion has to move all of them.
template <class Node>
class Nodes {
   public:
    Node& operator[](u32 number) { return nodes_[number]; }
    const Node& operator[](u32 number) const { return nodes_[number]; }
    u32 live() const { return live_; }
    /// One more than the largest number in use.
    u32 end() const { return static_cast<u32>(nodes_.size()); }

    PREFETCHES void prefetch(u64 scattered) const { parts_[scattered >> 56].prefetch(scattered); }
    PREFETCHES void prefetch_node(u64 scattered) const {
        u32 number = parts_[scattered >> 56].guess(scattered);
        if (number != NONE) prefetch_number(number);
    }
    PREFETCHES void prefetch_number(u32 number) const {
        const char* at = reinterpret_cast<const char*>(nodes_.data() + number);
        __builtin_prefetch(at, 1);
        __builtin_prefetch(at + sizeof(Node) - 1, 1);
    }

    u32 find(u64 hash, u64 scattered) const {
        return parts_[scattered >> 56].find(scattered, [this, hash](u32 number) { return nodes_[number].hash() == hash; });
    }

    /// Add a node whose hash is not there.
    u32 add(const Node& node, u64 scattered) {
        u32 number = free_ != NONE ? free_ : end();
        Slots& part = parts_[scattered >> 56];
        if (part.is_full_for(number)) grow(part);
        if (free_ != NONE) {
            free_ = nodes_[number].next_free();
            nodes_[number] = node;
        } else {
            nodes_.push(node);
        }
        part.insert(scattered, number);
        live_++;
        return number;
    }

    /// `Node::set_free` marks it and keeps the list of free ones.
    void remove(u32 number) {
        u64 scattered = scatter(nodes_[number].hash());
        parts_[scattered >> 56].erase(scattered, number);
        nodes_[number].set_free(free_);
        free_ = number;
        live_--;
    }

    void reserve(std::size_t more) { nodes_.reserve(more); }

    std::size_t bytes() const {
        std::size_t total = nodes_.capacity() * sizeof(Node);
        for (const Slots& part : parts_) total += part.bytes();
        return total;
    }

   private:
    void grow(Slots& part) {
        Array<u32> numbers;
        numbers.reserve(part.live());
        part.each([&numbers](u32 number) { numbers.push(number); });
        part.rebuild(1, static_cast<u32>(nodes_.capacity()) + 1, [&](auto add) {
            constexpr std::size_t AHEAD = 16;
            for (std::size_t i = 0; i < numbers.size(); i++) {
                if (i + AHEAD < numbers.size()) prefetch_number(numbers[i + AHEAD]);
                add(scatter(nodes_[numbers[i]].hash()), numbers[i]);
            }
        });
    }

    Array<Node> nodes_;
    Slots parts_[256];
    u32 free_ = NONE;
    u32 live_ = 0;
};

}  // namespace kvmesh
