// Context life, and cuCtx*/cuDevicePrimaryCtx* that change it. Queries: context_state.cpp.
#include "context.hpp"

#include <condition_variable>

#include "api.hpp"
#include "device.hpp"
#include "module.hpp"

namespace rgpu {
namespace {

// Guards the table below, Context::references and flags, ContextExtras::ending.
// Never held across await().
std::mutex& contexts_lock() {
    static auto* lock = new std::mutex;
    return *lock;
}

// Signalled when a context has ended.
std::condition_variable& context_ended() {
    static auto* condition = new std::condition_variable;
    return *condition;
}

std::uint64_t next_unique_id() {
    static std::atomic<std::uint64_t> last{0};
    return ++last;
}

// Scheduling is one of 0, 1, 2, 4; `others` may be set as well.
bool valid_flags(unsigned flags, unsigned others) {
    const unsigned scheduling = flags & CU_CTX_SCHED_MASK;
    return (flags & ~(CU_CTX_SCHED_MASK | others)) == 0 &&
           (scheduling == CU_CTX_SCHED_AUTO || scheduling == CU_CTX_SCHED_SPIN || scheduling == CU_CTX_SCHED_YIELD ||
            scheduling == CU_CTX_SCHED_BLOCKING_SYNC);
}

constexpr unsigned kPrimaryFlags =
    CU_CTX_LMEM_RESIZE_TO_MAX | CU_CTX_COREDUMP_ENABLE | CU_CTX_USER_COREDUMP_ENABLE | CU_CTX_SYNC_MEMOPS;

// Puts context_create into the journal and marks the context alive.
CUresult activate(Context& context) {
    if (CUresult r = use_device(context.device); r) return r;
    const CUresult result = submit_with<wire::ContextCreate>([&](wire::ContextCreate& call) {
        context.number = next_number();
        call.context = context.number;
        call.device = session_device(context.device);
        call.flags = context.flags;
        call.primary = context.primary ? 1 : 0;
        return CUDA_SUCCESS;
    });
    if (result != CUDA_SUCCESS) return result;
    context.unique_id = next_unique_id();
    context.alive.store(true, std::memory_order_release);
    return CUDA_SUCCESS;
}

}  // namespace

Context* top_context() {
    auto& stack = context_stack();
    return stack.empty() ? nullptr : stack.back();
}

CUresult context_or_current(CUcontext handle, Context*& context) {
    context = handle == nullptr ? top_context() : find(handle);
    return context != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

Context* primary_context(CUdevice device) {
    static auto& table = *new std::vector<Context*>;  // never destroyed: runtimes release from exit handlers
    const std::lock_guard hold(contexts_lock());
    if (session_device(device) < 0) return nullptr;
    const auto index = static_cast<std::size_t>(device);
    if (table.size() <= index) table.resize(static_cast<std::size_t>(device_count()), nullptr);
    if (table[index] == nullptr) {
        auto context = std::make_unique<Context>();
        context->device = device;
        context->primary = true;
        context->extension = std::make_shared<ContextExtras>();
        context->alive.store(false, std::memory_order_relaxed);
        Context* made = context.get();
        if (enroll(std::move(context)) == nullptr) return nullptr;
        table[index] = made;
    }
    return table[index];
}

CUresult retain_primary(Context& context) {
    std::unique_lock hold(contexts_lock());
    const std::thread::id& ending = extras(context).ending;
    if (ending == std::this_thread::get_id()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;  // called by a storage destructor
    context_ended().wait(hold, [&] { return ending == std::thread::id(); });
    if (!context.alive.load(std::memory_order_acquire)) {
        if (CUresult r = activate(context); r) return r;
    }
    ++context.references;
    return CUDA_SUCCESS;
}

CUresult release_primary(Context& context) {
    {
        const std::lock_guard hold(contexts_lock());
        if (context.references == 0) return CUDA_ERROR_INVALID_CONTEXT;
        if (--context.references > 0) return CUDA_SUCCESS;
    }
    return destroy_context(context);
}

CUresult destroy_context(Context& context) {
    {
        const std::lock_guard hold(contexts_lock());
        if (!context.alive.load(std::memory_order_acquire) || extras(context).ending != std::thread::id()) {
            return CUDA_SUCCESS;
        }
        extras(context).ending = std::this_thread::get_id();
    }
    storage_clear(context);  // the runtime's destructors may still call this library with this context
    forget_modules(context);
    const CUresult released = release_context_objects(context);
    context.alive.store(false, std::memory_order_release);
    {
        const std::lock_guard hold(context.lock);
        context.limits.clear();
        extras(context).peers.clear();
    }
    const CUresult sent = submit(wire::ContextDestroy{.context = context.number});
    {
        const std::lock_guard hold(contexts_lock());
        extras(context).ending = std::thread::id();
    }
    context_ended().notify_all();
    return released != CUDA_SUCCESS ? released : sent;
}

}  // namespace rgpu

using namespace rgpu;

namespace {

// Whether the program has the device; errors as the driver's.
CUresult check_device(CUdevice device) {
    if (CUresult r = require_session(); r) return r;
    if (device_count() == 0) return CUDA_ERROR_NOT_INITIALIZED;
    return session_device(device) >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult primary_of(CUdevice device, Context*& context) {
    if (CUresult r = check_device(device); r) return r;
    context = primary_context(device);
    return context != nullptr ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult create(CUcontext* out, unsigned flags, CUdevice device) {
    if (CUresult r = require(); r) return r;
    if (out == nullptr || !valid_flags(flags, kPrimaryFlags | CU_CTX_MAP_HOST)) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult r = check_device(device); r) return r;
    auto owned = std::make_unique<Context>();
    Context* context = owned.get();
    context->device = device;
    context->flags = flags;
    context->extension = std::make_shared<ContextExtras>();
    if (CUresult r = activate(*context); r) return r;
    if (enroll(std::move(owned)) == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    context_stack().push_back(context);
    *out = static_cast<CUcontext>(context->handle);
    return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

// ---------------------------------------------------------------- primary contexts

CUresult cuDevicePrimaryCtxRetain(CUcontext* pctx, CUdevice dev) {
    Context* context = nullptr;
    if (CUresult r = require(); r) return r;
    if (CUresult r = primary_of(dev, context); r) return r;
    if (pctx == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult r = retain_primary(*context); r) return r;
    *pctx = static_cast<CUcontext>(context->handle);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
    Context* context = nullptr;
    if (CUresult r = primary_of(dev, context); r) return r;
    return release_primary(*context);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev) {
    Context* context = nullptr;
    if (CUresult r = primary_of(dev, context); r) return r;
    {
        const std::lock_guard hold(contexts_lock());
        context->references = 0;
    }
    return destroy_context(*context);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int* flags, int* active) {
    Context* context = nullptr;
    if (CUresult r = primary_of(dev, context); r) return r;
    if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *active = context->alive.load(std::memory_order_acquire) ? 1 : 0;
    *flags = context->flags;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags) {
    Context* context = nullptr;
    if (CUresult r = primary_of(dev, context); r) return r;
    if (!valid_flags(flags, kPrimaryFlags)) return CUDA_ERROR_INVALID_VALUE;
    const std::lock_guard hold(contexts_lock());
    if (context->flags == flags) return CUDA_SUCCESS;
    context->flags = flags;
    if (!context->alive.load(std::memory_order_acquire)) return CUDA_SUCCESS;  // context_create will carry the flags
    return submit(wire::ContextFlags{.context = context->number, .flags = flags});
}

// ---------------------------------------------------------------- other contexts

CUresult cuCtxCreate_v2(CUcontext* pctx, unsigned int flags, CUdevice dev) { return create(pctx, flags, dev); }

CUresult cuCtxCreate_v3(CUcontext* pctx, CUexecAffinityParam* paramsArray, int numParams, unsigned int flags,
                        CUdevice dev) {
    if (numParams != 0) {
        return paramsArray == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
    }
    return create(pctx, flags, dev);
}

CUresult cuCtxCreate_v4(CUcontext* pctx, CUctxCreateParams* ctxCreateParams, unsigned int flags, CUdevice dev) {
    if (ctxCreateParams != nullptr) {
        if (ctxCreateParams->cigParams != nullptr) return CUDA_ERROR_NOT_SUPPORTED;  // graphics interoperability
        if (ctxCreateParams->numExecAffinityParams != 0) return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
    }
    return create(pctx, flags, dev);
}

CUresult cuCtxDestroy_v2(CUcontext ctx) {
    if (CUresult r = require_session(); r) return r;
    if (ctx == nullptr) return CUDA_ERROR_INVALID_VALUE;
    Context* context = find(ctx);
    if (context == nullptr || context->primary) return CUDA_ERROR_INVALID_CONTEXT;
    const CUresult result = destroy_context(*context);
    // The context is removed from the calling thread's stack; on other threads' stacks it stays as a dead context.
    if (top_context() == context) context_stack().pop_back();
    retire(context);
    return result;
}

CUresult cuCtxAttach(CUcontext*, unsigned int) {
    if (CUresult r = require_session(); r) return r;
    return CUDA_ERROR_INVALID_CONTEXT;  // only contexts of the 2.x API can be attached to
}

CUresult cuCtxDetach(CUcontext ctx) {
    if (CUresult r = require_session(); r) return r;
    Context* context = find(ctx);
    if (context == nullptr || context->primary) return CUDA_ERROR_INVALID_CONTEXT;
    return cuCtxDestroy_v2(ctx);
}

// ---------------------------------------------------------------- the calling thread's stack

CUresult cuCtxGetCurrent(CUcontext* pctx) {
    if (CUresult r = require_session(); r) return r;
    if (pctx == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const Context* context = top_context();
    *pctx = context != nullptr ? static_cast<CUcontext>(context->handle) : nullptr;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext ctx) {
    if (CUresult r = require_session(); r) return r;
    auto& stack = context_stack();
    if (ctx == nullptr) {
        if (!stack.empty()) stack.pop_back();  // as in the driver: the entry below becomes current again
        return CUDA_SUCCESS;
    }
    Context* context = find(ctx);
    if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (stack.empty()) {
        stack.push_back(context);
    } else {
        stack.back() = context;
    }
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext ctx) {
    if (CUresult r = require_session(); r) return r;
    if (ctx == nullptr) return CUDA_ERROR_INVALID_VALUE;
    Context* context = find(ctx);
    if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    context_stack().push_back(context);
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext* pctx) {
    if (CUresult r = require_session(); r) return r;
    auto& stack = context_stack();
    if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (pctx != nullptr) *pctx = static_cast<CUcontext>(stack.back()->handle);
    stack.pop_back();
    return CUDA_SUCCESS;
}

CUresult cuCtxSetFlags(unsigned int flags) {
    Context* context = nullptr;
    if (CUresult r = current(context); r) return r;
    if (!valid_flags(flags, kPrimaryFlags)) return CUDA_ERROR_INVALID_VALUE;
    const std::lock_guard hold(contexts_lock());
    if (context->flags == flags) return CUDA_SUCCESS;
    context->flags = flags;
    return submit(wire::ContextFlags{.context = context->number, .flags = flags});
}

}  // extern "C"
