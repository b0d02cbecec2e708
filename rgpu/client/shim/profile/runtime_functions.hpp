// Hooks for a CUDA runtime's functions (libcudart, also linked into libraries): the runtime reads a flag for each
// function, and calls hooks of the driver where the flag is set (docs/developers/links/profiling.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core.hpp"

namespace rgpu::profile {

inline constexpr std::size_t kRuntimeFunctions = 1024;  // CUpti_runtime_api_trace_cbid is below

// Arguments of the hook, called when a function is entered (site 0) and left (1).
//
// Source: the code of libcudart 12.8.90 and 13.0.96, the same in both (cudaStreamQuery, cudaLaunchKernel).
struct RuntimeCall {
  std::uint32_t size, padding;
  std::uint64_t context_id, stream_id, unknown;
  std::uint64_t* data;
  const std::int32_t* result;  // cudaError_t, valid when it is left
  const char* name;
  const void* parameters;      // the cupti header's NAME_params
  CUcontext context;
  CUstream stream;
  std::uint32_t cbid, site;
  const char* symbol;          // of the kernel, where one is launched
  const void* unknown_2[3];
};
static_assert(sizeof(RuntimeCall) == 0x78 && offsetof(RuntimeCall, data) == 0x20 &&
              offsetof(RuntimeCall, context) == 0x40 && offsetof(RuntimeCall, cbid) == 0x50);

std::uint32_t* runtime_flags();  // kRuntimeFunctions of them
void tell_runtime(bool on);      // sets all of them
// The hooks, in slots 1, 3 and 4.
void runtime_function(std::uint32_t cbid, const RuntimeCall* call);
void runtime_stream_id(CUcontext context, CUstream stream, std::uint64_t* id);
void runtime_context_id(CUcontext context, std::uint64_t* id);

}  // namespace rgpu::profile
