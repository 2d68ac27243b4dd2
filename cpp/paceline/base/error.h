// The one exception type of the core. Its kind names the Python class that bindings/errors.cc raises.
#pragma once
#include <stdexcept>
#include <string>

namespace paceline {

enum class ErrorKind : int {
  usage,                // UsageError
  collective_mismatch,  // CollectiveMismatch
  peer_lost,            // PeerLost
  peer_timeout,         // PeerTimeout
  generation_changed,   // GenerationChanged
  bad_frame,            // BadFrame
  shared_memory,        // SharedMemoryError
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, int rank = -1)
      : std::runtime_error(message), kind(kind), rank(rank) {}
  ErrorKind kind;
  int rank;  // the peer that the error is about, -1 when none
};

// Ends one operation, on all members at the same time; the group continues.
class OperationError : public Error {
 public:
  using Error::Error;
};

}  // namespace paceline
