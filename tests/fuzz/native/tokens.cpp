// The reader of token ids takes exactly what msgspec writes for a delta of tokens alone, and reads it right.

#include "../../../frontend/native/tokens.h"

#include <vector>

#include "input.h"

using namespace kvmesh;

namespace {

void put(std::vector<u8>& out, std::uint32_t value) {
    const int width = value < 0x80 ? 0 : value < 0x100 ? 1 : value < 0x10000 ? 2 : 4;
    if (width) out.push_back(width == 1 ? 0xcc : width == 2 ? 0xcd : 0xce);
    for (int i = width ? width - 1 : 0; i >= 0; i--) out.push_back(static_cast<u8>(value >> 8 * i));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const u8* data, std::size_t bytes) {
    std::uint32_t tokens[MOST_TOKENS];
    const std::size_t count = TokenReader(data, bytes).read(tokens);
    if (!count) return 0;
    MUST(count <= MOST_TOKENS);
    std::vector<u8> again{data[0]};
    if (count < 16) {
        again.push_back(static_cast<u8>(0x90 | count));
    } else {
        again.insert(again.end(), {0xdc, static_cast<u8>(count >> 8), static_cast<u8>(count)});
    }
    for (std::size_t i = 0; i < count; i++) put(again, tokens[i]);
    again.insert(again.end(), (data[0] & 0x0f) - 1u, 0xc0);
    MUST(again == std::vector<u8>(data, data + bytes));
    return 0;
}
