// A snapshot of an index that another process has sent: it is refused, or it is an index that can be used and written
// again. The harness makes the checksum right, because no input would find it.

#include "input.h"

#include "../../../router/native/snapshot.h"

using namespace kvmesh;

extern "C" int LLVMFuzzerTestOneInput(const u8* data, std::size_t bytes) {
    std::string sent(snapshot::MAGIC, 8);
    const u32 version = snapshot::VERSION;
    sent.append(reinterpret_cast<const char*>(&version), sizeof version);
    sent.append(reinterpret_cast<const char*>(data), bytes);
    const u64 check = Xxh3(0)(reinterpret_cast<const u8*>(sent.data()), sent.size());
    sent.append(reinterpret_cast<const char*>(&check), sizeof check);

    Index index(100, 60);
    std::vector<HolderName> names;
    if (!load(index, names, reinterpret_cast<const u8*>(sent.data()), sent.size()).empty()) return 0;
    MUST(index.fits());
    const std::string kept = dump(index, names);
    Index again(100, 60);
    std::vector<HolderName> found;
    MUST(load(again, found, reinterpret_cast<const u8*>(kept.data()), kept.size()).empty());
    MUST(dump(again, found) == kept);
    std::vector<u64> prompt;
    for (u32 node = 0; node < index.end_of_nodes(); node++) prompt.push_back(index.prefix(node));
    MUST(index.match(bytes_of(prompt), prompt.size()).size() <= names.size());
    for (u32 holder = 0; holder < names.size(); holder++) index.drop(holder);
    MUST(!index.num_entries() && !index.num_blocks());
    return 0;
}
