// Counted chains of sequence hashes. Specified by PlainChainCounts in router/chains.py. Knows nothing of Python.
#pragma once

#include <vector>

#include "holders.h"
#include "match.h"
#include "nodes.h"

namespace kvmesh {

/// How often one holder uses one prefix.
struct Use {
    u32 holder;
    u32 passing;  // chains that pass through it
    u32 ending;   // of them, chains that end there
};

/// A prefix in use: one use in place, several in memory of their own.
struct UsedNode {
    u32 hash_low, hash_high;
    u32 count;
    u32 capacity;  // 0: in place
    union {
        Use one;
        Use* many;
    };

    u64 hash() const { return hash_low | static_cast<u64>(hash_high) << 32; }
    u32 next_free() const { return capacity; }
    void set_free(u32 next) {
        count = 0;
        capacity = next;
    }
    Use* uses() { return capacity ? many : &one; }
    const Use* uses() const { return capacity ? many : &one; }
};

/// A view for Matcher: who uses a prefix, sorted.
struct Users {
    const Use* uses;
    u32 count;

    u32 size() const { return count; }
    u32 holder(u32 i) const { return uses[i].holder; }
    u8 level(u32) const { return 0; }
    u32 search(u32 from, u32 wanted) const {
        const Use* found = std::lower_bound(uses + from, uses + count, wanted,
                                            [](const Use& use, u32 holder) { return use.holder < holder; });
        return static_cast<u32>(found - uses);
    }
};

constexpr std::size_t MOST_PREFIXES = 1 << 26;

class Chains {
   public:
    Chains() : nodes_(MOST_PREFIXES) {}
    Chains(const Chains&) = delete;
    Chains& operator=(const Chains&) = delete;
    ~Chains() {
        for (u32 number = 0; number < nodes_.end(); number++) {
            if (nodes_[number].count && nodes_[number].capacity) std::free(nodes_[number].many);
        }
    }

    /// A number for a holder that uses nothing yet.
    u32 open() {
        if (free_holders_.empty()) {
            blocks_.push_back(0);
            free_holders_.reserve(blocks_.size());
            return static_cast<u32>(blocks_.size() - 1);
        }
        u32 holder = free_holders_.back();
        free_holders_.pop_back();
        return holder;
    }
    /// Give back the number of a holder that uses nothing.
    void close(u32 holder) { free_holders_.push_back(holder); }
    u32 blocks_of(u32 holder) const { return blocks_[holder]; }
    u32 num_blocks() const { return nodes_.live(); }

    void add(u32 holder, const u8* hashes, std::size_t count) {
        each(hashes, count, [&](u64 hash, u64 scattered, bool is_last) {
            Slots::Place place;
            u32 number = nodes_.find(hash, scattered, place);
            if (number == NONE) {
                number = nodes_.add({static_cast<u32>(hash), static_cast<u32>(hash >> 32), 0, 0, {}}, scattered, place);
            }
            Use& use = insert(nodes_[number], holder);
            use.passing++;
            use.ending += is_last;
        });
    }

    void discard(u32 holder, const u8* hashes, std::size_t count) {
        if (!count || !ends_at(holder, read64(hashes + 8 * (count - 1)))) return;
        each(hashes, count, [&](u64 hash, u64 scattered, bool is_last) {
            u32 number = nodes_.find(hash, scattered);
            Use* use = number == NONE ? nullptr : find(nodes_[number], holder);
            if (!use) return;
            use->ending -= is_last && use->ending;
            if (!--use->passing) erase(number, use);
        });
    }

    /// All its chains, in time that grows with those of everybody.
    void drop(u32 holder) {
        for (u32 number = 0; number < nodes_.end() && blocks_[holder]; number++) {
            if (!nodes_[number].count) continue;
            if (Use* use = find(nodes_[number], holder)) erase(number, use);
        }
    }

    const std::vector<Reach>& match(const u8* hashes, std::size_t count) {
        reaches_.clear();
        asked_.clear();
        if (!count) return reaches_;
        Prompt prompt{*this, hashes};
        Users first = prompt.at(0);
        for (u32 i = 0; i < first.size(); i++) {
            asked_.push_back({first.holder(i), i, 0, false});
            reaches_.push_back({first.holder(i), {0, 0, 0, 0}});
        }
        if (!asked_.empty()) Matcher<Prompt>(prompt, count, reaches_).gallop(asked_);
        return reaches_;
    }

   private:
    struct Prompt {
        const Chains& chains;
        const u8* hashes;

        u64 hash(std::size_t i) const { return read64(hashes + 8 * i); }
        PREFETCHES void prefetch(std::size_t i) const { chains.nodes_.prefetch(scatter(hash(i))); }
        PREFETCHES void prefetch_node(std::size_t i) const { chains.nodes_.prefetch_node(scatter(hash(i))); }
        Users at(std::size_t i) const {
            u32 found = chains.nodes_.find(hash(i), scatter(hash(i)));
            return found == NONE ? Users{nullptr, 0} : Users{chains.nodes_[found].uses(), chains.nodes_[found].count};
        }
    };

    template <class Visit>
    void each(const u8* hashes, std::size_t count, Visit visit) {
        constexpr std::size_t FAR = 16, NEAR = 8;
        for (std::size_t i = 0; i < std::min(FAR, count); i++) nodes_.prefetch(scatter(read64(hashes + 8 * i)));
        for (std::size_t i = 0; i < count; i++) {
            if (i + FAR < count) nodes_.prefetch(scatter(read64(hashes + 8 * (i + FAR))));
            if (i + NEAR < count) nodes_.prefetch_node(scatter(read64(hashes + 8 * (i + NEAR))));
            u64 hash = read64(hashes + 8 * i);
            visit(hash, scatter(hash), i + 1 == count);
        }
    }

    static Use* find(UsedNode& node, u32 holder) {
        u32 at = Users{node.uses(), node.count}.search(0, holder);
        return at < node.count && node.uses()[at].holder == holder ? node.uses() + at : nullptr;
    }

    bool ends_at(u32 holder, u64 hash) {
        u32 number = nodes_.find(hash, scatter(hash));
        Use* use = number == NONE ? nullptr : find(nodes_[number], holder);
        return use && use->ending;
    }

    Use& insert(UsedNode& node, u32 holder) {
        u32 at = Users{node.uses(), node.count}.search(0, holder);
        if (at < node.count && node.uses()[at].holder == holder) return node.uses()[at];
        if (node.count == std::max(1u, node.capacity)) grow(node);
        Use* uses = node.uses();
        std::memmove(uses + at + 1, uses + at, (node.count - at) * sizeof *uses);
        uses[at] = {holder, 0, 0};
        node.count++;
        blocks_[holder]++;
        return uses[at];
    }

    static void grow(UsedNode& node) {
        const u32 capacity = node.capacity ? node.capacity * 2 : 4;
        Use* more = static_cast<Use*>(std::malloc(capacity * sizeof(Use)));
        if (!more) throw std::bad_alloc();
        std::memcpy(more, node.uses(), node.count * sizeof(Use));
        if (node.capacity) std::free(node.many);
        node.many = more;
        node.capacity = capacity;
    }

    void erase(u32 number, Use* use) {
        UsedNode& node = nodes_[number];
        blocks_[use->holder]--;
        node.count--;
        Use* uses = node.uses();
        std::memmove(use, use + 1, static_cast<std::size_t>(uses + node.count - use) * sizeof *use);
        if (node.count) return;
        if (node.capacity) std::free(node.many);
        nodes_.remove(number);
    }

    Nodes<UsedNode> nodes_;
    std::vector<u32> blocks_;  // per holder
    std::vector<u32> free_holders_;
    std::vector<Reach> reaches_;
    std::vector<Asked> asked_;
};

}  // namespace kvmesh
