// Copies by several threads: one thread's rate is less than half of what a link through shared memory carries.
#pragma once

#include <cstddef>
#include <cstdint>

#include "helpers.hpp"

namespace rgpu {

// One stretch of memory to be copied. It stays where it is until wait_for_copy() has returned.
struct CopyJob final : Task {
  CopyJob() = default;
  CopyJob(std::uint8_t* to, const std::uint8_t* from, std::size_t size, bool summed)
      : to(to), from(from), size(size), summed(summed) {}
  void run() override;

  std::uint8_t* to = nullptr;
  const std::uint8_t* from = nullptr;
  std::size_t size = 0;
  bool summed = false;    // `crc` is wanted, of what was written: the source may change while it is read
  std::uint32_t crc = 0;
};

inline constexpr std::size_t kPooledCopySmallest = 256u << 10;  // bytes from which on a copy is worth giving away

// Threads beside the caller's: RGPU_COPY_THREADS, else three of four processors, twelve at most, and none where these are few.
unsigned copy_helpers();
// Copies, or has it copied: at once if there are no helpers.
void start_copy(CopyJob& job);
// Returns when it is done; helps meanwhile.
void wait_for_copy(CopyJob& job);

}  // namespace rgpu
