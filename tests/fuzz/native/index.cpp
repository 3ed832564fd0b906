// The index and the counts of chains under any sequence of operations: no more than the limits are kept, a snapshot of
// it is the same index, the longest match is found, and what is dropped leaves nothing.

#include "input.h"

#include <map>

#include "../../../router/native/chains.h"
#include "../../../router/native/snapshot.h"

using namespace kvmesh;

namespace {

constexpr u32 HOLDERS = 3;

/// Drive an index; each operation is a few bytes.
void drive_index(Input input) {
    const u32 most = 1 + input.byte() % 60, most_per_holder = 1 + input.byte() % 60;
    Index index(most, most_per_holder);
    for (u32 i = 0; i < HOLDERS; i++) index.open();
    while (!input.is_empty()) {
        const u32 what = input.byte(), holder = what % HOLDERS, tier = what / HOLDERS % TIERS;
        const std::size_t count = input.byte() % 12;
        std::vector<u64> names = input.numbers<u64>(count);
        switch (what >> 6) {
            case 0:
            case 1: {
                const u64 parent = input.byte();
                const std::vector<u32> tokens = what >> 6 ? input.numbers<u32>(count) : std::vector<u32>(count, 7);
                index.store(holder, bytes_of(names), names.size(), parent & 1 ? &parent : nullptr, bytes_of(tokens),
                            what & 32 ? 0 : tokens.size(), 1, CHAIN_SEED, tier);
                break;
            }
            case 2:
                index.remove(holder, bytes_of(names), names.size(), tier);
                break;
            default:
                what & 32 ? index.drop(holder) : index.clear(holder);
        }
        index.take_emptied();
        MUST(index.fits());
        const std::vector<u32> tokens(8, 7);
        std::vector<u64> prompt(8);
        hash_chain(Xxh3(CHAIN_SEED), bytes_of(tokens), 4, 8, nullptr, prompt.data());
        for (const Reach& reach : index.match(bytes_of(prompt), prompt.size())) {
            for (int tier = 1; tier < TIERS; tier++) MUST(reach.depth[tier - 1] <= reach.depth[tier]);
            MUST(reach.depth[TIERS - 1] && reach.depth[TIERS - 1] <= index.state(reach.holder).prefixes);
        }
    }
    std::vector<HolderName> names, found;
    for (const u32 holder : index.in_order()) names.push_back({std::string(1, static_cast<char>('a' + holder)), 0});
    const std::string kept = dump(index, names);
    Index again(most, most_per_holder);
    MUST(load(again, found, reinterpret_cast<const u8*>(kept.data()), kept.size()).empty());
    MUST(again.num_entries() == index.num_entries() && again.num_blocks() == index.num_blocks());
    for (u32 holder = 0; holder < HOLDERS; holder++) index.drop(holder);
    MUST(!index.num_entries() && !index.num_blocks());
}

/// Drive counted chains beside a plain list of them.
void drive_chains(Input input) {
    Chains chains;
    std::vector<std::multimap<std::vector<u64>, bool>> plain(HOLDERS);
    for (u32 i = 0; i < HOLDERS; i++) chains.open();
    while (!input.is_empty()) {
        const u32 what = input.byte(), holder = what % HOLDERS;
        const std::vector<u64> chain = input.numbers<u64>(what >> 4 & 7);
        if (what >> 7) {
            chains.add(holder, bytes_of(chain), chain.size());
            if (!chain.empty()) plain[holder].insert({chain, true});
        } else if (what & 8) {
            chains.discard(holder, bytes_of(chain), chain.size());
            if (const auto known = plain[holder].find(chain); known != plain[holder].end()) plain[holder].erase(known);
        } else if (chain.empty()) {
            chains.drop(holder);
            plain[holder].clear();
        } else {
            std::map<u32, u32> expected;
            for (u32 other = 0; other < HOLDERS; other++) {
                for (const auto& [known, _] : plain[other]) {
                    u32 same = 0;
                    while (same < std::min(known.size(), chain.size()) && known[same] == chain[same]) same++;
                    if (same) expected[other] = std::max(expected[other], same);
                }
            }
            std::map<u32, u32> found;
            for (const Reach& reach : chains.match(bytes_of(chain), chain.size())) found[reach.holder] = reach.depth[0];
            MUST(found == expected);
        }
    }
    for (u32 holder = 0; holder < HOLDERS; holder++) chains.drop(holder);
    MUST(!chains.num_blocks());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const u8* data, std::size_t bytes) {
    if (!bytes) return 0;
    const Input input(data + 1, bytes - 1);
    data[0] & 1 ? drive_chains(input) : drive_index(input);
    return 0;
}
