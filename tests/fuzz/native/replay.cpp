// Calls a harness once per file that is named: for compilers without libFuzzer.

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes);

int main(int count, char** names) {
    for (int i = 1; i < count; i++) {
        std::ifstream file(names[i], std::ios::binary);
        const std::vector<char> held{std::istreambuf_iterator<char>(file), {}};
        LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(held.data()), held.size());
    }
    return 0;
}
