// nvmlInit, nvmlSystem*, nvmlErrorString.
#include <unistd.h>

#include <cstdio>

#include "api.hpp"
#include "state.hpp"

using namespace rgpu::nvml;

namespace {

constexpr const char *ERRORS[] = {
    "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
    "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
    "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
    "Corrupted infoROM", "GPU is lost", "GPU requires reset", "GPU access blocked by the operating system",
    "Driver/library version mismatch", "In use by another client", "Insufficient Memory", "No data",
    "vGPU ECC not supported", "Insufficient Resources", "Frequency not supported", "Argument version mismatch",
    "Deprecated", "System not ready", "GPU not found", "Invalid state", "Reset type not supported"};

// The branch that this library is modelled on, reported where no driver's release is known (the cpu device).
constexpr const char *BRANCH = "580.00";

nvmlReturn_t release(std::string &text) {
  Seen seen;
  if (const nvmlReturn_t result = recall(seen); result) return result;
  text = seen->release.empty() ? BRANCH : seen->release;
  return NVML_SUCCESS;
}

}  // namespace

extern "C" {

nvmlReturn_t nvmlInit() { return initialise(); }
nvmlReturn_t nvmlInit_v2() { return initialise(); }
nvmlReturn_t nvmlInitWithFlags(unsigned) { return initialise(); }
nvmlReturn_t nvmlShutdown() { return finish(); }

const char *nvmlErrorString(nvmlReturn_t result) {
  const bool known = result >= 0 && static_cast<unsigned>(result) < sizeof ERRORS / sizeof *ERRORS;
  return known ? ERRORS[result] : "Unknown Error";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned length) {
  std::string found;
  const nvmlReturn_t result = release(found);
  return result ? result : give_text(found, text, length);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *text, unsigned length) {
  std::string found;
  Seen seen;
  if (nvmlReturn_t result = release(found); result) return result;
  if (nvmlReturn_t result = recall(seen); result) return result;
  return give_text(std::to_string(seen->driver_version / 1000) + "." + found, text, length);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
  Seen seen;
  if (const nvmlReturn_t result = recall(seen); result) return result;
  if (!version) return NVML_ERROR_INVALID_ARGUMENT;
  if (!seen->driver_version) return NVML_ERROR_NOT_FOUND;  // no device, so no driver version
  *version = static_cast<int>(seen->driver_version);
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *text, unsigned length) {
  if (!initialised()) return NVML_ERROR_UNINITIALIZED;
  char path[40], name[4096];
  std::snprintf(path, sizeof path, "/proc/%u/exe", pid);
  const ssize_t size = ::readlink(path, name, sizeof name);
  return size < 0 ? NVML_ERROR_NOT_FOUND : give_text(std::string(name, static_cast<std::size_t>(size)), text, length);
}

nvmlReturn_t nvmlUnitGetCount(unsigned *count) {
  if (!initialised()) return NVML_ERROR_UNINITIALIZED;
  if (!count) return NVML_ERROR_INVALID_ARGUMENT;
  *count = 0;
  return NVML_SUCCESS;
}

}  // extern "C"
