// The worker's compiled round trips (rgpu/server/worker/exchange) with an agent that may send anything over the sealed
// link, also while the run goes on. The engine is a stand-in that knows the stream of calls, and answers as the input
// says: with one piece, or with several, as an engine does that has them all.
#include <time.h>

#include <optional>
#include <utility>

#include "data_link.hpp"
#include "engine_steps.hpp"
#include "exchange.hpp"
#include "fuzzing.hpp"

namespace fuzzing {
namespace {
using namespace rgpu;

constexpr uint64_t kArea = 600'000, kBeyond = 10'000, kWindow[] = {100'000, 8192}, kSmallest = 4096;
constexpr uint64_t kLongest = 1 << 20;  // bytes of an answer's pieces that are sent, at most
constexpr uint64_t kFew = 4;            // pieces of an answer

// What the engine has given, in order: the watermark ahead of an answer, or one of its pieces.
struct Gave {
    Bytes mark;  // empty: it is a piece
    Out out;
    bool released;
};

// What the engine does, and what it was given.
struct Engine {
    Input *input = nullptr;
    Peer *peer = nullptr;
    Bytes below = Bytes(kLongest), area = Bytes(kArea + kBeyond), above = Bytes(kLongest);  // with answers
    bool shared = false;   // the area is in use
    bool goes_on = false;  // more pieces of the answer follow
    Bytes calls{};        // the stream as the agent has it
    uint64_t fed = 0, seq = 0, numbers = 0, left = 0;  // left: bytes of the answer that the next pieces may have
    std::vector<Gave> gave{};

    Engine() {
        fill(area.data(), area.size(), 1);
        for (Bytes *one : {&below, &above}) fill(one->data(), kLongest, 2);
    }
    void begin(Input &from) {
        input = &from;
        shared = from.rarely(2);
        fed = left = 0;
        goes_on = false;
        calls.clear();
        gave.clear();
    }
    // The agent goes on meanwhile.
    void others() {
        if (input->rarely(2)) peer->deliver(input->up_to(300'000));
        if (!input->rarely(4)) peer->collect();
    }
    bool follows(const uint8_t *data, size_t size, uint64_t at) const {
        return size <= calls.size() - at && (!size || !std::memcmp(data, calls.data() + at, size));
    }

    static Engine &of(void *engine) { return *static_cast<Engine *>(engine); }
    static int prompt(void *engine, const uint8_t *data, size_t size, const uint8_t *payload, size_t length) {
        Engine &e = of(engine);
        CHECK(e.follows(data, size, e.fed) && e.follows(payload, length, e.fed + size));
        return !e.input->rarely(12);
    }
    static void feed(void *engine, const uint8_t *data, size_t size, Step *step) {
        Engine &e = of(engine);
        CHECK(!e.goes_on && e.follows(data, size, e.fed));
        step->came = e.input->rarely(9) ? static_cast<int>(e.input->up_to(6)) : 0;
        step->taken = step->came ? e.input->up_to(size) : size;
        step->awaiting = e.input->rarely(2) ? static_cast<uint32_t>(e.input->up_to(3)) : 0;
        step->applied = ++e.seq;
        e.fed += step->taken;
    }
    static void take_here(void *engine, Out *out, uint64_t, int, int several) {
        Engine &e = of(engine);
        CHECK(several == 1);
        const Out before = e.goes_on ? e.gave.back().out : Out{};
        const bool goes_on = std::exchange(e.goes_on, false);
        *out = {};
        e.others();
        // A piece that is there is not taken where the link is closed.
        const int other = static_cast<int>(e.input->up_to(4));
        out->took = e.input->rarely(goes_on ? 20 : 5) ? other : static_cast<int>(Took::answer);
        if (out->took != static_cast<int>(Took::answer)) return;
        if (!goes_on) e.left = e.input->rarely(3) ? kLongest : e.input->up_to(64);
        out->result = !goes_on && e.input->rarely(20) ? 700 : 0;
        out->seq = goes_on ? before.seq : e.input->up_to(200);
        out->index = goes_on ? before.index + 1 : e.input->rarely(20);
        out->size = e.input->rarely(4)   ? 2 * kChunk
                    : e.input->rarely(4) ? kChunk - 2 + e.input->up_to(4) : e.input->up_to(e.left);
        out->size = std::min(out->size, e.left);
        // Those outside of the area end where their memory does.
        out->data = (e.input->rarely(2) ? e.below : e.above).data() + kLongest - out->size;
        if (e.shared && out->size <= kArea && e.input->rarely(2)) {
            const uint64_t last = kArea - out->size;
            const bool beyond = e.input->rarely(9);
            out->data = e.area.data() + (beyond ? last + kBeyond : e.input->rarely(2) ? last : e.input->up_to(last));
        }
        e.left -= out->size;
        out->more = out->index + 1 < kFew && e.input->rarely(2);
        e.goes_on = out->more;
        out->answer = reinterpret_cast<Answer *>(++e.numbers);
        e.gave.push_back({{}, *out, false});
    }
    static size_t watermark(void *engine, uint8_t *out, size_t room, int, int) {
        Engine &e = of(engine);
        if (e.input->rarely(3)) return 0;
        const uint64_t most = (room - sizeof(data_link::WatermarkHead)) / sizeof(data_link::StreamMark);
        const auto count = static_cast<uint32_t>(e.input->rarely(6) ? most - e.input->up_to(3) : e.input->up_to(20));
        const data_link::WatermarkHead head{e.input->up_to(1000), e.input->rarely(20) ? 700u : 0u, count};
        const Bytes mark = with(head, count * sizeof(data_link::StreamMark), e.seq);
        std::memcpy(out, mark.data(), mark.size());
        if (!head.error) e.gave.insert(e.gave.end() - 1, {mark, {}, false});
        return mark.size();
    }
    static void release(void *engine, void *answer) {
        Engine &e = of(engine);
        Gave &last = e.gave.back();
        CHECK(last.out.answer == answer && !last.released);
        last.released = true;
    }
    static int error(void *engine) { return of(engine).input->rarely(30) ? 700 : 0; }
    static int interrupted(void *engine) {
        Engine &e = of(engine);
        e.others();
        return e.input->rarely(8);
    }
};

struct Memory {
    Peer peer;
    Exchange exchange;
    Engine engine;
    Bytes memory[2] = {Bytes(kWindow[0]), Bytes(kWindow[1])};
    Window windows[2];

    Memory() {
        engine.peer = &peer;
        for (uint32_t i = 0; i < 2; ++i) {
            fill(memory[i].data(), kWindow[i], 3 + i);
            windows[i] = {memory[i].data(), kWindow[i], 11 + i, 0};
        }
        peer.start(exchange.channel);
    }
    // The payload; null: there is none at that place.
    const uint8_t *payload(const data_link::Place &place) const {
        for (const Window &one : windows)
            if (one.number == place.memory && !place.zero && place.length && place.offset <= one.size &&
                place.length <= one.size - place.offset)
                return one.data + place.offset;
        return nullptr;
    }
};

// What the agent sent, mostly in the order of the stream.
void send_messages(Input &input, Memory &m, uint64_t stream) {
    timespec clock;
    ::clock_gettime(CLOCK_MONOTONIC, &clock);
    const auto now = static_cast<uint64_t>(clock.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(clock.tv_nsec);
    const uint64_t begun = stream;
    Bytes &calls = m.engine.calls;
    const auto goes_on = [&](const uint8_t *data, size_t size) {
        calls.insert(calls.end(), data, data + size);
        stream = begun + calls.size();
    };
    for (auto count = input.up_to(8); count--;) {
        const bool altered = input.rarely(60);
        switch (input.up_to(6)) {
            case 0: {
                const data_link::Issued body{input.maybe(now), input.maybe(now - input.up_to(2'000'000)),
                                             input.take<uint64_t>()};
                m.peer.send(data_link::kIssued, with(body, input.rarely(20) ? input.up_to(9) : 0), altered);
                break;
            }
            case 1:
            case 2: {
                // At times as long as a message may be, or longer.
                const uint64_t longest = kShort - 1 - sizeof(uint64_t);
                const uint64_t size = input.rarely(9) ? input.maybe(longest) % (longest + 9)
                                    : input.rarely(4) ? input.up_to(longest) : input.up_to(300);
                const Bytes body = with(input.maybe(stream), size, stream);
                m.peer.send(data_link::kCalls, body, altered);
                goes_on(body.data() + sizeof stream, size);
                break;
            }
            case 3: {
                const uint32_t which = input.rarely(2);
                const uint64_t offset = input.up_to(kWindow[which]), length = input.up_to(kWindow[which] - offset);
                const data_link::Place place{input.maybe(stream), input.maybe(11 + which), input.maybe<uint32_t>(0),
                                             input.maybe(offset), input.maybe(length)};
                const uint64_t size = input.rarely(9) ? kRecords : input.up_to(300);
                const Bytes body = with(place, size, stream);
                m.peer.send(data_link::kCallsAt, body, altered);
                goes_on(body.data() + sizeof place, size);
                if (const uint8_t *payload = m.payload(place)) goes_on(payload, place.length);
                break;
            }
            case 4: {
                static constexpr uint8_t kinds[] = {data_link::kIssued, data_link::kCalls, data_link::kCallsAt};
                Bytes body = with(input.rarely(2) ? stream : input.take<uint64_t>(), input.up_to(60), stream);
                body.resize(input.maybe<uint8_t>(60) % (body.size() + 1));
                m.peer.send(input.maybe(kinds[input.up_to(2)]), body, altered);
                if (body.size() > sizeof stream) goes_on(body.data() + sizeof stream, body.size() - sizeof stream);
                break;
            }
            case 5:
                if (input.rarely(3)) m.peer.send_noise(input);
                break;
            default: break;
        }
    }
}

// The messages that were taken are in order, and the stream goes on behind them.
void check_taken(Memory &m, const Given &before, const Given &after) {
    uint64_t stream = before.stream;
    bool issued = false;
    m.peer.check_left(after.channel);
    for (size_t i = 0; i < after.channel.opened; ++i) {
        const auto &[kind, body, end] = m.peer.messages[i];
        if (kind == data_link::kIssued) {
            CHECK(body.size() == sizeof(data_link::Issued) && before.clock);
            issued = true;
            continue;
        }
        CHECK(kind == data_link::kCalls || kind == data_link::kCallsAt);
        data_link::Place place{};
        const size_t head = kind == data_link::kCalls ? sizeof place.stream : sizeof place;
        CHECK(body.size() > head);
        std::memcpy(&place, body.data(), head);
        CHECK(place.stream == stream && (kind == data_link::kCalls || m.payload(place)));
        stream += body.size() - head + place.length;
    }
    CHECK(after.stream == stream && !after.issued == !issued);
    uint64_t rest = 0;
    if (after.why & kRest) {
        CHECK(m.engine.follows(after.rest, after.rest_size, m.engine.fed));
        CHECK(m.engine.follows(after.behind, after.behind_size, m.engine.fed + after.rest_size));
        rest = after.rest_size + after.behind_size;
    } else {
        CHECK(!after.behind_size);
    }
    CHECK(stream - before.stream == m.engine.fed + rest);
    if (!(after.why & kLeft)) return;
    const bool opens = after.channel.opened < m.peer.messages.size();
    CHECK(opens ? after.left == m.peer.messages[after.channel.opened].kind : !after.left);
}

// What was sent, message by message, is what the engine gave.
class Answers {
   public:
    Answers(const Engine &engine, const Given &given) : e_(engine), given_(given) {
        for (const Gave &one : engine.gave)
            if (one.released || one.mark.size()) gave_.push_back(&one);
        if (gave_.size() && gave_.back()->mark.size()) CHECK(!(given.why & kAnswer));  // then an answer follows it
    }
    void take(uint8_t kind, const uint8_t *body, size_t size) {
        CHECK(next_ < gave_.size());
        const Gave &gave = *gave_[next_];
        if (gave.mark.size()) {
            CHECK(kind == data_link::kWatermark && size == gave.mark.size());
            CHECK(!std::memcmp(body, gave.mark.data(), size));
            ++next_;
            return;
        }
        const Out &out = gave.out;
        const data_link::AnswerHead head{out.seq, 0, 0, 0};
        const bool first = !out.index && !at_;
        if (const std::optional<uint64_t> offset = placed(out)) {
            const data_link::PieceAt piece{out.more != 0, given_.area_number, *offset, out.size};
            Bytes right = with(piece, first ? sizeof head : 0);
            if (first) std::memcpy(right.data() + sizeof piece, &head, sizeof head);
            CHECK(kind == data_link::kAnswerAt && size == right.size() && !std::memcmp(body, right.data(), size));
            ++next_;
            return;
        }
        const size_t begin = 1 + (first ? sizeof head : 0);
        CHECK(kind == data_link::kAnswer && size >= begin);
        const size_t part = size - begin;
        CHECK(part <= kChunk && part <= out.size - at_ && (part || !out.size));
        CHECK(!first || !std::memcmp(body + 1, &head, sizeof head));
        CHECK(!part || !std::memcmp(body + begin, out.data + at_, part));
        at_ += part;
        CHECK(body[0] == (out.more || at_ < out.size));
        if (at_ < out.size) return;
        at_ = 0;
        ++next_;
    }
    void check_end() const {
        CHECK(next_ == gave_.size() && !at_);
        uint64_t answered = 0, taken = 0, done = 0;
        for (const Gave &one : e_.gave) {
            answered += one.released && !one.out.index;
            taken += one.mark.empty() && !one.released;
            if (one.mark.size()) std::memcpy(&done, one.mark.data(), sizeof done);
        }
        CHECK(answered == given_.answered && taken == ((given_.why & kAnswer) != 0));
        if (given_.why & kAnswer) CHECK(given_.out->answer == e_.gave.back().out.answer);
        if (given_.complete) CHECK(*given_.complete == done);
    }

   private:
    std::optional<uint64_t> placed(const Out &out) const {
        if (!e_.shared || out.size < kSmallest || out.seq <= given_.published || out.data < e_.area.data() ||
            out.data + out.size > e_.area.data() + kArea)
            return std::nullopt;
        return static_cast<uint64_t>(out.data - e_.area.data());
    }

    const Engine &e_;
    const Given &given_;
    std::vector<const Gave *> gave_;
    size_t next_ = 0;
    uint64_t at_ = 0;  // in that piece
};
}  // namespace

void one(Input &input) {
    static Memory m;
    m.peer.renew();
    m.engine.begin(input);
    Given given{};
    Step step{};
    Out out{};
    uint64_t applied = 0, complete = 0;
    const uint64_t seq = m.engine.seq;
    given.calls = {&m.engine, Engine::prompt, Engine::feed, Engine::take_here, Engine::watermark, Engine::release,
                   Engine::error, Engine::interrupted};
    given.step = &step, given.out = &out;
    if (!input.rarely(8)) given.applied = &applied, given.complete = &complete;
    given.socket = m.peer.ends[0];
    given.clock = !input.rarely(4);
    given.known_until = ~0ull, given.late = 50'000'000;
    given.spin = input.rarely(4) ? 20'000 * input.up_to(5) : 0;
    given.stream = input.take<uint32_t>();
    given.windows = m.windows, given.window_count = 2;
    if (m.engine.shared) given.area = m.engine.area.data();
    given.area_size = kArea, given.area_number = 5;
    given.published = input.up_to(100), given.smallest = kSmallest;
    send_messages(input, m, given.stream);
    m.peer.hand_over(given.channel, input.rarely(3) ? input.up_to(m.peer.stream.size()) : 0);
    m.peer.deliver(input.rarely(2) ? input.up_to(m.peer.stream.size()) : ~0ull);
    const Given before = given;
    m.exchange.run(given);
    check_taken(m, before, given);
    Answers answers(m.engine, given);
    m.peer.open(given.channel,
                [&](uint8_t kind, const uint8_t *body, size_t size, size_t) { answers.take(kind, body, size); });
    answers.check_end();
    CHECK(!(given.why & kFed) == (m.engine.seq == seq));
    CHECK(!given.applied || applied == (given.why & kFed ? m.engine.seq : 0));
    if (given.why & kMark) CHECK(given.mark_size >= sizeof(data_link::WatermarkHead));
}
}  // namespace fuzzing
