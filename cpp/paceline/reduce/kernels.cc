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

// splitmix64: neighbouring numbers give unrelated ones.
uint64_t scatter(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

}  // namespace

Coin make_coin(uint64_t seed, uint64_t step, uint64_t first) {
  return {scatter(scatter(seed) + step / 2), step % 2 ? ~uint64_t(0) : 0, first};
}

void reduce(const Reduction& what, const void* const* sources, size_t num_sources, void* const* destinations,
            size_t num_destinations, size_t count, bool streaming) {
  if (count) chosen->reduce(what, sources, num_sources, destinations, num_destinations, count, streaming);
}

void copy(void* to, const void* from, size_t bytes, bool streaming) {
  if (bytes) chosen->copy(to, from, bytes, streaming);
}

void reduce_mean(const void* const* sources, size_t num_sources, void* destination, size_t count, DType dtype) {
  // In place the cache lines to write have just been read, and streaming would evict them.
  bool in_place = std::find(sources, sources + num_sources, destination) != sources + num_sources;
  bool streaming = count * size_of(dtype) >= kStreamingBytes && !in_place;
  reduce({dtype, ReduceOp::mean, num_sources}, sources, num_sources, &destination, 1, count, streaming);
}

void round_stochastic(const float* from, void* to, size_t count, DType dtype, uint64_t seed, uint64_t first) {
  chosen->round_stochastic(from, to, count, dtype, seed, first);
}

void pack_signs(const void* values, size_t count, DType dtype, const Coin& coin, uint64_t* bits) {
  chosen->pack_signs(values, count, dtype, coin, bits);
}

void pack_tracked(const void* values, const Momentum& momentum, size_t count, DType dtype, const Coin& coin,
                  uint64_t* bits) {
  chosen->pack_tracked(values, momentum, count, dtype, coin, bits);
}

Sizes pack_corrected(const void* values, const Momentum& momentum, void* voted, size_t count, DType dtype, double scale,
                     const Coin& coin, uint64_t* bits) {
  return chosen->pack_corrected(values, momentum, voted, count, dtype, scale, coin, bits);
}

void majority(const uint64_t* const* rows, size_t num_rows, size_t words, const Coin& coin, uint64_t* bits) {
  chosen->majority(rows, num_rows, words, coin, bits);
}

void unpack_signs(const uint64_t* bits, size_t count, DType dtype, double scale, void* values) {
  chosen->unpack_signs(bits, count, dtype, scale, values);
}

const char* kernel_name() { return chosen->name; }
void use_portable_kernels(bool on) { chosen = on ? &kPortableKernels : best(); }
bool kernels_are_portable() { return chosen == &kPortableKernels; }

}  // namespace paceline
