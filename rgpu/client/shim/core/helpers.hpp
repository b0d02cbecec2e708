// Threads that do short pieces of work for other threads: copies in the shim, checksums in the engine.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>

namespace rgpu {

// Work for one thread. The object must not be moved until Helpers::wait() has returned.
struct Task {
  virtual void run() = 0;
  bool done = false;  // set by the helpers, under their lock

 protected:
  ~Task() = default;
};

// Threads start with the first task, and never end: the object must live as long as the process, so make it with `new`.
class Helpers {
 public:
  // `name`: of the threads, at most 15 characters. `wanted`: the number of threads; fewer run if the system makes no
  // more.
  Helpers(const char* name, unsigned wanted) : name_(name), wanted_(wanted) {}

  // Gives the task to a helper, or runs it at once where there is none.
  void start(Task& task);
  // Returns when the task is done; runs waiting tasks meanwhile, the oldest first.
  void wait(Task& task);
  // The number of threads beside the caller's.
  unsigned count();

 private:
  static void* thread(void* self);
  void ready();                                       // lock held
  void run_next(std::unique_lock<std::mutex>& guard);  // lock held before and after, not while it runs

  const char* name_;
  unsigned wanted_, started_ = 0;
  std::mutex lock_;
  std::condition_variable work_, finished_;
  std::deque<Task*> queue_;
};

// The number in the environment variable, at most `most`; without it `usual(processors of this process)`.
unsigned helpers_wanted(const char* variable, unsigned most, unsigned (*usual)(unsigned processors));

}  // namespace rgpu
