#include "memory/crash.h"

#include <unistd.h>

#include <csignal>
#include <cstring>

#include "memory/device_memory.h"
#include "memory/pinned_memory.h"

namespace laggard {
namespace {

struct sigaction previous;

const char* mistake_at(const void* address) {
  if (device_of(address) >= 0) return "laggard: the host touched device memory; copy the tensor to the host first\n";
  // Takes a mutex in a signal handler. This thread cannot hold it: no code that holds it touches closed memory.
  if (pinned_block_of(address))
    return "laggard: the host touched pinned memory while a copy of it was in flight; wait for its event first\n";
  return nullptr;
}

void handle(int number, siginfo_t* info, void*) {
  if (info->si_code > 0) {  // from the kernel: the address is true
    if (const char* text = mistake_at(info->si_addr)) (void)!write(STDERR_FILENO, text, strlen(text));
  }
  // The instruction runs again under the earlier handler, which prints the Python stack or ends the process.
  sigaction(number, &previous, nullptr);
}

}  // namespace

void explain_crashes() {
  struct sigaction now{};
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == handle) return;
  previous = now;
  struct sigaction mine{};
  mine.sa_sigaction = handle;
  mine.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&mine.sa_mask);
  sigaction(SIGSEGV, &mine, nullptr);
}

}  // namespace laggard
