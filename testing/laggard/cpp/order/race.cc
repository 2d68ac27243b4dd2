#include "order/race.h"

namespace laggard {
namespace {

std::string place(int stream) {
  return "laggard:" + std::to_string(stream / kStreamsPerDevice) + " stream " +
         std::to_string(stream % kStreamsPerDevice);
}

const char* verb(const Access& access) { return access.writes ? "writes" : "reads"; }

}  // namespace

std::string Race::summary() const {
  return later.op + " on " + place(later.stream) + " " + verb(later) + " memory that " + earlier.op + " on " +
         place(earlier.stream) + " " + verb(earlier) + ", without waiting for it";
}

std::string Race::report() const {
  return summary() + "\n  " + later.op + " was launched at\n" + text_of(later.stack) + "  " + earlier.op +
         " was launched at\n" + text_of(earlier.stack) +
         "  Let the later stream wait (wait_event, wait_stream), or call record_stream before a free.\n";
}

std::vector<Race> check_and_log(AccessLog& log, Access access, const VectorClock& seen) {
  std::vector<Race> races;
  auto ordered = [&](const Access& old) { return old.stream == access.stream || seen.seen[old.stream] >= old.launch; };
  for (const Access& old : log)
    if (!ordered(old) && (old.writes || access.writes) && overlap(old.region, access.region))
      races.push_back({old, access});
  // A write stands for all that it covers: a later access that has seen the write has seen them, or the
  // race between them has just been reported. A read stands for earlier reads of its own stream.
  std::erase_if(log, [&](const Access& old) {
    return access.region.covers(old.region) && (access.writes || (old.stream == access.stream && !old.writes));
  });
  log.push_back(std::move(access));
  return races;
}

}  // namespace laggard
