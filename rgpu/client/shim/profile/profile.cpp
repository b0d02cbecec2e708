// Recording for profilers: the entries, the clocks, the device's work (profile.hpp).
#include "profile.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "context.hpp"
#include "module.hpp"
#include "recording.hpp"
#include "runtime_functions.hpp"
#include "session.hpp"

namespace rgpu::profile {

std::atomic<std::uint32_t> recorded{0};
std::atomic<bool> active{false};
std::atomic<void (*)(const ApiEvent&)> called_back{nullptr};

namespace {

constexpr std::size_t kMost = 1u << 22;    // entries kept; further ones are dropped and counted
constexpr auto kPatience = std::chrono::seconds(30);  // to wait for times of complete work
constexpr std::uint32_t kNullStream = 7;   // CUPTI's number of a context's legacy stream

// Head and span of the worker's answer: rgpu/session/objects/spans.py.
struct Head {
  std::uint64_t clock;
  std::int64_t received, answered;
  std::uint32_t count, zero;
};
struct Span {
  std::uint32_t kind, function;
  std::uint64_t module;
  std::uint32_t grid[3], block[3], shared, value;
  std::uint64_t bytes;
  std::int64_t start, end;
  std::uint32_t zero[4];
};
static_assert(sizeof(Head) == 32 && sizeof(Span) == 88);
enum : std::uint32_t { kCall, kKernel, kCopy, kMemset };

// Work whose times have not been received yet.
struct Pending {
  Entry entry;
  std::uint64_t stream = 0, sent = 0;
};

// An entry and the worker's clock of its times; 0: this side's clock.
struct Raw {
  Entry entry;
  std::uint64_t clock = 0, sent = 0, came = 0;
};

// The offset to add to a worker's times. Each exchange bounds it (RFC 5905): its call was received after it was sent,
// its answer was received after it was given. Within all bounds, no record exceeds the time of its own call, and the
// work of one stream stays in order. Bounds that exclude each other mean that the clock drifts: the newest bounds
// count.
class Clock {
 public:
  void tell(std::int64_t least, std::int64_t most) {
    least_ = std::max(least_, least), most_ = std::min(most_, most);
    if (least_ > most_) least_ = least, most_ = most;
  }
  // The middle of the bounds; once used it is kept as long as possible, so that new records fit those of before.
  std::int64_t offset() {
    if (!used_ || *used_ < least_ || *used_ > most_) used_ = least_ + (most_ - least_) / 2;
    return *used_;
  }

 private:
  std::int64_t least_ = INT64_MIN, most_ = INT64_MAX;
  std::optional<std::int64_t> used_;
};

struct State {
  std::mutex lock;
  std::condition_variable told;
  std::unordered_map<std::uint64_t, Pending> pending;
  std::deque<Raw> entries;
  std::size_t dropped = 0;
  std::map<std::uint64_t, Clock> clocks;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint64_t> ends;  // of the last entry, by context and stream
  std::set<std::string> names;  // never shrinks: entries point into it
  std::map<std::pair<std::uint64_t, std::uint32_t>, Entry> kernels;  // of graphs, by module and function
};

State& state() {
  static auto* s = new State;
  return *s;
}

std::atomic<bool> waiting{false};  // State::pending is not empty
std::atomic<std::uint32_t> next_correlation{1};

std::int64_t monotonic() {
  timespec t{};
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

void keep(State& s, const Raw& raw) {  // lock held
  if (s.entries.size() < kMost) s.entries.push_back(raw);
  else ++s.dropped;
}

void describe(Entry& entry, const Function& function) {  // lock held
  entry.name = state().names.insert(function.name).first->c_str();
  entry.static_shared = static_cast<std::uint32_t>(function.attribute(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, 0));
  entry.local = static_cast<std::uint32_t>(function.attribute(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, 0));
  entry.registers = static_cast<std::uint32_t>(function.attribute(CU_FUNC_ATTRIBUTE_NUM_REGS, 0));
}

template <class C>
const C& as(const CallView& call) {
  return *static_cast<const C*>(call.call);
}

// Fills in an entry from a call that is published; returns the call's stream.
std::uint64_t fill(Entry& e, const CallView& call, std::uint64_t payload) {
  const std::uint8_t host = thread().pinned ? kPinned : kPageable;
  const auto copy = [&](std::uint8_t how, std::uint8_t source, std::uint8_t destination, std::uint64_t bytes) {
    e.kind = Kind::copy;
    e.copy = how, e.source = source, e.destination = destination, e.bytes = bytes;
    e.asynchronous = how != kDeviceToHost || host == kPinned;
  };
  switch (call.id) {
    case wire::Launch::id: {
      const auto& c = as<wire::Launch>(call);
      e.kind = Kind::kernel;
      const std::uint32_t grid[] = {c.grid_x, c.grid_y, c.grid_z}, block[] = {c.block_x, c.block_y, c.block_z};
      std::copy_n(grid, 3, e.grid);
      std::copy_n(block, 3, e.block);
      e.dynamic_shared = c.shared;
      e.cooperative = c.flags & 1;
      return c.stream;
    }
    case wire::GraphLaunch::id: {
      const auto& c = as<wire::GraphLaunch>(call);
      e.graph = static_cast<std::uint32_t>(c.exec);
      return c.stream;
    }
    case wire::Memset::id: {
      const auto& c = as<wire::Memset>(call);
      e.kind = Kind::memset;
      e.bytes = c.width * c.height * c.element;
      e.value = c.value;
      return c.stream;
    }
    case wire::MemcpyH2d::id:
      copy(kHostToDevice, host, kDeviceMemory, payload);
      return as<wire::MemcpyH2d>(call).stream;
    case wire::Memcpy2dH2d::id:
      copy(kHostToDevice, host, kDeviceMemory, payload);
      return as<wire::Memcpy2dH2d>(call).stream;
    case wire::MemcpyD2h::id:
      copy(kDeviceToHost, kDeviceMemory, host, as<wire::MemcpyD2h>(call).size);
      return as<wire::MemcpyD2h>(call).stream;
    case wire::Memcpy2dD2h::id: {
      const auto& c = as<wire::Memcpy2dD2h>(call);
      copy(kDeviceToHost, kDeviceMemory, host, c.width * c.height);
      return c.stream;
    }
    case wire::MemcpyD2d::id:
      copy(kDeviceToDevice, kDeviceMemory, kDeviceMemory, as<wire::MemcpyD2d>(call).size);
      return as<wire::MemcpyD2d>(call).stream;
    default: {
      const auto& c = as<wire::Memcpy2dD2d>(call);
      copy(kDeviceToDevice, kDeviceMemory, kDeviceMemory, c.width * c.height);
      return c.stream;
    }
  }
}

// Makes the entry of a graph's node. Lock held.
Entry node_entry(State& s, const Entry& launch, const Span& span, std::uint64_t place) {
  Entry e = launch;
  e.node = place;
  e.bytes = span.bytes;
  if (span.kind == kKernel) {
    e.kind = Kind::kernel;
    auto [found, fresh] = s.kernels.try_emplace({span.module, span.function});
    if (fresh) {
      for_each_object(rgpu::Kind::module, [&](Object* object) {
        const auto* module = static_cast<const Module*>(object);
        if (module->number == span.module && span.function < module->functions.size())
          describe(found->second, *module->functions[span.function]);
      });
      if (found->second.name == nullptr) found->second.name = "(unloaded)";
    }
    e.name = found->second.name;
    e.static_shared = found->second.static_shared, e.local = found->second.local;
    e.registers = found->second.registers;
    std::copy_n(span.grid, 3, e.grid);
    std::copy_n(span.block, 3, e.block);
    e.dynamic_shared = span.shared;
  } else if (span.kind == kMemset) {
    e.kind = Kind::memset;
    e.value = span.value;
  } else {
    e.kind = Kind::copy;
    e.copy = kDeviceToDevice, e.source = e.destination = kDeviceMemory, e.asynchronous = 1;
  }
  return e;
}

// Parses the worker's answer; false where it is malformed.
bool spans_of(const Answer& answer, Head& head, std::vector<Span>& spans) {
  const std::uint8_t* at = answer.reply.data();
  std::uint32_t size = 0;  // of the blob, in front of it
  if (answer.reply.size() < sizeof size) return false;
  std::memcpy(&size, at, sizeof size);
  at += sizeof size;
  if (size != answer.reply.size() - sizeof size || size < sizeof head) return false;
  std::memcpy(&head, at, sizeof head);
  if (size - sizeof head != head.count * sizeof(Span)) return false;
  spans.resize(head.count);
  if (head.count) std::memcpy(spans.data(), at + sizeof head, head.count * sizeof(Span));
  return true;
}

// Converts to this side's clock; if the clocks have drifted, limited to the time from the request to its answer.
void bring_over(State& s, Raw& raw) {  // lock held
  const auto found = s.clocks.find(raw.clock);
  if (raw.clock == 0 || found == s.clocks.end()) return;
  Entry& e = raw.entry;
  const std::uint64_t length = e.end - e.start;
  e.start += static_cast<std::uint64_t>(found->second.offset());
  if (e.start + length > raw.came) e.start = raw.came - std::min(length, raw.came);
  e.start = std::max(e.start, raw.sent);
  if (e.node == 0) {  // a worker's times of the GPU are accurate to tens of microseconds: keeps the stream's order
    std::uint64_t& last = s.ends[{e.context, e.stream}];
    e.start = std::max(e.start, last);
    last = e.start + length;
  }
  e.end = e.start + length;
}

}  // namespace

Thread& thread() {
  thread_local Thread t;
  return t;
}

void keep(const Entry& entry) {
  State& s = state();
  std::lock_guard guard(s.lock);
  keep(s, Raw{entry});
}

const char* lasting(const std::string& name) {
  State& s = state();
  std::lock_guard guard(s.lock);
  return s.names.insert(name).first->c_str();
}

void place(Entry& entry) {
  const Context* context = top_context();
  if (context == nullptr) return;
  entry.context = static_cast<std::uint32_t>(context->unique_id);
  entry.device = static_cast<std::uint32_t>(context->device);
}

std::uint32_t stream_id(std::uint64_t number) {
  return number < wire::kFirstHandle ? kNullStream : static_cast<std::uint32_t>(number);
}

std::uint32_t new_correlation() { return next_correlation.fetch_add(1); }

void note_external(std::uint32_t correlation) {
  if (!records(Kind::external)) return;
  const Thread& t = thread();
  for (unsigned kind = 0; kind < kExternalKinds; ++kind) {
    if (t.external[kind].empty()) continue;
    Entry entry;
    entry.kind = Kind::external;
    entry.correlation = correlation;
    entry.external_kind = kind;
    entry.external = t.external[kind].back();
    keep(entry);
  }
}

std::uint64_t now() {
  static const std::int64_t offset = [] {
    timespec t{};
    ::clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * 1'000'000'000ll + t.tv_nsec - monotonic();
  }();
  return static_cast<std::uint64_t>(monotonic() + offset);
}

bool wants(std::uint16_t call) {
  constexpr std::uint32_t kernel = bit(Kind::kernel), copy = bit(Kind::copy), memset = bit(Kind::memset);
  std::uint32_t kinds = 0;
  switch (call) {
    case wire::Launch::id: kinds = kernel; break;
    case wire::GraphLaunch::id: kinds = kernel | copy | memset; break;
    case wire::Memset::id: kinds = memset; break;
    case wire::MemcpyH2d::id:
    case wire::MemcpyD2h::id:
    case wire::MemcpyD2d::id:
    case wire::Memcpy2dH2d::id:
    case wire::Memcpy2dD2h::id:
    case wire::Memcpy2dD2d::id: kinds = copy; break;
    default: break;
  }
  return recorded.load(std::memory_order_relaxed) & kinds;
}

std::uint64_t stream_of(const CallView& call) {
  Entry unused;
  return fill(unused, call, 0);
}

void published(std::uint64_t seq, const CallView& call, std::uint64_t payload) {
  Pending made;
  made.sent = now();
  made.stream = fill(made.entry, call, payload);
  made.entry.stream = stream_id(made.stream);
  place(made.entry);
  const Thread& t = thread();
  const bool within = t.depth || t.runtime;  // a function that is recorded
  made.entry.correlation = within ? t.correlation : new_correlation();
  if (!within) note_external(made.entry.correlation);
  State& s = state();
  std::lock_guard guard(s.lock);
  if (t.launching != nullptr) describe(made.entry, *t.launching);
  s.pending.emplace(seq, made);
  waiting.store(true, std::memory_order_release);
}

void withdrawn(std::uint64_t seq) {
  State& s = state();
  std::lock_guard guard(s.lock);
  s.pending.erase(seq);
  if (s.pending.empty()) waiting.store(false);
}

void answered(const Answer& answer) {
  if (!waiting.load(std::memory_order_acquire)) return;
  const std::uint64_t came = now();
  State& s = state();
  std::lock_guard guard(s.lock);
  const auto found = s.pending.find(answer.seq);
  if (found == s.pending.end()) return;
  const Pending pending = found->second;
  s.pending.erase(found);
  if (s.pending.empty()) waiting.store(false);
  s.told.notify_all();
  Head head{};
  std::vector<Span> spans;
  if (answer.result != CUDA_SUCCESS) return;  // the call did not run
  if (!spans_of(answer, head, spans)) {
    log_once("times", "the times of call %llu make no sense: it is missing in what a profiler shows",
             static_cast<unsigned long long>(answer.seq));
    return;
  }
  s.clocks[head.clock].tell(static_cast<std::int64_t>(pending.sent) - head.received,
                            static_cast<std::int64_t>(came) - head.answered);
  std::uint64_t place = 0;
  for (const Span& span : spans) {
    Raw raw{pending.entry, head.clock, pending.sent, came};
    if (span.kind != kCall) raw.entry = node_entry(s, pending.entry, span, ++place);
    if (!records(raw.entry.kind)) continue;
    raw.entry.start = static_cast<std::uint64_t>(span.start);
    raw.entry.end = static_cast<std::uint64_t>(span.end);
    keep(s, raw);
  }
}

void Launching::set(const Function* function) { thread().launching = function; }

void CopyingHost::set(bool pinned) { thread().pinned = pinned; }

// ---------------------------------------------------------------- the table

namespace {

std::atomic<std::uint32_t> domains{0};  // in which the tool is called back

void update() {
  const bool called = called_back.load() != nullptr;
  active = recorded.load() || called;
  tell_runtime(records(Kind::runtime) || (called && domains.load() & bit(Domain::runtime)));
}

void enable(std::uint32_t kinds) {
  start_callbacks(Notified::program);
  recorded = kinds;
  update();
}

void settle() {
  State& s = state();
  std::unique_lock guard(s.lock);
  const auto due = [&] {
    return !session().gone && std::any_of(s.pending.begin(), s.pending.end(), [](const auto& item) {
      return all_complete(item.first) || complete_on(item.second.stream, item.first);
    });
  };
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (due() && std::chrono::steady_clock::now() < until) s.told.wait_for(guard, std::chrono::milliseconds(20));
}

std::size_t take(Entry* to, std::size_t most) {
  State& s = state();
  std::lock_guard guard(s.lock);
  const std::size_t count = std::min(most, s.entries.size());
  for (std::size_t i = 0; i < count; ++i) {
    bring_over(s, s.entries.front());
    to[i] = s.entries.front().entry;
    s.entries.pop_front();
  }
  return count;
}

std::size_t dropped() {
  State& s = state();
  std::lock_guard guard(s.lock);
  return std::exchange(s.dropped, 0);
}

bool push(std::uint32_t kind, std::uint64_t id) {
  if (kind >= kExternalKinds) return false;
  thread().external[kind].push_back(id);
  return true;
}

bool pop(std::uint32_t kind, std::uint64_t* id) {
  if (kind >= kExternalKinds || thread().external[kind].empty()) return false;
  auto& ids = thread().external[kind];
  if (id != nullptr) *id = ids.back();
  ids.pop_back();
  return true;
}

void callback(void (*function)(const ApiEvent&), std::uint32_t in) {
  domains = in;
  called_back = function;
  update();
}

bool context_of(void* handle, std::uint32_t* id, std::uint32_t* device) {
  const Context* context = handle ? find(static_cast<CUcontext>(handle)) : top_context();
  if (context == nullptr) return false;
  if (id) *id = static_cast<std::uint32_t>(context->unique_id);
  if (device) *device = static_cast<std::uint32_t>(context->device);
  return true;
}

bool stream_of_handle(void*, void* handle, bool per_thread, std::uint32_t* id) {
  StreamRef stream;
  const auto named = static_cast<CUstream>(handle);
  if (resolve_stream(per_thread && named == nullptr ? CU_STREAM_PER_THREAD : named, stream)) return false;
  *id = stream_id(stream.number);
  return true;
}

}  // namespace

const Table* table() {
  static const Table t{sizeof(Table), kTableVersion, now, enable, settle, take, dropped, push, pop, callback, context_of,
                       stream_of_handle};
  return &t;
}

}  // namespace rgpu::profile
