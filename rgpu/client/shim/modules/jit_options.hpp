// CUjit options of loads and links: the part sent to the worker, and the logs returned to the program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda_types.hpp"

namespace rgpu {

// The options of one call. It points into the program's arrays: they must live as long as this object is used (for
// links until cuLinkDestroy, as CUDA requires as well).
class JitOptions {
public:
    JitOptions() = default;
    // The worker's part alone: no log is returned to the program any more.
    explicit JitOptions(std::vector<std::uint8_t> encoded) : encoded_(std::move(encoded)) {}

    // CUDA_ERROR_INVALID_VALUE for a missing array or an unknown option.
    CUresult parse(unsigned count, const CUjit_option* options, void** values);

    // (i32 option, i64 value) pairs, for the wire call's `options`.
    const std::vector<std::uint8_t>& encoded() const { return encoded_; }

    // Whether one of the options may decide which entry of a fat binary is used.
    bool chooses_entry() const;

    // Fills the error log (of a failed call) or the info log (of another), and writes its length in bytes. Never more
    // than the buffer holds, NUL included.
    void deliver(std::string_view log, bool failed) const;

    // Whether the program waits for logs, so that the work must not be deferred.
    bool wants_log() const { return info_.buffer != nullptr || error_.buffer != nullptr; }

private:
    struct Log {
        char* buffer = nullptr;
        void** size = nullptr;  // in: room in bytes, out: bytes written; the option's own value slot
    };
    static void fill(const Log& log, std::string_view text);

    Log info_, error_;
    void** wall_slot_ = nullptr;
    std::vector<std::uint8_t> encoded_;
};

}  // namespace rgpu
