// Orders this side's store before the load that decides whether a neighbour must be woken. Without it both
// sides of the sleep protocol could miss each other (each reads before the other's write is visible).
#pragma once
#include <atomic>

namespace paceline {

inline void full_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

}  // namespace paceline
