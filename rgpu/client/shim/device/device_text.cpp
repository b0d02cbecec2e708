// Text that kernels print. It is received before the answer or the watermark that reports to the program that they ran,
// is stored here, and is written to the program's own standard output, with the program's own stdio, by the thread that
// returns from a call that prints on a real driver: so it is in the right place between the program's own output.
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

#include "session.hpp"

namespace rgpu {
namespace {

// Above this length the thread that reads answers writes the text: a program that never waits prints all the same, and
// the text in transit stays bounded by the answer ring.
constexpr std::size_t LONGEST = 1u << 20;

struct DeviceText {
  std::mutex lock;           // guards `waiting` and `count`
  std::string waiting;
  std::uint64_t count = 0;   // bytes of the session's text received so far
  std::mutex writing;        // held while a batch is written: a thread that calls meanwhile returns after that
  std::atomic<bool> some{false}, busy{false};  // there is text waiting; a batch is being written
};

DeviceText& text() {
  static auto* t = new DeviceText;  // never destroyed: it is written in the library's destructor
  return *t;
}

// Requires `writing` held.
void write_out(DeviceText& t) {
  std::string batch;
  {
    std::lock_guard guard(t.lock);
    batch.swap(t.waiting);
    t.busy.store(true, std::memory_order_relaxed);
    t.some.store(false, std::memory_order_release);  // a thread that reads this store sees `busy`
  }
  const int before = errno;
  if (!batch.empty()) std::fwrite(batch.data(), 1, batch.size(), stdout);
  errno = before;
  t.busy.store(false, std::memory_order_release);
}

}  // namespace

bool take_device_text(const std::uint8_t* at, const std::uint8_t* end) {
  std::uint64_t position = 0;
  if (end - at < static_cast<std::ptrdiff_t>(sizeof position)) return false;
  std::memcpy(&position, at, sizeof position);
  at += sizeof position;
  const auto size = static_cast<std::uint64_t>(end - at);
  DeviceText& t = text();
  bool much = false;
  {
    std::lock_guard guard(t.lock);
    if (position > t.count) return false;  // a hole
    const std::uint64_t had = t.count - position;  // bytes of this piece that were received before
    if (had >= size) return true;
    t.waiting.append(reinterpret_cast<const char*>(at + had), size - had);
    t.count += size - had;
    t.some.store(true, std::memory_order_release);
    much = t.waiting.size() > LONGEST;
  }
  if (much) print_device_text();
  return true;
}

void print_device_text() {
  DeviceText& t = text();
  // Another thread may be writing the text that this call must print.
  if (!t.some.load(std::memory_order_acquire) && !t.busy.load(std::memory_order_acquire)) return;
  std::lock_guard guard(t.writing);
  write_out(t);
}

void print_last_device_text() {
  DeviceText& t = text();
  if (!t.some.load(std::memory_order_acquire)) return;
  for (int i = 0; i < 100; ++i) {  // the holder may never release the lock: the process ends
    if (std::unique_lock guard(t.writing, std::try_to_lock); guard.owns_lock()) return write_out(t);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void forget_device_text() {
  text().some.store(false, std::memory_order_relaxed);
  text().busy.store(false, std::memory_order_relaxed);
}

}  // namespace rgpu
