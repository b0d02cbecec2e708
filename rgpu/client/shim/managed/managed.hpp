// Managed memory as used by the rest of the shim, and the state shared in this folder
// (docs/developers/objects/managed.md).
//
// A region has one address on both sides: an allocation of the device's, and pages of the program's own at the same
// address. Each unit of 64 KiB is newest at the device, at the host, or the same at both; the program's pages are
// protected accordingly. Before work of the device the CPU's changes are sent, and all units become the device's; the
// CPU's next touch waits for that work and fetches.
//
// Lock order: Managed::lock, then the journal's section, then Managed::table. A thread that holds the lock may publish,
// and wait for a copy of its own on a carrier, which depends on nothing that the program does; it may not wait for work
// of the program's.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <vector>

#include "memory.hpp"

namespace rgpu {

inline constexpr std::uint64_t kUnit = 64 << 10, kSystemPage = 4096;

enum class Newest : std::uint8_t { device, both, host };

struct ManagedPiece {
  std::uint64_t offset = 0, size = 0;
};

// The program's advice for pages from an offset on, up to the next entry.
struct Advice {
  bool read_mostly = false;
  CUmemLocation preferred{}, prefetched{};  // type 0: none
  std::set<int> accessed_by;                // devices, CU_DEVICE_CPU among them
  bool operator==(const Advice& other) const;
};

struct ManagedRegion {
  std::uint64_t base = 0, size = 0;    // whole system pages
  std::vector<ManagedPiece> pieces;    // the managed parts of it: nothing else is sent or fetched
  std::uint8_t* alias = nullptr;       // the same pages, mapped without protection
  Context* context = nullptr;
  int device = 0;                      // the session's number
  std::uint64_t module = 0;            // of variables
  bool ended = false;
  // The fields below are guarded by Managed::lock.
  unsigned attached = CU_MEM_ATTACH_GLOBAL, attached_first = CU_MEM_ATTACH_GLOBAL;
  std::uint64_t stream = 0;            // CU_MEM_ATTACH_SINGLE: the only one whose work uses it
  std::vector<Newest> units;
  std::size_t at_host = 0;             // units that are not the device's alone
  std::map<std::uint64_t, std::uint64_t> uses;  // stream -> last call that may use it and is not known to be complete
  std::size_t next_fetch = 0, ahead = 0;  // unit where a fetch would continue, and number of units of the last one
  std::map<std::uint64_t, Advice> advice;       // by offset; {} before the first

  std::uint8_t* at(std::size_t unit) const { return reinterpret_cast<std::uint8_t*>(base + unit * kUnit); }
  std::uint64_t bytes(std::size_t from, std::size_t to) const;  // of units, the last of which may be short
};

// A stream and an event of our own in a context: copies in either direction on it wait for no work of the program's.
struct Carrier {
  StreamRef stream;
  std::uint64_t event = 0;
  std::uint64_t last = 0;                         // last copy to the device; 0: known to be complete
  std::map<std::uint64_t, std::uint64_t> joined;  // streams that wait for it -> the copy they wait for
};

struct Managed {
  std::mutex lock;
  std::condition_variable given;  // `giving` decreased
  unsigned giving = 0;            // calls that will be uses, not published yet
  std::map<std::uint64_t, std::uint64_t> uses;  // of everything that is attached globally: stream -> last call
  std::map<Context*, Carrier> carriers;
  std::set<std::uint64_t> lost;   // streams destroyed with unfinished work
  std::shared_mutex table;        // guards `regions` alone
  std::map<std::uint64_t, std::shared_ptr<ManagedRegion>> regions;
  std::atomic<std::size_t> count{0};
  std::atomic<std::uint64_t> lowest{~0ull}, highest{0};  // of all regions ever made
};

Managed& managed();
inline bool any_managed() { return managed().count.load(std::memory_order_relaxed) != 0; }
std::shared_ptr<ManagedRegion> managed_region(std::uint64_t address);
std::vector<std::shared_ptr<ManagedRegion>> managed_regions(std::uint64_t address, std::uint64_t size);

// Maps a region's pages into the program, and unmaps them: false, nullptr where the system refuses.
bool map_region(ManagedRegion& region);
void unmap_region(ManagedRegion& region);
// Sets the program's access to units; false: the system refused.
bool protect(ManagedRegion& region, std::size_t from, std::size_t to, Newest newest);
CUresult carrier_of(Managed& m, Context& context, Carrier*& carrier);  // lock held
void sent(Carrier& carrier, std::uint64_t seq);                        // lock held

// ---------------------------------------------------------------- life

// Tracks variables of a module that has just been loaded. CUDA_ERROR_OPERATING_SYSTEM: their addresses are in use here.
CUresult track_managed_variables(const Module& module, const std::vector<Global>& variables);
// Tracks memory of the CPU that the program has mapped (virtual/vmm.cpp); its bytes are at the device.
CUresult track_managed_mapping(std::uint64_t address, std::uint64_t size, Context& context);
// … is about to be unmapped: sends the program's changes to the device, which has them when its work is complete.
CUresult untrack_managed_mapping(std::uint64_t address, std::uint64_t size);
void untrack_managed_variables(const Module& module);
void forget_managed(std::uint64_t address);     // the allocation is about to be freed
void release_managed(Context& context);         // all its work is complete
void managed_lose_stream(const Stream& stream);  // it is about to be destroyed

// ---------------------------------------------------------------- the device's side

// Work of a stream that may use managed memory: all of it that the stream's kernels may access, or ranges only.
class ManagedUse {
 public:
  explicit ManagedUse(const StreamRef& stream) : stream_(stream) {}
  ~ManagedUse();
  ManagedUse(const ManagedUse&) = delete;
  void everything() { everything_ = true; }
  void range(std::uint64_t address, std::uint64_t size) { ranges_.push_back({address, size}); }
  void pointers_in(const std::vector<std::uint8_t>& parameters);  // a kernel's: to regions beside those
  CUresult upload();              // before the call is published
  void given(std::uint64_t seq);  // it has been published

 private:
  struct Part {
    std::shared_ptr<ManagedRegion> region;
    std::size_t from = 0, to = 0;  // units
  };
  void find_parts();
  CUresult send(const Part& part, std::unique_lock<std::mutex>& guard);

  const StreamRef& stream_;
  bool everything_ = false, begun_ = false;
  std::vector<ManagedPiece> ranges_;
  std::vector<Part> parts_;
};

// ---------------------------------------------------------------- the CPU's side

enum class Touch { present, elsewhere, lost };
// Makes bytes of managed memory present in the program: waits for the device's work that may use them, and fetches the
// newer ones. `elsewhere`: they are not managed memory. `waits`: false in a host function, for which the device waits.
Touch touch_managed(std::uint64_t address, std::uint64_t size, bool write, bool waits);
bool managed_is_present(std::uint64_t address, std::uint64_t size, bool write);
// Call before the shim reads the program's memory where it may not wait.
void ready_to_read(const void* data, std::size_t size);
void ready_to_write(void* data, std::size_t size);  // … to write it

void watch_faults();         // makes our handler the process's, in front of the installed one
void watch_system_calls();   // makes read(), write() and the like work on managed memory

}  // namespace rgpu
