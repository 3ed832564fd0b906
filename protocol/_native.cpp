// kvmesh.protocol._native: hashing at the speed of the machine. Its specification is protocol/hashing.py.

#include "buffers.h"
#include "xxh3.h"

using namespace kvmesh;

namespace {

bool to_u64(PyObject* number, u64& value) {
    value = PyLong_AsUnsignedLongLong(number);
    return !(value == static_cast<u64>(-1) && PyErr_Occurred());
}

bool wrong_arguments(const char* wanted) {
    PyErr_Format(PyExc_TypeError, "the arguments are %s", wanted);
    return false;
}

PyObject* xxh3_64(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Integers data;
    u64 seed = 0;
    if (count != 2 && !wrong_arguments("data, seed")) return nullptr;
    if (!data.take(args[0], 1, "B") || !to_u64(args[1], seed)) return nullptr;
    return PyLong_FromUnsignedLongLong(Xxh3(seed)(data.data(), data.count()));
}

PyObject* sequence_hash_bytes(PyObject*, PyObject* const* args, Py_ssize_t count) {
    static const Xxh3 usual(CHAIN_SEED);
    Integers tokens;
    u64 seed = CHAIN_SEED, parent = 0;
    if ((count < 2 || count > 4) && !wrong_arguments("tokens, block_size, seed, parent")) return nullptr;
    if (!tokens.take(args[0], 4, "I")) return nullptr;
    Py_ssize_t block_size = PyLong_AsSsize_t(args[1]);
    if (block_size == -1 && PyErr_Occurred()) return nullptr;
    if (block_size < 1) return PyErr_Format(PyExc_ValueError, "block size %zd; it is at least 1", block_size);
    if (count > 2 && !to_u64(args[2], seed)) return nullptr;
    const bool has_parent = count > 3 && args[3] != Py_None;
    if (has_parent && !to_u64(args[3], parent)) return nullptr;
    std::size_t blocks = tokens.count() / static_cast<std::size_t>(block_size);
    PyObject* packed = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(8 * blocks));
    if (!packed) return nullptr;
    u64* out = reinterpret_cast<u64*>(PyBytes_AS_STRING(packed));
    const u64* before = has_parent ? &parent : nullptr;
    const std::size_t block_bytes = 4 * static_cast<std::size_t>(block_size);
    if (seed == CHAIN_SEED) {
        hash_chain(usual, tokens.data(), block_bytes, blocks, before, out);
    } else {
        hash_chain(Xxh3(seed), tokens.data(), block_bytes, blocks, before, out);
    }
    return packed;
}

PyMethodDef methods[] = {
    {"xxh3_64", method(xxh3_64), METH_FASTCALL, nullptr},
    {"sequence_hash_bytes", method(sequence_hash_bytes), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "kvmesh.protocol._native", nullptr, 0, methods, nullptr, nullptr, nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&module); }
