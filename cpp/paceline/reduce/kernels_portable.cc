#include "paceline/reduce/bits_loops.h"
#include "paceline/reduce/blockwise.h"
#include "paceline/reduce/kernel_set.h"
#include "paceline/reduce/stochastic.h"

namespace paceline {
namespace {

void reduce_portable(const Reduction& what, const void* const* sources, size_t num_sources,
                     void* const* destinations, size_t num_destinations, size_t count, bool) {
  reduce_any(what, sources, num_sources, destinations, num_destinations, count);
}

void copy_portable(void* to, const void* from, size_t bytes, bool) { std::memcpy(to, from, bytes); }

void pack_portable(const void* values, size_t count, DType dtype, const Coin& coin, uint64_t* bits) {
  if (dtype == DType::float64) pack_plain(static_cast<const double*>(values), count, coin, bits);
  else pack_plain(static_cast<const float*>(values), count, coin, bits);
}

void track_portable(const void* values, const void* last, void* next, size_t count, DType dtype, double keep,
                    const Coin& coin, uint64_t* bits) {
  auto run = [&]<class T>(T) {
    track_plain(static_cast<const T*>(values), static_cast<const T*>(last), static_cast<T*>(next), count, T(keep),
                T(1 - keep), coin, bits);
  };
  dtype == DType::float64 ? run(double()) : run(float());
}

Sizes correct_portable(const void* values, const void* last, void* next, size_t count, DType dtype, double scale,
                       const Coin& coin, uint64_t* bits) {
  auto run = [&]<class T>(T) {
    double sums[kSums] = {};
    return total(sums, correct_plain(static_cast<const T*>(values), static_cast<const T*>(last), static_cast<T*>(next),
                                     count, T(scale), coin, bits, sums));
  };
  return dtype == DType::float64 ? run(double()) : run(float());
}

}  // namespace

const KernelSet kPortableKernels = {"portable",     reduce_portable, copy_portable,
                                    round_any,      pack_portable,   track_portable,
                                    correct_portable, majority_any,    unpack_any};

}  // namespace paceline
