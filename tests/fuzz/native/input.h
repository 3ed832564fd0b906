// What the harnesses share: a reader of an input's bytes, and a check that stays on in optimized builds.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../../router/native/index.h"

#define MUST(condition)                                                              \
    do {                                                                             \
        if (!(condition)) {                                                          \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                            \
        }                                                                            \
    } while (false)

namespace kvmesh {

class Input {
   public:
    Input(const u8* data, std::size_t bytes) : at_(data), end_(data + bytes) {}

    bool is_empty() const { return at_ == end_; }
    u32 byte() { return at_ == end_ ? 0 : *at_++; }
    /// At most `most` of the bytes that follow, each as a number.
    template <class Number>
    std::vector<Number> numbers(std::size_t most) {
        std::vector<Number> found(std::min<std::size_t>(most, static_cast<std::size_t>(end_ - at_)));
        for (Number& number : found) number = *at_++;
        return found;
    }

   private:
    const u8* at_;
    const u8* end_;
};

template <class Number>
const u8* bytes_of(const std::vector<Number>& numbers) {
    return reinterpret_cast<const u8*>(numbers.data());
}

}  // namespace kvmesh
