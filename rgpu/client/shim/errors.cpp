// cuGetErrorName and cuGetErrorString: work before cuInit, and for every code.
#include <algorithm>
#include <iterator>

#include "api.hpp"

namespace {

const rgpu::ResultText* find_result(int code) {
    const auto* row = std::lower_bound(std::begin(rgpu::kResults), std::end(rgpu::kResults), code,
                                       [](const rgpu::ResultText& text, int wanted) { return text.value < wanted; });
    return row != std::end(rgpu::kResults) && row->value == code ? row : nullptr;
}

// Where driver 580 words a sentence otherwise than the table (recorded: native_580.json); nullptr: as the table.
const char* recorded_text(int code) {
    switch (code) {
        case CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER: return "API call is not supported in the installed CUDA driver";
        case CUDA_ERROR_CONTAINED:
            return "Invalid access of peer GPU memory over nvlink or a hardware error";
        case CUDA_ERROR_TENSOR_MEMORY_LEAK: return "tensor memory not completely freed";
        case CUDA_ERROR_MPS_RPC_FAILURE:
            return "the remote procedural call between the MPS server and the MPS client failed";
        case CUDA_ERROR_MPS_CLIENT_TERMINATED: return "the MPS client has been terminated by the server";
        case CUDA_ERROR_CDP_NOT_SUPPORTED:
            return "is using CUDA Dynamic Parallelism, but the current configuration, like MPS, does not support it";
        case CUDA_ERROR_CDP_VERSION_MISMATCH:
            return "unsupported interaction between different versions of CUDA Dynamic Parallelism";
        case CUDA_ERROR_EXTERNAL_DEVICE:
            return "an async error has occured in external entity outside of CUDA";
        case CUDA_ERROR_FUNCTION_NOT_LOADED:
            return "the function handle is not loaded when calling an API that requires a loaded function";
        default: return nullptr;
    }
}

}  // namespace

extern "C" {

CUresult cuGetErrorName(CUresult error, const char** pStr) {
    if (pStr == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto* row = find_result(error);
    *pStr = row != nullptr ? row->name : nullptr;
    return row != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char** pStr) {
    if (pStr == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto* row = find_result(error);
    const char* recorded = recorded_text(error);
    *pStr = recorded != nullptr ? recorded : row != nullptr ? row->text : nullptr;
    return row != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // extern "C"
