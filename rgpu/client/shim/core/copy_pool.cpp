#include "copy_pool.hpp"

#include <algorithm>
#include <cstring>

#include "crc32.hpp"

namespace rgpu {
namespace {

constexpr unsigned USUAL_HELPERS = 12, MOST_HELPERS = 64;
constexpr std::size_t BLOCK = 128 * 1024;  // bytes copied and summed at a time: they stay in the cache

Helpers& copy_pool() {
  static auto* all = new Helpers("rgpu-copy", copy_helpers());  // its threads may outlive static destructors
  return *all;
}

}  // namespace

void CopyJob::run() {
  if (!summed) {
    std::memcpy(to, from, size);
    return;
  }
  for (std::size_t at = 0; at < size; at += BLOCK) {
    const std::size_t part = std::min(BLOCK, size - at);
    std::memcpy(to + at, from + at, part);
    crc = crc32(crc, to + at, part);
  }
}

unsigned copy_helpers() {
  static const unsigned count = helpers_wanted("RGPU_COPY_THREADS", MOST_HELPERS, [](unsigned processors) {
    return processors < 4 ? 0u : std::min(USUAL_HELPERS, processors * 3 / 4);
  });
  return count;
}

void start_copy(CopyJob& job) { copy_pool().start(job); }

void wait_for_copy(CopyJob& job) { copy_pool().wait(job); }

}  // namespace rgpu
