// kvmesh.frontend._native: the way of a token that is text alone. Its specification is PlainTokenLane in frontend/lane.py.

#include "../protocol/buffers.h"
#include "native/tokens.h"

#include <cstring>
#include <structmember.h>

using namespace kvmesh;

namespace {

struct Lane {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject* now;
    PyObject* write;
    PyObject* head;
    PyObject* tail;
    PyObject* texts;      // a dict, or None
    PyObject* generated;  // a list
    PyObject* take;
    Py_ssize_t most;    // messages that may pass before one goes to `take`
    Py_ssize_t passed;  // that it has not been told of
    Py_ssize_t num_tokens;
    Py_ssize_t limit;  // of the length of `generated`
    PyObject* last_token_s;
};

PyObject* long_way(Lane* lane, PyObject* raw) {
    if (!lane->take) {
        PyErr_SetString(PyExc_RuntimeError, "the lane is not bound to a stream");
        return nullptr;
    }
    PyObject* passed = PyLong_FromSsize_t(lane->passed);
    if (!passed) return nullptr;
    lane->passed = 0;
    PyObject* args[] = {raw, passed};
    PyObject* take = Py_NewRef(lane->take);  // the call may set another one
    PyObject* wants = PyObject_Vectorcall(take, args, 2, nullptr);
    Py_DECREF(take);
    Py_DECREF(passed);
    return wants;
}

/// The chunk for `count` tokens; null without an error: their text is not plain. `boxed`: the ids for Python, owned.
PyObject* chunk_of(Lane* lane, const std::uint32_t* tokens, std::size_t count, PyObject** boxed, std::size_t& kept) {
    PyObject* found[MOST_TOKENS];
    std::size_t have = 0;
    Py_ssize_t size = PyBytes_GET_SIZE(lane->head) + PyBytes_GET_SIZE(lane->tail);
    PyObject* chunk = nullptr;
    PyObject* texts = Py_NewRef(lane->texts);
    for (; have < count; have++) {
        PyObject* token = PyLong_FromUnsignedLong(tokens[have]);
        if (!token) goto done;
        boxed[kept++] = token;
        PyObject* text = PyDict_GetItemWithError(texts, token);  // borrowed
        if (text) {
            Py_INCREF(text);
        } else if (PyErr_Occurred() || !(text = PyObject_GetItem(texts, token))) {  // the latter has it made
            goto done;
        }
        found[have] = text;
        if (!PyBytes_Check(text) || !PyBytes_GET_SIZE(text)) {
            have++;
            goto done;
        }
        size += PyBytes_GET_SIZE(text);
    }
    if ((chunk = PyBytes_FromStringAndSize(nullptr, size))) {
        char* out = PyBytes_AS_STRING(chunk);
        auto put = [&out](PyObject* piece) {
            std::memcpy(out, PyBytes_AS_STRING(piece), static_cast<std::size_t>(PyBytes_GET_SIZE(piece)));
            out += PyBytes_GET_SIZE(piece);
        };
        put(lane->head);
        for (std::size_t i = 0; i < count; i++) put(found[i]);
        put(lane->tail);
    }
done:
    Py_DECREF(texts);
    for (std::size_t i = 0; i < have; i++) Py_DECREF(found[i]);
    return chunk;
}

PyObject* pass(Lane* lane, const std::uint32_t* tokens, std::size_t count, PyObject* raw) {
    PyObject* boxed[MOST_TOKENS];
    std::size_t kept = 0;
    PyObject* wants = nullptr;
    PyObject* chunk = chunk_of(lane, tokens, count, boxed, kept);
    if (!chunk) {
        if (!PyErr_Occurred()) wants = long_way(lane, raw);
    } else if (PyObject* now = PyObject_CallNoArgs(lane->now)) {
        bool sound = true;
        for (std::size_t i = 0; i < count && sound; i++) sound = PyList_Append(lane->generated, boxed[i]) == 0;
        Py_SETREF(lane->last_token_s, now);
        lane->num_tokens += static_cast<Py_ssize_t>(count);
        lane->passed++;
        if (sound) wants = PyObject_CallOneArg(lane->write, chunk);
    }
    Py_XDECREF(chunk);
    for (std::size_t i = 0; i < kept; i++) Py_DECREF(boxed[i]);
    return wants;
}

PyObject* lane_call(PyObject* self, PyObject* const* args, std::size_t flags, PyObject* keywords) {
    Lane* lane = reinterpret_cast<Lane*>(self);
    if (PyVectorcall_NARGS(flags) != 1 || (keywords && PyTuple_GET_SIZE(keywords))) {
        PyErr_SetString(PyExc_TypeError, "a lane takes one message");
        return nullptr;
    }
    if (!lane->take || lane->texts == Py_None || lane->passed >= lane->most) return long_way(lane, args[0]);
    Py_buffer view;
    std::uint32_t tokens[MOST_TOKENS];
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) < 0) return nullptr;
    const std::size_t count =
        TokenReader(static_cast<const std::uint8_t*>(view.buf), static_cast<std::size_t>(view.len)).read(tokens);
    PyBuffer_Release(&view);
    const Py_ssize_t left = lane->limit - PyList_GET_SIZE(lane->generated);
    const bool fits = static_cast<Py_ssize_t>(count) <= left;
    return count && fits ? pass(lane, tokens, count, args[0]) : long_way(lane, args[0]);
}

PyObject* lane_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
    static const char* names[] = {"now", "write", "head", "tail", nullptr};
    PyObject *now, *write, *head, *tail;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOSS", const_cast<char**>(names), &now, &write, &head, &tail)) {
        return nullptr;
    }
    PyObject* self = type->tp_alloc(type, 0);
    if (!self) return nullptr;
    Lane* lane = reinterpret_cast<Lane*>(self);
    lane->call = lane_call;
    lane->now = Py_NewRef(now);
    lane->write = Py_NewRef(write);
    lane->head = Py_NewRef(head);
    lane->tail = Py_NewRef(tail);
    lane->texts = Py_NewRef(Py_None);
    lane->generated = PyList_New(0);
    lane->limit = PY_SSIZE_T_MAX;
    lane->last_token_s = PyFloat_FromDouble(0.0);
    if (!lane->generated || !lane->last_token_s) Py_CLEAR(self);
    return self;
}

PyObject* lane_bind(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Lane* lane = reinterpret_cast<Lane*>(self);
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "the arguments are take, most");
        return nullptr;
    }
    const Py_ssize_t most = PyLong_AsSsize_t(args[1]);
    if (most == -1 && PyErr_Occurred()) return nullptr;
    Py_XSETREF(lane->take, Py_NewRef(args[0]));
    lane->most = most;
    lane->passed = 0;
    return Py_NewRef(Py_None);
}

PyObject* lane_release(PyObject* self, PyObject*) {
    Py_CLEAR(reinterpret_cast<Lane*>(self)->take);
    return Py_NewRef(Py_None);
}

PyObject* lane_take_count(PyObject* self, PyObject*) {
    Lane* lane = reinterpret_cast<Lane*>(self);
    PyObject* count = PyLong_FromSsize_t(lane->num_tokens);
    if (count) lane->num_tokens = 0;
    return count;
}

bool is_dict_or_none(PyObject* object) { return object == Py_None || PyDict_Check(object); }
bool is_list(PyObject* object) { return PyList_Check(object); }

template <PyObject* Lane::* member>
PyObject* lane_get(PyObject* self, void*) {
    PyObject* held = reinterpret_cast<Lane*>(self)->*member;
    return Py_NewRef(held ? held : Py_None);
}

template <PyObject* Lane::* member, bool (*fits)(PyObject*)>
int lane_set(PyObject* self, PyObject* object, void* wanted) {
    if (!object || !fits(object)) {
        PyErr_Format(PyExc_TypeError, "this is to be %s", static_cast<const char*>(wanted));
        return -1;
    }
    Py_XSETREF(reinterpret_cast<Lane*>(self)->*member, Py_NewRef(object));
    return 0;
}

int lane_traverse(PyObject* self, visitproc visit, void* arg) {
    Lane* lane = reinterpret_cast<Lane*>(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(lane->now);
    Py_VISIT(lane->write);
    Py_VISIT(lane->texts);
    Py_VISIT(lane->generated);
    Py_VISIT(lane->take);
    return 0;
}

int lane_clear(PyObject* self) {
    Lane* lane = reinterpret_cast<Lane*>(self);
    Py_CLEAR(lane->take);  // first: without it the lane passes nothing
    Py_CLEAR(lane->now);
    Py_CLEAR(lane->write);
    Py_CLEAR(lane->texts);
    Py_CLEAR(lane->generated);
    return 0;
}

void lane_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    lane_clear(self);
    Lane* lane = reinterpret_cast<Lane*>(self);
    Py_CLEAR(lane->head);
    Py_CLEAR(lane->tail);
    Py_CLEAR(lane->last_token_s);
    type->tp_free(self);
    Py_DECREF(type);
}

PyMethodDef lane_methods[] = {
    {"bind", method(lane_bind), METH_FASTCALL, nullptr},
    {"release", lane_release, METH_NOARGS, nullptr},
    {"take_count", lane_take_count, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef lane_members[] = {
    {"last_token_s", T_OBJECT, offsetof(Lane, last_token_s), READONLY, nullptr},
    {"limit", T_PYSSIZET, offsetof(Lane, limit), 0, nullptr},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Lane, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

char a_dict_or_none[] = "a dict, or None", a_list[] = "a list";

PyGetSetDef lane_properties[] = {
    {"texts", lane_get<&Lane::texts>, lane_set<&Lane::texts, is_dict_or_none>, nullptr, a_dict_or_none},
    {"generated", lane_get<&Lane::generated>, lane_set<&Lane::generated, is_list>, nullptr, a_list},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

template <class Function>
void* slot(Function function) {
    return reinterpret_cast<void*>(function);
}

PyType_Slot lane_slots[] = {
    {Py_tp_new, slot(lane_new)},
    {Py_tp_call, slot(PyVectorcall_Call)},
    {Py_tp_traverse, slot(lane_traverse)},
    {Py_tp_clear, slot(lane_clear)},
    {Py_tp_dealloc, slot(lane_dealloc)},
    {Py_tp_methods, lane_methods},
    {Py_tp_members, lane_members},
    {Py_tp_getset, lane_properties},
    {0, nullptr},
};

PyType_Spec lane_spec = {"kvmesh.frontend._native.TokenLane", sizeof(Lane), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, lane_slots};

int add_types(PyObject* module) {
    PyObject* type = PyType_FromModuleAndSpec(module, &lane_spec, nullptr);
    const int outcome = type ? PyModule_AddObjectRef(module, "TokenLane", type) : -1;
    Py_XDECREF(type);
    return outcome;
}

PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, slot(add_types)},
    {0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "kvmesh.frontend._native", nullptr, 0, nullptr, module_slots, nullptr, nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&module); }
