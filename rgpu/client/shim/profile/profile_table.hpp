// Functions of libcuda.so.1 for our libcupti.so: a table, requested with cuGetExportTable.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rgpu::profile {

// Id of the table; a fixed random UUID.
inline constexpr unsigned char kTableId[16] = {0x72, 0x67, 0x70, 0x75, 0x9b, 0x1d, 0x4e, 0x52,
                                               0xa3, 0x0c, 0x6f, 0x1e, 0x55, 0xd7, 0x20, 0x01};
inline constexpr std::uint32_t kTableVersion = 1;

enum class Kind : std::uint32_t { kernel, copy, memset, driver, synchronisation, external, runtime };
inline constexpr std::uint32_t bit(Kind kind) { return 1u << static_cast<unsigned>(kind); }

enum class Domain : std::uint32_t { driver = 1, runtime = 2 };  // CUpti_CallbackDomain
inline constexpr std::uint32_t bit(Domain domain) { return 1u << static_cast<unsigned>(domain); }

// Numbers as in CUpti_ActivityMemcpyKind and CUpti_ActivityMemoryKind.
enum : std::uint8_t { kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 8, kPeerToPeer = 10 };
enum : std::uint8_t { kPageable = 1, kPinned = 2, kDeviceMemory = 3 };

// One recorded activity; fields that do not concern its kind are 0. Times: ns of now().
struct Entry {
  Kind kind{};
  std::uint32_t correlation = 0;
  std::uint64_t start = 0, end = 0;
  std::uint32_t device = 0, context = 0, stream = 0;
  std::uint32_t thread = 0;      // driver, runtime: of the system
  std::uint32_t cbid = 0;        // CUpti_driver_api_trace_cbid, CUpti_runtime_api_trace_cbid; synchronisation: its type
  std::uint32_t result = 0;      // driver, synchronisation: CUresult; runtime: cudaError_t
  const char* name = nullptr;    // kernel: lives as long as the process
  std::uint32_t grid[3] = {}, block[3] = {};
  std::uint32_t static_shared = 0, dynamic_shared = 0, registers = 0, local = 0;
  std::uint32_t cooperative = 0;
  std::uint32_t graph = 0;       // of the executable graph that it is a node of, 0: none
  std::uint64_t node = 0;        // 1 + its place in that graph's launch
  std::uint64_t bytes = 0;
  std::uint32_t value = 0;       // memset
  std::uint8_t copy = 0, source = 0, destination = 0, asynchronous = 0;
  std::uint32_t external_kind = 0;
  std::uint64_t external = 0;
};

// A driver's or runtime's function is entered (site 0) or left (1).
struct ApiEvent {
  Domain domain;
  std::uint32_t site, cbid, correlation, context;
  const char* name;
  const void* parameters;  // the cupti header's NAME_params
  const void* result;          // CUresult* or cudaError_t*, when it is left
  void* current;           // CUcontext
  std::uint64_t* data;     // one word of the tool's for each call
  const char* kernel;      // its name, where one is launched
};

struct Table {
  std::size_t size;
  std::uint32_t version;
  std::uint64_t (*now)();
  void (*enable)(std::uint32_t kinds);           // those that are recorded from now on
  void (*settle)();                              // waits for the times of work that is known to be complete
  std::size_t (*take)(Entry* to, std::size_t most);
  std::size_t (*dropped)();                      // since the last call of this
  bool (*push)(std::uint32_t kind, std::uint64_t id);
  bool (*pop)(std::uint32_t kind, std::uint64_t* id);
  void (*callback)(void (*function)(const ApiEvent&), std::uint32_t domains);  // nullptr: none
  bool (*context)(void* handle, std::uint32_t* id, std::uint32_t* device);
  bool (*stream)(void* context, void* handle, bool per_thread, std::uint32_t* id);
};

}  // namespace rgpu::profile
