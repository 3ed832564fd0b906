// router._native: the prefix index and the chain counts for Python. Their specifications are PlainIndex in
// router/index.py and PlainChainCounts in router/chains.py; here is only the way in and out.

#include "../protocol/buffers.h"

#include <memory>

#include "native/chains.h"
#include "native/index.h"
#include "native/payload.h"
#include "native/snapshot.h"

using namespace kvmesh;

namespace {

/// An owned reference.
class Ref {
   public:
    explicit Ref(PyObject* object = nullptr) : object_(object) {}
    Ref(const Ref&) = delete;
    Ref& operator=(const Ref&) = delete;
    Ref(Ref&& other) noexcept : object_(other.release()) {}
    Ref& operator=(Ref&& other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Ref() { Py_XDECREF(object_); }

    PyObject* get() const { return object_; }
    explicit operator bool() const { return object_; }
    PyObject* release() { return std::exchange(object_, nullptr); }

   private:
    PyObject* object_;
};

constexpr u32 FAILED = NONE - 1;  // a Python error is set

/// Python's holders by the numbers they have here.
class HolderTable {
   public:
    HolderTable() : numbers_(PyDict_New()) {}
    ~HolderTable() { clear(); }
    HolderTable(const HolderTable&) = delete;
    HolderTable& operator=(const HolderTable&) = delete;

    bool is_sound() const { return static_cast<bool>(numbers_); }
    std::size_t size() const { return static_cast<std::size_t>(PyDict_GET_SIZE(numbers_.get())); }
    PyObject* object(u32 number) const { return objects_[number]; }

    /// The number of a holder, NONE if it is not known, or FAILED.
    u32 find(PyObject* holder) const {
        PyObject* number = PyDict_GetItemWithError(numbers_.get(), holder);
        if (!number) return PyErr_Occurred() ? FAILED : NONE;
        return static_cast<u32>(PyLong_AsUnsignedLong(number));
    }
    bool add(PyObject* holder, u32 number) {
        if (objects_.size() <= number) objects_.resize(number + 1, nullptr);
        Ref boxed(PyLong_FromUnsignedLong(number));
        if (!boxed || PyDict_SetItem(numbers_.get(), holder, boxed.get()) < 0) return false;
        Py_INCREF(holder);
        objects_[number] = holder;
        return true;
    }
    bool remove(u32 number) {
        Ref holder(std::exchange(objects_[number], nullptr));
        return PyDict_DelItem(numbers_.get(), holder.get()) == 0;
    }
    void clear() {
        std::vector<PyObject*> gone;
        gone.swap(objects_);
        if (numbers_) PyDict_Clear(numbers_.get());
        for (PyObject* holder : gone) Py_XDECREF(holder);
    }
    void swap(HolderTable& other) {
        std::swap(objects_, other.objects_);
        std::swap(numbers_, other.numbers_);
    }

   private:
    Ref numbers_;
    std::vector<PyObject*> objects_;
};

// --- arguments ---

/// Sort positional and keyword arguments into `out` (null: not given). False: a TypeError is set.
bool bind(PyObject* const* args, Py_ssize_t count, PyObject* keywords, const char* const* names, Py_ssize_t required,
          Py_ssize_t most, PyObject** out) {
    if (count > most) {
        PyErr_Format(PyExc_TypeError, "%zd arguments where at most %zd are taken", count, most);
        return false;
    }
    for (Py_ssize_t i = 0; i < most; i++) out[i] = i < count ? args[i] : nullptr;
    for (Py_ssize_t k = 0; keywords && k < PyTuple_GET_SIZE(keywords); k++) {
        PyObject* keyword = PyTuple_GET_ITEM(keywords, k);
        Py_ssize_t i = 0;
        while (i < most && PyUnicode_CompareWithASCIIString(keyword, names[i])) i++;
        if (i == most || out[i]) {
            PyErr_Format(PyExc_TypeError, "argument %R is unknown or given twice", keyword);
            return false;
        }
        out[i] = args[count + k];
    }
    for (Py_ssize_t i = 0; i < required; i++) {
        if (!out[i]) {
            PyErr_Format(PyExc_TypeError, "argument %s is missing", names[i]);
            return false;
        }
    }
    return true;
}

bool to_u64(PyObject* number, u64& value) {
    value = PyLong_AsUnsignedLongLong(number);
    return !(value == static_cast<u64>(-1) && PyErr_Occurred());
}

bool to_tier(PyObject* number, u32& tier) {
    tier = 0;
    if (!number) return true;
    long value = PyLong_AsLong(number);
    if (value == -1 && PyErr_Occurred()) return false;
    if (value < 0 || value >= TIERS) {
        PyErr_Format(PyExc_ValueError, "tier %ld; there are 0 to %d", value, TIERS - 1);
        return false;
    }
    tier = static_cast<u32>(value);
    return true;
}

/// The bytes of a str; none for None or if it is not given.
bool to_text(PyObject* text, std::string_view& bytes) {
    bytes = {};
    if (!text || text == Py_None) return true;
    Py_ssize_t size;
    const char* data = PyUnicode_AsUTF8AndSize(text, &size);
    if (!data) return false;
    bytes = {data, static_cast<std::size_t>(size)};
    return true;
}

template <class Object>
PyObject* allocate(PyTypeObject* type, PyObject*, PyObject*) {
    return type->tp_alloc(type, 0);
}

template <class Object>
void deallocate(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    delete std::exchange(reinterpret_cast<Object*>(self)->state, nullptr);
    type->tp_free(self);
    Py_DECREF(type);
}

// --- the index ---

struct IndexState {
    u32 max_entries, max_per_holder;
    std::unique_ptr<Index> index;
    HolderTable holders;
    Dialect dialect;
    Payload payload;

    /// What went wrong half-way cannot be trusted; an empty index can.
    void begin_anew() {
        holders.clear();
        Stats stats = index->stats;
        index = std::make_unique<Index>(max_entries, max_per_holder);
        index->stats = stats;
    }
};

struct IndexObject {
    PyObject_HEAD
    IndexState* state;
};

/// Run `body(state)`; without memory the index begins anew, empty, and MemoryError is raised.
template <class Body>
PyObject* guarded(PyObject* self, Body body) {
    IndexState* state = reinterpret_cast<IndexObject*>(self)->state;
    if (!state) {
        PyErr_SetString(PyExc_RuntimeError, "the index was not initialised");
        return nullptr;
    }
    try {
        return body(*state);
    } catch (const std::bad_alloc&) {
        try {
            state->begin_anew();
        } catch (const std::bad_alloc&) {
            Py_FatalError("no memory for an empty index");
        }
        return PyErr_NoMemory();
    }
}

/// Feed a holder: `act(number)` changes what it has. `too_many()` is called instead if there is no number for it.
template <class Act, class TooMany>
bool feed(IndexState& state, PyObject* holder, Act act, TooMany too_many) {
    u32 number = state.holders.find(holder);
    if (number == FAILED) return false;
    const bool is_known = number != NONE;
    if (!is_known && (number = state.index->open()) == NONE) {
        too_many();
        return true;
    }
    act(number);
    for (u32 other : state.index->take_emptied()) {
        if (other == number) continue;
        state.index->close(other);
        if (!state.holders.remove(other)) return false;
    }
    if (state.index->is_empty(number)) {
        state.index->close(number);
        return !is_known || state.holders.remove(number);
    }
    if (is_known || state.holders.add(holder, number)) return true;
    state.index->drop(number);
    state.index->close(number);
    return false;
}

PyObject* index_store(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
    static const char* const names[] = {"holder",     "engine_hashes", "parent", "tokens",
                                        "block_size", "lora",          "salt",   "tier"};
    PyObject* given[8];
    Integers hashes, tokens;
    u64 parent = 0;
    u32 tier;
    std::string_view lora, salt;
    if (!bind(args, count, keywords, names, 5, 8, given) || !hashes.take(given[1], 8, "Q") ||
        !tokens.take(given[3], 4, "I") || !to_text(given[5], lora) || !to_text(given[6], salt) ||
        !to_tier(given[7], tier)) {
        return nullptr;
    }
    const bool has_parent = given[2] != Py_None;
    if (has_parent && !to_u64(given[2], parent)) return nullptr;
    const long long block_size = PyLong_AsLongLong(given[4]);
    if (block_size == -1 && PyErr_Occurred()) return nullptr;
    return guarded(self, [&](IndexState& state) -> PyObject* {
        Index& index = *state.index;
        const u64 seed = hash_seed(lora.data(), lora.size(), salt.data(), salt.size());
        bool done = feed(
            state, given[0],
            [&](u32 holder) {
                index.store(holder, hashes.data(), hashes.count(), has_parent ? &parent : nullptr, tokens.data(),
                            tokens.count(), block_size < 0 ? 0 : static_cast<u64>(block_size), seed, tier);
            },
            [&] { index.stats.refused += hashes.count(); });
        return done ? Py_NewRef(Py_None) : nullptr;
    });
}

PyObject* index_remove(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
    static const char* const names[] = {"holder", "engine_hashes", "tier"};
    PyObject* given[3];
    Integers hashes;
    u32 tier;
    if (!bind(args, count, keywords, names, 2, 3, given) || !hashes.take(given[1], 8, "Q") ||
        !to_tier(given[2], tier)) {
        return nullptr;
    }
    return guarded(self, [&](IndexState& state) -> PyObject* {
        Index& index = *state.index;
        bool done = feed(
            state, given[0], [&](u32 holder) { index.remove(holder, hashes.data(), hashes.count(), tier); },
            [&] { index.stats.unknown_removals += hashes.count(); });
        return done ? Py_NewRef(Py_None) : nullptr;
    });
}

PyObject* index_clear(PyObject* self, PyObject* holder) {
    return guarded(self, [&](IndexState& state) -> PyObject* {
        bool done = feed(state, holder, [&](u32 number) { state.index->clear(number); }, [] {});
        return done ? Py_NewRef(Py_None) : nullptr;
    });
}

PyObject* index_drop(PyObject* self, PyObject* holder) {
    return guarded(self, [&](IndexState& state) -> PyObject* {
        bool done = feed(state, holder, [&](u32 number) { state.index->drop(number); }, [] {});
        return done ? Py_NewRef(Py_None) : nullptr;
    });
}

void apply(Index& index, u32 holder, const Payload& payload) {
    for (const WireEvent& event : payload.events) {
        const u8* names = reinterpret_cast<const u8*>(payload.names.data() + event.names);
        switch (event.kind) {
            case WireEvent::STORED:
                index.store(holder, names, event.count, event.has_parent ? &event.parent : nullptr,
                            reinterpret_cast<const u8*>(payload.tokens.data() + event.tokens), event.num_tokens,
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

/// The number of events, or None: nothing was applied, Python has to read it.
PyObject* index_apply_usual(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Integers payload;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "the arguments are holder, payload");
    if (!payload.take(args[1], 1, "B")) return nullptr;
    return guarded(self, [&](IndexState& state) -> PyObject* {
        Payload& read = state.payload;
        if (!read.read(state.dialect, payload.data(), payload.count())) return Py_NewRef(Py_None);
        bool is_refused = false;
        const bool done = feed(
            state, args[0], [&](u32 holder) { apply(*state.index, holder, read); }, [&] { is_refused = true; });
        const std::size_t events = read.events.size();
        read.tidy();
        if (!done) return nullptr;
        return is_refused ? Py_NewRef(Py_None) : PyLong_FromSize_t(events);
    });
}

PyObject* pack_depths(const u32* depth) {
    Ref tuple(PyTuple_New(TIERS));
    if (!tuple) return nullptr;
    for (int tier = 0; tier < TIERS; tier++) {
        PyObject* number = tier && depth[tier] == depth[tier - 1]
                               ? Py_NewRef(PyTuple_GET_ITEM(tuple.get(), tier - 1))
                               : PyLong_FromUnsignedLong(depth[tier]);
        if (!number) return nullptr;
        PyTuple_SET_ITEM(tuple.get(), tier, number);
    }
    return tuple.release();
}

PyObject* index_match(PyObject* self, PyObject* hashes) {
    Integers prompt;
    if (!prompt.take(hashes, 8, "Q")) return nullptr;
    return guarded(self, [&](IndexState& state) -> PyObject* {
        Ref found(PyDict_New());
        if (!found) return nullptr;
        const Reach* before = nullptr;
        Ref depths;  // many holders have equal ones
        for (const Reach& reach : state.index->match(prompt.data(), prompt.count())) {
            if (!before || std::memcmp(before->depth, reach.depth, sizeof reach.depth)) {
                depths = Ref(pack_depths(reach.depth));
                if (!depths) return nullptr;
                before = &reach;
            }
            if (PyDict_SetItem(found.get(), state.holders.object(reach.holder), depths.get()) < 0) return nullptr;
        }
        return found.release();
    });
}

template <class Ask>
PyObject* ask(PyObject* self, PyObject* holder, Ask answer) {
    return guarded(self, [&](IndexState& state) -> PyObject* {
        static const HolderState nothing;
        const u32 number = state.holders.find(holder);
        if (number == FAILED) return nullptr;
        return answer(*state.index, number, number == NONE ? nothing : state.index->state(number));
    });
}

PyObject* index_digest(PyObject* self, PyObject* holder) {
    return ask(self, holder, [](const Index&, u32, const HolderState& state) {
        return Py_BuildValue("(KK)", state.digest_blocks, state.digest);
    });
}

PyObject* index_blocks_of(PyObject* self, PyObject* holder) {
    return ask(self, holder, [](const Index&, u32, const HolderState& state) {
        return PyLong_FromUnsignedLong(state.prefixes);
    });
}

/// Per tier; only where all are 0 is matching fast. For tests.
PyObject* index_gaps(PyObject* self, PyObject* holder) {
    return ask(self, holder, [](const Index&, u32, const HolderState& state) {
        return Py_BuildValue("(IIII)", state.gaps[0], state.gaps[1], state.gaps[2], state.gaps[3]);
    });
}

/// [(prefix, tiers as bits), ...], one per name.
PyObject* index_named(PyObject* self, PyObject* holder) {
    return ask(self, holder, [](const Index& index, u32 number, const HolderState&) -> PyObject* {
        Ref found(PyList_New(0));
        if (!found) return nullptr;
        bool is_sound = true;
        if (number != NONE) {
            index.each_name(number, [&](u64, u32 node, u32 tiers) {
                Ref pair(is_sound ? Py_BuildValue("(KI)", index.prefix(node), tiers) : nullptr);
                is_sound = pair && PyList_Append(found.get(), pair.get()) == 0;
            });
        }
        return is_sound ? found.release() : nullptr;
    });
}

PyObject* index_dump(PyObject* self, PyObject* names) {
    return guarded(self, [&](IndexState& state) -> PyObject* {
        std::vector<HolderName> called;
        for (Py_ssize_t i = 0; i < PyTuple_Size(names); i++) {
            const char* worker;
            Py_ssize_t size;
            unsigned rank;
            if (!PyArg_ParseTuple(PyTuple_GET_ITEM(names, i), "y#I", &worker, &size, &rank)) return nullptr;
            if (size > 0xFFFF) return PyErr_Format(PyExc_ValueError, "a worker id of %zd bytes", size);
            called.push_back({std::string(worker, static_cast<std::size_t>(size)), rank});
        }
        if (PyErr_Occurred()) return nullptr;
        if (called.size() != state.holders.size()) return PyErr_Format(PyExc_ValueError, "one name per holder");
        const std::string bytes = dump(*state.index, called);
        return PyBytes_FromStringAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size()));
    });
}

/// `load(data, holder_of)`: `holder_of(worker id as bytes, dp rank)` makes a holder. ValueError: nothing changed.
PyObject* index_load(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Integers data;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "the arguments are data, holder_of");
    if (!data.take(args[0], 1, "B")) return nullptr;
    IndexState* state = reinterpret_cast<IndexObject*>(self)->state;
    if (!state) return PyErr_Format(PyExc_RuntimeError, "the index was not initialised");
    try {
        auto fresh = std::make_unique<Index>(state->max_entries, state->max_per_holder);
        std::vector<HolderName> names;
        const std::string wrong = load(*fresh, names, data.data(), data.count());
        if (!wrong.empty()) return PyErr_Format(PyExc_ValueError, "%s", wrong.c_str());
        HolderTable holders;
        if (!holders.is_sound()) return nullptr;
        for (u32 number = 0; number < names.size(); number++) {
            const HolderName& name = names[number];
            Ref holder(PyObject_CallFunction(args[1], "y#I", name.worker.data(),
                                             static_cast<Py_ssize_t>(name.worker.size()), name.dp_rank));
            if (!holder || !holders.add(holder.get(), number)) return nullptr;
        }
        if (holders.size() != names.size()) return PyErr_Format(PyExc_ValueError, "holders that come twice");
        fresh->stats = state->index->stats;
        state->index.swap(fresh);
        state->holders.swap(holders);
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
    return Py_NewRef(Py_None);
}

PyObject* index_holders(PyObject* self, void*) {
    return guarded(self, [](IndexState& state) -> PyObject* {
        const std::vector<u32> numbers = state.index->in_order();
        Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
        if (!tuple) return nullptr;
        for (std::size_t i = 0; i < numbers.size(); i++) {
            PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), Py_NewRef(state.holders.object(numbers[i])));
        }
        return tuple.release();
    });
}

/// In the order of IndexStats.
PyObject* index_counts(PyObject* self, void*) {
    return guarded(self, [](IndexState& state) {
        const Stats& s = state.index->stats;
        return Py_BuildValue("(KKKKKKKKKK)", s.stored, s.duplicate, s.renamed, s.removed, s.cleared, s.evicted,
                             s.unknown_removals, s.orphan, s.malformed, s.refused);
    });
}

template <auto Number>
PyObject* index_number(PyObject* self, void*) {
    return guarded(self, [](IndexState& state) { return PyLong_FromSize_t(((*state.index).*Number)()); });
}

bool take_words(PyObject* set, std::vector<std::string>& words) {
    Ref all(PySequence_List(set));
    for (Py_ssize_t i = 0; all && i < PyList_GET_SIZE(all.get()); i++) {
        std::string_view word;
        if (!to_text(PyList_GET_ITEM(all.get(), i), word)) return false;
        words.emplace_back(word);
    }
    return static_cast<bool>(all);
}

bool take_tiers(PyObject* dict, std::vector<std::pair<std::string, u8>>& tiers) {
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(dict, &at, &key, &value)) {
        std::string_view word;
        u32 tier;
        if (!to_text(key, word) || !to_tier(value, tier)) return false;
        tiers.emplace_back(word, static_cast<u8>(tier));
    }
    return true;
}

int index_init(PyObject* self, PyObject* args, PyObject* keywords) {
    static const char* const names[] = {"max_entries",  "max_entries_per_holder", "tiers", "full_attention",
                                        "group_factor", "max_bytes",              "max_events", nullptr};
    long long max_entries, max_per_holder;
    PyObject *tiers, *full_attention;
    unsigned long long factor, max_bytes;
    unsigned max_events;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "LLO!OKKI", const_cast<char**>(names), &max_entries,
                                     &max_per_holder, &PyDict_Type, &tiers, &full_attention, &factor, &max_bytes,
                                     &max_events)) {
        return -1;
    }
    for (long long limit : {max_entries, max_per_holder}) {
        if (limit < 0 || limit > static_cast<long long>(MAX_ENTRIES)) {
            PyErr_Format(PyExc_ValueError, "a limit of %lld entries; from 0 to %u can be kept", limit, MAX_ENTRIES);
            return -1;
        }
    }
    try {
        auto state = std::make_unique<IndexState>();
        state->max_entries = static_cast<u32>(max_entries);
        state->max_per_holder = static_cast<u32>(max_per_holder);
        state->index = std::make_unique<Index>(state->max_entries, state->max_per_holder);
        state->dialect.group_factor = factor;
        state->dialect.max_bytes = max_bytes;
        state->dialect.max_events = max_events;
        if (!state->holders.is_sound() || !take_tiers(tiers, state->dialect.tiers) ||
            !take_words(full_attention, state->dialect.full_attention)) {
            return -1;
        }
        delete std::exchange(reinterpret_cast<IndexObject*>(self)->state, state.release());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

PyMethodDef index_methods[] = {
    {"store", method(index_store), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"remove", method(index_remove), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"clear", index_clear, METH_O, nullptr},
    {"drop", index_drop, METH_O, nullptr},
    {"apply_usual", method(index_apply_usual), METH_FASTCALL, nullptr},
    {"match", index_match, METH_O, nullptr},
    {"_digest", index_digest, METH_O, nullptr},
    {"blocks_of", index_blocks_of, METH_O, nullptr},
    {"_gaps", index_gaps, METH_O, nullptr},
    {"_named", index_named, METH_O, nullptr},
    {"_dump", index_dump, METH_O, nullptr},
    {"_load", method(index_load), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef index_properties[] = {
    {"holders", index_holders, nullptr, nullptr, nullptr},
    {"_counts", index_counts, nullptr, nullptr, nullptr},
    {"num_blocks", index_number<&Index::num_blocks>, nullptr, nullptr, nullptr},
    {"num_entries", index_number<&Index::num_entries>, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot index_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(allocate<IndexObject>)},
    {Py_tp_init, reinterpret_cast<void*>(index_init)},
    {Py_tp_dealloc, reinterpret_cast<void*>(deallocate<IndexObject>)},
    {Py_tp_methods, index_methods},
    {Py_tp_getset, index_properties},
    {0, nullptr},
};

PyType_Spec index_spec = {"router._native.Index", sizeof(IndexObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                          index_slots};

// --- chain counts ---

struct ChainsState {
    std::unique_ptr<Chains> chains = std::make_unique<Chains>();
    HolderTable holders;
};

struct ChainsObject {
    PyObject_HEAD
    ChainsState* state;
};

/// Run `body(state)`; without memory all counts are forgotten and MemoryError is raised.
template <class Body>
PyObject* on_chains(PyObject* self, Body body) {
    ChainsState* state = reinterpret_cast<ChainsObject*>(self)->state;
    if (!state) return PyErr_Format(PyExc_RuntimeError, "the counts were not initialised");
    try {
        return body(*state);
    } catch (const std::bad_alloc&) {
        try {
            state->holders.clear();
            state->chains = std::make_unique<Chains>();
        } catch (const std::bad_alloc&) {
            Py_FatalError("no memory for empty counts");
        }
        return PyErr_NoMemory();
    }
}

/// What uses nothing any more is not remembered.
bool settle(ChainsState& state, u32 number) {
    if (state.chains->blocks_of(number)) return true;
    state.chains->close(number);
    return state.holders.remove(number);
}

PyObject* chains_add(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Integers chain;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "the arguments are holder, hashes");
    if (!chain.take(args[1], 8, "Q")) return nullptr;
    return on_chains(self, [&](ChainsState& state) -> PyObject* {
        u32 number = state.holders.find(args[0]);
        if (number == FAILED) return nullptr;
        if (!chain.count()) return Py_NewRef(Py_None);
        if (number == NONE && !state.holders.add(args[0], number = state.chains->open())) {
            state.chains->close(number);
            return nullptr;
        }
        state.chains->add(number, chain.data(), chain.count());
        return Py_NewRef(Py_None);
    });
}

PyObject* chains_discard(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Integers chain;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "the arguments are holder, hashes");
    if (!chain.take(args[1], 8, "Q")) return nullptr;
    return on_chains(self, [&](ChainsState& state) -> PyObject* {
        const u32 number = state.holders.find(args[0]);
        if (number == FAILED) return nullptr;
        if (number == NONE) return Py_NewRef(Py_None);
        state.chains->discard(number, chain.data(), chain.count());
        return settle(state, number) ? Py_NewRef(Py_None) : nullptr;
    });
}

PyObject* chains_drop(PyObject* self, PyObject* holder) {
    return on_chains(self, [&](ChainsState& state) -> PyObject* {
        const u32 number = state.holders.find(holder);
        if (number == FAILED) return nullptr;
        if (number == NONE) return Py_NewRef(Py_None);
        state.chains->drop(number);
        return settle(state, number) ? Py_NewRef(Py_None) : nullptr;
    });
}

PyObject* chains_match(PyObject* self, PyObject* hashes) {
    Integers prompt;
    if (!prompt.take(hashes, 8, "Q")) return nullptr;
    return on_chains(self, [&](ChainsState& state) -> PyObject* {
        Ref found(PyDict_New());
        if (!found) return nullptr;
        for (const Reach& reach : state.chains->match(prompt.data(), prompt.count())) {
            Ref depth(PyLong_FromUnsignedLong(reach.depth[0]));
            if (!depth || PyDict_SetItem(found.get(), state.holders.object(reach.holder), depth.get()) < 0) {
                return nullptr;
            }
        }
        return found.release();
    });
}

PyObject* chains_blocks_of(PyObject* self, PyObject* holder) {
    return on_chains(self, [&](ChainsState& state) -> PyObject* {
        const u32 number = state.holders.find(holder);
        if (number == FAILED) return nullptr;
        return PyLong_FromUnsignedLong(number == NONE ? 0 : state.chains->blocks_of(number));
    });
}

PyObject* chains_num_blocks(PyObject* self, void*) {
    return on_chains(self, [](ChainsState& state) { return PyLong_FromUnsignedLong(state.chains->num_blocks()); });
}

int chains_init(PyObject* self, PyObject* args, PyObject*) {
    if (!PyArg_ParseTuple(args, "")) return -1;
    try {
        auto state = std::make_unique<ChainsState>();
        if (!state->holders.is_sound()) return -1;
        delete std::exchange(reinterpret_cast<ChainsObject*>(self)->state, state.release());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

PyMethodDef chains_methods[] = {
    {"add", method(chains_add), METH_FASTCALL, nullptr},
    {"discard", method(chains_discard), METH_FASTCALL, nullptr},
    {"drop", chains_drop, METH_O, nullptr},
    {"match", chains_match, METH_O, nullptr},
    {"blocks_of", chains_blocks_of, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef chains_properties[] = {
    {"num_blocks", chains_num_blocks, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot chains_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(allocate<ChainsObject>)},
    {Py_tp_init, reinterpret_cast<void*>(chains_init)},
    {Py_tp_dealloc, reinterpret_cast<void*>(deallocate<ChainsObject>)},
    {Py_tp_methods, chains_methods},
    {Py_tp_getset, chains_properties},
    {0, nullptr},
};

PyType_Spec chains_spec = {"router._native.ChainCounts", sizeof(ChainsObject), 0, Py_TPFLAGS_DEFAULT, chains_slots};

// --- the module ---

int add_types(PyObject* module) {
    for (PyType_Spec* spec : {&index_spec, &chains_spec}) {
        Ref type(PyType_FromSpec(spec));
        if (!type || PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type.get())) < 0) return -1;
    }
    return 0;
}

PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(add_types)},
    {0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "router._native", nullptr, 0, nullptr, module_slots, nullptr, nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&module); }
