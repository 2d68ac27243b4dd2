// What PyTorch asks a device for: the guard (current device, streams, events) and the hooks (the rest).
#include <pthread.h>

#include "operators/generator.h"
#include "order/launch.h"
#include "memory/device_memory.h"
#include "memory/pinned_memory.h"

namespace laggard {
namespace {

std::atomic<bool> forked{false};
std::array<std::atomic<int>, kDevices> streams_made{};

struct Event {
  CompletionPtr last;  // of the newest record
};

CompletionPtr last_of(void* event) { return event ? static_cast<Event*>(event)->last : nullptr; }

void check_index(int index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "laggard: there is no device ", index, "; indices are 0 to ",
              kDevices - 1);
}

// Serves torch.Stream, torch.Event and the streams of autograd.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device getDevice() const override { return {kDeviceType, current_device}; }
  void setDevice(c10::Device device) const override {
    check_index(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override {
    const int index = index_or_current(device.index());
    return make_stream(index, current_stream_id[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make_stream(index_or_current(device.index()), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const int index = index_or_current(device.index());
    return make_stream(index, 1 + streams_made[index]++ % (kStreamsPerDevice - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int index = stream.device_index();
    const auto old = make_stream(index, current_stream_id[index]);
    current_stream_id[index] = static_cast<int>(stream.id());
    return old;
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto& queue = queue_of(stream_of(stream));
    queue.demand_all();
    return queue.is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(stream_of(stream), "Stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(index_or_current(device), "synchronize");
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &queue_of(stream_of(stream)); }
  void recordDataPtrOnStream(const at::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream_of(stream));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->last = laggard::record(stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (auto last = last_of(event)) wait(stream_of(stream), last);
  }
  bool queryEvent(void* event) const override {
    auto last = last_of(event);
    return !last || host_query(last);
  }
  void synchronizeEvent(void* event) const override {
    if (auto last = last_of(event)) synchronize_event(last);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto begin = last_of(from), end = last_of(to);
    TORCH_CHECK(begin && end && begin->is_set() && end->is_set(), "laggard: both events must be recorded and complete");
    return end->time_ms() - begin->time_ms();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    check_index(device);
    current_device = device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto old = current_device;
    setCurrentDevice(device);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override { return pinned_block_of(address) != nullptr; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* address) const override {
    const int device = device_of(address);
    TORCH_CHECK(device >= 0, "laggard: ", address, " is no device memory");
    return {kDeviceType, static_cast<c10::DeviceIndex>(device)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto data = device_allocator().allocate(bytes);
    if (const size_t kept = std::min(bytes, storage.nbytes()))
      device_allocator().copy_data(data.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  pthread_atfork(nullptr, nullptr, [] { forked = has_threads(); });
  return true;
}();

}  // namespace

bool is_in_bad_fork() { return forked; }

void refuse_after_fork() {
  TORCH_CHECK(!forked,
              "laggard: this process was forked from one that had used the device, and has no stream threads; ",
              "start processes with the method spawn");
}

}  // namespace laggard
