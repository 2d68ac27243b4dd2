#include "paceline/collectives/request.h"

#include <algorithm>
#include <cstring>

#include "paceline/base/error.h"

namespace paceline {
namespace {
constexpr const char* kNames[] = {"barrier",   "all_reduce", "reduce", "reduce_scatter", "all_gather",
                                  "broadcast", "scatter",    "gather", "all_to_all",     "join"};
static_assert(sizeof kNames / sizeof kNames[0] == size_t(Kind::count_));

// Tensors of these must be alike on all ranks.
bool is_uniform(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::broadcast || kind == Kind::reduce_scatter;
}
}  // namespace

const char* name_of(Kind kind) { return kind < Kind::count_ ? kNames[size_t(kind)] : "?"; }
bool is_reducing(Kind kind) { return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter; }
bool is_rooted(Kind kind) {
  return kind == Kind::reduce || kind == Kind::broadcast || kind == Kind::scatter || kind == Kind::gather;
}
bool has_pieces(Kind kind) { return !is_uniform(kind) && kind != Kind::barrier; }

Descriptor describe(const Request& r, uint64_t number) {
  Descriptor d;
  d.number = number;
  d.kind = r.kind;
  d.dtype = r.dtype;
  d.op = r.op;
  d.root = r.root;
  const auto& parts = r.inputs.empty() ? r.outputs : r.inputs;
  for (auto& part : parts) d.count += part.count;
  d.ndim = uint8_t(r.shape.size());
  std::copy_n(r.shape.begin(), std::min<size_t>(r.shape.size(), kMaxShownDims), d.shape);
  return d;
}

std::string to_text(const Descriptor& d) {
  std::string text = std::string(name_of(d.kind)) + " #" + std::to_string(d.number);
  if (d.kind == Kind::barrier) return text;
  if (is_reducing(d.kind)) text += std::string(" ") + name_of(d.op);
  text += std::string(" ") + name_of(d.dtype) + "[";
  for (int i = 0; i < std::min<int>(d.ndim, kMaxShownDims); ++i) text += (i ? "," : "") + std::to_string(d.shape[i]);
  if (d.ndim > kMaxShownDims) text += ",...";
  text += "]";
  if (is_rooted(d.kind)) text += " root " + std::to_string(d.root);
  return text;
}

void require_match(const Descriptor& a, int rank_a, const Descriptor& b, int rank_b) {
  bool same = a.number == b.number && a.kind == b.kind;
  if (same && a.kind != Kind::barrier) same = a.dtype == b.dtype;
  if (same && is_reducing(a.kind)) same = a.op == b.op;
  if (same && is_rooted(a.kind)) same = a.root == b.root;
  if (same && is_uniform(a.kind))
    same = a.count == b.count && a.ndim == b.ndim && std::equal(a.shape, a.shape + kMaxShownDims, b.shape);
  if (same) return;
  throw Error(ErrorKind::collective_mismatch,
              "ranks disagree: rank " + std::to_string(rank_a) + " called " + to_text(a) + ", rank " +
                  std::to_string(rank_b) + " called " + to_text(b) +
                  ". Every member of a group must call the same operations in the same order, on tensors "
                  "of the same shape and dtype.");
}

void raise_piece_mismatch(const Descriptor& d, int from, uint64_t sent, int to, uint64_t expected) {
  throw Error(ErrorKind::collective_mismatch,
              "ranks disagree in " + std::string(name_of(d.kind)) + " #" + std::to_string(d.number) + ": rank " +
                  std::to_string(from) + " gives " + std::to_string(sent) + " elements of " + name_of(d.dtype) +
                  " to rank " + std::to_string(to) + ", which expects " + std::to_string(expected) +
                  ". Pass the sizes that the other side uses.");
}

}  // namespace paceline
