// The round trip of an awaited call in a worker, without the interpreter: messages with calls are opened and fed to the
// device's engine, and the answer that the program waits for is sent, with the watermark ahead of it. The Python
// side (rgpu/server/worker/agent/rounds.py) decides when this may run, holds the locks of what is sent meanwhile, and
// keeps the books afterwards. Whatever is not short, not in order, late, or might wait for the device is left to it.
#pragma once

#include <cstdint>
#include <vector>

#include "channel.hpp"

namespace rgpu {

struct Step;
struct Out;

// The engine's functions (abi.cpp); this library is not linked with it.
struct EngineCalls {
    void *engine;
    int (*prompt)(void *, const uint8_t *, size_t, const uint8_t *, size_t);
    void (*feed)(void *, const uint8_t *, size_t, Step *);
    void (*take_here)(void *, Out *, uint64_t, int, int);
    size_t (*watermark)(void *, uint8_t *, size_t, int, int);
    void (*release)(void *, void *);
    int (*error)(void *);
    int (*interrupted)(void *);
};

// Why a run ended; more than one may hold.
enum Why : uint32_t {
    kLeft = 1,    // messages are left, or the connection ended
    kFed = 2,     // calls were applied
    kRest = 4,    // the last feed() stopped within them: `step` says why, `rest` are the bytes behind it
    kAnswer = 8,  // `out` is an answer that was taken and not sent
    kMark = 16,   // and `mark` the watermark to be sent ahead of it
};

// Memory of the agent's that is mapped here and pinned.
struct Window {
    const uint8_t *data;
    uint64_t size;
    uint32_t number;
    uint32_t zero;
};

struct Given {  // mirrored in library.py
    ChannelState channel;
    EngineCalls calls;
    Step *step;
    Out *out;
    uint64_t *applied;   // words of the position page; null: there is none
    uint64_t *complete;
    int32_t socket;
    int32_t clock;        // whether `least` is known
    uint64_t stream;      // offset of the next byte of records in the connection's stream
    int64_t least;        // ns that this clock is ahead of the agent's, at the quickest message
    uint64_t known_until; // ns of this clock, until when that holds
    uint64_t late;        // ns by which calls may be late without having piled up
    uint64_t spin;        // ns to poll for the next message without sleeping
    uint64_t patience;    // ns to poll for an answer
    const Window *windows;
    uint64_t window_count;
    const uint8_t *area;  // where the program's side reads long answers; null: there is none in use
    uint64_t area_size;
    uint64_t published;   // answers to calls up to this one are not placed there
    uint64_t smallest;    // bytes of an answer from which on it is
    uint32_t area_number;
    uint32_t zero;
    // Out
    uint32_t why;
    int32_t issued;       // whether an ISSUED was taken
    uint64_t arrived;     // ns, when that was
    uint64_t slow;        // ns of the longest feed()
    uint64_t answered;    // answers sent
    int64_t ahead;        // ns, the least of this clock's distance to the agent's among these messages
    const uint8_t *rest;
    uint64_t rest_size;
    const uint8_t *mark;
    uint64_t mark_size;
    const uint8_t *behind;  // with kRest: a payload in a window that continues the stream
    uint64_t behind_size;
    uint32_t left;  // with kLeft: the kind of that message; 0: it was not opened
    uint32_t zeros;
};

class Exchange {
   public:
    Channel channel;
    void run(Given &given);

   private:
    enum class Did { nothing, something, left, ended };
    Did handle(Given &given);
    bool issued(Given &given, const Message &message);
    Did feed(Given &given, const Message &message);
    Did feed_placed(Given &given, const Message &message);
    bool fed(Given &given, const uint8_t *data, size_t size);
    Did answers(Given &given);
    Did answer(Given &given);
    bool put(const Given &given, const Out &out);
    bool put_pieces(Given &given);
    bool more(Given &given, uint64_t until);

    uint64_t looked_ = 0;  // ns, when this process ran for certain
    std::vector<uint8_t> mark_ = std::vector<uint8_t>(kRecords - 64);
};

}  // namespace rgpu
