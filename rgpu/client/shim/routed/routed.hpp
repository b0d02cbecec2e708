// What this library and the routing library (rgpu/client/router) share. In a process that uses devices of several
// members of a gang, the routing library is the program's libcuda.so.1. It loads a copy of this library for each
// member, and routes each call to one of them. All are built together; MemberTable::size detects a stale one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_types.hpp"
#include "wire.hpp"

namespace rgpu {

// Ranges of addresses that all members use: the first part of each is member 0's, and so on, so that an address belongs
// to one member. A session may use any address in the range of its device, so workers need not know of this.
inline constexpr std::uint64_t kReserveOffset = 4ull << 40, kReserveSize = 3ull << 40;
static_assert(kReserveOffset + kReserveSize == kAllocationSize);
inline constexpr std::uint64_t kPinnedRoom = kPinnedBase + kPinnedSize - kPinnedFirst;

// The bytes of each member's part of a range, in whole granules.
constexpr std::uint64_t part_of(std::uint64_t size, unsigned members) {
  return size / members / kGranule * kGranule;
}

// Exported by the routing library as `rgpu_router_facts`.
struct RouterFacts {
  std::size_t size = sizeof(RouterFacts);
  unsigned members = 1;   // of the run
  unsigned loading = 0;   // the member whose copy is being loaded
  int pinned_error = 0;   // errno of the reservation of the pinned range
  int device_error[kSessionDevices] = {};  // … of each device's
  int managing = -1;      // the member that has managed memory: faults of the CPU are handled by one copy
  // Returns the function for a slot of a private table (export_tables.cpp), given the copy's own one.
  const void* (*slot)(unsigned member, unsigned table, std::size_t slot, const void* own) = nullptr;
  // Called when the program has learned that calls of that member are complete, before it is told, in the thread that
  // learned it, without a lock.
  void (*learned)(unsigned member) = nullptr;
};

// The private tables of which slots are replaced.
enum Table : unsigned {
  kCudart, kHooks, kToolsTls, kStorage, kContextChecks, kSelfTest, kCublas, kCublasLt, kModuleFunctions, kNvrtc
};

// What the routing library asks of a copy, behind cuGetExportTable(kMemberTable).
inline constexpr char kMemberTable[] = "72677075206d656d6265722074626c31";

struct MemberTable {
  std::size_t size = sizeof(MemberTable);
  const void* handles = nullptr;   // all handles of the copy are in this range
  std::size_t handles_size = 0;
  int (*member_of)(CUdevice) = nullptr;  // the number of the member that has a device, -1: there is no such device
  const char* (*session)() = nullptr;    // the session's name; empty before its first context
  // Calls `reached` once, from any thread, as soon as the event's last record is complete or never will be.
  // CUDA_ERROR_STREAM_CAPTURE_ISOLATION for an event of an open capture; `reached` is not called on an error.
  CUresult (*when_recorded)(CUevent event, void (*reached)(void* user), void* user) = nullptr;
  // Puts into the stream a point that it does not pass before release(token). `reached` is called, once and from a
  // thread that must not be blocked, when the stream gets there, or with token nullptr if it never will.
  CUresult (*hold)(CUstream stream, bool per_thread, void (*reached)(void* user, void* token), void* user) = nullptr;
  void (*release)(void* token) = nullptr;
  bool (*registered)(const void* address) = nullptr;  // memory of the CPU that is registered with this member
  // The last group of collectives that this thread has given: its first stream's number and its position.
  void (*last_group)(std::uint64_t* stream, std::uint64_t* seq) = nullptr;
  bool (*complete)(std::uint64_t stream, std::uint64_t seq) = nullptr;  // whether that call is known to be complete
  // Has a replay wait, at this place of the journal, until that call is complete.
  void (*complete_here)(std::uint64_t seq) = nullptr;
};

const MemberTable& member_table();

// The routing library's facts; nullptr where this library serves the program alone.
const RouterFacts* router_facts();
unsigned member_number();  // 0 where it serves the program alone
unsigned member_count();   // 1 …
// Whether this library may have managed memory: in a process with several copies only the first one that wants some.
bool may_manage_memory();
// Whether an address is in the part of the pinned range that this library gives out.
bool of_own_pinned_range(std::uint64_t address);

}  // namespace rgpu
