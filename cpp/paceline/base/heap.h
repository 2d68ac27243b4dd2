// What malloc does with large blocks that are freed.
#pragma once
#include <malloc.h>

namespace paceline {

// Every step of training allocates the same large tensors and frees them again. By default malloc gives
// blocks of more than 32 MB back to the kernel at once, and the next step pays for fresh, zeroed pages: a
// third of the backward pass of a wide network. After this call the process keeps freed blocks.
// False if this malloc has no such setting.
inline bool keep_freed_memory() {
#ifdef __GLIBC__
  constexpr int kMmapThreshold = 1 << 30, kTrimThreshold = 2147483647;
  return mallopt(M_MMAP_THRESHOLD, kMmapThreshold) == 1 && mallopt(M_TRIM_THRESHOLD, kTrimThreshold) == 1;
#else
  return false;
#endif
}

}  // namespace paceline
