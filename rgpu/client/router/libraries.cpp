// Libraries and their kernels belong to no context, and so to no member: each has a handle of its own here, and the
// library is given to every copy, which loads it where it is used.
#include <sys/mman.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "members.hpp"

namespace rgpu::router {
namespace {

constexpr std::size_t kSlot = 4096;        // readable zeros behind each handle, as the driver library has them
constexpr std::size_t kSlots = 1u << 20;

struct Library;

struct Kernel {
  Library* library;
  std::string name;
  std::vector<CUkernel> in;  // by member; null: not looked up yet. Guarded by the library's lock
  void* handle = nullptr;
};

struct Library {
  std::vector<CUlibrary> in;  // by member; set once
  std::mutex lock;
  std::map<std::string, std::unique_ptr<Kernel>> kernels;
  void* handle = nullptr;
};

struct Handles {
  std::uint8_t* arena = nullptr;
  std::vector<std::atomic<Library*>> libraries{kSlots};
  std::vector<std::atomic<Kernel*>> kernels{kSlots};
  std::atomic<std::size_t> next{0};

  Handles() {
    void* made = ::mmap(nullptr, kSlots * kSlot, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return;
    ::madvise(made, kSlots * kSlot, MADV_DONTDUMP);
    arena = static_cast<std::uint8_t*>(made);
  }
  std::size_t slot(const void* handle) const {
    const auto offset = reinterpret_cast<std::uintptr_t>(handle) - reinterpret_cast<std::uintptr_t>(arena);
    return arena && offset < kSlots * kSlot && offset % kSlot == 0 ? offset / kSlot : kSlots;
  }
  void* take(std::size_t& slot) {  // slots are not used again: a stale handle stays invalid
    slot = next.fetch_add(1);
    return arena && slot < kSlots ? arena + slot * kSlot : nullptr;
  }
};

Handles& handles() {
  static auto* h = new Handles;
  return *h;
}

template <class T>
T* found(const std::vector<std::atomic<T*>>& table, const void* handle) {
  const std::size_t slot = handles().slot(handle);
  return slot < kSlots ? table[slot].load(std::memory_order_acquire) : nullptr;
}

Library* library_of(CUlibrary handle) { return found(handles().libraries, handle); }
Kernel* kernel_of(const void* handle) { return found(handles().kernels, handle); }

// Gives a library to every copy by `load`.
template <class Load>
CUresult made(CUlibrary* out, Load load_in) {
  if (!out) return load_in(first(), out);
  auto library = std::make_unique<Library>();
  library->in.resize(members());
  for (unsigned number = 0; number < members(); ++number) {
    Member* member = load(number);
    const CUresult r = member ? load_in(*member, &library->in[number]) : CUDA_ERROR_OPERATING_SYSTEM;
    if (!r) continue;
    while (number--) CALL(*loaded(number), cuLibraryUnload)(library->in[number]);
    return r;
  }
  std::size_t slot = 0;
  library->handle = handles().take(slot);
  if (!library->handle) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = static_cast<CUlibrary>(library->handle);
  handles().libraries[slot].store(library.release(), std::memory_order_release);
  return CUDA_SUCCESS;
}

// The kernel's handle in a member's copy.
CUresult kernel_in_member(Kernel& kernel, Member& member, CUkernel& handle) {
  {
    std::lock_guard guard(kernel.library->lock);
    handle = kernel.in[member.number];
  }
  if (handle) return CUDA_SUCCESS;
  const CUresult r = CALL(member, cuLibraryGetKernel)(&handle, kernel.library->in[member.number], kernel.name.c_str());
  std::lock_guard guard(kernel.library->lock);
  if (!r) kernel.in[member.number] = handle;
  return r;
}

CUresult kernel_named(Library& library, const char* name, Member& member, CUkernel handle, CUkernel* out) {
  std::lock_guard guard(library.lock);
  auto& kernel = library.kernels[name];
  if (!kernel) {
    auto fresh = std::make_unique<Kernel>();
    fresh->library = &library;
    fresh->name = name;
    fresh->in.resize(members());
    std::size_t slot = 0;
    fresh->handle = handles().take(slot);
    if (!fresh->handle) return CUDA_ERROR_OUT_OF_MEMORY;
    kernel = std::move(fresh);
    handles().kernels[slot].store(kernel.get(), std::memory_order_release);
  }
  kernel->in[member.number] = handle;
  *out = static_cast<CUkernel>(kernel->handle);
  return CUDA_SUCCESS;
}

// Calls `use` with the handle that the current member has for the library.
template <class Use>
CUresult with(CUlibrary handle, Use use) {
  const Borrowed at(current());
  Library* library = library_of(handle);
  return use(at.member(), library ? library->in[at.member().number] : handle);
}

template <class Use>
CUresult with(CUkernel handle, Where where, Use use) {
  const Borrowed at(where);
  CUkernel own = handle;
  if (Kernel* kernel = kernel_of(handle))
    if (CUresult r = kernel_in_member(*kernel, at.member(), own); r) return r;
  return use(at.member(), own);
}

}  // namespace

CUfunction kernel_in(const Borrowed& at, CUfunction function) {
  Kernel* kernel = kernel_of(function);
  CUkernel own = nullptr;
  if (!kernel || kernel_in_member(*kernel, at.member(), own)) return function;
  return reinterpret_cast<CUfunction>(own);
}

namespace hand {

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option* jitOptions, void** jitOptionsValues,
                           unsigned int numJitOptions, CUlibraryOption* libraryOptions, void** libraryOptionValues,
                           unsigned int numLibraryOptions) {
  return made(library, [&](Member& member, CUlibrary* out) {
    return CALL(member, cuLibraryLoadData)(out, code, jitOptions, jitOptionsValues, numJitOptions, libraryOptions,
                                           libraryOptionValues, numLibraryOptions);
  });
}

CUresult cuLibraryLoadFromFile(CUlibrary* library, const char* fileName, CUjit_option* jitOptions,
                               void** jitOptionsValues, unsigned int numJitOptions, CUlibraryOption* libraryOptions,
                               void** libraryOptionValues, unsigned int numLibraryOptions) {
  return made(library, [&](Member& member, CUlibrary* out) {
    return CALL(member, cuLibraryLoadFromFile)(out, fileName, jitOptions, jitOptionsValues, numJitOptions,
                                               libraryOptions, libraryOptionValues, numLibraryOptions);
  });
}

CUresult cuLibraryUnload(CUlibrary handle) {
  Library* library = library_of(handle);
  if (!library) return CALL(first(), cuLibraryUnload)(handle);
  handles().libraries[handles().slot(handle)].store(nullptr);
  CUresult result = CUDA_SUCCESS;
  for (unsigned number = 0; number < members(); ++number)
    if (CUresult r = CALL(*loaded(number), cuLibraryUnload)(library->in[number]); r && !result) result = r;
  std::lock_guard guard(library->lock);
  for (auto& [_, kernel] : library->kernels) handles().kernels[handles().slot(kernel->handle)].store(nullptr);
  return result;  // the objects stay: another thread may be using them
}

CUresult cuLibraryGetKernel(CUkernel* pKernel, CUlibrary handle, const char* name) {
  Library* library = library_of(handle);
  return with(handle, [&](Member& member, CUlibrary own) {
    const CUresult r = CALL(member, cuLibraryGetKernel)(pKernel, own, name);
    return r || !library ? r : kernel_named(*library, name, member, *pKernel, pKernel);
  });
}

CUresult cuLibraryGetKernelCount(unsigned int* count, CUlibrary lib) {
  return with(lib, [&](Member& member, CUlibrary own) { return CALL(member, cuLibraryGetKernelCount)(count, own); });
}

CUresult cuLibraryEnumerateKernels(CUkernel* kernels, unsigned int numKernels, CUlibrary lib) {
  Library* library = library_of(lib);
  return with(lib, [&](Member& member, CUlibrary own) -> CUresult {
    unsigned count = 0;
    if (CUresult r = CALL(member, cuLibraryEnumerateKernels)(kernels, numKernels, own); r || !library) return r;
    if (CUresult r = CALL(member, cuLibraryGetKernelCount)(&count, own); r) return r;
    for (unsigned i = 0; i < numKernels && i < count; ++i) {
      const char* name = nullptr;
      if (CUresult r = CALL(member, cuKernelGetName)(&name, kernels[i]); r) return r;
      if (CUresult r = kernel_named(*library, name, member, kernels[i], &kernels[i]); r) return r;
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuLibraryGetModule(CUmodule* pMod, CUlibrary library) {
  return with(library, [&](Member& member, CUlibrary own) { return CALL(member, cuLibraryGetModule)(pMod, own); });
}

CUresult cuLibraryGetGlobal(CUdeviceptr* dptr, size_t* bytes, CUlibrary library, const char* name) {
  return with(library,
              [&](Member& member, CUlibrary own) { return CALL(member, cuLibraryGetGlobal)(dptr, bytes, own, name); });
}

CUresult cuLibraryGetManaged(CUdeviceptr* dptr, size_t* bytes, CUlibrary library, const char* name) {
  return with(library,
              [&](Member& member, CUlibrary own) { return CALL(member, cuLibraryGetManaged)(dptr, bytes, own, name); });
}

CUresult cuKernelGetAttribute(int* pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev) {
  return with(kernel, in_context(of_device(dev)),
              [&](Member& member, CUkernel own) { return CALL(member, cuKernelGetAttribute)(pi, attrib, own, dev); });
}

CUresult cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev) {
  return with(kernel, in_context(of_device(dev)),
              [&](Member& member, CUkernel own) { return CALL(member, cuKernelSetAttribute)(attrib, val, own, dev); });
}

CUresult cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice dev) {
  return with(kernel, in_context(of_device(dev)),
              [&](Member& member, CUkernel own) { return CALL(member, cuKernelSetCacheConfig)(own, config, dev); });
}

CUresult cuKernelGetFunction(CUfunction* pFunc, CUkernel kernel) {
  return with(kernel, current(),
              [&](Member& member, CUkernel own) { return CALL(member, cuKernelGetFunction)(pFunc, own); });
}

CUresult cuKernelGetLibrary(CUlibrary* pLib, CUkernel kernel) {
  Kernel* known = kernel_of(kernel);
  if (!known || !pLib) return CALL(first(), cuKernelGetLibrary)(pLib, kernel);
  *pLib = static_cast<CUlibrary>(known->library->handle);
  return CUDA_SUCCESS;
}

CUresult cuKernelGetName(const char** name, CUkernel hfunc) {
  Kernel* known = kernel_of(hfunc);
  if (!known || !name) return CALL(first(), cuKernelGetName)(name, hfunc);
  *name = known->name.c_str();
  return CUDA_SUCCESS;
}

CUresult cuKernelGetParamInfo(CUkernel kernel, size_t paramIndex, size_t* paramOffset, size_t* paramSize) {
  return with(kernel, current(), [&](Member& member, CUkernel own) {
    return CALL(member, cuKernelGetParamInfo)(own, paramIndex, paramOffset, paramSize);
  });
}

}  // namespace hand
}  // namespace rgpu::router
