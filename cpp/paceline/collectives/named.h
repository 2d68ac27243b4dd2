// Operations that members may submit in any order: they are matched by NAME.
//
// The first operation of each member's queue takes part in the group's next TURN. A turn posts the descriptors, with the
// hashes of the names:
//
//   all names equal         the operation runs at once, as it would in a group without names
//   equal, but not alike    this operation ends with an OperationError on all members; the group continues
//   names differ            the members exchange their queues and bring what all of them have to the front; if there
//                           is nothing, they wait until a member submits another operation
//   a member has joined     it takes part with zeros
//
// So members that agree pay nothing for the names, and there is no coordinator.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "paceline/base/error.h"
#include "paceline/collectives/request.h"
#include "paceline/loop/operation.h"

namespace paceline {

struct NamedCall {
  Request request;
  std::string label;            // the name
  uint32_t detail = 0;          // a hash of what else must be alike
  bool takes_any_size = false;  // all_gather, all_to_all: the outputs are allocated when all sizes are known

  Descriptor shown;
  // Results.
  std::vector<uint64_t> counts;  // if it takes any size: the elements from each member
  std::unique_ptr<std::byte[]> output;
  int last_joined = -1;  // of a join

  Operation* operation = nullptr;  // in the group's queue
  std::exception_ptr refusal;      // why it must not run: other members have another kind of this name
};

class NamedOperation final : public Operation {
 public:
  NamedOperation(Start start, std::shared_ptr<NamedCall> call);
  const std::shared_ptr<NamedCall> call;
};

using CallLists = std::vector<std::vector<Descriptor>>;  // the queue of each member

uint64_t hash_of(const std::string& name);
// "allreduce 'loss'" with its arguments.
std::string to_text(const NamedCall& call);

enum class Turn : uint8_t { agreed, some_joined, all_joined, names_differ };

// What the members' calls mean. Throws OperationError if they have the same name and kind, but are not alike.
Turn judge(const std::vector<Descriptor>& calls, const std::vector<int>& ranks, const std::string& label);
OperationError named_mismatch(const std::string& label, const Descriptor& a, int rank_a, const Descriptor& b,
                              int rank_b);
// The calls that all members can run now, in the order of the first member that has them. If a member has joined, only
// the first one.
std::vector<Descriptor> common_calls(const CallLists& lists);

}  // namespace paceline
