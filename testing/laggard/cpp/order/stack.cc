#include "order/stack.h"

#include <atomic>

#include "torch_headers.h"

namespace laggard {
namespace {
std::atomic<bool> enabled{true};
}

void set_stacks(bool on) { enabled = on; }

PythonStack take_stack() {
  if (!enabled || !Py_IsInitialized()) return nullptr;
  return torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
}

PythonStack take_stack_if_cheap() { return Py_IsInitialized() && PyGILState_Check() ? take_stack() : nullptr; }

std::string text_of(const PythonStack& stack) {
  std::string text;
  if (stack) {
    const auto symbols = torch::symbolize({stack.get()});
    for (uint64_t index : symbols.tracebacks.at(0)) {
      const auto& frame = symbols.all_frames[index];
      text += "    " + frame.filename + ":" + std::to_string(frame.lineno) + " in " + frame.funcname + "\n";
    }
  }
  return text.empty() ? "    (no Python frame: a thread of autograd, or stacks are off)\n" : text;
}

}  // namespace laggard
