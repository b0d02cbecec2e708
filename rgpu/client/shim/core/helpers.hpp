// Threads that help with short pieces of work, whoever has some: copies in the shim, checksums in the engine.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>

namespace rgpu {

// What one thread does. It stays where it is until Helpers::wait() has returned.
struct Task {
  virtual void run() = 0;
  bool done = false;  // the helpers', under their lock

 protected:
  ~Task() = default;
};

// Threads start with the first task, and never end: it is to live as long as the process, so it is made with `new`.
class Helpers {
 public:
  // `name`: of the threads, at most 15 characters. `wanted`: so many, or fewer if no more can be had.
  Helpers(const char* name, unsigned wanted) : name_(name), wanted_(wanted) {}

  // By a helper, or at once where there is none.
  void start(Task& task);
  // Returns when it is done; does what waits meanwhile, the oldest first.
  void wait(Task& task);
  // How many threads there are beside the caller's.
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

// As an environment variable says, at most `most`; otherwise `usual(processors of this process)`.
unsigned helpers_wanted(const char* variable, unsigned most, unsigned (*usual)(unsigned processors));

}  // namespace rgpu
