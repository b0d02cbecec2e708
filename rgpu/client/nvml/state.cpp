// See state.hpp.
#include "state.hpp"

#include <chrono>
#include <cstring>
#include <mutex>

namespace rgpu::nvml {
namespace {

using Clock = std::chrono::steady_clock;
// A monitor reads a dozen names and numbers of each device in a row: one answer of the agent serves them.
constexpr auto FRESH = std::chrono::milliseconds(20);
constexpr unsigned MAX_DEVICES = 64;

struct State {
  std::mutex lock;
  unsigned users = 0;
  Seen seen;
  Clock::time_point when;
};

State &state() {
  static auto *s = new State;  // never destroyed: programs call from exit handlers
  return *s;
}

}  // namespace
}  // namespace rgpu::nvml

// A handle is the address of one of these.
struct nvmlDevice_st {
  char unused;
};

namespace rgpu::nvml {
namespace {
nvmlDevice_st handles[MAX_DEVICES];
}

int Device::attribute(int which, int otherwise) const {
  for (const auto &[number, value] : attributes)
    if (number == which) return value;
  return otherwise;
}

bool initialised() {
  State &s = state();
  std::lock_guard guard(s.lock);
  return s.users > 0;
}

nvmlReturn_t initialise() {
  auto found = std::make_shared<Observation>();
  if (const nvmlReturn_t result = observe(*found); result) return result;  // outside the lock: it may take seconds
  State &s = state();
  std::lock_guard guard(s.lock);
  ++s.users;
  s.seen = std::move(found);
  s.when = Clock::now();
  return NVML_SUCCESS;
}

nvmlReturn_t finish() {
  State &s = state();
  std::lock_guard guard(s.lock);
  if (!s.users) return NVML_ERROR_UNINITIALIZED;
  --s.users;
  return NVML_SUCCESS;
}

nvmlReturn_t recall(Seen &seen) {
  State &s = state();
  {
    std::lock_guard guard(s.lock);
    if (!s.users) return NVML_ERROR_UNINITIALIZED;
    seen = s.seen;
    if (Clock::now() - s.when < FRESH) return NVML_SUCCESS;
  }
  // The session may have been opened meanwhile, or have another device than was expected.
  Seen newer;
  if (see(newer) == NVML_SUCCESS) seen = newer;
  return NVML_SUCCESS;
}

nvmlReturn_t see(Seen &seen) {
  State &s = state();
  if (!initialised()) return NVML_ERROR_UNINITIALIZED;
  auto found = std::make_shared<Observation>();
  if (observe(*found)) return NVML_ERROR_GPU_IS_LOST;
  std::lock_guard guard(s.lock);
  seen = s.seen = std::move(found);
  s.when = Clock::now();
  return NVML_SUCCESS;
}

nvmlDevice_t handle_of(unsigned index) { return &handles[index]; }

nvmlReturn_t device_of(nvmlDevice_t handle, const Seen &seen, unsigned &index) {
  for (index = 0; index < MAX_DEVICES; ++index)
    if (handle == &handles[index]) return index < seen->devices.size() ? NVML_SUCCESS : NVML_ERROR_GPU_IS_LOST;
  return NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t give_text(const std::string &text, char *to, unsigned length) {
  if (!to) return NVML_ERROR_INVALID_ARGUMENT;
  if (text.size() >= length) return NVML_ERROR_INSUFFICIENT_SIZE;
  std::memcpy(to, text.c_str(), text.size() + 1);
  return NVML_SUCCESS;
}

}  // namespace rgpu::nvml
