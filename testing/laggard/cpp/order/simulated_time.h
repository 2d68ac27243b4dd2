// Simulated time: when work would run on a real device, whatever the CPU needs for it here.
//
// Each stream thread and each host thread has a clock. A task starts when its stream is free and the
// host has launched it; it ends after the time that the model gives for its bytes and operations. A
// wait moves the clock of the waiting thread to the time of the event. A host thread's clock also moves
// by the processor time that the thread used outside of this library, and by a constant for each
// launch. So the times follow from sizes and from the order that the program asked for.
//
// Left out: two streams do not slow each other, and a host thread that sleeps loses no time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace laggard {

struct TimeModel {
  double copy_gb_s = 12, copy_us = 8;                        // between host and device
  double memory_gb_s = 800, tera_flops = 10, kernel_us = 3;  // of the device
  double launch_us = 5;                                      // host time for each launch
  double host_speed = 1;  // host time that counts for each second of processor time; 0: none
};

// What a task costs.
struct Cost {
  enum Kind { NOTHING, KERNEL, COPY };
  Kind kind = NOTHING;
  double bytes = 0, flops = 0;
};

struct Span {
  std::string op;
  int stream;
  double begin_ms, end_ms, bytes;
};

void start_simulated_time(const TimeModel& model);  // all clocks begin at 0
void stop_simulated_time();
bool is_time_simulated();
double duration_ms(const Cost& cost);

// The clock of this thread.
double& clock_ms();
// On a stream thread: one task. Returns nothing; the span is kept for take_timeline.
void spend(const std::string& op, int stream, double launched_ms, const Cost& cost);
std::vector<Span> take_timeline();

// On a host thread: the time between two sections counts as work of the program; time inside does not.
class HostSection {
 public:
  HostSection();
  ~HostSection();
  HostSection(const HostSection&) = delete;
  HostSection& operator=(const HostSection&) = delete;
};
double launch_time_ms();  // of a launch now: moves the clock of this thread

// What a host thread spent inside of this library, which a real device would not need, and its launches.
struct HostUse {
  double inside_ms = 0;
  uint64_t launches = 0;
};
HostUse host_use(uint64_t thread);  // threading.get_ident(); zeros for one that never launched, or has ended

}  // namespace laggard
