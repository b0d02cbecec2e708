#include "exchange.hpp"

#include <poll.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "data_link.hpp"
#include "engine_steps.hpp"

namespace rgpu {
namespace {

constexpr uint64_t kBooks = 10'000'000;  // ns that a run goes on, at most, …
constexpr uint64_t kMarks = 2'000'000;   // … and without an answer, whose watermark tells the program what is complete
constexpr uint64_t kGap = 20'000'000;   // ns without a look, from which on this process did not run
constexpr size_t kLongest = (1u << 20) + (1u << 18);  // bytes of an answer's frames, and its watermark's, at most

uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

void store(uint64_t *word, uint64_t value) {
    if (word) std::atomic_ref<uint64_t>(*word).store(value, std::memory_order_release);
}

}  // namespace

// When the calls that follow were published; false: late, or not known to be in time.
bool Exchange::issued(Given &given, const Message &message) {
    data_link::Issued body;
    if (message.size != sizeof body || !given.clock) return false;
    std::memcpy(&body, message.body, sizeof body);
    const uint64_t now = now_ns();
    if (body.since > body.sent || now >= given.known_until) return false;
    const auto ahead = static_cast<int64_t>(now - body.sent);
    const int64_t least = std::min(given.least, given.issued ? std::min(given.ahead, ahead) : ahead);
    if (static_cast<uint64_t>(ahead - least) + (body.sent - body.since) > given.late) return false;
    given.ahead = given.issued ? std::min(given.ahead, ahead) : ahead;
    given.issued = 1;
    given.arrived = now;
    return true;
}

Exchange::Did Exchange::feed(Given &given, const Message &message) {
    const EngineCalls &calls = given.calls;
    uint64_t offset;
    if (message.size <= sizeof offset) return Did::left;
    std::memcpy(&offset, message.body, sizeof offset);
    if (now_ns() - looked_ > kGap) return Did::left;  // this process did not run: calls may have piled up
    const uint8_t *data = message.body + sizeof offset;  // the channel's memory, until the next message is looked for
    const size_t size = message.size - sizeof offset;
    if (offset != given.stream || !calls.prompt(calls.engine, data, size, nullptr, 0)) return Did::left;
    channel.take();
    given.stream += size;
    if (!fed(given, data, size)) return Did::ended;
    return answers(given);
}

// Records, and then the last one's payload, which the device reads where the program's side wrote it.
Exchange::Did Exchange::feed_placed(Given &given, const Message &message) {
    const EngineCalls &calls = given.calls;
    data_link::Place place;
    if (message.size <= sizeof place || now_ns() - looked_ > kGap) return Did::left;
    std::memcpy(&place, message.body, sizeof place);
    const Window *last = given.windows + given.window_count;
    const Window *found = std::find_if(given.windows, last, [&](const Window &one) { return one.number == place.memory; });
    if (found == last || place.zero || !place.length || place.offset > found->size ||
        place.length > found->size - place.offset)
        return Did::left;
    const uint8_t *payload = found->data + place.offset;
    const uint8_t *data = message.body + sizeof place;
    const size_t size = message.size - sizeof place;
    if (place.stream != given.stream || !calls.prompt(calls.engine, data, size, payload, place.length))
        return Did::left;
    channel.take();
    given.stream += size + place.length;
    if (!fed(given, data, size)) {
        given.behind = payload;
        given.behind_size = place.length;
        return Did::ended;
    }
    return fed(given, payload, place.length) ? Did::something : Did::ended;
}

// Whether all of it was applied.
bool Exchange::fed(Given &given, const uint8_t *data, size_t size) {
    const uint64_t began = now_ns();
    given.calls.feed(given.calls.engine, data, size, given.step);
    given.slow = std::max(given.slow, now_ns() - began);
    given.why |= kFed;
    store(given.applied, given.step->applied);
    if (!given.step->came && given.step->taken == size) return true;
    given.why |= kRest;
    given.rest = data + given.step->taken;
    given.rest_size = size - given.step->taken;
    return false;
}

// A copy to pinned memory that nobody awaits is answered, and then the synchronisation behind it: mostly both are
// complete at once, and leave together.
Exchange::Did Exchange::answers(Given &given) {
    Did did = Did::something;
    for (uint32_t left = given.step->awaiting; left && did == Did::something; --left) did = answer(given);
    channel.flush(given.socket);
    return did == Did::something && channel.unsent() ? Did::ended : did;
}

// The program waits for it, and mostly has sent nothing behind the call.
Exchange::Did Exchange::answer(Given &given) {
    const EngineCalls &calls = given.calls;
    Out &out = *given.out;
    if (channel.whole()) return Did::ended;  // calls of other threads, then
    if (channel.room() < kLongest) return Did::ended;
    calls.take_here(calls.engine, &out, 0, given.socket, 1);
    if (out.took != static_cast<int>(Took::answer)) {
        channel.flush(given.socket);
        calls.take_here(calls.engine, &out, given.patience, given.socket, 1);
    }
    if (out.took != static_cast<int>(Took::answer)) return Did::ended;
    if (out.result || out.index || calls.error(calls.engine)) {
        given.why |= kAnswer;
        return Did::ended;
    }
    const size_t size = calls.watermark(calls.engine, mark_.data(), mark_.size(), 0, 0);
    data_link::WatermarkHead mark{};
    if (size) std::memcpy(&mark, mark_.data(), sizeof mark);
    if (mark.error) {
        given.why |= kAnswer | kMark;
        given.mark = mark_.data();
        given.mark_size = size;
        return Did::ended;
    }
    if (size) {
        store(given.complete, mark.done);
        channel.put(data_link::kWatermark, {{mark_.data(), size}});
    }
    if (!put_pieces(given)) {
        given.why |= kAnswer;
        return Did::ended;
    }
    ++given.answered;
    return Did::something;
}

// Puts the answer that begins with `out`, all of whose pieces are there.
bool Exchange::put_pieces(Given &given) {
    const EngineCalls &calls = given.calls;
    Out &out = *given.out;
    for (;;) {
        if (!put(given, out)) return false;
        calls.release(calls.engine, out.answer);
        if (!out.more) return true;
        channel.flush(given.socket);
        calls.take_here(calls.engine, &out, 0, -1, 1);
        if (out.took != static_cast<int>(Took::answer)) return true;  // the connection is being closed
    }
}

// False: it cannot be sealed.
bool Exchange::put(const Given &given, const Out &out) {
    const data_link::AnswerHead head{out.seq, 0, 0, 0};
    if (given.area && out.size >= given.smallest && out.seq > given.published && out.data >= given.area) {
        const auto offset = static_cast<uint64_t>(out.data - given.area);
        const data_link::PieceAt piece{static_cast<uint8_t>(out.more != 0), given.area_number, offset, out.size};
        const size_t begin = out.index ? 0 : sizeof head;
        if (offset <= given.area_size && out.size <= given.area_size - offset)
            return channel.put(data_link::kAnswerAt, {{&piece, sizeof piece}, {&head, begin}});
    }
    uint64_t at = 0;
    do {
        const uint64_t size = std::min<uint64_t>(out.size - at, kChunk);
        const uint8_t more = out.more || at + size < out.size;
        const size_t begin = at || out.index ? 0 : sizeof head;
        if (!channel.put(data_link::kAnswer, {{&more, 1}, {&head, begin}, {out.data + at, size}})) return false;
        at += size;
        if (at < out.size) channel.flush(given.socket);
    } while (at < out.size);
    return true;
}

Exchange::Did Exchange::handle(Given &given) {
    Message message;
    const Found found = channel.next(message);
    if (found == Found::nothing) return Did::nothing;
    given.left = 0;
    if (found == Found::foreign) return Did::left;
    given.left = message.kind;
    if (message.kind == data_link::kCalls) return feed(given, message);
    if (message.kind == data_link::kCallsAt) return feed_placed(given, message);
    if (message.kind != data_link::kIssued || !issued(given, message)) return Did::left;
    channel.take();
    return Did::something;
}

// Polls for more, until then; behind an answer also asleep for a moment, since the program's next call mostly follows.
bool Exchange::more(Given &given, uint64_t until) {
    pollfd readable{given.socket, POLLIN, 0};
    for (;;) {
        looked_ = now_ns();
        if (channel.receive(given.socket)) return true;
        if (given.calls.interrupted(given.calls.engine)) return false;
        if (looked_ >= until) break;
        sched_yield();
    }
    return given.answered && ::poll(&readable, 1, 1) == 1 && channel.receive(given.socket);
}

// Several round trips may follow each other in one run, for the books are kept once for all of them.
void Exchange::run(Given &given) {
    channel.begin(given.channel);
    given.why = 0;
    given.issued = 0;
    given.slow = given.answered = given.behind_size = 0;
    const uint64_t begun = looked_ = now_ns();
    uint64_t marked = begun, answered = 0;
    for (;;) {
        const Did did = handle(given);
        if (did == Did::ended) break;
        if (did == Did::left) {
            given.why |= kLeft;
            break;
        }
        if (did == Did::nothing) {
            const uint64_t now = now_ns();
            if (now - begun > kBooks || (now - marked > kMarks)) break;
            if (!more(given, now + given.spin)) break;
        }
        if (given.answered > answered) {
            answered = given.answered;
            marked = now_ns();
        }
    }
    channel.end(given.channel);
}

}  // namespace rgpu

#define RGPU_API extern "C" __attribute__((visibility("default")))

// To be raised when the layout of Given or the functions below change.
RGPU_API int rgw_version() { return 3; }

// Null where the system has no libcrypto.
RGPU_API rgpu::Exchange *rgw_open(const uint8_t *send_key, const uint8_t *send_data, size_t send_size,
                                  const uint8_t *receive_key, const uint8_t *receive_data, size_t receive_size) {
    auto *exchange = new (std::nothrow) rgpu::Exchange;
    if (exchange &&
        exchange->channel.start(send_key, send_data, send_size, receive_key, receive_data, receive_size))
        return exchange;
    delete exchange;
    return nullptr;
}
RGPU_API void rgw_run(rgpu::Exchange *exchange, rgpu::Given *given) { exchange->run(*given); }
RGPU_API void rgw_close(rgpu::Exchange *exchange) { delete exchange; }
