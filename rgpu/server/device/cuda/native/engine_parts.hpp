// What an engine keeps of calls, streams and events: engine.hpp has the functions that change it, and the locks.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "driver.hpp"
#include "records.hpp"
#include "staging.hpp"

namespace rgpu {

inline constexpr size_t kPiece = 1u << 20;  // longest piece of an answer's payload
inline constexpr size_t kLongPiece = 2u << 20, kLong = 32u << 20;  // and of one beyond kLong bytes: fewer of them
inline constexpr size_t kShortPiece = 256u << 10, kShort = 4u << 20;  // and of one up to kShort bytes: to arrive soon
inline constexpr size_t kFewPieces = 4;  // of an answer that the applying thread may take itself
inline constexpr size_t kHeadroom = 64;     // before each piece: the sender writes the message's head there
// Each GPU of the session has a legacy stream, numbered as the session numbers the GPU.
inline constexpr bool is_legacy(uint64_t stream) { return stream < wire::kFirstHandle; }
inline constexpr int kMarkEvery = 32;  // submissions between two markers of a stream
inline constexpr uint64_t kNoStream = ~uint64_t{0};
inline constexpr size_t kFew = 64;  // calls under way, up to which nothing waits for the device
inline constexpr uint64_t kTurn = 20'000'000;  // ns that a call waits for its turn without any completion, in feed()

uint64_t now_ns();

// An awaited call until its answer is taken. Lives while it is retained or referred to.
struct Answer {
    uint64_t seq = 0;
    CUresult result = kSuccess;
    HostBuffer buffer{};
    std::vector<uint32_t> pieces;  // their lengths; each begins longest + kHeadroom behind the one before
    uint32_t arrived = 0;          // pieces that are in the buffer
    uint32_t waits = 0;            // streams that have not reached it yet
    int references = 0;            // by actions, the queue and the sender
    bool retained = false;         // until completed(seq)
    bool callback = false;         // for Python, not for the link
    bool done = false;
    bool timed = false;            // of a call that a profiler times, which no thread waits for; so are these three lines
    bool early = false;            // completed(seq) came before the times: they are sent, and not kept behind that
    uint64_t clock = 0, received = 0, answered = 0;  // as in rgpu/session/objects/spans.py
    uint64_t began = 0, ended = 0;                   // when the device worked on it, ns of CLOCK_MONOTONIC
    size_t longest = kPiece;       // of its pieces

    uint8_t *piece(uint32_t index) const { return buffer.data + index * (longest + kHeadroom) + kHeadroom; }
};

// A base of times: an event, and when the device reached it (rgpu/server/device/cuda/times/timing.py).
struct TimeBase {
    CUevent event = nullptr;
    uint64_t ns = 0;
    bool recorded = false;  // CUPTI records
};

struct TimedCall {  // that this engine applied (times/timed.cpp)
    Answer *answer;
    TimeBase base;
    CUcontext context;
    CUevent first, last;   // around its work
    uint32_t correlation;  // CUPTI's id of it; 0: no record will come
    uint64_t complete;     // when its work was seen to be complete, ns
};

struct Action {  // due when its stream has reached the tick
    enum Kind : uint8_t { slot, frame, piece, wait, time } kind;
    uint64_t tick;
    Slot staged{};
    Frame *from = nullptr;
    Answer *answer = nullptr;
    uint32_t index = 0;
    TimedCall *timed = nullptr;
};

inline constexpr size_t kTimes = 124;  // longest reply of a timed call, bytes
size_t write_times(const Answer &answer, uint8_t *out);  // its reply; returns its bytes

struct Launched {  // which kernel it was: for reports of waits that timed out
    uint64_t seq = 0, module = 0;
    uint32_t function = 0;
};
inline constexpr uint64_t kGraph = ~uint64_t{0};  // replaces the module's number

// Predecessors of a stream, or an event: for each stream, by its identity, the last submission that it waits for.
using Past = std::vector<std::pair<uint64_t, uint64_t>>;

struct Stream {
    uint64_t number = 0;
    uint64_t identity = 0;  // unique to this stream
    CUstream handle = nullptr;
    CUcontext context = nullptr;
    uint64_t tick = 0;    // submissions
    uint64_t worked = 0;  // the last of them that was work: neither an event's record nor a wait for one
    // (seq, tick) of host functions that have not returned, and of its waits for events behind some.
    std::vector<std::pair<uint64_t, uint64_t>> functions;
    Past past;            // by the program's own events, since this catch-up began
    uint64_t past_of = 0; // the catch-up that `past` is of
    uint64_t marked = 0;  // the last marker covers submissions up to this one
    uint64_t done = 0;    // reached
    uint64_t done_seq = 0;
    uint64_t reported = 0;                                // done_seq in the last watermark
    std::deque<std::pair<uint64_t, uint64_t>> pending;    // (tick, seq), both growing
    std::deque<Action> actions;                           // by tick
    std::deque<Launched> launched;                        // of the pending ones, by seq
    Launched giving;                                      // being submitted to the driver
    std::deque<std::pair<uint64_t, CUevent>> markers;     // by tick
    bool active = false;
    bool resting = false;  // it waits at a gate, so for the host
    struct Wait {  // at its tick, for an event that was recorded at a tick of another stream
        uint64_t at, stream, identity, tick;
    };
    std::deque<Wait> waits;  // by tick; only in a session with gates
};

struct Event {
    CUevent handle = nullptr;
    uint64_t seq = 0;  // of its last record; 0: none
    uint64_t stream = 0, tick = 0, identity = 0;
    Past past;         // of its stream when it was recorded
    std::vector<uint64_t> functions;  // behind which it was recorded
    uint64_t past_of = 0;
};

struct EventWait {  // a call that waits for an event's record
    Answer *answer;
    CUevent event;  // null once the event was recorded anew or destroyed: then the stream's tick decides
    uint64_t stream, tick;
};

constexpr int kPrints = 1, kAllocates = 2;  // actions of kernels: printf; malloc from the context's heap

struct Function {
    CUfunction handle = nullptr;
    uint32_t parameters = 0;  // bytes of its parameter block
    int traits = 0;           // of its module's kernels: kPrints, kAllocates
};

struct Graph {
    CUgraphExec handle = nullptr;
    int traits = 0;  // of its kernels
};

enum class Outcome { applied, interrupted, opened, handed, ahead };
enum class Pace { on, interrupted, ahead };

// A copy to the device whose payload is arriving.
struct Inflow {
    bool open = false, skip = false;
    bool unsummed = false;  // part of it was copied to the device from another process' memory
    uint16_t call = 0;
    uint64_t seq = 0, left = 0, sent = 0, total = 0;
    uint32_t crc = 0, wanted = 0;
    size_t padding = 0;
    Stream *stream = nullptr;
    CUdeviceptr destination = 0;
    uint64_t pitch = 0, width = 0, height = 0;
    Slot slot{};
    size_t filled = 0, capacity = 0;
    CUresult error = kSuccess;
};

}  // namespace rgpu
