// The Python bindings of the codecs: they take addresses and counts, and release the GIL while they run.
#include "codecs.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "paceline/base/error.h"
#include "paceline/codec/blocks.h"
#include "paceline/codec/gaps.h"
#include "paceline/codec/select.h"
#include "paceline/codec/sparse.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

using codec::Draw;
using codec::Format;
using DrawParts = std::tuple<uint64_t, uint64_t, uint64_t>;  // seed, step, index of the first element
using Rows = std::vector<uintptr_t>;

Draw to_draw(const DrawParts& parts) { return std::apply(codec::make_draw, parts); }
float* floats(uintptr_t address) { return reinterpret_cast<float*>(address); }
uint8_t* bytes(uintptr_t address) { return reinterpret_cast<uint8_t*>(address); }
int32_t* integers(uintptr_t address) { return reinterpret_cast<int32_t*>(address); }

Format to_format(int format) {
  if (format < 0 || format >= int(Format::count_))
    throw Error(ErrorKind::usage, "unknown block format number " + std::to_string(format));
  return Format(format);
}

std::vector<const uint8_t*> to_rows(const Rows& rows) {
  if (rows.empty()) throw Error(ErrorKind::usage, "there are no rows to average");
  std::vector<const uint8_t*> sources;
  for (uintptr_t row : rows) sources.push_back(bytes(row));
  return sources;
}

void encode_at(int format, uintptr_t values, uintptr_t residual, size_t count, const DrawParts& draw,
               uintptr_t payload) {
  const Format to = to_format(format);
  nb::gil_scoped_release release;
  codec::encode(to, floats(values), floats(residual), count, to_draw(draw), bytes(payload));
}

void decode_mean_at(int format, const Rows& rows, size_t count, uintptr_t out) {
  const Format of = to_format(format);
  const auto sources = to_rows(rows);
  nb::gil_scoped_release release;
  codec::decode_mean(of, sources.data(), sources.size(), count, floats(out));
}

void recode_at(int format, const Rows& rows, uintptr_t residual, size_t count, const DrawParts& draw,
               uintptr_t payload) {
  const Format to = to_format(format);
  const auto sources = to_rows(rows);
  nb::gil_scoped_release release;
  codec::recode(to, sources.data(), sources.size(), floats(residual), count, to_draw(draw), bytes(payload));
}

void select_at(uintptr_t values, uintptr_t residual, size_t count, size_t k, const DrawParts& draw, size_t num_threads,
               uintptr_t indices, uintptr_t chosen) {
  if (k > count || count > codec::kLastIndex)
    throw Error(ErrorKind::usage, "select: cannot select " + std::to_string(k) + " of " + std::to_string(count));
  nb::gil_scoped_release release;
  codec::select(floats(values), floats(residual), count, k, to_draw(draw), num_threads, integers(indices),
                floats(chosen));
}

using SparseRows = std::vector<std::tuple<uintptr_t, uintptr_t, size_t>>;  // indices, values, how many

std::vector<codec::SparseRow> to_sparse(const SparseRows& rows) {
  std::vector<codec::SparseRow> sources;
  for (auto& [indices, values, count] : rows) sources.push_back({integers(indices), floats(values), count});
  return sources;
}

void check_rows_at(const SparseRows& rows, size_t count) {
  const auto sources = to_sparse(rows);
  nb::gil_scoped_release release;
  for (size_t i = 0; i < sources.size(); ++i) codec::check_row(sources[i], i, count);
}

void scatter_mean_at(const SparseRows& rows, size_t begin, size_t end, uintptr_t out) {
  const auto sources = to_sparse(rows);
  nb::gil_scoped_release release;
  codec::scatter_mean(sources.data(), sources.size(), begin, end, floats(out));
}

void require_width(size_t width) {
  if (width != 1 && width != 2) throw Error(ErrorKind::usage, "gaps take 1 or 2 bytes, not " + std::to_string(width));
}

size_t pack_gaps_at(uintptr_t indices, size_t k, size_t count, size_t width, uintptr_t to) {
  require_width(width);
  nb::gil_scoped_release release;
  return codec::pack_gaps(integers(indices), k, count, width, bytes(to));
}

void unpack_gaps_at(uintptr_t from, size_t num_bytes, size_t k, size_t count, size_t width, uintptr_t indices) {
  require_width(width);
  nb::gil_scoped_release release;
  codec::unpack_gaps(bytes(from), num_bytes, k, count, width, integers(indices));
}

void register_sparse(nb::module_& m) {
  m.def("select", &select_at, "values"_a, "residual"_a, "count"_a, "k"_a, "draw"_a, "num_threads"_a, "indices"_a,
        "chosen"_a);
  m.def("check_rows", &check_rows_at, "rows"_a, "count"_a);
  m.def("scatter_mean", &scatter_mean_at, "rows"_a, "begin"_a, "end"_a, "out"_a);
  m.def("pack_gaps", &pack_gaps_at, "indices"_a, "k"_a, "count"_a, "width"_a, "to"_a);
  m.def("unpack_gaps", &unpack_gaps_at, "source"_a, "num_bytes"_a, "k"_a, "count"_a, "width"_a, "indices"_a);
  m.def(
      "random_indices",
      [](size_t count, size_t k, const DrawParts& draw, size_t begin, size_t end, uintptr_t to) {
        nb::gil_scoped_release release;
        codec::random_indices(count, k, to_draw(draw), begin, end, integers(to));
      },
      "count"_a, "k"_a, "draw"_a, "begin"_a, "end"_a, "indices"_a);
}

void register_shared(nb::module_& m) {
  m.def(
      "block_largest",
      [](uintptr_t values, uintptr_t residual, size_t count, uintptr_t largest) {
        nb::gil_scoped_release release;
        codec::block_largest(floats(values), floats(residual), count, floats(largest));
      },
      "values"_a, "residual"_a, "count"_a, "largest"_a);
  m.def(
      "encode_shared",
      [](uintptr_t values, uintptr_t residual, size_t count, uintptr_t largest, int levels, uintptr_t to) {
        nb::gil_scoped_release release;
        codec::encode_shared(floats(values), floats(residual), count, floats(largest), levels,
                             reinterpret_cast<int8_t*>(to));
      },
      "values"_a, "residual"_a, "count"_a, "largest"_a, "levels"_a, "to"_a);
  m.def(
      "decode_shared",
      [](uintptr_t from, size_t count, uintptr_t largest, int levels, size_t workers, uintptr_t out) {
        nb::gil_scoped_release release;
        codec::decode_shared(reinterpret_cast<const int8_t*>(from), count, floats(largest), levels, workers,
                             floats(out));
      },
      "source"_a, "count"_a, "largest"_a, "levels"_a, "workers"_a, "out"_a);
}

}  // namespace

void register_codecs(nb::module_& m) {
  m.def("encode_blocks", &encode_at, "format"_a, "values"_a, "residual"_a, "count"_a, "draw"_a, "payload"_a);
  m.def("mean_of_blocks", &decode_mean_at, "format"_a, "rows"_a, "count"_a, "out"_a);
  m.def("recode_blocks", &recode_at, "format"_a, "rows"_a, "residual"_a, "count"_a, "draw"_a, "payload"_a);
  m.attr("BLOCK_FORMATS") = [] {
    nb::list found;
    for (int i = 0; i < int(Format::count_); ++i) {
      const codec::Block block = codec::block_of(Format(i));
      found.append(nb::make_tuple(codec::name_of(Format(i)), block.values, block.bytes));
    }
    return nb::tuple(found);
  }();
  register_shared(m);
  register_sparse(m);
}

}  // namespace paceline
