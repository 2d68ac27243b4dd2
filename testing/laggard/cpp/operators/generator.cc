#include "operators/generator.h"

#include <atomic>
#include <random>

namespace laggard {
namespace {

// State: the seed and how many kernels have drawn from it (the offset).
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) {
    device_ = c10::Device(kDeviceType, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  void set_current_seed(uint64_t seed) override {
    at::CPUGeneratorImpl::set_current_seed(seed);
    drawn = 0;
  }
  void set_offset(uint64_t offset) override { drawn = offset; }
  uint64_t get_offset() const override { return drawn; }
  uint64_t next() {
    const uint64_t seed = current_seed(), number = drawn++;
    std::seed_seq mix{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), static_cast<uint32_t>(number),
                      static_cast<uint32_t>(number >> 32)};
    uint32_t halves[2];
    mix.generate(halves, halves + 2);
    return uint64_t{halves[0]} << 32 | halves[1];
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "laggard: a generator's state has 16 bytes, this one has ", state.numel());
    const auto* words = static_cast<const uint64_t*>(state.data());
    set_current_seed(words[0]);
    drawn = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = current_seed();
    words[1] = drawn;
    return state.getIntrusivePtr();
  }

  std::atomic<uint64_t> drawn{0};
};

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kDevices; ++i) made->push_back(new_generator(static_cast<c10::DeviceIndex>(i)));
    return made;
  }();
  return generators->at(index_or_current(device));
}

at::Generator new_generator(c10::DeviceIndex device) { return at::make_generator<Generator>(index_or_current(device)); }

uint64_t next_seed(const at::Generator& generator, c10::DeviceIndex device) {
  const auto& chosen = generator.defined() ? generator : default_generator(device);
  TORCH_CHECK(chosen.device().type() == kDeviceType, "laggard: expected a generator of the device, found one of ",
              chosen.device());
  return static_cast<Generator*>(chosen.unsafeGetGeneratorImpl())->next();
}

}  // namespace laggard
