// Reduction kernels: against plain loops, and the AVX2 set against the portable one, bit by bit.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "check.h"
#include "paceline/reduce/kernels.h"

using namespace paceline;

namespace {

std::mt19937_64 rng(7);

std::vector<std::byte> random_bytes(DType dtype, size_t count) {
  std::vector<std::byte> data(count * size_of(dtype));
  for (auto& b : data) b = std::byte(rng());
  if (dtype == DType::boolean)
    for (auto& b : data) b &= std::byte(1);
  return data;
}

std::vector<std::byte> run(const Reduction& what, const std::vector<std::vector<std::byte>>& in, size_t count,
                           size_t outputs, bool streaming) {
  std::vector<const void*> sources;
  for (auto& s : in) sources.push_back(s.data());
  std::vector<std::vector<std::byte>> out(outputs, std::vector<std::byte>(count * size_of(what.dtype)));
  std::vector<void*> destinations;
  for (auto& d : out) destinations.push_back(d.data());
  reduce(what, sources.data(), sources.size(), destinations.data(), outputs, count, streaming);
  for (auto& d : out) CHECK(d == out[0]);
  return out[0];
}

// Which of two NaNs survives an addition is up to the order of its operands in the machine code; all are alike.
std::vector<std::byte> one_nan(DType dtype, std::vector<std::byte> data) {
  auto canonical = [&](auto bits, auto infinity) {
    using Bits = decltype(bits);
    for (size_t at = 0; at < data.size(); at += sizeof bits) {
      std::memcpy(&bits, data.data() + at, sizeof bits);
      if (Bits(bits << 1) > Bits(infinity << 1)) bits = Bits(~Bits(0));
      std::memcpy(data.data() + at, &bits, sizeof bits);
    }
  };
  if (dtype == DType::float32) canonical(uint32_t(), uint32_t(0x7f800000));
  if (dtype == DType::float64) canonical(uint64_t(), uint64_t(0x7ff0000000000000));
  if (dtype == DType::float16) canonical(uint16_t(), uint16_t(0x7c00));
  if (dtype == DType::bfloat16) canonical(uint16_t(), uint16_t(0x7f80));
  return data;
}

template <class T>
std::vector<std::byte> bytes_of(std::vector<T> values) {
  std::vector<std::byte> data(values.size() * sizeof(T));
  std::memcpy(data.data(), values.data(), data.size());
  return data;
}

}  // namespace

TEST(both_kernel_sets_give_the_same_bits) {
  for (int d = 0; d < int(DType::count_); ++d)
    for (int o = 0; o < int(ReduceOp::count_); ++o) {
      DType dtype = DType(d);
      ReduceOp op = ReduceOp(o);
      if (is_floating(dtype) && op >= ReduceOp::bit_and) continue;
      if (!is_floating(dtype) && op == ReduceOp::mean) continue;
      for (size_t count : {1, 15, 16, 17, 2047, 2048, 5001})
        for (size_t n : {1, 2, 3, 4, 7}) {
          std::vector<std::vector<std::byte>> in;
          for (size_t i = 0; i < n; ++i) in.push_back(random_bytes(dtype, count));
          Reduction what{dtype, op, op == ReduceOp::mean ? n : 1};
          use_portable_kernels(true);
          auto portable = one_nan(dtype, run(what, in, count, 2, false));
          use_portable_kernels(false);
          CHECK(one_nan(dtype, run(what, in, count, 2, false)) == portable);
          CHECK(one_nan(dtype, run(what, in, count, 3, true)) == portable);
        }
    }
}

TEST(sources_are_folded_in_order) {
  // (big + 1) - big differs from (big - big) + 1 in float32.
  auto in = std::vector{bytes_of<float>({1e8f}), bytes_of<float>({1.0f}), bytes_of<float>({-1e8f})};
  CHECK(run({DType::float32, ReduceOp::sum}, in, 1, 1, false) == bytes_of<float>({(1e8f + 1.0f) - 1e8f}));
  std::swap(in[1], in[2]);
  CHECK(run({DType::float32, ReduceOp::sum}, in, 1, 1, false) == bytes_of<float>({1.0f}));
}

TEST(sixteen_bit_floats_are_rounded_once) {
  // 2048 + 1 + 1 is 2050 in half precision when the sum is kept in float32, 2048 when it is not.
  auto half = [](uint16_t bits) { return bytes_of<uint16_t>({bits}); };
  auto in = std::vector{half(0x6800), half(0x3c00), half(0x3c00)};
  CHECK(run({DType::float16, ReduceOp::sum}, in, 1, 1, false) == half(0x6801));
  in = {half(0x4380), half(0x3f80), half(0x3f80)};  // bfloat16: 256 + 1 + 1
  CHECK(run({DType::bfloat16, ReduceOp::sum}, in, 1, 1, false) == half(0x4381));
}

TEST(half_precision_survives_its_corners) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    std::vector<std::vector<std::byte>> in(1, bytes_of<uint16_t>({uint16_t(bits)}));
    for (DType dtype : {DType::float16, DType::bfloat16}) {
      auto out = run({dtype, ReduceOp::sum}, in, 1, 1, false);
      uint16_t got;
      std::memcpy(&got, out.data(), 2);
      uint16_t inf = dtype == DType::float16 ? 0x7c00 : 0x7f80;
      if ((bits & 0x7fff) > inf) CHECK((got & 0x7fff) > inf);  // NaN stays NaN
      else CHECK(got == bits);
    }
  }
}

TEST(nan_wins_in_min_and_max) {
  float nan = std::numeric_limits<float>::quiet_NaN();
  for (auto op : {ReduceOp::min, ReduceOp::max})
    for (auto in : {std::vector{bytes_of<float>({nan}), bytes_of<float>({1.0f})},
                    std::vector{bytes_of<float>({1.0f}), bytes_of<float>({nan})}}) {
      auto out = run({DType::float32, op}, in, 1, 1, false);
      float got;
      std::memcpy(&got, out.data(), 4);
      CHECK(std::isnan(got));
    }
}

TEST(integers_wrap_around) {
  auto in = std::vector{bytes_of<int8_t>({127}), bytes_of<int8_t>({1})};
  CHECK(run({DType::int8, ReduceOp::sum}, in, 1, 1, false) == bytes_of<int8_t>({-128}));
  in = {bytes_of<int16_t>({32767}), bytes_of<int16_t>({32767})};
  CHECK(run({DType::int16, ReduceOp::product}, in, 1, 1, false) == bytes_of<int16_t>({1}));
}

TEST(a_destination_may_be_a_source) {
  std::vector<float> a(1000, 2), b(1000, 3);
  const void* sources[] = {a.data(), b.data()};
  void* destinations[] = {a.data(), b.data()};
  reduce({DType::float32, ReduceOp::mean, 2}, sources, 2, destinations, 2, 1000, false);
  for (size_t i = 0; i < 1000; ++i) CHECK(a[i] == 2.5f && b[i] == 2.5f);
}

TEST(copies_are_exact_at_any_alignment) {
  std::vector<unsigned char> from(20000), to(20000);
  for (auto& b : from) b = static_cast<unsigned char>(rng());
  for (int i = 0; i < 200; ++i) {
    size_t a = rng() % 100, b = rng() % 100, n = rng() % 19000;
    std::fill(to.begin(), to.end(), 0);
    copy(to.data() + a, from.data() + b, n, i % 2 == 0);
    CHECK(std::memcmp(to.data() + a, from.data() + b, n) == 0);
    CHECK(a + n == to.size() || to[a + n] == 0);
  }
}

TEST(the_mean_is_the_reduction_of_everything) {
  for (DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16})
    for (size_t count : {size_t(1), size_t(5001)}) {
      std::vector<std::vector<std::byte>> in;
      for (int i = 0; i < 3; ++i) in.push_back(random_bytes(dtype, count));
      auto expected = one_nan(dtype, run({dtype, ReduceOp::mean, 3}, in, count, 1, false));
      const void* sources[] = {in[0].data(), in[1].data(), in[2].data()};
      reduce_mean(sources, 3, in[1].data(), count, dtype);
      CHECK(one_nan(dtype, in[1]) == expected);
    }
}

TEST(stochastic_rounding_does_not_depend_on_kernels_or_blocks) {
  constexpr size_t kCount = 100003;
  auto values = random_bytes(DType::float32, kCount);
  auto* from = reinterpret_cast<const float*>(values.data());
  for (DType dtype : {DType::float16, DType::bfloat16})
    for (uint64_t first : {uint64_t(0), uint64_t(0xffffff00)}) {
      std::vector<uint16_t> whole(kCount), portable(kCount), parts(kCount);
      round_stochastic(from, whole.data(), kCount, dtype, 11, first);
      use_portable_kernels(true);
      round_stochastic(from, portable.data(), kCount, dtype, 11, first);
      use_portable_kernels(false);
      CHECK(whole == portable);
      for (size_t at = 0, n = 0; at < kCount; at += n) {
        n = std::min<size_t>(kCount - at, 1 + rng() % 999);
        round_stochastic(from + at, parts.data() + at, n, dtype, 11, first + at);
      }
      CHECK(whole == parts);
      round_stochastic(from, parts.data(), kCount, dtype, 12, first);
      CHECK(whole != parts);
    }
}

TEST(stochastic_rounding_is_fair) {
  // 2^-24 * 3.25 is between two subnormal halves, 1 + 2^-10 * 0.25 between two normal ones.
  constexpr size_t kCount = 1 << 18;
  for (float value : {0x1p-24f * 3.25f, 1 + 0x1p-10f * 0.25f}) {
    std::vector<float> from(kCount, value);
    std::vector<uint16_t> to(kCount);
    round_stochastic(from.data(), to.data(), kCount, DType::float16, 3, 0);
    uint16_t low = value < 1 ? 3 : 0x3c00;
    size_t up = 0;
    for (uint16_t bits : to) {
      CHECK(bits == low || bits == low + 1);
      up += bits != low;
    }
    CHECK(std::abs(double(up) / kCount - 0.25) < 0.005);
  }
}

// A thread may flush subnormal floats to zero. Subnormal halves are numbers all the same.
TEST(half_precision_does_not_depend_on_the_thread) {
#if defined(__SSE__)
  std::vector<uint16_t> halves(2048);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = uint16_t(i < 1024 ? i : 0x8000 + i - 1024);
  std::vector<std::vector<std::byte>> in(2, std::vector<std::byte>(halves.size() * 2));
  for (auto& one : in) std::memcpy(one.data(), halves.data(), one.size());
  const unsigned before = _mm_getcsr();
  for (bool portable : {false, true}) {
    use_portable_kernels(portable);
    _mm_setcsr(before | 0x8040);  // flush to zero, denormals are zero
    auto mean = run({DType::float16, ReduceOp::mean, 2}, in, halves.size(), 1, false);
    _mm_setcsr(before);
    CHECK(std::memcmp(mean.data() + 2, in[0].data() + 2, 2046) == 0);
    CHECK(std::memcmp(mean.data() + 2050, in[0].data() + 2050, 2046) == 0);  // not the negative zero
  }
  use_portable_kernels(false);
#endif
}

int main() { return test::run_all(); }
