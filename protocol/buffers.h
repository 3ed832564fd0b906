// What the native modules share in being called from Python.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstdint>

namespace kvmesh {

/// A function of Python's faster calls (METH_FASTCALL) for a table of methods.
template <class Function>
PyCFunction method(Function function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

/// A borrowed view of contiguous integers of `size` bytes, or of plain bytes, as long as it lives.
class Integers {
   public:
    Integers() = default;
    Integers(const Integers&) = delete;
    Integers& operator=(const Integers&) = delete;
    ~Integers() {
        if (view_.obj) PyBuffer_Release(&view_);
    }

    /// False: a Python error is set (TypeError: no buffer; ValueError: not such integers).
    bool take(PyObject* object, std::size_t size, const char* code) {
        if (PyObject_GetBuffer(object, &view_, PyBUF_CONTIG_RO) < 0) {
            view_.obj = nullptr;
            if (PyErr_ExceptionMatches(PyExc_BufferError)) refuse(size, code, "a buffer with gaps is");
            return false;
        }
        std::size_t bytes = static_cast<std::size_t>(view_.len), item = static_cast<std::size_t>(view_.itemsize);
        if ((item == 1 || item == size) && bytes % size == 0) {
            count_ = bytes / size;
            return true;
        }
        char found[64];
        PyOS_snprintf(found, sizeof found, "%zu bytes in items of %zu are", bytes, item);
        return refuse(size, code, found);
    }

    const std::uint8_t* data() const { return static_cast<const std::uint8_t*>(view_.buf); }
    std::size_t count() const { return count_; }

   private:
    static bool refuse(std::size_t size, const char* code, const char* found) {
        PyErr_Format(PyExc_ValueError,
                     "%s not contiguous integers of %zu bytes; pass array('%s') or packed bytes", found, size, code);
        return false;
    }

    Py_buffer view_{};
    std::size_t count_ = 0;
};

}  // namespace kvmesh
