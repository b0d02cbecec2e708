#include "crew.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>

#include "crc32.hpp"

namespace rgpu {
namespace {

constexpr unsigned MOST_HELPERS = 4;
constexpr std::size_t BLOCK = 128 * 1024;  // what is copied and summed before the next: it stays in the cache

struct Crew {
  std::mutex lock;
  std::condition_variable work, finished;
  std::deque<CopyJob*> queue;
  unsigned started = 0;
};

Crew& crew() {
  static auto* c = new Crew;  // its threads may outlive static destructors
  return *c;
}

void run(CopyJob& job) {
  if (!job.summed) {
    std::memcpy(job.to, job.from, job.size);
    return;
  }
  for (std::size_t at = 0; at < job.size; at += BLOCK) {
    const std::size_t part = std::min(BLOCK, job.size - at);
    std::memcpy(job.to + at, job.from + at, part);
    job.crc = crc32(job.crc, job.to + at, part);
  }
}

// The oldest job that waits. The lock is held before and after, and not while it runs.
void run_next(Crew& c, std::unique_lock<std::mutex>& guard) {
  CopyJob* job = c.queue.front();
  c.queue.pop_front();
  guard.unlock();
  run(*job);
  guard.lock();
  job->done = true;
  c.finished.notify_all();
}

void* helper(void*) {
  ::pthread_setname_np(::pthread_self(), "rgpu-copy");
  Crew& c = crew();
  std::unique_lock guard(c.lock);
  for (;;) {
    if (c.queue.empty()) c.work.wait(guard);
    else run_next(c, guard);
  }
  return nullptr;
}

// How many there are now; they start with the first copy. `lock` held.
unsigned helpers(Crew& c) {
  const unsigned wanted = copy_helpers();
  if (c.started >= wanted) return c.started;
  sigset_t all, before;
  ::sigfillset(&all);
  // The program's signals are its own threads' business, but for what a bad address of its raises here as it would there.
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) ::sigdelset(&all, fault);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  while (c.started < wanted) {
    pthread_t thread;
    if (::pthread_create(&thread, nullptr, helper, nullptr)) break;
    ::pthread_detach(thread);
    ++c.started;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return c.started;
}

}  // namespace

unsigned copy_helpers() {
  static const unsigned count = [] {
    if (const char* text = std::getenv("RGPU_COPY_THREADS"))
      return static_cast<unsigned>(std::clamp(std::strtol(text, nullptr, 10), 0l, 64l));
    cpu_set_t set;
    const int processors = ::sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
    return processors < 4 ? 0u : std::min(MOST_HELPERS, static_cast<unsigned>(processors) / 2);
  }();
  return count;
}

void start_copy(CopyJob& job) {
  Crew& c = crew();
  {
    std::lock_guard guard(c.lock);
    if (helpers(c)) {
      c.queue.push_back(&job);
      c.work.notify_one();
      return;
    }
  }
  run(job);
  job.done = true;
}

void wait_for_copy(CopyJob& job) {
  Crew& c = crew();
  std::unique_lock guard(c.lock);
  while (!job.done) {
    if (c.queue.empty()) c.finished.wait(guard);
    else run_next(c, guard);
  }
}

}  // namespace rgpu
