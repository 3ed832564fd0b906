// Reads the token ids of a delta that has nothing else. Its specification is _tokens_alone in frontend/lane.py. Knows
// nothing of Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvmesh {

constexpr std::size_t MOST_TOKENS = 256;  // as in frontend/lane.py

/// The token ids of a Delta that has nothing else: msgpack [[token, ...], nil, ...], in its shortest form.
class TokenReader {
   public:
    TokenReader(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}

    /// How many there are, 0 if the message is of another kind.
    std::size_t read(std::uint32_t* tokens) {
        if (end_ - at_ < 3 || (*at_ & 0xf0) != 0x90) return 0;
        int others = (*at_++ & 0x0f) - 1;
        if (others < 0) return 0;
        std::size_t count = 0;
        if ((*at_ & 0xf0) == 0x90) {
            count = *at_++ & 0x0f;
        } else if (*at_ == 0xdc) {
            at_++;
            count = big_endian(2);
            if (count < 16) return 0;
        }
        if (!count || count > MOST_TOKENS) return 0;
        for (std::size_t i = 0; i < count; i++) {
            if (!token(tokens[i])) return 0;
        }
        for (; others && at_ < end_; others--) {
            if (*at_++ != 0xc0) return 0;
        }
        return others || at_ < end_ ? 0 : count;
    }

   private:
    bool token(std::uint32_t& value) {
        if (at_ == end_) return false;
        const std::uint8_t tag = *at_++;
        if (tag < 0x80) {
            value = tag;
            return true;
        }
        const int width = tag == 0xcc ? 1 : tag == 0xcd ? 2 : tag == 0xce ? 4 : 0;
        if (!width || end_ - at_ < width) return false;
        value = big_endian(width);
        return value >= (width == 1 ? 0x80u : width == 2 ? 0x100u : 0x10000u);
    }
    std::uint32_t big_endian(int width) {
        std::uint32_t value = 0;
        for (; width && at_ < end_; width--) value = value << 8 | *at_++;
        return value;
    }

    const std::uint8_t* at_;
    const std::uint8_t* end_;
};

}  // namespace kvmesh
