// Awaited calls: publication, waiting, and the actions after an answer.
#include <pthread.h>

#include <chrono>
#include <csignal>

#include "profile.hpp"
#include "routed.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

// Answers that no thread waits for are handled here, one after the other, on a thread of their own: a host function may
// block without limit. So those that concern no function of the program have another thread.
struct Notifier {
  std::mutex lock;
  std::condition_variable more;
  std::deque<std::unique_ptr<Waiter>> queue;
  bool started = false;
};

Notifier& notifier(Notified by) {
  static auto* both = new Notifier[2];
  return both[static_cast<unsigned>(by)];
}

void* run_notifier(void* mine) {
  ::pthread_setname_np(::pthread_self(), "rgpu-callbacks");
  Notifier& n = *static_cast<Notifier*>(mine);
  for (;;) {
    std::unique_ptr<Waiter> waiter;
    {
      std::unique_lock guard(n.lock);
      n.more.wait(guard, [&] { return !n.queue.empty(); });
      waiter = std::move(n.queue.front());
      n.queue.pop_front();
    }
    waiter->notify(*waiter->answer);
    delete waiter->answer;
  }
}

}  // namespace

bool start_callbacks(Notified by) {
  Notifier& n = notifier(by);
  std::lock_guard guard(n.lock);
  if (n.started) return true;
  sigset_t all, before;
  ::sigfillset(&all);
  ::sigdelset(&all, SIGSEGV);  // the functions are the program's, and may touch managed memory
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  pthread_t thread;
  n.started = !::pthread_create(&thread, nullptr, run_notifier, &n);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (n.started) ::pthread_detach(thread);
  return n.started;
}

namespace {

// Whether the program concludes from such an answer that ordered work is complete.
bool observes(std::uint16_t call) {
  switch (call) {
    case wire::ContextSynchronize::id:
    case wire::StreamSynchronize::id:
    case wire::EventSynchronize::id:
    case wire::MemcpyD2h::id:
    case wire::Memcpy2dD2h::id:
    case wire::MemoryFreeWait::id:
      return true;
    default:
      return false;
  }
}

// Whether the result is an error of execution: the context is lost, whether or not the answer has the sticky flag.
bool is_fatal(CUresult result) {
  switch (result) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_CONTAINED:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_EXTERNAL_DEVICE:
    case CUDA_ERROR_TENSOR_MEMORY_LEAK:
      return true;
    default:
      return false;
  }
}

}  // namespace

bool add_waiter(Session& s, std::uint64_t seq, Waiter* waiter) {
  std::lock_guard guard(s.waiters_lock);
  if (s.gone) return false;  // under the lock: lose_agent() fails every waiter added before it takes the lock
  s.waiters.emplace(seq, waiter);
  return true;
}

Waiter* find_waiter(Session& s, std::uint64_t seq) {
  std::lock_guard guard(s.waiters_lock);
  auto it = s.waiters.find(seq);
  return it == s.waiters.end() ? nullptr : it->second;
}

Waiter* take_waiter(Session& s, std::uint64_t seq) {
  std::lock_guard guard(s.waiters_lock);
  auto it = s.waiters.find(seq);
  if (it == s.waiters.end()) return nullptr;
  Waiter* found = it->second;
  s.waiters.erase(it);
  return found;
}

void finish_waiter(Waiter* waiter) {
  profile::answered(*waiter->answer);
  if (waiter->notify) {
    Notifier& n = notifier(waiter->by);
    std::lock_guard guard(n.lock);
    n.queue.emplace_back(waiter);
    n.more.notify_one();
    return;
  }
  waiter->done.store(1, std::memory_order_release);
  waiter->done.notify_all();  // several threads may wait for a download
}

void fail_waiters(Session& s, CUresult result) {
  std::unordered_map<std::uint64_t, Waiter*> all;
  {
    std::lock_guard guard(s.waiters_lock);
    all.swap(s.waiters);
  }
  for (auto& [seq, waiter] : all) {
    waiter->answer->seq = seq;
    waiter->answer->result = result;
    finish_waiter(waiter);
  }
}

CUresult submit_view(const CallView& call, const void* data, std::size_t n, std::uint64_t* seq) {
  Payload payload(data, n);
  if (payload.error) return payload.error;
  Section section(call.reserved || payload.external());
  return section.publish_view(call, &payload, nullptr, seq);
}

CUresult await_view(const CallView& call, Payload& payload, Answer& answer, void* destination, std::size_t capacity,
                    const Step& step) {
  if (payload.error) return payload.error;
  Waiter waiter;
  waiter.answer = &answer;
  waiter.destination = destination;
  waiter.capacity = capacity;
  std::uint64_t seq = 0;
  {
    Section section(call.reserved || payload.external());
    if (CUresult r = section.publish_view(call, &payload, &waiter, &seq); r) return r;
    if (step) step(seq, false);
  }
  return collect(call.id, waiter, seq, step);
}

void wait_for_answer(Waiter& waiter, std::uint16_t call) {
  if (waiter.done.load(std::memory_order_acquire)) return;
  const auto began = std::chrono::steady_clock::now();
  attend(session(), waiter);
  while (!waiter.done.load(std::memory_order_acquire)) waiter.done.wait(0, std::memory_order_acquire);
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - began);
  report_awaited(call, static_cast<std::uint64_t>(ns.count()));
}

CUresult collect(std::uint16_t call, Waiter& waiter, std::uint64_t seq, const Step& step) {
  const Answer& answer = *waiter.answer;
  wait_for_answer(waiter, call);
  print_device_text();  // it was received before the answer
  if (answer.result == CUDA_ERROR_SYSTEM_NOT_READY && session().gone) return answer.result;
  if (observes(call) && is_fatal(answer.result)) set_sticky(answer.result);
  const bool teaches = observes(call) && !answer.result;
  if (step && !answer.result) step(seq, true);
  observed(seq);
  if (teaches) after_observation();
  return answer.result;
}

CUresult submit_notify(const CallView& call, std::function<void(const Answer&)> answered, std::uint64_t* seq, Notified by) {
  if (!start_callbacks(by)) return CUDA_ERROR_OPERATING_SYSTEM;
  auto waiter = std::make_unique<Waiter>();
  auto answer = std::make_unique<Answer>();
  waiter->answer = answer.get();
  waiter->notify = std::move(answered);
  waiter->by = by;
  Section section(call.reserved);
  if (CUresult r = section.publish_view(call, nullptr, waiter.get(), seq); r) return r;
  waiter.release();  // finish_waiter() owns both from now on
  answer.release();
  return CUDA_SUCCESS;
}

CUresult note_observation(std::uint64_t seq) {
  wire::Completed call{};
  call.observed = seq;
  Section section(true);
  return section.publish(call);
}

CUresult observed(std::uint64_t seq) {
  const CUresult r = note_observation(seq);
  if (const RouterFacts* router = router_facts(); router && router->learned) router->learned(member_number());
  return r;
}

void after_observation() {
  bring_back_host_memory();
  free_deferred();
}

}  // namespace rgpu
