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

// Sends the binary to the worker and waits for the module's table.
// CUDA_ERROR_NO_BINARY_FOR_GPU at once where the fat binary shows it; otherwise
// the worker's code. The logs of `options` are filled either way.
CUresult load_module(Context& context, const module_binary::Binary& binary, const JitOptions& options, bool library,
                     Module*& module);

// Ends a module and its functions; module_unload goes into the journal.
CUresult unload_module(Module& module);

// The context is being destroyed: its modules' handles end, nothing is sent.
void forget_modules(Context& context);
// The same for libraries: the context's modules of them are gone, a later use loads again (library.cpp).
void forget_instances(Context& context);

// The function of a kernel in the thread's current context (without one: in the
// library's first). Loads the library there if that has not happened.
CUresult function_of(Kernel& kernel, Function*& function);

// A driver loads functions lazily and knows some of their attributes only then:
// asks the worker once for each function that needs it. No lock may be held.
CUresult complete_attributes(const Function& function);

// cuFuncSetAttribute's checks and effect.
CUresult set_function_attribute(Function& function, int attribute, int value);
// cuFuncGetAttribute's: false for a number that is no attribute.
bool function_attribute(const Function& function, int attribute, int* value);

// The variable of that name. Either output may be NULL, not both.
CUresult find_global(const Module& module, const char* name, CUdeviceptr* address, size_t* bytes);
// The function of that name; CUDA_ERROR_NOT_FOUND.
CUresult find_function(const Module& module, const char* name, Function*& function);

}  // namespace rgpu
