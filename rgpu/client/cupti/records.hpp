// Layouts of CUPTI's activity records, and the numbers in them, for the records that are written here.
//
// Source: cupti_activity.h of the packages nvidia-cuda-cupti-cu12 12.4.127 and 12.8.90 and nvidia-cuda-cupti 13.0.85,
// compared field by field: each later version of a record begins as the earlier one and adds fields at its end
// (CUpti_ActivityKernel9 208 bytes, Kernel10 216; Memcpy5 88, Memcpy6 96; Synchronization 40, Synchronization2 56). A
// program steps from record to record with cuptiActivityGetNextRecord, so the longest form serves every header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rgpu::cupti {

enum Result : int {
  kSuccess = 0, kInvalidParameter = 1, kInvalidDevice = 2, kInvalidContext = 3, kInvalidOperation = 7,
  kOutOfMemory = 8, kParameterSizeNotSufficient = 10, kMaxLimitReached = 12, kNotInitialized = 15, kQueueEmpty = 18,
  kInvalidStream = 20, kInvalidKind = 21, kNotSupported = 27, kMultipleSubscribers = 39, kUnknown = 999
};

enum ActivityKind : std::uint32_t {
  kMemcpy = 1, kMemset = 2, kKernel = 3, kDriver = 4, kRuntime = 5, kConcurrentKernel = 10, kOverhead = 17,
  kMemcpy2 = 22, kCudaEvent = 36, kSynchronization = 38, kExternalCorrelation = 39, kKindCount = 64
};

struct KernelRecord {
  std::uint32_t kind;
  std::uint8_t cache_config, shared_config;
  std::uint16_t registers;
  std::uint32_t partitioned_requested, partitioned_executed;
  std::uint64_t start, end, completed;
  std::uint32_t device, context, stream;
  std::int32_t grid[3], block[3], static_shared, dynamic_shared;
  std::uint32_t local_per_thread, local_total, correlation;
  std::int64_t grid_id;
  const char* name;
  void* reserved;
  std::uint64_t queued, submitted;
  std::uint8_t launch_type, carveout_asked, carveout, padding;
  std::uint32_t shared_executed;
  std::uint64_t graph_node;
  std::uint32_t shared_limit, graph;
  void* access_window;
  std::uint32_t channel, channel_type, cluster[3], cluster_policy;
  std::uint64_t local_total_2;
  std::uint32_t potential_cluster, active_clusters;
  std::uint8_t device_launched, padding_2[7];
};
static_assert(sizeof(KernelRecord) == 216 && offsetof(KernelRecord, start) == 16 && offsetof(KernelRecord, device) == 40 &&
              offsetof(KernelRecord, correlation) == 92 && offsetof(KernelRecord, name) == 104 &&
              offsetof(KernelRecord, launch_type) == 136 && offsetof(KernelRecord, graph_node) == 144 &&
              offsetof(KernelRecord, access_window) == 160 && offsetof(KernelRecord, local_total_2) == 192);

struct MemcpyRecord {
  std::uint32_t kind;
  std::uint8_t copy_kind, source_kind, destination_kind, flags;
  std::uint64_t bytes, start, end;
  std::uint32_t device, context, stream, correlation, runtime_correlation, padding;
  void* reserved;
  std::uint64_t graph_node;
  std::uint32_t graph, channel, channel_type;
  std::uint8_t device_launched, padding_2[3];
  std::uint64_t count;
};
static_assert(sizeof(MemcpyRecord) == 96 && offsetof(MemcpyRecord, device) == 32 && offsetof(MemcpyRecord, reserved) == 56 &&
              offsetof(MemcpyRecord, graph) == 72 && offsetof(MemcpyRecord, count) == 88);

struct MemsetRecord {
  std::uint32_t kind, value;
  std::uint64_t bytes, start, end;
  std::uint32_t device, context, stream, correlation;
  std::uint16_t flags, memory_kind;
  std::uint32_t padding;
  void* reserved;
  std::uint64_t graph_node;
  std::uint32_t graph, channel, channel_type;
  std::uint8_t device_launched, padding_2[3];
};
static_assert(sizeof(MemsetRecord) == 88 && offsetof(MemsetRecord, flags) == 48 && offsetof(MemsetRecord, graph) == 72);

struct ApiRecord {
  std::uint32_t kind, cbid;
  std::uint64_t start, end;
  std::uint32_t process, thread, correlation, result;
};
static_assert(sizeof(ApiRecord) == 40);

struct SynchronizationRecord {
  std::uint32_t kind, type;
  std::uint64_t start, end;
  std::uint32_t correlation, context, stream, event;
  std::uint64_t event_sync;
  std::uint32_t result, padding;
};
static_assert(sizeof(SynchronizationRecord) == 56 && offsetof(SynchronizationRecord, event_sync) == 40);

struct ExternalRecord {
  std::uint32_t kind, external_kind;
  std::uint64_t external;
  std::uint32_t correlation, reserved;
};
static_assert(sizeof(ExternalRecord) == 24);

// Bytes of a record of that kind; 0 for a kind that is not written here.
inline std::size_t record_size(std::uint32_t kind) {
  switch (kind) {
    case kKernel:
    case kConcurrentKernel: return sizeof(KernelRecord);
    case kMemcpy: return sizeof(MemcpyRecord);
    case kMemset: return sizeof(MemsetRecord);
    case kDriver:
    case kRuntime: return sizeof(ApiRecord);
    case kSynchronization: return sizeof(SynchronizationRecord);
    case kExternalCorrelation: return sizeof(ExternalRecord);
    default: return 0;
  }
}

}  // namespace rgpu::cupti
