// Pinned host memory that is closed while a copy is in flight.
//
// From the launch of a copy until the host has waited for it, the host must not read what the copy
// writes, and must not write what the copy reads. Such pages lose their access rights for that time:
// PROT_NONE for a copy to the host, PROT_READ for a copy to the device. Early access crashes, even if
// the copy happens to be done. Copies themselves use a second mapping.
//
// A page is closed only if the copy covers all of it that belongs to the block, so a ring of staging
// slots in one block works; slots that share a page are left to the poison and the values.
//
// Host memory of other owners can be registered, as with cudaHostRegister. A shared mapping gets a
// second one for copies and is closed like any other. Private memory has no second mapping: it stays
// open, and only clocks and poison watch it.
#pragma once

#include "order/race.h"

namespace laggard {

c10::Allocator& pinned_allocator();

struct PinnedBlock;
PinnedBlock* pinned_block_of(const void* address);               // nullptr: no pinned memory
char* copy_address(const PinnedBlock* block, const void* host);  // where copies may touch it
AccessLog* pinned_log_of(const void* address);                   // device lock held

// With the device lock held: close the region until the host has waited for the newest launch of `stream`.
void close_pinned_memory(PinnedBlock* block, const Region& region, bool writes, int stream);
// With the device lock held: reopen what the host has waited for.
void unlock_pinned_memory();
// True if a copy of these bytes is in flight as far as the host knows.
bool is_in_flight(const PinnedBlock* block, const Region& region);

// Pin memory that another owner allocated, until it is unregistered. Both return a number of
// CUDA's: 0, or why not.
int register_host_memory(uintptr_t address, size_t bytes);
int unregister_host_memory(uintptr_t address);
// True if early access to registered memory crashes; false if it cannot be closed.
bool is_closable(uintptr_t address);

// Memory for the collective backend: pinned, never closed; a gate orders the backend's thread.
at::Tensor staging_memory(int64_t bytes);

}  // namespace laggard
