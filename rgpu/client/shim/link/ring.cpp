// Reading of the answer ring, and the choice of the reading thread. The ring's contents are not trusted: an impossible
// length or position ends the session.
#include "ring.hpp"

#include <fcntl.h>
#include <immintrin.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "session.hpp"

namespace rgpu {
namespace {

constexpr int SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr std::uint64_t LARGEST_RING = 1ull << 30, LARGEST_AREA = 1ull << 34;
constexpr std::uint32_t MAX_REPLY = 1u << 30;
constexpr long DEFAULT_SPIN = 200;  // µs

enum class Found { nothing, message, broken };

template <class T>
std::atomic_ref<T> word(const std::uint8_t* page, std::size_t offset) {
  return std::atomic_ref<T>(*reinterpret_cast<T*>(const_cast<std::uint8_t*>(page) + offset));
}

std::uint64_t written(const AnswerRing& r) {
  return word<std::uint64_t>(r.page, wire::kAgentWrittenOffset).load(std::memory_order_acquire);
}

// Time for which a waiting thread polls before it sleeps: 0 where threads share few processors.
std::chrono::microseconds spin_time() {
  static const long limit = [] {
    if (const char* text = std::getenv("RGPU_SPIN_US")) return std::clamp(std::strtol(text, nullptr, 10), 0l, 100'000l);
    cpu_set_t set;
    return ::sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) < 4 ? 0l : DEFAULT_SPIN;
  }();
  return std::chrono::microseconds(limit);
}

bool begin_answer(Session& s, AnswerRing& r, const std::uint8_t*& at, std::uint64_t& size) {
  wire::AnswerHead head;
  finish_copies(r);  // of an answer that is sent again
  if (size < sizeof head) return false;
  std::memcpy(&head, at, sizeof head);
  if (head.reply > MAX_REPLY) return false;
  at += sizeof head;
  size -= sizeof head;
  r.passing = true;
  r.seq = head.seq;
  r.result = head.result;
  r.flags = head.flags;
  r.reply_left = head.reply;
  r.payload = 0;
  r.waiter = find_waiter(s, head.seq);
  if (r.waiter) r.waiter->answer->reply.clear();
  else log_line("an answer to call %llu, which nobody awaits", static_cast<unsigned long long>(head.seq));
  return true;
}

void end_answer(Session& s, AnswerRing& r) {
  r.passing = false;
  finish_copies(r);
  if (r.flags & wire::kAnswerSticky) set_sticky(static_cast<CUresult>(r.result));
  if (!r.waiter) return;
  Answer& answer = *r.waiter->answer;
  answer.result = static_cast<CUresult>(r.result);
  answer.sticky = r.flags & wire::kAnswerSticky;
  answer.seq = r.seq;
  answer.payload_size = r.payload;
  if (r.payload > r.waiter->capacity) {
    log_once("long answer", "an answer has %llu bytes where %llu were expected",
             static_cast<unsigned long long>(r.payload), static_cast<unsigned long long>(r.waiter->capacity));
    if (!answer.result) answer.result = CUDA_ERROR_UNKNOWN;
  }
  take_waiter(s, r.seq);
  finish_waiter(r.waiter);
}

// Copies bytes of the payload straight into the program's memory. `stays`: `at` is valid until the program has the
// answer.
void take_payload(AnswerRing& r, const std::uint8_t* at, std::uint64_t size, bool stays) {
  if (r.waiter && size && r.payload <= r.waiter->capacity) {
    const std::uint64_t fits = std::min<std::uint64_t>(size, r.waiter->capacity - r.payload);
    auto* to = static_cast<std::uint8_t*>(r.waiter->destination) + r.payload;
    if (stays && fits >= kPooledCopySmallest && copy_helpers()) {
      r.copies.emplace_back(to, at, fits, false);
      start_copy(r.copies.back());
    } else if (fits) {
      std::memcpy(to, at, fits);
    }
  }
  r.payload += size;
}

// Takes the next bytes of head, reply arguments and payload, and `placed` bytes of payload that are in the area.
bool take_bytes(Session& s, AnswerRing& r, bool first, bool more, const std::uint8_t* at, std::uint64_t size,
                const std::uint8_t* area, std::uint64_t placed) {
  if (first ? !begin_answer(s, r, at, size) : !r.passing) return false;
  const auto reply = static_cast<std::uint32_t>(std::min<std::uint64_t>(size, r.reply_left));
  if (r.waiter && reply) r.waiter->answer->reply.insert(r.waiter->answer->reply.end(), at, at + reply);
  r.reply_left -= reply;
  at += reply;
  size -= reply;
  if (placed && r.reply_left) return false;
  take_payload(r, at, size, false);
  if (placed) take_payload(r, area, placed, true);
  if (more) return true;
  if (r.reply_left) return false;
  end_answer(s, r);
  return true;
}

// Takes a piece: u8 more, then its bytes.
bool take_piece(Session& s, AnswerRing& r, bool first, const std::uint8_t* at, std::uint64_t size) {
  if (!size || *at > 1) return false;
  return take_bytes(s, r, first, *at, at + 1, size - 1, nullptr, 0);
}

// Takes a piece whose last bytes are in the area.
bool take_piece_at(Session& s, AnswerRing& r, bool first, const std::uint8_t* at, std::uint64_t size) {
  wire::PieceAt where;
  if (size < sizeof where) return false;
  std::memcpy(&where, at, sizeof where);
  const std::uint64_t there = r.area_size.load(std::memory_order_relaxed);
  if (where.more > 1 || !where.length || where.area != r.area_number || where.offset > there ||
      where.length > there - where.offset)
    return false;
  return take_bytes(s, r, first, where.more, at + sizeof where, size - sizeof where, r.area + where.offset, where.length);
}

// Takes the next message, if there is one. `reading` held.
Found step(Session& s, AnswerRing& r) {
  if (r.broken) return Found::broken;
  const std::uint64_t pending = written(r) - r.read;
  if (!pending) return Found::nothing;
  r.broken = true;
  if (pending > r.size || pending % wire::kRingAlignment) return Found::broken;
  const std::uint64_t at = r.read % r.size;
  wire::RingHeader head;
  std::memcpy(&head, r.data + at, sizeof head);
  const std::uint64_t used = sizeof head + head.length;
  if (used > std::min(pending, r.size - at)) return Found::broken;
  const std::uint8_t* body = r.data + at + sizeof head;
  std::uint64_t block = (used + wire::kRingAlignment - 1) & ~(wire::kRingAlignment - 1);
  switch (head.type) {
    case wire::kRingSkip:
      block = r.size - at;
      break;
    case wire::kAnswer:
      if (!take_piece(s, r, head.first != 0, body, head.length)) return Found::broken;
      break;
    case wire::kAnswerAt:
      if (!take_piece_at(s, r, head.first != 0, body, head.length)) return Found::broken;
      break;
    case wire::kWatermark:
      take_watermark(body, body + head.length);
      break;
    case wire::kText:
      if (!take_device_text(body, body + head.length)) return Found::broken;
      break;
    default:
      return Found::broken;
  }
  if (block > pending) return Found::broken;
  r.broken = false;
  r.read += block;
  word<std::uint64_t>(r.own, wire::kShimReadOffset).store(r.read, std::memory_order_release);
  return Found::message;
}

void set_attending(AnswerRing& r, std::uint32_t value) {
  word<std::uint32_t>(r.own, wire::kShimAttendingOffset).store(value, std::memory_order_seq_cst);
}

// Gives up reading, and looks at the ring once more: a message that the agent writes from here on rings the doorbell,
// since no thread attends; one written before is seen here, and left to the reader thread.
void leave(AnswerRing& r) {
  set_attending(r, 0);
  r.reading.unlock();
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (written(r) != word<std::uint64_t>(r.own, wire::kShimReadOffset).load(std::memory_order_acquire))
    ::eventfd_write(r.doorbell, 1);
}

}  // namespace

void stamp_call(AnswerRing& r, std::uint64_t seq) {
  if (!r.own) return;
  timespec time;
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  const std::uint64_t now = static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
  if (now - r.stamped < wire::kStampNs) return;
  r.stamped = now;
  const std::size_t at = wire::kShimStampsOffset + r.stamps % wire::kShimStamps * 16;
  word<std::uint64_t>(r.own, at).store(seq, std::memory_order_relaxed);
  word<std::uint64_t>(r.own, at + 8).store(now, std::memory_order_relaxed);
  word<std::uint64_t>(r.own, wire::kShimStampedOffset).store(++r.stamps, std::memory_order_release);
}

bool prepare_ring(AnswerRing& r, int& fd) {
  fd = ::memfd_create("rgpu-shim", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return false;
  r.doorbell = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  const auto size = static_cast<off_t>(wire::kShimPageSize);
  if (r.doorbell >= 0 && !::ftruncate(fd, size) && !::posix_fallocate(fd, 0, size) && !::fcntl(fd, F_ADD_SEALS, SEALS)) {
    void* own = ::mmap(nullptr, wire::kShimPageSize, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (own != MAP_FAILED) {
      ::madvise(own, wire::kShimPageSize, MADV_DONTFORK);
      r.own = static_cast<std::uint8_t*>(own);
      return true;
    }
  }
  ::close(fd);
  fd = -1;
  drop_ring(r);
  return false;
}

bool map_ring(AnswerRing& r, int fd, std::uint64_t offset, std::uint64_t size) {
  if (!size || !r.own) {
    drop_ring(r);
    return true;
  }
  struct stat status {};
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (offset != wire::kAgentPageSize || size > LARGEST_RING || size % wire::kRingAlignment || ::fstat(fd, &status) ||
      static_cast<std::uint64_t>(status.st_size) < offset + size || seals < 0 || !(seals & F_SEAL_SHRINK))
    return false;
  void* map = ::mmap(nullptr, offset + size, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (map == MAP_FAILED) return false;
  ::madvise(map, offset + size, MADV_DONTFORK);
  ::madvise(map, offset + size, MADV_DONTDUMP);
  r.page = static_cast<std::uint8_t*>(map);
  r.data = r.page + offset;
  r.size = size;
  return true;
}

void drop_ring(AnswerRing& r) {
  if (r.own) ::munmap(r.own, wire::kShimPageSize);
  if (r.page) ::munmap(const_cast<std::uint8_t*>(r.page), wire::kAgentPageSize + r.size);
  if (r.area) ::munmap(const_cast<std::uint8_t*>(r.area), r.area_size);
  r.area = nullptr;
  r.area_size = 0;
  if (r.doorbell >= 0) ::close(r.doorbell);
  r.own = nullptr;
  r.page = r.data = nullptr;
  r.size = 0;
  r.doorbell = -1;
}

bool map_area(AnswerRing& r, int fd, std::uint32_t number, std::uint64_t size) {
  struct stat status {};
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (!r.size || !number || !size || size > LARGEST_AREA || seals < 0 || (seals & SEALS) != SEALS ||
      ::fstat(fd, &status) || static_cast<std::uint64_t>(status.st_size) != size ||
      static_cast<std::uint64_t>(status.st_blocks) * 512 < size)
    return false;
  // Not populated: that takes 0.4 ms for a MiB, in the thread that wakes the program's waiting calls.
  void* map = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) return false;
  ::madvise(map, size, MADV_DONTFORK);
  ::madvise(map, size, MADV_DONTDUMP);
  std::lock_guard reading(r.reading);
  finish_copies(r);
  if (r.area) ::munmap(const_cast<std::uint8_t*>(r.area), r.area_size);
  r.area = static_cast<const std::uint8_t*>(map);
  r.area_number = number;
  r.area_size = size;
  return true;
}

void finish_copies(AnswerRing& r) {
  for (CopyJob& job : r.copies) wait_for_copy(job);
  r.copies.clear();
}

void attend(Session& s, Waiter& waiter) {
  AnswerRing& r = s.ring;
  const auto limit = spin_time();
  // If another thread is reading, it takes this one's answer.
  if (!r.size || !limit.count() || s.gone || !r.reading.try_lock()) return;
  set_attending(r, 1);
  auto until = std::chrono::steady_clock::now() + limit;
  while (!waiter.done.load(std::memory_order_acquire) && !s.gone.load(std::memory_order_relaxed)) {
    const Found found = step(s, r);
    if (found == Found::broken) break;
    if (found == Found::message) {
      until = std::chrono::steady_clock::now() + limit;
      continue;
    }
    for (int i = 0; i < 8; ++i) _mm_pause();
    if (std::chrono::steady_clock::now() > until) break;
  }
  leave(r);
}

bool read_ring(Session& s) {
  AnswerRing& r = s.ring;
  if (!r.size || !r.reading.try_lock()) return true;  // the holder looks at the ring again after it releases the lock
  set_attending(r, 1);
  Found found;
  do found = step(s, r);
  while (found == Found::message);
  leave(r);
  return found != Found::broken;
}

}  // namespace rgpu
