"""Driver functions: modules, functions and the linker."""

from __future__ import annotations

from rgpu.session.calls.functions.model import ASYNC, LOCAL, SYNC, function

FUNCTIONS = (
    function(
        "cuFuncGetAttribute", "int *pi, CUfunction_attribute attrib, CUfunction hfunc", "cuFuncGetAttribute 2020",
        LOCAL, "", "from the load's table",
    ),
    function(
        "cuFuncGetModule", "CUmodule *hmod, CUfunction hfunc", "cuFuncGetModule 11000", LOCAL, "",
        "from the load's table",
    ),
    function(
        "cuFuncGetName", "const char **name, CUfunction hfunc", "cuFuncGetName 12030", LOCAL, "",
        "from the load's table",
    ),
    function(
        "cuFuncGetParamInfo", "CUfunction func, size_t paramIndex, size_t *paramOffset, size_t *paramSize",
        "cuFuncGetParamInfo 12040", LOCAL, "", "from the load's table",
    ),
    function(
        "cuFuncIsLoaded", "CUfunctionLoadingState *state, CUfunction hfunc", "cuFuncIsLoaded 12040", LOCAL, "",
        "from the load's table",
    ),
    function("cuFuncLoad", "CUfunction hfunc", "cuFuncLoad 12040", SYNC, "function_load",
             "attributes, launches and occupancy do the same when the load's table is not complete"),
    function(
        "cuFuncSetAttribute", "CUfunction hfunc, CUfunction_attribute attrib, int value", "cuFuncSetAttribute 9000",
        ASYNC, "function_attribute",
    ),
    function(
        "cuFuncSetCacheConfig", "CUfunction hfunc, CUfunc_cache config", "cuFuncSetCacheConfig 3000", LOCAL, "",
        "a hint, kept by the client",
    ),
    function(
        "cuFuncSetSharedMemConfig", "CUfunction hfunc, CUsharedconfig config", "cuFuncSetSharedMemConfig 4020", LOCAL,
        "", "a hint, kept by the client",
    ),
    function(
        "cuLinkAddData",
        "CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name, unsigned int "
        "numOptions, CUjit_option *options, void **optionValues", "cuLinkAddData 5050", alias="cuLinkAddData_v2",
    ),
    function(
        "cuLinkAddData_v2",
        "CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name, unsigned int "
        "numOptions, CUjit_option *options, void **optionValues", "cuLinkAddData 6050", LOCAL, "",
        "inputs are collected by the client",
    ),
    function(
        "cuLinkAddFile",
        "CUlinkState state, CUjitInputType type, const char *path, unsigned int numOptions, CUjit_option "
        "*options, void **optionValues", "cuLinkAddFile 5050", alias="cuLinkAddFile_v2",
    ),
    function(
        "cuLinkAddFile_v2",
        "CUlinkState state, CUjitInputType type, const char *path, unsigned int numOptions, CUjit_option "
        "*options, void **optionValues", "cuLinkAddFile 6050", LOCAL, "", "inputs are collected by the client",
    ),
    function(
        "cuLinkComplete", "CUlinkState state, void **cubinOut, size_t *sizeOut", "cuLinkComplete 5050", SYNC, "link",
    ),
    function(
        "cuLinkCreate", "unsigned int numOptions, CUjit_option *options, void **optionValues, CUlinkState *stateOut",
        "cuLinkCreate 5050", alias="cuLinkCreate_v2",
    ),
    function(
        "cuLinkCreate_v2",
        "unsigned int numOptions, CUjit_option *options, void **optionValues, CUlinkState *stateOut",
        "cuLinkCreate 6050", LOCAL, "", "inputs are collected by the client",
    ),
    function(
        "cuLinkDestroy", "CUlinkState state", "cuLinkDestroy 5050", LOCAL, "", "inputs are collected by the client",
    ),
    function(
        "cuModuleEnumerateFunctions", "CUfunction *functions, unsigned int numFunctions, CUmodule mod",
        "cuModuleEnumerateFunctions 12040", LOCAL, "", "from the load's table",
    ),
    function(
        "cuModuleGetFunction", "CUfunction *hfunc, CUmodule hmod, const char *name", "cuModuleGetFunction 2000",
        LOCAL, "", "from the load's table",
    ),
    function(
        "cuModuleGetFunctionCount", "unsigned int *count, CUmodule hmod", "cuModuleGetFunctionCount 12040", LOCAL, "",
        "from the load's table",
    ),
    function(
        "cuModuleGetGlobal", "unsigned int *dptr, unsigned int *bytes, CUmodule hmod, const char *name",
        "cuModuleGetGlobal 2000", note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuModuleGetGlobal_v2", "CUdeviceptr *dptr, size_t *bytes, CUmodule hmod, const char *name",
        "cuModuleGetGlobal 3020", LOCAL, "", "from the load's table",
    ),
    function(
        "cuModuleGetLoadingMode", "CUmoduleLoadingMode *mode", "cuModuleGetLoadingMode 11070", LOCAL, "",
        "from the load's table",
    ),
    function(
        "cuModuleGetSurfRef", "CUsurfref *pSurfRef, CUmodule hmod, const char *name", "cuModuleGetSurfRef 3000",
        note="texture and surface references ended with CUDA 12; objects do the same",
    ),
    function(
        "cuModuleGetTexRef", "CUtexref *pTexRef, CUmodule hmod, const char *name", "cuModuleGetTexRef 2000",
        note="texture and surface references ended with CUDA 12; objects do the same",
    ),
    function("cuModuleLoad", "CUmodule *module, const char *fname", "cuModuleLoad 2000", SYNC, "module_load"),
    function("cuModuleLoadData", "CUmodule *module, const void *image", "cuModuleLoadData 2000", SYNC, "module_load"),
    function(
        "cuModuleLoadDataEx",
        "CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options, void **optionValues",
        "cuModuleLoadDataEx 2010", SYNC, "module_load",
    ),
    function(
        "cuModuleLoadFatBinary", "CUmodule *module, const void *fatCubin", "cuModuleLoadFatBinary 2000", SYNC,
        "module_load",
    ),
    function("cuModuleUnload", "CUmodule hmod", "cuModuleUnload 2000", ASYNC, "module_unload"),
)
