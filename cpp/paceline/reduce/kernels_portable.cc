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

}  // namespace

const KernelSet kPortableKernels = {"portable", reduce_portable, copy_portable, round_any};

}  // namespace paceline
