// The journal's writer: shared memory segments, extents, records, publication
// (docs/developers/journal.md, "The journal record", "Shared memory").
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "crc32.hpp"
#include "managed.hpp"
#include "profile.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

constexpr std::uint32_t MAX_KEPT_FDS = 48;      // segments whose memory is reused
constexpr std::size_t MAX_LOGS_AHEAD = 4, MAX_BULKS_AHEAD = 16;
constexpr std::size_t COPY_BLOCK = 128 * 1024;  // bytes copied and summed at a time: they stay in the cache

// The size of a segment for one large payload. There are few different sizes, so that a released segment fits the next
// payload; larger ones are made to measure and not kept.
constexpr std::uint64_t LARGEST_KEPT = wire::kBulkSegmentSize + 4096;

std::uint64_t own_size(std::uint64_t payload) {
  const std::uint64_t needed = (sizeof(wire::SegmentHeader) + payload + 4095) & ~4095ull;
  for (const std::uint64_t size : {wire::kBulkSegmentSize / 2 + 4096, LARGEST_KEPT})
    if (needed <= size) return size;
  return needed;
}

bool worth_keeping(const Segment& segment) {
  return segment.kind == wire::kSegmentLog ? segment.size == wire::kLogSegmentSize : segment.size <= LARGEST_KEPT;
}

// A new segment with its header written, offered to the agent. nullptr without memory or agent.
Segment* new_segment(Session& s, std::uint32_t kind, std::uint64_t size, std::uint64_t first_seq) {
  auto segment = take_preallocated(s, kind, size);
  if (!segment) {
    segment = std::make_unique<Segment>();
    segment->kind = kind;
    segment->size = size;
    if (!make_memory(*segment)) {
      log_once("no segment memory", "no shared memory for a journal segment of %llu bytes: %s",
               static_cast<unsigned long long>(size), std::strerror(errno));
      return nullptr;
    }
  }
  segment->used = 0;
  segment->pending = 0;
  segment->current = true;
  const bool offered = std::exchange(segment->offered, false);
  if (!offered) segment->index = s.next_index.fetch_add(1);
  Segment* raw = segment.get();
  bool keep;
  {
    std::lock_guard guard(s.segments_lock);
    keep = worth_keeping(*raw) && s.kept_fds < MAX_KEPT_FDS;
    if (keep) ++s.kept_fds;
    s.segments.emplace(raw->index, std::move(segment));
  }
  const bool sent = offered || offer_segment(s, *raw, first_seq);
  if (!keep) {
    ::close(raw->fd);
    raw->fd = -1;
  }
  return sent ? raw : nullptr;
}

void store_release(std::uint64_t& word, std::uint64_t value) {
  std::atomic_ref<std::uint64_t>(word).store(value, std::memory_order_release);
}

// Continues in a new log segment that holds at least `size` bytes. Section held.
bool next_log(Session& s, std::uint64_t size) {
  const std::uint64_t needed = sizeof(wire::SegmentHeader) + size;
  Segment* fresh = new_segment(s, wire::kSegmentLog, std::max<std::uint64_t>(wire::kLogSegmentSize, (needed + 4095) & ~4095ull),
                               s.last_seq.load() + 1);
  if (!fresh) return false;
  Segment* old = s.log;
  s.log = fresh;
  if (old) {
    std::lock_guard guard(s.segments_lock);  // after `next` the agent may release it at any moment
    old->current = false;
    store_release(old->header()->next, std::uint64_t{fresh->index} + 1);
  }
  return true;
}

// Closes a bulk segment that gets no more extents and has none unpublished. segments_lock held.
void close_bulk(Segment& segment) {
  if (!segment.current && !segment.pending) store_release(segment.header()->next, 1);
}

// Closes the segments being written, which could not be released otherwise. No lock held.
void close_current(Session& s) {
  {
    std::lock_guard section(s.section);
    if (s.log && s.log->used) next_log(s, 0);
  }
  std::lock_guard bulk(s.bulk_lock);
  if (!s.bulk || !s.bulk->used) return;
  std::lock_guard guard(s.segments_lock);
  s.bulk->current = false;
  close_bulk(*s.bulk);
  s.bulk = nullptr;
}

thread_local constinit bool in_reserved_space = false;

}  // namespace

bool offer_segment(Session& s, Segment& segment, std::uint64_t first_seq) {
  wire::SegmentHeader header{};
  std::memcpy(header.magic, wire::kSegmentMagic, sizeof header.magic);
  header.index = segment.index;
  header.kind = segment.kind;
  header.size = segment.size;
  header.committed = sizeof(wire::SegmentHeader);
  header.first_seq = first_seq;
  std::memcpy(segment.map, &header, sizeof header);
  const wire::SegmentOffer body{segment.index, segment.kind, segment.size};
  return send_message(s, wire::kSegment, &body, sizeof body, segment.fd);
}

ReservedSpace::ReservedSpace() : before_(std::exchange(in_reserved_space, true)) {}
ReservedSpace::~ReservedSpace() { in_reserved_space = before_; }

void wait_for_space(Session& s, bool reserved) {
  if (reserved || in_reserved_space || s.gone) return;
  const auto over = [&] { return s.unreleased > s.facts.journal_limit && !s.gone; };
  std::unique_lock guard(s.segments_lock);
  while (over()) {
    guard.unlock();
    close_current(s);
    wake_agent(s);
    guard.lock();
    // The time limit: calls from reserved space may have been written to the new segments meanwhile.
    if (over()) s.released.wait_for(guard, std::chrono::seconds(1));
  }
}

void release_segment(Session& s, std::uint32_t index) {
  std::unique_ptr<Segment> segment;
  {
    std::lock_guard guard(s.segments_lock);
    auto it = s.segments.find(index);
    if (it == s.segments.end() || it->second->current || it->second->pending) {
      log_line("the agent released segment %u, which is %s", index, it == s.segments.end() ? "unknown" : "in use");
      return;
    }
    segment = std::move(it->second);
    s.segments.erase(it);
    s.unreleased -= segment->used;
    if (segment->fd >= 0) {
      std::size_t same = 0;
      for (auto& segment_ahead : s.preallocated) same += segment_ahead->kind == segment->kind;
      if (same < (segment->kind == wire::kSegmentLog ? MAX_LOGS_AHEAD : MAX_BULKS_AHEAD)) {
        --s.kept_fds;
        s.preallocated.push_back(std::move(segment));
      } else {
        --s.kept_fds;
      }
    }
    s.released.notify_all();
  }
  if (segment) drop_memory(*segment);
}

CUresult bulk_extent(Session& s, std::uint64_t size, Segment*& segment, std::uint64_t& offset) {
  const std::uint64_t needed = wire::padded(size);
  const std::uint64_t space = wire::kBulkSegmentSize - sizeof(wire::SegmentHeader);
  const auto reserve = [&](Segment& in) {  // segments_lock held
    offset = (sizeof(wire::SegmentHeader) + in.used + wire::kBulkAlignment - 1) & ~(wire::kBulkAlignment - 1);
    if (offset + needed > in.size) return false;
    s.unreleased += offset + needed - sizeof(wire::SegmentHeader) - in.used;
    in.used = offset + needed - sizeof(wire::SegmentHeader);
    ++in.pending;
    segment = &in;
    return true;
  };
  if (needed > space / 4) {  // a segment of its own, made while no lock is held
    Segment* own = new_segment(s, wire::kSegmentBulk, own_size(needed), 0);
    if (!own) return s.gone ? CUDA_ERROR_SYSTEM_NOT_READY : CUDA_ERROR_OUT_OF_MEMORY;
    std::lock_guard guard(s.segments_lock);
    reserve(*own);
    own->current = false;
    return CUDA_SUCCESS;
  }
  std::lock_guard bulk(s.bulk_lock);
  if (s.bulk) {
    std::lock_guard guard(s.segments_lock);
    if (reserve(*s.bulk)) return CUDA_SUCCESS;
    s.bulk->current = false;
    close_bulk(*s.bulk);
    s.bulk = nullptr;
  }
  s.bulk = new_segment(s, wire::kSegmentBulk, wire::kBulkSegmentSize, 0);
  if (!s.bulk) return s.gone ? CUDA_ERROR_SYSTEM_NOT_READY : CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard guard(s.segments_lock);
  reserve(*s.bulk);
  return CUDA_SUCCESS;
}

void extent_published(Session& s, std::uint32_t index, std::uint64_t) {
  std::lock_guard guard(s.segments_lock);
  auto it = s.segments.find(index);
  if (it == s.segments.end()) return;
  --it->second->pending;
  close_bulk(*it->second);
}

// ---------------------------------------------------------------- payloads

bool room_in_journal(std::uint64_t size) {
  Session& s = session();
  std::lock_guard guard(s.segments_lock);
  return s.unreleased + size <= s.facts.journal_limit;
}

Payload Payload::reserve(std::size_t size, bool wait) {
  Payload made;
  made.size = size;
  if (size > wire::kMaxPayload) made.error = CUDA_ERROR_INVALID_VALUE;
  else made.extent(wait);
  return made;
}

std::uint8_t* Payload::extent(bool wait) {
  Session& s = session();
  wait_for_space(s, !wait);
  Segment* segment = nullptr;
  error = bulk_extent(s, size, segment, offset_);
  if (error) return nullptr;
  external_ = true;
  segment_ = segment->index;
  std::uint8_t* to = segment->map + offset_;
  std::memset(to + size, 0, wire::padded(size) - size);
  return place_ = to;
}

Payload::Payload(const void* data, std::size_t n) : size(n), data_(static_cast<const std::uint8_t*>(data)) {
  ready_to_read(data, n);  // while no lock is held
  if (n > wire::kMaxPayload) {
    error = CUDA_ERROR_INVALID_VALUE;
  } else if (n > wire::kInlinePayload) {
    if (std::uint8_t* to = extent()) {
      for (std::size_t at = 0; at < n; at += COPY_BLOCK) {
        const std::size_t part = std::min(COPY_BLOCK, n - at);
        std::memcpy(to + at, data_ + at, part);
        crc = crc32(crc, to + at, part);  // of the copy: the source may change while it is read
      }
    }
  }
}

Payload Payload::from(std::size_t size, const std::function<void(std::uint8_t*)>& fill) {
  Payload made;
  made.size = size;
  if (size > wire::kMaxPayload) {
    made.error = CUDA_ERROR_INVALID_VALUE;
  } else if (size > wire::kInlinePayload) {
    if (std::uint8_t* to = made.extent()) {
      fill(to);
      made.crc = crc32(0, to, size);
    }
  } else if (size) {
    made.own_.resize(size);
    fill(made.own_.data());
    made.data_ = made.own_.data();
  }
  return made;
}

Payload::Payload(Payload&& other) noexcept
    : size(other.size), crc(other.crc), error(other.error), data_(other.data_), own_(std::move(other.own_)),
      external_(std::exchange(other.external_, false)), segment_(other.segment_), offset_(other.offset_),
      place_(other.place_) {}

Payload::~Payload() {
  if (external_) extent_published(session(), segment_, 0);  // was never published
}

// ---------------------------------------------------------------- the critical section

Section::Section(bool reserved) {
  Session& s = session();
  if (s.forked || s.state != Session::State::live) {
    status_ = CUDA_ERROR_NOT_INITIALIZED;
    return;
  }
  if (s.listing && s.member < 0) {
    status_ = CUDA_ERROR_INVALID_CONTEXT;  // a process of a gang that has made none yet
    return;
  }
  wait_for_space(s, reserved);
  s.section.lock();
  locked_ = true;
  if (s.gone) status_ = CUDA_ERROR_SYSTEM_NOT_READY;
}

Section::~Section() {
  if (!locked_) return;
  Session& s = session();
  s.section.unlock();
  if (published_) wake_agent(s);
}

namespace {

// A call that a profiler times, around the call itself.
struct TimedCall {
  const CallView& inner;
  std::uint64_t stream;

  CallView view() const {
    return {wire::Timed::id, inner.reserved, 14 + inner.args_size, this, [](const void* call, std::uint8_t* to) {
              const auto& [inner, stream] = *static_cast<const TimedCall*>(call);
              const auto size = static_cast<std::uint32_t>(inner.args_size);
              std::memcpy(to, &inner.id, 2);
              std::memcpy(to + 2, &stream, 8);
              std::memcpy(to + 10, &size, 4);
              inner.write(inner.call, to + 14);
            }};
  }
};

}  // namespace

CUresult Section::publish_view(const CallView& call, Payload* payload, Waiter* waiter, std::uint64_t* seq_out) {
  if (!profile::active.load(std::memory_order_relaxed) || status_ || !profile::wants(call.id))
    return write_record(call, payload, waiter, seq_out);
  const std::uint64_t size = payload ? payload->size : 0;
  const auto timed = TimedCall{call, profile::stream_of(call)};
  std::unique_ptr<Waiter> own;
  std::unique_ptr<Answer> answer;
  if (!waiter) {  // no thread waits for it: its times arrive by themselves
    own = std::make_unique<Waiter>();
    answer = std::make_unique<Answer>();
    own->answer = answer.get();
    own->notify = [](const Answer& came) {
      if (came.result != CUDA_ERROR_SYSTEM_NOT_READY) observed(came.seq);
    };
  }
  std::uint64_t seq = session().last_seq.load(std::memory_order_relaxed) + 1;
  profile::published(seq, call, size);  // its answer may arrive at once
  if (CUresult r = write_record(timed.view(), payload, waiter ? waiter : own.get(), &seq); r) {
    profile::withdrawn(seq);
    return r;
  }
  own.release();  // finish_waiter() owns both from now on
  answer.release();
  if (seq_out) *seq_out = seq;
  return CUDA_SUCCESS;
}

CUresult Section::write_record(const CallView& call, Payload* payload, Waiter* waiter, std::uint64_t* seq_out) {
  if (status_) return status_;
  if (payload && payload->error) return payload->error;
  if (call.args_size > wire::kMaxArgs) return CUDA_ERROR_INVALID_VALUE;
  Session& s = session();
  const std::uint64_t payload_size = payload ? payload->size : 0;
  const bool external = payload && payload->external_;
  const std::uint64_t args = wire::padded(call.args_size);
  const std::uint64_t tail = external ? sizeof(wire::ExternalPayload) : wire::padded(payload_size);
  const std::uint64_t total = sizeof(wire::RecordHeader) + args + tail;
  if (sizeof(wire::SegmentHeader) + (s.log ? s.log->used : 0) + total > (s.log ? s.log->size : 0) && !next_log(s, total))
    return s.gone ? CUDA_ERROR_SYSTEM_NOT_READY : CUDA_ERROR_OUT_OF_MEMORY;

  const std::uint64_t seq = s.last_seq.load(std::memory_order_relaxed) + 1;
  if (waiter && !add_waiter(s, seq, waiter)) return CUDA_ERROR_SYSTEM_NOT_READY;
  std::uint8_t* at = s.log->map + sizeof(wire::SegmentHeader) + s.log->used;
  std::uint8_t* body = at + sizeof(wire::RecordHeader);
  call.write(call.call, body);
  std::memset(body + call.args_size, 0, args - call.args_size);
  wire::RecordHeader header{};
  header.magic = wire::kRecordMagic;
  header.call = call.id;
  header.flags = waiter && !waiter->notify ? wire::kFlagAwaited : 0;
  header.seq = seq;
  header.thread = thread_number();
  header.args_len = static_cast<std::uint32_t>(call.args_size);
  header.payload_len = payload_size;
  if (external) {
    header.payload_crc = payload->crc;
  } else if (payload_size) {  // copied first: the checksum is of the bytes that are shipped
    std::memcpy(body + args, payload->data_, payload_size);
    std::memset(body + args + payload_size, 0, tail - payload_size);
    header.payload_crc = crc32(0, body + args, payload_size);
  }
  std::uint8_t covered[wire::kCrcCovered];
  std::memcpy(covered, &header, sizeof covered);
  header.crc = crc32(crc32(0, covered, sizeof covered), body, call.args_size);
  if (external) {
    header.flags |= wire::kFlagExternal;
    const wire::ExternalPayload where{payload->segment_, 0, payload->offset_};
    std::memcpy(body + args, &where, sizeof where);
  }
  std::memcpy(at, &header, sizeof header);
  {
    std::lock_guard guard(s.segments_lock);
    s.log->used += total;
    s.unreleased += total;
  }
  stamp_call(s.ring, seq);
  s.last_seq.store(seq, std::memory_order_release);
  store_release(s.log->header()->committed, sizeof(wire::SegmentHeader) + s.log->used);
  published_ = true;
  if (external) {
    payload->external_ = false;
    extent_published(s, payload->segment_, payload_size);
  }
  if (seq_out) *seq_out = seq;
  return CUDA_SUCCESS;
}

std::uint64_t published() { return session().last_seq.load(std::memory_order_acquire); }

std::uint64_t next_number() { return session().next_number.fetch_add(1); }

}  // namespace rgpu
