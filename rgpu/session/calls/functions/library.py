"""Driver functions: libraries and kernels."""

from __future__ import annotations

from rgpu.session.calls.functions.model import ASYNC, LOCAL, SYNC, function

FUNCTIONS = (
    function(
        "cuKernelGetAttribute", "int *pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev",
        "cuKernelGetAttribute 12000", LOCAL, "", "from the load's table",
    ),
    function(
        "cuKernelGetFunction", "CUfunction *pFunc, CUkernel kernel", "cuKernelGetFunction 12000", LOCAL, "",
        "from the load's table",
    ),
    function(
        "cuKernelGetLibrary", "CUlibrary *pLib, CUkernel kernel", "cuKernelGetLibrary 12050", LOCAL, "",
        "from the load's table",
    ),
    function(
        "cuKernelGetName", "const char **name, CUkernel hfunc", "cuKernelGetName 12030", LOCAL, "",
        "from the load's table",
    ),
    function(
        "cuKernelGetParamInfo", "CUkernel kernel, size_t paramIndex, size_t *paramOffset, size_t *paramSize",
        "cuKernelGetParamInfo 12040", LOCAL, "", "from the load's table",
    ),
    function(
        "cuKernelSetAttribute", "CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev",
        "cuKernelSetAttribute 12000", ASYNC, "function_attribute",
    ),
    function(
        "cuKernelSetCacheConfig", "CUkernel kernel, CUfunc_cache config, CUdevice dev",
        "cuKernelSetCacheConfig 12000", LOCAL, "", "a hint, kept by the client",
    ),
    function(
        "cuLibraryEnumerateKernels", "CUkernel *kernels, unsigned int numKernels, CUlibrary lib",
        "cuLibraryEnumerateKernels 12040", LOCAL, "", "from the load's table",
    ),
    function(
        "cuLibraryGetGlobal", "CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name",
        "cuLibraryGetGlobal 12000", LOCAL, "", "from the load's table",
    ),
    function(
        "cuLibraryGetKernel", "CUkernel *pKernel, CUlibrary library, const char *name", "cuLibraryGetKernel 12000",
        LOCAL, "", "from the load's table",
    ),
    function(
        "cuLibraryGetKernelCount", "unsigned int *count, CUlibrary lib", "cuLibraryGetKernelCount 12040", LOCAL, "",
        "from the load's table",
    ),
    function(
        "cuLibraryGetManaged", "CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name",
        "cuLibraryGetManaged 12000", LOCAL, "", "from the load's table",
    ),
    function(
        "cuLibraryGetModule", "CUmodule *pMod, CUlibrary library", "cuLibraryGetModule 12000", LOCAL, "",
        "from the load's table",
    ),
    function(
        "cuLibraryGetUnifiedFunction", "void **fptr, CUlibrary library, const char *symbol",
        "cuLibraryGetUnifiedFunction 12000",
    ),
    function(
        "cuLibraryLoadData",
        "CUlibrary *library, const void *code, CUjit_option *jitOptions, void **jitOptionsValues, unsigned "
        "int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues, unsigned int "
        "numLibraryOptions", "cuLibraryLoadData 12000", SYNC, "module_load",
    ),
    function(
        "cuLibraryLoadFromFile",
        "CUlibrary *library, const char *fileName, CUjit_option *jitOptions, void **jitOptionsValues, "
        "unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues, unsigned "
        "int numLibraryOptions", "cuLibraryLoadFromFile 12000", SYNC, "module_load",
    ),
    function("cuLibraryUnload", "CUlibrary library", "cuLibraryUnload 12000", ASYNC, "module_unload"),
)
