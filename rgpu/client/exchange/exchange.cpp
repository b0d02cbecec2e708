#include "exchange.hpp"

#include <sched.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "shim_link.hpp"

namespace rgpu {
namespace {

constexpr uint64_t kHold = 20'000;           // ns that calls are held back for an awaited one behind them
constexpr uint64_t kEvery = 100'000;         // ns between two messages that end with no awaited call, at least
constexpr uint64_t kIssuedEvery = 1'000'000;  // ns between two ISSUED, at least
constexpr uint64_t kBooks = 10'000'000;      // ns that a run goes on, at most
constexpr uint64_t kWhole = 50'000'000;      // the same where the books are kept meanwhile
constexpr uint64_t kPart = 1'000'000;        // ns of a part, from which on its books are kept, …
constexpr uint32_t kPartPut = 32;            // … and messages put into the ring, …
constexpr uint64_t kPartBytes = 1u << 20;    // … and their bytes
constexpr uint64_t kLate = 20'000'000;       // ns since the publication of a call, or without a look: not in order
constexpr uint64_t kStuck = 2'000'000;       // ns until frames that the socket does not take are left to Python
constexpr size_t kBulky = 64u << 10;         // bytes of payloads from which on nothing is gathered with them
constexpr size_t kSent = 2u << 20;           // bytes of payloads that are sealed at a time, about
constexpr uint64_t kOldest = 60'000'000'000;  // ns; an older time of publication is taken for wrong

uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

// A word in memory that another process writes, or reads.
template <class T>
std::atomic_ref<T> word(const uint8_t *memory, size_t offset) {
    return std::atomic_ref<T>(*reinterpret_cast<T *>(const_cast<uint8_t *>(memory) + offset));
}

uint64_t committed_of(const Given &given) {
    return word<uint64_t>(given.segment, offsetof(wire::SegmentHeader, committed)).load(std::memory_order_acquire);
}

// When the oldest of the calls was published, by the program's stamps; `now` where none of them is stamped.
uint64_t published_at(const Given &given, uint64_t first, uint64_t last, uint64_t now) {
    const uint64_t stamped = word<uint64_t>(given.shim, wire::kShimStampedOffset).load(std::memory_order_acquire);
    uint64_t found = now;
    for (uint64_t back = 1; back < wire::kShimStamps && back <= stamped; ++back) {
        const size_t at = wire::kShimStampsOffset + (stamped - back) % wire::kShimStamps * 16;
        const uint64_t seq = word<uint64_t>(given.shim, at).load(std::memory_order_relaxed);
        const uint64_t when = word<uint64_t>(given.shim, at + 8).load(std::memory_order_relaxed);
        if (seq < first) break;
        if (seq <= last && when < now && now - when < kOldest) found = std::min(found, when);
    }
    return found;
}

bool is_answered(const Given &given, uint16_t call) {
    return call < 256 && given.answered[call / 64] >> call % 64 & 1;
}

// The place of an answer that is to come; null: it is none of these.
uint64_t *expected(Given &given, uint64_t seq) {
    uint64_t *last = given.expected + kExpected, *found = std::find(given.expected, last, seq);
    return seq && found != last ? found : nullptr;
}

// The answer was passed on.
void answered(Given &given, uint64_t *place) {
    if (*place == given.awaited) given.awaited = 0;
    *place = 0;
}

}  // namespace

// Calls that are no short records in this segment are left. Those that nobody awaits are gathered for a moment: each
// message costs the worker more than a call.
Exchange::Calls Exchange::take_calls(Given &given, uint64_t now) {
    const uint64_t committed = committed_of(given);
    if (committed == given.at) {
        held_ = 0;
        if (word<uint64_t>(given.segment, offsetof(wire::SegmentHeader, next)).load(std::memory_order_acquire))
            return Calls::left;  // the journal goes on in another segment
        return Calls::none;
    }
    // A call may have an answer's place in the area used again, before it is summed.
    if (parts_ && (given.why & kInArea || parts_->returned() < summed_)) return Calls::none;
    held_ = held_ ? held_ : now;
    const bool due = now - held_ >= kHold && now - plain_ >= kEvery;
    const Calls found = ship(given, committed, due);
    if (found != Calls::held) held_ = 0;
    return found;
}

Exchange::Calls Exchange::ship(Given &given, uint64_t committed, bool due) {
    constexpr size_t kRoom = kRecords - 256;  // of a message beside its type and offset
    if (committed < given.at || committed > given.size || committed % 8) return Calls::left;  // it is found corrupt
    size_t size = committed - given.at;
    if (size > kRoom) return Calls::left;
    // What is checked is what is sent: the program may write to the segment meanwhile.
    std::memcpy(records_.data(), given.segment + given.at, size);
    uint64_t next = given.seq;
    if (!examine(given, size, next)) return Calls::left;
    if (!awaited_ && !due && bulk_ < kBulky) return Calls::held;
    if (awaited_ && given.awaited) return Calls::left;  // two threads wait
    const uint64_t now = now_ns(), since = published_at(given, given.seq, next - 1, now);
    if (now - since > kLate) return Calls::left;  // they have piled up
    if (now - given.issued >= kIssuedEvery) {
        const data_link::Issued issued{now, since, next - 1};
        if (!channel.put(data_link::kIssued, {{&issued, sizeof issued}})) return Calls::left;
        given.issued = now;
    }
    if (!send(given, size)) return Calls::left;
    channel.flush(given.socket);
    expect(given);
    if (!awaited_) plain_ = now;
    given.at += size;
    given.seq = next;
    given.why |= kShipped;
    return Calls::shipped;
}

// Finds the payloads and the calls that are answered, in `size` bytes of records, or as many of them, `size` then, as
// have about kSent bytes of payload. False: a record that is not short, or not valid, or whose payload is not to be
// handled here; or more answers than can be expected.
bool Exchange::examine(const Given &given, size_t &size, uint64_t &next) {
    payloads_.clear();
    expected_.clear();
    awaited_ = bulk_ = 0;
    for (size_t at = 0; at < size; ++next) {
        wire::RecordHeader header;
        if (bulk_ >= kSent) {
            size = at;
            break;
        }
        if (size - at < sizeof header) return false;
        std::memcpy(&header, records_.data() + at, sizeof header);
        const bool external = header.flags & wire::kFlagExternal;
        const uint64_t args = header.args_len, payload = header.payload_len;
        if (header.magic != wire::kRecordMagic || header.flags & ~(wire::kFlagAwaited | wire::kFlagExternal) ||
            header.seq != next || args > size || (payload > size && !external))
            return false;
        const uint64_t tail = external ? sizeof(wire::ExternalPayload) : wire::padded(payload);
        const uint64_t whole = sizeof header + wire::padded(args) + tail;
        if (whole > size - at || (external && !place(given, header, at, at + whole))) return false;
        if (external) bulk_ += payload;
        const bool awaited = header.flags & wire::kFlagAwaited;
        if (awaited && awaited_) return false;  // two threads wait
        if (awaited) awaited_ = next;
        if (awaited || is_answered(given, header.call)) expected_.push_back(next);
        at += whole;
    }
    const size_t free = std::count(given.expected, given.expected + kExpected, 0);
    return expected_.size() <= free;
}

void Exchange::expect(Given &given) {
    if (awaited_) given.awaited = awaited_;
    for (const uint64_t seq : expected_) *std::find(given.expected, given.expected + kExpected, 0) = seq;
}

bool Exchange::place(const Given &given, wire::RecordHeader &header, size_t at, size_t end) {
    wire::ExternalPayload where;
    std::memcpy(&where, records_.data() + end - sizeof where, sizeof where);
    const uint64_t length = header.payload_len;
    if (header.call != wire::MemcpyH2d::id || !length || where.zero) return false;
    const Bulk *last = given.bulks + given.bulk_count;
    const Bulk *found = std::find_if(given.bulks, last, [&](const Bulk &one) { return one.index == where.segment; });
    if (found == last || where.offset < sizeof(wire::SegmentHeader) || where.offset > found->size ||
        length > found->size - where.offset)
        return false;
    const bool named = found->number && length >= given.smallest;
    if (named ? length % 8 || given.placed_count + payloads_.size() >= kPlaced : length > kInline) return false;
    header.flags &= static_cast<uint16_t>(~wire::kFlagExternal);
    std::memcpy(records_.data() + at, &header, sizeof header);
    payloads_.push_back({end, {0, found->number, 0, where.offset, length}, {header.seq, length, found->index, 0},
                         named ? nullptr : found->data + where.offset});
    return true;
}

// Seals what was examined: each payload is named in a message of its own, or sent, with the records ahead of it.
bool Exchange::send(Given &given, size_t size) {
    size_t at = 0;
    for (Payload &one : payloads_) {
        const size_t records = one.end - sizeof(wire::ExternalPayload) - at;
        const uint8_t *data = records_.data() + at;
        at = one.end;
        if (one.data) {
            const size_t length = one.place.length;
            if (!send_calls(given, data, records, one.data, length, wire::padded(length) - length)) return false;
            continue;
        }
        one.place.stream = given.stream;
        if (!channel.put(data_link::kCallsAt, {{&one.place, sizeof one.place}, {data, records}})) return false;
        given.stream += records + one.place.length;
        given.shipped += records + one.place.length;
        given.placed[given.placed_count++] = one.placed;
    }
    return at == size || send_calls(given, records_.data() + at, size - at, nullptr, 0, 0);
}

// Seals records and the payload of the last, as several messages where it is long. They are sent meanwhile, as far as
// the socket takes them.
bool Exchange::send_calls(Given &given, const uint8_t *records, size_t size, const uint8_t *payload,
                          size_t payload_size, size_t padding) {
    static constexpr uint8_t kZeros[8] = {};
    size_t at = 0;
    do {
        const size_t part = std::min(payload_size - at, kChunk), zeros = at + part == payload_size ? padding : 0;
        const uint8_t *from = payload ? payload + at : kZeros;
        if (!channel.put(data_link::kCalls,
                         {{&given.stream, sizeof given.stream}, {records, size}, {from, part}, {kZeros, zeros}}))
            return false;
        given.stream += size + part + zeros;
        given.shipped += size + part + zeros;
        at += part;
        size = 0;
        if (at < payload_size) channel.flush(given.socket);
    } while (at < payload_size);
    return true;
}

// Puts the worker's messages into the ring: a watermark, and answers that are expected.
bool Exchange::pass(Given &given) {
    Message message;
    if (channel.whole() && given.written - given.read > given.capacity / 2) look(given);
    while (!(given.why & kInArea)) {
        const Found found = channel.next(message, opening(given), kShort);
        if (found == Found::nothing) return false;
        if (found == Found::foreign || given.count == kPut) return true;
        const bool passed = message.kind == data_link::kWatermark  ? pass_mark(given, message)
                            : message.kind == data_link::kAnswer   ? pass_answer(given, message)
                            : message.kind == data_link::kAnswerAt ? pass_placed(given, message)
                            : message.kind == data_link::kPong     ? keep_pong(given, message)
                                                                   : false;
        if (!passed) return true;
        channel.take();
    }
    return false;
}

// Notes how far the shim has read; a position that is impossible is left to the Python side.
void Exchange::look(Given &given) const {
    const uint64_t read = word<uint64_t>(given.shim, wire::kShimReadOffset).load(std::memory_order_acquire);
    if (given.read <= read && read <= given.written) given.read = read;
}

// A message of any length that is handled here fits there; its type precedes its body, where the ring's header ends.
uint8_t *Exchange::opening(const Given &given) const {
    constexpr uint64_t kBlock = sizeof(wire::RingHeader) + kShort + wire::kRingAlignment;
    const uint64_t begin = given.written % given.capacity;
    if (kBlock > given.capacity - begin || kBlock > given.capacity - (given.written - given.read)) return nullptr;
    return given.ring + begin + sizeof(wire::RingHeader) - 1;
}

// The worker's position, for the books.
bool Exchange::keep_pong(Given &given, const Message &message) {
    if (given.pong_size || !message.size || message.size > kPong) return false;
    std::memcpy(given.pong, message.body, message.size);
    given.pong_size = message.size;
    given.why |= kPassed;
    return true;
}

bool Exchange::pass_mark(Given &given, const Message &message) {
    wire::WatermarkHead head;
    if (message.size < sizeof head) return false;
    std::memcpy(&head, message.body, sizeof head);
    if (answering_ || head.error || head.done < given.done ||
        message.size != sizeof head + head.count * sizeof(wire::StreamMark) ||
        !publish(given, message.kind, wire::kWatermark, message.body, message.size))
        return false;
    given.done = head.done;
    return true;
}

// A whole answer, or a piece: the first one names the call.
bool Exchange::pass_answer(Given &given, const Message &message) {
    if (!message.size || message.body[0] > 1) return false;
    const bool more = message.body[0], first = !answering_;
    uint64_t *place = answering_;
    if (first) {
        wire::AnswerHead head;
        if (message.size < 1 + sizeof head) return false;
        std::memcpy(&head, message.body + 1, sizeof head);
        place = expected(given, head.seq);
        if (!place || head.reply > message.size - 1 - sizeof head) return false;
    }
    if (!publish(given, message.kind, wire::kAnswer, message.body, message.size, first)) return false;
    answering_ = more ? place : nullptr;
    if (!more) answered(given, place);
    return true;
}

// A whole answer in the worker's area. Its bytes stay there until the program's next calls are shipped: the Python side
// sums them before.
bool Exchange::pass_placed(Given &given, const Message &message) {
    data_link::PieceAt piece;
    wire::AnswerHead head;
    if (!given.area || message.size != sizeof piece + sizeof head) return false;
    std::memcpy(&piece, message.body, sizeof piece);
    std::memcpy(&head, message.body + sizeof piece, sizeof head);
    uint64_t *place = expected(given, head.seq);
    if (!place || answering_ || piece.more || piece.area != given.area || piece.offset > given.area_size ||
        piece.length > given.area_size - piece.offset || head.reply ||
        !publish(given, message.kind, wire::kAnswerAt, message.body, message.size))
        return false;
    answered(given, place);
    given.why |= kInArea;
    return true;
}

bool Exchange::publish(Given &given, uint32_t kind, uint32_t ring_kind, const uint8_t *body, size_t size, bool first) {
    const uint64_t block = (sizeof(wire::RingHeader) + size + wire::kRingAlignment - 1) & ~(wire::kRingAlignment - 1);
    const uint64_t begin = given.written % given.capacity;
    const uint64_t skipped = block > given.capacity - begin ? given.capacity - begin : 0;
    if (skipped + block > given.capacity - (given.written - given.read)) return false;  // the Python side looks
    if (skipped) {
        const wire::RingHeader skip{static_cast<uint32_t>(skipped - sizeof skip), wire::kRingSkip, 0, 0};
        std::memcpy(given.ring + begin, &skip, sizeof skip);
        given.written += skipped;
    }
    const uint64_t at = given.written % given.capacity;
    const wire::RingHeader header{static_cast<uint32_t>(size), ring_kind, first, 0};
    uint8_t *to = given.ring + at + sizeof header;
    if (to != body) std::memmove(to, body, size);  // else it was opened there
    std::memcpy(given.ring + at, &header, sizeof header);
    given.put[given.count++] = {kind, static_cast<uint32_t>(size), at + sizeof header};
    given.written += block;
    word<uint64_t>(given.page, wire::kAgentWrittenOffset).store(given.written, std::memory_order_release);
    given.why |= kPassed;
    silent_ = true;
    return true;
}

// As AnswerRing.wake(): the shim's reader clears `attending`, then reads `written`.
void Exchange::wake(Given &given) {
    if (!silent_) return;
    silent_ = false;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!word<uint32_t>(given.shim, wire::kShimAttendingOffset).load(std::memory_order_relaxed)) {
        const uint64_t one = 1;
        if (::write(given.doorbell, &one, sizeof one) < 0) return;  // it is full: the reader is awake already
    }
}

// Waits for the loop's descriptors, and returns how many are ready; notes those that are left to the Python side.
int Exchange::wait(Given &given, int milliseconds) {
    epoll_event events[8];
    const int count = ::epoll_wait(given.epoll, events, 8, milliseconds);
    for (int i = 0; i < count; ++i) {
        if (events[i].data.fd == given.socket && events[i].events == EPOLLIN) {
            if (!channel.receive(given.socket)) given.why |= kOthers;
        } else if (events[i].data.fd == given.eventfd) {
            uint64_t times;
            if (::read(given.eventfd, &times, sizeof times) < 0) continue;  // an earlier look has read it
        } else {
            given.why |= kOthers;
        }
    }
    return count;
}

// Whether the books of what was done are to be kept now.
bool Exchange::part_is_due(const Given &given, uint64_t begun, uint64_t now) const {
    return given.why && (given.why & kInArea || given.count >= kPartPut || given.written - put_at_ >= kPartBytes ||
                         now - begun >= kPart);
}

// Several round trips may follow each other in one run, for the books are kept once for all of them, or while it goes on.
void Exchange::run(Given &first, Parts *parts) {
    Given *given = &first;
    channel.begin(given->channel);
    answering_ = nullptr;
    parts_ = parts;
    summed_ = 0;
    put_at_ = given->written;
    given->clear();
    held_ = 0;
    bool worked = false;
    uint64_t begun = now_ns();
    const uint64_t end = begun + given->sleep * 1'000'000;
    uint64_t now = begun, part = begun, until = begun + (given->awaited ? given->patience : given->first);
    uint64_t stuck = 0;  // ns since when the socket takes nothing
    for (;;) {
        channel.flush(given->socket);
        stuck = !channel.unsent() ? 0 : stuck ? stuck : now;
        const Calls calls = stuck ? Calls::none : take_calls(*given, now);
        if (calls == Calls::shipped) until = now + given->patience;
        if (calls == Calls::left) given->why |= kCallsLeft;
        const uint32_t before = given->count;
        if (pass(*given)) given->why |= kOthers;
        if (given->count > before && !given->awaited) until = now + given->spin;
        wake(*given);
        worked |= given->why != 0;
        if (given->why & (kCallsLeft | kOthers) || (stuck && now - stuck > kStuck)) break;
        const bool rests = now >= until && calls == Calls::none && !stuck && !channel.whole();
        if (parts && (part_is_due(*given, part, now) || (rests && given->why))) {
            const bool in_area = given->why & kInArea;
            if (Given *next = parts->hand_over(*given)) {
                if (in_area) summed_ = parts->handed();
                if (answering_) answering_ = next->expected + (answering_ - given->expected);
                given = next;
                put_at_ = given->written;
                part = now;
            }
        }
        if (parts ? parts->stopping() : given->why & kInArea) break;
        // The books are kept where nothing is awaited, but not too late.
        const bool calm = !given->awaited && calls != Calls::shipped && !stuck;
        if (worked && now - begun > (parts ? kWhole : kBooks) * (calm ? 1 : 2)) break;
        if (given->count > kPut - 16 || given->placed_count > kPlaced - 16 ||
            given->written - put_at_ > given->capacity / 3)  // the books read what was put, before more is put over it
            break;
        wait(*given, 0);
        if (given->why & kOthers) break;
        const uint64_t last = std::exchange(now, now_ns());
        if (now - last > kLate) break;  // this process did not run
        if (now < until || calls == Calls::held || stuck || given->why & kInArea || channel.whole()) {
            sched_yield();
        } else {
            if (now >= end || !sleep(*given, end - now)) break;
            now = now_ns();
            until = now + given->spin;
            if (!given->why) begun = now;
        }
    }
    channel.end(given->channel);
}

// Sleeps until something is ready; returns whether the run goes on.
bool Exchange::sleep(Given &given, uint64_t ns) {
    auto sleeping = word<uint32_t>(given.page, wire::kAgentSleepingOffset);
    sleeping.store(1, std::memory_order_relaxed);
    // The shim reads `sleeping` after it published; this side looks for calls after it set `sleeping`.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    bool woken = committed_of(given) != given.at;
    if (!woken) {
        const bool books = given.why && !given.awaited;  // they are kept soon
        const int count = wait(given, books ? 1 : static_cast<int>((ns + 999'999) / 1'000'000));
        woken = count > 0;
    }
    sleeping.store(0, std::memory_order_relaxed);
    return woken && !(given.why & kOthers);
}

}  // namespace rgpu

#define RGPU_API extern "C" __attribute__((visibility("default")))

// To be raised when the layout of Given or the functions below change.
RGPU_API int rgx_version() { return 5; }

// Null where the system has no libcrypto.
RGPU_API rgpu::Exchange *rgx_open(const uint8_t *send_key, const uint8_t *send_data, size_t send_size,
                                  const uint8_t *receive_key, const uint8_t *receive_data, size_t receive_size) {
    auto *exchange = new (std::nothrow) rgpu::Exchange;
    if (exchange &&
        exchange->channel.start(send_key, send_data, send_size, receive_key, receive_data, receive_size))
        return exchange;
    delete exchange;
    return nullptr;
}
RGPU_API void rgx_run(rgpu::Exchange *exchange, rgpu::Given *given) { exchange->run(*given); }
RGPU_API void rgx_close(rgpu::Exchange *exchange) { delete exchange; }

// A run in a thread of its own: rgpu::Parts.
RGPU_API rgpu::Parts *rgx_parts(rgpu::Exchange *exchange) { return new (std::nothrow) rgpu::Parts(*exchange); }
RGPU_API int rgx_start(rgpu::Parts *parts, rgpu::Given *first, rgpu::Given *second) { return parts->start(first, second); }
RGPU_API int rgx_take(rgpu::Parts *parts) { return parts->take(); }
RGPU_API void rgx_give_back(rgpu::Parts *parts) { parts->give_back(); }
RGPU_API void rgx_stop(rgpu::Parts *parts) { parts->stop(); }
RGPU_API void rgx_end(rgpu::Parts *parts) { delete parts; }
