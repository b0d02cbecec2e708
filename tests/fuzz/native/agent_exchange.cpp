// The agent's compiled round trips (rgpu/client/exchange) between a program that may write anything to its journal and
// its page, and a worker that may send anything over the sealed link. In some inputs both go on during the run, and in
// some the run is in a thread of its own (parts.hpp); its books are kept here as rgpu/client/exchange/library.py does.
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>

#include "exchange.hpp"
#include "fuzzing.hpp"
#include "shim_link.hpp"

namespace fuzzing {
namespace {
using namespace rgpu;

constexpr uint64_t kSegment = 40'000, kArea = 1 << 20, kSmallest = 4096;
// Only in the last does the shim read while the run goes on. The books of two parts must find what was put into the
// ring although it was read: a third of the ring, and what comes at once, for each. An agent's is longer.
constexpr uint64_t kRings[] = {8192, 512 << 10, 4 << 20};
constexpr uint64_t kUnread = 64 << 10;  // bytes that are in that one before, at most
constexpr uint8_t kOld = 0xa5;          // fills what the shim has not read before the run

template <class T>
std::atomic_ref<T> word(Bytes &memory, size_t offset) {
    return std::atomic_ref<T>(*reinterpret_cast<T *>(memory.data() + offset));
}

// Each in an allocation of its own, so that what is beside it is not touched.
struct Memory {
    Bytes pages[3], shim, segment, payloads[4];
    Bulk bulks[4];
    Peer peer;
    int doorbell = ::eventfd(0, EFD_NONBLOCK), eventfd = ::eventfd(0, EFD_NONBLOCK), epoll = ::epoll_create1(0);
    Exchange exchange;
    Parts parts{exchange};

    Memory() : shim(wire::kShimPageSize), segment(kSegment) {
        for (size_t i = 0; i < std::size(pages); ++i) pages[i].resize(wire::kAgentPageSize + kRings[i]);
        static constexpr size_t sizes[] = {100'000, 1 << 20, 99'999, kInline + 70'000};
        for (uint32_t i = 0; i < std::size(bulks); ++i) {
            payloads[i].resize(sizes[i]);
            fill(payloads[i].data(), sizes[i], 1000 * i);
            bulks[i] = {payloads[i].data(), sizes[i], 3 + i, i < 2 ? 11 + i : 0};
        }
        for (const int end : {peer.ends[0], eventfd}) {
            epoll_event event{};
            event.events = EPOLLIN;
            event.data.fd = end;
            CHECK(!::epoll_ctl(epoll, EPOLL_CTL_ADD, end, &event));
        }
        peer.start(exchange.channel);
    }
    Bytes &page(const Given &given) {
        return *std::find_if(pages, std::end(pages), [&](const Bytes &one) { return one.data() == given.page; });
    }
};

// What the program wrote.
struct Written {
    std::vector<uint64_t> ends{};      // of the records
    std::vector<uint64_t> answered{};  // calls among them
};

struct Record {
    uint64_t args, payload;
    const Bulk *bulk;  // with its payload; null: it is in the record
    uint64_t offset;   // in that segment
    wire::RecordHeader header;
    wire::ExternalPayload where;
};

// Mostly as it should be; `named`: as short as one with a payload that is named can be.
Record some_record(Input &input, Memory &m, uint64_t seq, bool named) {
    Record made{};
    made.bulk = named || input.rarely(3) ? &m.bulks[named ? 0 : input.up_to(std::size(m.bulks) - 1)] : nullptr;
    made.args = named ? 0 : input.up_to(48);
    uint64_t &payload = made.payload = input.rarely(3) ? 0 : input.up_to(input.rarely(5) ? 9000 : 400);
    if (made.bulk) {
        if (named || input.rarely(3)) payload = wire::padded(payload) + kSmallest;
        if (input.rarely(6)) payload = input.up_to(300'000);
        if (input.rarely(9)) payload = kInline + 4 - input.up_to(16);
        made.offset = input.rarely(3) ? made.bulk->size - payload : 64 * input.up_to(1700);
        made.where = {input.maybe(made.bulk->index), input.maybe<uint32_t>(0), input.maybe(made.offset)};
    }
    static constexpr uint16_t calls[] = {wire::MemcpyH2d::id, wire::MemcpyH2d::id, wire::MemcpyD2h::id,
                                         wire::StreamSynchronize::id};
    const uint16_t flags = (made.bulk ? wire::kFlagExternal : 0) | (input.rarely(4) ? wire::kFlagAwaited : 0);
    made.header.magic = input.maybe(wire::kRecordMagic);
    made.header.call = input.maybe(made.bulk ? wire::MemcpyH2d::id : calls[input.up_to(3)]);
    made.header.flags = input.maybe(flags);
    made.header.seq = input.maybe(seq);
    made.header.args_len = input.maybe(static_cast<uint32_t>(made.args));
    made.header.payload_len = input.maybe(payload);
    return made;
}

bool is_answered(const Given &given, const wire::RecordHeader &header) {
    return header.flags & wire::kFlagAwaited ||
           (header.call < 256 && given.answered[header.call / 64] >> header.call % 64 & 1);
}

// Records from the journal's place on.
Written write_records(Input &input, Memory &m, const Given &given) {
    Written written;
    uint64_t at = given.at, seq = given.seq;
    for (auto count = input.up_to(6); count--;) {
        const bool many = input.rarely(9);
        Record record = some_record(input, m, seq, many && input.rarely(2));
        const uint64_t head = sizeof record.header + wire::padded(record.args);
        const uint64_t whole = head + (record.bulk ? sizeof record.where : wire::padded(record.payload));
        for (auto times = many ? 1 + input.up_to(300) : 1; times-- && whole <= kSegment - at; ++seq) {
            std::memcpy(m.segment.data() + at, &record.header, sizeof record.header);
            if (record.bulk) std::memcpy(m.segment.data() + at + head, &record.where, sizeof record.where);
            written.ends.push_back(at += whole);
            if (is_answered(given, record.header)) written.answered.push_back(record.header.seq);
            ++record.header.seq;
        }
    }
    return written;
}

void send_marks(Input &input, Memory &m, const Given &given) {
    uint64_t done = given.done + input.up_to(9);
    for (auto times = input.rarely(9) ? 1 + input.up_to(600) : 1; times--; ++done) {
        const auto streams = static_cast<uint32_t>(input.up_to(input.rarely(9) ? 600 : 20));
        const data_link::WatermarkHead head{input.maybe(done), input.rarely(30) ? 700u : 0u, input.maybe(streams)};
        m.peer.send(data_link::kWatermark, with(head, streams * sizeof(data_link::StreamMark), done), input.rarely(40));
    }
}

// An answer, mostly whole, else in pieces; `flood`: one that is longer than the longest ring.
void send_answer(Input &input, Memory &m, const Given &given, uint64_t seq, bool flood = false) {
    const uint64_t pieces = flood ? 50 : input.rarely(3) ? 2 + input.up_to(4) : 1;
    for (uint64_t index = 0; index < pieces; ++index) {
        const uint64_t head = index ? 0 : sizeof(data_link::AnswerHead);
        const uint64_t most = kShort - 2 - head;  // beside type, `more` and head
        const uint64_t payload = flood || input.rarely(6) ? kChunk
                               : input.rarely(20)         ? input.maybe(most) % (most + 9)
                               : input.rarely(4)          ? input.up_to(16'000) : input.up_to(200);
        const data_link::AnswerHead answer{seq, 0, 0, input.maybe(static_cast<uint32_t>(input.up_to(payload)))};
        Bytes body = with(input.maybe<uint8_t>(index + 1 < pieces), head + payload, seq + index);
        if (head) std::memcpy(body.data() + 1, &answer, head);
        m.peer.send(data_link::kAnswer, body, input.rarely(60));
        if (index + 1 < pieces && input.rarely(20)) send_marks(input, m, given);
    }
}

// What the worker sent.
void send_messages(Input &input, Memory &m, const Given &given, const Written &written, bool flood) {
    std::vector<uint64_t> answered(given.expected, given.expected + kExpected);
    answered.insert(answered.end(), written.answered.begin(), written.answered.end());
    std::erase(answered, 0);
    if (flood) {
        send_answer(input, m, given, answered[0], true);
        answered.erase(answered.begin());
    }
    for (auto count = input.up_to(8); count--;) {
        const size_t which = answered.size() > 1 && input.rarely(3) ? input.up_to(answered.size() - 1) : 0;
        uint64_t seq = answered.empty() ? 0 : answered[which];
        if (!input.rarely(12)) std::erase(answered, seq);  // once
        seq = input.maybe(seq);
        switch (input.up_to(9)) {
            case 0: send_marks(input, m, given); break;
            case 1:
            case 2:
            case 3:
            case 4: send_answer(input, m, given, seq); break;
            case 5: {
                const uint64_t offset = input.up_to(kArea);
                const data_link::PieceAt piece{input.maybe<uint8_t>(0), input.maybe(given.area), input.maybe(offset),
                                               input.maybe(input.up_to(kArea - offset))};
                const data_link::AnswerHead head{seq, 0, 0, input.maybe<uint32_t>(0)};
                Bytes body = with(piece, 0), behind = with(head, input.rarely(9) ? input.up_to(30) : 0);
                body.insert(body.end(), behind.begin(), behind.end());
                m.peer.send(data_link::kAnswerAt, body);
                break;
            }
            case 6: {
                const uint64_t position = input.take<uint64_t>();
                m.peer.send(data_link::kPong, with(position, input.rarely(6) ? input.up_to(kPong) : 0));
                break;
            }
            case 7: {
                static constexpr uint8_t kinds[] = {data_link::kWatermark, data_link::kAnswer, data_link::kAnswerAt,
                                                    data_link::kPong};
                Bytes body(input.up_to(60));
                input.fill(body.data(), body.size());
                m.peer.send(input.maybe(kinds[input.up_to(3)]), body);
                break;
            }
            case 8:
                if (input.rarely(3)) m.peer.send_noise(input);
                break;
            default: break;
        }
    }
}

Given made(Input &input, Memory &m, bool going_on, bool flood) {
    const size_t which = flood || input.rarely(2) ? 2 : input.rarely(2);
    Given given{};
    given.page = m.pages[which].data();
    given.ring = given.page + wire::kAgentPageSize;
    given.capacity = kRings[which];
    given.shim = m.shim.data();
    given.doorbell = m.doorbell, given.eventfd = m.eventfd, given.epoll = m.epoll, given.socket = m.peer.ends[0];
    given.segment = m.segment.data();
    given.size = kSegment;
    constexpr uint64_t kWords = (kSegment - sizeof(wire::SegmentHeader)) / 8;
    given.at = sizeof(wire::SegmentHeader) + 8 * input.up_to(input.rarely(4) ? kWords : 500);
    given.seq = 10 + input.up_to(1000);
    given.stream = input.take<uint32_t>();
    given.done = input.up_to(given.seq);
    for (size_t i = 0; i < kExpected; ++i)
        if (input.rarely(2) || flood) given.expected[i] = given.seq - 1 - i - kExpected * input.rarely(2);
    if (input.rarely(3)) given.awaited = given.expected[0];
    for (const uint16_t call : {wire::MemcpyD2h::id, wire::StreamSynchronize::id})
        given.answered[call / 64] |= 1ull << call % 64;
    given.read = wire::kRingAlignment * input.up_to(1 << 20);
    const uint64_t most = (which == 2 ? kUnread : given.capacity) / wire::kRingAlignment;
    const uint64_t unread = input.rarely(3) ? most - input.up_to(9) : input.up_to(most);
    given.written = given.read + wire::kRingAlignment * unread;
    given.bulks = m.bulks, given.bulk_count = std::size(m.bulks), given.smallest = kSmallest;
    given.area = input.rarely(2) ? 5 : 0, given.area_size = kArea;
    if (going_on) {
        given.first = given.spin = given.patience = flood ? 1'000'000 : 100'000 * input.up_to(9);
        given.sleep = input.rarely(2);
    }
    return given;
}

// What the worker and the program do while the run goes on.
struct Step {
    uint64_t turns;      // that they wait before
    uint64_t delivered;  // bytes of the worker's
    uint64_t committed;  // the journal's place
};

class Others {
   public:
    Others(Memory &m, const Given &given, std::vector<Step> steps, bool reads)
        : m_(m), page_(m.page(given)), steps_(std::move(steps)), reads_(reads), thread_([this] { work(); }) {}
    ~Others() {
        over_.store(true);
        thread_.join();
    }
    void hurry() { hurried_.store(true); }  // they wait no more

   private:
    void work() {
        size_t next = 0;
        for (uint64_t turns = 0; !over_.load(); ++turns) {
            m_.peer.collect();
            if (reads_)
                word<uint64_t>(m_.shim, wire::kShimReadOffset)
                    .store(word<uint64_t>(page_, wire::kAgentWrittenOffset).load(std::memory_order_acquire));
            if (next == steps_.size()) {
                m_.peer.deliver(~0ull);
            } else if (turns >= steps_[next].turns || hurried_.load()) {
                const Step &step = steps_[next++];
                turns = 0;
                m_.peer.deliver(step.delivered);
                word<uint64_t>(m_.segment, offsetof(wire::SegmentHeader, committed)).store(step.committed);
                const uint64_t one = 1;
                if (word<uint32_t>(page_, wire::kAgentSleepingOffset).load())
                    CHECK(::write(m_.eventfd, &one, sizeof one) == sizeof one);
            }
            ::sched_yield();
        }
    }

    Memory &m_;
    Bytes &page_;
    const std::vector<Step> steps_;
    const bool reads_;
    std::atomic<bool> over_{false}, hurried_{false};
    std::thread thread_;
};

// What the Python side's books say, part by part, with all that a part must be: the records that were sent are the
// program's, the messages in the ring are the worker's.
class Books {
   public:
    Books(Memory &m, const Given &given) : m_(m), begun_(given), at_(given.at), seq_(given.seq), stream_(given.stream),
                                           done_(given.done), written_(given.written), awaited_(given.awaited),
                                           expected_(given.expected, given.expected + kExpected) {
        std::erase(expected_, 0);
    }

    // A part, of which the last is the one that the run ended with.
    void keep(const Given &part, bool last) {
        CHECK(part.count <= kPut && part.placed_count <= kPlaced && part.at <= part.size && part.pong_size <= kPong);
        CHECK(begun_.read <= part.read && part.read <= part.written && part.written - part.read <= part.capacity);
        keep_shipped(part);
        keep_put(part);
        std::vector<uint64_t> expected(part.expected, part.expected + kExpected);
        std::erase(expected, 0);
        for (const uint64_t seq : over_) CHECK(!std::count(expected_.begin(), expected_.end(), seq));
        over_.clear();
        std::sort(expected.begin(), expected.end());
        std::sort(expected_.begin(), expected_.end());
        CHECK(part.done == done_ && part.written == written_);
        CHECK(part.awaited == awaited_);
        CHECK(expected == expected_);
        const uint64_t told = word<uint64_t>(m_.page(part), wire::kAgentWrittenOffset).load();
        CHECK(last ? told == part.written : told - part.written <= part.capacity);
        CHECK(!(part.why & (kOthers | kCallsLeft)) || last);
    }

    // No calls are sent before the books of this part are kept: its last answer's place may be used again behind them.
    void hold(const Given &part) { held_.push_back({m_.peer.collect(), part.stream}); }

    // What was sent are these records, with their payloads behind each or named, and nothing else.
    void check_sent(const Given &last) {
        uint64_t stream = begun_.stream;
        size_t at = 0, place = 0;
        m_.peer.open(last.channel, [&](uint8_t kind, const uint8_t *body, size_t size, size_t end) {
            if (kind == data_link::kIssued) {
                data_link::Issued issued;
                CHECK(size == sizeof issued);
                std::memcpy(&issued, body, sizeof issued);
                CHECK(issued.since <= issued.sent && issued.published >= begun_.seq && issued.published < last.seq);
                return;
            }
            CHECK(kind == data_link::kCalls || kind == data_link::kCallsAt);
            data_link::Place found{};
            const size_t head = kind == data_link::kCalls ? sizeof found.stream : sizeof found, records = size - head;
            CHECK(size > head && records <= kRecords + kChunk);
            std::memcpy(&found, body, head);
            for (const Held &one : held_) CHECK(end > one.bytes || found.stream < one.stream);
            CHECK(found.stream == stream && records <= wire_.size() - at);
            CHECK(!std::memcmp(body + head, wire_.data() + at, records));
            at += records;
            stream += records + found.length;
            if (kind == data_link::kCalls) {
                CHECK(place == places_.size() || at <= places_[place].at);
                return;
            }
            CHECK(place < places_.size() && at == places_[place].at);
            const data_link::Place &right = places_[place++].place;
            CHECK(found.memory == right.memory && !found.zero);
            CHECK(found.offset == right.offset && found.length == right.length);
        });
        CHECK(stream == last.stream && at == wire_.size() && place == places_.size());
    }

    uint64_t put() const { return put_; }  // messages, so far

   private:
    struct Named {
        size_t at;  // in wire_
        data_link::Place place;
    };
    struct Held {
        size_t bytes;
        uint64_t stream;
    };

    void keep_shipped(const Given &part) {
        const uint64_t began = stream_;
        uint32_t placed = 0;
        CHECK(part.at >= at_);
        for (; at_ < part.at; ++seq_) {
            wire::RecordHeader header;
            CHECK(part.at - at_ >= sizeof header);
            std::memcpy(&header, m_.segment.data() + at_, sizeof header);
            const bool external = header.flags & wire::kFlagExternal;
            CHECK(header.magic == wire::kRecordMagic && header.seq == seq_ && header.args_len <= part.at - at_);
            CHECK(!(header.flags & ~(wire::kFlagExternal | wire::kFlagAwaited)));
            CHECK(external || header.payload_len <= part.at - at_);
            const uint64_t head = sizeof header + wire::padded(header.args_len);
            const uint64_t whole = head + (external ? sizeof(wire::ExternalPayload) : wire::padded(header.payload_len));
            CHECK(whole <= part.at - at_);
            header.flags &= static_cast<uint16_t>(~wire::kFlagExternal);
            append(&header, sizeof header);
            append(m_.segment.data() + at_ + sizeof header, (external ? head : whole) - sizeof header);
            at_ += whole;
            if (external) placed += keep_payload(part, header, placed);
            if (is_answered(part, header)) expected_.push_back(seq_);
            if (header.flags & wire::kFlagAwaited) {
                if (awaited_) over_.push_back(awaited_);  // it was answered before
                awaited_ = seq_;
            }
        }
        CHECK(at_ == part.at && seq_ == part.seq && stream_ == part.stream && stream_ - began == part.shipped);
        CHECK(placed == part.placed_count && !(part.why & kShipped) == (stream_ == began));
    }

    // The payload of the record that ends here. Returns whether it is named.
    bool keep_payload(const Given &part, const wire::RecordHeader &header, uint32_t placed) {
        wire::ExternalPayload where;
        std::memcpy(&where, m_.segment.data() + at_ - sizeof where, sizeof where);
        const auto is_it = [&](const Bulk &one) { return one.index == where.segment; };
        const Bulk *found = std::find_if(m_.bulks, std::end(m_.bulks), is_it);
        const uint64_t length = header.payload_len;
        CHECK(found != std::end(m_.bulks) && header.call == wire::MemcpyH2d::id && length && !where.zero);
        CHECK(where.offset >= sizeof(wire::SegmentHeader) && where.offset <= found->size);
        CHECK(length <= found->size - where.offset);
        if (!found->number || length < kSmallest) {
            static constexpr uint8_t zeros[8] = {};
            CHECK(length <= kInline);
            append(found->data + where.offset, length);
            append(zeros, wire::padded(length) - length);
            return false;
        }
        CHECK(length % 8 == 0 && placed < part.placed_count);
        const Placed &one = part.placed[placed];
        CHECK(one.seq == header.seq && one.length == length && one.index == found->index);
        places_.push_back({wire_.size(), {0, found->number, 0, where.offset, length}});
        stream_ += length;
        return true;
    }

    void append(const void *data, size_t size) {
        const auto *from = static_cast<const uint8_t *>(data);
        wire_.insert(wire_.end(), from, from + size);
        stream_ += size;
    }

    void keep_put(const Given &part) {
        bool pong = false;
        const auto take_pong = [&] {
            const Bytes &body = next(data_link::kPong).body;
            CHECK(!pong && part.pong_size == body.size() && !std::memcmp(part.pong, body.data(), body.size()));
            pong = true;
        };
        for (uint32_t i = 0; i < part.count; ++i) {
            if (is_next(data_link::kPong)) take_pong();
            const PutMessage &put = part.put[i];
            const Bytes &body = next(put.kind).body;
            const uint32_t first = !answering_;
            if (put.kind == data_link::kWatermark) keep_mark(body);
            else if (put.kind == data_link::kAnswer) keep_answer(body);
            else keep_placed(part, body);
            check_ring(part, put, body, first);
            const bool placed = put.kind == data_link::kAnswerAt;
            CHECK(!placed || i + 1 == part.count);
            if (i + 1 == part.count) CHECK(!(part.why & kInArea) == !placed);
        }
        if (part.pong_size && !pong) take_pong();
        CHECK(pong == (part.pong_size != 0) && !(part.why & kPassed) == !(part.count || pong));
        put_ += part.count;
    }

    bool is_next(uint32_t kind) const {
        const auto &messages = m_.peer.messages;
        return message_ < messages.size() && messages[message_].kind == kind;
    }
    const Sent &next(uint32_t kind) {
        CHECK(is_next(kind));
        return m_.peer.messages[message_++];
    }

    void keep_mark(const Bytes &body) {
        data_link::WatermarkHead head;
        CHECK(body.size() >= sizeof head && !answering_);
        std::memcpy(&head, body.data(), sizeof head);
        CHECK(!head.error && head.done >= done_);
        CHECK(body.size() == sizeof head + head.count * sizeof(data_link::StreamMark));
        done_ = head.done;
    }

    void keep_answer(const Bytes &body) {
        CHECK(body.size() && body[0] <= 1);
        if (!answering_) begin_answer(body, 1);
        if (!body[0]) end_answer();
    }

    void keep_placed(const Given &part, const Bytes &body) {
        data_link::PieceAt piece;
        CHECK(!answering_ && body.size() == sizeof piece + sizeof(data_link::AnswerHead));
        std::memcpy(&piece, body.data(), sizeof piece);
        CHECK(part.area && piece.area == part.area && !piece.more);
        CHECK(piece.offset <= kArea && piece.length <= kArea - piece.offset);
        begin_answer(body, sizeof piece);
        end_answer();
    }

    void begin_answer(const Bytes &body, size_t at) {
        data_link::AnswerHead head;
        CHECK(body.size() - at >= sizeof head);
        std::memcpy(&head, body.data() + at, sizeof head);
        CHECK(head.reply <= body.size() - at - sizeof head);
        CHECK(std::count(expected_.begin(), expected_.end(), head.seq) == 1);
        answering_ = head.seq;
    }

    void end_answer() {
        std::erase(expected_, answering_);
        if (awaited_ == answering_) awaited_ = 0;
        answering_ = 0;
    }

    // The message is where the shim reads next.
    void check_ring(const Given &part, const PutMessage &put, const Bytes &body, uint32_t first) {
        const uint64_t size = sizeof(wire::RingHeader) + body.size();
        const uint64_t block = (size + wire::kRingAlignment - 1) / wire::kRingAlignment * wire::kRingAlignment;
        const uint64_t skipped = part.capacity - written_ % part.capacity;
        if (block > skipped) {
            check_header(part, static_cast<uint32_t>(skipped - sizeof(wire::RingHeader)), wire::kRingSkip, 0);
            written_ += skipped;
        }
        const uint32_t kind = put.kind == data_link::kWatermark ? wire::kWatermark
                            : put.kind == data_link::kAnswer    ? wire::kAnswer : wire::kAnswerAt;
        check_header(part, static_cast<uint32_t>(body.size()), kind, first);
        const uint64_t at = written_ % part.capacity + sizeof(wire::RingHeader);
        CHECK(put.at == at && put.size == body.size() && at + body.size() <= part.capacity);
        CHECK(!std::memcmp(part.ring + at, body.data(), body.size()));
        written_ += block;
    }

    void check_header(const Given &part, uint32_t length, uint32_t kind, uint32_t first) const {
        wire::RingHeader header;
        std::memcpy(&header, part.ring + written_ % part.capacity, sizeof header);
        CHECK(header.length == length && header.type == kind && header.first == first && !header.zero);
    }

    Memory &m_;
    const Given begun_;
    uint64_t at_, seq_, stream_, done_, written_, awaited_, put_ = 0;
    std::vector<uint64_t> expected_, over_{};
    uint64_t answering_ = 0;  // the call of which some pieces were put; 0: none
    size_t message_ = 0;      // the worker's next
    Bytes wire_;              // records, with the payloads that are not named
    std::vector<Named> places_;
    std::vector<Held> held_;
};

// The run in its own thread. Returns the part that it ended with.
Given run_in_parts(Input &input, Memory &m, Given &first, Books &books, Others *others, bool flood) {
    static const auto second = std::make_unique<Given>();
    *second = {};
    Given *both[] = {&first, second.get()};
    CHECK(m.parts.start(both[0], both[1]));
    const std::chrono::microseconds slow(flood ? 10'000 : input.rarely(2) ? input.up_to(200) : 0);
    const uint64_t stopped = input.rarely(4) ? input.up_to(3) : ~0ull;
    int number;
    for (uint64_t kept = 0; !((number = m.parts.take()) & Parts::kLast); ++kept) {
        const Given &part = *both[number];
        const auto *bytes = reinterpret_cast<const uint8_t *>(&part);
        const Bytes before(bytes, bytes + sizeof part);
        if (kept >= stopped) m.parts.stop();
        const bool held = others && part.why & kInArea;
        if (held) others->hurry();
        if (held || slow.count()) std::this_thread::sleep_for(slow + std::chrono::microseconds(1000 * held));
        if (part.why & kInArea) books.hold(part);
        books.keep(part, false);
        CHECK(!std::memcmp(before.data(), bytes, before.size()));  // it is this side's until it is given back
        m.parts.give_back();
    }
    return *both[number & 1];
}

// The ring's bytes that the shim has not read, in pieces.
template <class Use>
void unread(const Given &given, uint64_t read, Use use) {
    for (uint64_t at = read; at < given.written;) {
        const uint64_t size = std::min(given.written - at, given.capacity - at % given.capacity);
        use(given.ring + at % given.capacity, size);
        at += size;
    }
}

bool rang(int eventfd) {
    uint64_t times;
    return ::read(eventfd, &times, sizeof times) == sizeof times;
}
}  // namespace

void one(Input &input) {
    static Memory m;
    m.peer.renew();
    rang(m.eventfd), rang(m.doorbell);
    fill(m.segment.data(), m.segment.size());
    const bool flood = input.rarely(40), going_on = flood || input.rarely(4), in_parts = flood || input.rarely(4);
    Given given = made(input, m, going_on, flood);
    Bytes &page = m.page(given);
    std::memset(page.data(), 0, wire::kAgentPageSize);
    std::memset(m.shim.data(), 0, m.shim.size());
    input.fill(m.shim.data() + wire::kShimAttendingOffset, 4);
    const uint64_t blocks = input.up_to((given.written - given.read) / wire::kRingAlignment);
    const uint64_t read = input.rarely(4) ? input.take<uint64_t>() : given.written - wire::kRingAlignment * blocks;
    word<uint64_t>(m.shim, wire::kShimReadOffset).store(read);
    word<uint64_t>(page, wire::kAgentWrittenOffset).store(given.written);
    unread(given, given.read, [](uint8_t *at, size_t size) { std::memset(at, kOld, size); });
    const Written written = write_records(input, m, given);
    const uint64_t end = written.ends.empty() ? given.at : written.ends.back();
    const uint64_t committed = input.rarely(6) ? kSegment + 8 * input.up_to(200) : input.maybe(end);
    wire::SegmentHeader header{};
    header.committed = committed;
    header.next = input.rarely(8);
    const uint64_t stamps = input.up_to(70);
    std::memcpy(m.shim.data() + wire::kShimStampedOffset, &stamps, sizeof stamps);
    if (input.rarely(4)) input.fill(m.shim.data() + wire::kShimStampsOffset, 64);
    send_messages(input, m, given, written, flood);
    m.peer.hand_over(given.channel, input.rarely(3) ? input.up_to(m.peer.stream.size()) : 0);
    std::vector<Step> steps;
    if (going_on) {
        header.committed = given.at;
        for (auto count = input.up_to(6); count--;) {
            const auto &ends = written.ends;
            const uint64_t place = ends.empty() ? end : ends[input.up_to(ends.size() - 1)];
            steps.push_back({input.up_to(60), input.up_to(200'000), place});
        }
        std::sort(steps.begin(), steps.end(), [](const Step &a, const Step &b) { return a.committed < b.committed; });
        steps.push_back({input.up_to(60), ~0ull, committed});
    } else {
        m.peer.deliver(~0ull);
    }
    std::memcpy(m.segment.data(), &header, sizeof header);
    const bool reads = going_on && given.capacity == kRings[2] && (flood || input.rarely(2));
    Books books(m, given);
    const Given before = given;
    {
        std::optional<Others> others;
        if (going_on) others.emplace(m, given, steps, reads);
        if (in_parts) given = run_in_parts(input, m, given, books, others ? &*others : nullptr, flood);
        else m.exchange.run(given);
    }
    books.keep(given, true);
    books.check_sent(given);
    m.peer.check_left(given.channel);
    CHECK(!word<uint32_t>(page, wire::kAgentSleepingOffset).load());
    CHECK(rang(m.doorbell) == (books.put() && !word<uint32_t>(m.shim, wire::kShimAttendingOffset).load()));
    const bool possible = before.read <= read && read <= before.written;
    if (!reads)
        unread(before, possible ? read : before.read, [](const uint8_t *at, size_t size) {
            CHECK(!size || (*at == kOld && !std::memcmp(at, at + 1, size - 1)));
        });
}
}  // namespace fuzzing
