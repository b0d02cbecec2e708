// The agent's compiled round trips (rgpu/client/exchange) between a program that may write anything to its journal and
// its page, and a worker that may send anything over the sealed link.
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "exchange.hpp"
#include "fuzzing.hpp"
#include "shim_link.hpp"

namespace fuzzing {
namespace {
using namespace rgpu;

constexpr uint64_t kRing = 8192, kSegment = 40'000, kArea = 1 << 20;
constexpr uint64_t kBulk[] = {100'000, 1 << 20};

// Each in an allocation of its own, so that what is beside it is not touched.
struct Memory {
    Bytes page, shim, segment;
    Peer peer;
    int doorbell = ::eventfd(0, EFD_NONBLOCK), eventfd = ::eventfd(0, EFD_NONBLOCK), epoll = ::epoll_create1(0);
    Exchange exchange;
    Named named[2] = {{kBulk[0], 3, 11}, {kBulk[1], 4, 12}};

    Memory() : page(wire::kAgentPageSize + kRing), shim(wire::kShimPageSize), segment(kSegment) {
        for (const int end : {peer.ends[0], eventfd}) {
            epoll_event event{};
            event.events = EPOLLIN;
            event.data.fd = end;
            CHECK(!::epoll_ctl(epoll, EPOLL_CTL_ADD, end, &event));
        }
        peer.start(exchange.channel);
    }
};

// What the program wrote: records from `at` on, mostly as they should be. Returns the end.
uint64_t write_records(Input &input, Memory &m, uint64_t at, uint64_t seq) {
    for (auto count = input.up_to(6); count--;) {
        wire::RecordHeader header{};
        const uint64_t args = input.up_to(48), payload = input.rarely(3) ? 0 : input.up_to(input.rarely(5) ? 9000 : 400);
        const bool external = input.rarely(4);
        header.magic = input.maybe(wire::kRecordMagic);
        static constexpr uint16_t calls[] = {wire::MemcpyH2d::id, wire::MemcpyD2h::id, wire::StreamSynchronize::id};
        header.call = input.maybe(calls[input.up_to(2)]);
        header.flags = input.maybe<uint16_t>(external ? wire::kFlagExternal : input.rarely(2) ? wire::kFlagAwaited : 0);
        header.seq = input.maybe(seq++);
        header.args_len = input.maybe(static_cast<uint32_t>(args));
        header.payload_len = input.maybe<uint64_t>(external ? wire::padded(payload) + 4096 : payload);
        const uint64_t tail = external ? sizeof(wire::ExternalPayload) : wire::padded(payload);
        const uint64_t whole = sizeof header + wire::padded(args) + tail;
        if (whole > kSegment - at) break;
        std::memcpy(m.segment.data() + at, &header, sizeof header);
        if (external) {
            const wire::ExternalPayload where{input.maybe<uint32_t>(3 + input.rarely(2)), input.maybe<uint32_t>(0),
                                              input.maybe<uint64_t>(64 * input.up_to(1700))};
            std::memcpy(m.segment.data() + at + whole - sizeof where, &where, sizeof where);
        }
        at += whole;
    }
    return at;
}

// What the worker sent.
void send_messages(Input &input, Memory &m, const Given &given) {
    for (auto count = input.up_to(5); count--;) {
        const uint64_t seq = input.maybe(given.expected[input.up_to(kExpected - 1)]);
        switch (input.up_to(5)) {
            case 0: {
                const auto streams = static_cast<uint32_t>(input.up_to(20));
                const data_link::WatermarkHead head{input.maybe(given.done + input.up_to(9)), input.rarely(9) ? 700u : 0u,
                                                    input.maybe(streams)};
                m.peer.send(data_link::kWatermark, with(head, streams * sizeof(data_link::StreamMark)));
                break;
            }
            case 1: {
                const uint64_t payload = input.rarely(4) ? input.up_to(16'000) : input.up_to(200);
                const data_link::AnswerHead head{seq, 0, 0, input.maybe(static_cast<uint32_t>(input.up_to(payload)))};
                Bytes body = with(head, payload);
                body.insert(body.begin(), input.maybe<uint8_t>(0));
                m.peer.send(data_link::kAnswer, body);
                break;
            }
            case 2: {
                const uint64_t offset = input.up_to(kArea);
                const data_link::PieceAt piece{input.maybe<uint8_t>(0), input.maybe(given.area), input.maybe(offset),
                                               input.maybe(input.up_to(kArea - offset))};
                const data_link::AnswerHead head{seq, 0, 0, input.maybe<uint32_t>(0)};
                Bytes body = with(piece, 0), behind = with(head, input.rarely(9) ? input.up_to(30) : 0);
                body.insert(body.end(), behind.begin(), behind.end());
                m.peer.send(data_link::kAnswerAt, body);
                break;
            }
            case 3: {
                static constexpr uint8_t kinds[] = {data_link::kWatermark, data_link::kAnswer, data_link::kAnswerAt};
                Bytes body(input.up_to(60));
                input.fill(body.data(), body.size());
                m.peer.send(input.maybe(kinds[input.up_to(2)]), body);
                break;
            }
            case 4: m.peer.send_noise(input); break;
            default: break;
        }
    }
}

Given made(Input &input, Memory &m) {
    Given given{};
    given.ring = m.page.data() + wire::kAgentPageSize;
    given.capacity = kRing;
    given.page = m.page.data();
    given.shim = m.shim.data();
    given.doorbell = m.doorbell, given.eventfd = m.eventfd, given.epoll = m.epoll, given.socket = m.peer.ends[0];
    given.segment = m.segment.data();
    given.size = kSegment;
    given.at = sizeof(wire::SegmentHeader) + 8 * input.up_to((kSegment - sizeof(wire::SegmentHeader)) / 8);
    given.seq = 1 + input.up_to(1000);
    given.stream = input.take<uint32_t>();
    given.done = input.up_to(given.seq);
    for (uint64_t &one : given.expected) one = input.rarely(2) ? given.seq - 1 + input.up_to(6) : 0;
    if (input.rarely(3)) given.awaited = given.expected[0];
    for (const uint16_t call : {wire::MemcpyD2h::id, wire::StreamSynchronize::id}) given.answered[call / 64] |= 1ull << call % 64;
    given.read = wire::kRingAlignment * input.up_to(1 << 20);
    given.written = given.read + wire::kRingAlignment * input.up_to(kRing / wire::kRingAlignment);
    given.named = m.named, given.named_count = 2, given.smallest = 4096;
    given.area = input.rarely(2) ? 5 : 0, given.area_size = kArea;
    return given;
}

// Whole records, one after the other, and nothing else; those whose payload is named end with their arguments.
void check_records(const Bytes &sent, const std::vector<size_t> &named, uint64_t seq, uint64_t end) {
    size_t at = 0;
    for (; seq < end; ++seq) {
        wire::RecordHeader header;
        CHECK(sent.size() - at >= sizeof header);
        std::memcpy(&header, sent.data() + at, sizeof header);
        CHECK(header.magic == wire::kRecordMagic && header.seq == seq && !(header.flags & wire::kFlagExternal));
        at += sizeof header + wire::padded(header.args_len);
        if (std::find(named.begin(), named.end(), at) == named.end()) at += wire::padded(header.payload_len);
        CHECK(at <= sent.size());
    }
    CHECK(at == sent.size());
}

void check_sent(Memory &m, const Given &before, const Given &after) {
    uint64_t stream = before.stream;
    Bytes sent;
    std::vector<size_t> named;  // offsets behind the records whose payloads are named
    m.peer.open(after.channel.unsent, after.channel.unsent_size, [&](uint8_t kind, const uint8_t *body, size_t size) {
        if (kind == data_link::kIssued) {
            CHECK(size == sizeof(data_link::Issued));
            return;
        }
        uint64_t offset;
        size_t head = sizeof offset;
        CHECK(size > head);
        std::memcpy(&offset, body, sizeof offset);
        CHECK(offset == stream);
        if (kind == data_link::kCallsAt) {
            data_link::Place place;
            CHECK(size >= sizeof place);
            std::memcpy(&place, body, sizeof place);
            const Named &whole = place.memory == m.named[0].number ? m.named[0] : m.named[1];
            CHECK(place.memory == whole.number && place.offset <= whole.size && place.length <= whole.size - place.offset);
            CHECK(named.size() < after.placed_count && after.placed[named.size()].length == place.length);
            head = sizeof place;
            stream += place.length;
            named.push_back(sent.size() + size - head);
        } else {
            CHECK(kind == data_link::kCalls);
        }
        sent.insert(sent.end(), body + head, body + size);
        stream += size - head;
    });
    CHECK(stream == after.stream && named.size() == after.placed_count && m.peer.opened == after.channel.sealed);
    CHECK(after.shipped == after.stream - before.stream);
    CHECK(after.at - before.at == sent.size() + named.size() * sizeof(wire::ExternalPayload));
    check_records(sent, named, before.seq, after.seq);
}

void check(Memory &m, const Given &before, const Given &after) {
    CHECK(after.count <= kPut && after.placed_count <= kPlaced && after.at <= after.size && after.done >= before.done);
    CHECK(after.written >= before.written && after.written - after.read <= after.capacity);
    uint64_t told = 0;
    std::memcpy(&told, m.page.data() + wire::kAgentWrittenOffset, sizeof told);
    CHECK(told == after.written || after.written == before.written);
    for (uint32_t i = 0; i < after.count; ++i) {
        const PutMessage &put = after.put[i];
        CHECK(put.at <= after.capacity && put.size <= after.capacity - put.at);
        if (put.kind != data_link::kAnswerAt) continue;
        data_link::PieceAt piece;
        std::memcpy(&piece, after.ring + put.at, sizeof piece);
        CHECK(piece.area == after.area && piece.offset <= kArea && piece.length <= kArea - piece.offset && !piece.more);
    }
}
}  // namespace

void one(Input &input) {
    static Memory m;
    m.peer.renew();
    std::memset(m.segment.data(), 0, m.segment.size());
    std::memset(m.page.data(), 0, wire::kAgentPageSize);
    input.fill(m.shim.data() + wire::kShimAttendingOffset, 4);
    Given given = made(input, m);
    const uint64_t end = input.rarely(6) ? given.at : write_records(input, m, given.at, given.seq);
    wire::SegmentHeader header{};
    header.committed = input.rarely(6) ? kSegment + 8 * input.up_to(200) : input.maybe(end);
    header.next = input.rarely(8);
    std::memcpy(m.segment.data(), &header, sizeof header);
    const uint64_t stamps = input.up_to(70);
    std::memcpy(m.shim.data() + wire::kShimStampedOffset, &stamps, sizeof stamps);
    if (input.rarely(4)) input.fill(m.shim.data() + wire::kShimStampsOffset, 64);
    send_messages(input, m, given);
    const Given before = given;
    m.exchange.run(given);
    check(m, before, given);
    check_sent(m, before, given);
}
}  // namespace fuzzing
