// Copies to pinned memory that the program does not wait for (SEMANTICS 6): no thread awaits such a call. Its bytes are
// put into the program's memory by the thread that reads the answers, and are there before the program is told of any
// completion that covers the copy, or reads or frees that memory by another call.
#include "downloads.hpp"

#include <algorithm>
#include <deque>

#include "memory.hpp"
#include "profile.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

// Limits of the open ones: the worker keeps their answers until `completed` reports that they were received.
constexpr std::uint64_t MOST_BYTES = 64ull << 20;
constexpr std::size_t MOST = 64;

struct Download {
  std::uint64_t stream = 0, address = 0, size = 0;
  std::atomic<std::uint64_t> seq{0};      // 0: not published yet
  Answer answer;
  Waiter waiter;
  std::atomic<bool> taken{false};         // a thread records the answer in the journal
  std::atomic<std::uint32_t> told{0};     // it is recorded
};
using Held = std::shared_ptr<Download>;

struct Open {
  std::mutex lock;
  std::deque<Held> all;
  std::uint64_t bytes = 0;
  std::atomic<std::size_t> count{0};
};

Open& open() {
  static auto* o = new Open;
  return *o;
}

void forget(const Held& download) {
  Open& o = open();
  std::lock_guard guard(o.lock);
  if (!std::erase(o.all, download)) return;
  o.bytes -= download->size;
  --o.count;
}

// Waits for the answer. The first thread that receives it records it in the journal; none returns earlier. No lock
// held.
void finish(const Held& download) {
  wait_for_answer(download->waiter, wire::MemcpyD2h::id);
  if (download->taken.exchange(true)) {
    while (!download->told.load(std::memory_order_acquire)) download->told.wait(0, std::memory_order_acquire);
    return;
  }
  const Answer& answer = download->answer;
  if (!session().gone) {
    // No call is left that could return the error.
    if (answer.result) set_sticky(answer.result);
    else if (answer.payload_size != download->size) set_sticky(CUDA_ERROR_UNKNOWN);
    observed(answer.seq);  // the answer may be here before the publishing thread has noted the call's number
  }
  forget(download);
  download->told.store(1, std::memory_order_release);
  download->told.notify_all();
}

template <class Wanted>
std::vector<Held> found(const Wanted& wanted) {
  Open& o = open();
  std::vector<Held> some;
  if (!downloads_open()) return some;
  std::lock_guard guard(o.lock);
  std::copy_if(o.all.begin(), o.all.end(), std::back_inserter(some), [&](const Held& d) { return wanted(*d); });
  return some;
}

template <class Wanted>
void finish_all(const Wanted& wanted) {
  for (const Held& download : found(wanted)) finish(download);
}

// Adds it to the open ones, when these are below the limits. From then on progress.cpp records which streams wait for
// which.
void begin(const Held& download) {
  Open& o = open();
  for (;;) {
    Held oldest;
    {
      std::lock_guard guard(o.lock);
      if (o.all.empty() || (o.all.size() < MOST && o.bytes + download->size <= MOST_BYTES)) {
        o.all.push_back(download);
        o.bytes += download->size;
        ++o.count;
        return;
      }
      oldest = o.all.front();
    }
    finish(oldest);
  }
}

}  // namespace

bool downloads_open() { return open().count.load(std::memory_order_relaxed) != 0; }

bool may_download_later(std::uint64_t destination, std::uint64_t size) {
  return size <= MOST_BYTES && !profile::active.load(std::memory_order_relaxed) &&
         place_of(destination).kind == Place::Kind::pinned;
}

CUresult download_later(const StreamRef& stream, const wire::MemcpyD2h& call, void* destination) {
  auto download = std::make_shared<Download>();
  download->stream = stream.number;
  download->address = reinterpret_cast<std::uint64_t>(destination);
  download->size = call.size;
  download->waiter.answer = &download->answer;
  download->waiter.destination = destination;
  download->waiter.capacity = call.size;
  begin(download);
  CUresult r = CUDA_SUCCESS;
  {
    Section section;
    std::uint64_t seq = 0;
    r = section.publish_view(view(call), nullptr, &download->waiter, &seq);
    if (!r) {
      note_work(stream, seq);
      download->seq = seq;
    }
  }
  if (!r) return r;
  download->taken = true;  // a thread that found it meanwhile waits for no answer
  download->waiter.done = 1;
  download->waiter.done.notify_all();
  forget(download);
  download->told = 1;
  download->told.notify_all();
  return r;
}

bool downloads_on_their_way() {
  return !found([](const Download& d) {
    return d.seq && !d.waiter.done.load(std::memory_order_acquire) && complete_on(d.stream, d.seq);
  }).empty();
}

void finish_downloads() {
  finish_all([](const Download& d) { return d.seq && complete_on(d.stream, d.seq); });
}

void finish_downloads_into(std::uint64_t address, std::uint64_t size) {
  finish_all([=](const Download& d) { return d.address < address + size && address < d.address + d.size; });
}

void finish_downloads_of(std::uint64_t stream) {
  finish_all([=](const Download& d) { return d.stream == stream; });
}

bool is_download(std::uint64_t seq) {
  return !found([=](const Download& d) { return d.seq == seq; }).empty();
}

bool await_download(std::uint64_t stream, const std::vector<StreamMark>& marks, CUresult& result) {
  std::uint64_t last = 0;
  for (const StreamMark& mark : marks) last = std::max(last, mark.seq);
  const auto ends = found([=](const Download& d) { return d.stream == stream && d.seq == last; });
  if (ends.empty()) return false;
  wait_for_answer(ends.front()->waiter, wire::MemcpyD2h::id);
  result = ends.front()->answer.result;
  if (result) finish(ends.front());
  else for (const StreamMark& mark : marks) learned(mark.stream, mark.seq);
  return true;
}

}  // namespace rgpu
