// Memory of segments, some of it made ahead: touching 64 MiB for the first time takes longer than copying them, so
// threads do that before they are needed.
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>

#include "helpers.hpp"
#include "session.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace rgpu {
namespace {

constexpr unsigned MOST_AHEAD = 8;    // bulk segments; doubled whenever none is ready
constexpr unsigned MOST_THREADS = 8;  // a copy of many segments takes more than one of them touches

unsigned threads() {
  return std::max(1u, helpers_wanted("RGPU_SEGMENT_THREADS", MOST_THREADS, [](unsigned processors) {
    return processors < 8 ? 1u : processors < 16 ? 2u : 4u;
  }));
}

bool is_bulk(const Segment& segment) {
  return segment.kind == wire::kSegmentBulk && segment.size == wire::kBulkSegmentSize;
}

// Whether another segment is to be made ahead. segments_lock held.
bool wants_segment(Session& s) {
  std::uint64_t there = s.preallocating;
  for (const auto& segment_ahead : s.preallocated) there += is_bulk(*segment_ahead);
  return there < s.preallocated_wanted && s.unreleased + there * wire::kBulkSegmentSize < s.facts.journal_limit;
}

void* preallocator(void* argument) {
  Session& s = *static_cast<Session*>(argument);
  ::pthread_setname_np(::pthread_self(), "rgpu-prealloc");
  std::unique_lock guard(s.segments_lock);
  while (!s.gone) {
    if (!wants_segment(s)) {
      s.preallocated_low.wait(guard);
      continue;
    }
    ++s.preallocating;
    guard.unlock();
    auto segment = std::make_unique<Segment>();
    segment->kind = wire::kSegmentBulk;
    segment->size = wire::kBulkSegmentSize;
    // It is offered at once: agent and worker map it, and the worker's device pins it, before it is needed.
    segment->index = s.next_index.fetch_add(1);
    const bool made = make_memory(*segment) && (segment->offered = offer_segment(s, *segment, 0));
    guard.lock();
    --s.preallocating;
    if (!made) break;  // the thread that needs a segment reports the error
    s.preallocated.push_back(std::move(segment));
  }
  return nullptr;
}

// Maps the memory with every page allocated and in the page table: faulting page after page, while a payload is
// written, costs more than the writing.
std::uint8_t* map_touched(int fd, std::size_t size) {
  void* map = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) return nullptr;
  ::madvise(map, size, MADV_DONTFORK);  // at once: a program may fork while the memory is being touched
  ::madvise(map, size, MADV_DONTDUMP);
  int failed;
  do failed = ::madvise(map, size, MADV_POPULATE_WRITE) ? errno : 0;
  while (failed == EINTR || failed == EAGAIN);
  if (failed == EINVAL) {  // Linux before 5.14
    do failed = ::posix_fallocate(fd, 0, static_cast<off_t>(size));
    while (failed == EINTR);
    for (std::size_t at = 0; !failed && at < size; at += 4096) static_cast<volatile std::uint8_t*>(map)[at] = 0;
  }
  if (failed) {
    ::munmap(map, size);
    errno = failed;
    return nullptr;
  }
  return static_cast<std::uint8_t*>(map);
}

}  // namespace

bool make_memory(Segment& segment) {
  const char* name = segment.kind == wire::kSegmentLog ? "rgpu-log" : "rgpu-bulk";
  int fd = ::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return false;
  int failed;
  do failed = ::ftruncate(fd, static_cast<off_t>(segment.size)) ? errno : 0;
  while (failed == EINTR);
  std::uint8_t* map = nullptr;
  if (failed || ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) ||
      !(map = map_touched(fd, segment.size))) {
    ::close(fd);
    return false;
  }
  segment.map = map;
  segment.fd = fd;
  return true;
}

void drop_memory(Segment& segment) {
  if (segment.map) ::munmap(segment.map, segment.size);
  if (segment.fd >= 0) ::close(segment.fd);
  segment.map = nullptr;
  segment.fd = -1;
}

namespace {
void start_threads(Session& s, unsigned count) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);  // signals of the program are handled by its own threads
  while (count--) {
    pthread_t thread;
    if (!::pthread_create(&thread, nullptr, preallocator, &s)) ::pthread_detach(thread);  // otherwise made when needed
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}
}  // namespace

std::unique_ptr<Segment> take_preallocated(Session& s, std::uint32_t kind, std::uint64_t size) {
  std::lock_guard guard(s.segments_lock);
  const bool bulk = kind == wire::kSegmentBulk && size == wire::kBulkSegmentSize;
  if (bulk) s.preallocated_low.notify_all();
  for (auto it = s.preallocated.begin(); it != s.preallocated.end(); ++it) {
    if ((*it)->kind == kind && (*it)->size == size) {
      auto found = std::move(*it);
      s.preallocated.erase(it);
      return found;
    }
  }
  if (!bulk) return nullptr;
  if (s.preallocated_wanted == 1) start_threads(s, threads() - 1);  // the second time that none is ready
  s.preallocated_wanted = std::min(std::max(2 * s.preallocated_wanted, 1u), MOST_AHEAD);
  return nullptr;
}

void start_preallocator(Session& s) { start_threads(s, 1); }

}  // namespace rgpu
