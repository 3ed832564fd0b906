// Longest prefixes of many holders at once.
#pragma once

#include <algorithm>
#include <vector>

#include "memory.h"

namespace kvmesh {

constexpr int TIERS = 4;

/// How many leading blocks one holder has, per tier and all faster ones.
struct Reach {
    u32 holder;
    u32 depth[TIERS];
};

/// A question still open: how far does `holder` reach at `level` or faster? `reach` is where the answer goes.
struct Asked {
    u32 holder;
    u32 reach;
    u8 level;
    bool all_levels;  // the answer holds for every level

    bool operator<(const Asked& other) const { return holder < other.holder; }
};

/// Answers questions about one prompt. `Source` has `prefetch(i)`, `prefetch_node(i)`, and `at(i)`: who has block i,
/// as a view with `size()`, sorted `holder(k)`, and `level(k)`, the fastest tier there.
///
/// `gallop` is for holders that lack nothing in the middle: what they have of a prompt is a prefix of it, so whether
/// block i is there decides on all before or after it. `walk` is for the others.
template <class Source>
class Matcher {
   public:
    Matcher(const Source& source, std::size_t blocks, std::vector<Reach>& reaches)
        : source_(source), blocks_(blocks), reaches_(reaches) {}

    /// All of `asked` (sorted) have block 0.
    void gallop(std::vector<Asked>& asked) {
        aside_.resize(asked.size());
        for (std::size_t i = 2; i < 2 * blocks_; i *= 2) source_.prefetch(std::min(i, blocks_) - 1);
        for (std::size_t i = 2; i < 2 * blocks_; i *= 2) source_.prefetch_node(std::min(i, blocks_) - 1);
        Asked *first = asked.data(), *last = first + asked.size();
        std::size_t have = 1;
        while (first != last && have < blocks_) {
            std::size_t probe = std::min(2 * have, blocks_);
            Asked* lost = split(first, last, probe - 1);
            bisect(lost, last, have, probe);
            last = lost;
            have = probe;
        }
        answer(first, last, have);
    }

    void walk(std::vector<Asked>& asked) {
        aside_.resize(asked.size());
        Asked *first = asked.data(), *last = first + asked.size();
        for (std::size_t depth = 1; first != last; depth++) {
            if (depth == blocks_) return answer(first, last, depth);
            if (depth + 16 < blocks_) source_.prefetch(depth + 16);
            if (depth + 8 < blocks_) source_.prefetch_node(depth + 8);
            Asked* lost = split(first, last, depth);
            answer(lost, last, depth);
            last = lost;
        }
    }

   private:
    /// These have `have` blocks and not `lack`: find out where between it ends.
    void bisect(Asked* first, Asked* last, std::size_t have, std::size_t lack) {
        if (first == last) return;
        if (lack - have == 1) return answer(first, last, have);
        std::size_t probe = have + (lack - have) / 2;
        Asked* lost = split(first, last, probe - 1);
        bisect(first, lost, probe, lack);
        bisect(lost, last, have, probe);
    }

    /// Move those that have block i to the front; both parts stay sorted.
    Asked* split(Asked* first, Asked* last, std::size_t i) {
        auto have = source_.at(i);
        Asked *kept = first, *lost = aside_.data();
        const u32 size = have.size();
        const bool few = static_cast<std::size_t>(last - first) * 8 < size;
        for (u32 k = 0; first != last; first++) {
            if (few) {
                k = have.search(k, first->holder);
            } else {
                while (k < size && have.holder(k) < first->holder) k++;
            }
            if (k < size && have.holder(k) == first->holder && have.level(k) <= first->level) {
                *kept++ = *first;
            } else {
                *lost++ = *first;
            }
        }
        std::copy(aside_.data(), lost, kept);
        return kept;
    }

    void answer(const Asked* first, const Asked* last, std::size_t depth) {
        for (; first != last; first++) {
            Reach& reach = reaches_[first->reach];
            reach.depth[first->level] = static_cast<u32>(depth);
            if (first->all_levels) {
                for (u32& other : reach.depth) other = static_cast<u32>(depth);
            }
        }
    }

    const Source& source_;
    const std::size_t blocks_;
    std::vector<Reach>& reaches_;
    std::vector<Asked> aside_;
};

}  // namespace kvmesh
