// Reads a batch of KV events as it came over the wire, the usual forms of it, in one pass. What the format means is
// specified by kvevents/formats.py; whatever is unusual here, or wrong, is left to that. Trusts nothing it reads.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "index.h"

namespace kvmesh {

/// The words of kvevents/formats.py and router/index.py.
struct Dialect {
    std::vector<std::pair<std::string, u8>> tiers;  // by the engines' word for a medium, in capitals
    std::vector<std::string> full_attention;        // kinds of layers whose blocks count
    u64 group_factor = 0;
    std::size_t max_bytes = 0;
    u32 max_events = 0;

    u8 tier_of(std::string_view medium) const {
        for (const auto& [word, tier] : tiers) {
            if (word.size() == medium.size() && std::equal(word.begin(), word.end(), medium.begin(), same_letter)) {
                return tier;
            }
        }
        return TIERS - 1;
    }
    bool counts(std::string_view kind) const {
        return std::find(full_attention.begin(), full_attention.end(), kind) != full_attention.end();
    }

   private:
    static bool same_letter(char capital, char letter) {
        return capital == (letter >= 'a' && letter <= 'z' ? letter - 'a' + 'A' : letter);
    }
};

struct WireEvent {
    enum Kind : u8 { STORED, REMOVED, CLEARED } kind;
    u8 tier = 0;
    bool has_parent = false;
    u64 parent = 0, block_size = 0, seed = CHAIN_SEED;
    std::size_t names = 0, count = 0;         // where in Payload::names, and how many
    std::size_t tokens = 0, num_tokens = 0;  // the same of Payload::tokens
};

class Payload {
   public:
    std::vector<WireEvent> events;
    Array<u64> names;
    Array<u32> tokens;

    /// False: this is not for us. Nothing is larger than the payload, whatever it says of itself.
    bool read(const Dialect& dialect, const u8* data, std::size_t bytes) {
        dialect_ = &dialect;
        at_ = data;
        end_ = data + bytes;
        events.clear();
        names.truncate(0);
        tokens.truncate(0);
        return bytes <= dialect.max_bytes && read_batch() && at_ == end_;
    }

    /// Much memory is not kept for the next time.
    void tidy() {
        if (names.capacity() > KEPT) names.set_capacity(0);
        if (tokens.capacity() > KEPT) tokens.set_capacity(0);
        if (events.capacity() > KEPT) std::vector<WireEvent>().swap(events);
    }

   private:
    static constexpr std::size_t KEPT = 1 << 16;
    static constexpr int DEEPEST = 24;
    using Text = std::string_view;

    /// The fields of one event. A text that is nil has no data.
    struct Fields {
        bool has_names = false, has_tokens = false, has_parent = false, has_lora_id = false;
        u64 parent = 0, block_size = 0, lora_id = 0, group = 0;
        bool is_lora_id_negative = false;
        std::size_t names = 0, count = 0, tokens = 0, num_tokens = 0;
        Text medium, lora, salt, kind;
        const u8* keys = nullptr;  // where extra_keys are
    };

    // --- msgpack ---

    std::size_t left() const { return static_cast<std::size_t>(end_ - at_); }

    bool take_byte(u8& byte) {
        if (at_ == end_) return false;
        byte = *at_++;
        return true;
    }
    /// A big-endian integer of `size` bytes.
    bool take_number(int size, u64& value) {
        if (left() < static_cast<std::size_t>(size)) return false;
        value = 0;
        for (int i = 0; i < size; i++) value = value << 8 | *at_++;
        return true;
    }
    /// The number of things that follow, each of at least one byte.
    bool take_count(int size, u64& count) { return take_number(size, count) && count <= left(); }

    bool take_nil() {
        if (at_ == end_ || *at_ != 0xC0) return false;
        at_++;
        return true;
    }
    bool read_array(u64& count) { return read_container(0x90, 0xDC, count); }
    bool read_map(u64& count) { return read_container(0x80, 0xDE, count); }
    bool read_container(u8 small, u8 large, u64& count) {
        u8 head;
        if (!take_byte(head)) return false;
        if ((head & 0xF0) == small) {
            count = head & 15;
            return count <= left();
        }
        if (head == large) return take_count(2, count);
        return head == large + 1 && take_count(4, count);
    }
    /// Any integer, as u64.
    bool read_integer(u64& value, bool& is_negative) {
        u8 head;
        is_negative = false;
        if (!take_byte(head)) return false;
        if (head < 0x80) {
            value = head;
            return true;
        }
        if (head >= 0xE0) {
            value = static_cast<u64>(static_cast<std::int8_t>(head));
            return is_negative = true;
        }
        if (head >= 0xCC && head <= 0xCF) return take_number(1 << (head - 0xCC), value);
        if (head < 0xD0 || head > 0xD3) return false;
        const int size = 1 << (head - 0xD0);
        if (!take_number(size, value)) return false;
        if (value >> (8 * size - 1)) {
            is_negative = true;
            if (size < 8) value |= ~0ull << 8 * size;
        }
        return true;
    }
    bool read_unsigned(u64 most, u64& value) {
        bool is_negative;
        return read_integer(value, is_negative) && !is_negative && value <= most;
    }
    bool is_text() const { return at_ != end_ && ((*at_ & 0xE0) == 0xA0 || (*at_ >= 0xD9 && *at_ <= 0xDB)); }
    /// ASCII alone: whether the rest is sound UTF-8 is not decided here.
    bool read_text(Text& text) {
        u8 head;
        u64 size;
        if (!take_byte(head)) return false;
        if ((head & 0xE0) == 0xA0) {
            size = head & 31;
            if (size > left()) return false;
        } else if (head < 0xD9 || head > 0xDB || !take_count(1 << (head - 0xD9), size)) {
            return false;
        }
        text = Text(reinterpret_cast<const char*>(at_), size);
        at_ += size;
        return std::all_of(text.begin(), text.end(), [](char letter) { return static_cast<u8>(letter) < 0x80; });
    }
    bool read_optional_text(Text& text) { return take_nil() || read_text(text); }

    bool skip(int depth) {
        if (at_ == end_ || depth > DEEPEST) return false;
        const u8 head = *at_;
        u64 value, count;
        bool is_negative;
        Text text;
        if (head < 0x80 || head >= 0xE0 || (head >= 0xCC && head <= 0xD3)) return read_integer(value, is_negative);
        if ((head & 0xE0) == 0xA0 || (head >= 0xD9 && head <= 0xDB)) return read_text(text);
        if ((head & 0xF0) == 0x90 || head == 0xDC || head == 0xDD) return read_array(count) && skip_all(count, depth);
        if ((head & 0xF0) == 0x80 || head == 0xDE || head == 0xDF) return read_map(count) && skip_all(2 * count, depth);
        at_++;
        if (head == 0xC0 || head == 0xC2 || head == 0xC3) return true;
        if (head == 0xCA || head == 0xCB) return take_number(head == 0xCA ? 4 : 8, value);
        if (head < 0xC4 || head > 0xC6 || !take_count(1 << (head - 0xC4), count)) return false;
        at_ += count;
        return true;
    }
    bool skip_all(u64 count, int depth) {
        for (; count; count--) {
            if (!skip(depth + 1)) return false;
        }
        return true;
    }

    // --- a batch: [ts, [event, ...], dp_rank | nil, ...] ---

    bool read_batch() {
        u64 parts, count, rank;
        if (!read_array(parts) || parts < 2 || !skip_time() || !read_array(count) || count > dialect_->max_events) {
            return false;
        }
        for (; count; count--) {
            if (!read_event()) return false;
        }
        if (parts > 2 && !take_nil() && !read_unsigned(0xFFFF, rank)) return false;
        return parts <= 3 || skip_all(parts - 3, 0);
    }
    bool skip_time() {
        if (at_ == end_ || !(*at_ < 0x80 || (*at_ >= 0xCA && *at_ <= 0xD3) || *at_ >= 0xE0)) return false;
        return skip(0);
    }

    bool read_event() {
        u64 count;
        Text tag;
        if (at_ == end_) return false;
        const bool is_map = (*at_ & 0xF0) == 0x80 || *at_ == 0xDE || *at_ == 0xDF;
        if (!(is_map ? read_map(count) : read_array(count)) || !count) return false;
        if (is_map && !(read_text(tag) && tag == "type")) return false;  // most encoders put it first
        if (!read_text(tag)) return false;
        Fields fields;
        if (tag == "BlockStored") {
            return (is_map ? read_map(count, fields, true) : read_stored(count, fields)) && stored(fields);
        }
        if (tag == "BlockRemoved") {
            return (is_map ? read_map(count, fields, false) : read_removed(count, fields)) && removed(fields);
        }
        if (tag == "AllBlocksCleared") events.push_back({WireEvent::CLEARED});
        return is_map ? skip_fields(count) : skip_all(count - 1, 0);  // other kinds mean nothing to us
    }

    bool skip_fields(u64 count) {
        for (Text key; count > 1; count--) {
            if (!read_text(key) || key == "type" || !skip(0)) return false;
        }
        return true;
    }

    bool read_map(u64 count, Fields& fields, bool is_stored) {
        u32 seen = 0;
        for (; count > 1; count--) {
            Text key;
            if (!read_text(key) || !read_field(key, fields, is_stored, seen)) return false;
        }
        return true;
    }

    bool read_field(Text key, Fields& fields, bool is_stored, u32& seen) {
        auto once = [&seen](u32 number) {
            const bool is_again = seen >> number & 1;
            seen |= 1u << number;
            return !is_again;
        };
        if (key == "block_hashes") return once(0) && read_names(fields);
        if (key == "medium") return once(1) && read_optional_text(fields.medium);
        if (key == "group_idx") return once(2) && read_group(fields);
        if (key == "type") return false;
        if (!is_stored) return skip(0);
        if (key == "token_ids") return once(3) && read_tokens(fields);
        if (key == "parent_block_hash") return once(4) && read_parent(fields);
        if (key == "block_size") return once(5) && read_unsigned(1 << 20, fields.block_size);
        if (key == "lora_id") return once(6) && read_lora_id(fields);
        if (key == "lora_name") return once(7) && read_optional_text(fields.lora);
        if (key == "cache_salt") return once(8) && read_optional_text(fields.salt);
        if (key == "kv_cache_spec_kind") return once(9) && read_optional_text(fields.kind);
        if (key == "extra_keys") {
            fields.keys = at_;
            return once(10) && skip(0);
        }
        return skip(0);
    }

    bool read_stored(u64 count, Fields& fields) {
        return count >= 5 && read_names(fields) && read_parent(fields) && read_tokens(fields) &&
               read_unsigned(1 << 20, fields.block_size) && (count < 6 || read_lora_id(fields)) &&
               (count < 7 || read_optional_text(fields.medium)) && (count < 8 || read_optional_text(fields.lora)) &&
               (count < 9 || skip(0)) && (count < 10 || read_group(fields)) &&
               (count < 11 || read_optional_text(fields.kind)) && (count < 12 || skip_all(count - 11, 0));
    }

    bool read_removed(u64 count, Fields& fields) {
        return count >= 2 && read_names(fields) && (count < 3 || read_optional_text(fields.medium)) &&
               (count < 4 || read_group(fields)) && (count < 5 || skip_all(count - 4, 0));
    }

    bool stored(Fields& fields) {
        if (!fields.has_names || !fields.has_tokens || !fields.block_size) return false;
        if (fields.kind.data() ? !dialect_->counts(fields.kind) : fields.group != 0) return true;
        if (fields.keys && !fields.salt.data() && !fields.has_parent && !find_salt(fields)) return false;
        if (fields.num_tokens && fields.num_tokens != fields.count * fields.block_size) return false;
        WireEvent event = begin(WireEvent::STORED, fields);
        event.has_parent = fields.has_parent;
        event.parent = fields.parent ^ fold(fields);
        event.block_size = fields.block_size;
        event.tokens = fields.tokens;
        event.num_tokens = fields.num_tokens;
        std::string lora(fields.lora);
        if (lora.empty() && fields.has_lora_id) {
            lora = "lora-id-" + (fields.is_lora_id_negative ? std::to_string(static_cast<std::int64_t>(fields.lora_id))
                                                            : std::to_string(fields.lora_id));
        }
        event.seed = hash_seed(lora.data(), lora.size(), fields.salt.data(), fields.salt.size());
        events.push_back(event);
        return true;
    }

    /// The salt is the last text in the keys of a sequence's first block, where the adapter's name comes first.
    bool find_salt(Fields& fields) {
        const u8* after = std::exchange(at_, fields.keys);
        u64 blocks = 0, keys;
        bool is_first = true;
        if (!take_nil() && !read_array(blocks)) return false;
        for (u64 block = 0; block < blocks; block++) {
            if (take_nil()) continue;
            if (!read_array(keys)) return false;
            for (; keys; keys--) {
                Text text;
                if (block || !is_text()) {
                    if (!skip(1)) return false;
                    continue;
                }
                if (!read_text(text)) return false;
                const bool is_adapter = is_first && !fields.lora.empty() && text == fields.lora;
                is_first = false;
                if (!is_adapter) fields.salt = text;
            }
        }
        at_ = after;
        return true;
    }

    bool removed(const Fields& fields) {
        if (!fields.has_names) return false;
        events.push_back(begin(WireEvent::REMOVED, fields));
        return true;
    }

    WireEvent begin(WireEvent::Kind kind, const Fields& fields) {
        WireEvent event{kind};
        event.tier = dialect_->tier_of(fields.medium);
        event.names = fields.names;
        event.count = fields.count;
        if (const u64 apart = fold(fields)) {
            for (std::size_t i = 0; i < fields.count; i++) names[fields.names + i] ^= apart;
        }
        return event;
    }

    u64 fold(const Fields& fields) const { return fields.group * dialect_->group_factor; }

    // --- fields ---

    bool read_hash(u64& hash) {
        if (at_ == end_) return false;
        bool is_negative;
        if (*at_ < 0xC4 || *at_ > 0xC6) return read_integer(hash, is_negative);
        u64 size;
        const int width = 1 << (*at_++ - 0xC4);
        if (!take_count(width, size) || !size) return false;
        at_ += size > 8 ? size - 8 : 0;
        return take_number(static_cast<int>(std::min<u64>(size, 8)), hash);
    }

    bool read_names(Fields& fields) {
        u64 count;
        if (!read_array(count)) return false;
        fields.has_names = true;
        fields.names = names.size();
        fields.count = count;
        names.resize(names.size() + count);
        for (u64 i = 0; i < count; i++) {
            if (!read_hash(names[fields.names + i])) return false;
        }
        return true;
    }

    bool read_tokens(Fields& fields) {
        u64 count;
        if (!read_array(count)) return false;
        fields.has_tokens = true;
        fields.tokens = tokens.size();
        fields.num_tokens = count;
        tokens.resize(tokens.size() + count);
        u32* out = tokens.data() + fields.tokens;
        u64 done = 0;
        const u8* at = at_;
        for (; done < count && end_ - at >= 5; done++) {
            const u8 head = *at;
            if (head < 0x80) {
                out[done] = head;
                at += 1;
            } else if (head == 0xCD) {
                out[done] = static_cast<u32>(at[1] << 8 | at[2]);
                at += 3;
            } else if (head == 0xCE) {
                out[done] = __builtin_bswap32(read32(at + 1));
                at += 5;
            } else if (head == 0xCC) {
                out[done] = at[1];
                at += 2;
            } else {
                return false;
            }
        }
        at_ = at;
        for (u64 token; done < count; done++) {
            if (!read_unsigned(0xFFFFFFFF, token)) return false;
            out[done] = static_cast<u32>(token);
        }
        return true;
    }

    bool read_parent(Fields& fields) {
        if (take_nil()) return true;
        return fields.has_parent = read_hash(fields.parent);
    }
    bool read_lora_id(Fields& fields) {
        if (take_nil()) return true;
        return fields.has_lora_id = read_integer(fields.lora_id, fields.is_lora_id_negative);
    }
    bool read_group(Fields& fields) {
        return take_nil() || read_unsigned(0xFFFF, fields.group);
    }

    const Dialect* dialect_ = nullptr;
    const u8* at_ = nullptr;
    const u8* end_ = nullptr;
};

}  // namespace kvmesh
