// The round trip of an awaited call in the agent, without the interpreter: calls that the program publishes are
// shipped, at once if a thread waits for the last of them, and the worker's watermark and answer are put into the
// answer ring. The Python side (rgpu/client/session/exchanging.py) decides when this may run, and keeps the books
// afterwards. Whatever is not short, not expected or not in order is left to it, untouched.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "channel.hpp"
#include "data_link.hpp"
#include "parts.hpp"
#include "wire.hpp"

namespace rgpu {

inline constexpr size_t kPut = 512;    // messages put into the ring in one run, at most
inline constexpr size_t kExpected = 4;  // answers that may be to come at once
inline constexpr size_t kPlaced = 256;  // payloads named in one run, at most
inline constexpr size_t kPong = 64;  // bytes of the body of a PONG, at most
inline constexpr size_t kInline = 1u << 20;  // bytes of a payload that is sent here, at most

// Why a run ended; more than one may hold.
enum Why : uint32_t {
    kOthers = 1,     // a descriptor of the loop that is none of ours is ready, or messages are left in the channel
    kCallsLeft = 2,  // calls are published that are not shipped here
    kShipped = 4,    // calls were shipped
    kPassed = 8,     // messages were put into the ring
    kInArea = 16,    // the last of them names an answer in the worker's area, which may be reused behind the next calls
};

// A bulk segment, which contains long payloads.
struct Bulk {
    const uint8_t *data;
    uint64_t size;    // bytes
    uint32_t index;
    uint32_t number;  // of its memory, where the worker has mapped it: payloads are named and not sent; 0: it has not
};

// A payload that was named.
struct Placed {
    uint64_t seq;
    uint64_t length;
    uint32_t index;  // of the segment
    uint32_t zero;
};

struct PutMessage {
    uint32_t kind;  // of the data link
    uint32_t size;  // of the body, bytes
    uint64_t at;    // of the body, in the ring
};

struct Given {  // mirrored in library.py
    ChannelState channel;
    // The answer ring, for as long as the session lives.
    uint8_t *ring;
    uint64_t capacity;
    uint8_t *page;        // the agent's, in front of the ring
    const uint8_t *shim;  // the shim's page
    int32_t doorbell;     // wakes the shim's reader
    int32_t eventfd;      // the shim wakes the agent
    int32_t epoll;        // of the session's loop
    int32_t socket;       // of the link
    // The journal: the segment that is being read.
    const uint8_t *segment;
    uint64_t size;      // of the segment, bytes
    uint64_t at;        // records before it were read
    uint64_t seq;       // of the next record
    uint64_t stream;    // offset in the link's stream of records
    uint64_t awaited;   // a call shipped before, whose answer a thread waits for; 0: none
    uint64_t expected[kExpected];  // calls shipped before whose answers are to come, `awaited` among them; 0: none
    uint64_t answered[4];          // a bit for each wire call that is answered, by its id
    uint64_t done;      // the watermark that the program has
    uint64_t written;   // bytes put into the ring so far
    uint64_t read;      // of them, those that the shim has read
    uint64_t issued;    // ns, when the last ISSUED was sent
    uint64_t first;     // ns without sleeping at first
    uint64_t spin;      // ns, the same behind an answer
    uint64_t patience;  // ns, the same while an answer is awaited
    uint64_t sleep;     // ms that may be slept behind that; 0: not at all
    const Bulk *bulks;
    uint64_t bulk_count;
    uint64_t smallest;   // bytes of a payload from which on it is named
    uint64_t area_size;  // bytes of the worker's area
    uint32_t area;       // its number; 0: there is none in use
    // Out
    uint32_t placed_count;
    uint32_t why;
    uint32_t count;  // of put
    uint64_t shipped;  // bytes of records
    PutMessage put[kPut];
    uint8_t pong[kPong];  // the body of a PONG
    uint64_t pong_size;   // 0: none came
    Placed placed[kPlaced];

    void clear() {  // what comes out
        why = count = placed_count = 0;
        shipped = pong_size = 0;
    }
};

class Exchange {
   public:
    Channel channel;
    void run(Given &first, Parts *parts = nullptr);  // `parts`: it goes on while books are kept

   private:
    enum class Calls { none, held, shipped, left };
    Calls take_calls(Given &given, uint64_t now);
    Calls ship(Given &given, uint64_t committed, bool due);
    bool examine(const Given &given, size_t &size, uint64_t &next);
    bool place(const Given &given, wire::RecordHeader &header, size_t at, size_t end);  // a record's payload
    bool send(Given &given, size_t size);
    bool send_calls(Given &given, const uint8_t *records, size_t size, const uint8_t *payload, size_t payload_size,
                    size_t padding);
    void expect(Given &given);  // the answers to what was sent
    bool pass(Given &given);  // whether messages are left
    bool keep_pong(Given &given, const Message &message);
    bool pass_mark(Given &given, const Message &message);
    bool pass_answer(Given &given, const Message &message);
    bool pass_placed(Given &given, const Message &message);
    bool publish(Given &given, uint32_t kind, uint32_t ring_kind, const uint8_t *body, size_t size, bool first = true);
    void look(Given &given) const;
    uint8_t *opening(const Given &given) const;  // where the next message may be opened; null: nowhere
    void wake(Given &given);
    int wait(Given &given, int milliseconds);
    bool sleep(Given &given, uint64_t ns);
    bool part_is_due(const Given &given, uint64_t begun, uint64_t now) const;

    struct Payload {
        size_t end;  // offset in records_ behind the record, whose last bytes are the place, which is not sent
        data_link::Place place;
        Placed placed;
        const uint8_t *data;  // null: it is named
    };

    std::vector<uint8_t> records_ = std::vector<uint8_t>(kRecords);
    std::vector<Payload> payloads_;  // of these records, those that are elsewhere
    std::vector<uint64_t> expected_;  // of these records, those that are answered
    uint64_t bulk_ = 0;               // bytes of these payloads
    uint64_t awaited_ = 0;            // of the calls, the one that a thread waits for; 0: none
    uint64_t held_ = 0;  // ns since when calls are held back for an awaited one behind them; 0: there are none
    uint64_t plain_ = 0;   // ns when calls were shipped last that nobody awaits
    const Parts *parts_ = nullptr;  // of this run
    uint64_t summed_ = 0;  // parts whose books have to be kept before calls are shipped
    uint64_t put_at_ = 0;  // bytes put into the ring before this part
    bool silent_ = false;  // something is in the ring that the shim's reader was not woken for
    uint64_t *answering_ = nullptr;  // of `expected`, the call of which some pieces were passed on; null: none
};

}  // namespace rgpu
