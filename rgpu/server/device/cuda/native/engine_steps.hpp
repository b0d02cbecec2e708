// What the engine's functions give back (abi.cpp); mirrored in engine.py.
#pragma once

#include <cstdint>

namespace rgpu {

struct Answer;

enum class Came : int { all = 0, record = 1, interrupted = 2, corrupt = 3, waiting = 4, behind = 5, ahead = 6 };

struct Step {
    int32_t came;
    int32_t bad;
    uint64_t taken;
    uint64_t applied;
    uint64_t offset;
    uint64_t seq;
    uint64_t payload_len;
    const uint8_t *args;
    const uint8_t *payload;
    uint32_t args_len;
    uint32_t thread;
    uint16_t call;
    uint16_t flags;
    uint32_t awaiting;  // answers that are still to be received or taken
    uint64_t bugs;      // argument errors so far
    uint64_t bug_seq;
    int32_t bug_result;
    uint32_t bug_call;
    uint64_t stream;  // waiting: the call's; also ahead: payload_len: bytes of it that are still to be fed
    uint64_t waited;  // ns that feed() has waited for work of the device so far: not inside the driver
};

enum class Took : int { nothing = 0, answer = 1, progress = 2, woken = 3, times = 4 };

struct Out {
    int32_t took;
    int32_t result;
    uint64_t seq;
    uint8_t *data;  // the piece; kHeadroom bytes before it may be written
    uint64_t size;
    uint32_t index;
    uint32_t more;
    Answer *answer;  // to be returned with release()
};

}  // namespace rgpu
