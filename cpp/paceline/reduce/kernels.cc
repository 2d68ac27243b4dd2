#include "paceline/reduce/kernels.h"

#include <algorithm>

#include "paceline/reduce/kernel_set.h"

namespace paceline {
namespace {

const KernelSet* best() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return &kAvx2Kernels;
#endif
  return &kPortableKernels;
}

const KernelSet* chosen = best();

}  // namespace

void reduce(const Reduction& what, const void* const* sources, size_t num_sources,
            void* const* destinations, size_t num_destinations, size_t count, bool streaming) {
  if (count)
    chosen->reduce(what, sources, num_sources, destinations, num_destinations, count, streaming);
}

void copy(void* to, const void* from, size_t bytes, bool streaming) {
  if (bytes) chosen->copy(to, from, bytes, streaming);
}

void reduce_mean(const void* const* sources, size_t num_sources, void* destination, size_t count, DType dtype) {
  // In place the lines to write have just been read, and streaming would only lose them.
  bool in_place = std::find(sources, sources + num_sources, destination) != sources + num_sources;
  bool streaming = count * size_of(dtype) >= kStreamingBytes && !in_place;
  reduce({dtype, ReduceOp::mean, num_sources}, sources, num_sources, &destination, 1, count, streaming);
}

void round_stochastic(const float* from, void* to, size_t count, DType dtype, uint64_t seed, uint64_t first) {
  chosen->round_stochastic(from, to, count, dtype, seed, first);
}

const char* kernel_name() { return chosen->name; }
void use_portable_kernels(bool on) { chosen = on ? &kPortableKernels : best(); }

}  // namespace paceline
