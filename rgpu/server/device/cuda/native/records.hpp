// Parses the record stream, split anywhere, with the checks and in the order of rgpu/session/journal/record.py. Pure:
// the engine executes the records.
//
// A record that lies whole in the given data is used in place; otherwise its head (and, unless the payload may be taken
// piece by piece, the payload) is gathered in a buffer that grows with the data received, never with the announced
// size.
#pragma once

#include <cstdint>
#include <vector>

#include "hot_calls.hpp"

namespace rgpu {

enum class Bad : int {  // the reasons of rgpu.session.errors.Corrupt, numbered for the caller
    none = 0,
    magic,
    flags,
    length,
    sequence,
    checksum,
    payload_checksum,
    padding,
    gap,
    observation,
    arguments,
};

// Checks of a header that need no other data.
inline Bad check_header(const wire::RecordHeader &header) {
    if (header.magic != wire::kRecordMagic) return Bad::magic;
    if (header.flags & ~wire::kFlagAwaited) return Bad::flags;
    if (header.args_len > wire::kMaxArgs || header.payload_len > wire::kMaxPayload) return Bad::length;
    return header.seq ? Bad::none : Bad::sequence;
}

inline bool all_zero(const uint8_t *data, size_t size) {
    for (size_t i = 0; i < size; ++i)
        if (data[i]) return false;
    return true;
}

struct RecordView {
    wire::RecordHeader header{};
    const uint8_t *args = nullptr;
    const uint8_t *payload = nullptr;  // null while it streams
};

}  // namespace rgpu
