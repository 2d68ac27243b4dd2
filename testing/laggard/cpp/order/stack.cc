#include "order/stack.h"

#include <torch/csrc/autograd/function.h>

#include <array>
#include <atomic>

#include "torch_headers.h"

namespace laggard {

struct CapturedStack {
  std::shared_ptr<torch::CapturedTraceback> frames;
  std::string node;  // of autograd, if its thread launched
};

namespace {

std::atomic<bool> enabled{true};
constexpr int kMostFrames = 20;
constexpr std::array kForeign = {"/site-packages/torch/", "/_pytest/", "/pluggy/", "/pytest/", "/runpy.py", "<frozen "};

bool is_foreign(const std::string& file) {
  return std::any_of(kForeign.begin(), kForeign.end(),
                     [&](const char* part) { return file.find(part) != std::string::npos; });
}

// All frames if every one is foreign: a line of PyTorch is better than none.
std::string lines_of(const CapturedStack& stack, bool with_foreign) {
  const auto symbols = torch::symbolize({stack.frames.get()});
  std::string text;
  int frames = 0;
  for (uint64_t index : symbols.tracebacks.at(0)) {
    const auto& frame = symbols.all_frames[index];
    if (!with_foreign && is_foreign(frame.filename)) continue;
    if (++frames > kMostFrames) return text + "    ...\n";
    text += "    " + frame.filename + ":" + std::to_string(frame.lineno) + " in " + frame.funcname + "\n";
  }
  return text;
}

}  // namespace

void set_stacks(bool on) { enabled = on; }

PythonStack take_stack() {
  if (!enabled || !Py_IsInitialized()) return nullptr;
  const auto node = torch::autograd::get_current_node();
  return std::make_shared<CapturedStack>(
      CapturedStack{torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false),
                    node ? node->name() : std::string()});
}

PythonStack take_stack_if_cheap() { return Py_IsInitialized() && PyGILState_Check() ? take_stack() : nullptr; }

std::string text_of(const PythonStack& stack) {
  if (!stack) return "    (no Python frame: stacks are off, or the memory was freed by another thread)\n";
  std::string text = stack->node.empty() ? "" : "    in " + stack->node + " of autograd\n";
  std::string lines = lines_of(*stack, false);
  if (lines.empty()) lines = lines_of(*stack, true);
  text += lines;
  return text.empty() ? "    (no Python frame: a thread of the host without one)\n" : text;
}

}  // namespace laggard
