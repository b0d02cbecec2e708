// The life of contexts: which exist, which are active, and what ends with them.
//
// A primary context is one object for each device, for the life of the process: programs hold its handle before it is
// active and after a reset. It has a new number on the wire each time it becomes active. Other contexts are made and
// destroyed once.
#pragma once

#include <atomic>
#include <memory>
#include <set>
#include <thread>

#include "core.hpp"
#include "handles.hpp"

namespace rgpu {

// Client-side state of a context, in Context::extension.
struct ContextExtras {
    std::atomic<int> cache_config{0};
    std::set<std::uint64_t> peers;  // numbers of contexts whose memory it may access; guarded by Context::lock
    std::thread::id ending;  // the thread that is destroying it, else none; guarded by the contexts' lock
};

inline ContextExtras& extras(Context& context) { return *static_cast<ContextExtras*>(context.extension.get()); }

// Makes a context current for the lifetime of this object, where `result` is no error.
struct InContext {
    explicit InContext(CUcontext context) : result(cuCtxPushCurrent_v2(context)) {}
    InContext(const InContext&) = delete;
    ~InContext() {
        CUcontext popped;
        if (!result) cuCtxPopCurrent_v2(&popped);
    }
    const CUresult result;
};

// The primary context of the program's device, active or not; nullptr where there is no such device.
Context* primary_context(CUdevice device);

// Makes the context active if it is not (context_create is added to the journal), and counts a retain.
CUresult retain_primary(Context& context);

// Undoes one retain; the last one destroys the context. CUDA_ERROR_INVALID_CONTEXT when there is none.
CUresult release_primary(Context& context);

// The context that a handle names; NULL means the thread's current one. Dead
// primary contexts are found as well. CUDA_ERROR_INVALID_CONTEXT for neither.
CUresult context_or_current(CUcontext handle, Context*& context);

// The top of the calling thread's stack, dead or alive; nullptr when it is empty.
Context* top_context();

// Ends the objects that the context owns (storage of libraries, modules, memory, streams, events), then the context.
// Waits for its work. Does nothing to a context that is dead, or that another thread is ending; a retain meanwhile
// waits.
CUresult destroy_context(Context& context);

// ---- context-local storage (context_storage.cpp)

using StorageDestructor = void (*)(CUcontext, void* key, void* value);

CUresult storage_put(CUcontext context, void* key, void* value, StorageDestructor destructor);
CUresult storage_delete(CUcontext context, void* key);
CUresult storage_get(void** value, CUcontext context, void* key);
// Empties the context's storage and runs every destructor, with no lock held.
void storage_clear(Context& context);

}  // namespace rgpu
