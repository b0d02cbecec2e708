// Kernel launches: the checks that a driver makes at the call (SEMANTICS 4), parameters in both forms, attributes.
#include <cstdlib>
#include <cstring>

#include "capturing.hpp"
#include "device.hpp"
#include "managed.hpp"
#include "memory.hpp"
#include "module.hpp"
#include "session.hpp"
#include "profile.hpp"

namespace rgpu {
namespace {

// CUfunction_attribute numbers, which index the attributes of the module table.
enum { MAX_THREADS = 0, STATIC_SHARED = 1, REGISTERS = 4, MAX_DYNAMIC_SHARED = 8 };

constexpr std::uint64_t REGISTER_UNIT = 256;  // registers are allocated to a warp in this unit
constexpr std::uint32_t COOPERATIVE = 1;      // flag of the wire call
constexpr std::size_t MAX_ATTRIBUTES = 64;

struct Config {
  unsigned grid[3], block[3];
  unsigned shared = 0;
  CUstream stream = nullptr;
  bool cooperative = false;
  std::vector<CUlaunchAttribute> attributes;  // attributes that are sent to the worker
};

bool blocking() {
  static const bool yes = [] {
    const char* value = std::getenv("CUDA_LAUNCH_BLOCKING");
    return value && *value && std::strcmp(value, "0") != 0;
  }();
  return yes;
}

CUresult check(const Config& c, const Function& function, const DeviceFacts& device) {
  if (CUresult r = complete_attributes(function); r) return r;
  const int limits[6] = {
      device.attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647), device.attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535),
      device.attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535),      device.attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024),
      device.attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024),      device.attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64)};
  for (int i = 0; i < 3; ++i) {
    if (!c.grid[i] || !c.block[i]) return CUDA_ERROR_INVALID_VALUE;
    if (c.grid[i] > static_cast<unsigned>(limits[i]) || c.block[i] > static_cast<unsigned>(limits[3 + i]))
      return CUDA_ERROR_INVALID_VALUE;
  }
  const std::uint64_t threads = std::uint64_t{c.block[0]} * c.block[1] * c.block[2];
  if (threads > static_cast<std::uint64_t>(device.attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024)))
    return CUDA_ERROR_INVALID_VALUE;
  const std::uint64_t warp = static_cast<std::uint64_t>(std::max(1, device.attribute(CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32)));
  const std::uint64_t registers = static_cast<std::uint64_t>(function.attribute(REGISTERS, 0));
  const std::uint64_t for_warp = (registers * warp + REGISTER_UNIT - 1) / REGISTER_UNIT * REGISTER_UNIT;
  if (for_warp * ((threads + warp - 1) / warp) >
      static_cast<std::uint64_t>(device.attribute(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536)))
    return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  if (threads > static_cast<std::uint64_t>(function.attribute(MAX_THREADS, 1024))) return CUDA_ERROR_INVALID_VALUE;
  const std::uint64_t fixed = static_cast<std::uint64_t>(function.attribute(STATIC_SHARED, 0));
  const std::uint64_t plain = static_cast<std::uint64_t>(device.attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152));
  const std::uint64_t dynamic = static_cast<std::uint64_t>(
      function.attribute(MAX_DYNAMIC_SHARED, static_cast<int>(plain > fixed ? plain - fixed : 0)));
  return c.shared > dynamic ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// Checks that the cooperative grid fits the device at one time.
CUresult check_cooperative(const Config& c, CUfunction handle, const DeviceFacts& device) {
  if (!c.cooperative) return CUDA_SUCCESS;
  int blocks = 0;
  const int threads = static_cast<int>(c.block[0] * c.block[1] * c.block[2]);
  if (CUresult r = cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, handle, threads, c.shared); r) return r;
  const std::uint64_t grid = std::uint64_t{c.grid[0]} * c.grid[1] * c.grid[2];
  const auto room = static_cast<std::uint64_t>(blocks) *
                    static_cast<std::uint64_t>(device.attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 1));
  return grid > room ? CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE : CUDA_SUCCESS;
}

// Checks the blocks of a cluster: at most 8 on every device that has clusters, 16 where the program allowed the
// function more.
CUresult check_cluster(const Config& c, const Function& function) {
  constexpr std::uint64_t portable = 8, largest = 16;
  const bool more = function.attribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 0) > 0;
  for (const CUlaunchAttribute& attribute : c.attributes) {
    if (attribute.id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) continue;
    const CUlaunchDim& dim = attribute.value.clusterDim;
    std::uint64_t blocks;  // of 32-bit factors: the product of two cannot overflow
    if (__builtin_mul_overflow(std::uint64_t{dim.x} * dim.y, std::uint64_t{dim.z}, &blocks) ||
        blocks > (more ? largest : portable))
      return CUDA_ERROR_INVALID_CLUSTER_SIZE;
  }
  return CUDA_SUCCESS;
}

CUresult from_buffer(const Function& function, void** extra, std::vector<std::uint8_t>& parameters) {
  const void* buffer = nullptr;
  const std::size_t* size = nullptr;
  for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
    if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
      buffer = extra[1];
    else if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE)
      size = static_cast<const std::size_t*>(extra[1]);
    else
      return CUDA_ERROR_INVALID_VALUE;
  }
  const bool nothing = !size || !*size;
  if (nothing ? !size || function.parameter_bytes : !buffer || *size > 64 * 1024) return CUDA_ERROR_INVALID_VALUE;
  // A driver accepts fewer bytes too (NCCL passes the used part of a parameter of 4096). The contents of the missing
  // bytes are unspecified: zeros here. Bytes behind the last parameter are padding, which the kernel does not read.
  parameters.assign(function.parameter_bytes, 0);
  if (!nothing) std::memcpy(parameters.data(), buffer, std::min<std::size_t>(*size, function.parameter_bytes));
  return CUDA_SUCCESS;
}

// Packs the parameters as the function's table describes.
CUresult pack(const Function& function, void** kernel_params, void** extra, std::vector<std::uint8_t>& parameters) {
  if (extra && kernel_params) return CUDA_ERROR_INVALID_VALUE;
  if (extra) return from_buffer(function, extra, parameters);
  if (!kernel_params) return function.parameters.empty() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  parameters.resize(function.parameter_bytes);
  for (std::size_t i = 0; i < function.parameters.size(); ++i) {
    if (!kernel_params[i]) return CUDA_ERROR_INVALID_VALUE;
    const Parameter& parameter = function.parameters[i];
    std::memcpy(parameters.data() + parameter.offset, kernel_params[i], parameter.size);
  }
  return CUDA_SUCCESS;
}

// Every aligned word of the parameters that points into pinned memory.
std::vector<std::uint64_t> pinned_pointers(const std::vector<std::uint8_t>& parameters) {
  std::vector<std::uint64_t> found;
  if (!any_pinned()) return found;
  for (std::size_t at = 0; at + 8 <= parameters.size(); at += 4) {  // packed structures may align to 4
    std::uint64_t word;
    std::memcpy(&word, parameters.data() + at, sizeof word);
    if (word >= kPinnedBase && word < kPinnedBase + kPinnedSize) found.push_back(word);
  }
  return found;
}

// Makes every check that a driver makes at the call, and packs the parameters.
CUresult prepare(CUfunction handle, const Config& c, const Context& context, void** kernel_params, void** extra,
                 Function*& function, std::vector<std::uint8_t>& parameters) {
  function = static_cast<Function*>(find_object(handle, Kind::function));
  if (!function) {
    auto* kernel = static_cast<Kernel*>(find_object(handle, Kind::kernel));
    if (!kernel) return CUDA_ERROR_INVALID_HANDLE;
    if (CUresult r = function_of(*kernel, function); r) return r;
  }
  const DeviceFacts* device = device_facts(context.device);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  if (function->module->context->device != context.device) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult r = check(c, *function, *device); r) return r;
  if (CUresult r = check_cooperative(c, handle, *device); r) return r;
  if (CUresult r = check_cluster(c, *function); r) return r;
  return pack(*function, kernel_params, extra, parameters);
}

// Copies the fields that name the kernel on the wire into the node: the function's own object may be destroyed before
// it.
void name_function(KernelWork& work, const Function& function) {
  work.module = function.module->number;
  work.function = function.index;
  work.table = function.parameters;
  work.use = std::make_shared<ModuleUse>(work.module);
}

CUresult capture(CUfunction handle, const Config& c, const StreamRef& stream, const Function& function,
                 const std::vector<std::uint8_t>& parameters, bool& taken) {
  for (const CUlaunchAttribute& attribute : c.attributes)
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT || attribute.id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT)
      return refuse_in_capture(stream, "launch attributes that name an event");
  KernelWork work;
  work.handle = handle;
  work.context = stream.context;
  std::copy_n(c.grid, 3, work.grid);
  std::copy_n(c.block, 3, work.block);
  work.shared = c.shared;
  work.cooperative = c.cooperative;
  work.attributes = c.attributes;
  work.parameters = parameters;
  name_function(work, function);
  return capture_work(stream, std::move(work), taken);
}

CUresult launch(CUfunction handle, const Config& c, void** kernel_params, void** extra) {
  print_device_text();
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(c.stream, stream); r) return r;
  if (stream.context->device != context->device) return CUDA_ERROR_INVALID_HANDLE;  // the same error as for copies
  Function* function = nullptr;
  std::vector<std::uint8_t> parameters;
  if (CUresult r = prepare(handle, c, *context, kernel_params, extra, function, parameters); r) return r;
  if (capture_open()) {
    bool taken = false;
    if (CUresult r = capture(handle, c, stream, *function, parameters, taken); r || taken) return r;
  }
  MirrorUse mirrors(stream, pinned_pointers(parameters));
  if (CUresult r = mirrors.upload(); r) return r;
  ManagedUse managed(stream);
  managed.everything();
  managed.pointers_in(parameters);
  if (CUresult r = managed.upload(); r) return r;
  wire::Launch call{};
  call.module = function->module->number;
  call.function = function->index;
  call.grid_x = c.grid[0];
  call.grid_y = c.grid[1];
  call.grid_z = c.grid[2];
  call.block_x = c.block[0];
  call.block_y = c.block[1];
  call.block_z = c.block[2];
  call.shared = c.shared;
  call.flags = c.cooperative ? COOPERATIVE : 0;
  call.stream = stream.number;
  call.parameters = {parameters.data(), static_cast<std::uint32_t>(parameters.size())};
  call.attributes = {c.attributes.data(), static_cast<std::uint32_t>(c.attributes.size() * sizeof(CUlaunchAttribute))};
  std::uint64_t seq = 0;
  const profile::Launching launching(*function);
  if (CUresult r = submit_work(stream, call, &seq); r) return r;
  mirrors.given(seq);
  managed.given(seq);
  if (!blocking()) return CUDA_SUCCESS;
  wire::StreamSynchronize wait{};
  wait.stream = stream.number;
  return await_work(stream, wait);
}

CUresult take_attributes(const CUlaunchConfig& config, Config& c) {
  if (config.numAttrs > MAX_ATTRIBUTES || (config.numAttrs && !config.attrs)) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config.attrs[i];
    switch (attribute.id) {
      case CU_LAUNCH_ATTRIBUTE_IGNORE:
      case CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE:  // concerns graphs
        break;
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        c.cooperative = attribute.value.cooperative != 0;
        break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
      case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
        // These attributes contain a handle, which has no meaning on the server.
        log_once("launch event", "cuLaunchKernelEx: attributes that name an event are not supported");
        return CUDA_ERROR_NOT_SUPPORTED;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: {
        const CUlaunchDim& dim = attribute.value.clusterDim;
        if (!dim.x || !dim.y || !dim.z || c.grid[0] % dim.x || c.grid[1] % dim.y || c.grid[2] % dim.z)
          return CUDA_ERROR_INVALID_CLUSTER_SIZE;
        c.attributes.push_back(attribute);
        break;
      }
      default:
        if (attribute.id < 0 || attribute.id >= CU_LAUNCH_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
        c.attributes.push_back(attribute);
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace

CUresult fill_kernel_work(KernelWork& work, void** kernel_params, void** extra) {
  Config c{{work.grid[0], work.grid[1], work.grid[2]}, {work.block[0], work.block[1], work.block[2]},
           work.shared, nullptr, work.cooperative, {}};
  Function* function = nullptr;
  if (CUresult r = prepare(work.handle, c, *work.context, kernel_params, extra, function, work.parameters); r) return r;
  name_function(work, *function);
  return CUDA_SUCCESS;
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                        unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                        unsigned int sharedMemBytes, CUstream hStream, void** kernelParams, void** extra) {
  RGPU_PROFILED(307, "cuLaunchKernel", f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream, kernelParams, extra);
  Config c{{gridDimX, gridDimY, gridDimZ}, {blockDimX, blockDimY, blockDimZ}, sharedMemBytes, hStream, false, {}};
  return api_.leave(launch(f, c, kernelParams, extra));
}

CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                                   unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                                   unsigned int sharedMemBytes, CUstream hStream, void** kernelParams) {
  RGPU_PROFILED(477, "cuLaunchCooperativeKernel", f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream, kernelParams);
  Config c{{gridDimX, gridDimY, gridDimZ}, {blockDimX, blockDimY, blockDimZ}, sharedMemBytes, hStream, true, {}};
  return api_.leave(launch(f, c, kernelParams, nullptr));
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** kernelParams, void** extra) {
  RGPU_PROFILED(652, "cuLaunchKernelEx", config, f, kernelParams, extra);
  if (CUresult r = require(); r) return api_.leave(r);
  if (!config) return api_.leave(CUDA_ERROR_INVALID_VALUE);
  Config c{{config->gridDimX, config->gridDimY, config->gridDimZ},
           {config->blockDimX, config->blockDimY, config->blockDimZ},
           config->sharedMemBytes, config->hStream, false, {}};
  if (CUresult r = take_attributes(*config, c); r) return api_.leave(r);
  return api_.leave(launch(f, c, kernelParams, extra));
}

}  // extern "C"
