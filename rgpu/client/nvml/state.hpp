// The library's state: how often it was initialised, and the agent's last answer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "types.hpp"

namespace rgpu::nvml {

struct Device {
  std::uint8_t uuid[16] = {};
  std::int32_t pci_domain = 0, pci_bus = 0, pci_device = 0;
  std::uint64_t memory = 0;  // bytes that the session may use
  std::uint64_t used = 0;    // bytes that the session uses
  std::string name;
  std::vector<std::pair<std::int32_t, std::int32_t>> attributes;  // CUdevice_attribute, value

  int attribute(int which, int otherwise = 0) const;
};

struct Process {
  std::uint32_t pid = 0, device = 0;
  std::uint64_t used = 0;  // bytes
};

// One answer of the agent.
struct Observation {
  std::uint32_t driver_version = 0;  // as cuDriverGetVersion
  std::string release;               // of the node's driver; empty where it is not known
  std::vector<Device> devices;
  std::vector<Process> processes;
};
using Seen = std::shared_ptr<const Observation>;

// agent.cpp: sends a request to $RGPU_AGENT. NVML_ERROR_DRIVER_NOT_LOADED when there is no agent, or it has no pool; an
// observation without devices when the pool has no device to give.
nvmlReturn_t observe(Observation &found);

bool initialised();
nvmlReturn_t initialise();
nvmlReturn_t finish();

// The agent's present answer. NVML_ERROR_UNINITIALIZED; NVML_ERROR_GPU_IS_LOST once the agent has ended.
nvmlReturn_t see(Seen &seen);
// The agent's answer of a moment ago, or its last one before it ended: for values that hardly ever change.
nvmlReturn_t recall(Seen &seen);

nvmlDevice_t handle_of(unsigned index);
// The device of a handle in an observation: NVML_ERROR_INVALID_ARGUMENT for a pointer that is no handle.
nvmlReturn_t device_of(nvmlDevice_t handle, const Seen &seen, unsigned &index);

// Writes text with its NUL: NVML_ERROR_INSUFFICIENT_SIZE when it does not fit.
nvmlReturn_t give_text(const std::string &text, char *to, unsigned length);

}  // namespace rgpu::nvml
