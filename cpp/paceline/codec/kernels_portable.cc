#include "paceline/codec/block_loops.h"
#include "paceline/codec/collect_loops.h"
#include "paceline/codec/kernel_table.h"
#include "paceline/codec/plain_formats.h"
#include "paceline/codec/plain_onebit.h"
#include "paceline/codec/shared_loops.h"

namespace paceline::codec {
namespace {

template <class F>
constexpr FormatKernels of() {
  return {encode_blocks<F>, mean_of_blocks<F>, recode_blocks<F>};
}

size_t collect_portable(const float* values, float* residual, size_t count, uint32_t first, uint32_t threshold,
                        uint64_t* keys) {
  return collect_plain(values, residual, count, first, threshold, keys);
}

}  // namespace

const Kernels kPortableCodecs = {
    {of<PlainBf16>(), of<PlainFp16>(), of<PlainInt8>(), of<PlainInt4>(), of<PlainOnebit>()},
    block_largest_loop<PlainLanes>,
    encode_shared_loop<PlainLanes>,
    decode_shared_loop<PlainLanes>,
    collect_portable};

}  // namespace paceline::codec
