// cuFunc*: attributes and parameters, from the load's table.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "api.hpp"
#include "device.hpp"
#include "module.hpp"

namespace rgpu {
namespace {

// The limit of the function's dynamic shared memory of a block, with opt-in.
int dynamic_limit(const Function& function) {
    const DeviceFacts& device = *device_facts(function.module->context->device);
    const int block = device.attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152);
    const int opt_in = device.attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 0);
    return std::max(block, opt_in) - function.attribute(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, 0);
}

}  // namespace

CUresult complete_attributes(const Function& function) {
    if (function.complete.load(std::memory_order_acquire)) return CUDA_SUCCESS;
    auto& known = const_cast<Function&>(function);  // sets attributes that the worker reports, not the program
    Answer answer;
    const wire::FunctionLoad call{.module = function.module->number, .function = function.index};
    if (CUresult r = await(call, nullptr, 0, answer); r) return r;
    wire::FunctionLoadReply reply;
    std::int32_t values[16];
    if (!reply.read(answer.reply.data(), answer.reply.size()) || reply.attributes.size != sizeof values)
        return CUDA_ERROR_UNKNOWN;
    std::memcpy(values, reply.attributes.data, sizeof values);
    for (int i = 0; i < 16; ++i) {
        int unknown = -1;  // a value that the program set meanwhile is kept
        known.attributes[i].compare_exchange_strong(unknown, values[i], std::memory_order_relaxed);
    }
    known.complete.store(true, std::memory_order_release);
    return CUDA_SUCCESS;
}

bool function_attribute(const Function& function, int attribute, int* value) {
    if (attribute < 0 || attribute >= CU_FUNC_ATTRIBUTE_MAX) return false;
    // -1 is a value of the carveout; elsewhere it means that the worker reported none, and 0 is the safe answer.
    const int known = function.attributes[attribute].load(std::memory_order_relaxed);
    *value = attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT ? known : std::max(known, 0);
    return true;
}

CUresult set_function_attribute(Function& function, int attribute, int value) {
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            if (value < 0 || value > dynamic_limit(function)) return CUDA_ERROR_INVALID_VALUE;
            break;
        case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
            if (value < -1 || value > 100) return CUDA_ERROR_INVALID_VALUE;
            break;
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
            if (value < 0) return CUDA_ERROR_INVALID_VALUE;
            break;
        case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
            value = value != 0 ? 1 : 0;
            break;
        case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
            if (value < 0 || value > 2) return CUDA_ERROR_INVALID_VALUE;
            break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    if (function.attributes[attribute].exchange(value, std::memory_order_relaxed) == value) return CUDA_SUCCESS;
    return submit(wire::FunctionAttribute{
        .module = function.module->number, .function = function.index, .attribute = attribute, .value = value});
}

}  // namespace rgpu

using namespace rgpu;

namespace {

// Looks up a function; the driver refuses kernels here (CUDA_ERROR_INVALID_HANDLE).
CUresult look_up(CUfunction handle, Function*& function) {
    if (CUresult r = require_session(); r) return r;
    function = static_cast<Function*>(find_object(handle, Kind::function));
    return function != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

}  // namespace

extern "C" {

CUresult cuFuncGetAttribute(int* pi, CUfunction_attribute attrib, CUfunction hfunc) {
    Function* function = nullptr;
    if (CUresult r = look_up(hfunc, function); r) return r;
    if (pi == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult r = complete_attributes(*function); r) return r;
    return function_attribute(*function, attrib, pi) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value) {
    if (CUresult r = require(); r) return r;
    Function* function = nullptr;
    if (CUresult r = look_up(hfunc, function); r) return r;
    return set_function_attribute(*function, attrib, value);
}

CUresult cuFuncGetModule(CUmodule* hmod, CUfunction hfunc) {
    Function* function = nullptr;
    if (CUresult r = look_up(hfunc, function); r) return r;
    if (hmod == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *hmod = static_cast<CUmodule>(function->module->handle);
    return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char** name, CUfunction hfunc) {
    Function* function = nullptr;
    if (CUresult r = look_up(hfunc, function); r) return r;
    if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *name = function->name.c_str();
    return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction func, size_t paramIndex, size_t* paramOffset, size_t* paramSize) {
    Function* function = nullptr;
    if (CUresult r = look_up(func, function); r) return r;
    if (paramOffset == nullptr || paramIndex >= function->parameters.size()) return CUDA_ERROR_INVALID_VALUE;
    *paramOffset = function->parameters[paramIndex].offset;
    if (paramSize != nullptr) *paramSize = function->parameters[paramIndex].size;
    return CUDA_SUCCESS;
}

CUresult cuFuncIsLoaded(CUfunctionLoadingState* state, CUfunction hfunc) {
    Function* function = nullptr;
    if (CUresult r = look_up(hfunc, function); r) return r;
    if (state == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *state = CU_FUNCTION_LOADING_STATE_LOADED;
    return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction hfunc) {
    Function* function = nullptr;
    if (CUresult r = look_up(hfunc, function); r) return r;
    return complete_attributes(*function);
}

CUresult cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache config) {
    Function* function = nullptr;
    if (CUresult r = look_up(hfunc, function); r) return r;
    return config >= CU_FUNC_CACHE_PREFER_NONE && config <= CU_FUNC_CACHE_PREFER_EQUAL ? CUDA_SUCCESS
                                                                                       : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuFuncSetSharedMemConfig(CUfunction hfunc, CUsharedconfig) {
    Function* function = nullptr;
    return look_up(hfunc, function);
}

}  // extern "C"
