// A whole index as bytes, and back. The layout is that of PlainIndex.dump in router/index.py.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "index.h"

namespace kvmesh {

/// What a holder is called outside.
struct HolderName {
    std::string worker;
    u32 dp_rank;
};

namespace snapshot {

constexpr char MAGIC[] = "kvprefix";
constexpr u32 VERSION = 1;
constexpr std::size_t HEADER_BYTES = 24, CHECK_BYTES = 8;

class Writer {
   public:
    template <class T>
    void put(T value) {
        out_.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    void put(const void* data, std::size_t bytes) { out_.append(static_cast<const char*>(data), bytes); }
    void reserve(std::size_t bytes) { out_.reserve(bytes); }
    std::string& bytes() { return out_; }

   private:
    std::string out_;
};

class Reader {
   public:
    Reader(const u8* data, std::size_t bytes) : at_(data), left_(bytes) {}

    std::size_t left() const { return left_; }
    /// Null if there are not `count` items of `size` bytes.
    const u8* take(u64 count, std::size_t size) {
        if (count > left_ / size) return nullptr;
        const u8* found = at_;
        at_ += count * size;
        left_ -= count * size;
        return found;
    }

   private:
    const u8* at_;
    std::size_t left_;
};

}  // namespace snapshot

/// `names[i]` is that of holder `index.in_order()[i]`.
inline std::string dump(const Index& index, const std::vector<HolderName>& names) {
    using namespace snapshot;
    Array<u32> place, order;  // of a node in the snapshot, parents before children; and the way back
    place.resize(index.end_of_nodes());
    std::fill_n(place.data(), place.size(), NONE);
    order.reserve(index.num_nodes());
    std::vector<u32> path;
    for (u32 start = 0; start < place.size(); start++) {
        if (index.node(start).is_free()) continue;
        for (u32 node = start; node != NONE && place[node] == NONE; node = index.node(node).parent()) {
            path.push_back(node);
        }
        for (; !path.empty(); path.pop_back()) {
            place[path.back()] = static_cast<u32>(order.size());
            order.push(path.back());
        }
    }
    const std::vector<u32> holders = index.in_order();
    Writer out;
    out.reserve(HEADER_BYTES + 12 * order.size() + 13 * index.num_entries() + 64 * holders.size() + CHECK_BYTES);
    out.put(MAGIC, 8);
    out.put(VERSION);
    out.put(static_cast<u32>(holders.size()));
    out.put(static_cast<u64>(order.size()));
    for (std::size_t i = 0; i < order.size(); i++) out.put(index.node(order[i]).hash());
    for (std::size_t i = 0; i < order.size(); i++) {
        u32 parent = index.node(order[i]).parent();
        out.put(parent == NONE ? NONE : place[parent]);
    }
    for (std::size_t i = 0; i < holders.size(); i++) {
        out.put(static_cast<std::uint16_t>(names[i].worker.size()));
        out.put(names[i].dp_rank);
        out.put(static_cast<u64>(index.state(holders[i]).names.live()));
        out.put(names[i].worker.data(), names[i].worker.size());
        index.each_name(holders[i], [&](u64 name, u32, u32) { out.put(name); });
        index.each_name(holders[i], [&](u64, u32 node, u32) { out.put(place[node]); });
        index.each_name(holders[i], [&](u64, u32, u32 tiers) { out.put(static_cast<u8>(tiers)); });
    }
    out.put(Xxh3(0)(out.bytes().data(), out.bytes().size()));
    return std::move(out.bytes());
}

/// Fill an empty index; `names[i]` becomes that of holder i. "" or what is wrong: then the index is to be thrown away.
inline std::string load(Index& index, std::vector<HolderName>& names, const u8* data, std::size_t bytes) {
    using namespace snapshot;
    if (bytes < HEADER_BYTES + CHECK_BYTES || std::memcmp(data, MAGIC, 8) || read32(data + 8) != VERSION ||
        read64(data + bytes - CHECK_BYTES) != Xxh3(0)(data, bytes - CHECK_BYTES)) {
        return std::to_string(bytes) + " bytes without the mark of version 1, or damaged";
    }
    const u32 num_holders = read32(data + 12);
    const u64 num_nodes = read64(data + 16);
    Reader in(data + HEADER_BYTES, bytes - HEADER_BYTES - CHECK_BYTES);
    const u8* hashes = in.take(num_nodes, 8);
    const u8* parents = hashes ? in.take(num_nodes, 4) : nullptr;
    if (!parents || num_nodes > index.max_entries()) return "fewer prefixes than it says, or too many";
    for (u32 i = 0; i < num_nodes; i++) {
        const u32 parent = read32(parents + 4 * std::size_t{i});
        const u64 hash = read64(hashes + 8 * std::size_t{i});
        if (parent != NONE && parent >= i) return "a prefix before the one it follows";
        if (!index.restore_node(hash, parent)) return "a prefix that comes twice";  // numbered in order from 0
    }
    for (u32 i = 0; i < num_holders; i++) {
        const u8* head = in.take(1, 14);
        if (!head) return "fewer holders than it says";
        std::uint16_t id_bytes;
        std::memcpy(&id_bytes, head, 2);
        const u64 count = read64(head + 6);
        const u8* worker = in.take(id_bytes, 1);
        const u8* keys = worker ? in.take(count, 8) : nullptr;
        const u8* places = keys ? in.take(count, 4) : nullptr;
        const u8* tiers = places ? in.take(count, 1) : nullptr;
        if (!tiers || !count) return "a holder with fewer names than it says, or none";
        const u32 holder = index.open();
        if (holder == NONE) return "too many holders";
        names.push_back({std::string(reinterpret_cast<const char*>(worker), id_bytes), read32(head + 2)});
        for (std::size_t k = 0; k < count; k++) {
            const u32 node = read32(places + 4 * k);
            if (node >= num_nodes || !tiers[k] || tiers[k] >= 1 << TIERS) return "a prefix or a tier that there is not";
            if (index.has_name(holder, read64(keys + 8 * k))) return "a name that comes twice";
            index.restore_name(holder, read64(keys + 8 * k), node, tiers[k]);
        }
    }
    for (u32 i = 0; i < num_nodes; i++) {
        if (!index.node(i).word && !index.node(i).children()) return "a prefix that nobody has";
    }
    if (in.left()) return "more bytes than it says";
    return index.fits() ? "" : std::to_string(index.num_entries()) + " entries, more than are allowed here";
}

}  // namespace kvmesh
