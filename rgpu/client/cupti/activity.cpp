// The activity API: which kinds are recorded, and records put into the program's buffers.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cupti.hpp"

using namespace rgpu;
using namespace rgpu::cupti;

namespace {

using Requested = void (*)(std::uint8_t** buffer, std::size_t* size, std::size_t* most);
using Completed = void (*)(void* context, std::uint32_t stream, std::uint8_t* buffer, std::size_t size, std::size_t valid);
using Timestamp = std::uint64_t (*)();

constexpr std::uint8_t kUnset = 0xff;
constexpr std::uint64_t kLeast = 20'000'000;  // ns between two readings from which the rate of a clock is taken

// A buffer of the program's that is not full. Profilers take a buffer handed out as the sign that there are records to
// flush: Kineto flushes nothing while none of its buffers is handed out. NVIDIA's library requests a buffer at the
// first record.
struct Buffer {
  std::uint8_t* at = nullptr;
  std::size_t size = 0, most = 0, used = 0, count = 0;
};

struct State {
  std::mutex lock;  // guards what is enabled and the clock
  std::array<bool, kKindCount> enabled{};
  Timestamp timestamp = nullptr;
  std::uint64_t first_ours = 0, first_theirs = 0;
  double rate = 1;
  std::mutex flushing;  // one flush at a time; the program's functions are called under it
  Requested requested = nullptr;
  Completed completed = nullptr;
  Buffer open;
};

State& state() {
  static auto* s = new State;
  return *s;
}

std::uint32_t kinds(const State& s) {
  using profile::Kind;
  std::uint32_t wanted = 0;
  const auto add = [&](std::uint32_t kind, Kind recorded) {
    if (s.enabled[kind]) wanted |= profile::bit(recorded);
  };
  add(kKernel, Kind::kernel);
  add(kConcurrentKernel, Kind::kernel);
  add(kMemcpy, Kind::copy);
  add(kMemset, Kind::memset);
  add(kDriver, Kind::driver);
  add(kRuntime, Kind::runtime);
  add(kSynchronization, Kind::synchronisation);
  add(kExternalCorrelation, Kind::external);
  return wanted;
}

// Kinds that may be enabled. Overheads are not recorded separately: such kinds are accepted so that a profiler that
// enables every kind it supports continues.
bool known(std::uint32_t kind) {
  return record_size(kind) != 0 || kind == kOverhead || kind == kMemcpy2 || kind == kCudaEvent;
}

// Requests a buffer if none is handed out; false where the program provides none. `flushing` held.
bool open_buffer(State& s) {
  if (s.open.at != nullptr || s.requested == nullptr) return s.open.at != nullptr;
  Buffer b;
  s.requested(&b.at, &b.size, &b.most);
  s.open = b;
  return b.at != nullptr;
}

// Returns the buffer, with the records in it, to the program. `flushing` held.
void close_buffer(State& s) {
  const Buffer b = std::exchange(s.open, {});
  if (b.at != nullptr) s.completed(nullptr, 0, b.at, b.size, b.used);
}

int enable(std::uint32_t kind, bool on) {
  if (kind == 0 || kind >= kKindCount) return failed(kInvalidKind);
  if (!known(kind)) return failed(kNotSupported);
  const profile::Table* table = driver();
  if (table == nullptr) return failed(kNotInitialized);
  State& s = state();
  {
    std::lock_guard guard(s.lock);
    s.enabled[kind] = on;
    table->enable(kinds(s));
  }
  if (on) {
    std::lock_guard one(s.flushing);
    open_buffer(s);
  }
  return kSuccess;
}

// Recomputes the rate of the program's clock: from the first reading of both clocks to this one.
void compare_clocks(State& s) {
  std::lock_guard guard(s.lock);
  if (s.timestamp == nullptr) return;
  if (const std::uint64_t since = driver()->now() - s.first_ours; since < kLeast)
    ::usleep(static_cast<useconds_t>((kLeast - since) / 1000));
  const std::uint64_t before = driver()->now(), theirs = s.timestamp(), after = driver()->now();
  s.rate = static_cast<double>(theirs - s.first_theirs) / static_cast<double>((before + after) / 2 - s.first_ours);
}

template <class Record>
void put(std::vector<std::uint8_t>& to, const Record& record) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(&record);
  to.insert(to.end(), bytes, bytes + sizeof record);
}

void write(std::vector<std::uint8_t>& to, const profile::Entry& e, bool concurrent) {
  const std::uint64_t start = program_time(e.start), end = program_time(e.end);
  switch (e.kind) {
    case profile::Kind::kernel: {
      KernelRecord r{};
      r.kind = concurrent ? kConcurrentKernel : kKernel;
      r.registers = static_cast<std::uint16_t>(e.registers);
      r.start = start, r.end = end, r.completed = end;
      r.device = e.device, r.context = e.context, r.stream = e.stream;
      for (int i = 0; i < 3; ++i) r.grid[i] = static_cast<int>(e.grid[i]), r.block[i] = static_cast<int>(e.block[i]);
      r.static_shared = static_cast<int>(e.static_shared), r.dynamic_shared = static_cast<int>(e.dynamic_shared);
      r.local_per_thread = e.local;
      r.correlation = e.correlation, r.grid_id = e.correlation;
      r.name = e.name;
      r.launch_type = e.cooperative ? 1 : 0;
      r.shared_executed = e.static_shared + e.dynamic_shared;
      r.graph = e.graph, r.graph_node = e.node;
      r.channel_type = 1;
      put(to, r);
      break;
    }
    case profile::Kind::copy: {
      MemcpyRecord r{};
      r.kind = kMemcpy;
      r.copy_kind = e.copy, r.source_kind = e.source, r.destination_kind = e.destination, r.flags = e.asynchronous;
      r.bytes = e.bytes, r.start = start, r.end = end;
      r.device = e.device, r.context = e.context, r.stream = e.stream;
      r.correlation = r.runtime_correlation = e.correlation;
      r.graph = e.graph, r.graph_node = e.node;
      r.channel_type = 2;
      r.count = 1;
      put(to, r);
      break;
    }
    case profile::Kind::memset: {
      MemsetRecord r{};
      r.kind = kMemset;
      r.value = e.value, r.bytes = e.bytes, r.start = start, r.end = end;
      r.device = e.device, r.context = e.context, r.stream = e.stream, r.correlation = e.correlation;
      r.memory_kind = profile::kDeviceMemory;
      r.graph = e.graph, r.graph_node = e.node;
      r.channel_type = 1;
      put(to, r);
      break;
    }
    case profile::Kind::driver:
    case profile::Kind::runtime: {
      static const auto process = static_cast<std::uint32_t>(::getpid());
      put(to, ApiRecord{e.kind == profile::Kind::driver ? kDriver : kRuntime, e.cbid, start, end, process, e.thread, e.correlation, e.result});
      break;
    }
    case profile::Kind::synchronisation:
      put(to, SynchronizationRecord{kSynchronization, e.cbid, start, end, e.correlation, e.context,
                                    e.stream ? e.stream : 0xffffffffu, 0, 0, e.result, 0});
      break;
    case profile::Kind::external:
      put(to, ExternalRecord{kExternalCorrelation, e.external_kind, e.external, e.correlation, 0});
      break;
  }
}

// A long copy is sent to the worker in pieces: the pieces of one call become one record. Returns how many entries are
// left.
std::size_t join_pieces(std::vector<profile::Entry>& entries, std::size_t count) {
  std::unordered_map<std::uint32_t, std::size_t> first;  // by correlation
  std::size_t kept = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const profile::Entry e = entries[i];
    if (e.kind == profile::Kind::copy && e.node == 0) {
      const auto [found, fresh] = first.try_emplace(e.correlation, kept);
      if (profile::Entry& whole = entries[found->second];
          !fresh && whole.copy == e.copy && whole.stream == e.stream && whole.source == e.source && whole.destination == e.destination) {
        whole.bytes += e.bytes;
        whole.start = std::min(whole.start, e.start), whole.end = std::max(whole.end, e.end);
        continue;
      }
    }
    entries[kept++] = e;
  }
  return kept;
}

// Copies records into buffers of the program's; returns how many bytes were copied. The caller keeps the rest.
std::size_t hand_over(State& s, const std::vector<std::uint8_t>& records) {
  std::size_t at = 0;
  while (at < records.size() && open_buffer(s)) {
    Buffer& b = s.open;
    while (at < records.size() && (b.most == 0 || b.count < b.most)) {
      const std::size_t next = record_size(*reinterpret_cast<const std::uint32_t*>(records.data() + at));
      if (b.used + next > b.size) break;
      std::memcpy(b.at + b.used, records.data() + at, next);
      b.used += next, at += next, ++b.count;
    }
    if (at == records.size()) break;
    const bool useless = b.count == 0;  // a buffer that holds no record is too small: another would not help
    close_buffer(s);
    if (useless) break;
  }
  return at;
}

int flush() {
  const profile::Table* table = driver();
  if (table == nullptr) return failed(kNotInitialized);
  State& s = state();
  std::lock_guard one(s.flushing);
  if (s.requested == nullptr) return failed(kInvalidOperation);
  table->settle();
  compare_clocks(s);
  static std::vector<std::uint8_t> left;  // from the flush before
  bool concurrent;
  {
    std::lock_guard guard(s.lock);
    concurrent = s.enabled[kConcurrentKernel] || !s.enabled[kKernel];
  }
  std::vector<profile::Entry> entries(4096);
  std::vector<std::uint8_t> records;
  records.swap(left);
  while (const std::size_t taken = table->take(entries.data(), entries.size())) {
    const std::size_t count = join_pieces(entries, taken);
    for (std::size_t i = 0; i < count; ++i) write(records, entries[i], concurrent);
    const std::size_t given = hand_over(s, records);
    records.erase(records.begin(), records.begin() + static_cast<std::ptrdiff_t>(given));
    if (!records.empty()) break;
  }
  if (!records.empty()) records.erase(records.begin(), records.begin() + static_cast<std::ptrdiff_t>(hand_over(s, records)));
  left = std::move(records);
  close_buffer(s);
  bool more;
  {
    std::lock_guard guard(s.lock);
    more = std::any_of(s.enabled.begin(), s.enabled.end(), [](bool on) { return on; });
  }
  if (more) open_buffer(s);
  return left.empty() ? kSuccess : failed(kOutOfMemory);
}

}  // namespace

std::uint64_t rgpu::cupti::program_time(std::uint64_t time) {
  State& s = state();
  if (s.timestamp == nullptr || time == 0) return time;
  const auto since = static_cast<double>(static_cast<std::int64_t>(time - s.first_ours));
  return s.first_theirs + static_cast<std::uint64_t>(static_cast<std::int64_t>(since * s.rate));
}

void rgpu::cupti::forget_activities() {
  State& s = state();
  {
    std::lock_guard guard(s.lock);
    s.enabled.fill(false);
    if (const profile::Table* table = driver()) table->enable(0);
  }
  std::lock_guard one(s.flushing);
  close_buffer(s);
}

CUPTI_API cuptiActivityRegisterCallbacks(Requested requested, Completed completed) {
  if (requested == nullptr || completed == nullptr) return failed(kInvalidParameter);
  State& s = state();
  std::lock_guard one(s.flushing);
  s.requested = requested, s.completed = completed;
  return kSuccess;
}

CUPTI_API cuptiActivityRegisterTimestampCallback(Timestamp function) {
  const profile::Table* table = driver();
  if (table == nullptr) return failed(kNotInitialized);
  State& s = state();
  std::lock_guard guard(s.lock);
  s.timestamp = function;
  if (function == nullptr) return kSuccess;
  const std::uint64_t before = table->now();
  s.first_theirs = function();
  s.first_ours = (before + table->now()) / 2;
  return kSuccess;
}

CUPTI_API cuptiActivityEnable(std::uint32_t kind) { return enable(kind, true); }
CUPTI_API cuptiActivityDisable(std::uint32_t kind) { return enable(kind, false); }
CUPTI_API cuptiActivityEnableAndDump(std::uint32_t kind) { return enable(kind, true); }
// Records are not separated by context: any context of the program enables all of them.
CUPTI_API cuptiActivityEnableContext(void* context, std::uint32_t kind) {
  if (context == nullptr) return failed(kInvalidContext);
  return enable(kind, true);
}
CUPTI_API cuptiActivityDisableContext(void* context, std::uint32_t kind) {
  if (context == nullptr) return failed(kInvalidContext);
  return enable(kind, false);
}

CUPTI_API cuptiActivityFlushAll(std::uint32_t) { return flush(); }
CUPTI_API cuptiActivityFlush(void*, std::uint32_t, std::uint32_t) { return flush(); }

CUPTI_API cuptiActivityGetNextRecord(std::uint8_t* buffer, std::size_t valid, std::uint8_t** record) {
  if (record == nullptr || (buffer == nullptr && valid)) return failed(kInvalidParameter);
  if (valid == 0) return kMaxLimitReached;
  std::uint8_t* next = buffer;
  if (*record != nullptr) {
    const std::size_t size = record_size(*reinterpret_cast<const std::uint32_t*>(*record));
    if (*record < buffer || *record >= buffer + valid || size == 0) return failed(kInvalidParameter);
    next = *record + size;
  }
  if (next >= buffer + valid) return kMaxLimitReached;
  const std::size_t size = record_size(*reinterpret_cast<const std::uint32_t*>(next));
  if (size == 0) return failed(kInvalidKind);
  if (next + size > buffer + valid) return kMaxLimitReached;
  *record = next;
  return kSuccess;
}

CUPTI_API cuptiActivityGetNumDroppedRecords(void*, std::uint32_t, std::size_t* count) {
  if (count == nullptr) return failed(kInvalidParameter);
  const profile::Table* table = driver();
  *count = table ? table->dropped() : 0;
  return kSuccess;
}

CUPTI_API cuptiActivityPushExternalCorrelationId(std::uint32_t kind, std::uint64_t id) {
  const profile::Table* table = driver();
  if (table == nullptr) return failed(kNotInitialized);
  return table->push(kind, id) ? kSuccess : failed(kInvalidParameter);
}
CUPTI_API cuptiActivityPopExternalCorrelationId(std::uint32_t kind, std::uint64_t* id) {
  const profile::Table* table = driver();
  if (table == nullptr) return failed(kNotInitialized);
  if (kind == 0 || kind >= 8) return failed(kInvalidParameter);
  return table->pop(kind, id) ? kSuccess : failed(kQueueEmpty);
}

// Buffers here are the program's alone, of the size that it chooses: these attributes concern buffers on a GPU.
namespace {
std::array<std::size_t, 16> attributes{8u << 20, 8u << 20, 250, 64 * 1024, 100, 0, 3, 2, 0, 0, 0};
}
CUPTI_API cuptiActivityGetAttribute(std::uint32_t attribute, std::size_t* size, void* value) {
  if (size == nullptr || value == nullptr || attribute >= attributes.size()) return failed(kInvalidParameter);
  const std::size_t most = attribute == 5 || attribute == 8 || attribute == 9 ? 1 : sizeof(std::size_t);
  if (*size < most) return failed(kParameterSizeNotSufficient);
  std::memcpy(value, &attributes[attribute], *size = most);
  return kSuccess;
}
CUPTI_API cuptiActivitySetAttribute(std::uint32_t attribute, std::size_t* size, const void* value) {
  if (size == nullptr || value == nullptr || attribute >= attributes.size()) return failed(kInvalidParameter);
  attributes[attribute] = 0;
  std::memcpy(&attributes[attribute], value, std::min(*size, sizeof(std::size_t)));
  return kSuccess;
}

CUPTI_API cuptiActivityFlushPeriod(std::uint32_t) { return kSuccess; }  // records wait for a flush without being lost
CUPTI_API cuptiActivityEnableLatencyTimestamps(std::uint8_t on) { return on ? failed(kNotSupported) : 0; }
CUPTI_API cuptiActivityEnableLaunchAttributes(std::uint8_t on) { return on ? failed(kNotSupported) : 0; }
CUPTI_API cuptiActivityEnableHWTrace(std::uint8_t on) { return on ? failed(kNotSupported) : 0; }
CUPTI_API cuptiActivityEnableAllSyncRecords(std::uint8_t) { return kSuccess; }
CUPTI_API cuptiActivityEnableDriverApi(std::uint32_t, std::uint8_t) { return enable(kDriver, true); }
CUPTI_API cuptiActivityEnableRuntimeApi(std::uint32_t, std::uint8_t) { return enable(kRuntime, true); }
