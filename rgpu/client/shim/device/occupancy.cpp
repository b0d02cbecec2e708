// cuOccupancy*: computed here from the device's facts and the load's table; cluster occupancy is requested from the
// worker, once for each set of arguments.
#include <algorithm>
#include <climits>
#include <map>

#include "api.hpp"
#include "device.hpp"
#include "module.hpp"
#include "occupancy_model.hpp"
#include "session.hpp"

using namespace rgpu;

namespace {

struct Question {
    occupancy::Device device;
    occupancy::Kernel kernel;
    Function* function = nullptr;
};

// Input of the formula for a function (or a kernel: the driver accepts both here).
CUresult question(CUfunction handle, Question& out) {
    if (CUresult r = require_session(); r) return r;
    if (Object* kernel = find_object(handle, Kind::kernel)) {
        if (CUresult r = function_of(*static_cast<Kernel*>(kernel), out.function); r) return r;
    } else {
        out.function = static_cast<Function*>(find_object(handle, Kind::function));
    }
    if (out.function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const Function& function = *out.function;
    if (CUresult r = complete_attributes(function); r) return r;
    const DeviceFacts& facts_of = *device_facts(function.module->context->device);
    const auto device = [&](int attribute, int otherwise) { return facts_of.attribute(attribute, otherwise); };
    out.device = {
        .threads_per_block = device(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024),
        .threads_per_multiprocessor = device(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 1024),
        .blocks_per_multiprocessor = device(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 16),
        .registers_per_multiprocessor = device(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536),
        .shared_per_multiprocessor = device(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 65536),
        .shared_reserved_per_block = device(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 0),
        .multiprocessors = device(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 1),
        .warp = std::max(device(CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32), 1),
        .major = device(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 7),
    };
    out.kernel = {
        .threads_per_block =
            function.attribute(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, out.device.threads_per_block),
        .shared_static = function.attribute(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, 0),
        .shared_dynamic = function.attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                             device(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152)),
        .registers = function.attribute(CU_FUNC_ATTRIBUTE_NUM_REGS, 32),
    };
    return CUDA_SUCCESS;
}

bool valid_flags(unsigned flags) { return (flags & ~unsigned{CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE}) == 0; }

enum Form : std::uint32_t { ACTIVE = 0, POTENTIAL = 1 };

// The worker's answers, by the bytes of the request and the attributes that the program set on the function.
struct Known {
    std::mutex lock;
    std::map<std::string, std::int32_t> values;
};

Known& known() {
    static auto* k = new Known;
    return *k;
}

constexpr std::size_t kMostKept = 4096;

// The device's facts do not contain how multiprocessors are grouped: the driver of the server's GPU answers.
CUresult ask(const Function& function, Form form, const CUlaunchConfig& config, int* value) {
    wire::ClusterOccupancy call{};
    call.module = function.module->number;
    call.function = function.index;
    call.form = form;
    call.grid_x = config.gridDimX;
    call.grid_y = config.gridDimY;
    call.grid_z = config.gridDimZ;
    call.block_x = config.blockDimX;
    call.block_y = config.blockDimY;
    call.block_z = config.blockDimZ;
    call.shared = config.sharedMemBytes;
    for (unsigned i = 0; config.attrs != nullptr && i < config.numAttrs; ++i) {
        if (config.attrs[i].id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) continue;
        const CUlaunchDim& dim = config.attrs[i].value.clusterDim;
        if (dim.x == 0 || dim.y == 0 || dim.z == 0) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
        call.cluster_x = dim.x;
        call.cluster_y = dim.y;
        call.cluster_z = dim.z;
    }
    std::string key;
    const auto add = [&](auto number) { key.append(reinterpret_cast<const char*>(&number), sizeof number); };
    add(call.module);
    for (const std::uint32_t number : {call.function, call.form, call.grid_x, call.grid_y, call.grid_z, call.block_x,
                                       call.block_y, call.block_z, call.shared, call.cluster_x, call.cluster_y,
                                       call.cluster_z})
        add(number);
    for (const auto& attribute : function.attributes) add(attribute.load(std::memory_order_relaxed));
    Known& k = known();
    {
        std::lock_guard guard(k.lock);
        if (auto it = k.values.find(key); it != k.values.end()) {
            *value = it->second;
            return CUDA_SUCCESS;
        }
    }
    Answer answer;
    if (CUresult r = await(call, nullptr, 0, answer); r) return r;
    wire::ClusterOccupancyReply reply;
    if (!reply.read(answer.reply.data(), answer.reply.size())) return CUDA_ERROR_UNKNOWN;
    *value = reply.value;
    std::lock_guard guard(k.lock);
    if (k.values.size() >= kMostKept) k.values.clear();
    k.values[key] = reply.value;
    return CUDA_SUCCESS;
}

CUresult cluster_question(CUfunction handle, const CUlaunchConfig* config, Question& q) {
    if (CUresult r = question(handle, q); r) return r;
    if (config == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const DeviceFacts& facts_of = *device_facts(q.function->module->context->device);
    if (facts_of.attribute(CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, 0) <= 0) return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

std::size_t threads_of(const CUlaunchConfig& config) {
    return std::size_t{config.blockDimX} * config.blockDimY * config.blockDimZ;
}

}  // namespace

extern "C" {

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* numBlocks, CUfunction func, int blockSize,
                                                              size_t dynamicSMemSize, unsigned int flags) {
    Question q;
    if (CUresult r = question(func, q); r) return r;
    if (numBlocks == nullptr || blockSize <= 0 || !valid_flags(flags)) return CUDA_ERROR_INVALID_VALUE;
    *numBlocks = occupancy::active_blocks(q.device, q.kernel, blockSize, dynamicSMemSize);
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* numBlocks, CUfunction func, int blockSize,
                                                     size_t dynamicSMemSize) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(numBlocks, func, blockSize, dynamicSMemSize, 0);
}

CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int* minGridSize, int* blockSize, CUfunction func,
                                                   CUoccupancyB2DSize blockSizeToDynamicSMemSize,
                                                   size_t dynamicSMemSize, int blockSizeLimit, unsigned int flags) {
    Question q;
    if (CUresult r = question(func, q); r) return r;
    if (minGridSize == nullptr || blockSize == nullptr || blockSizeLimit < 0 || !valid_flags(flags)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const auto dynamic = [&](int block) {
        return blockSizeToDynamicSMemSize != nullptr ? blockSizeToDynamicSMemSize(block) : dynamicSMemSize;
    };
    const auto best = occupancy::potential_block(q.device, q.kernel, dynamic, blockSizeLimit);
    *minGridSize = best.grid;
    *blockSize = best.block;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxPotentialBlockSize(int* minGridSize, int* blockSize, CUfunction func,
                                          CUoccupancyB2DSize blockSizeToDynamicSMemSize, size_t dynamicSMemSize,
                                          int blockSizeLimit) {
    return cuOccupancyMaxPotentialBlockSizeWithFlags(minGridSize, blockSize, func, blockSizeToDynamicSMemSize,
                                                     dynamicSMemSize, blockSizeLimit, 0);
}

CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t* dynamicSmemSize, CUfunction func, int numBlocks,
                                                 int blockSize) {
    Question q;
    if (CUresult r = question(func, q); r) return r;
    if (dynamicSmemSize == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const std::int64_t bytes = occupancy::available_dynamic(q.device, q.kernel, numBlocks, blockSize);
    if (bytes < 0) return CUDA_ERROR_INVALID_VALUE;
    *dynamicSmemSize = static_cast<size_t>(bytes);
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int* numClusters, CUfunction func, const CUlaunchConfig* config) {
    Question q;
    if (CUresult r = cluster_question(func, config, q); r) return r;
    const std::size_t threads = threads_of(*config);
    if (numClusters == nullptr || threads == 0 || threads > INT_MAX) return CUDA_ERROR_INVALID_VALUE;
    return ask(*q.function, ACTIVE, *config, numClusters);
}

CUresult cuOccupancyMaxPotentialClusterSize(int* clusterSize, CUfunction func, const CUlaunchConfig* config) {
    Question q;
    if (CUresult r = cluster_question(func, config, q); r) return r;
    const std::size_t threads = threads_of(*config);
    if (clusterSize == nullptr || threads == 0 || threads > INT_MAX) return CUDA_ERROR_INVALID_VALUE;
    return ask(*q.function, POTENTIAL, *config, clusterSize);
}

}  // extern "C"
