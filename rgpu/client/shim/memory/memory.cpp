// Device memory: allocation against the quota without a round trip, frees (SEMANTICS 2), and the lookup of pointers.
#include "memory.hpp"
#include "profile.hpp"

#include <atomic>
#include <cstdio>
#include <iterator>
#include <string>

#include "array.hpp"
#include "capturing.hpp"
#include "device.hpp"
#include "ipc.hpp"
#include "managed.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

struct Allocated {
  std::uint64_t size = 0;
  Context* context = nullptr;
  int device = 0;       // the session's number
  std::uint64_t id = 0;
  bool hidden = false;  // being freed: no pointer into it is valid
  bool managed = false;
  bool pooled = false;
};

struct Variable {
  std::uint64_t size = 0;
  Context* context = nullptr;
  std::uint64_t module = 0;
  bool managed = false;
};

// Lock order: the journal's section first, then this.
struct Memory {
  std::shared_mutex lock;
  std::vector<std::unique_ptr<Allocator>> devices;
  std::map<std::uint64_t, Allocated> allocated;
  std::map<std::uint64_t, Variable> variables;
  std::uint64_t next_id = 1;
};

Memory& memory() {
  static auto* m = new Memory;
  return *m;
}

// Requires the lock, held exclusively.
Allocator* allocator_of(Memory& m, int device) {
  if (m.devices.empty()) {
    for (auto& facts : facts().devices)
      m.devices.push_back(std::make_unique<Allocator>(facts.range_base + member_number() * part_of(kReserveOffset, member_count()),
                                                      std::min(facts.range_size, part_of(kReserveOffset, member_count())),
                                                      facts_quota(facts), kGranule, kAlignment));
  }
  return device < 0 || static_cast<std::size_t>(device) >= m.devices.size() ? nullptr : m.devices[device].get();
}

// Reports the bytes in use to the agent, as cuMemGetInfo counts them. Lock held; after every change of the allocator.
void tell_used(int device, const Allocator& allocator) {
  const std::uint64_t used = allocator.quota() - allocator.available();
  report_used(device, used);
  share_used(device, used);
}

// Whether the memory just taken is within the run's quota; it is reported to the run's other processes before that is
// checked.
bool within_run(int device, const Allocator& allocator) {
  tell_used(device, allocator);
  return used_by_run(device, allocator.quota() - allocator.available()) <= allocator.quota();
}

std::string bytes_text(std::uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  double value = static_cast<double>(bytes);
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit ? "%.1f %s" : "%.0f %s", value, kUnits[unit]);
  return text;
}

// Logs the reason of CUDA_ERROR_OUT_OF_MEMORY, once for each device: on a GPU of one's own it would have another
// reason.
void say_out_of_quota(int device, std::uint64_t asked) {
  std::uint64_t quota = 0, used = 0, own = 0;
  {
    Memory& m = memory();
    std::unique_lock guard(m.lock);
    Allocator* allocator = allocator_of(m, device);
    if (!allocator) return;
    quota = allocator->quota();
    own = quota - allocator->available();
    used = used_by_run(device, own);
  }
  const std::uint64_t whole = facts().devices[static_cast<std::size_t>(device)].total_memory;
  const bool everything = whole && quota + kGranule > whole;  // in whole granules
  log_once("quota " + std::to_string(device),
           "out of memory: %s were asked for, and %s of the session's quota of %s are in use%s; %s",
           bytes_text(asked).c_str(), bytes_text(used).c_str(), bytes_text(quota).c_str(),
           used > own ? " by the processes of this run" : "",
           everything ? "that is all that the device has: --gpu-model asks for another model"
                      : "rgpu run --memory SIZE asks for more");
}

template <class Map>
auto holding(Map& map, std::uint64_t address) {
  auto it = map.upper_bound(address);
  if (it == map.begin()) return map.end();
  --it;
  return address - it->first < it->second.size ? it : map.end();
}

// Frees an allocation's address and unmaps what is empty. Section and lock held.
CUresult give_back(Section& section, Memory& m, std::map<std::uint64_t, Allocated>::iterator it) {
  std::vector<Range> unmap;
  m.devices[it->second.device]->free(it->first, unmap);
  tell_used(it->second.device, *m.devices[it->second.device]);
  m.allocated.erase(it);
  for (const Range& range : unmap) {
    wire::MemoryUnmap call{};
    call.address = range.address;
    call.size = range.size;
    if (CUresult r = section.publish(call); r) return r;
  }
  return CUDA_SUCCESS;
}

CUresult free_now(Section& section, std::uint64_t address) {
  Memory& m = memory();
  std::unique_lock guard(m.lock);
  auto it = m.allocated.find(address);
  if (it == m.allocated.end()) return CUDA_ERROR_INVALID_VALUE;
  wire::MemoryFree call{};
  call.address = address;
  if (CUresult r = section.publish(call); r) return r;
  return give_back(section, m, it);
}

}  // namespace

std::uint64_t facts_quota(const DeviceFacts& device) {
  const std::uint64_t quota = facts().quota ? facts().quota : device.total_memory;
  return device.total_memory ? std::min(quota, device.total_memory) : quota;
}

bool charge_quota(int device, std::uint64_t size) {
  do {
    Memory& m = memory();
    std::unique_lock guard(m.lock);
    Allocator* allocator = allocator_of(m, device);
    if (allocator && allocator->charge(size)) {
      if (within_run(device, *allocator)) return true;
      allocator->refund(size);
      tell_used(device, *allocator);
    }
  } while (reclaim_deferred(device));
  say_out_of_quota(device, size);
  return false;
}

void refund_quota(int device, std::uint64_t size) {
  Memory& m = memory();
  std::unique_lock guard(m.lock);
  if (Allocator* allocator = allocator_of(m, device)) {
    allocator->refund(size);
    tell_used(device, *allocator);
  }
}

Place place_of(std::uint64_t address) {
  Place place;
  Memory& m = memory();
  {
    std::shared_lock guard(m.lock);
    if (auto it = holding(m.allocated, address); it != m.allocated.end() && !it->second.hidden) {
      const Allocated& a = it->second;
      return {Place::Kind::device, it->first, a.size, a.device, a.context, 0, a.id, a.managed, 0, 0,
              !a.managed && !a.pooled};
    }
    if (auto it = holding(m.variables, address); it != m.variables.end()) {
      Context* context = it->second.context;
      return {Place::Kind::device, it->first, it->second.size, context ? session_device(context->device) : 0, context, 0, 0,
              it->second.managed};
    }
  }
  if (place = imported_place(address); place.kind != Place::Kind::host) return place;
  if (place = virtual_place(address); place.kind != Place::Kind::host) return place;
  if (place = pinned_place(address); place.kind != Place::Kind::host) return place;
  const bool pinned = of_own_pinned_range(address);  // another member's pinned memory is any memory of the program here
  if (device_of(address) != kEveryDevice || pinned) place.kind = Place::Kind::invalid;
  return place;
}

int device_of(std::uint64_t address) {
  const auto& devices = facts().devices;
  for (std::size_t d = 0; d < devices.size(); ++d)
    if (address >= devices[d].range_base && address - devices[d].range_base < devices[d].range_size)
      return static_cast<int>(d);
  return kEveryDevice;
}

CUresult wait_for_device(const Context& context) {
  send_polled_words();
  wire::ContextSynchronize call{};
  call.context = context.number;
  Answer answer;
  Payload none;
  const int device = session_device(context.device);
  return await_view(view(call), none, answer, nullptr, 0, [&](std::uint64_t seq, bool answered) {
    if (answered) learned_on(device, seq);
  });
}

CUresult wait_for_device_number(int device, bool told) {
  std::map<int, Context*> found;
  for_each_object(Kind::context, [&](Object* object) {
    auto* context = static_cast<Context*>(object);
    if (context->alive.load(std::memory_order_acquire)) found[session_device(context->device)] = context;
  });
  for (auto [number, context] : found)
    if ((device == kEveryDevice || device == number) && (told || !idle_on(number)))
      if (CUresult r = wait_for_device(*context); r) return r;
  return CUDA_SUCCESS;
}

CUresult check_device(std::uint64_t address, std::uint64_t n, Place* place) {
  const Place found = place_of(address);
  if (place) *place = found;
  const bool ours = found.kind == Place::Kind::device || found.kind == Place::Kind::pinned;
  return ours && found.holds(address, n) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult check_device_rows(std::uint64_t address, std::uint64_t pitch, std::uint64_t width, std::uint64_t height,
                           Place* place) {
  if (!width || !height) return CUDA_SUCCESS;
  std::uint64_t span;
  if (__builtin_mul_overflow(pitch, height - 1, &span) || __builtin_add_overflow(span, width, &span))
    return CUDA_ERROR_INVALID_VALUE;
  return check_device(address, span, place);
}

CUresult allocate_device(Context& context, std::uint64_t size, std::uint64_t& address, std::uint64_t page, bool pooled) {
  Memory& m = memory();
  const int device = session_device(context.device);
  for (;;) {
    {
      Section section;
      if (section.status()) return section.status();
      std::unique_lock guard(m.lock);
      Allocator* allocator = allocator_of(m, device);
      if (!allocator) return CUDA_ERROR_INVALID_DEVICE;
      std::vector<Range> map;
      auto found = allocator->allocate(size, map, page);
      if (found && !within_run(device, *allocator)) {  // nothing was sent yet
        std::vector<Range> unmap;
        allocator->free(*found, unmap);
        tell_used(device, *allocator);
        found.reset();
      }
      if (found) {
        for (const Range& range : map) {
          wire::MemoryMap call{};
          call.address = range.address;
          call.size = range.size;
          call.device = device;
          if (CUresult r = section.publish(call); r) return r;
        }
        wire::MemoryAllocate call{};
        call.address = address = *found;
        call.size = size;
        m.allocated[*found] = {size, &context, device, m.next_id++, false, page != 0, pooled};
        return section.publish(call);
      }
    }
    if (!reclaim_deferred(device)) break;
  }
  say_out_of_quota(device, size);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

bool hide_device(std::uint64_t address) {
  Memory& m = memory();
  {
    std::unique_lock guard(m.lock);
    auto it = m.allocated.find(address);
    if (it == m.allocated.end() || it->second.hidden) return false;
    it->second.hidden = true;
  }
  forget_managed(address);
  return true;
}

CUresult free_hidden(std::uint64_t address) {
  Section section;
  return section.status() ? section.status() : free_now(section, address);
}

CUresult free_device(std::uint64_t address) {
  if (!hide_device(address)) return CUDA_ERROR_INVALID_VALUE;
  bool done = false;
  {
    Section section;
    if (section.status()) return section.status();
    // A handle opens nothing once the free has returned, in whatever order requests reach the server.
    if (idle_on(device_of(address)) && !exported_memory(address)) {
      if (CUresult r = free_now(section, address); r) return r;
      done = true;
    }
  }
  if (done) {  // a driver would have waited: what kernels wrote into mapped memory is there
    bring_back_host_memory();
    return CUDA_SUCCESS;
  }
  wire::MemoryFreeWait call{};
  call.address = address;
  Answer answer;
  Payload none;
  CUresult r = await_view(view(call), none, answer, nullptr, 0, [&](std::uint64_t seq, bool answered) {
    if (answered) learned_on(device_of(address), seq);
  });
  if (r) return r;
  Section section;
  if (section.status()) return section.status();
  Memory& m = memory();
  std::unique_lock guard(m.lock);
  auto it = m.allocated.find(address);
  return it == m.allocated.end() ? CUDA_SUCCESS : give_back(section, m, it);
}

void track_globals(const Module& module) {
  Memory& m = memory();
  std::unique_lock guard(m.lock);
  for (const Global& global : module.globals)
    if (global.size) m.variables[global.address] = {global.size, module.context, module.number, global.managed};
}

void untrack_globals(const Module& module) {
  Memory& m = memory();
  std::unique_lock guard(m.lock);
  std::erase_if(m.variables, [&](auto& entry) { return entry.second.module == module.number; });
}

CUresult release_context_objects(Context& context) {
  CUresult result = require() ? CUDA_SUCCESS : wait_for_device(context);
  reclaim_deferred(session_device(context.device));
  release_imports(context);
  release_textures(context);
  release_arrays(context);
  Memory& m = memory();
  std::vector<std::uint64_t> left;
  {
    std::unique_lock guard(m.lock);
    for (auto& [address, a] : m.allocated) {
      if (a.context != &context || a.hidden) continue;
      a.hidden = true;
      left.push_back(address);
    }
  }
  release_managed(context);
  for (std::uint64_t address : left) free_hidden(address);
  release_pinned(context);
  for_each_object(Kind::event, [&](Object* object) {
    auto* event = static_cast<Event*>(object);
    if (event->context != &context || !retire(event)) return;
    if (event->imported) {
      destroy_imported(*event);
      return;
    }
    wire::EventDestroy call{};
    call.event = event->number;
    submit(call);
  });
  for_each_object(Kind::stream, [&](Object* object) {
    auto* stream = static_cast<Stream*>(object);
    if (stream->context != &context || !retire(stream)) return;
    wire::StreamDestroy call{};
    call.stream = stream->number;
    submit(call);
  });
  return result;
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuMemAlloc_v2(CUdeviceptr* dptr, size_t bytesize) {
  RGPU_PROFILED(243, "cuMemAlloc_v2", dptr, bytesize);
  Context* context = nullptr;
  if (CUresult r = current(context); r) return api_.leave(r);
  if (!dptr || !bytesize) return api_.leave(CUDA_ERROR_INVALID_VALUE);
  if (CUresult r = unsafe_call(); r) return api_.leave(r);
  std::uint64_t address = 0;
  if (CUresult r = allocate_device(*context, bytesize, address); r) return api_.leave(r);
  *dptr = address;
  return api_.leave(CUDA_SUCCESS);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr* dptr, size_t* pPitch, size_t WidthInBytes, size_t Height,
                            unsigned int ElementSizeBytes) {
  RGPU_PROFILED(244, "cuMemAllocPitch_v2", dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
  Context* context = nullptr;
  if (CUresult r = current(context); r) return api_.leave(r);
  if (!dptr || !pPitch || !WidthInBytes || !Height) return api_.leave(CUDA_ERROR_INVALID_VALUE);
  if (CUresult r = unsafe_call(); r) return api_.leave(r);
  if (ElementSizeBytes != 4 && ElementSizeBytes != 8 && ElementSizeBytes != 16) return api_.leave(CUDA_ERROR_INVALID_VALUE);
  std::size_t pitch, size;
  if (__builtin_add_overflow(WidthInBytes, kAlignment - 1, &pitch)) return api_.leave(CUDA_ERROR_INVALID_VALUE);
  pitch -= pitch % kAlignment;
  if (__builtin_mul_overflow(pitch, Height, &size)) return api_.leave(CUDA_ERROR_OUT_OF_MEMORY);
  std::uint64_t address = 0;
  if (CUresult r = allocate_device(*context, size, address); r) return api_.leave(r);
  *dptr = address;
  *pPitch = pitch;
  return api_.leave(CUDA_SUCCESS);
}

CUresult cuMemFree_v2(CUdeviceptr dptr) {
  RGPU_PROFILED(245, "cuMemFree_v2", dptr);
  Context* context = nullptr;
  if (CUresult r = current(context); r) return api_.leave(r);
  if (CUresult r = unsafe_call(); r) return api_.leave(r);
  if (!dptr || free_graph_memory(dptr)) return api_.leave(CUDA_SUCCESS);
  if (const auto result = free_imported(dptr)) return api_.leave(*result);
  return api_.leave(free_device(dptr));
}

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  if (!free || !total) return CUDA_ERROR_INVALID_VALUE;
  Memory& m = memory();
  std::unique_lock guard(m.lock);
  Allocator* allocator = allocator_of(m, session_device(context->device));
  if (!allocator) return CUDA_ERROR_INVALID_DEVICE;
  const std::uint64_t own = allocator->quota() - allocator->available();
  *free = allocator->quota() - std::min(allocator->quota(), used_by_run(session_device(context->device), own));
  *total = allocator->quota();
  return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* pbase, size_t* psize, CUdeviceptr dptr) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  const Place place = place_of(dptr);
  if (place.kind != Place::Kind::device && place.kind != Place::Kind::pinned) return CUDA_ERROR_NOT_FOUND;
  if (pbase) *pbase = place.base;
  if (psize) *psize = place.size;
  return CUDA_SUCCESS;
}

}  // extern "C"
