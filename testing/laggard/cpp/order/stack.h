// Python stacks: taken at every launch, turned into text only for a report.
#pragma once

#include <memory>
#include <string>

namespace laggard {

struct CapturedStack;
using PythonStack = std::shared_ptr<CapturedStack>;

// Return the Python stack of this thread. Takes the GIL: never call it with the device lock held.
PythonStack take_stack();
// The same where the GIL may not be taken (a free under a foreign lock); empty if this thread lacks it.
PythonStack take_stack_if_cheap();
// Return lines "file:line in function", innermost first, without those of PyTorch and pytest. A thread
// of autograd has no Python frame; then the line names the function whose backward ran. Takes the GIL.
std::string text_of(const PythonStack& stack);

// Stacks cost a few microseconds for each launch; benchmarks switch them off.
void set_stacks(bool on);

}  // namespace laggard
