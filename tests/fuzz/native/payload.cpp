// KV events as they come over the wire, read and applied to an index. Nothing is larger than the payload allows, and
// a payload means the same after it was read before another one.

#include "input.h"

#include "../../../router/native/payload.h"
#include "../../../router/native/snapshot.h"

using namespace kvmesh;

namespace {

constexpr u32 MOST_ENTRIES = 64, MOST_PER_HOLDER = 40;

const Dialect& dialect() {
    static const Dialect known = [] {
        Dialect made;
        made.tiers = {{"GPU", 0}, {"HBM", 0}, {"CPU", 1}, {"HOST", 1}, {"DISK", 2}, {"FS", 2}};
        made.full_attention = {"full_attention", "mla_attention"};
        made.group_factor = 0x9E3779B97F4A7C15;
        made.max_bytes = 1 << 16;
        made.max_events = 1000;
        return made;
    }();
    return known;
}

void apply(Index& index, u32 holder, const Payload& payload) {
    for (const WireEvent& event : payload.events) {
        const u8* names = reinterpret_cast<const u8*>(payload.names.data() + event.names);
        const u8* tokens = reinterpret_cast<const u8*>(payload.tokens.data() + event.tokens);
        if (event.kind == WireEvent::STORED) {
            index.store(holder, names, event.count, event.has_parent ? &event.parent : nullptr, tokens,
                        event.num_tokens, event.block_size, event.seed, event.tier);
        } else if (event.kind == WireEvent::REMOVED) {
            index.remove(holder, names, event.count, event.tier);
        } else {
            index.clear(holder);
        }
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const u8* data, std::size_t bytes) {
    static Payload payload;  // it is reused, as in the index
    if (!payload.read(dialect(), data, bytes)) return 0;
    MUST(payload.events.size() <= bytes && payload.names.size() <= bytes && payload.tokens.size() <= bytes);
    for (const WireEvent& event : payload.events) {
        MUST(event.tier < TIERS);
        MUST(event.names + event.count <= payload.names.size());
        MUST(event.tokens + event.num_tokens <= payload.tokens.size());
    }
    Index index(MOST_ENTRIES, MOST_PER_HOLDER);
    const u32 first = index.open(), second = index.open();
    for (const u32 holder : {first, second, first}) apply(index, holder, payload);
    MUST(index.fits());
    std::vector<HolderName> names;
    for (const u32 holder : index.in_order()) names.push_back({holder == first ? "a" : "b", 0});
    const std::string kept = dump(index, names);
    Index again(MOST_ENTRIES, MOST_PER_HOLDER);
    std::vector<HolderName> found;
    MUST(load(again, found, reinterpret_cast<const u8*>(kept.data()), kept.size()).empty());
    MUST(again.num_entries() == index.num_entries() && again.num_blocks() == index.num_blocks());
    for (const u32 holder : {first, second}) index.drop(holder);
    MUST(!index.num_entries() && !index.num_blocks());
    payload.tidy();
    return 0;
}
