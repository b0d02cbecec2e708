// Copies by several threads: one thread copies at less than half the rate of a link through shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "helpers.hpp"

namespace rgpu {

// One range of memory to be copied. The object must not be moved until wait_for_copy() has returned.
struct CopyJob final : Task {
  CopyJob() = default;
  CopyJob(std::uint8_t* to, const std::uint8_t* from, std::size_t size, bool summed)
      : to(to), from(from), size(size), summed(summed) {}
  void run() override;

  std::uint8_t* to = nullptr;
  const std::uint8_t* from = nullptr;
  std::size_t size = 0;
  bool summed = false;    // compute `crc` of the bytes written: the source may change while it is read
  std::uint32_t crc = 0;
};

inline constexpr std::size_t kPooledCopySmallest = 256u << 10;  // bytes; shorter copies are not given to a helper

// Threads beside the caller's: RGPU_COPY_THREADS, else three of four processors, at most twelve, and none on few
// processors.
unsigned copy_helpers();
// Starts the copy in a helper, or copies at once if there are no helpers.
void start_copy(CopyJob& job);
// Returns when the copy is done; copies meanwhile.
void wait_for_copy(CopyJob& job);

}  // namespace rgpu
