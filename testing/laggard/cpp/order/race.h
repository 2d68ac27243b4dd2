// The race detector: which launches touched a block, and whether the next one has seen them.
#pragma once

#include <string>
#include <vector>

#include "order/clock.h"
#include "order/region.h"
#include "order/stack.h"

namespace laggard {

struct Access {
  Region region;
  int stream;
  uint64_t launch;  // component `stream` of its clock
  bool writes;
  std::string op;
  PythonStack stack;
};

// Accesses to one block that a later launch may race with. guarded by: the device lock
using AccessLog = std::vector<Access>;

struct Race {
  Access earlier, later;

  std::string summary() const;
  std::string report() const;  // with both Python stacks; takes the GIL
};

// Return races between `access` and the log, then add it and drop what it makes superfluous.
std::vector<Race> check_and_log(AccessLog& log, Access access, const VectorClock& seen);

}  // namespace laggard
