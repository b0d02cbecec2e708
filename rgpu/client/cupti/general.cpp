// Versions, errors, ids, times, devices; and callbacks.
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <bitset>
#include <cstring>
#include <mutex>

#include "cupti.hpp"

using namespace rgpu;
using namespace rgpu::cupti;

namespace {

thread_local int last_error = kSuccess;

constexpr unsigned kDomains = 7, kCallbacks = 2048;
constexpr std::uint32_t kDriverDomain = 1, kRuntimeDomain = 2;

// CUpti_CallbackData.
struct CallbackData {
  std::uint32_t site;
  const char* name;
  const void* parameters;
  const void* result;
  const char* symbol;
  void* context;
  std::uint32_t context_id;
  std::uint64_t* data;
  std::uint32_t correlation;
};
using Callback = void (*)(void* user, std::uint32_t domain, std::uint32_t cbid, const CallbackData* data);

// The one subscriber. Its address is the handle.
struct Subscriber {
  std::mutex lock;
  std::atomic<Callback> function{nullptr};
  void* user = nullptr;
  std::array<std::bitset<kCallbacks>, kDomains> wanted;
};

Subscriber& subscriber() {
  static auto* s = new Subscriber;
  return *s;
}

void happened(const profile::ApiEvent& event) {
  Subscriber& s = subscriber();
  const Callback function = s.function.load();
  const auto domain = static_cast<std::uint32_t>(event.domain);
  if (function == nullptr || event.cbid >= kCallbacks || !s.wanted[domain][event.cbid]) return;
  CallbackData data{event.site, event.name, event.parameters, event.result, event.kernel, event.current, event.context,
                    event.data, event.correlation};
  function(s.user, domain, event.cbid, &data);
}

void update(Subscriber& s) {
  const profile::Table* table = driver();
  if (table == nullptr) return;
  std::uint32_t domains = 0;
  for (const auto domain : {profile::Domain::driver, profile::Domain::runtime})
    if (s.function.load() && s.wanted[static_cast<std::uint32_t>(domain)].any()) domains |= profile::bit(domain);
  table->callback(domains ? happened : nullptr, domains);
}

constexpr const char* kResults[] = {
    "CUPTI_SUCCESS", "CUPTI_ERROR_INVALID_PARAMETER", "CUPTI_ERROR_INVALID_DEVICE", "CUPTI_ERROR_INVALID_CONTEXT",
    "CUPTI_ERROR_INVALID_EVENT_DOMAIN_ID", "CUPTI_ERROR_INVALID_EVENT_ID", "CUPTI_ERROR_INVALID_EVENT_NAME",
    "CUPTI_ERROR_INVALID_OPERATION", "CUPTI_ERROR_OUT_OF_MEMORY", "CUPTI_ERROR_HARDWARE",
    "CUPTI_ERROR_PARAMETER_SIZE_NOT_SUFFICIENT", "CUPTI_ERROR_API_NOT_IMPLEMENTED", "CUPTI_ERROR_MAX_LIMIT_REACHED",
    "CUPTI_ERROR_NOT_READY", "CUPTI_ERROR_NOT_COMPATIBLE", "CUPTI_ERROR_NOT_INITIALIZED",
    "CUPTI_ERROR_INVALID_METRIC_ID", "CUPTI_ERROR_INVALID_METRIC_NAME", "CUPTI_ERROR_QUEUE_EMPTY",
    "CUPTI_ERROR_INVALID_HANDLE", "CUPTI_ERROR_INVALID_STREAM", "CUPTI_ERROR_INVALID_KIND",
    "CUPTI_ERROR_INVALID_EVENT_VALUE", "CUPTI_ERROR_DISABLED", "CUPTI_ERROR_INVALID_MODULE",
    "CUPTI_ERROR_INVALID_METRIC_VALUE", "CUPTI_ERROR_HARDWARE_BUSY", "CUPTI_ERROR_NOT_SUPPORTED",
    "CUPTI_ERROR_UM_PROFILING_NOT_SUPPORTED", "CUPTI_ERROR_UM_PROFILING_NOT_SUPPORTED_ON_DEVICE",
    "CUPTI_ERROR_UM_PROFILING_NOT_SUPPORTED_ON_NON_P2P_DEVICES", "CUPTI_ERROR_UM_PROFILING_NOT_SUPPORTED_WITH_MPS",
    "CUPTI_ERROR_CDP_TRACING_NOT_SUPPORTED", "CUPTI_ERROR_VIRTUALIZED_DEVICE_NOT_SUPPORTED",
    "CUPTI_ERROR_CUDA_COMPILER_NOT_COMPATIBLE", "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES",
    "CUPTI_ERROR_OLD_PROFILER_API_INITIALIZED", "CUPTI_ERROR_OPENACC_UNDEFINED_ROUTINE",
    "CUPTI_ERROR_LEGACY_PROFILER_NOT_SUPPORTED", "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED",
    "CUPTI_ERROR_VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES", "CUPTI_ERROR_CONFIDENTIAL_COMPUTING_NOT_SUPPORTED",
    "CUPTI_ERROR_CMP_DEVICE_NOT_SUPPORTED", "CUPTI_ERROR_MIG_DEVICE_NOT_SUPPORTED",
    "CUPTI_ERROR_SLI_DEVICE_NOT_SUPPORTED", "CUPTI_ERROR_WSL_DEVICE_NOT_SUPPORTED"};

const char* result_name(int result) {
  if (result == kUnknown) return "CUPTI_ERROR_UNKNOWN";
  return result >= 0 && static_cast<std::size_t>(result) < std::size(kResults) ? kResults[result] : nullptr;
}

}  // namespace

const profile::Table* rgpu::cupti::driver() {
  static const profile::Table* const found = []() -> const profile::Table* {
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) library = ::dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) return nullptr;
    const auto ask = reinterpret_cast<int (*)(const void**, const void*)>(::dlsym(library, "cuGetExportTable"));
    const void* table = nullptr;
    if (ask == nullptr || ask(&table, profile::kTableId) != 0) return nullptr;
    const auto* ours = static_cast<const profile::Table*>(table);
    return ours->version == profile::kTableVersion && ours->size == sizeof(profile::Table) ? ours : nullptr;
  }();
  return found;
}

int rgpu::cupti::failed(int result) { return last_error = result; }

void rgpu::cupti::forget_callbacks() {
  Subscriber& s = subscriber();
  std::lock_guard guard(s.lock);
  s.function = nullptr;
  for (auto& domain : s.wanted) domain.reset();
  update(s);
}

CUPTI_API cuptiGetVersion(std::uint32_t* version) {
  if (version == nullptr) return failed(kInvalidParameter);
  *version = CUPTI_MAJOR >= 13 ? 130001 : 26;  // of CUDA 13.0 and 12.8
  return kSuccess;
}

CUPTI_API cuptiGetResultString(int result, const char** text) {
  if (text == nullptr || (*text = result_name(result)) == nullptr) return failed(kInvalidParameter);
  return kSuccess;
}
CUPTI_API cuptiGetErrorMessage(int result, const char** text) { return cuptiGetResultString(result, text); }

CUPTI_API cuptiGetLastError() {
  const int last = last_error;
  last_error = kSuccess;
  return last;
}

CUPTI_API cuptiGetTimestamp(std::uint64_t* time) {
  if (time == nullptr) return failed(kInvalidParameter);
  const profile::Table* table = driver();
  if (table == nullptr) return failed(kNotInitialized);
  *time = table->now();
  return kSuccess;
}

CUPTI_API cuptiGetContextId(void* context, std::uint32_t* id) {
  const profile::Table* table = driver();
  if (id == nullptr) return failed(kInvalidParameter);
  return table && table->context(context, id, nullptr) ? kSuccess : failed(kInvalidContext);
}
CUPTI_API cuptiGetDeviceId(void* context, std::uint32_t* id) {
  const profile::Table* table = driver();
  if (id == nullptr) return failed(kInvalidParameter);
  return table && table->context(context, nullptr, id) ? kSuccess : failed(kInvalidContext);
}
CUPTI_API cuptiGetStreamIdEx(void* context, void* stream, std::uint8_t per_thread, std::uint32_t* id) {
  const profile::Table* table = driver();
  if (id == nullptr) return failed(kInvalidParameter);
  return table && table->stream(context, stream, per_thread, id) ? kSuccess : failed(kInvalidStream);
}
CUPTI_API cuptiGetStreamId(void* context, void* stream, std::uint32_t* id) {
  return cuptiGetStreamIdEx(context, stream, 0, id);
}

namespace {
std::atomic<std::uint32_t> thread_ids{0};
}
CUPTI_API cuptiSetThreadIdType(std::uint32_t type) {  // the system's thread ids are given either way
  if (type > 1) return failed(kInvalidParameter);
  thread_ids = type;
  return kSuccess;
}
CUPTI_API cuptiGetThreadIdType(std::uint32_t* type) {
  if (type == nullptr) return failed(kInvalidParameter);
  *type = thread_ids;
  return kSuccess;
}

CUPTI_API cuptiComputeCapabilitySupported(int, int, int* supported) {
  if (supported == nullptr) return failed(kInvalidParameter);
  *supported = 3;
  return kSuccess;
}
CUPTI_API cuptiDeviceSupported(int, int* supported) {
  if (supported == nullptr) return failed(kInvalidParameter);
  *supported = 1;
  return kSuccess;
}
CUPTI_API cuptiDeviceVirtualizationMode(int, std::uint32_t* mode) {
  if (mode == nullptr) return failed(kInvalidParameter);
  *mode = 0;
  return kSuccess;
}

CUPTI_API cuptiFinalize() {
  forget_activities();
  forget_callbacks();
  return kSuccess;
}

// ---------------------------------------------------------------- callbacks

CUPTI_API cuptiSubscribe(void** handle, Callback function, void* user) {
  if (handle == nullptr) return failed(kInvalidParameter);
  if (driver() == nullptr) return failed(kNotInitialized);
  Subscriber& s = subscriber();
  std::lock_guard guard(s.lock);
  if (s.function.load() != nullptr) return failed(kMultipleSubscribers);
  s.user = user;
  s.function = function;
  *handle = &s;
  return kSuccess;
}
CUPTI_API cuptiSubscribe_v2(void** handle, Callback function, void* user, void*) {
  return cuptiSubscribe(handle, function, user);
}

CUPTI_API cuptiUnsubscribe(void* handle) {
  if (handle != &subscriber()) return failed(kInvalidParameter);
  forget_callbacks();
  return kSuccess;
}

// Callbacks are made for the driver's and the runtime's functions; other domains are accepted without effect.
CUPTI_API cuptiEnableCallback(std::uint32_t on, void* handle, std::uint32_t domain, std::uint32_t cbid) {
  Subscriber& s = subscriber();
  if (handle != &s || domain == 0 || domain >= kDomains || cbid >= kCallbacks) return failed(kInvalidParameter);
  std::lock_guard guard(s.lock);
  s.wanted[domain][cbid] = on != 0;
  update(s);
  return kSuccess;
}
CUPTI_API cuptiEnableDomain(std::uint32_t on, void* handle, std::uint32_t domain) {
  Subscriber& s = subscriber();
  if (handle != &s || domain == 0 || domain >= kDomains) return failed(kInvalidParameter);
  std::lock_guard guard(s.lock);
  if (on) s.wanted[domain].set();
  else s.wanted[domain].reset();
  update(s);
  return kSuccess;
}
CUPTI_API cuptiEnableAllDomains(std::uint32_t on, void* handle) {
  for (std::uint32_t domain = 1; domain < kDomains; ++domain)
    if (const int result = cuptiEnableDomain(on, handle, domain)) return result;
  return kSuccess;
}
CUPTI_API cuptiGetCallbackState(std::uint32_t* on, void* handle, std::uint32_t domain, std::uint32_t cbid) {
  Subscriber& s = subscriber();
  if (on == nullptr || handle != &s || domain == 0 || domain >= kDomains || cbid >= kCallbacks)
    return failed(kInvalidParameter);
  std::lock_guard guard(s.lock);
  *on = s.wanted[domain][cbid];
  return kSuccess;
}
CUPTI_API cuptiSupportedDomains(std::size_t* count, const std::uint32_t** domains) {
  static constexpr std::uint32_t kSupported[] = {kDriverDomain, kRuntimeDomain};
  if (count == nullptr || domains == nullptr) return failed(kInvalidParameter);
  *count = std::size(kSupported), *domains = kSupported;
  return kSuccess;
}

CUPTI_API cuptiGetCallbackName(std::uint32_t domain, std::uint32_t cbid, const char** name) {
  if (name == nullptr || (domain != kDriverDomain && domain != kRuntimeDomain)) return failed(kInvalidParameter);
  if (cbid >= (domain == kDriverDomain ? driver_name_count : runtime_name_count)) return failed(kInvalidParameter);
  const char* at = domain == kDriverDomain ? driver_names : runtime_names;
  while (cbid--) at += std::strlen(at) + 1;
  if (*at == 0) return failed(kInvalidParameter);
  *name = at;
  return kSuccess;
}
