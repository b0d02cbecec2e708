// nvmlDeviceGet*RunningProcesses: the program, in each version of the list's layout.
#include "api.hpp"
#include "state.hpp"

using namespace rgpu::nvml;

namespace {

constexpr unsigned NO_INSTANCE = ~0u;  // of a GPU that is not divided

nvmlReturn_t processes_of(nvmlDevice_t device, std::vector<Process> &found) {
  Seen seen;
  unsigned index = 0;
  if (const nvmlReturn_t result = see(seen); result) return result;
  if (const nvmlReturn_t result = device_of(device, seen, index); result) return result;
  for (const Process &process : seen->processes)
    if (process.device == index) found.push_back(process);
  return NVML_SUCCESS;
}

// `count`: in, the capacity of the list; out, the number of processes.
template <class T, class Fill>
nvmlReturn_t list_processes(nvmlDevice_t device, unsigned *count, T *list, Fill fill) {
  std::vector<Process> found;
  if (!initialised()) return NVML_ERROR_UNINITIALIZED;
  if (!count || (*count && !list)) return NVML_ERROR_INVALID_ARGUMENT;
  if (const nvmlReturn_t result = processes_of(device, found); result) return result;
  const unsigned room = *count;
  *count = static_cast<unsigned>(found.size());
  if (room < found.size()) return NVML_ERROR_INSUFFICIENT_SIZE;
  for (std::size_t i = 0; i < found.size(); ++i) list[i] = fill(found[i]);
  return NVML_SUCCESS;
}

nvmlReturn_t nobody(nvmlDevice_t device, unsigned *count) {
  Seen seen;
  unsigned index = 0;
  if (const nvmlReturn_t result = recall(seen); result) return result;
  if (!count) return NVML_ERROR_INVALID_ARGUMENT;
  if (const nvmlReturn_t result = device_of(device, seen, index); result) return result;
  *count = 0;
  return NVML_SUCCESS;
}

}  // namespace

extern "C" {

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v1_t *list) {
  return list_processes(device, count, list,
                        [](const Process &one) { return nvmlProcessInfo_v1_t{one.pid, one.used}; });
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *list) {
  return list_processes(device, count, list, [](const Process &one) {
    return nvmlProcessInfo_v2_t{one.pid, one.used, NO_INSTANCE, NO_INSTANCE};
  });
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *list) {
  return nvmlDeviceGetComputeRunningProcesses_v3(device, count, list);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses(nvmlDevice_t device, unsigned *count, void *) {
  return nobody(device, count);
}
nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v2(nvmlDevice_t device, unsigned *count, void *) {
  return nobody(device, count);
}
nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *count, void *) {
  return nobody(device, count);
}
nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses(nvmlDevice_t device, unsigned *count, void *) {
  return nobody(device, count);
}
nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v2(nvmlDevice_t device, unsigned *count, void *) {
  return nobody(device, count);
}
nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, void *) {
  return nobody(device, count);
}

nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *list) {
  if (!initialised()) return NVML_ERROR_UNINITIALIZED;
  if (!list) return NVML_ERROR_INVALID_ARGUMENT;
  if (list->version != nvml_version<nvmlProcessDetailList_t>(1)) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  if (list->mode > NVML_PROCESS_MODE_MPS) return NVML_ERROR_INVALID_ARGUMENT;
  if (list->mode != NVML_PROCESS_MODE_COMPUTE) return nobody(device, &list->numProcArrayEntries);
  return list_processes(device, &list->numProcArrayEntries, list->procArray, [](const Process &one) {
    return nvmlProcessDetail_t{one.pid, one.used, NO_INSTANCE, NO_INSTANCE, 0};
  });
}

}  // extern "C"
