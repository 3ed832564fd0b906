// kvmesh.router._native: binds the prefix index and the chain counts to Python. PlainIndex in router/index.py and
// PlainChainCounts in router/chains.py specify what they do; this file only converts arguments and answers.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <memory>
#include <optional>

#include "../protocol/buffers.h"
#include "native/chains.h"
#include "native/index.h"
#include "native/payload.h"
#include "native/snapshot.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvmesh;

namespace {

/// Throw the Python error that a call of the C API has set.
void check(bool is_done) {
    if (!is_done) nb::raise_python_error();
}

template <class... Values>
[[noreturn]] void refuse(const char* format, Values... values) {
    PyErr_Format(PyExc_ValueError, format, values...);
    nb::raise_python_error();
}

/// A borrowed view of the integers in a buffer. Anything else is a TypeError or a ValueError.
struct View : Integers {
    View(nb::handle object, std::size_t size, const char* code) { check(take(object.ptr(), size, code)); }
};

using Text = std::optional<std::string_view>;

std::string_view text_of(const Text& text) { return text.value_or(std::string_view()); }

u32 to_tier(long tier) {
    if (tier < 0 || tier >= TIERS) refuse("tier %ld; there are 0 to %d", tier, TIERS - 1);
    return static_cast<u32>(tier);
}

/// Map Python's holders to the numbers that the native code gives them, and back.
class HolderTable {
   public:
    std::size_t size() const { return numbers_.size(); }
    nb::handle object(u32 number) const { return objects_[number]; }

    /// Return the number of a holder, NONE for an unknown one.
    u32 find(nb::handle holder) const {
        PyObject* number = PyDict_GetItemWithError(numbers_.ptr(), holder.ptr());
        check(number || !PyErr_Occurred());
        return number ? static_cast<u32>(PyLong_AsUnsignedLong(number)) : NONE;
    }
    void add(nb::handle holder, u32 number) {
        if (objects_.size() <= number) objects_.resize(number + 1);
        const nb::int_ boxed(number);
        check(PyDict_SetItem(numbers_.ptr(), holder.ptr(), boxed.ptr()) == 0);
        objects_[number] = nb::borrow(holder);
    }
    void remove(u32 number) {
        const nb::object holder = std::move(objects_[number]);
        check(PyDict_DelItem(numbers_.ptr(), holder.ptr()) == 0);
    }

   private:
    nb::dict numbers_;
    std::vector<nb::object> objects_;
};

class IndexBinding {
   public:
    IndexBinding(long long max_entries, long long max_per_holder, nb::dict tiers, nb::iterable full_attention,
                 u64 group_factor, u64 max_bytes, u32 max_events) {
        for (long long limit : {max_entries, max_per_holder}) {
            if (limit < 0 || limit > static_cast<long long>(MAX_ENTRIES)) {
                refuse("a limit of %lld entries; from 0 to %u can be kept", limit, MAX_ENTRIES);
            }
        }
        max_entries_ = static_cast<u32>(max_entries);
        max_per_holder_ = static_cast<u32>(max_per_holder);
        index_ = std::make_unique<Index>(max_entries_, max_per_holder_);
        dialect_.group_factor = group_factor;
        dialect_.max_bytes = max_bytes;
        dialect_.max_events = max_events;
        for (auto [word, tier] : tiers) {
            dialect_.tiers.emplace_back(nb::cast<std::string>(word), static_cast<u8>(to_tier(nb::cast<long>(tier))));
        }
        for (nb::handle word : full_attention) dialect_.full_attention.push_back(nb::cast<std::string>(word));
    }

    void store(nb::handle holder, nb::handle engine_hashes, std::optional<u64> parent, nb::handle tokens,
               long long block_size, Text lora, Text salt, long tier) {
        const View names(engine_hashes, 8, "Q"), ids(tokens, 4, "I");
        const u32 where = to_tier(tier);
        const std::string_view adapter = text_of(lora), tenant = text_of(salt);
        const u64 seed = hash_seed(adapter.data(), adapter.size(), tenant.data(), tenant.size());
        feed(
            holder,
            [&](u32 number) {
                index_->store(number, names.data(), names.count(), parent ? &*parent : nullptr, ids.data(),
                              ids.count(), block_size < 0 ? 0 : static_cast<u64>(block_size), seed, where);
            },
            [&] { index_->stats.refused += names.count(); });
    }
    void remove(nb::handle holder, nb::handle engine_hashes, long tier) {
        const View names(engine_hashes, 8, "Q");
        const u32 where = to_tier(tier);
        feed(
            holder, [&](u32 number) { index_->remove(number, names.data(), names.count(), where); },
            [&] { index_->stats.unknown_removals += names.count(); });
    }
    void clear(nb::handle holder) {
        feed(holder, [&](u32 number) { index_->clear(number); }, [] {});
    }
    void drop(nb::handle holder) {
        feed(holder, [&](u32 number) { index_->drop(number); }, [] {});
    }

    /// Apply a batch and return its number of events, or None if Python has to read it; then nothing was applied.
    nb::object apply_usual(nb::handle holder, nb::handle bytes) {
        const View payload(bytes, 1, "B");
        if (!payload_.read(dialect_, payload.data(), payload.count())) return nb::none();
        bool is_refused = false;
        feed(holder, [&](u32 number) { apply(number); }, [&] { is_refused = true; });
        const std::size_t events = payload_.events.size();
        payload_.tidy();
        return is_refused ? nb::none() : nb::object(nb::int_(events));
    }

    nb::dict match(nb::handle hashes) {
        const View prompt(hashes, 8, "Q");
        return guarded([&] { return to_dict(index_->match(prompt.data(), prompt.count())); });
    }

    nb::tuple digest(nb::handle holder) const {
        const HolderState& state = state_of(holder);
        return nb::make_tuple(state.digest_blocks, state.digest);
    }
    u32 blocks_of(nb::handle holder) const { return state_of(holder).prefixes; }
    /// Return the gaps of each tier, for tests. A match gallops only where all are 0.
    nb::tuple gaps(nb::handle holder) const {
        const PerTier& gaps = state_of(holder).gaps;
        return nb::make_tuple(gaps[0], gaps[1], gaps[2], gaps[3]);
    }
    /// Return [(prefix, tiers as bits), ...] with one pair per name.
    nb::list named(nb::handle holder) const {
        nb::list found;
        const u32 number = holders_.find(holder);
        if (number != NONE) {
            index_->each_name(number, [&](u64, u32 node, u32 tiers) {
                found.append(nb::make_tuple(index_->prefix(node), tiers));
            });
        }
        return found;
    }

    nb::bytes dump_all(nb::tuple names) const {
        std::vector<HolderName> called;
        for (nb::handle name : names) {
            const nb::bytes worker = nb::cast<nb::bytes>(name[0]);
            if (worker.size() > 0xFFFF) refuse("a worker id of %zu bytes", worker.size());
            called.push_back({std::string(worker.c_str(), worker.size()), nb::cast<u32>(name[1])});
        }
        if (called.size() != holders_.size()) refuse("one name per holder");
        const std::string bytes = dump(*index_, called);
        return nb::bytes(bytes.data(), bytes.size());
    }
    /// Replace the content by a snapshot, or change nothing and raise ValueError.
    /// `holder_of(worker id as bytes, dp rank)` makes a holder.
    void load_all(nb::handle bytes, nb::callable holder_of) {
        const View data(bytes, 1, "B");
        auto fresh = std::make_unique<Index>(max_entries_, max_per_holder_);
        std::vector<HolderName> names;
        const std::string wrong = load(*fresh, names, data.data(), data.count());
        if (!wrong.empty()) refuse("%s", wrong.c_str());
        HolderTable holders;
        for (u32 number = 0; number < names.size(); number++) {
            const HolderName& name = names[number];
            holders.add(holder_of(nb::bytes(name.worker.data(), name.worker.size()), name.dp_rank), number);
        }
        if (holders.size() != names.size()) refuse("holders that come twice");
        fresh->stats = index_->stats;
        index_.swap(fresh);
        std::swap(holders_, holders);
    }

    nb::tuple holders() const {
        nb::list found;
        for (u32 number : index_->in_order()) found.append(holders_.object(number));
        return nb::tuple(found);
    }
    /// Return the counts in the order of IndexStats.
    nb::tuple counts() const {
        const Stats& s = index_->stats;
        return nb::make_tuple(s.stored, s.duplicate, s.renamed, s.removed, s.cleared, s.evicted, s.unknown_removals,
                              s.orphan, s.malformed, s.refused);
    }
    std::size_t num_blocks() const { return index_->num_blocks(); }
    std::size_t num_entries() const { return index_->num_entries(); }

   private:
    /// Run `body()`. Without memory the index begins again, empty: a change that stopped half-way cannot be trusted.
    template <class Body>
    auto guarded(Body body) -> decltype(body()) {
        try {
            return body();
        } catch (const std::bad_alloc&) {
            try {
                holders_ = HolderTable();
                Stats stats = index_->stats;
                index_ = std::make_unique<Index>(max_entries_, max_per_holder_);
                index_->stats = stats;
            } catch (const std::bad_alloc&) {
                Py_FatalError("no memory for an empty index");
            }
            throw;
        }
    }

    /// Let `act(number)` change the blocks of a holder, or call `too_many()` if no number is free for it.
    template <class Act, class TooMany>
    void feed(nb::handle holder, Act act, TooMany too_many) {
        guarded([&] {
            u32 number = holders_.find(holder);
            const bool is_known = number != NONE;
            if (!is_known && (number = index_->open()) == NONE) return too_many();
            act(number);
            for (u32 other : index_->take_emptied()) {
                if (other == number) continue;
                index_->close(other);
                holders_.remove(other);
            }
            if (index_->is_empty(number)) {
                index_->close(number);
                if (is_known) holders_.remove(number);
            } else if (!is_known) {
                try {
                    holders_.add(holder, number);
                } catch (...) {
                    index_->drop(number);
                    index_->close(number);
                    throw;
                }
            }
        });
    }

    void apply(u32 holder) {
        Index& index = *index_;
        for (const WireEvent& event : payload_.events) {
            const u8* names = reinterpret_cast<const u8*>(payload_.names.data() + event.names);
            switch (event.kind) {
                case WireEvent::STORED:
                    index.store(holder, names, event.count, event.has_parent ? &event.parent : nullptr,
                                reinterpret_cast<const u8*>(payload_.tokens.data() + event.tokens), event.num_tokens,
                                event.block_size, event.seed, event.tier);
                    break;
                case WireEvent::REMOVED:
                    index.remove(holder, names, event.count, event.tier);
                    break;
                case WireEvent::CLEARED:
                    index.clear(holder);
            }
        }
    }

    const HolderState& state_of(nb::handle holder) const {
        static const HolderState nothing;
        const u32 number = holders_.find(holder);
        return number == NONE ? nothing : index_->state(number);
    }

    /// Not inlined: as a part of the search the loop takes 9 % longer for 64 holders.
    __attribute__((noinline)) nb::dict to_dict(const std::vector<Reach>& reaches) const {
        nb::dict found;
        const Reach* before = nullptr;
        nb::object depths;  // many holders have equal depths
        for (const Reach& reach : reaches) {
            if (!before || std::memcmp(before->depth, reach.depth, sizeof reach.depth)) {
                depths = packed(reach.depth);
                before = &reach;
            }
            check(PyDict_SetItem(found.ptr(), holders_.object(reach.holder).ptr(), depths.ptr()) == 0);
        }
        return found;
    }

    static nb::object packed(const u32* depth) {
        nb::object tuple = nb::steal(PyTuple_New(TIERS));
        check(tuple.is_valid());
        for (int tier = 0; tier < TIERS; tier++) {
            PyObject* number = tier && depth[tier] == depth[tier - 1]
                                   ? Py_NewRef(PyTuple_GET_ITEM(tuple.ptr(), tier - 1))
                                   : PyLong_FromUnsignedLong(depth[tier]);
            check(number);
            PyTuple_SET_ITEM(tuple.ptr(), tier, number);
        }
        return tuple;
    }

    u32 max_entries_, max_per_holder_;
    std::unique_ptr<Index> index_;
    HolderTable holders_;
    Dialect dialect_;
    Payload payload_;
};

class ChainsBinding {
   public:
    void add(nb::handle holder, nb::handle hashes) {
        const View chain(hashes, 8, "Q");
        guarded([&] {
            u32 number = holders_.find(holder);
            if (!chain.count()) return;
            if (number == NONE) {
                number = chains_->open();
                try {
                    holders_.add(holder, number);
                } catch (...) {
                    chains_->close(number);
                    throw;
                }
            }
            chains_->add(number, chain.data(), chain.count());
        });
    }
    void discard(nb::handle holder, nb::handle hashes) {
        const View chain(hashes, 8, "Q");
        change(holder, [&](u32 number) { chains_->discard(number, chain.data(), chain.count()); });
    }
    void drop(nb::handle holder) {
        change(holder, [&](u32 number) { chains_->drop(number); });
    }
    nb::dict match(nb::handle hashes) {
        const View prompt(hashes, 8, "Q");
        return guarded([&] {
            nb::dict found;
            for (const Reach& reach : chains_->match(prompt.data(), prompt.count())) {
                const nb::int_ depth(reach.depth[0]);
                check(PyDict_SetItem(found.ptr(), holders_.object(reach.holder).ptr(), depth.ptr()) == 0);
            }
            return found;
        });
    }
    u32 blocks_of(nb::handle holder) const {
        const u32 number = holders_.find(holder);
        return number == NONE ? 0 : chains_->blocks_of(number);
    }
    u32 num_blocks() const { return chains_->num_blocks(); }

   private:
    /// Run `body()`. Without memory all counts are forgotten.
    template <class Body>
    auto guarded(Body body) -> decltype(body()) {
        try {
            return body();
        } catch (const std::bad_alloc&) {
            try {
                holders_ = HolderTable();
                chains_ = std::make_unique<Chains>();
            } catch (const std::bad_alloc&) {
                Py_FatalError("no memory for empty counts");
            }
            throw;
        }
    }
    /// Let `act(number)` change what a holder uses, and forget a holder that uses nothing any more.
    template <class Act>
    void change(nb::handle holder, Act act) {
        guarded([&] {
            const u32 number = holders_.find(holder);
            if (number == NONE) return;
            act(number);
            if (chains_->blocks_of(number)) return;
            chains_->close(number);
            holders_.remove(number);
        });
    }

    std::unique_ptr<Chains> chains_ = std::make_unique<Chains>();
    HolderTable holders_;
};

}  // namespace

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // a router that lives until the process ends is no leak
    nb::class_<IndexBinding>(module, "Index")
        .def(nb::init<long long, long long, nb::dict, nb::iterable, u64, u64, u32>(), "max_entries"_a,
             "max_entries_per_holder"_a, "tiers"_a, "full_attention"_a, "group_factor"_a, "max_bytes"_a, "max_events"_a)
        .def("store", &IndexBinding::store, "holder"_a, "engine_hashes"_a, "parent"_a.none(), "tokens"_a,
             "block_size"_a, "lora"_a = nb::none(), "salt"_a = nb::none(), "tier"_a = 0)
        .def("remove", &IndexBinding::remove, "holder"_a, "engine_hashes"_a, "tier"_a = 0)
        .def("clear", &IndexBinding::clear)
        .def("drop", &IndexBinding::drop)
        .def("apply_usual", &IndexBinding::apply_usual)
        .def("match", &IndexBinding::match)
        .def("_digest", &IndexBinding::digest)
        .def("blocks_of", &IndexBinding::blocks_of)
        .def("_gaps", &IndexBinding::gaps)
        .def("_named", &IndexBinding::named)
        .def("_dump", &IndexBinding::dump_all)
        .def("_load", &IndexBinding::load_all)
        .def_prop_ro("holders", &IndexBinding::holders)
        .def_prop_ro("_counts", &IndexBinding::counts)
        .def_prop_ro("num_blocks", &IndexBinding::num_blocks)
        .def_prop_ro("num_entries", &IndexBinding::num_entries);
    nb::class_<ChainsBinding>(module, "ChainCounts")
        .def(nb::init<>())
        .def("add", &ChainsBinding::add)
        .def("discard", &ChainsBinding::discard)
        .def("drop", &ChainsBinding::drop)
        .def("match", &ChainsBinding::match)
        .def("blocks_of", &ChainsBinding::blocks_of)
        .def_prop_ro("num_blocks", &ChainsBinding::num_blocks);
}
