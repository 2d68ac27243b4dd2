// What a device is: how many there are, how many streams each has, and which ones are current.
#pragma once

#include "torch_headers.h"

namespace laggard {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr int kStreamsPerDevice = 32;  // stream 0 is the default; the others are handed out in turn, as CUDA does
constexpr int kStreams = kDevices * kStreamsPerDevice;
constexpr int kPoison = 0xFF;  // fills memory that holds no value: NaN for floats, -1 for integers

// Streams of all devices are numbered from 0 to kStreams - 1 wherever this code says "stream".
// Containers of this device are never destroyed (`auto& x = *new ...`): threads of streams and of autograd use them
// until the process is gone.

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::array<int, kDevices> current_stream_id{};

inline int stream_of(c10::Stream s) { return s.device_index() * kStreamsPerDevice + static_cast<int>(s.id()); }
inline int current_stream(int device) { return device * kStreamsPerDevice + current_stream_id[device]; }
inline c10::Stream make_stream(int device, int id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device)), id);
}
inline c10::DeviceIndex index_or_current(c10::DeviceIndex index) { return index < 0 ? current_device : index; }

// Raise in a process that was forked after the device was used: its stream threads do not exist there.
void refuse_after_fork();
bool is_in_bad_fork();

}  // namespace laggard
