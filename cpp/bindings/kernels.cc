// Kernels without an engine: copies, rounding, sign bits, checksums. They check their arguments, then release the GIL.
#include "kernels.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "paceline/base/error.h"
#include "paceline/base/heap.h"
#include "paceline/reduce/bits.h"
#include "paceline/reduce/kernels.h"
#include "paceline/wire/crc32c.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

const char* dtype_name(int dtype) { return name_of(dtype < 0 ? DType::count_ : DType(dtype)); }

// The mean that a server takes is the one of the collectives: in the order of the inputs.
void reduce_mean_at(const std::vector<uintptr_t>& inputs, uintptr_t output, size_t count, int dtype) {
  if (dtype < 0 || !is_floating(DType(dtype)))
    throw Error(ErrorKind::usage,
                std::string("reduce_mean: works on floating-point numbers, not on ") + dtype_name(dtype));
  if (inputs.empty()) throw Error(ErrorKind::usage, "reduce_mean: there are no inputs");
  nb::gil_scoped_release release;
  std::vector<const void*> sources;
  for (uintptr_t input : inputs) sources.push_back(reinterpret_cast<const void*>(input));
  reduce_mean(sources.data(), sources.size(), reinterpret_cast<void*>(output), count, DType(dtype));
}

void round_stochastic_at(uintptr_t source, uintptr_t target, size_t count, int dtype, uint64_t seed, uint64_t first) {
  if (dtype != int(DType::float16) && dtype != int(DType::bfloat16))
    throw Error(ErrorKind::usage,
                std::string("round_stochastic: rounds to float16 or bfloat16, not to ") + dtype_name(dtype));
  nb::gil_scoped_release release;
  round_stochastic(reinterpret_cast<const float*>(source), reinterpret_cast<void*>(target), count, DType(dtype), seed,
                   first);
}

void require_words(const char* what, size_t signs, size_t words) {
  if (words != words_of(signs))
    throw Error(ErrorKind::usage, std::string(what) + ": " + std::to_string(signs) + " signs take " +
                                      std::to_string(words_of(signs)) + " words, not " + std::to_string(words));
}

void require_wide(const char* what, int dtype) {
  if (dtype != int(DType::float32) && dtype != int(DType::float64))
    throw Error(ErrorKind::usage, std::string(what) + ": works on float32 or float64, not on " + dtype_name(dtype));
}

using CoinParts = std::tuple<uint64_t, uint64_t, uint64_t>;  // seed, step, index of the first element
Coin to_coin(const CoinParts& coin) { return std::apply(make_coin, coin); }
uint64_t* to_words(uintptr_t address) { return reinterpret_cast<uint64_t*>(address); }

void pack_signs_at(uintptr_t values, size_t count, int dtype, const CoinParts& coin, uintptr_t bits, size_t words) {
  require_wide("pack_signs", dtype);
  require_words("pack_signs", count, words);
  nb::gil_scoped_release release;
  pack_signs(reinterpret_cast<const void*>(values), count, DType(dtype), to_coin(coin), to_words(bits));
}

void pack_tracked_at(uintptr_t values, uintptr_t momentum, double keep, size_t count, int dtype, const CoinParts& coin,
                     uintptr_t bits, size_t words) {
  require_wide("pack_tracked", dtype);
  require_words("pack_tracked", count, words);
  nb::gil_scoped_release release;
  pack_tracked(reinterpret_cast<const void*>(values), {reinterpret_cast<void*>(momentum), keep}, count, DType(dtype),
               to_coin(coin), to_words(bits));
}

std::pair<double, uint64_t> pack_corrected_at(uintptr_t values, uintptr_t momentum, double keep, uintptr_t voted,
                                              double scale, size_t count, int dtype, const CoinParts& coin,
                                              uintptr_t bits, size_t words) {
  require_wide("pack_corrected", dtype);
  require_words("pack_corrected", count, words);
  nb::gil_scoped_release release;
  Sizes sizes =
      pack_corrected(reinterpret_cast<const void*>(values), {reinterpret_cast<void*>(momentum), keep},
                     reinterpret_cast<void*>(voted), count, DType(dtype), scale, to_coin(coin), to_words(bits));
  return {sizes.sum, sizes.count};
}

void majority_at(const std::vector<uintptr_t>& rows, size_t words, const CoinParts& coin, uintptr_t bits) {
  if (rows.empty()) throw Error(ErrorKind::usage, "majority: there are no rows");
  nb::gil_scoped_release release;
  std::vector<const uint64_t*> sources;
  for (uintptr_t row : rows) sources.push_back(to_words(row));
  majority(sources.data(), sources.size(), words, to_coin(coin), to_words(bits));
}

void unpack_signs_at(uintptr_t bits, size_t words, size_t count, int dtype, double scale, uintptr_t values) {
  if (dtype < 0 || !is_floating(DType(dtype)))
    throw Error(ErrorKind::usage, std::string("unpack_signs: gives floating-point numbers, not ") + dtype_name(dtype));
  require_words("unpack_signs", count, words);
  nb::gil_scoped_release release;
  unpack_signs(to_words(bits), count, DType(dtype), scale, reinterpret_cast<void*>(values));
}

}  // namespace

void register_kernels(nb::module_& m) {
  m.def("reduce_mean", &reduce_mean_at, "inputs"_a, "output"_a, "count"_a, "dtype"_a);
  m.def(
      "crc32c", [](nb::bytes data, uint32_t crc) { return crc32c(crc, data.data(), data.size()); }, "data"_a,
      "crc"_a = 0);
  m.def("kernel_name", &kernel_name);
  m.def("keep_freed_memory", &keep_freed_memory);
  m.def("use_portable_kernels", &use_portable_kernels, "on"_a);
  m.def(
      "copy_past_cache",
      [](uintptr_t source, uintptr_t target, uint64_t bytes) {
        nb::gil_scoped_release release;
        copy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), bytes, true);
      },
      "source"_a, "target"_a, "nbytes"_a);
  m.def("round_stochastic", &round_stochastic_at, "source"_a, "target"_a, "count"_a, "dtype"_a, "seed"_a,
        "first"_a = 0);
  m.def("pack_signs", &pack_signs_at, "values"_a, "count"_a, "dtype"_a, "coin"_a, "bits"_a, "words"_a);
  m.def("pack_tracked", &pack_tracked_at, "values"_a, "momentum"_a, "keep"_a, "count"_a, "dtype"_a, "coin"_a, "bits"_a,
        "words"_a);
  m.def("pack_corrected", &pack_corrected_at, "values"_a, "momentum"_a, "keep"_a, "voted"_a, "scale"_a, "count"_a,
        "dtype"_a, "coin"_a, "bits"_a, "words"_a);
  m.def("majority", &majority_at, "rows"_a, "words"_a, "coin"_a, "bits"_a);
  m.def("unpack_signs", &unpack_signs_at, "bits"_a, "words"_a, "count"_a, "dtype"_a, "scale"_a, "values"_a);
}

}  // namespace paceline
