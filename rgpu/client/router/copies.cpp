// A copy between members is a send and a receive of a communicator of two ranks, one in each session: it passes from
// worker to worker, and is kept, moved and recovered as collectives are (docs/developers/objects/collectives.md).
#include "copies.hpp"

#include <sys/random.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "slots.hpp"

namespace rgpu::router {
namespace {

constexpr std::uint8_t kSend = 8, kReceive = 9, kBytes = 1;  // kinds of operations; ncclUint8
constexpr std::uint64_t kLongest = 64ull << 20;              // bytes of one operation
constexpr std::size_t kMany = 1024;                          // operations of one record

// The communicator of two contexts. The lock keeps sends and receives in the same order.
struct Pair {
  std::mutex lock;
  unsigned long long lives[2] = {};       // ids of the contexts' lives that it was made in; 0: it was not made
  std::uint64_t numbers[2] = {};  // in the session of the receiving and of the sending side
};

Pair& pair_of(const Side& to, const Side& from) {
  static std::mutex lock;
  static auto* pairs = new std::map<std::tuple<Member*, CUcontext, Member*, CUcontext>, std::unique_ptr<Pair>>;
  std::lock_guard guard(lock);
  auto& pair = (*pairs)[{to.member, to.context, from.member, from.context}];
  if (!pair) pair = std::make_unique<Pair>();
  return *pair;
}

// Rank 0 receives, rank 1 sends. The pair's lock is held.
CUresult make(Pair& pair, const Side& to, const Side& from) {
  unsigned long long lives[2] = {};
  if (CUresult r = CALL(*to.member, cuCtxGetId)(to.context, &lives[0]); r) return r;
  if (CUresult r = CALL(*from.member, cuCtxGetId)(from.context, &lives[1]); r) return r;
  if (std::ranges::equal(lives, pair.lives)) return CUDA_SUCCESS;
  unsigned char unique[128] = {'R', 'G', 'P', 'U', 'N', 'C', 'C', 'L'};
  if (::getrandom(unique + 8, 40, 0) != 40) return CUDA_ERROR_OPERATING_SYSTEM;
  std::string sessions;
  for (const Side* side : {&to, &from}) {
    const std::string name = side->member->table->session();
    const auto length = static_cast<std::uint16_t>(name.size());
    sessions.append(reinterpret_cast<const char*>(&length), sizeof length).append(name);
  }
  unsigned rank = 0;
  for (const Side* side : {&to, &from}) {
    const Borrowed at(*side->member, side->context);
    if (CUresult r = collectives(at.member()).create(2, rank, unique, sizeof unique, sessions.data(),
                                                     static_cast<unsigned>(sessions.size()), &pair.numbers[rank]); r)
      return r;
    ++rank;
  }
  std::ranges::copy(lives, pair.lives);
  return CUDA_SUCCESS;
}

// Streams of ours: a copy that waits delays no other. One is used again when it is idle.
std::vector<CUstream>& lanes_of(const Side& side) {
  static auto* lanes = new std::map<std::pair<Member*, CUcontext>, std::vector<CUstream>>;
  return (*lanes)[{side.member, side.context}];
}
std::mutex& lanes_lock() {
  static auto* lock = new std::mutex;
  return *lock;
}

CUresult take_lane(const Side& side, Line& line) {
  line = {side.member, side.context, nullptr, false};
  const Borrowed at(*side.member, side.context);
  {
    std::lock_guard guard(lanes_lock());
    auto& lanes = lanes_of(side);
    for (auto it = lanes.begin(); it != lanes.end();) {
      const CUresult r = AT(at, cuStreamQuery)(*it);
      if (r == CUDA_ERROR_NOT_READY) {
        ++it;
        continue;
      }
      line.stream = *it;
      it = lanes.erase(it);  // also one that ended with its context
      if (!r) return CUDA_SUCCESS;
    }
  }
  return AT(at, cuStreamCreate)(&line.stream, CU_STREAM_NON_BLOCKING);
}

void give_lane(const Line& line) {
  std::lock_guard guard(lanes_lock());
  lanes_of({line.member, line.context}).push_back(line.stream);
}

CUcontext context_at(Member& member, std::uint64_t address) {
  CUcontext context = nullptr;
  const Borrowed at(Where{&member, true});
  AT(at, cuPointerGetAttribute)(&context, CU_POINTER_ATTRIBUTE_CONTEXT, address);
  return context ? context : member.last.load();
}

// A copy of which the program has not learned yet that it was received.
struct Underway {
  const Member* from;
  std::uint64_t received, sent;  // the receiving and the sending call
};
// Of each receiving member, by the receiving stream: in a stream they are received in order, so that only its first ones
// are looked at, however many there are.
std::mutex underway_lock;  // also held while a journal is told: no other thread goes on before that
auto& underway = *new std::map<const Member*, std::map<std::uint64_t, std::deque<Underway>>>;
std::atomic<std::size_t> underway_count{0};

// The two ends of a copy while it is given to the members.
class Ends {
 public:
  Ends(const Side& to, const Side& from, const Piece& piece) : to_(to), from_(from) {
    if (!to_.context) to_.context = context_at(*to_.member, piece.to);
    if (!from_.context) from_.context = context_at(*from_.member, piece.from);
  }
  ~Ends() {
    for (const Line* line : {&receiving, &sending})
      if (line->stream && line->stream != lent_) give_lane(*line);
  }
  Ends(const Ends&) = delete;

  // Takes a lane for each side, or the stream itself where it is of that side's context.
  CUresult begin(const Line* stream) {
    for (auto [side, line] : {std::pair(&to_, &receiving), std::pair(&from_, &sending)}) {
      if (stream && stream->member == side->member && stream->context == side->context &&
          reinterpret_cast<std::uintptr_t>(stream->stream) > 2) {
        *line = *stream;
        lent_ = stream->stream;
      } else if (CUresult r = take_lane(*side, *line); r) {
        return r;
      }
    }
    return CUDA_SUCCESS;
  }

  bool is(const Line& line, const Line& stream) const { return line.stream == stream.stream && line.stream == lent_; }

  CUresult transfer(const std::vector<Piece>& pieces) {
    std::vector<Piece> parts;
    for (const Piece& piece : pieces)
      for (std::uint64_t done = 0; done < piece.size; done += kLongest)
        parts.push_back({piece.to + done, piece.from + done, std::min(kLongest, piece.size - done)});
    Pair& pair = pair_of(to_, from_);
    std::lock_guard guard(pair.lock);
    if (CUresult r = make(pair, to_, from_); r) return r;
    Underway copy{from_.member, 0, 0};
    std::uint64_t receiver = 0;
    for (std::size_t at = 0; at < parts.size(); at += kMany) {
      const std::size_t count = std::min(kMany, parts.size() - at);
      std::uint64_t stream = 0;
      if (CUresult r = give(sending, from_, pair.numbers[1], kSend, &parts[at], count); r) return r;
      from_.member->table->last_group(&stream, &copy.sent);
      if (CUresult r = give(receiving, to_, pair.numbers[0], kReceive, &parts[at], count); r) return r;
      to_.member->table->last_group(&receiver, &copy.received);
    }
    std::lock_guard noted(underway_lock);
    auto& copies = underway[to_.member][receiver];  // another thread may have noted a later one before
    copies.insert(std::ranges::upper_bound(copies, copy.received, {}, &Underway::received), copy);
    underway_count.fetch_add(1, std::memory_order_release);
    return CUDA_SUCCESS;
  }

  Line receiving, sending;
  const Side& to() const { return to_; }
  const Side& from() const { return from_; }

 private:
  CUresult give(const Line& line, const Side& side, std::uint64_t communicator, std::uint8_t kind, const Piece* parts,
                std::size_t count) {
    std::vector<CollectiveOperation> operations(count);
    std::vector<CUcontext> contexts(count, side.context);
    std::vector<CollectiveRange> ranges(count);
    for (std::size_t i = 0; i < count; ++i) {
      CollectiveOperation& one = operations[i];
      const std::uint64_t address = kind == kSend ? parts[i].from : parts[i].to;
      one.kind = kind;
      one.data_type = kBytes;
      one.peer = kind == kSend ? 0 : 1;
      one.communicator = communicator;
      one.stream = reinterpret_cast<std::uint64_t>(line.stream);
      (kind == kSend ? one.send : one.receive) = address;
      one.count = parts[i].size;
      ranges[i] = {address, parts[i].size};
    }
    const Borrowed at(*side.member, side.context);
    return collectives(at.member()).group(operations.data(), contexts.data(), count, ranges.data(), count);
  }

  Side to_, from_;
  CUstream lent_ = nullptr;
};

}  // namespace

void received(const Member& member) {
  if (!underway_count.load(std::memory_order_acquire)) return;
  std::lock_guard guard(underway_lock);
  const auto found = underway.find(&member);
  if (found == underway.end()) return;
  auto& streams = found->second;
  for (auto it = streams.begin(); it != streams.end();) {
    auto& [stream, copies] = *it;
    while (!copies.empty() && member.table->complete(stream, copies.front().received)) {
      copies.front().from->table->complete_here(copies.front().sent);
      copies.pop_front();
      underway_count.fetch_sub(1, std::memory_order_release);
    }
    it = copies.empty() ? streams.erase(it) : std::next(it);
  }
}

CUresult copy_between(const Side& to, const Side& from, const std::vector<Piece>& pieces, const Line& line) {
  if (pieces.empty()) return CUDA_SUCCESS;
  Ends ends(to, from, pieces.front());
  if (CUresult r = ends.begin(&line); r) return r;
  for (const Line* end : {&ends.receiving, &ends.sending})
    if (!ends.is(*end, line))
      if (CUresult r = follow(*end, line); r) return r;
  if (CUresult r = ends.transfer(pieces); r) return r;
  return ends.is(ends.receiving, line) ? CUDA_SUCCESS : follow(line, ends.receiving);
}

CUresult copy_elsewhere(Member& member, std::uint64_t address, const Line& line,
                        const std::function<CUresult(const Line& lane)>& copy) {
  Line lane;
  if (CUresult r = take_lane({&member, context_at(member, address)}, lane); r) return r;
  CUresult r = follow(lane, line);
  if (!r) {
    const Borrowed at(member, lane.context);
    r = copy(lane);
  }
  if (!r) r = follow(line, lane);
  give_lane(lane);
  return r;
}

CUresult copy_between_and_wait(const Side& to, const Side& from, const std::vector<Piece>& pieces, bool per_thread) {
  Line line;
  if (CUresult r = line_of(nullptr, per_thread, line); r) return r;
  if (pieces.empty()) return CUDA_SUCCESS;
  Ends ends(to, from, pieces.front());
  if (CUresult r = ends.begin(nullptr); r) return r;
  for (auto [end, side] : {std::pair(&ends.receiving, &ends.to()), std::pair(&ends.sending, &ends.from())}) {
    if (CUresult r = follow(*end, {side->member, side->context, nullptr, per_thread}); r) return r;
    if (line.context != side->context)
      if (CUresult r = follow(*end, line); r) return r;
  }
  if (CUresult r = ends.transfer(pieces); r) return r;
  const Borrowed at(*ends.receiving.member, ends.receiving.context);
  return AT(at, cuStreamSynchronize)(ends.receiving.stream);
}

}  // namespace rgpu::router
