// SIGSEGV handler: a touch of managed memory that is not present fetches it; every other fault is the program's own.
//
// The program may install a handler of its own after ours. The next call that may use managed memory installs ours in
// front again; a chain keeps the handlers that were replaced. A handler that passes a fault on to the one that it found
// (ours) is not called for that fault again.
#include <pthread.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>

#include "managed.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

constexpr std::size_t kMostHandlers = 16;
constexpr std::size_t kStack = 256 << 10;  // for a fetch where the program's signal stack is a small one
// When a handler returns and the same fault follows at once this many times, the fault is passed to the next handler
// (crash reporters restore the handler that they found, which is ours).
constexpr unsigned kPatience = 3;
constexpr std::int64_t kAtOnceNs = 100'000;
// Mark in siginfo's si_errno, which no fault uses: passed on, and by how many handlers. A handler that passes the fault
// on to the handler that it found (ours) uses the same siginfo; the kernel's next fault has another.
constexpr int kHandedOn = 0x52470000, kDepth = 0xFF;

struct Chain {
  std::mutex lock;  // for threads that add handlers
  std::atomic<std::size_t> count{0};
  struct sigaction handlers[kMostHandlers];  // the first is the oldest
};

Chain& chain() {
  static auto* c = new Chain;
  return *c;
}

// The last fault that this thread passed to another handler.
struct Last {
  std::uint64_t address = 0, instruction = 0;
  std::int64_t returned = 0;  // time at which its handler returned, in ns
  unsigned repeats = 0;
};
thread_local Last last;

std::int64_t now_ns() {
  timespec time;
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// Ends the process as the kernel would: the default action does so when the instruction faults again, or here for a
// signal that was sent.
void end_by_default(int signal, bool comes_again) {
  struct sigaction plain {};
  plain.sa_handler = SIG_DFL;
  ::sigaction(signal, &plain, nullptr);
  if (comes_again) return;
  sigset_t one;
  ::sigemptyset(&one);
  ::sigaddset(&one, signal);
  ::pthread_sigmask(SIG_UNBLOCK, &one, nullptr);
  ::raise(signal);
}

// The number of handlers that the fault was passed to already.
std::size_t handed(const siginfo_t* info, const void* raw) {
  if ((info->si_errno & ~kDepth) == kHandedOn) return static_cast<std::size_t>(info->si_errno & kDepth);
  const auto address = reinterpret_cast<std::uint64_t>(info->si_addr);
  const auto instruction = static_cast<std::uint64_t>(static_cast<const ucontext_t*>(raw)->uc_mcontext.gregs[REG_RIP]);
  const bool again = last.address == address && last.instruction == instruction && now_ns() - last.returned < kAtOnceNs;
  last = {address, instruction, 0, again ? last.repeats + 1 : 0};
  return last.repeats < kPatience ? 0 : last.repeats - kPatience + 1;
}

void hand_on(int signal, siginfo_t* info, void* raw) {
  Chain& c = chain();
  const bool sent_by_somebody = info->si_code <= 0;
  const std::size_t depth = sent_by_somebody ? 0 : handed(info, raw), count = c.count.load(std::memory_order_acquire);
  if (depth >= count) return end_by_default(signal, !sent_by_somebody);
  const struct sigaction& next = c.handlers[count - 1 - depth];
  if (!(next.sa_flags & SA_SIGINFO) && next.sa_handler == SIG_IGN && sent_by_somebody) return;
  if (!(next.sa_flags & SA_SIGINFO) && (next.sa_handler == SIG_DFL || next.sa_handler == SIG_IGN))
    return end_by_default(signal, !sent_by_somebody);  // a fault cannot be ignored
  sigset_t mask = next.sa_mask, before;
  if (!(next.sa_flags & SA_NODEFER)) ::sigaddset(&mask, signal);
  ::pthread_sigmask(SIG_BLOCK, &mask, &before);
  if (!sent_by_somebody) info->si_errno = kHandedOn | static_cast<int>(std::min<std::size_t>(depth + 1, kDepth));
  if (next.sa_flags & SA_SIGINFO)
    next.sa_sigaction(signal, info, raw);
  else
    next.sa_handler(signal);
  last.returned = now_ns();
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

struct Request {
  std::uint64_t address;
  bool write;
  Touch touch;
  ucontext_t back, there;
};

void serve(Request& request) {
  request.touch = touch_managed(request.address, 1, request.write, !in_host_function());
}

void serve_there(unsigned low, unsigned high) {
  serve(*reinterpret_cast<Request*>(std::uintptr_t{low} | std::uintptr_t{high} << 32));
}

// Serves the request on a stack of its own: a signal stack is often 8 KiB, less than a fetch may need.
void serve_on_other_stack(Request& request) {
  void* stack = ::mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) return serve(request);
  ::getcontext(&request.there);
  request.there.uc_stack.ss_sp = stack;
  request.there.uc_stack.ss_size = kStack;
  request.there.uc_link = &request.back;
  const auto number = reinterpret_cast<std::uintptr_t>(&request);
  ::makecontext(&request.there, reinterpret_cast<void (*)()>(serve_there), 2, static_cast<unsigned>(number),
                static_cast<unsigned>(number >> 32));
  ::swapcontext(&request.back, &request.there);
  ::munmap(stack, kStack);
}

bool on_small_stack() {
  stack_t now{};
  return !::sigaltstack(nullptr, &now) && (now.ss_flags & SS_ONSTACK) && now.ss_size < kStack;
}

void on_fault(int signal, siginfo_t* info, void* raw) {
  const int before = errno;
  const auto address = reinterpret_cast<std::uint64_t>(info->si_addr);
  Managed& m = managed();
  const bool may_be_ours = info->si_code == SEGV_ACCERR && !info->si_errno && address >= m.lowest.load(std::memory_order_relaxed) &&
                           address < m.highest.load(std::memory_order_relaxed) && initialised();
  if (may_be_ours) {
    constexpr long kWrite = 2;  // in a page fault's error code (Intel SDM 3A, 4.7)
    Request request{address, (static_cast<ucontext_t*>(raw)->uc_mcontext.gregs[REG_ERR] & kWrite) != 0,
                    Touch::elsewhere, {}, {}};
    if (on_small_stack())
      serve_on_other_stack(request);
    else
      serve(request);
    errno = before;
    if (request.touch == Touch::present) return;
  }
  hand_on(signal, info, raw);
  errno = before;
}

}  // namespace

void watch_faults() {
  struct sigaction now {};
  if (::sigaction(SIGSEGV, nullptr, &now) || ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault)) return;
  Chain& c = chain();
  std::lock_guard guard(c.lock);
  struct sigaction ours {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART | SA_NODEFER;
  ::sigemptyset(&ours.sa_mask);
  struct sigaction before {};
  if (::sigaction(SIGSEGV, nullptr, &before) || ((before.sa_flags & SA_SIGINFO) && before.sa_sigaction == on_fault)) return;
  std::size_t count = c.count.load();
  if (count == kMostHandlers) {  // a program that installs one again and again: the newest is kept
    std::memmove(c.handlers + 1, c.handlers + 2, (count - 2) * sizeof *c.handlers);
    --count;
  }
  c.handlers[count] = before;
  c.count.store(count + 1, std::memory_order_release);
  ::sigaction(SIGSEGV, &ours, nullptr);
}

}  // namespace rgpu
