// Counted chains of sequence hashes. Specified by PlainChainCounts in router/chains.py. Knows nothing of Python.
#pragma once

#include <algorithm>
#include <vector>

#include "match.h"
#include "nodes.h"

namespace kvmesh {

/// How often one holder uses one segment.
struct Use {
    u32 holder;
    u32 passing;  // chains that pass through it
    u32 ending;   // of them, chains that end with it
};

/// What a segment is found by: the one before it (NONE: it begins a chain), and its first hash.
struct Step {
    u32 before;
    u64 hash;

    bool operator==(const Step& other) const { return before == other.before && hash == other.hash; }
};
inline u64 scatter(Step step) { return scatter(scatter(step.hash) ^ step.before); }

/// A run of prefixes that the same chains pass through. One use is kept in place, several in memory of their own.
struct Segment {
    u8* hashes;  // as they travel
    u32 length;  // in hashes, >= 1
    u32 before;
    u32 after;       // segments that follow directly
    u32 after_mix;   // their numbers in one, by exclusive or: a single one is known by it
    u32 ending;      // chains of anybody that end with it
    u32 num_uses;    // 0: free
    u32 capacity;    // 0: in place
    union {
        Use one;
        Use* many;  // by holder
    };

    Step hash() const { return {before, read64(hashes)}; }
    u32 next_free() const { return capacity; }
    void set_free(u32 next) {
        num_uses = 0;
        capacity = next;
    }
    Use* uses() { return capacity ? many : &one; }
    Use* search(u32 holder) {
        return std::lower_bound(uses(), uses() + num_uses, holder,
                                [](const Use& use, u32 wanted) { return use.holder < wanted; });
    }
    Use* find(u32 holder) {
        Use* use = search(holder);
        return use != uses() + num_uses && use->holder == holder ? use : nullptr;
    }
};

constexpr std::size_t MOST_SEGMENTS = 1 << 24;  // more are no memory, as std::bad_alloc says: then all is forgotten

/// A tree of segments: chains with a common beginning share it, and part where they differ. Where nothing ends and one
/// segment alone follows, the two become one again. So what a chain costs is a few segments, however long it is.
class Chains {
   public:
    Chains() : segments_(MOST_SEGMENTS) {}
    Chains(const Chains&) = delete;
    Chains& operator=(const Chains&) = delete;
    ~Chains() {
        for (u32 number = 0; number < segments_.end(); number++) {
            if (segments_[number].num_uses) release(segments_[number]);
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
    u32 num_blocks() const { return num_blocks_; }

    void add(u32 holder, const u8* hashes, std::size_t count) {
        u32 number = NONE;
        for (std::size_t at = 0; at < count;) {
            const u8* rest = hashes + 8 * at;
            Slots::Place place;
            const Step step{number, read64(rest)};
            u32 next = segments_.find(step, scatter(step), place);
            if (next == NONE) {
                next = append(number, rest, static_cast<u32>(count - at), place);
            } else if (const u32 same = common(segments_[next], rest, count - at); same < segments_[next].length) {
                next = split(next, same);
            }
            use(next, holder).passing++;
            at += segments_[next].length;
            number = next;
        }
        if (number == NONE) return;
        segments_[number].ending++;
        segments_[number].find(holder)->ending++;
    }

    void discard(u32 holder, const u8* hashes, std::size_t count) {
        path_.clear();
        u32 number = NONE;
        for (std::size_t at = 0; at < count;) {
            number = find(number, hashes + 8 * at);
            if (number == NONE) return;
            Segment& segment = segments_[number];
            if (common(segment, hashes + 8 * at, count - at) < segment.length || !segment.find(holder)) return;
            at += segment.length;
            path_.push_back(number);
        }
        if (path_.empty() || !segments_[number].find(holder)->ending) return;
        segments_[number].ending--;
        segments_[number].find(holder)->ending--;
        for (std::size_t i = path_.size(); i--;) {
            Segment& segment = segments_[path_[i]];
            Use* use = segment.find(holder);
            if (!--use->passing) erase(segment, use);
            if (!segment.num_uses) {
                remove(path_[i]);
                path_.pop_back();
            }
        }
        if (!path_.empty()) join(path_.back());
    }

    /// All its chains, in time that grows with those of everybody.
    void drop(u32 holder) {
        path_.clear();
        for (u32 number = 0; number < segments_.end() && blocks_[holder]; number++) {
            Segment& segment = segments_[number];
            Use* use = segment.num_uses ? segment.find(holder) : nullptr;
            if (!use) continue;
            segment.ending -= use->ending;
            erase(segment, use);
            path_.push_back(number);
        }
        // What follows a segment without uses has none either: they all go, and nothing is told to those that go.
        const auto stays = [this](u32 number) { return segments_[number].num_uses; };
        const auto gone = std::partition(path_.begin(), path_.end(), stays);
        for (auto number = gone; number != path_.end(); number++) {
            const u32 before = segments_[*number].before;
            if (before != NONE && stays(before)) unlink(*number);
        }
        for (auto number = gone; number != path_.end(); number++) take_out(*number);
        for (auto number = path_.begin(); number != gone; number++) {
            if (stays(*number)) join(*number);
        }
    }

    const std::vector<Reach>& match(const u8* hashes, std::size_t count) {
        reaches_.clear();
        u32 number = NONE;
        for (std::size_t at = 0; at < count;) {
            if ((number = find(number, hashes + 8 * at)) == NONE) break;
            Segment& segment = segments_[number];
            const u32 same = common(segment, hashes + 8 * at, count - at);
            const bool is_first = !at;
            at += same;
            auto reach = reaches_.begin();
            for (const Use *use = segment.uses(), *end = use + segment.num_uses; use != end; use++) {
                if (is_first) {
                    reaches_.push_back({use->holder, {static_cast<u32>(at), 0, 0, 0}});
                    continue;
                }
                reach = std::lower_bound(reach, reaches_.end(), use->holder,
                                         [](const Reach& known, u32 wanted) { return known.holder < wanted; });
                reach->depth[0] = static_cast<u32>(at);  // who uses it uses all before it
            }
            if (same < segment.length) break;
        }
        return reaches_;
    }

   private:
    u32 find(u32 before, const u8* hashes) const {
        const Step step{before, read64(hashes)};
        return segments_.find(step, scatter(step));
    }

    /// Hashes that a segment and a part of a chain begin with alike; at least the first.
    static u32 common(const Segment& segment, const u8* hashes, std::size_t count) {
        const u32 most = static_cast<u32>(std::min<std::size_t>(segment.length, count));
        if (!std::memcmp(segment.hashes, hashes, 8 * std::size_t{most})) return most;
        u32 same = 1;
        while (read64(segment.hashes + 8 * same) == read64(hashes + 8 * same)) same++;
        return same;
    }

    /// A new segment at the place that a search told; nobody uses it yet.
    u32 append(u32 before, const u8* hashes, u32 length, Slots::Place place) {
        Segment segment{copy(hashes, length), length, before, 0, 0, 0, 0, 0, {}};
        const u32 number = segments_.add(segment, scatter(segment.hash()), place);
        link(number);
        num_blocks_ += length;
        return number;
    }

    /// The first `length` hashes of a segment become one of their own, whose number this is.
    u32 split(u32 number, u32 length) {
        Segment& tail = segments_[number];
        Segment head = tail;
        head.hashes = copy(tail.hashes, length);
        head.length = length;
        head.after = head.after_mix = head.ending = 0;
        if (head.capacity) {
            head.many = allocate<Use>(head.capacity);
            std::memcpy(head.many, tail.many, head.num_uses * sizeof(Use));
        }
        for (Use* use = head.uses(); use != head.uses() + head.num_uses; use++) use->ending = 0;
        unlink(number);
        const u32 added = segments_.next_number();
        segments_.rename(number, [length, added](Segment& segment) {
            u8* rest = copy(segment.hashes + 8 * std::size_t{length}, segment.length - length);
            std::free(std::exchange(segment.hashes, rest));
            segment.length -= length;
            segment.before = added;
        });
        Slots::Place place;
        segments_.find(head.hash(), scatter(head.hash()), place);
        segments_.add(head, scatter(head.hash()), place);
        link(added);
        link(number);
        return added;
    }

    /// Make one of a segment and the only one that follows it, if nothing ends between them.
    void join(u32 number) {
        const Segment head = segments_[number];
        if (head.ending || head.after != 1) return;
        const u32 tail = head.after_mix;
        unlink(number);
        segments_.remove(number);
        segments_.rename(tail, [&head](Segment& segment) {
            u8* all = allocate<u8>(8 * (std::size_t{head.length} + segment.length));
            std::memcpy(all, head.hashes, 8 * std::size_t{head.length});
            std::memcpy(all + 8 * std::size_t{head.length}, segment.hashes, 8 * std::size_t{segment.length});
            std::free(std::exchange(segment.hashes, all));
            segment.length += head.length;
            segment.before = head.before;
        });
        link(tail);
        release(head);
    }

    /// Take away a segment that nobody uses any more, and that nothing follows.
    void remove(u32 number) {
        unlink(number);
        take_out(number);
    }
    void take_out(u32 number) {
        const Segment segment = segments_[number];
        num_blocks_ -= segment.length;
        segments_.remove(number);
        release(segment);
    }

    void link(u32 number) { count_after(number, 1); }
    void unlink(u32 number) { count_after(number, -1u); }
    void count_after(u32 number, u32 by) {
        const u32 before = segments_[number].before;
        if (before == NONE) return;
        segments_[before].after += by;
        segments_[before].after_mix ^= number;
    }

    Use& use(u32 number, u32 holder) {
        Segment& segment = segments_[number];
        Use* use = segment.search(holder);
        const std::size_t at = static_cast<std::size_t>(use - segment.uses());
        if (at < segment.num_uses && use->holder == holder) return *use;
        if (segment.num_uses == std::max(1u, segment.capacity)) grow(segment);
        use = segment.uses() + at;
        std::memmove(use + 1, use, (segment.num_uses - at) * sizeof *use);
        *use = {holder, 0, 0};
        segment.num_uses++;
        blocks_[holder] += segment.length;
        return *use;
    }

    static void grow(Segment& segment) {
        const u32 capacity = segment.capacity ? segment.capacity * 2 : 4;
        Use* more = allocate<Use>(capacity);
        std::memcpy(more, segment.uses(), segment.num_uses * sizeof(Use));
        if (segment.capacity) std::free(segment.many);
        segment.many = more;
        segment.capacity = capacity;
    }

    void erase(Segment& segment, Use* use) {
        blocks_[use->holder] -= segment.length;
        const Use* end = segment.uses() + segment.num_uses--;
        std::memmove(use, use + 1, static_cast<std::size_t>(end - use - 1) * sizeof *use);
    }

    template <class T>
    static T* allocate(std::size_t count) {
        if (void* memory = std::malloc(count * sizeof(T))) return static_cast<T*>(memory);
        throw std::bad_alloc();
    }
    static u8* copy(const u8* hashes, u32 length) {
        u8* own = allocate<u8>(8 * std::size_t{length});
        std::memcpy(own, hashes, 8 * std::size_t{length});
        return own;
    }
    static void release(const Segment& segment) {
        std::free(segment.hashes);
        if (segment.capacity) std::free(segment.many);
    }

    Nodes<Segment> segments_;
    u32 num_blocks_ = 0;
    std::vector<u32> blocks_;  // per holder
    std::vector<u32> free_holders_;
    std::vector<u32> path_;  // kept for its memory
    std::vector<Reach> reaches_;
};

}  // namespace kvmesh
