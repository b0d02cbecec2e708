// cuOccupancy*: computed here from the device's facts and the load's table.
#include <algorithm>
#include <climits>

#include "api.hpp"
#include "device.hpp"
#include "module.hpp"
#include "occupancy_model.hpp"

using namespace rgpu;

namespace {

struct Question {
    occupancy::Device device;
    occupancy::Kernel kernel;
    Function* function = nullptr;
};

// What the formula needs of a function (or of a kernel: here the driver takes both).
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

// Blocks of a cluster, from the launch's attributes or from the function's own.
int cluster_of(const Function& function, const CUlaunchConfig& config) {
    for (unsigned i = 0; config.attrs != nullptr && i < config.numAttrs; ++i) {
        if (config.attrs[i].id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) continue;
        const CUlaunchDim& dim = config.attrs[i].value.clusterDim;
        return static_cast<int>(std::min<std::uint64_t>(std::uint64_t{dim.x} * dim.y * dim.z, INT_MAX));
    }
    int size = 1;
    for (const int which : {CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH, CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT,
                            CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH}) {
        size *= std::clamp(function.attribute(which, 0), 1, 32);
    }
    return size;
}

constexpr int kPortableCluster = 8;      // blocks, on every device that has clusters
constexpr int kLargestCluster = 16;      // with CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
constexpr int kClusterProcessors = 16;   // multiprocessors that one cluster can spread over (a GPC, at least)

// Clusters of `size` blocks that are resident at once. How multiprocessors are grouped is not in the
// facts: a group of 16 is what every such device has at least, so this is a lower bound.
int active_clusters(const Question& q, int size, int block, std::size_t dynamic) {
    const int per_processor = occupancy::active_blocks(q.device, q.kernel, block, dynamic);
    const int groups = std::max(q.device.multiprocessors / kClusterProcessors, 1);
    return groups * (std::min(q.device.multiprocessors, kClusterProcessors) * per_processor / size);
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
    const int size = cluster_of(*q.function, *config);
    const std::size_t threads = threads_of(*config);
    if (numClusters == nullptr || threads == 0 || threads > INT_MAX) return CUDA_ERROR_INVALID_VALUE;
    if (size < 1 || size > kLargestCluster) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
    *numClusters = active_clusters(q, size, static_cast<int>(threads), config->sharedMemBytes);
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxPotentialClusterSize(int* clusterSize, CUfunction func, const CUlaunchConfig* config) {
    Question q;
    if (CUresult r = cluster_question(func, config, q); r) return r;
    const std::size_t threads = threads_of(*config);
    if (clusterSize == nullptr || threads == 0 || threads > INT_MAX) return CUDA_ERROR_INVALID_VALUE;
    const bool any_size = q.function->attribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 0) > 0;
    int size = any_size ? kLargestCluster : kPortableCluster;
    while (size > 1 && active_clusters(q, size, static_cast<int>(threads), config->sharedMemBytes) == 0) size /= 2;
    *clusterSize = size;
    return CUDA_SUCCESS;
}

}  // extern "C"
