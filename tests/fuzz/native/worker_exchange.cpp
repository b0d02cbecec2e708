// The worker's compiled round trips (rgpu/server/worker/exchange) with an agent that may send anything over the sealed
// link. The engine is a stand-in that reads each byte it is given, and answers as the input says.
#include <time.h>

#include "data_link.hpp"
#include "engine_steps.hpp"
#include "exchange.hpp"
#include "fuzzing.hpp"

namespace fuzzing {
namespace {
using namespace rgpu;

constexpr uint64_t kArea = 40'000, kWindow[] = {100'000, 8192};
constexpr uint8_t kRight = 7, kWrong = 9;  // bytes of calls at the stream's place, and at none
constexpr uint64_t kLongest = 20'000;  // bytes of the longest answer

uint64_t sum(const uint8_t *data, size_t size) {
    uint64_t found = 0;
    for (size_t i = 0; i < size; ++i) found += data[i];
    return found;
}

// What the engine does, and what it was given.
struct Engine {
    Input *input = nullptr;
    const uint8_t *area = nullptr;
    uint8_t *answer = nullptr;
    uint64_t fed = 0, seq = 0, read = 0, taken = 0, released = 0;

    static Engine &of(void *engine) { return *static_cast<Engine *>(engine); }
    static int prompt(void *engine, const uint8_t *data, size_t size, const uint8_t *payload, size_t length) {
        Engine &e = of(engine);
        e.read += sum(data, size) + sum(payload, length);
        return !e.input->rarely(8);
    }
    static void feed(void *engine, const uint8_t *data, size_t size, Step *step) {
        Engine &e = of(engine);
        e.read += sum(data, size);
        CHECK(!size || *data != kWrong);
        step->came = e.input->rarely(6) ? static_cast<int>(e.input->up_to(6)) : 0;
        step->taken = step->came ? e.input->up_to(size) : size;
        step->awaiting = e.input->rarely(2) ? static_cast<uint32_t>(e.input->up_to(3)) : 0;
        step->applied = ++e.seq;
        e.fed += step->taken;
    }
    static void take_here(void *engine, Out *out, uint64_t, int) {
        Engine &e = of(engine);
        *out = {};
        out->took = e.input->rarely(5) ? static_cast<int>(e.input->up_to(4)) : static_cast<int>(Took::answer);
        if (out->took != static_cast<int>(Took::answer)) return;
        ++e.taken;
        out->result = e.input->rarely(9) ? 700 : 0;
        out->seq = e.input->up_to(200);
        out->size = e.input->rarely(2) ? e.input->up_to(kLongest) : e.input->up_to(64);
        out->data = e.answer;
        if (e.area && e.input->rarely(2)) out->data = const_cast<uint8_t *>(e.area) + e.input->up_to(kArea - out->size);
        out->more = e.input->rarely(9);
        out->index = e.input->rarely(9);
        out->answer = reinterpret_cast<Answer *>(&e);
    }
    static size_t watermark(void *engine, uint8_t *out, size_t room, int, int) {
        Engine &e = of(engine);
        if (e.input->rarely(3)) return 0;
        const auto count = static_cast<uint32_t>(e.input->up_to((room - sizeof(data_link::WatermarkHead)) / 16));
        const data_link::WatermarkHead head{e.input->up_to(1000), e.input->rarely(9) ? 700u : 0u, count};
        std::memcpy(out, &head, sizeof head);
        std::memset(out + sizeof head, 5, count * 16);
        return sizeof head + count * 16;
    }
    static void release(void *engine, void *answer) {
        CHECK(answer == engine);
        ++of(engine).released;
    }
    static int error(void *engine) { return of(engine).input->rarely(20) ? 700 : 0; }
    static int interrupted(void *engine) { return of(engine).input->rarely(8); }
};

struct Memory {
    Peer peer;
    Exchange exchange;
    Bytes area = Bytes(kArea + kLongest);  // and, behind the area, answers outside of it
    Engine engine;
    Bytes memory[2] = {Bytes(kWindow[0], 1), Bytes(kWindow[1], 2)};
    Window windows[2] = {{memory[0].data(), kWindow[0], 11, 0}, {memory[1].data(), kWindow[1], 12, 0}};

    Memory() { peer.start(exchange.channel); }
};

// What the agent sent, mostly in the order of the stream.
void send_messages(Input &input, Memory &m, uint64_t stream) {
    timespec clock;
    ::clock_gettime(CLOCK_MONOTONIC, &clock);
    const auto now = static_cast<uint64_t>(clock.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(clock.tv_nsec);
    for (auto count = input.up_to(6); count--;) {
        switch (input.up_to(6)) {
            case 0: {
                const data_link::Issued body{input.maybe(now), input.maybe(now - input.up_to(2'000'000)), input.take<uint64_t>()};
                m.peer.send(data_link::kIssued, with(body, input.rarely(9) ? input.up_to(9) : 0));
                break;
            }
            case 1:
            case 2: {
                const uint64_t size = input.rarely(4) ? input.up_to(kShort - 1 - sizeof(uint64_t)) : input.up_to(300);
                const uint64_t offset = input.maybe(stream);
                m.peer.send(data_link::kCalls, with(offset, size, offset == stream ? kRight : kWrong));
                stream += size;
                break;
            }
            case 3: {
                const uint32_t which = input.rarely(2);
                const uint64_t offset = input.up_to(kWindow[which]), length = input.up_to(kWindow[which] - offset);
                const data_link::Place place{input.maybe(stream), input.maybe(11 + which), input.maybe<uint32_t>(0),
                                             input.maybe(offset), input.maybe(length)};
                const uint64_t size = input.up_to(300);
                m.peer.send(data_link::kCallsAt, with(place, size, place.stream == stream ? kRight : kWrong));
                stream += size + place.length;
                break;
            }
            case 4: {
                static constexpr uint8_t kinds[] = {data_link::kIssued, data_link::kCalls, data_link::kCallsAt};
                const auto offset = input.take<uint64_t>();
                Bytes body = with(offset, input.up_to(60), offset == stream ? kRight : kWrong);
                body.resize(input.maybe<uint8_t>(60) % (body.size() + 1));
                m.peer.send(input.maybe(kinds[input.up_to(2)]), body);
                stream += offset == stream && body.size() > 8 ? body.size() - 8 : 0;
                break;
            }
            case 5: m.peer.send_noise(input); break;
            default: break;
        }
    }
}

void check(Memory &m, const Given &before, const Given &after, const Out &out) {
    uint64_t answers = 0;
    m.peer.open(after.channel.unsent, after.channel.unsent_size, [&](uint8_t kind, const uint8_t *body, size_t size) {
        if (kind == data_link::kWatermark) {
            data_link::WatermarkHead head;
            CHECK(size >= sizeof head);
            std::memcpy(&head, body, sizeof head);
            CHECK(!head.error && size == sizeof head + head.count * 16);
            return;
        }
        ++answers;
        if (kind == data_link::kAnswerAt) {
            data_link::PieceAt piece;
            CHECK(size == sizeof piece + sizeof(data_link::AnswerHead) && after.area);
            std::memcpy(&piece, body, sizeof piece);
            CHECK(!piece.more && piece.area == after.area_number && piece.offset <= kArea && piece.length <= kArea - piece.offset);
            return;
        }
        CHECK(kind == data_link::kAnswer && size >= 1 + sizeof(data_link::AnswerHead) && !body[0]);
    });
    CHECK(answers == after.answered && m.engine.released == after.answered && m.peer.opened == after.channel.sealed);
    CHECK(m.engine.taken == after.answered + ((after.why & kAnswer) != 0));
    const uint64_t rest = after.why & kRest ? after.rest_size : 0;
    CHECK(after.stream - before.stream == m.engine.fed + rest + after.behind_size);
    if (after.why & kRest) m.engine.read += sum(after.rest, after.rest_size) + sum(after.behind, after.behind_size);
    if (after.why & kAnswer) m.engine.read += sum(out.data, out.size);
    if (after.why & kMark) m.engine.read += sum(after.mark, after.mark_size);
    m.engine.read += sum(after.channel.pending, after.channel.pending_size);
}
}  // namespace

void one(Input &input) {
    static Memory m;
    m.peer.renew();
    Given given{};
    Step step{};
    Out out{};
    uint64_t applied = 0, complete = 0;
    m.engine.input = &input;
    m.engine.answer = m.area.data() + kArea;
    m.engine.area = input.rarely(2) ? m.area.data() : nullptr;
    m.engine.fed = m.engine.taken = m.engine.released = 0;
    given.calls = {&m.engine, Engine::prompt, Engine::feed, Engine::take_here, Engine::watermark, Engine::release,
                   Engine::error, Engine::interrupted};
    given.step = &step, given.out = &out;
    if (!input.rarely(8)) given.applied = &applied, given.complete = &complete;
    given.socket = m.peer.ends[0];
    given.clock = !input.rarely(4);
    given.known_until = ~0ull, given.late = 50'000'000;
    given.stream = input.take<uint32_t>();
    given.windows = m.windows, given.window_count = 2;
    given.area = m.engine.area, given.area_size = kArea, given.area_number = 5;
    given.published = input.up_to(100), given.smallest = 4096;
    send_messages(input, m, given.stream);
    const Given before = given;
    m.exchange.run(given);
    check(m, before, given, out);
}
}  // namespace fuzzing
