#include "helpers.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>

namespace rgpu {

void Helpers::run_next(std::unique_lock<std::mutex>& guard) {
  Task* task = queue_.front();
  queue_.pop_front();
  guard.unlock();
  task->run();
  guard.lock();
  task->done = true;
  finished_.notify_all();
}

void* Helpers::thread(void* self) {
  auto& all = *static_cast<Helpers*>(self);
  ::pthread_setname_np(::pthread_self(), all.name_);
  std::unique_lock guard(all.lock_);
  for (;;) {
    if (all.queue_.empty()) all.work_.wait(guard);
    else all.run_next(guard);
  }
  return nullptr;
}

void Helpers::ready() {
  if (started_ >= wanted_) return;
  sigset_t all, before;
  ::sigfillset(&all);
  // The program's signals are handled by its own threads, except faults that a bad address of its raises in this
  // thread.
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) ::sigdelset(&all, fault);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  while (started_ < wanted_) {
    pthread_t made;
    if (::pthread_create(&made, nullptr, thread, this)) break;
    ::pthread_detach(made);
    ++started_;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

unsigned Helpers::count() {
  std::lock_guard guard(lock_);
  ready();
  return started_;
}

void Helpers::start(Task& task) {
  {
    std::lock_guard guard(lock_);
    ready();
    if (started_) {
      queue_.push_back(&task);
      work_.notify_one();
      return;
    }
  }
  task.run();
  task.done = true;
}

void Helpers::wait(Task& task) {
  std::unique_lock guard(lock_);
  while (!task.done) {
    if (queue_.empty()) finished_.wait(guard);
    else run_next(guard);
  }
}

unsigned helpers_wanted(const char* variable, unsigned most, unsigned (*usual)(unsigned processors)) {
  if (const char* text = std::getenv(variable))
    return static_cast<unsigned>(std::clamp(std::strtol(text, nullptr, 10), 0l, static_cast<long>(most)));
  cpu_set_t set;
  const int processors = ::sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
  return usual(static_cast<unsigned>(processors));
}

}  // namespace rgpu
