#include "paceline/reduce/bits_loops.h"
#include "paceline/reduce/blockwise.h"
#include "paceline/reduce/kernel_set.h"
#include "paceline/reduce/stochastic.h"

namespace paceline {
namespace {

void reduce_portable(const Reduction& what, const void* const* sources, size_t num_sources, void* const* destinations,
                     size_t num_destinations, size_t count, bool) {
  reduce_any(what, sources, num_sources, destinations, num_destinations, count);
}

void copy_portable(void* to, const void* from, size_t bytes, bool) { std::memcpy(to, from, bytes); }

void track_portable(const void* values, const Momentum& momentum, size_t count, DType dtype, const Coin& coin,
                    uint64_t* bits) {
  auto run = [&]<class T>(T) {
    with_source<T>(values, momentum, [&](auto each) { pack_each<T>(count, coin, bits, each); });
  };
  dtype == DType::float64 ? run(double()) : run(float());
}

void pack_portable(const void* values, size_t count, DType dtype, const Coin& coin, uint64_t* bits) {
  track_portable(values, {}, count, dtype, coin, bits);
}

Sizes correct_portable(const void* values, const Momentum& momentum, void* voted, size_t count, DType dtype,
                       double scale, const Coin& coin, uint64_t* bits) {
  auto run = [&]<class T>(T) {
    return with_source<T>(values, momentum, [&](auto source) {
      Corrected<T, decltype(source)> each{source, static_cast<T*>(voted), T(scale)};
      pack_each<T>(count, coin, bits, each);
      return each.sizes();
    });
  };
  return dtype == DType::float64 ? run(double()) : run(float());
}

}  // namespace

const KernelSet kPortableKernels = {"portable",     reduce_portable,  copy_portable, round_any, pack_portable,
                                    track_portable, correct_portable, majority_any,  unpack_any};

}  // namespace paceline
