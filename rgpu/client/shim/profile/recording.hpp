// State shared by the parts of this folder. Entries are kept until the profiler takes them.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "profile.hpp"

namespace rgpu::profile {

inline constexpr unsigned kExternalKinds = 8;  // CUpti_ExternalCorrelationKind

struct Thread {
  unsigned depth = 0;             // of driver functions
  unsigned runtime = 0;           // of a runtime's functions that are recorded
  std::uint32_t correlation = 0;  // of the outermost
  std::uint64_t runtime_start = 0, runtime_data = 0;
  const Function* launching = nullptr;
  bool pinned = false;            // the host's end of the copy
  std::array<std::vector<std::uint64_t>, kExternalKinds> external;
};
Thread& thread();

extern std::atomic<void (*)(const ApiEvent&)> called_back;

inline bool records(Kind kind) { return recorded.load(std::memory_order_relaxed) & bit(kind); }
void keep(const Entry& entry);  // an entry with times of this side's clock
const char* lasting(const std::string& name);  // lives as long as the process
void place(Entry& entry);                      // sets the current context and its device
std::uint32_t stream_id(std::uint64_t number);
std::uint32_t new_correlation();
// Records one entry for each kind of outer id that the thread is in.
void note_external(std::uint32_t correlation);

}  // namespace rgpu::profile
