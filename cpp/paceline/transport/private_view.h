// A view of a segment that this process may write to privately: writes of other processes are visible until this
// process writes to a page itself; from then on the page is its own copy, until it is discarded.
//
// It is a private mapping of the segment's file. The kernel reports which pages have become copies
// (/proc/self/pagemap), so checking costs some hundred microseconds per 100 MB and writing costs nothing.
#pragma once
#include "paceline/transport/segment.h"

namespace paceline {

class PrivateView {
 public:
  PrivateView(int fd, size_t offset, size_t bytes);
  ~PrivateView();
  PrivateView(const PrivateView&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // Whether this process has written to any page since the last discard.
  bool changed() const;
  // Drops what this process wrote: the view shows the segment again.
  void discard();
  // Shows another segment from byte `at` on, instead of what the view shows there; what this process wrote there is
  // dropped. All numbers are of whole pages, except that the last page may be the view's last one.
  void show(size_t at, size_t bytes, int fd, size_t offset);

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0, mapped_bytes_ = 0;
  Fd pagemap_;
};

}  // namespace paceline
