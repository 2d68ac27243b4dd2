// Payloads of all codecs, as another process may have sent them: of the right length, with any bytes in it.
#include <cmath>

#include "input.h"
#include "paceline/base/error.h"
#include "paceline/codec/blocks.h"
#include "paceline/codec/gaps.h"
#include "paceline/codec/sparse.h"
#include "paceline/reduce/kernels.h"

using namespace paceline;
using namespace paceline::codec;

namespace {

void read_gaps(fuzz::Input& input, size_t count) {
  const size_t width = 1 + input.take() % 2, k = input.take<uint16_t>() % (count + 1);
  size_t size = gap_bound(count, k, width);
  if (input.take() % 16 == 0) size += input.take();  // a wrong length, which has to be noticed
  const auto bytes = input.bytes(size);
  std::vector<int32_t> indices(k);
  unpack_gaps(bytes.data(), bytes.size(), k, count, width, indices.data());
  check_row({indices.data(), nullptr, k}, 0, count);  // what was accepted is in order
  std::vector<uint8_t> again(gap_bound(count, k, width));
  pack_gaps(indices.data(), k, count, width, again.data());
  std::vector<int32_t> same(k);
  unpack_gaps(again.data(), again.size(), k, count, width, same.data());
  fuzz::require(indices == same);
}

void read_sparse(fuzz::Input& input, size_t count) {
  std::vector<std::vector<int32_t>> indices(1 + input.take() % 3);
  std::vector<std::vector<float>> values(indices.size());
  std::vector<SparseRow> rows;
  for (size_t r = 0; r < indices.size(); ++r) {
    indices[r].resize(input.take());
    values[r].resize(indices[r].size());
    int32_t last = 0;
    for (auto& index : indices[r]) {
      const uint8_t gap = input.take();
      index = last = gap == 255 ? input.take<int32_t>() : int32_t(uint32_t(last) + gap);
    }
    for (auto& value : values[r]) value = float(input.take());
    rows.push_back({indices[r].data(), values[r].data(), indices[r].size()});
    check_row(rows.back(), r, count);
  }
  std::vector<float> out(count);
  const size_t middle = count / 2;
  scatter_mean(rows.data(), rows.size(), 0, middle, out.data());
  scatter_mean(rows.data(), rows.size(), middle, count, out.data());
}

// Both kernel sets read the same numbers.
void read_blocks(fuzz::Input& input, Format format, size_t count) {
  const size_t size = num_blocks(format, count) * block_of(format).bytes;
  std::vector<std::vector<uint8_t>> payloads(1 + input.take() % 5);
  std::vector<const uint8_t*> rows;
  for (auto& payload : payloads) rows.push_back((payload = input.bytes(size)).data());
  std::vector<float> fast(count), plain(count), residual(count);
  decode_mean(format, rows.data(), rows.size(), count, fast.data());
  use_portable_kernels(true);
  decode_mean(format, rows.data(), rows.size(), count, plain.data());
  use_portable_kernels(false);
  for (size_t i = 0; i < count; ++i)
    fuzz::require(fast[i] == plain[i] || (std::isnan(fast[i]) && std::isnan(plain[i])));
  std::vector<uint8_t> again(size);
  recode(format, rows.data(), rows.size(), residual.data(), count, make_draw(1, 2, 0), again.data());
}

void read_shared(fuzz::Input& input, size_t count) {
  const int levels = 1 + input.take() % 127;
  const size_t workers = 1 + input.take() % 8;
  std::vector<float> largest((count + kSharedValues - 1) / kSharedValues), out(count);
  for (auto& one : largest) one = input.take<float>();
  const auto bytes = input.bytes(count);
  decode_shared(reinterpret_cast<const int8_t*>(bytes.data()), count, largest.data(), levels, workers, out.data());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const uint8_t what = input.take() % 8;
  const size_t count = input.take<uint16_t>() % 2600;
  try {
    switch (what) {
      case 0: read_gaps(input, count); break;
      case 1: read_sparse(input, count); break;
      case 2: read_shared(input, count); break;
      default: read_blocks(input, Format(what - 3), count);
    }
  } catch (const Error& e) {
    fuzz::require(e.kind == ErrorKind::bad_frame);
  }
  return 0;
}
