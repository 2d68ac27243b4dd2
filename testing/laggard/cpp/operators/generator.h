// Random numbers that do not depend on the schedule: a counter gives each random kernel its own seed.
#pragma once

#include "device.h"

namespace laggard {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
// The seed of the next random kernel. An undefined generator means the device's default one.
uint64_t next_seed(const at::Generator& generator, c10::DeviceIndex device);

}  // namespace laggard
