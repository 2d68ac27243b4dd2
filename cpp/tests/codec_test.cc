// Codecs: blocks against plain arithmetic, sparse tensors against sorting, AVX2 against portable kernels.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "paceline/codec/blocks.h"
#include "paceline/codec/gaps.h"
#include "paceline/codec/select.h"
#include "paceline/codec/sparse.h"
#include "paceline/reduce/kernels.h"

using namespace paceline;
using namespace paceline::codec;
using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;
using Indices = std::vector<int32_t>;

namespace {

std::mt19937_64 rng(11);
const size_t kCounts[] = {0, 1, 7, 255, 256, 257, 513, 2047, 2048, 2049, 5000};
const Format kFormats[] = {Format::bf16, Format::fp16, Format::int8, Format::int4, Format::onebit};
const Draw kDraw = make_draw(5, 8, 3);
using Limits = std::numeric_limits<float>;

Floats some_values(size_t count, float scale = 1) {
  std::normal_distribution<float> normal;
  Floats values(count);
  for (auto& v : values) v = normal(rng) * scale;
  return values;
}

Floats with_specials(size_t count) {
  const float special[] = {0.0f,
                           -0.0f,
                           Limits::quiet_NaN(),
                           Limits::infinity(),
                           -Limits::infinity(),
                           Limits::denorm_min(),
                           -Limits::denorm_min(),
                           Limits::max(),
                           -Limits::max(),
                           1e-38f,
                           65504.0f,
                           65520.0f};
  Floats values = some_values(count);
  for (auto& v : values)
    if (rng() % 500 == 0) v = special[rng() % std::size(special)];
  return values;
}

size_t payload_bytes(Format format, size_t count) { return num_blocks(format, count) * block_of(format).bytes; }

Bytes encoded(Format format, const Floats& values, Floats* residual = nullptr, const Draw& draw = kDraw) {
  Bytes payload(payload_bytes(format, values.size()), 0x55);
  encode(format, values.data(), residual ? residual->data() : nullptr, values.size(), draw, payload.data());
  return payload;
}

Floats mean_of(Format format, const std::vector<Bytes>& rows, size_t count) {
  std::vector<const uint8_t*> sources;
  for (auto& row : rows) sources.push_back(row.data());
  Floats out(count, 77);
  decode_mean(format, sources.data(), sources.size(), count, out.data());
  return out;
}

Bytes recoded(Format format, const std::vector<Bytes>& rows, Floats& residual) {
  std::vector<const uint8_t*> sources;
  for (auto& row : rows) sources.push_back(row.data());
  Bytes payload(rows[0].size(), 0x55);
  recode(format, sources.data(), sources.size(), residual.data(), residual.size(), kDraw, payload.data());
  return payload;
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && (a.empty() || !std::memcmp(a.data(), b.data(), a.size() * sizeof(float)));
}

struct Sparse {
  Indices indices;
  Floats chosen;
};

Sparse selected(const Floats& values, size_t k, Floats* residual = nullptr, size_t threads = 1) {
  Sparse row{Indices(k, -1), Floats(k)};
  select(values.data(), residual ? residual->data() : nullptr, values.size(), k, kDraw, threads, row.indices.data(),
         row.chosen.data());
  return row;
}

}  // namespace

TEST(what_is_lost_is_in_the_residual) {
  for (Format format : kFormats)
    for (size_t count : kCounts) {
      Floats values = some_values(count), before = some_values(count, 0.1f), residual = before;
      Floats decoded = mean_of(format, {encoded(format, values, &residual)}, count);
      for (size_t i = 0; i < count; ++i) {
        CHECK(residual[i] == values[i] + before[i] - decoded[i]);
        CHECK(std::abs(residual[i]) < 5);
      }
    }
}

TEST(errors_are_as_small_as_the_format_promises) {
  for (size_t count : {1, 256, 1000}) {
    Floats values = some_values(count);
    float largest = 0;
    for (float v : values) largest = std::max(largest, std::abs(v));
    Floats bf16 = mean_of(Format::bf16, {encoded(Format::bf16, values)}, count);
    Floats fp16 = mean_of(Format::fp16, {encoded(Format::fp16, values)}, count);
    Floats int8 = mean_of(Format::int8, {encoded(Format::int8, values)}, count);
    Floats int4 = mean_of(Format::int4, {encoded(Format::int4, values)}, count);
    for (size_t i = 0; i < count; ++i) {
      CHECK(std::abs(bf16[i] - values[i]) <= std::abs(values[i]) / 256);
      CHECK(std::abs(fp16[i] - values[i]) <= std::abs(values[i]) / 2048 + 1e-7f);
      CHECK(std::abs(int8[i] - values[i]) <= largest / 127 * 0.5001f);
      CHECK(std::abs(int4[i] - values[i]) <= largest / 7 * 1.0001f);
    }
  }
}

TEST(means_and_recoding_agree_with_single_rows) {
  for (Format format : kFormats)
    for (size_t count : kCounts)
      for (size_t num_rows : {1, 2, 3, 5}) {
        std::vector<Bytes> rows;
        Floats sum(count), residual = some_values(count), before = residual;
        for (size_t r = 0; r < num_rows; ++r) {
          rows.push_back(encoded(format, some_values(count)));
          Floats row = mean_of(format, {rows[r]}, count);
          for (size_t i = 0; i < count; ++i) sum[i] = r ? sum[i] + row[i] : row[i];
        }
        Floats mean = mean_of(format, rows, count);
        for (size_t i = 0; i < count; ++i) CHECK(mean[i] == sum[i] / float(num_rows));
        if (count == 0) continue;
        Bytes payload = recoded(format, rows, residual);
        CHECK(payload == encoded(format, mean));
        Floats decoded = mean_of(format, {payload}, count);
        for (size_t i = 0; i < count; ++i) CHECK(residual[i] == before[i] + float(num_rows) * (mean[i] - decoded[i]));
      }
}

TEST(portable_kernels_give_the_same_bits) {
  for (Format format : kFormats)
    for (size_t count : kCounts) {
      if (count == 0) continue;
      Floats values = with_specials(count), start = with_specials(count), residual[2] = {start, start};
      Floats kept[2] = {start, start};
      Bytes payload[2], again[2];
      Floats mean[2];
      for (bool portable : {false, true}) {
        use_portable_kernels(portable);
        payload[portable] = encoded(format, values, &residual[portable]);
        std::vector<Bytes> rows = {payload[portable], encoded(format, values), encoded(format, start)};
        mean[portable] = mean_of(format, rows, count);
        again[portable] = recoded(format, rows, kept[portable]);
      }
      use_portable_kernels(false);
      CHECK(payload[0] == payload[1] && again[0] == again[1]);
      CHECK(same_bits(residual[0], residual[1]) && same_bits(mean[0], mean[1]) && same_bits(kept[0], kept[1]));
    }
}

// Large results go past the cache where they are aligned, and are encoded in two halves.
TEST(large_tensors_give_the_same_bits) {
  for (Format format : kFormats) {
    const Block block = block_of(format);
    const size_t blocks = (1u << 20) / block.bytes + 21, bytes = blocks * block.bytes;
    const size_t count = blocks * block.values - 7;
    Floats values = with_specials(count), start = some_values(count), expected = start, out(count + 16);
    use_portable_kernels(true);
    const Bytes payload = encoded(format, values, &expected);
    const Floats decoded = mean_of(format, {payload}, count);
    use_portable_kernels(false);
    for (size_t shift : {0, 4}) {
      std::vector<float> room(bytes / 4 + 16);  // an aligned address, or 4 bytes after one
      auto* to = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(room.data()) + 31) / 32 * 32) + shift;
      Floats residual = start;
      encode(format, values.data(), residual.data(), count, kDraw, to);
      CHECK(same_bits(residual, expected) && !std::memcmp(to, payload.data(), bytes));
      auto* floats = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(out.data()) + 31) / 32 * 32) + shift / 4;
      const uint8_t* row = payload.data();
      decode_mean(format, &row, 1, count, floats);
      CHECK(!std::memcmp(floats, decoded.data(), count * sizeof(float)));
      std::vector<float> zeros(count);
      recode(format, &row, 1, zeros.data(), count, kDraw, to);
      const Bytes again = encoded(format, decoded);
      CHECK(!std::memcmp(to, again.data(), bytes));
    }
  }
}

TEST(a_block_with_something_not_finite_decodes_to_nan_and_keeps_its_residual) {
  for (Format format : {Format::int8, Format::int4, Format::onebit})
    for (float bad : {Limits::quiet_NaN(), Limits::infinity(), -Limits::infinity()}) {
      const size_t block = block_of(format).values, count = 2 * block + 5;
      Floats values = some_values(count), residual = some_values(count), before = residual;
      values[block + 3] = bad;
      Floats decoded = mean_of(format, {encoded(format, values, &residual)}, count);
      for (size_t i = 0; i < count; ++i) {
        bool is_bad = i / block == 1;
        CHECK(std::isnan(decoded[i]) == is_bad && (residual[i] == before[i]) == is_bad);
      }
    }
}

TEST(very_small_and_very_large_blocks) {
  for (Format format : kFormats)
    for (float size : {0.0f, Limits::denorm_min(), 1e-40f, Limits::min(), 1e-37f, 1e-35f, 1e30f, Limits::max()})
      for (size_t count : {1, 300, 2048}) {
        Floats values(count, size), residual(count);
        for (size_t i = 0; i < count; i += 3) values[i] = -size;
        Floats decoded = mean_of(format, {encoded(format, values, &residual)}, count);
        for (size_t i = 0; i < count; ++i) {
          if (format == Format::fp16 && size > 65520) {
            CHECK(std::isinf(decoded[i]) && residual[i] == 0);
            continue;
          }
          if (format == Format::bf16 && size == Limits::max()) continue;  // nearest is infinite
          CHECK(std::isfinite(decoded[i]) && std::abs(residual[i]) <= size);
          CHECK(std::abs(decoded[i]) <= double(size) * 1.004);
          CHECK(decoded[i] + residual[i] == values[i]);
        }
      }
}

TEST(payloads_do_not_depend_on_where_a_tensor_is_cut) {
  for (Format format : kFormats) {
    const size_t block = block_of(format).values, count = 5 * block + 17;
    Floats values = some_values(count);
    for (uint64_t first : {uint64_t(3), (uint64_t(1) << 32) - block - 5}) {
      Bytes whole = encoded(format, values, nullptr, make_draw(1, 2, first));
      for (size_t cut : {block, 2 * block, 5 * block}) {
        Bytes head =
            encoded(format, Floats(values.begin(), values.begin() + ptrdiff_t(cut)), nullptr, make_draw(1, 2, first));
        Bytes tail = encoded(format, Floats(values.begin() + ptrdiff_t(cut), values.end()), nullptr,
                             make_draw(1, 2, first + cut));
        head.insert(head.end(), tail.begin(), tail.end());
        CHECK(head == whole);
      }
    }
  }
}

TEST(shared_steps_add_up) {
  for (size_t count : kCounts)
    for (size_t workers : {1, 3, 127}) {
      const int levels = int(127 / workers);
      const size_t blocks = (count + kSharedValues - 1) / kSharedValues;
      Floats largest(blocks), sum(count), mean(count);
      std::vector<Floats> values, residuals;
      for (size_t w = 0; w < workers; ++w) {
        values.push_back(some_values(count));
        residuals.push_back(some_values(count, 0.1f));
        Floats mine(blocks);
        block_largest(values[w].data(), residuals[w].data(), count, mine.data());
        for (size_t b = 0; b < blocks; ++b) largest[b] = std::max(largest[b], mine[b]);
      }
      std::vector<int8_t> total(count), bytes(count);
      for (size_t w = 0; w < workers; ++w) {
        Floats v(count);
        for (size_t i = 0; i < count; ++i) v[i] = values[w][i] + residuals[w][i];
        encode_shared(values[w].data(), residuals[w].data(), count, largest.data(), levels, bytes.data());
        for (size_t i = 0; i < count; ++i) {
          CHECK(std::abs(bytes[i]) <= levels && std::abs(int(total[i]) + bytes[i]) <= 127);
          CHECK(std::abs(residuals[w][i]) <= largest[i / kSharedValues] / float(levels) * 0.5001f);
          total[i] = int8_t(total[i] + bytes[i]);
          sum[i] += v[i] - residuals[w][i];
        }
      }
      decode_shared(total.data(), count, largest.data(), levels, workers, mean.data());
      for (size_t i = 0; i < count; ++i) CHECK(std::abs(mean[i] - sum[i] / float(workers)) < 1e-5);
    }
}

TEST(select_finds_the_largest) {
  for (size_t count : {1, 2, 100, 5000, 200000})
    for (size_t k : {size_t(0), size_t(1), count / 100, count / 2, count}) {
      Floats values = some_values(count), start = some_values(count), v(count);
      for (size_t i = 0; i < count; ++i) v[i] = values[i] + start[i];
      if (count > 10) v[3] = values[3] = Limits::quiet_NaN(), v[7] = values[7] = -Limits::infinity();
      std::vector<size_t> order(count);
      std::iota(order.begin(), order.end(), 0);
      auto size = [&](size_t i) { return std::bit_cast<uint32_t>(v[i]) & 0x7fffffff; };
      std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return size(a) > size(b); });
      Indices expected(order.begin(), order.begin() + ptrdiff_t(k));
      std::sort(expected.begin(), expected.end());
      Floats rest = v;
      for (int32_t i : expected) rest[size_t(i)] = 0;
      for (size_t threads : {1, 3})
        for (bool portable : {false, true}) {
          use_portable_kernels(portable);
          Floats residual = start;
          Sparse row = selected(values, k, &residual, threads);
          use_portable_kernels(false);
          CHECK(row.indices == expected && same_bits(residual, rest));
          for (size_t j = 0; j < k; ++j) CHECK(same_bits({row.chosen[j]}, {v[size_t(expected[j])]}));
        }
    }
}

TEST(among_equals_the_lower_index_is_selected) {
  for (float value : {0.0f, -2.5f})
    for (size_t threads : {1, 3}) {
      Floats values(300000, value);
      values[299999] = 7;
      Sparse row = selected(values, 1000, nullptr, threads);
      for (int32_t j = 0; j < 999; ++j) CHECK(row.indices[size_t(j)] == j && row.chosen[size_t(j)] == value);
      CHECK(row.indices[999] == 299999);
    }
}

// More are asked for than differ from the rest, and these lie all in one place.
TEST(select_goes_on_with_the_first_of_the_equal_ones) {
  Floats values(1 << 20, 1e-3f);
  for (size_t i = 0; i < 5000; ++i) values[i] = 1 + float(i);
  Sparse row = selected(values, 6000);
  for (int32_t j = 0; j < 6000; ++j) CHECK(row.indices[size_t(j)] == j);
}

TEST(sparse_rows_are_averaged_and_checked) {
  const size_t count = 20000;
  Floats expected(count), out(count, 5);
  std::vector<Sparse> rows;
  for (size_t r = 0; r < 3; ++r) rows.push_back(selected(some_values(count), 500 + r));
  std::vector<SparseRow> sources;
  for (auto& row : rows) {
    sources.push_back({row.indices.data(), row.chosen.data(), row.indices.size()});
    check_row(sources.back(), 0, count);
    for (size_t j = 0; j < row.indices.size(); ++j) expected[size_t(row.indices[j])] += row.chosen[j] / 3.0f;
  }
  scatter_mean(sources.data(), 3, 0, 4097, out.data());
  scatter_mean(sources.data(), 3, 4097, count, out.data());
  CHECK(out == expected);
  for (const Indices& bad : {Indices{0, 20000}, Indices{-1}, Indices{5, 5}, Indices{6, 5}})
    CHECK(test::error_of([&] { check_row({bad.data(), nullptr, bad.size()}, 0, count); }).kind == ErrorKind::bad_frame);
}

TEST(gaps_come_back) {
  for (size_t width : {1, 2})
    for (size_t count : {1, 254, 255, 256, 70000, 400000})
      for (size_t k : {size_t(0), size_t(1), count / 300, count / 2, count}) {
        Sparse row = selected(some_values(count), k);
        Bytes bytes(gap_bound(count, k, width), 1);
        const size_t used = pack_gaps(row.indices.data(), k, count, width, bytes.data());
        CHECK(used <= bytes.size());
        for (size_t i = used; i < bytes.size(); ++i) CHECK(bytes[i] == 255);
        Indices back(k);
        unpack_gaps(bytes.data(), bytes.size(), k, count, width, back.data());
        CHECK(back == row.indices);
      }
}

TEST(corrupted_gaps_are_refused_and_nothing_is_written_outside) {
  const size_t count = 3000, k = 50;
  Sparse row = selected(some_values(count), k);
  for (size_t width : {1, 2}) {
    Bytes good(gap_bound(count, k, width));
    pack_gaps(row.indices.data(), k, count, width, good.data());
    for (size_t i = 0; i < 20000; ++i) {
      Bytes bad = good;
      for (size_t n = 1 + rng() % 3; n--;) bad[rng() % bad.size()] = uint8_t(rng());
      Indices back(k);  // the address sanitizer sees what lies around it
      try {
        unpack_gaps(bad.data(), bad.size(), k, count, width, back.data());
        check_row({back.data(), nullptr, k}, 0, count);
      } catch (const Error& e) {
        CHECK(e.kind == ErrorKind::bad_frame);
      }
    }
    Indices back(k);
    CHECK(test::error_of([&] { unpack_gaps(good.data(), good.size() - width, k, count, width, back.data()); }).kind ==
          ErrorKind::bad_frame);
  }
}

TEST(random_indices_ascend_and_depend_on_nothing_else) {
  for (size_t count : {1, 10, 1000003})
    for (size_t k : {size_t(1), count / 10 + 1, count}) {
      Indices whole(k), parts(k), other(k);
      random_indices(count, k, make_draw(1, 2, 3), 0, k, whole.data());
      check_row({whole.data(), nullptr, k}, 0, count);
      random_indices(count, k, make_draw(1, 2, 3), 0, k / 3, parts.data());
      random_indices(count, k, make_draw(1, 2, 3), k / 3, k, parts.data() + k / 3);
      CHECK(parts == whole);
      random_indices(count, k, make_draw(1, 3, 3), 0, k, other.data());
      CHECK(count < 1000 || k == count || other != whole);
    }
}

int main() { return test::run_all(); }
