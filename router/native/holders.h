// Who has a prefix: one 4-byte word per (prefix, holder).
#pragma once

#include <algorithm>

#include "memory.h"

namespace kvmesh {

/// What one holder has of one prefix, in 32 bits: its number, the tiers, and how many prefixes that it has too come
/// directly after this one, by the fastest tier of each.
namespace word {

constexpr u32 LIST = 1u << 31;          // not a word: the rest is the number of a list of them
constexpr u32 HOLDER_BITS = 18, HOLDER_SHIFT = 13;
constexpr u32 SEVERAL_NAMES = 1u << 12;  // Index::copies_ counts them
constexpr u32 TIER_SHIFT = 8;            // 4 bits, at least one of them set
constexpr u32 CHILDREN = 0xFF;           // 2 bits a tier, each at most 2; all ones: Index::children_ has them

inline u32 make(u32 holder, u32 tiers) { return holder << HOLDER_SHIFT | tiers << TIER_SHIFT; }
inline u32 holder(u32 word) { return word >> HOLDER_SHIFT; }
inline u32 tiers(u32 word) { return word >> TIER_SHIFT & 15; }
inline u32 fastest(u32 tiers) { return static_cast<u32>(__builtin_ctz(tiers)); }

}  // namespace word

constexpr u32 MAX_HOLDERS = (1u << word::HOLDER_BITS) - 1;

/// Words of one prefix, sorted by holder.
struct Words {
    const u32* words;
    u32 count;

    u32 size() const { return count; }
    u32 holder(u32 i) const { return word::holder(words[i]); }
    u8 level(u32 i) const { return static_cast<u8>(word::fastest(word::tiers(words[i]))); }
    /// The first at `from` or later that is not before `wanted`.
    u32 search(u32 from, u32 wanted) const {
        if (count - from <= 8) {
            while (from < count && holder(from) < wanted) from++;
            return from;
        }
        const u32* found = std::lower_bound(words + from, words + count, wanted << word::HOLDER_SHIFT);
        return static_cast<u32>(found - words);
    }
};

/// Lists of two words or more. A node has a word of its own, or the number of a list; 0 is neither.
class WordLists {
   public:
    WordLists() { memory_.push(0); }  // so that no list is number 0

    Words view(const u32& node_word) const {
        if (!(node_word & word::LIST)) return {&node_word, node_word != 0};
        const u32* head = memory_.data() + (node_word & ~word::LIST);
        return {head + 1, count(*head)};
    }

    u32* find(u32& node_word, u32 holder) {
        if (!(node_word & word::LIST)) return node_word && word::holder(node_word) == holder ? &node_word : nullptr;
        Words words = view(node_word);
        u32 at = words.search(0, holder);
        if (at == words.count || words.holder(at) != holder) return nullptr;
        return const_cast<u32*>(words.words) + at;
    }

    /// Add the word of a holder that has none here; where it is now.
    u32* insert(u32& node_word, u32 word) {
        if (!node_word) {
            node_word = word;
            return &node_word;
        }
        if (!(node_word & word::LIST)) {
            u32 list = allocate(0), other = node_word;
            memory_[list] = head(2, 0);
            memory_[list + 1] = std::min(word, other);
            memory_[list + 2] = std::max(word, other);
            node_word = list | word::LIST;
            return &memory_[list + (word < other ? 1 : 2)];
        }
        u32 list = node_word & ~word::LIST, size = count(memory_[list]), kind = kind_of(memory_[list]);
        if (size == capacity(kind)) {
            node_word = (list = move(list, kind + 1)) | word::LIST;
            kind++;
        }
        u32* words = memory_.data() + list + 1;
        u32* at = std::lower_bound(words, words + size, word);
        std::memmove(at + 1, at, static_cast<std::size_t>(words + size - at) * sizeof *at);
        *at = word;
        memory_[list] = head(size + 1, kind);
        return at;
    }

    /// Remove a word that `find` has found.
    void erase(u32& node_word, u32* word) {
        if (!(node_word & word::LIST)) {
            node_word = 0;
            return;
        }
        u32 list = node_word & ~word::LIST, size = count(memory_[list]) - 1, kind = kind_of(memory_[list]);
        u32* words = memory_.data() + list + 1;
        std::memmove(word, word + 1, static_cast<std::size_t>(words + size - word) * sizeof *word);
        memory_[list] = head(size, kind);
        if (size == 1) {
            node_word = words[0];
            release(list, kind);
        } else if (kind >= 2 && size <= capacity(kind - 2)) {
            node_word = move(list, kind - 2) | word::LIST;
        }
    }

   private:
    static constexpr u32 KINDS = 40;

    static u32 head(u32 count, u32 kind) { return count << 8 | kind; }
    static u32 count(u32 head) { return head >> 8; }
    static u32 kind_of(u32 head) { return head & 0xFF; }
    /// 2, 3, 4, 6, 8, 12, 16, 24, ...
    static u32 capacity(u32 kind) { return (kind & 1 ? 3u : 2u) << (kind >> 1); }

    u32 allocate(u32 kind) {
        if (u32 list = free_[kind]) {
            free_[kind] = memory_[list];
            return list;
        }
        std::size_t list = memory_.size();
        if (list >= word::LIST) throw std::bad_alloc();
        memory_.resize(list + 1 + capacity(kind));
        return static_cast<u32>(list);
    }
    void release(u32 list, u32 kind) {
        memory_[list] = free_[kind];
        free_[kind] = list;
    }
    u32 move(u32 list, u32 kind) {
        u32 size = count(memory_[list]), fresh = allocate(kind);
        std::memcpy(&memory_[fresh + 1], &memory_[list + 1], size * sizeof(u32));
        release(list, kind_of(memory_[list]));
        memory_[fresh] = head(size, kind);
        return fresh;
    }

    Array<u32> memory_;
    u32 free_[KINDS] = {};
};

}  // namespace kvmesh
