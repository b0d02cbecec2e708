// Context-local storage: state that the CUDA runtime stores with a context.
//
// The runtime registers a destructor with each value and relies on it to drop its own state when the context ends;
// without the destructors a second cudaDeviceReset would find modules of the first context.
#include "context.hpp"

namespace rgpu {

CUresult storage_put(CUcontext handle, void* key, void* value, StorageDestructor destructor) {
    Context* context = nullptr;
    if (CUresult r = context_or_current(handle, context); r) return r;
    const std::lock_guard hold(context->lock);
    context->local_storage[key] = {value, destructor};
    return CUDA_SUCCESS;
}

CUresult storage_delete(CUcontext handle, void* key) {
    Context* context = nullptr;
    if (CUresult r = context_or_current(handle, context); r) return r;
    const std::lock_guard hold(context->lock);
    return context->local_storage.erase(key) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult storage_get(void** value, CUcontext handle, void* key) {
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    Context* context = nullptr;
    if (CUresult r = context_or_current(handle, context); r) return r;
    const std::lock_guard hold(context->lock);
    const auto found = context->local_storage.find(key);
    if (found == context->local_storage.end()) return CUDA_ERROR_INVALID_HANDLE;
    *value = found->second.first;
    return CUDA_SUCCESS;
}

void storage_clear(Context& context) {
    decltype(context.local_storage) entries;
    {
        const std::lock_guard hold(context.lock);
        entries.swap(context.local_storage);
    }
    for (const auto& [key, entry] : entries) {
        if (entry.second != nullptr) {
            entry.second(static_cast<CUcontext>(context.handle), const_cast<void*>(key), entry.first);
        }
    }
}

}  // namespace rgpu
