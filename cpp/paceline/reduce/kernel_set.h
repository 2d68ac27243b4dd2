// The kernels as a table, filled once per instruction set and chosen at run time.
#pragma once
#include "paceline/reduce/bits.h"
#include "paceline/reduce/kernels.h"

namespace paceline {

struct KernelSet {
  const char* name;
  void (*reduce)(const Reduction&, const void* const* sources, size_t num_sources, void* const* destinations,
                 size_t num_destinations, size_t count, bool streaming);
  void (*copy)(void* to, const void* from, size_t bytes, bool streaming);
  void (*round_stochastic)(const float* from, void* to, size_t count, DType dtype, uint64_t seed, uint64_t first);
  void (*pack_signs)(const void* values, size_t count, DType dtype, const Coin& coin, uint64_t* bits);
  void (*pack_tracked)(const void* values, const Momentum& momentum, size_t count, DType dtype, const Coin& coin,
                       uint64_t* bits);
  Sizes (*pack_corrected)(const void* values, const Momentum& momentum, void* voted, size_t count, DType dtype,
                          double scale, const Coin& coin, uint64_t* bits);
  void (*majority)(const uint64_t* const* rows, size_t num_rows, size_t words, const Coin& coin, uint64_t* bits);
  void (*unpack_signs)(const uint64_t* bits, size_t count, DType dtype, double scale, void* values);
};

extern const KernelSet kPortableKernels;
#if defined(__x86_64__)
extern const KernelSet kAvx2Kernels;
#endif

}  // namespace paceline
