#include "paceline/transport/private_view.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "paceline/base/error.h"

namespace paceline {
namespace {
constexpr size_t kPage = 4096;
constexpr uint64_t kPresent = 1ull << 63, kSwapped = 1ull << 62, kOfFile = 1ull << 61;
}  // namespace

PrivateView::PrivateView(int fd, size_t offset, size_t bytes)
    : bytes_(bytes),
      mapped_bytes_((bytes + kPage - 1) / kPage * kPage),
      pagemap_(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) {
  if (!pagemap_)
    throw Error(ErrorKind::shared_memory, std::string("cannot open /proc/self/pagemap: ") + strerror(errno));
  void* p = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, off_t(offset));
  if (p == MAP_FAILED)
    throw Error(ErrorKind::shared_memory, std::string("cannot map a view of a segment: ") + strerror(errno));
  data_ = static_cast<std::byte*>(p);
}

PrivateView::~PrivateView() { munmap(data_, mapped_bytes_); }

bool PrivateView::changed() const {
  uint64_t entries[2048];
  size_t first = reinterpret_cast<uintptr_t>(data_) / kPage, end = first + mapped_bytes_ / kPage;
  while (first < end) {
    size_t wanted = std::min(end - first, std::size(entries)) * sizeof(uint64_t);
    ssize_t n = pread(pagemap_.get(), entries, wanted, off_t(first * sizeof(uint64_t)));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      throw Error(ErrorKind::shared_memory, std::string("cannot read /proc/self/pagemap: ") + strerror(errno));
    size_t count = size_t(n) / sizeof(uint64_t);
    for (size_t i = 0; i < count; ++i)
      if ((entries[i] & (kPresent | kSwapped)) && !(entries[i] & kOfFile)) return true;
    first += count;
  }
  return false;
}

void PrivateView::show(size_t at, size_t bytes, int fd, size_t offset) {
  size_t whole = (bytes + kPage - 1) / kPage * kPage;
  bool is_end = at + bytes == bytes_;
  if (at % kPage || offset % kPage || (whole != bytes && !is_end) || at > bytes_ || bytes > bytes_ - at)
    throw Error(ErrorKind::usage, "a view of " + std::to_string(bytes_) + " bytes cannot show " +
                                      std::to_string(bytes) + " bytes at " + std::to_string(at) +
                                      ": expected whole pages inside of it");
  if (!bytes) return;
  // In place of the old mapping, in one step: another thread of this process sees the one or the other.
  void* p = mmap(data_ + at, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, fd, off_t(offset));
  if (p == MAP_FAILED)
    throw Error(ErrorKind::shared_memory, std::string("cannot map a part of a view: ") + strerror(errno));
}

void PrivateView::discard() { madvise(data_, mapped_bytes_, MADV_DONTNEED); }

}  // namespace paceline
