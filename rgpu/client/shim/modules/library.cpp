// cuLibrary* and cuKernel*.
//
// A library belongs to no context. It is sent to the worker at the first use, into the context of that use: the current
// one, or without one the first device's primary context, which the library then retains. Each context that uses it
// gets a module of its own. Until then the binary is kept: as the program's own bytes where the program promises not to
// change them (CU_LIBRARY_BINARY_IS_PRESERVED), else as a copy.
#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "api.hpp"
#include "context.hpp"
#include "device.hpp"
#include "memory.hpp"
#include "module.hpp"
#include "profile.hpp"

namespace rgpu {
namespace {

struct LoadedLibrary;

struct LibraryKernel : Kernel {
    std::string name;
    std::vector<Parameter> parameters;
    std::mutex lock;                             // guards `wanted`
    std::map<std::pair<int, int>, int> wanted;  // (device, attribute) → value set by the program
};

// The library in one context, in that context's present life.
struct Instance {
    std::uint64_t context_number = 0;
    bool loading = false;
    Module* module = nullptr;
    CUresult result = CUDA_SUCCESS;
};

struct LoadedLibrary : Library {
    std::string copy;  // copy of the binary, unless the program preserves it
    module_binary::Binary binary;
    CUresult unreadable = CUDA_SUCCESS;  // the error returned at the first use of the binary
    JitOptions options;
    std::mutex lock;  // guards the fields below; not held while a load is awaited
    std::condition_variable loaded;
    std::map<Context*, Instance> instances;
    std::map<std::string, LibraryKernel*> by_name;
    Context* retained = nullptr;  // a primary context that this library made active
};

LoadedLibrary& whole(Library& library) { return static_cast<LoadedLibrary&>(library); }
LibraryKernel& whole(Kernel& kernel) { return static_cast<LibraryKernel&>(kernel); }

// The context in which a call without a context argument uses the library.
CUresult context_for(LoadedLibrary& library, Context*& context) {
    context = current_context();
    if (context != nullptr) return CUDA_SUCCESS;
    context = primary_context(0);
    if (context == nullptr) return CUDA_ERROR_NOT_INITIALIZED;
    bool first = false;
    {
        const std::lock_guard hold(library.lock);
        first = library.retained == nullptr;
        if (first) library.retained = context;
    }
    return first || !context->alive.load(std::memory_order_acquire) ? retain_primary(*context) : CUDA_SUCCESS;
}

// Makes the kernels of a library from its first module. The lock is held.
CUresult make_kernels(LoadedLibrary& library, const Module& module) {
    for (Function* function : module.functions) {
        auto kernel = std::make_unique<LibraryKernel>();
        LibraryKernel* made = kernel.get();
        made->library = &library;
        made->function = function;
        made->name = function->name;
        made->parameters = function->parameters;
        if (enroll(std::move(kernel)) == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
        library.kernels.push_back(made);
        library.by_name.emplace(made->name, made);
    }
    return CUDA_SUCCESS;
}

// Applies the attributes that the program set for a device to a later module of the library. The lock is held.
void adopt(LoadedLibrary& library, const Module& module) {
    for (Kernel* plain : library.kernels) {
        LibraryKernel& kernel = whole(*plain);
        const auto found = module.function_index.find(kernel.name);
        if (found == module.function_index.end()) continue;
        Function* function = module.functions[found->second];
        if (kernel.function == nullptr) kernel.function = function;  // the context of the first module has ended
        const std::lock_guard hold(kernel.lock);
        for (const auto& [key, value] : kernel.wanted) {
            if (key.first == module.context->device) set_function_attribute(*function, key.second, value);
        }
    }
}

// The library's module in a context; loads it there if necessary. One thread loads, others wait for it.
CUresult instance_in(LoadedLibrary& library, Context& context, Module*& module) {
    std::unique_lock hold(library.lock);
    if (library.unreadable != CUDA_SUCCESS) return library.unreadable;
    Instance* instance = &library.instances[&context];
    while (instance->loading) {
        library.loaded.wait(hold);
        instance = &library.instances[&context];  // the context may have ended meanwhile
    }
    if (instance->context_number != context.number) {
        *instance = {.context_number = context.number, .loading = true};
        hold.unlock();
        Module* made = nullptr;
        CUresult result = load_module(context, library.binary, library.options, true, made);
        hold.lock();
        if (result == CUDA_SUCCESS) {
            if (library.kernels.empty()) {
                result = make_kernels(library, *made);
            } else {
                adopt(library, *made);
            }
            if (library.module == nullptr) library.module = made;
        }
        instance->module = made;
        instance->result = result;
        instance->loading = false;
        if (result != CUDA_SUCCESS) instance->context_number = 0;  // the next use tries again
        library.loaded.notify_all();
    }
    module = instance->module;
    return instance->result;
}

// Loads the library in some context, so that its kernels are known.
CUresult ensure_kernels(LoadedLibrary& library) {
    {
        const std::lock_guard hold(library.lock);
        if (!library.kernels.empty()) return CUDA_SUCCESS;
    }
    Context* context = nullptr;
    Module* module = nullptr;
    if (CUresult r = context_for(library, context); r) return r;
    return instance_in(library, *context, module);
}

CUresult function_in(LibraryKernel& kernel, Context& context, Function*& function) {
    Module* module = nullptr;
    if (CUresult r = instance_in(whole(*kernel.library), context, module); r) return r;
    return find_function(*module, kernel.name.c_str(), function);
}

// The function on a device: in the current context where that is the device's, else in the device's primary context.
CUresult function_on(LibraryKernel& kernel, CUdevice device, Function*& function) {
    if (session_device(device) < 0) return CUDA_ERROR_INVALID_DEVICE;
    Context* context = current_context();
    if (context != nullptr && context->device == device) return function_in(kernel, *context, function);
    function = kernel.function;
    if (function != nullptr && function->module->context->device == device) return CUDA_SUCCESS;
    context = primary_context(device);
    if (context == nullptr || !context->alive.load(std::memory_order_acquire)) return CUDA_ERROR_INVALID_CONTEXT;
    return function_in(kernel, *context, function);
}

struct LibraryOptions {
    bool preserved = false;
    CUresult parse(unsigned count, const CUlibraryOption* options, void** values) {
        if (count != 0 && options == nullptr) return CUDA_ERROR_INVALID_VALUE;
        for (unsigned i = 0; i < count; ++i) {
            if (options[i] == CU_LIBRARY_BINARY_IS_PRESERVED) {
                preserved = values != nullptr && static_cast<int>(reinterpret_cast<std::intptr_t>(values[i])) != 0;
            } else if (options[i] != CU_LIBRARY_HOST_UNIVERSAL_FUNCTION_AND_DATA_TABLE) {
                return CUDA_ERROR_INVALID_VALUE;
            }
        }
        return CUDA_SUCCESS;
    }
};

bool eager() {
    const char* value = std::getenv("CUDA_MODULE_LOADING");
    return value != nullptr && std::strcmp(value, "EAGER") == 0;
}

// `file`: the contents that `code` points to, where a file was read.
CUresult load(CUlibrary* out, const void* code, std::string file, JitOptions options, const LibraryOptions& how) {
    auto owned = std::make_unique<LoadedLibrary>();
    LoadedLibrary* library = owned.get();
    library->options = std::move(options);
    // As in the driver, an invalid binary is reported at its first use.
    library->unreadable = binary_of(code, library->binary);
    if (library->unreadable == CUDA_ERROR_INVALID_VALUE) return library->unreadable;
    if (library->unreadable == CUDA_SUCCESS && !(how.preserved && file.empty())) {
        library->copy.assign(static_cast<const char*>(library->binary.data), library->binary.size);
        library->binary.data = library->copy.data();
    }
    if (enroll(std::move(owned)) == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    Context* context = current_context();
    if (library->options.wants_log() || (eager() && context != nullptr)) {
        // The log buffers may be invalid later: load now.
        if (CUresult r = ensure_kernels(*library); r) {
            retire(library);
            return r;
        }
        library->options = JitOptions(library->options.encoded());
    }
    *out = static_cast<CUlibrary>(library->handle);
    return CUDA_SUCCESS;
}

CUresult look_up(CUlibrary handle, LoadedLibrary*& library) {
    if (CUresult r = require_session(); r) return r;
    Library* found = find(handle);
    library = static_cast<LoadedLibrary*>(found);
    return found != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult look_up(CUkernel handle, LibraryKernel*& kernel) {
    if (CUresult r = require_session(); r) return r;
    Kernel* found = find(handle);
    kernel = static_cast<LibraryKernel*>(found);
    return found != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

}  // namespace

void forget_instances(Context& context) {
    for_each_object(Kind::library, [&](Object* object) {
        auto& library = *static_cast<LoadedLibrary*>(static_cast<Library*>(object));
        const std::lock_guard hold(library.lock);
        const auto found = library.instances.find(&context);
        if (found == library.instances.end() || found->second.loading) return;
        const Module* gone = found->second.module;
        library.instances.erase(found);
        const Module* left = nullptr;
        for (const auto& [other, instance] : library.instances) {
            if (instance.module != nullptr) left = instance.module;
        }
        if (library.module == gone) library.module = const_cast<Module*>(left);
        for (Kernel* kernel : library.kernels) {
            if (kernel->function == nullptr || kernel->function->module != gone) continue;
            kernel->function = nullptr;
            if (left != nullptr) find_function(*left, whole(*kernel).name.c_str(), kernel->function);
        }
    });
}

CUresult function_of(Kernel& kernel, Function*& function) {
    Context* context = current_context();
    function = kernel.function;
    if (context == nullptr) return function != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    if (function != nullptr && function->module->context == context) return CUDA_SUCCESS;  // the common case
    return function_in(whole(kernel), *context, function);
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option* jitOptions, void** jitOptionsValues,
                           unsigned int numJitOptions, CUlibraryOption* libraryOptions, void** libraryOptionValues,
                           unsigned int numLibraryOptions) {
    RGPU_PROFILED(678, "cuLibraryLoadData", library, code, jitOptions, jitOptionsValues, numJitOptions, libraryOptions, libraryOptionValues, numLibraryOptions);
    if (CUresult r = require(); r) return api_.leave(r);
    if (library == nullptr || code == nullptr) return api_.leave(CUDA_ERROR_INVALID_VALUE);
    JitOptions jit;
    LibraryOptions how;
    if (CUresult r = jit.parse(numJitOptions, jitOptions, jitOptionsValues); r) return api_.leave(r);
    if (CUresult r = how.parse(numLibraryOptions, libraryOptions, libraryOptionValues); r) return api_.leave(r);
    return api_.leave(load(library, code, {}, std::move(jit), how));
}

CUresult cuLibraryLoadFromFile(CUlibrary* library, const char* fileName, CUjit_option* jitOptions,
                               void** jitOptionsValues, unsigned int numJitOptions, CUlibraryOption* libraryOptions,
                               void** libraryOptionValues, unsigned int numLibraryOptions) {
    RGPU_PROFILED(679, "cuLibraryLoadFromFile", library, fileName, jitOptions, jitOptionsValues, numJitOptions, libraryOptions, libraryOptionValues, numLibraryOptions);
    if (CUresult r = require(); r) return api_.leave(r);
    if (library == nullptr || fileName == nullptr) return api_.leave(CUDA_ERROR_INVALID_VALUE);
    JitOptions jit;
    LibraryOptions how;
    if (CUresult r = jit.parse(numJitOptions, jitOptions, jitOptionsValues); r) return api_.leave(r);
    if (CUresult r = how.parse(numLibraryOptions, libraryOptions, libraryOptionValues); r) return api_.leave(r);
    std::string contents;
    if (!module_binary::read_file(fileName, &contents)) return api_.leave(CUDA_ERROR_FILE_NOT_FOUND);
    contents.append(64, '\0');  // a header may be read although the file is shorter than one
    return api_.leave(load(library, contents.data(), contents, std::move(jit), how));
}

CUresult cuLibraryUnload(CUlibrary handle) {
    print_device_text();
    LoadedLibrary* library = nullptr;
    if (CUresult r = look_up(handle, library); r) return r;
    if (!retire(library)) return CUDA_ERROR_INVALID_HANDLE;
    std::map<Context*, Instance> instances;
    {
        const std::lock_guard hold(library->lock);
        instances.swap(library->instances);
        for (Kernel* kernel : library->kernels) retire(kernel);
    }
    for (const auto& [_, instance] : instances) {
        if (instance.module != nullptr) unload_module(*instance.module);
    }
    return library->retained != nullptr ? (release_primary(*library->retained), CUDA_SUCCESS) : CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel* pKernel, CUlibrary handle, const char* name) {
    LoadedLibrary* library = nullptr;
    if (CUresult r = look_up(handle, library); r) return r;
    if (pKernel == nullptr || name == nullptr || *name == '\0') return CUDA_ERROR_INVALID_VALUE;
    if (CUresult r = ensure_kernels(*library); r) return r;
    const std::lock_guard hold(library->lock);
    const auto found = library->by_name.find(name);
    if (found == library->by_name.end()) return CUDA_ERROR_NOT_FOUND;
    *pKernel = static_cast<CUkernel>(found->second->handle);
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernelCount(unsigned int* count, CUlibrary handle) {
    LoadedLibrary* library = nullptr;
    if (CUresult r = look_up(handle, library); r) return r;
    if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult r = ensure_kernels(*library); r) return r;
    *count = static_cast<unsigned>(library->kernels.size());
    return CUDA_SUCCESS;
}

CUresult cuLibraryEnumerateKernels(CUkernel* kernels, unsigned int numKernels, CUlibrary handle) {
    LoadedLibrary* library = nullptr;
    if (CUresult r = look_up(handle, library); r) return r;
    if (kernels == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult r = ensure_kernels(*library); r) return r;
    const std::size_t count = std::min<std::size_t>(numKernels, library->kernels.size());
    for (std::size_t i = 0; i < count; ++i) kernels[i] = static_cast<CUkernel>(library->kernels[i]->handle);
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetModule(CUmodule* pMod, CUlibrary handle) {
    Context* context = nullptr;
    if (CUresult r = current(context); r) return r;
    LoadedLibrary* library = nullptr;
    Module* module = nullptr;
    if (CUresult r = look_up(handle, library); r) return r;
    if (pMod == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult r = instance_in(*library, *context, module); r) return r;
    *pMod = static_cast<CUmodule>(module->handle);
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetGlobal(CUdeviceptr* dptr, size_t* bytes, CUlibrary handle, const char* name) {
    Context* context = nullptr;
    if (CUresult r = current(context); r) return r;
    LoadedLibrary* library = nullptr;
    Module* module = nullptr;
    if (CUresult r = look_up(handle, library); r) return r;
    if (name == nullptr || (dptr == nullptr && bytes == nullptr)) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult r = instance_in(*library, *context, module); r) return r;
    return find_global(*module, name, dptr, bytes);
}

CUresult cuLibraryGetManaged(CUdeviceptr* dptr, size_t* bytes, CUlibrary handle, const char* name) {
    CUdeviceptr address = 0;
    size_t size = 0;
    LoadedLibrary* library = nullptr;
    Module* module = nullptr;
    if (CUresult r = require(); r) return r;
    if (CUresult r = look_up(handle, library); r) return r;
    if (name == nullptr || (dptr == nullptr && bytes == nullptr)) return CUDA_ERROR_INVALID_VALUE;
    Context* context = nullptr;  // for the look-up only
    if (CUresult r = context_for(*library, context); r) return r;
    if (CUresult r = instance_in(*library, *context, module); r) return r;
    if (CUresult r = find_global(*module, name, &address, &size); r) return r;
    if (!place_of(address).managed) return CUDA_ERROR_NOT_FOUND;
    if (dptr != nullptr) *dptr = address;
    if (bytes != nullptr) *bytes = size;
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- kernels

CUresult cuKernelGetFunction(CUfunction* pFunc, CUkernel handle) {
    Context* context = nullptr;
    if (CUresult r = current(context); r) return r;
    LibraryKernel* kernel = nullptr;
    Function* function = nullptr;
    if (CUresult r = look_up(handle, kernel); r) return r;
    if (pFunc == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult r = function_of(*kernel, function); r) return r;
    *pFunc = static_cast<CUfunction>(function->handle);
    return CUDA_SUCCESS;
}

CUresult cuKernelGetLibrary(CUlibrary* pLib, CUkernel handle) {
    LibraryKernel* kernel = nullptr;
    if (CUresult r = look_up(handle, kernel); r) return r;
    if (pLib == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *pLib = static_cast<CUlibrary>(kernel->library->handle);
    return CUDA_SUCCESS;
}

CUresult cuKernelGetName(const char** name, CUkernel handle) {
    LibraryKernel* kernel = nullptr;
    if (CUresult r = look_up(handle, kernel); r) return r;
    if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *name = kernel->name.c_str();
    return CUDA_SUCCESS;
}

CUresult cuKernelGetParamInfo(CUkernel handle, size_t paramIndex, size_t* paramOffset, size_t* paramSize) {
    LibraryKernel* kernel = nullptr;
    if (CUresult r = look_up(handle, kernel); r) return r;
    if (paramOffset == nullptr || paramIndex >= kernel->parameters.size()) return CUDA_ERROR_INVALID_VALUE;
    *paramOffset = kernel->parameters[paramIndex].offset;
    if (paramSize != nullptr) *paramSize = kernel->parameters[paramIndex].size;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetAttribute(int* pi, CUfunction_attribute attrib, CUkernel handle, CUdevice dev) {
    LibraryKernel* kernel = nullptr;
    Function* function = nullptr;
    if (CUresult r = look_up(handle, kernel); r) return r;
    if (pi == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult r = function_on(*kernel, dev, function); r) return r;
    if (CUresult r = complete_attributes(*function); r) return r;
    return function_attribute(*function, attrib, pi) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel handle, CUdevice dev) {
    if (CUresult r = require(); r) return r;
    LibraryKernel* kernel = nullptr;
    Function* function = nullptr;
    if (CUresult r = look_up(handle, kernel); r) return r;
    if (CUresult r = function_on(*kernel, dev, function); r) return r;
    if (CUresult r = set_function_attribute(*function, attrib, val); r) return r;
    const int device = function->module->context->device;
    {
        const std::lock_guard hold(kernel->lock);
        kernel->wanted[{device, attrib}] = val;
    }
    // The attribute is set for every context of the device.
    LoadedLibrary& library = whole(*kernel->library);
    const std::lock_guard hold(library.lock);
    for (const auto& [context, instance] : library.instances) {
        Function* other = nullptr;
        if (context->device == device && instance.module != nullptr && instance.context_number == context->number &&
            find_function(*instance.module, kernel->name.c_str(), other) == CUDA_SUCCESS && other != function) {
            set_function_attribute(*other, attrib, val);
        }
    }
    return CUDA_SUCCESS;
}

CUresult cuKernelSetCacheConfig(CUkernel handle, CUfunc_cache config, CUdevice dev) {
    LibraryKernel* kernel = nullptr;
    if (CUresult r = look_up(handle, kernel); r) return r;
    if (session_device(dev) < 0) return CUDA_ERROR_INVALID_DEVICE;
    return config >= CU_FUNC_CACHE_PREFER_NONE && config <= CU_FUNC_CACHE_PREFER_EQUAL ? CUDA_SUCCESS
                                                                                       : CUDA_ERROR_INVALID_VALUE;
}

}  // extern "C"
