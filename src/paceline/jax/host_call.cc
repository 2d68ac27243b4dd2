// An XLA custom call that hands its buffers to a Python function, in place and without a copy.
//
// Built on first use by host_call_library.py against jaxlib's headers. XLA calls from a thread of
// its own, without the GIL. The Python function gets a number that names what to do, and the
// addresses of inputs and outputs; it knows shapes and dtypes.
#include <Python.h>

#include <string>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static PyObject* handler = nullptr;

extern "C" void paceline_set_handler(PyObject* function) {
  Py_INCREF(function);
  handler = function;
}

static std::string take_error() {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  PyObject* text = value == nullptr ? nullptr : PyObject_Str(value);
  const char* bytes = text == nullptr ? nullptr : PyUnicode_AsUTF8(text);
  std::string found = bytes == nullptr ? "error without a text" : bytes;
  PyErr_Clear();
  Py_XDECREF(text);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return found;
}

template <class Buffers, class Address>
static PyObject* addresses(const Buffers& buffers, Address address) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(buffers.size()));
  for (size_t i = 0; list != nullptr && i < buffers.size(); ++i)
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), PyLong_FromVoidPtr(address(buffers, i)));
  return list;
}

static ffi::Error call(int64_t number, ffi::RemainingArgs inputs, ffi::RemainingRets outputs) {
  const PyGILState_STATE gil = PyGILState_Ensure();
  PyObject* in =
      addresses(inputs, [](const auto& all, size_t i) { return all.template get<ffi::AnyBuffer>(i)->untyped_data(); });
  PyObject* out = addresses(
      outputs, [](const auto& all, size_t i) { return (*all.template get<ffi::AnyBuffer>(i))->untyped_data(); });
  PyObject* done = PyObject_CallFunction(handler, "LNN", static_cast<long long>(number), in, out);
  const std::string error = done == nullptr ? take_error() : "";
  Py_XDECREF(done);
  PyGILState_Release(gil);
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal(error);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(paceline_host_call, call,
                              ffi::Ffi::Bind().Attr<int64_t>("number").RemainingArgs().RemainingRets());
