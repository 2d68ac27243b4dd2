// Every operator without a kernel of its own: the CPU kernel, run later on the stream.
#pragma once

#include "torch_headers.h"

namespace laggard {

void run_on_stream(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace laggard
