#include "paceline/transport/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>

#include "paceline/base/error.h"

namespace paceline {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

std::string megabytes(double bytes) {
  char text[32];
  snprintf(text, sizeof text, "%.1f MB", bytes / 1e6);
  return text;
}

// The kernel's estimate of available memory; 0 if it reports none.
uint64_t available_bytes() {
  FILE* f = fopen("/proc/meminfo", "re");
  if (!f) return 0;
  char line[128];
  uint64_t kb = 0;
  while (fgets(line, sizeof line, f))
    if (sscanf(line, "MemAvailable: %" SCNu64, &kb) == 1) break;
  fclose(f);
  return kb * 1024;
}

constexpr size_t kLargePage = 2 << 20;
constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1

[[noreturn]] void fail(const char* what, size_t bytes, int error) {
  throw Error(ErrorKind::shared_memory,
              std::string("shared memory: cannot ") + what + " a segment of " + megabytes(double(bytes)) + ": " +
                  strerror(error) + " (" + megabytes(double(available_bytes())) +
                  " available). Use smaller tensors or fewer processes, or raise the memory limit.");
}

// Maps the file. A large one begins at a multiple of a large page: otherwise it could not consist of those.
void* map_shared(int fd, size_t bytes) {
  constexpr int kAccess = PROT_READ | PROT_WRITE;
  if (bytes < kLargePage) return mmap(nullptr, bytes, kAccess, MAP_SHARED, fd, 0);
  size_t room = bytes + kLargePage;
  void* reserved = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return MAP_FAILED;
  auto start = reinterpret_cast<uintptr_t>(reserved), aligned = (start + kLargePage - 1) / kLargePage * kLargePage;
  void* p = mmap(reinterpret_cast<void*>(aligned), bytes, kAccess, MAP_SHARED | MAP_FIXED, fd, 0);
  size_t page = size_t(sysconf(_SC_PAGESIZE)), end = (aligned + bytes + page - 1) / page * page;
  if (aligned > start) munmap(reserved, aligned - start);
  if (start + room > end) munmap(reinterpret_cast<void*>(end), start + room - end);
  return p;
}

}  // namespace

void Fd::reset(int fd) {
  if (fd_ >= 0) close(fd_);
  fd_ = fd;
}

Segment::Segment(Fd fd, size_t bytes) : fd_(std::move(fd)), bytes_(bytes) {
  void* p = map_shared(fd_.get(), bytes);
  if (p == MAP_FAILED) fail("map", bytes, errno);
  data_ = static_cast<std::byte*>(p);
  madvise(p, bytes, MADV_HUGEPAGE);  // only a hint: a kernel without large pages ignores it
}

Segment Segment::create(const char* name, size_t bytes) {
  // fallocate() would use up the last page of the machine before it fails.
  if (uint64_t available = available_bytes(); available && bytes > available) fail("reserve", bytes, ENOMEM);
  Fd fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail("create", bytes, errno);
  if (ftruncate(fd.get(), off_t(bytes)) != 0) fail("size", bytes, errno);
  if (int rc; (rc = posix_fallocate(fd.get(), 0, off_t(bytes))) != 0) fail("reserve", bytes, rc);
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) fail("seal", bytes, errno);
  return Segment(std::move(fd), bytes);
}

void Segment::ask_for_large_pages(size_t offset, size_t bytes) { madvise(data_ + offset, bytes, kCollapse); }

Segment Segment::map(Fd fd, size_t bytes) {
  struct stat st;
  if (fstat(fd.get(), &st) != 0) fail("inspect", bytes, errno);
  int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || size_t(st.st_size) != bytes)
    throw Error(ErrorKind::bad_frame, "shared memory: a peer's segment is not sealed or has " +
                                          std::to_string(st.st_size) + " bytes, expected " + std::to_string(bytes));
  return Segment(std::move(fd), bytes);
}

Segment::Segment(Segment&& other) noexcept
    : fd_(std::move(other.fd_)), data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  if (this != &other) {
    if (data_) munmap(data_, bytes_);
    fd_ = std::move(other.fd_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = other.bytes_;
  }
  return *this;
}

Segment::~Segment() {
  if (data_) munmap(data_, bytes_);
}

}  // namespace paceline
