// cuCtx* functions that query a context or set state that only the client needs.
#include <algorithm>

#include "capturing.hpp"
#include "api.hpp"
#include "context.hpp"
#include "device.hpp"
#include "memory.hpp"
#include "profile.hpp"

using namespace rgpu;

namespace {

const DeviceFacts& facts_of(const Context& context) {
    return *device_facts(context.device);
}

constexpr std::uint64_t kLargestStack = 512 << 10;  // local memory of a thread, bytes

// A limit's value before it is set; false for a limit that the device does not have. As driver 580 answers on an H200,
// where the value follows from attributes.
bool default_limit(const Context& context, int limit, std::uint64_t* value) {
    const DeviceFacts& device = facts_of(context);
    const auto attribute = [&](int which) {
        return static_cast<std::uint64_t>(std::max(device.attribute(which, 0), 0));
    };
    switch (limit) {
        case CU_LIMIT_STACK_SIZE: *value = 1024; return true;
        case CU_LIMIT_PRINTF_FIFO_SIZE:
            *value = std::max<std::uint64_t>(1 << 20, attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) << 16);
            return true;
        case CU_LIMIT_MALLOC_HEAP_SIZE: *value = 8 << 20; return true;
        case CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH:
            *value = 2;
            return attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) < 9;
        case CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT: *value = 2048; return true;
        case CU_LIMIT_MAX_L2_FETCH_GRANULARITY: *value = 64; return true;
        case CU_LIMIT_PERSISTING_L2_CACHE_SIZE:
            *value = attribute(CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE) * 3 / 10;
            return attribute(CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE) != 0;
        case CU_LIMIT_SHMEM_SIZE:
            *value = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
            return true;
        case CU_LIMIT_CIG_ENABLED: *value = 0; return true;
        default: return false;
    }
}

}  // namespace

extern "C" {

CUresult cuCtxGetDevice(CUdevice* device) {
    if (CUresult r = require_session(); r) return r;
    const Context* context = top_context();
    if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *device = context->device;  // answered for a dead context as well
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice_v2(CUdevice* device, CUcontext ctx) {
    if (CUresult r = require_session(); r) return r;
    Context* context = nullptr;
    if (CUresult r = context_or_current(ctx, context); r) return r;
    if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *device = context->device;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned int* flags) {
    Context* context = nullptr;
    if (CUresult r = current(context); r) return r;
    if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *flags = context->flags | (context->primary ? unsigned{CU_CTX_MAP_HOST} : 0u);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext ctx, unsigned int* version) {
    if (CUresult r = require_session(); r) return r;
    Context* context = nullptr;
    if (CUresult r = context_or_current(ctx, context); r) return r;
    if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *version = 3020;  // version of cuCtxCreate_v2, which makes every context here
    return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext ctx, unsigned long long* ctxId) {
    if (CUresult r = require_session(); r) return r;
    Context* context = nullptr;
    if (CUresult r = context_or_current(ctx, context); r) return r;
    if (!context->alive.load(std::memory_order_acquire)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (ctxId == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *ctxId = context->unique_id;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t* pvalue, CUlimit limit) {
    Context* context = nullptr;
    if (CUresult r = current(context); r) return r;
    if (pvalue == nullptr || limit < 0 || limit > 9) return CUDA_ERROR_INVALID_VALUE;
    std::uint64_t value = 0;
    if (!default_limit(*context, limit, &value)) return CUDA_ERROR_UNSUPPORTED_LIMIT;
    const std::lock_guard hold(context->lock);
    const auto set = context->limits.find(limit);
    *pvalue = set != context->limits.end() ? set->second : value;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    Context* context = nullptr;
    if (CUresult r = current(context); r) return r;
    std::uint64_t before = 0;
    if (limit < 0 || limit > 9) return CUDA_ERROR_INVALID_VALUE;
    if (!default_limit(*context, limit, &before)) return CUDA_ERROR_UNSUPPORTED_LIMIT;
    if (limit == CU_LIMIT_STACK_SIZE) {
        if (value > kLargestStack) return CUDA_ERROR_INVALID_VALUE;
        value = (value + 15) / 16 * 16;
    }
    if (limit == CU_LIMIT_SHMEM_SIZE || limit == CU_LIMIT_CIG_ENABLED) return CUDA_ERROR_UNSUPPORTED_LIMIT;
    {
        const std::lock_guard hold(context->lock);
        context->limits[limit] = value;
    }
    return submit(wire::ContextLimit{.context = context->number, .limit = limit, .value = value});
}

CUresult cuCtxGetStreamPriorityRange(int* leastPriority, int* greatestPriority) {
    Context* context = nullptr;
    if (CUresult r = current(context); r) return r;
    const bool supported = facts_of(*context).attribute(CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 0) > 0;
    if (leastPriority != nullptr) *leastPriority = 0;
    if (greatestPriority != nullptr) *greatestPriority = supported ? -5 : 0;
    return CUDA_SUCCESS;
}

// Cache and bank preferences are hints without effect on the devices served: stored so that they read back.
CUresult cuCtxGetCacheConfig(CUfunc_cache* pconfig) {
    Context* context = nullptr;
    if (CUresult r = current(context); r) return r;
    if (pconfig == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *pconfig = static_cast<CUfunc_cache>(extras(*context).cache_config.load(std::memory_order_relaxed));
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCacheConfig(CUfunc_cache config) {
    Context* context = nullptr;
    if (CUresult r = current(context); r) return r;
    if (config < CU_FUNC_CACHE_PREFER_NONE || config > CU_FUNC_CACHE_PREFER_EQUAL) return CUDA_ERROR_INVALID_VALUE;
    extras(*context).cache_config.store(config, std::memory_order_relaxed);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetSharedMemConfig(CUsharedconfig* pConfig) {
    Context* context = nullptr;
    if (CUresult r = current(context); r) return r;
    if (pConfig == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *pConfig = CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetSharedMemConfig(CUsharedconfig config) {
    Context* context = nullptr;
    if (CUresult r = current(context); r) return r;
    return config >= CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE && config <= CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCtxResetPersistingL2Cache() {
    Context* context = nullptr;
    return current(context);
}

CUresult cuCtxSynchronize() {
    RGPU_PROFILED(17, "cuCtxSynchronize");
    api_.waits(4);
    Context* context = nullptr;
    if (CUresult r = current(context); r) return api_.leave(r);
    if (CUresult r = context_asked(*context); r) return api_.leave(r);
    if (device_finished(*context)) {
        print_device_text();
        return api_.leave(require());
    }
    if (CUresult r = wait_and_tell(*context); r) return api_.leave(r);
    return api_.leave(require());  // an execution error that the wait revealed
}

// ---------------------------------------------------------------- peers

CUresult cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags) {
    Context* context = nullptr;
    if (CUresult r = current(context); r) return r;
    const Context* peer = find(peerContext);
    if (Flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (peer == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (peer->device == context->device) return CUDA_ERROR_INVALID_DEVICE;
    if (!can_access_peer(context->device, peer->device)) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    // The server gives every device of a session access to the memory of the devices that it reaches: nothing to send.
    const std::lock_guard hold(context->lock);
    return extras(*context).peers.insert(peer->number).second ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

CUresult cuCtxDisablePeerAccess(CUcontext peerContext) {
    Context* context = nullptr;
    if (CUresult r = current(context); r) return r;
    const Context* peer = find(peerContext);
    if (peer == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    const std::lock_guard hold(context->lock);
    return extras(*context).peers.erase(peer->number) != 0 ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}

}  // extern "C"
