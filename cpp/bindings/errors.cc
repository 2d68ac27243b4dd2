// Conversion of errors of the core to Python exceptions.
#include "errors.h"

#include <nanobind/nanobind.h>

#include <cstring>

#include "paceline/base/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

const char* class_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::usage: return "UsageError";
    case ErrorKind::collective_mismatch: return "CollectiveMismatch";
    case ErrorKind::peer_lost: return "PeerLost";
    case ErrorKind::peer_timeout: return "PeerTimeout";
    case ErrorKind::generation_changed: return "GenerationChanged";
    case ErrorKind::bad_frame: return "BadFrame";
    case ErrorKind::shared_memory: return "SharedMemoryError";
  }
  return "PacelineError";
}

bool concerns_peer(ErrorKind kind) {
  return kind == ErrorKind::peer_lost || kind == ErrorKind::peer_timeout || kind == ErrorKind::generation_changed;
}

}  // namespace

// A peer may have sent the text, or it was cut in the middle of a character: bytes that are not UTF-8 are replaced.
nb::object text_of(const std::exception& error) {
  return nb::steal(PyUnicode_DecodeUTF8(error.what(), Py_ssize_t(std::strlen(error.what())), "replace"));
}

nb::object to_python(const Error& error) {
  nb::object type = nb::module_::import_("paceline.errors").attr(class_name(error.kind));
  if (!concerns_peer(error.kind)) return type(text_of(error));
  nb::object rank = error.rank < 0 ? nb::none() : nb::object(nb::int_(error.rank));
  return type(text_of(error), "rank"_a = rank);
}

void register_errors() {
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const Error& error) {
      nb::object exception = to_python(error);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
    }
  });
}

}  // namespace paceline
