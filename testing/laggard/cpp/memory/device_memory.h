// Device memory that the host cannot touch, and its allocator.
//
// Each device is one memory file that is mapped twice. Tensors have addresses in the first mapping,
// which has no access rights: a host that reads or writes there crashes. Kernels use the second one.
// (Changing the rights of one mapping around each kernel would open it for every thread.)
//
// Freed blocks are reused at once, by the next allocation of that size on the same stream, and are
// filled with NaN on their stream. The fill counts as a write: a stream that still reads them and was
// not named by record_stream is reported as a race.
#pragma once

#include "order/race.h"

namespace laggard {

c10::DeviceAllocator& device_allocator();

char* kernel_address(const void* device_address);  // raises for other addresses
int device_of(const void* address);                // -1: no device memory
AccessLog* device_log_of(const void* address);     // device lock held; nullptr: no device memory
void record_stream(const at::DataPtr& data, int stream);

}  // namespace laggard
