// Loading: from the program's binary to a module whose table is known.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "fatbin.hpp"
#include "handles.hpp"
#include "jit_options.hpp"

namespace rgpu {

// Finds the binary behind a pointer: CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_IMAGE.
CUresult binary_of(const void* data, module_binary::Binary& binary);

// Sends the binary to the worker and waits for the module's table. CUDA_ERROR_NO_BINARY_FOR_GPU at once where the fat
// binary's entries determine it; otherwise the worker's result. The logs of `options` are filled in both cases.
CUresult load_module(Context& context, const module_binary::Binary& binary, const JitOptions& options, bool library,
                     Module*& module);

// Ends a module and its functions; publishes module_unload.
CUresult unload_module(Module& module);

// Ends the handles of a context's modules, before the context is destroyed; nothing is sent.
void forget_modules(Context& context);
// The same for libraries: their modules in the context end, and a later use loads them again (library.cpp).
void forget_instances(Context& context);

// The function of a kernel in the thread's current context (without one: in the library's first). Loads the library
// there if necessary.
CUresult function_of(Kernel& kernel, Function*& function);

// A driver loads functions lazily and only then has some of their attributes: requests them from the worker once for
// each function that needs it. No lock may be held.
CUresult complete_attributes(const Function& function);

// cuFuncSetAttribute's checks and effect.
CUresult set_function_attribute(Function& function, int attribute, int value);
// The value that cuFuncGetAttribute returns; false for a number that is no attribute.
bool function_attribute(const Function& function, int attribute, int* value);

// The variable of that name. Either output may be NULL, not both.
CUresult find_global(const Module& module, const char* name, CUdeviceptr* address, size_t* bytes);
// The function of that name; CUDA_ERROR_NOT_FOUND.
CUresult find_function(const Module& module, const char* name, Function*& function);

}  // namespace rgpu
