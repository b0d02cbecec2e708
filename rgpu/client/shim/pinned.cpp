// Pinned host memory (SEMANTICS 6, 7).
//
// cuMemHostAlloc memory lies in the session's pinned range and has a shadow at
// the same address in the worker. Kernels see the shadow. For each range that a
// kernel was given, a *twin* holds what host and shadow last agreed on: bytes
// that the CPU changed since go to the shadow before a launch, bytes that the
// shadow changed since come back when the launch is known to be complete.
// Registered memory (cuMemHostRegister) is only known to be pinned: it has no
// shadow, and so no device pointer.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>

#include "capturing.hpp"
#include "memory.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

constexpr std::size_t BLOCK = 4096;  // of host memory that is uploaded as a whole

struct Upload {
  std::uint64_t seq = 0, context = 0;  // the stream's context, by its number
};

struct Pinned {
  std::uint64_t address = 0, size = 0;
  unsigned flags = 0;
  Context* context = nullptr;
  bool registered = false;
  std::uint64_t id = 0;
  std::mutex lock;                                   // guards what follows
  std::vector<std::uint8_t> twin;                    // empty until a kernel is given the range
  std::map<std::uint64_t, std::uint64_t> writers;    // stream -> last call that may write the shadow
  std::map<std::uint64_t, Upload> uploads;           // stream -> last upload
};

struct Pins {
  std::shared_mutex lock;
  std::map<std::uint64_t, std::shared_ptr<Pinned>> ranges;
  Allocator addresses{kPinnedFirst, kPinnedBase + kPinnedSize - kPinnedFirst, kPinnedSize, kPage, kPage, kPinnedSize};
  std::map<Context*, std::uint64_t> readers;         // streams of our own for reading shadows
  std::uint64_t next_id = 1ull << 40;
  std::atomic<std::size_t> shadows{0}, marked{0};
};

Pins& pins() {
  static auto* p = new Pins;
  return *p;
}

std::shared_ptr<Pinned> range_of(std::uint64_t address) {
  Pins& p = pins();
  std::shared_lock guard(p.lock);
  auto it = p.ranges.upper_bound(address);
  if (it == p.ranges.begin()) return nullptr;
  --it;
  return address - it->first < it->second->size ? it->second : nullptr;
}

bool overlaps(Pins& p, std::uint64_t address, std::uint64_t size) {
  auto it = p.ranges.lower_bound(address + size);
  return it != p.ranges.begin() && (--it, it->first + it->second->size > address);
}

// The pinned ranges with shadows that these addresses point into, each once.
std::vector<std::shared_ptr<Pinned>> shadowed(const std::vector<std::uint64_t>& addresses) {
  std::vector<std::shared_ptr<Pinned>> found;
  for (std::uint64_t address : addresses) {
    if (address < kPinnedBase || address >= kPinnedBase + kPinnedSize) continue;
    auto range = range_of(address);
    if (range && !range->registered && std::find(found.begin(), found.end(), range) == found.end())
      found.push_back(std::move(range));
  }
  std::sort(found.begin(), found.end(), [](auto& a, auto& b) { return a->address < b->address; });  // one lock order
  return found;
}

CUresult upload_run(Pinned& range, const StreamRef& stream, std::uint64_t from, std::uint64_t to) {
  wire::HostShadowWrite call{};
  call.address = range.address + from;
  call.stream = stream.number;
  std::uint64_t seq = 0;
  Payload payload(range.twin.data() + from, to - from);
  if (CUresult r = submit_work(stream, call, payload, &seq); r) return r;
  range.uploads[stream.number] = {seq, stream.context->number};
  return CUDA_SUCCESS;
}

// What the CPU changed since host and shadow agreed goes to the shadow. While a
// kernel may be writing the shadow only changed bytes may go, else whole blocks.
CUresult upload(Pinned& range, const StreamRef& stream) {
  const auto* host = reinterpret_cast<const std::uint8_t*>(range.address);
  if (range.twin.empty()) range.twin.resize(range.size);  // a new shadow holds zeros
  const bool exact = !range.writers.empty();
  std::uint8_t copy[BLOCK];
  std::uint64_t run = range.size;  // start of the run being collected; size: none
  for (std::uint64_t at = 0; at < range.size; at += BLOCK) {
    const std::size_t n = std::min<std::uint64_t>(BLOCK, range.size - at);
    std::memcpy(copy, host + at, n);  // compare and ship the same bytes
    std::uint8_t* twin = range.twin.data() + at;
    const bool changed = std::memcmp(copy, twin, n) != 0;
    if (!changed || exact) {
      if (run < range.size)
        if (CUresult r = upload_run(range, stream, run, at); r) return r;
      run = range.size;
      if (!changed) continue;
      for (std::size_t i = 0; i < n; ++i) {
        if (copy[i] == twin[i]) continue;
        std::size_t end = i;
        for (; end < n && copy[end] != twin[end]; ++end) twin[end] = copy[end];
        if (CUresult r = upload_run(range, stream, at + i, at + end); r) return r;
        i = end;
      }
      continue;
    }
    std::memcpy(twin, copy, n);
    if (run == range.size) run = at;
  }
  return run < range.size ? upload_run(range, stream, run, range.size) : CUDA_SUCCESS;
}

// An upload on another stream that may still be under way must be seen by what follows on this one.
CUresult join_uploads(Pinned& range, const StreamRef& stream) {
  for (auto it = range.uploads.begin(); it != range.uploads.end();) {
    const auto [other, upload] = *it;
    if (other == stream.number) {
      ++it;
      continue;
    }
    if (!complete_on(other, upload.seq)) {
      Section section;
      if (section.status()) return section.status();
      wire::EventCreate create{};
      create.event = next_number();
      create.context = upload.context;  // an event belongs to the device that records it
      create.flags = CU_EVENT_DISABLE_TIMING;
      wire::EventRecord record{};
      record.event = create.event;
      record.stream = other;
      wire::StreamWaitEvent wait{};
      wait.stream = stream.number;
      wait.event = create.event;
      wire::EventDestroy destroy{};
      destroy.event = create.event;
      CUresult r = section.publish(create);
      if (!r) r = section.publish(record);
      if (!r) r = section.publish(wait);
      if (!r) r = section.publish(destroy);
      if (r) return r;
      ++it;  // still needed for a third stream
    } else {
      it = range.uploads.erase(it);
    }
  }
  return CUDA_SUCCESS;
}

// A stream that nothing else is given to: what is read on it waits for nothing.
CUresult reader_of(Context& context, std::uint64_t& number) {
  Section section;  // before the tables' lock, as everywhere
  if (section.status()) return section.status();
  Pins& p = pins();
  std::unique_lock guard(p.lock);
  if (auto it = p.readers.find(&context); it != p.readers.end()) {
    number = it->second;
    return CUDA_SUCCESS;
  }
  wire::StreamCreate call{};
  call.stream = number = next_number();
  call.context = context.number;
  call.flags = CU_STREAM_NON_BLOCKING;
  if (CUresult r = section.publish(call); r) return r;
  p.readers[&context] = number;
  return CUDA_SUCCESS;
}

// Whether a writer of the range is newly known to be complete. Range's lock held.
bool written(Pinned& range) {
  bool finished = false;
  for (auto it = range.writers.begin(); it != range.writers.end();) {
    if (complete_on(it->first, it->second)) {
      finished = true;
      it = range.writers.erase(it);
      --pins().marked;
    } else {
      ++it;
    }
  }
  return finished;
}

// A shadow on its way to us; nobody else touches the range meanwhile.
struct Reading {
  std::shared_ptr<Pinned> range;
  std::unique_lock<std::mutex> held;
  std::vector<std::uint8_t> now;
  Answer answer;
  Waiter waiter;
  std::uint64_t seq = 0;

  CUresult ask() {
    wire::HostShadowRead call{};
    call.address = range->address;
    call.size = range->size;
    if (CUresult r = reader_of(*range->context, call.stream); r) return r;
    now.resize(range->size);
    waiter.answer = &answer;
    waiter.destination = now.data();
    waiter.capacity = now.size();
    Section section(view(call).reserved);
    return section.publish_view(view(call), nullptr, &waiter, &seq);
  }

  // What differs from the twin is what kernels wrote.
  void take() {
    if (collect(wire::HostShadowRead::id, waiter, seq) || answer.payload_size != now.size()) return;
    auto* host = reinterpret_cast<std::uint8_t*>(range->address);
    for (std::uint64_t at = 0; at < range->size; at += BLOCK) {
      const std::size_t n = std::min<std::uint64_t>(BLOCK, range->size - at);
      if (!std::memcmp(now.data() + at, range->twin.data() + at, n)) continue;
      for (std::size_t i = at; i < at + n; ++i) {
        if (now[i] == range->twin[i]) continue;
        host[i] = range->twin[i] = now[i];
      }
    }
  }
};

// Brings the ranges back whose writers are known to be complete: all are asked for before the first is waited for.
void bring_back(const std::vector<std::shared_ptr<Pinned>>& ranges) {
  ReservedSpace space;  // a program that is being told of completion must not wait for room
  std::deque<Reading> readings;
  for (const auto& range : ranges) {
    std::unique_lock guard(range->lock);
    if (!written(*range)) continue;
    Reading& reading = readings.emplace_back();
    reading.range = range;
    reading.held = std::move(guard);
    if (reading.ask()) readings.pop_back();
  }
  for (Reading& reading : readings) reading.take();
}

std::vector<std::shared_ptr<Pinned>> all_ranges() {
  Pins& p = pins();
  std::shared_lock guard(p.lock);
  std::vector<std::shared_ptr<Pinned>> found;
  for (auto& [address, range] : p.ranges)
    if (!range->registered) found.push_back(range);
  return found;
}

CUresult allocate_pinned(void** pp, std::size_t size, unsigned flags) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  if (!pp || !size || (flags & ~7u)) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = unsafe_call(); r) return r;
  auto range = std::make_shared<Pinned>();
  Section section;
  if (section.status()) return section.status();
  Pins& p = pins();
  std::unique_lock guard(p.lock);
  std::vector<Range> map;
  auto address = p.addresses.allocate(size, map);
  if (!address) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::uint64_t whole = (size + kPage - 1) & ~(kPage - 1);
  void* memory = ::mmap(reinterpret_cast<void*>(*address), whole, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  if (memory == MAP_FAILED) {
    p.addresses.free(*address, map);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  wire::HostAllocate call{};
  call.address = range->address = *address;
  call.size = whole;
  call.flags = range->flags = flags;
  range->size = size;
  range->context = context;
  range->id = p.next_id++;
  p.ranges[*address] = range;
  ++p.shadows;
  *pp = memory;
  return section.publish(call);
}

// Nothing uses the range any more. Takes it out of the tables and gives its memory back.
CUresult drop(const std::shared_ptr<Pinned>& range) {
  Pins& p = pins();
  if (range->registered) {
    std::unique_lock guard(p.lock);
    p.ranges.erase(range->address);
    return CUDA_SUCCESS;
  }
  Section section;
  std::unique_lock guard(p.lock);
  if (!p.ranges.erase(range->address)) return CUDA_ERROR_INVALID_VALUE;
  --p.shadows;
  p.marked -= range->writers.size();
  range->writers.clear();
  std::vector<Range> unmap;
  p.addresses.free(range->address, unmap);
  const std::uint64_t whole = (range->size + kPage - 1) & ~(kPage - 1);
  ::mmap(reinterpret_cast<void*>(range->address), whole, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  wire::HostFree call{};
  call.address = range->address;
  return section.status() ? section.status() : section.publish(call);
}

}  // namespace

Place pinned_place(std::uint64_t address) {
  auto range = range_of(address);
  if (!range) return {};
  Place place;
  place.kind = range->registered ? Place::Kind::registered : Place::Kind::pinned;
  place.base = range->address;
  place.size = range->size;
  place.device = 0;
  place.context = range->context;
  place.flags = range->flags;
  place.id = range->id;
  return place;
}

bool any_pinned() { return pins().shadows.load(std::memory_order_relaxed) != 0; }

CUresult upload_shadows(const StreamRef& stream, const std::vector<std::uint64_t>& addresses) {
  wait_for_space(session(), false);  // here, where no range is locked
  ReservedSpace space;
  for (auto& range : shadowed(addresses)) {
    std::lock_guard guard(range->lock);
    if (CUresult r = upload(*range, stream); r) return r;
    if (CUresult r = join_uploads(*range, stream); r) return r;
  }
  return CUDA_SUCCESS;
}

void mark_shadows(const StreamRef& stream, const std::vector<std::uint64_t>& addresses, std::uint64_t seq) {
  for (auto& range : shadowed(addresses)) {
    std::lock_guard guard(range->lock);
    auto [it, fresh] = range->writers.try_emplace(stream.number, seq);
    it->second = std::max(it->second, seq);
    if (fresh) ++pins().marked;
  }
}

void bring_back_shadows() {
  if (pins().marked.load(std::memory_order_relaxed)) bring_back(all_ranges());
}

CUresult settle_source(std::uint64_t address, std::uint64_t) {
  wait_host_functions();
  auto range = range_of(address);
  if (!range || range->registered) return CUDA_SUCCESS;
  std::map<std::uint64_t, std::uint64_t> writers;
  {
    std::lock_guard guard(range->lock);
    writers = range->writers;
  }
  for (auto [stream, seq] : writers) {
    wire::StreamSynchronize call{};
    call.stream = stream;
    Answer answer;
    Payload none;
    const std::uint64_t waited = stream;
    if (CUresult r = await_view(view(call), none, answer, nullptr, 0, [&](std::uint64_t seq, bool answered) {
          if (answered) learned(waited, seq);
        }); r)
      return r;
  }
  // Only what is about to be read: other ranges come back when the program learns of a completion.
  if (!writers.empty()) bring_back({range});
  return CUDA_SUCCESS;
}

void release_pinned(Context& context) {
  for (auto& range : all_ranges())
    if (range->context == &context) drop(range);
  Pins& p = pins();
  std::unique_lock guard(p.lock);
  std::erase_if(p.ranges, [&](auto& entry) { return entry.second->registered && entry.second->context == &context; });
  auto it = p.readers.find(&context);
  if (it == p.readers.end()) return;
  wire::StreamDestroy call{};
  call.stream = it->second;
  p.readers.erase(it);
  guard.unlock();
  submit(call);
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuMemHostAlloc(void** pp, size_t bytesize, unsigned int Flags) { return allocate_pinned(pp, bytesize, Flags); }

CUresult cuMemAllocHost_v2(void** pp, size_t bytesize) { return allocate_pinned(pp, bytesize, 0); }

CUresult cuMemFreeHost(void* p) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  if (!p) return CUDA_SUCCESS;
  if (CUresult r = unsafe_call(); r) return r;
  auto range = range_of(reinterpret_cast<std::uint64_t>(p));
  if (!range || range->registered || range->address != reinterpret_cast<std::uint64_t>(p)) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = wait_for_device_number(kEveryDevice); r) return r;
  return drop(range);
}

CUresult cuMemHostRegister_v2(void* p, size_t bytesize, unsigned int Flags) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  const auto address = reinterpret_cast<std::uint64_t>(p);
  if (!p || !bytesize || (Flags & ~15u) || address + bytesize < address) return CUDA_ERROR_INVALID_VALUE;
  if (Flags & (CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY)) {
    log_once("register flags", "cuMemHostRegister: I/O memory and read-only memory are not supported");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (place_of(address).kind == Place::Kind::invalid || place_of(address).kind == Place::Kind::device)
    return CUDA_ERROR_INVALID_VALUE;
  Pins& pinned = pins();
  std::unique_lock guard(pinned.lock);
  if (overlaps(pinned, address, bytesize)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  auto range = std::make_shared<Pinned>();
  range->address = address;
  range->size = bytesize;
  range->flags = Flags;
  range->context = context;
  range->registered = true;
  range->id = pinned.next_id++;
  pinned.ranges[address] = range;
  return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void* p) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  auto range = range_of(reinterpret_cast<std::uint64_t>(p));
  if (!range || !range->registered || range->address != reinterpret_cast<std::uint64_t>(p))
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  return drop(range);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* pdptr, void* p, unsigned int Flags) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  auto range = range_of(reinterpret_cast<std::uint64_t>(p));
  if (!pdptr || Flags || !range) return CUDA_ERROR_INVALID_VALUE;
  if (range->registered) {
    log_once("registered device pointer",
             "memory pinned by cuMemHostRegister has no device pointer here: use cuMemHostAlloc for mapped memory");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  *pdptr = reinterpret_cast<std::uint64_t>(p);
  return CUDA_SUCCESS;
}

CUresult cuMemHostGetFlags(unsigned int* pFlags, void* p) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  auto range = range_of(reinterpret_cast<std::uint64_t>(p));
  if (!pFlags || !range) return CUDA_ERROR_INVALID_VALUE;
  *pFlags = range->flags | (range->registered ? 0 : CU_MEMHOSTALLOC_DEVICEMAP);
  return CUDA_SUCCESS;
}

}  // extern "C"
