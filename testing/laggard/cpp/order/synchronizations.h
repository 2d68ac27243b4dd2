// The counter of host synchronisations: every place where a host thread waited for the device.
#pragma once

#include <string>
#include <vector>

#include "order/stack.h"

namespace laggard {

struct Synchronization {
  std::string reason;  // "item", "Event.synchronize", "blocking copy" ...
  PythonStack stack;
  uint64_t thread;  // threading.get_ident()
};

void count_synchronization(const char* reason);
std::vector<Synchronization> take_synchronizations();
// A thread that plays hardware (the collective backend's) does not count.
void set_counted(bool counted);

}  // namespace laggard
