#include "paceline/codec/select.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <future>
#include <vector>

#include "paceline/codec/kernel_table.h"
#include "paceline/codec/numbers.h"
#include "paceline/codec/sparse.h"

namespace paceline::codec {
namespace {

using Keys = std::vector<uint64_t>;
constexpr size_t kChunk = 4096;  // values between two checks of the space for keys
constexpr size_t kSample = 1 << 15;
constexpr size_t kSliceAtLeast = 1 << 16;  // values that are worth a thread

uint32_t size_of(uint64_t key) { return uint32_t(key >> 32); }
uint32_t index_of(uint64_t key) { return kLastIndex - (uint32_t(key) >> 1); }

// Sizes of values that are spread evenly.
std::vector<uint32_t> sample(const float* values, const float* residual, size_t count, const Draw& draw) {
  const size_t size = std::min(count, kSample);
  std::vector<int32_t> where(size);
  random_indices(count, size, draw, 0, size, where.data());
  std::vector<uint32_t> sizes(size);
  for (size_t i = 0; i < size; ++i) {
    const float v = residual ? values[where[i]] + residual[where[i]] : values[where[i]];
    sizes[i] = std::bit_cast<uint32_t>(v) & kSizeMask;
  }
  return sizes;
}

uint32_t largest_but(std::vector<uint32_t>& sizes, size_t others) {
  std::nth_element(sizes.begin(), sizes.begin() + ptrdiff_t(others), sizes.end(), std::greater<>());
  return sizes[others];
}

// In the sample we expect `mean` of the k largest, give or take its root; four of those are the margin.
size_t rank_in_sample(size_t k, size_t count, size_t sample_size) {
  if (sample_size == count) return k;
  const double mean = double(k) * double(sample_size) / double(count);
  return size_t(mean + 4 * std::sqrt(mean) + 4);
}

// The keys of [begin, end) that reach the threshold. Of those that just reach it, only the first k can be sent.
Keys collect(const float* values, float* residual, size_t begin, size_t end, uint32_t threshold, size_t k,
             size_t expected) {
  Keys keys(expected + kChunk);
  size_t found = 0, equal = 0;
  for (size_t at = begin; at < end; at += kChunk) {
    const size_t n = std::min(kChunk, end - at);
    if (keys.size() - found < n) keys.resize(2 * keys.size());
    const size_t now = kernels().collect(values + at, residual ? residual + at : nullptr, n, uint32_t(at), threshold,
                                         keys.data() + found);
    for (size_t i = found; i < found + now; ++i) equal += size_of(keys[i]) == threshold;
    found += now;
    if (equal >= k) ++threshold, equal = 0;
  }
  keys.resize(found);
  return keys;
}

std::vector<Keys> collect_all(const float* values, float* residual, size_t count, uint32_t threshold, size_t k,
                              size_t expected, size_t num_threads) {
  const size_t slices = std::clamp<size_t>(count / kSliceAtLeast, 1, num_threads);
  std::vector<std::future<Keys>> others;
  auto border = [&](size_t slice) { return count * slice / slices; };
  auto run = [=](size_t begin, size_t end) {
    return collect(values, residual, begin, end, threshold, k, expected / slices);
  };
  for (size_t slice = 1; slice < slices; ++slice)
    others.push_back(std::async(std::launch::async, run, border(slice), border(slice + 1)));
  std::vector<Keys> parts;
  parts.push_back(run(0, border(1)));
  for (auto& other : others) parts.push_back(other.get());
  return parts;
}

// The smallest key that is sent.
uint64_t border_key(const std::vector<Keys>& parts, size_t found, size_t k) {
  Keys all;
  all.reserve(found);
  for (auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  std::nth_element(all.begin(), all.begin() + ptrdiff_t(k) - 1, all.end(), std::greater<>());
  return all[k - 1];
}

}  // namespace

void select(const float* values, float* residual, size_t count, size_t k, const Draw& draw, size_t num_threads,
            int32_t* indices, float* chosen) {
  if (k == 0) {
    if (residual)
      for (size_t i = 0; i < count; ++i) residual[i] += values[i];
    return;
  }
  auto sizes = sample(values, residual, count, draw);
  std::vector<Keys> parts;
  size_t rank = rank_in_sample(k, count, sizes.size()), found = 0;
  const float* source = values;
  float* sum = residual;
  for (;; rank *= 4) {
    const uint32_t threshold = rank <= sizes.size() ? largest_but(sizes, rank - 1) : 0;
    parts = collect_all(source, sum, count, threshold, k, std::min(2 * k, count), num_threads);
    found = 0;
    for (auto& part : parts) found += part.size();
    if (found >= k) break;
    if (sum) source = sum, sum = nullptr;  // the residual already holds the sum
  }
  const uint64_t border = border_key(parts, found, k);
  for (auto& part : parts)
    for (uint64_t key : part) {
      if (key < border) continue;
      const uint32_t index = index_of(key);
      *indices++ = int32_t(index);
      *chosen++ = std::bit_cast<float>(size_of(key) | uint32_t(key) << 31);
      if (residual) residual[index] = 0;
    }
}

}  // namespace paceline::codec
