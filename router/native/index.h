// The prefix index. PlainIndex in router/index.py says what it does, docs/decisions/0007-native-index.md how.
// Knows nothing of Python. Raises nothing but std::bad_alloc.
#pragma once

#include <array>
#include <cassert>
#include <string>
#include <unordered_map>
#include <vector>

#include "holders.h"
#include "match.h"
#include "nodes.h"

namespace kvmesh {

constexpr u32 MAX_ENTRIES = (1u << 28) - 8;  // a name keeps the number of its node in 28 bits
constexpr u32 EVICTED_SHARE = 8;
constexpr u64 TIER_MARK = 0x9E3779B97F4A7C15;

inline u64 digest_term(u64 prefix, u32 tier) {
    u64 value = prefix + (tier + 1) * TIER_MARK;
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9;
    value = (value ^ value >> 27) * 0x94D049BB133111EB;
    return value ^ value >> 31;
}

struct Stats {
    u64 stored = 0, duplicate = 0, renamed = 0, removed = 0, cleared = 0, evicted = 0;
    u64 unknown_removals = 0, orphan = 0, malformed = 0, refused = 0;
};

/// What a holder calls the prefixes it has, the oldest name first. A value is a node and the tiers of the name.
class Names {
   public:
    u32 live() const { return slots_.live(); }
    u32 end() const { return static_cast<u32>(keys_.size()); }
    bool is_live(u32 at) const { return values_[at] & TIERS_MASK; }
    u64 key(u32 at) const { return keys_[at]; }
    u32 node(u32 at) const { return values_[at] >> 4; }
    u32 tiers(u32 at) const { return values_[at] & TIERS_MASK; }
    void add_tier(u32 at, u32 tier) { values_[at] |= 1u << tier; }
    void drop_tier(u32 at, u32 tier) { values_[at] &= ~(1u << tier); }

    PREFETCHES void prefetch(u64 scattered) const { slots_.prefetch(scattered); }
    PREFETCHES void prefetch_entry(u64 scattered) const {
        const u32 at = slots_.guess(scattered);
        if (at >= end()) return;
        __builtin_prefetch(keys_.data() + at);
        __builtin_prefetch(values_.data() + at, 1);
    }
    /// The node of a name, to prefetch it; NONE where that takes a search.
    u32 likely_node(u64 key, u64 scattered) const {
        const u32 at = slots_.guess(scattered);
        return at < end() && keys_[at] == key && is_live(at) ? node(at) : NONE;
    }
    u32 find(u64 key, u64 scattered, Slots::Place& place) const {
        return slots_.find(scattered, [this, key](u32 at) { return keys_[at] == key; }, place);
    }
    u32 find(u64 key, u64 scattered) const {
        Slots::Place place;
        return find(key, scattered, place);
    }
    /// Add a name that is not there; at the place that `find` told, unless that is NONE.
    void add(u64 key, u64 scattered, Slots::Place place, u32 node, u32 tier) {
        if (end() == keys_.capacity() && make_room()) place = NONE;
        if (slots_.is_full_for(end())) {
            rebuild(1);
            place = NONE;
        }
        if (place == NONE) {
            slots_.insert(scattered, end());
        } else {
            slots_.put(place, scattered, end());
        }
        keys_.push(key);
        values_.push(node << 4 | 1u << tier);
    }
    /// A name that is in no tier any more.
    void erase(u32 at, u64 scattered) {
        slots_.erase(scattered, at);
        u32 last = end();
        while (last && !(values_[last - 1] & TIERS_MASK)) last--;
        keys_.truncate(last);
        values_.truncate(last);
    }
    void shrink() {
        if (keys_.capacity() > 64 && live() < keys_.capacity() / 4) {
            compact();
            keys_.set_capacity(live() + live() / 4);
            values_.set_capacity(live() + live() / 4);
            rebuild(0);
        }
    }

   private:
    static constexpr u32 TIERS_MASK = 15;

    /// Whether names were numbered anew.
    bool make_room() {
        if (end() > 64 && end() - live() >= end() / 8) {
            compact();
            rebuild(1);
            return true;
        }
        keys_.reserve(8);
        values_.set_capacity(keys_.capacity());
        return false;
    }
    void compact() {
        u32 to = 0;
        for (u32 at = 0; at < end(); at++) {
            if (!is_live(at)) continue;
            keys_[to] = keys_[at];
            values_[to++] = values_[at];
        }
        keys_.truncate(to);
        values_.truncate(to);
    }
    void rebuild(u32 more) {
        slots_.rebuild((u64{live()} + more) * 9 / 4, static_cast<u32>(keys_.capacity()) + 1, [this](auto add) {
            for (u32 at = 0; at < end(); at++) {
                if (is_live(at)) add(scatter(keys_[at]), at);
            }
        });
    }

    Array<u64> keys_;
    Array<u32> values_;
    Slots slots_;
};

/// A prefix that somebody has, or that precedes one (then it is hollow: `word` is 0).
struct PrefixNode {
    u64 name;   // its sequence hash
    u32 links;  // the node of the parent, or NO_PARENT; above that the number of children, at most MANY
    u32 word;   // who has it: holders.h

    static constexpr u32 PARENT_BITS = 28, NO_PARENT = (1u << PARENT_BITS) - 1, MANY = 15;  // MANY: Index::families_

    u64 hash() const { return name; }
    u32 parent() const {
        const u32 number = links & NO_PARENT;
        return number == NO_PARENT ? NONE : number;
    }
    u32 children() const { return links >> PARENT_BITS; }
    void set_children(u32 count) { links = (links & NO_PARENT) | count << PARENT_BITS; }
    /// Its only holder has the child too, in the same tier alone; both were added just now.
    void have_first_child(u32 tier) {
        links += 1u << PARENT_BITS;
        word += 1u << 2 * tier;
    }
    bool is_free() const { return word == NONE; }
    u32 next_free() const { return parent(); }
    void set_free(u32 next) {
        word = NONE;
        links = next & NO_PARENT;
    }
};
static_assert(sizeof(PrefixNode) == 16);

/// Counts per fastest tier.
using PerTier = std::array<u32, TIERS>;

struct HolderState {
    Names names;
    u64 serial = 0;  // orders holders by when they began to hold something
    bool begins = true;
    u32 prefixes = 0;
    u32 slow_prefixes = 0;   // not on the device
    PerTier gaps{};         // per tier: prefixes there or faster whose parent is not. 0: it has nothing but whole prefixes
    u64 digest = 0;
    u64 digest_blocks = 0;
};

class Index {
   public:
    Index(u32 max_entries, u32 max_per_holder)
        : max_entries_(max_entries), max_per_holder_(max_per_holder), nodes_(max_entries_ + 1) {}

    Stats stats;

    // --- holders, by number ---

    /// A number for a holder that has nothing yet; NONE if there are too many.
    u32 open() {
        u32 holder;
        if (!free_holders_.empty()) {
            holder = free_holders_.back();
            free_holders_.pop_back();
        } else if (holders_.size() < MAX_HOLDERS) {
            holder = static_cast<u32>(holders_.size());
            holders_.emplace_back();
            free_holders_.reserve(holders_.size());
        } else {
            return NONE;
        }
        holders_[holder] = HolderState();
        return holder;
    }
    bool is_empty(u32 holder) const { return !holders_[holder].names.live(); }
    /// Give back the number of a holder that is empty.
    void close(u32 holder) {
        holders_[holder] = HolderState();
        free_holders_.push_back(holder);
    }
    /// Holders that lost all they had to make room for another. Their numbers are still to be closed.
    std::vector<u32> take_emptied() { return std::exchange(emptied_, {}); }
    const HolderState& state(u32 holder) const { return holders_[holder]; }
    /// All that hold something, in the order in which they began to.
    std::vector<u32> in_order() const {
        std::vector<u32> found;
        for (u32 holder = 0; holder < holders_.size(); holder++) {
            if (!is_empty(holder)) found.push_back(holder);
        }
        std::sort(found.begin(), found.end(),
                  [this](u32 a, u32 b) { return holders_[a].serial < holders_[b].serial; });
        return found;
    }

    // --- what is fed ---

    /// `names`: packed u64 [count]; `tokens`: packed u32 [num_tokens].
    void store(u32 holder, const u8* names, std::size_t count, const u64* parent, const u8* tokens,
               std::size_t num_tokens, u64 block_size, u64 seed, u32 tier) {
        if (!num_tokens) return store_known(holder, names, count, tier);
        if (!block_size || num_tokens / block_size != count || !are_sound(names, count, parent)) {
            stats.malformed += count;
            return;
        }
        u32 above = NONE;
        if (parent && (above = node_of(holder, *parent)) == NONE) {
            stats.orphan += count;
            return;
        }
        if (seed != hash_.seed()) hash_ = Xxh3(seed);
        prefixes_.resize(count);
        u64 start = parent ? nodes_[above].hash() : 0;
        hash_chain(hash_, tokens, 4 * static_cast<std::size_t>(block_size), count, parent ? &start : nullptr,
                   prefixes_.data());
        if (!make_room(holder, names, count)) {
            stats.refused += count;
            return;
        }
        if (parent && (above = node_of(holder, *parent)) == NONE) {  // it was evicted to make room
            stats.orphan += count;
            return;
        }
        store_chain(holder, names, count, above, tier);
    }

    void remove(u32 holder, const u8* names, std::size_t count, u32 tier) {
        Names& held = holders_[holder].names;
        for (std::size_t i = 0; i < count; i++) {
            prefetch_removal(held, names, i, count);
            u64 key = read64(names + 8 * i), scattered = scatter(key);
            u32 at = held.find(key, scattered);
            if (at == NONE || !(held.tiers(at) >> tier & 1)) {
                stats.unknown_removals++;
                continue;
            }
            stats.removed++;
            drop_copy(holder, at, scattered, tier);
            tidy(holder);
        }
        held.shrink();
    }

    void clear(u32 holder) {
        stats.cleared += holders_[holder].prefixes;
        drop(holder);
    }

    void drop(u32 holder) {
        Names& names = holders_[holder].names;
        while (u32 end = names.end()) {  // the youngest first: it is seldom followed by others
            if (end > 8 && names.is_live(end - 8)) nodes_.prefetch_number(names.node(end - 8));
            drop_name(holder, end - 1);
        }
        tidy(holder);
    }

    // --- what is asked ---

    /// For all that have the first block anywhere. `hashes`: packed u64 [count].
    const std::vector<Reach>& match(const u8* hashes, std::size_t count) {
        reaches_.clear();
        Prompt prompt{*this, hashes};
        if (!count) return reaches_;
        u32 first = prompt.node(0);
        if (first == NONE) return reaches_;
        closed_.clear();
        gapped_.clear();
        Words words = lists_.view(nodes_[first].word);
        for (u32 i = 0; i < words.size(); i++) ask(words.holder(i), words.level(i));
        Matcher<Prompt> matcher(prompt, count, reaches_);
        if (!closed_.empty()) matcher.gallop(closed_);
        if (!gapped_.empty()) matcher.walk(gapped_);
        return reaches_;
    }

    u32 num_blocks() const { return nodes_.live() - hollow_; }
    u64 max_entries() const { return max_entries_; }
    u32 num_entries() const { return entries_; }
    template <class Visit>  // visit(name, prefix, tiers), the oldest name first
    void each_name(u32 holder, Visit visit) const {
        const Names& names = holders_[holder].names;
        for (u32 at = 0; at < names.end(); at++) {
            if (names.is_live(at)) visit(names.key(at), names.node(at), names.tiers(at));
        }
    }
    u64 prefix(u32 node) const { return nodes_[node].hash(); }

    // --- snapshots: see router/native/snapshot.h ---

    u32 num_nodes() const { return nodes_.live(); }
    u32 end_of_nodes() const { return nodes_.end(); }
    const PrefixNode& node(u32 number) const { return nodes_[number]; }
    bool restore_node(u64 hash, u32 parent) {  // false: it is there
        const u64 scattered = scatter(hash);
        Slots::Place place;
        if (nodes_.find(hash, scattered, place) != NONE) return false;
        add_node(hash, scattered, place, parent);
        return true;
    }
    bool has_name(u32 holder, u64 name) const { return holders_[holder].names.find(name, scatter(name)) != NONE; }
    void restore_name(u32 holder, u64 name, u32 node, u32 tiers) {
        u64 scattered = scatter(name);
        for (u32 tier = 0; tier < TIERS; tier++) {
            if (!(tiers >> tier & 1)) continue;
            Slots::Place place;
            const u32 at = holders_[holder].names.find(name, scattered, place);
            add_copy(holder, at, name, scattered, place, node, tier);
        }
    }
    bool fits() const {
        for (const HolderState& state : holders_) {
            if (state.names.live() > max_per_holder_) return false;
        }
        return static_cast<u64>(entries_) + hollow_ <= max_entries_;
    }

   private:
    struct Prompt {
        const Index& index;
        const u8* hashes;

        u64 hash(std::size_t i) const { return read64(hashes + 8 * i); }
        u32 node(std::size_t i) const { return index.nodes_.find(hash(i), scatter(hash(i))); }
        PREFETCHES void prefetch(std::size_t i) const { index.nodes_.prefetch(scatter(hash(i))); }
        PREFETCHES void prefetch_node(std::size_t i) const { index.nodes_.prefetch_node(scatter(hash(i))); }
        Words at(std::size_t i) const {
            u32 found = node(i);
            return found == NONE ? Words{nullptr, 0} : index.lists_.view(index.nodes_[found].word);
        }
    };

    void ask(u32 holder, u8 level) {
        const HolderState& state = holders_[holder];
        const u32 reach = static_cast<u32>(reaches_.size());
        reaches_.push_back({holder, {0, 0, 0, 0}});
        if (!state.slow_prefixes) {
            (state.gaps[TIERS - 1] ? gapped_ : closed_).push_back({holder, reach, TIERS - 1, true});
            return;
        }
        for (u8 tier = level; tier < TIERS; tier++) {
            (state.gaps[tier] ? gapped_ : closed_).push_back({holder, reach, tier, false});
        }
    }

    // --- storing ---

    /// No name comes twice, and none is the parent's. Keeps their places in `scattered_`.
    bool are_sound(const u8* names, std::size_t count, const u64* parent) {
        u32 bits = 7;
        while (count * 32 > 1ull << bits) bits++;
        seen_.assign(std::size_t{1} << (bits - 6), 0);
        scattered_.resize(count);
        bool is_doubtful = false;
        for (std::size_t i = 0; i < count; i++) {
            const u64 name = read64(names + 8 * i), place = scatter(name);
            u64& seen = seen_[place >> (70 - bits)];
            if (parent && name == *parent) return false;
            if (seen >> (place & 63) & 1) {
                if (count > 1024) {
                    is_doubtful = true;
                } else {
                    for (std::size_t k = 0; k < i; k++) is_doubtful |= read64(names + 8 * k) == name;
                    if (is_doubtful) return false;
                }
            }
            seen |= 1ull << (place & 63);
            scattered_[i].name = place;
        }
        return !is_doubtful || are_different(names, count);
    }

    bool are_different(const u8* names, std::size_t count) {
        sorted_.resize(count);
        std::memcpy(sorted_.data(), names, 8 * count);
        std::sort(sorted_.begin(), sorted_.end());
        return std::adjacent_find(sorted_.begin(), sorted_.end()) == sorted_.end();
    }

    u32 node_of(u32 holder, u64 name) const {
        const Names& names = holders_[holder].names;
        u32 at = names.find(name, scatter(name));
        return at == NONE ? NONE : names.node(at);
    }

    void store_known(u32 holder, const u8* names, std::size_t count, u32 tier) {
        const Names& held = holders_[holder].names;
        for (std::size_t i = 0; i < count; i++) {
            u64 name = read64(names + 8 * i), scattered = scatter(name);
            u32 at = held.find(name, scattered);
            if (at == NONE) {
                stats.orphan++;
            } else if (held.tiers(at) >> tier & 1) {
                stats.duplicate++;
            } else {
                stats.stored++;
                add_copy(holder, at, name, scattered, NONE, held.node(at), tier);
            }
        }
    }

    struct Scattered {
        u64 name, prefix;
    };

    void store_chain(u32 holder, const u8* names, std::size_t count, u32 above, u32 tier) {
        constexpr std::size_t FAR = 16, NEAR = 8;  // blocks ahead: their slots, then what the slots point to
        HolderState& state = holders_[holder];
        for (std::size_t i = 0; i < count; i++) scattered_[i].prefix = scatter(prefixes_[i]);
        auto look_at = [&](std::size_t i) __attribute__((always_inline)) {
            state.names.prefetch(scattered_[i].name);
            nodes_.prefetch(scattered_[i].prefix);
        };
        for (std::size_t i = 0; i < std::min(FAR, count); i++) look_at(i);
        u32 fresh = 0;         // blocks that nobody had
        bool is_fresh = false;  // the one before this was one of them
        u64 terms = 0;
        for (std::size_t i = 0; i < count; i++) {
            if (i + FAR < count) look_at(i + FAR);
            if (!is_fresh && i + NEAR < count) nodes_.prefetch_node(scattered_[i + NEAR].prefix);
            const u64 name = read64(names + 8 * i), prefix = prefixes_[i];
            const Scattered scattered = scattered_[i];
            Slots::Place place, node_place;
            const u32 at = state.names.find(name, scattered.name, place);
            u32 node = NONE;
            if (at != NONE || (node = nodes_.find(prefix, scattered.prefix, node_place)) != NONE) {
                above = store_block(holder, at, name, place, node, prefix, scattered, above, tier);
                is_fresh = false;
                continue;
            }
            node = nodes_.add({prefix, above & PrefixNode::NO_PARENT, word::make(holder, 1u << tier)},
                              scattered.prefix, node_place);
            add_name(state, name, scattered.name, place, node, tier);
            if (is_fresh) {
                nodes_[above].have_first_child(tier);
            } else if (above != NONE) {
                add_child(above);
                link(state, holder, above, TIERS, tier);
            }
            terms += digest_term(prefix, tier);
            above = node;
            is_fresh = true;
            fresh++;
        }
        stats.stored += fresh;
        state.prefixes += fresh;
        state.slow_prefixes += tier > 0 ? fresh : 0;
        state.digest += terms;
        state.digest_blocks += fresh;
    }

    /// A block whose name (number `at`) or prefix (`node`) is known; the node it has then.
    u32 store_block(u32 holder, u32 at, u64 name, Slots::Place place, u32 node, u64 prefix, Scattered scattered,
                    u32 above, u32 tier) {
        const Names& held = holders_[holder].names;
        if (at != NONE && nodes_[held.node(at)].hash() == prefix) {
            node = held.node(at);
            if (held.tiers(at) >> tier & 1) {
                stats.duplicate++;
            } else {
                stats.stored++;
                add_copy(holder, at, name, scattered.name, NONE, node, tier);
            }
            return node;
        }
        stats.stored++;
        if (at != NONE) {
            stats.renamed++;
            drop_name(holder, at);
            place = NONE;  // the table has changed
            Slots::Place node_place;
            node = nodes_.find(prefix, scattered.prefix, node_place);
            if (node == NONE) node = add_node(prefix, scattered.prefix, node_place, above);
        }
        add_copy(holder, NONE, name, scattered.name, place, node, tier);
        return node;
    }

    // --- room ---

    bool make_room(u32 holder, const u8* names, std::size_t count) {
        for (;;) {
            const u64 own = holders_[holder].names.live(), all = static_cast<u64>(entries_) + hollow_;
            if (own + count <= max_per_holder_ && all + count <= max_entries_) return true;
            const u64 fresh = count_new(holder, names, count);
            if (fresh > std::min(max_entries_, max_per_holder_)) return false;
            if (own + fresh > max_per_holder_) {
                evict(holder);
            } else if (all + fresh > max_entries_) {
                evict(largest());
            } else {
                return true;
            }
        }
    }

    u64 count_new(u32 holder, const u8* names, std::size_t count) const {
        u64 fresh = 0;
        for (std::size_t i = 0; i < count; i++) {
            u32 node = node_of(holder, read64(names + 8 * i));
            fresh += node == NONE || nodes_[node].hash() != prefixes_[i];
        }
        return fresh;
    }

    u32 largest() const {
        u32 found = 0;
        for (u32 holder = 1; holder < holders_.size(); holder++) {
            const HolderState &state = holders_[holder], &most = holders_[found];
            if (state.names.live() > most.names.live() ||
                (state.names.live() == most.names.live() && state.serial < most.serial)) {
                found = holder;
            }
        }
        return found;
    }

    /// An eighth goes: the branch that has not grown for longest first, each from its end to where a younger one
    /// leaves it. So never a prefix before those that follow it.
    void evict(u32 holder) {
        Names& names = holders_[holder].names;
        std::vector<bool> seen(nodes_.end()), evicted(nodes_.end());
        Array<u32> order, branches;
        for (u32 at = names.end(); at-- > 0;) {
            if (!names.is_live(at)) continue;
            branches.push(static_cast<u32>(order.size()));
            for (u32 node = names.node(at); node != NONE && !seen[node]; node = nodes_[node].parent()) {
                seen[node] = true;
                order.push(node);
            }
        }
        u32 left = std::max(1u, holders_[holder].prefixes / EVICTED_SHARE);
        std::size_t end = order.size();
        for (std::size_t branch = branches.size(); branch-- > 0 && left; end = branches[branch]) {
            for (std::size_t i = branches[branch]; i < end && left; i++) {
                if (!lists_.find(nodes_[order[i]].word, holder)) continue;
                evicted[order[i]] = true;
                stats.evicted++;
                left--;
            }
        }
        for (u32 at = names.end(); at-- > 0;) {
            if (at < names.end() && names.is_live(at) && evicted[names.node(at)]) drop_name(holder, at);
        }
        tidy(holder);
        names.shrink();
        if (is_empty(holder)) emptied_.push_back(holder);
    }

    /// What is removed was stored long ago: each name is four lines of memory that no cache has. Fetch them in steps.
    PREFETCHES void prefetch_removal(const Names& held, const u8* names, std::size_t i, std::size_t count) const {
        const auto key = [names](std::size_t at) { return read64(names + 8 * at); };
        if (i + 32 < count) held.prefetch(scatter(key(i + 32)));
        if (i + 24 < count) held.prefetch_entry(scatter(key(i + 24)));
        if (i + 16 < count) {
            const u32 node = held.likely_node(key(i + 16), scatter(key(i + 16)));
            if (node != NONE) nodes_.prefetch_number(node);
        }
        if (i + 8 < count) {
            const u32 node = held.likely_node(key(i + 8), scatter(key(i + 8)));
            if (node != NONE) nodes_.prefetch(scatter(nodes_[node].hash()));
        }
    }

    // --- the one place where nodes, words and digests change ---

    u32 add_node(u64 hash, u64 scattered, Slots::Place place, u32 parent) {
        const u32 number = nodes_.add({hash, parent & PrefixNode::NO_PARENT, 0}, scattered, place);
        hollow_++;
        if (parent != NONE) add_child(parent);
        return number;
    }

    void add_name(HolderState& state, u64 name, u64 scattered, Slots::Place place, u32 node, u32 tier) {
        if (state.begins) {
            state.begins = false;
            state.serial = ++serials_;
        }
        state.names.add(name, scattered, place, node, tier);
        entries_++;
    }

    /// `at`: the name's number, NONE for a new name, which goes to `place`.
    void add_copy(u32 holder, u32 at, u64 name, u64 scattered, Slots::Place place, u32 node, u32 tier) {
        HolderState& state = holders_[holder];
        const bool is_new = at == NONE;
        if (is_new) {
            add_name(state, name, scattered, place, node, tier);
        } else {
            state.names.add_tier(at, tier);
        }
        PrefixNode& prefix = nodes_[node];
        u32* word = lists_.find(prefix.word, holder);
        if (!word) {
            hollow_ -= !prefix.word;
            word = lists_.insert(prefix.word, word::make(holder, 1u << tier));
            state.prefixes++;
            add_term(state, prefix.hash(), tier);
            on_level(state, holder, node, *word, TIERS, tier);
            return;
        }
        const u32 before = word::tiers(*word);
        if (is_new || *word & word::SEVERAL_NAMES) count_name(holder, node, *word, is_new, tier);
        if (before >> tier & 1) return;
        *word |= 1u << (tier + word::TIER_SHIFT);
        add_term(state, prefix.hash(), tier);
        on_level(state, holder, node, *word, word::fastest(before), word::fastest(before | 1u << tier));
    }

    void drop_name(u32 holder, u32 at) {
        const Names& names = holders_[holder].names;
        const u64 scattered = scatter(names.key(at));
        const u32 tiers = names.tiers(at);
        for (u32 tier = 0; tier < TIERS; tier++) {
            if (tiers >> tier & 1) drop_copy(holder, at, scattered, tier);
        }
    }

    void drop_copy(u32 holder, u32 at, u64 scattered, u32 tier) {
        HolderState& state = holders_[holder];
        const u32 node = state.names.node(at);
        state.names.drop_tier(at, tier);
        const bool is_gone = !state.names.tiers(at);
        if (is_gone) {
            state.names.erase(at, scattered);
            entries_--;
        }
        PrefixNode& prefix = nodes_[node];
        u32* word = lists_.find(prefix.word, holder);
        const u32 before = word::tiers(*word);
        if (*word & word::SEVERAL_NAMES && uncount_name(holder, node, *word, is_gone, tier)) return;
        drop_term(state, prefix.hash(), tier);
        if (const u32 after = before & ~(1u << tier)) {
            *word &= ~(1u << (tier + word::TIER_SHIFT));
            on_level(state, holder, node, *word, word::fastest(before), word::fastest(after));
            return;
        }
        on_level(state, holder, node, *word, word::fastest(before), TIERS);
        lists_.erase(prefix.word, word);
        state.prefixes--;
        if (!prefix.word) {
            hollow_++;
            drop_hollow(node);
        }
    }

    void drop_hollow(u32 node) {
        while (node != NONE && !nodes_[node].word && !nodes_[node].children()) {
            const u32 parent = nodes_[node].parent();
            nodes_.remove(node);
            hollow_--;
            if (parent != NONE) drop_child(parent);
            node = parent;
        }
    }

    void add_child(u32 parent) {
        PrefixNode& node = nodes_[parent];
        const u32 children = node.children();
        if (children < PrefixNode::MANY) {
            node.set_children(children + 1);
            if (children + 1 < PrefixNode::MANY) return;
        }
        families_[parent]++;
    }
    void drop_child(u32 parent) {
        PrefixNode& node = nodes_[parent];
        if (node.children() == PrefixNode::MANY) {
            auto found = families_.find(parent);
            if (--found->second) return;
            families_.erase(found);
        }
        node.set_children(node.children() - 1);
    }

    static void add_term(HolderState& state, u64 prefix, u32 tier) {
        state.digest += digest_term(prefix, tier);
        state.digest_blocks++;
    }
    static void drop_term(HolderState& state, u64 prefix, u32 tier) {
        state.digest -= digest_term(prefix, tier);
        state.digest_blocks--;
    }

    /// A holder of nothing counts as new when it comes back.
    void tidy(u32 holder) {
        if (is_empty(holder)) holders_[holder].begins = true;
    }

    static u64 key(u32 node, u32 holder) { return static_cast<u64>(node) << word::HOLDER_BITS | holder; }

    // --- several names of one holder for one prefix ---

    struct Copies {
        u32 names;
        PerTier in_tier;  // how many of them are there
    };

    void count_name(u32 holder, u32 node, u32& word, bool is_new, u32 tier) {
        Copies& copies = copies_[key(node, holder)];
        if (!(word & word::SEVERAL_NAMES)) {
            word |= word::SEVERAL_NAMES;
            copies.names = 1;
            for (u32 t = 0; t < TIERS; t++) copies.in_tier[t] = word::tiers(word) >> t & 1;
        }
        copies.names += is_new;
        copies.in_tier[tier]++;
    }

    /// Whether another name is in this tier too.
    bool uncount_name(u32 holder, u32 node, u32& word, bool is_gone, u32 tier) {
        auto found = copies_.find(key(node, holder));
        Copies& copies = found->second;
        copies.names -= is_gone;
        const bool is_there = --copies.in_tier[tier];
        if (copies.names <= 1) {
            word &= ~word::SEVERAL_NAMES;
            copies_.erase(found);
        }
        return is_there;
    }

    // --- gaps: prefixes that a holder has in a tier (or faster) while it has not their parent there (or faster) ---

    /// The fastest tier of a prefix changes for a holder (TIERS: it has it not). `word` is there, before or after.
    void on_level(HolderState& state, u32 holder, u32 node, u32& word, u32 from, u32 to) {
        if (from == to) return;
        state.slow_prefixes += static_cast<u32>(to > 0 && to < TIERS) - static_cast<u32>(from > 0 && from < TIERS);
        move_children(state, holder, node, word, from, to);
        const u32 parent = nodes_[node].parent();
        if (parent != NONE) link(state, holder, parent, from, to);
    }

    /// The same for the parent of that prefix.
    void link(HolderState& state, u32 holder, u32 parent, u32 from, u32 to) {
        u32* above = lists_.find(nodes_[parent].word, holder);
        const u32 level = above ? word::fastest(word::tiers(*above)) : TIERS;
        for (u32 tier = 0; tier < level; tier++) {
            state.gaps[tier] += static_cast<u32>(to <= tier) - static_cast<u32>(from <= tier);
        }
        if (from < TIERS) count_child(holder, parent, above, from, -1);
        if (to < TIERS) count_child(holder, parent, above, to, 1);
    }

    void move_children(HolderState& state, u32 holder, u32 node, u32& word, u32 from, u32 to) {
        const bool was_kept_aside = from == TIERS && state.gaps[TIERS - 1];  // where there was no word to keep it in
        if (!(word & word::CHILDREN) && !was_kept_aside) return;
        PerTier children{};
        auto found = children_.end();
        if (was_kept_aside || (word & word::CHILDREN) == word::CHILDREN) found = children_.find(key(node, holder));
        if (found != children_.end()) {
            children = found->second;
        } else {
            for (u32 tier = 0; tier < TIERS; tier++) children[tier] = word >> 2 * tier & 3;
        }
        u32 reached = 0;
        for (u32 tier = 0; tier < TIERS; tier++) {
            reached += children[tier];
            if (to > tier && from <= tier) state.gaps[tier] += reached;
            if (to <= tier && from > tier) state.gaps[tier] -= reached;
        }
        if (!reached) return;
        if (to == TIERS) {
            children_[key(node, holder)] = children;  // no word to keep them in
        } else if (from == TIERS) {
            word |= word::CHILDREN;
            settle(found, &word);
        }
    }

    void count_child(u32 holder, u32 parent, u32* above, u32 tier, int change) {
        if (above && (*above & word::CHILDREN) != word::CHILDREN) {
            const u32 now = (*above >> 2 * tier & 3) + static_cast<u32>(change);
            if (now <= 2) {
                *above = (*above & ~(3u << 2 * tier)) | now << 2 * tier;
                return;
            }
            PerTier& children = children_[key(parent, holder)];
            for (u32 t = 0; t < TIERS; t++) children[t] = *above >> 2 * t & 3;
            *above |= word::CHILDREN;
        }
        auto found = children_.try_emplace(key(parent, holder)).first;
        found->second[tier] += static_cast<u32>(change);
        settle(found, above);
    }

    /// Counts that fit into the word, if there is one, are kept there; zeros nowhere.
    void settle(std::unordered_map<u64, PerTier>::iterator found, u32* word) {
        u32 packed = 0, most = 0;
        for (u32 tier = 0; tier < TIERS; tier++) {
            most = std::max(most, found->second[tier]);
            packed |= (found->second[tier] & 3) << 2 * tier;
        }
        if (word ? most > 2 : most > 0) return;
        if (word) *word = (*word & ~word::CHILDREN) | packed;
        children_.erase(found);
    }

    const u64 max_entries_, max_per_holder_;
    Nodes<PrefixNode> nodes_;
    WordLists lists_;
    std::vector<HolderState> holders_;
    std::vector<u32> free_holders_, emptied_;
    std::unordered_map<u32, u32> families_;  // of nodes with MANY children: how many beyond the last that was counted
    std::unordered_map<u64, PerTier> children_;
    std::unordered_map<u64, Copies> copies_;
    u32 entries_ = 0;
    u32 hollow_ = 0;
    u64 serials_ = 0;

    // reused from call to call
    Xxh3 hash_{CHAIN_SEED};
    std::vector<u64> prefixes_;
    std::vector<Scattered> scattered_;
    std::vector<u64> seen_, sorted_;
    std::vector<Reach> reaches_;
    std::vector<Asked> closed_, gapped_;
};

}  // namespace kvmesh
