// The hook of a small parameter, which autograd calls in each backward pass: its gradient is ready.
//
// A model may have thousands of such parameters, each with a hook of its own. In Python the call of a function whose
// closure is not in the cache costs more than what it does. The state stays where it is: attributes of Python objects
// (data_parallel/bucket.py).
#include "ready_hook.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

struct Names {
  PyObject* ready = PyUnicode_InternFromString("ready");
  PyObject* is_open = PyUnicode_InternFromString("is_open");
  PyObject* missing = PyUnicode_InternFromString("missing");
  PyObject* stream_id = PyUnicode_InternFromString("stream_id");
};

const Names& names() {
  static const Names made;
  return made;
}

nb::object get(nb::handle thing, PyObject* name) {
  PyObject* found = PyObject_GetAttr(thing.ptr(), name);
  if (!found) throw nb::python_error();
  return nb::steal(found);
}

void set(nb::handle thing, PyObject* name, nb::handle value) {
  if (PyObject_SetAttr(thing.ptr(), name, value.ptr())) throw nb::python_error();
}

struct ReadyHook {
  nb::object slot, bucket;
  nb::object on_ready, on_full;  // (slot, parameter): not the usual case; (): all gradients of the bucket are ready
  nb::object streams;            // of the bucket, on a device; else None
  nb::object current, seen;      // of `streams`: what returns the current stream, and those that were noted, by id

  ReadyHook(nb::object slot, nb::object on_ready, nb::object on_full, nb::object streams)
      : slot(slot), bucket(slot.attr("bucket")), on_ready(on_ready), on_full(on_full), streams(streams) {
    if (streams.is_none()) return;
    current = streams.attr("current");
    seen = nb::object(streams.attr("seen"));
    if (!PyDict_Check(seen.ptr())) throw nb::type_error("streams.seen is no dict");
  }

  void note_stream() const {
    const nb::object stream = current();
    const nb::object id = get(stream, names().stream_id);
    if (PyDict_SetItem(seen.ptr(), id.ptr(), stream.ptr())) throw nb::python_error();
  }

  void run(nb::handle parameter) const {
    if (current.is_valid()) note_stream();
    if (get(slot, names().ready).ptr() != Py_False || get(bucket, names().is_open).ptr() != Py_True) {
      on_ready(slot, parameter);
      return;
    }
    set(slot, names().ready, nb::handle(Py_True));
    const long left = nb::cast<long>(get(bucket, names().missing)) - 1;
    set(bucket, names().missing, nb::int_(left));
    if (left == 0) on_full();
  }
};

PyObject* call(PyObject* self, PyObject* arguments, PyObject*) {
  if (PyTuple_GET_SIZE(arguments) != 1) {
    PyErr_SetString(PyExc_TypeError, "a hook takes the parameter");
    return nullptr;
  }
  try {
    nb::inst_ptr<ReadyHook>(self)->run(PyTuple_GET_ITEM(arguments, 0));
  } catch (nb::python_error& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

// Hook, slot and parameter refer to each other, so the garbage collector has to see them.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const auto& hook = *nb::inst_ptr<ReadyHook>(self);
  for (const nb::object* held :
       {&hook.slot, &hook.bucket, &hook.on_ready, &hook.on_full, &hook.streams, &hook.current, &hook.seen})
    Py_VISIT(held->ptr());
  return 0;
}

int clear(PyObject* self) {
  auto& hook = *nb::inst_ptr<ReadyHook>(self);
  for (nb::object* held :
       {&hook.slot, &hook.bucket, &hook.on_ready, &hook.on_full, &hook.streams, &hook.current, &hook.seen})
    held->reset();
  return 0;
}

PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(call)},
                       {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {0, nullptr}};

}  // namespace

void register_ready_hook(nb::module_& m) {
  nb::class_<ReadyHook>(m, "ReadyHook", nb::type_slots(slots))
      .def(nb::init<nb::object, nb::object, nb::object, nb::object>(), "slot"_a, "on_ready"_a, "on_full"_a,
           "streams"_a.none());
}

}  // namespace paceline
