// Signs as bits: against plain loops over single elements, and the AVX2 set against the portable one.
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "paceline/reduce/bits.h"
#include "paceline/reduce/kernels.h"

using namespace paceline;
using Words = std::vector<uint64_t>;

namespace {

std::mt19937_64 rng(7);
const size_t kCounts[] = {0, 1, 7, 63, 64, 65, 127, 128, 1000, 4099, 40001};  // the last: more than four streams
const Coin kCoin = make_coin(5, 8, 0);

bool bit(const Words& words, size_t i) { return words[i / 64] >> i % 64 & 1; }

template <class T>
constexpr DType dtype_of = sizeof(T) == 8 ? DType::float64 : DType::float32;

template <class T>
Words packed(const std::vector<T>& values, const Coin& coin = kCoin) {
  Words bits(words_of(values.size()), 0x5555);
  pack_signs(values.data(), values.size(), dtype_of<T>, coin, bits.data());
  return bits;
}

// Ordinary numbers, and in every second word a few without a sign.
template <class T>
std::vector<T> some_values(size_t count) {
  using Limits = std::numeric_limits<T>;
  const T special[] = {T(0),
                       T(-0.0),
                       Limits::quiet_NaN(),
                       -Limits::quiet_NaN(),
                       Limits::infinity(),
                       -Limits::infinity(),
                       Limits::denorm_min(),
                       -Limits::denorm_min(),
                       Limits::max(),
                       -Limits::max()};
  std::normal_distribution<double> normal;
  std::vector<T> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = i / 64 % 2 || rng() % 16 ? T(normal(rng)) : special[rng() % 10];
  return values;
}

// The coin, bit by bit, as the signs of numbers that have none.
Words coin_bits(const Coin& coin, size_t count) { return packed(std::vector<float>(count, 0), coin); }

template <class T>
void check_signs() {
  for (size_t count : kCounts) {
    auto values = some_values<T>(count);
    auto bits = packed(values), coin = coin_bits(kCoin, count);
    for (size_t i = 0; i < 64 * bits.size(); ++i) {
      bool is_signed = i < count && values[i] != 0 && std::isfinite(values[i]);
      CHECK(bit(bits, i) == (i >= count ? false : is_signed ? values[i] > 0 : bit(coin, i)));
    }
    use_portable_kernels(true);
    CHECK(packed(values) == bits);
    use_portable_kernels(false);
  }
}

template <class T>
T tracked(T value, T last) {
  T next = T(0.75) * last + T(0.25) * (std::isfinite(value) ? value : T(0));
  return std::abs(next) < std::numeric_limits<T>::min() ? T(0) : next;
}

// What a worker keeps is never infinite, and never subnormal.
template <class T>
std::vector<T> kept_values(size_t count) {
  auto values = some_values<T>(count);
  for (auto& v : values)
    if (!std::isfinite(v) || std::abs(v) < std::numeric_limits<T>::min()) v = 0;
  return values;
}

template <class T>
void check_tracking() {
  for (size_t count : kCounts) {
    auto values = some_values<T>(count), last = kept_values<T>(count);
    std::vector<T> next[2] = {last, last};
    Words bits[2] = {Words(words_of(count)), Words(words_of(count))};
    for (bool portable : {false, true}) {
      use_portable_kernels(portable);
      pack_tracked(values.data(), {next[portable].data(), 0.75}, count, dtype_of<T>, kCoin, bits[portable].data());
    }
    use_portable_kernels(false);
    CHECK(next[0] == next[1] && bits[0] == bits[1] && bits[0] == packed(next[0]));
    for (size_t i = 0; i < count; ++i) CHECK(next[0][i] == tracked(values[i], last[i]));
  }
}

template <class T>
void check_correcting(bool has_momentum) {
  for (size_t count : kCounts) {
    auto values = some_values<T>(count), momentum = kept_values<T>(count), last = kept_values<T>(count);
    std::vector<T> next[2] = {last, last}, moved[2] = {momentum, momentum};
    Words bits[2] = {Words(words_of(count)), Words(words_of(count))};
    Sizes sizes[2];
    for (bool portable : {false, true}) {
      use_portable_kernels(portable);
      Momentum given{has_momentum ? moved[portable].data() : nullptr, 0.75};
      sizes[portable] = pack_corrected(values.data(), given, next[portable].data(), count, dtype_of<T>, 0.25, kCoin,
                                       bits[portable].data());
    }
    use_portable_kernels(false);
    CHECK(next[0] == next[1] && moved[0] == moved[1] && bits[0] == bits[1] && bits[0] == packed(next[0]));
    CHECK(sizes[0].sum == sizes[1].sum && sizes[0].count == sizes[1].count);
    uint64_t num_signed = 0;
    for (size_t i = 0; i < count; ++i) {
      T value = has_momentum ? tracked(values[i], momentum[i]) : values[i];
      CHECK(moved[0][i] == (has_momentum ? value : momentum[i]));
      T left_out = last[i] > 0 ? last[i] - T(0.25) : last[i] < 0 ? last[i] + T(0.25) : T(0);
      T expected = (std::isfinite(value) ? value : T(0)) + left_out;
      bool counts = std::isfinite(expected) && std::abs(expected) >= std::numeric_limits<T>::min();
      CHECK(next[0][i] == (counts ? expected : T(0)));
      num_signed += counts;
    }
    CHECK(sizes[0].count == num_signed);
  }
}

}  // namespace

TEST(signs_of_floats) { check_signs<float>(); }
TEST(signs_of_doubles) { check_signs<double>(); }
TEST(tracked_floats) { check_tracking<float>(); }
TEST(tracked_doubles) { check_tracking<double>(); }
TEST(corrected_floats) { check_correcting<float>(false), check_correcting<float>(true); }
TEST(corrected_doubles) { check_correcting<double>(false), check_correcting<double>(true); }

TEST(the_majority_of_every_number_of_rows) {
  for (size_t num_rows = 1; num_rows <= 17; ++num_rows)
    for (size_t words : {1, 5, 256, 257, 700}) {
      std::vector<Words> rows(num_rows, Words(words));
      std::vector<const uint64_t*> sources;
      for (auto& row : rows) {
        for (auto& w : row) w = rng();
        sources.push_back(row.data());
      }
      Coin coin = make_coin(1, 3, 77);
      Words result(words), tie = coin_bits(coin, 64 * words);
      majority(sources.data(), num_rows, words, coin, result.data());
      for (size_t i = 0; i < 64 * words; ++i) {
        size_t votes = 0;
        for (auto& row : rows) votes += bit(row, i);
        CHECK(bit(result, i) == (2 * votes == num_rows ? bit(tie, i) : 2 * votes > num_rows));
      }
      use_portable_kernels(true);
      Words portable(words);
      majority(sources.data(), num_rows, words, coin, portable.data());
      use_portable_kernels(false);
      CHECK(portable == result);
    }
}

TEST(a_coin_does_not_depend_on_where_it_is_cut) {
  Words whole = coin_bits(make_coin(9, 4, 0), 1000);
  for (size_t first : {1, 16, 63, 64, 100}) {
    Words part = coin_bits(make_coin(9, 4, first), 1000 - first);
    for (size_t i = first; i < 1000; ++i) CHECK(bit(part, i - first) == bit(whole, i));
  }
  Words odd = coin_bits(make_coin(9, 5, 0), 1000);
  Words later = coin_bits(make_coin(9, 6, 0), 1000), other = coin_bits(make_coin(10, 4, 0), 1000);
  size_t ones = 0, same_later = 0, same_other = 0;
  for (size_t i = 0; i < 1000; ++i) {
    CHECK(bit(odd, i) != bit(whole, i));
    ones += bit(whole, i);
    same_later += bit(later, i) == bit(whole, i);
    same_other += bit(other, i) == bit(whole, i);
  }
  for (size_t share : {ones, same_later, same_other}) CHECK(share > 420 && share < 580);
}

TEST(signs_become_numbers_of_every_floating_type) {
  for (size_t count : kCounts) {
    Words bits(words_of(count));
    for (auto& w : bits) w = rng();
    std::vector<float> f(count);
    std::vector<double> d(count);
    std::vector<uint16_t> h(count), b(count);
    for (bool portable : {false, true}) {
      use_portable_kernels(portable);
      unpack_signs(bits.data(), count, DType::float32, 0.3, f.data());
      unpack_signs(bits.data(), count, DType::float64, 0.3, d.data());
      unpack_signs(bits.data(), count, DType::float16, 1, h.data());
      unpack_signs(bits.data(), count, DType::bfloat16, 1, b.data());
      for (size_t i = 0; i < count; ++i) {
        CHECK(f[i] == (bit(bits, i) ? 0.3f : -0.3f) && d[i] == (bit(bits, i) ? 0.3 : -0.3));
        CHECK(h[i] == (bit(bits, i) ? 0x3c00 : 0xbc00) && b[i] == (bit(bits, i) ? 0x3f80 : 0xbf80));
      }
    }
    use_portable_kernels(false);
  }
}

int main() { return test::run_all(); }
