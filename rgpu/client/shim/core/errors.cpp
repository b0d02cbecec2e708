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
    *pStr = row != nullptr ? row->text : nullptr;
    return row != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // extern "C"
