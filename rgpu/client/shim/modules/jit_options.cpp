#include "jit_options.hpp"

#include <algorithm>
#include <cstring>

#include "core.hpp"

namespace rgpu {
namespace {

void append_pair(std::vector<std::uint8_t>& out, std::int32_t option, std::int64_t value) {
    const auto* one = reinterpret_cast<const std::uint8_t*>(&option);
    const auto* two = reinterpret_cast<const std::uint8_t*>(&value);
    out.insert(out.end(), one, one + sizeof option);
    out.insert(out.end(), two, two + sizeof value);
}

// Options whose value is a pointer into the program: they mean nothing on another host.
bool points(int option) {
    return option == CU_JIT_GLOBAL_SYMBOL_NAMES || option == CU_JIT_GLOBAL_SYMBOL_ADDRESSES ||
           option == CU_JIT_REFERENCED_KERNEL_NAMES || option == CU_JIT_REFERENCED_VARIABLE_NAMES;
}

}  // namespace

CUresult JitOptions::parse(unsigned count, const CUjit_option* options, void** values) {
    if (count != 0 && (options == nullptr || values == nullptr)) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; ++i) {
        const int option = options[i];
        switch (option) {
            case CU_JIT_WALL_TIME: wall_slot_ = &values[i]; break;
            case CU_JIT_INFO_LOG_BUFFER: info_.buffer = static_cast<char*>(values[i]); break;
            case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: info_.size = &values[i]; break;
            case CU_JIT_ERROR_LOG_BUFFER: error_.buffer = static_cast<char*>(values[i]); break;
            case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: error_.size = &values[i]; break;
            default:
                if (option < 0) return CUDA_ERROR_INVALID_VALUE;
                if (points(option)) {
                    log_once("jit option " + std::to_string(option),
                             "JIT option %d holds pointers of the program: not sent to the server", option);
                } else {
                    append_pair(encoded_, option, reinterpret_cast<std::intptr_t>(values[i]));
                }
        }
    }
    return CUDA_SUCCESS;
}

bool JitOptions::chooses_entry() const {
    constexpr std::size_t kPair = sizeof(std::int32_t) + sizeof(std::int64_t);
    for (std::size_t at = 0; at + kPair <= encoded_.size(); at += kPair) {
        std::int32_t option = 0;
        std::memcpy(&option, encoded_.data() + at, sizeof option);
        if (option == CU_JIT_TARGET || option == CU_JIT_FALLBACK_STRATEGY) return true;
    }
    return false;
}

void JitOptions::fill(const Log& log, std::string_view text) {
    if (log.size == nullptr) return;
    const auto room = static_cast<std::size_t>(static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(*log.size)));
    std::size_t written = 0;
    if (log.buffer != nullptr && room != 0) {
        written = std::min(text.size(), room - 1);
        std::memcpy(log.buffer, text.data(), written);
        log.buffer[written] = '\0';
    }
    *log.size = reinterpret_cast<void*>(written);  // without the NUL, as the driver counts
}

void JitOptions::deliver(std::string_view log, bool failed) const {
    while (!log.empty() && log.back() == '\0') log.remove_suffix(1);
    fill(info_, failed ? std::string_view{} : log);
    fill(error_, failed ? log : std::string_view{});
    if (wall_slot_ != nullptr) {
        const float milliseconds = 0;  // the worker's compile time is not known here
        std::memcpy(wall_slot_, &milliseconds, sizeof milliseconds);
    }
}

}  // namespace rgpu
