// Regions of managed memory: their addresses, and which work may use them.
#include "managed.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "capturing.hpp"
#include "device.hpp"
#include "session.hpp"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace rgpu {
namespace {

std::uint64_t page_down(std::uint64_t n) { return n & ~(kSystemPage - 1); }
std::uint64_t page_up(std::uint64_t n) { return page_down(n + kSystemPage - 1); }

int rights(Newest newest) {
  return newest == Newest::device ? PROT_NONE : newest == Newest::both ? PROT_READ : PROT_READ | PROT_WRITE;
}

// `newest`: an allocation is zeros on both sides, a variable's first value is at the device.
CUresult add_region(std::shared_ptr<ManagedRegion> region, Newest newest) {
  if (!may_manage_memory()) {
    log_once("managed memory of two members", "managed memory of devices of two hosts in one process is not supported: "
             "this process has some of another host's device");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const std::size_t units = (region->size + kUnit - 1) / kUnit;
  region->units.assign(units, newest);
  region->at_host = newest == Newest::device ? 0 : units;
  if (!map_region(*region)) return CUDA_ERROR_OPERATING_SYSTEM;
  if (!protect(*region, 0, units, newest)) {
    unmap_region(*region);
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  Managed& m = managed();
  {
    std::unique_lock table(m.table);
    m.regions[region->base] = region;
    m.lowest = std::min(m.lowest.load(), region->base);
    m.highest = std::max(m.highest.load(), region->base + region->size);
  }
  ++m.count;
  watch_faults();
  watch_system_calls();
  return CUDA_SUCCESS;
}

// Requires Managed::lock.
void end_region(Managed& m, const std::shared_ptr<ManagedRegion>& region) {
  {
    std::unique_lock table(m.table);
    if (!m.regions.erase(region->base)) return;
  }
  region->ended = true;
  --m.count;
  unmap_region(*region);
}

// Zeroes an allocation at the device, as its pages in the program are: granules are reused.
CUresult clear(Context& context, std::uint64_t address, std::uint64_t size) {
  Managed& m = managed();
  std::lock_guard guard(m.lock);
  Carrier* carrier = nullptr;
  if (CUresult r = carrier_of(m, context, carrier); r) return r;
  wire::Memset call{};
  call.destination = address;
  call.pitch = call.width = size;
  call.height = 1;
  call.element = 1;
  call.stream = carrier->stream.number;
  std::uint64_t seq = 0;
  ReservedSpace space;
  if (CUresult r = submit_work(carrier->stream, call, &seq); r) return r;
  sent(*carrier, seq);
  return CUDA_SUCCESS;
}

CUresult allocate(Context& context, std::uint64_t size, unsigned flags, std::uint64_t& address) {
  const std::uint64_t whole = page_up(size);
  if (whole < size) return CUDA_ERROR_OUT_OF_MEMORY;
  if (CUresult r = allocate_device(context, size, address, kSystemPage); r) return r;
  auto region = std::make_shared<ManagedRegion>();
  region->base = address;
  region->size = whole;
  region->pieces = {{0, size}};
  region->context = &context;
  region->device = session_device(context.device);
  region->attached = region->attached_first = flags;
  CUresult r = clear(context, address, size);
  if (!r) r = add_region(region, Newest::both);
  if (r) free_device(address);
  return r == CUDA_ERROR_OPERATING_SYSTEM ? CUDA_ERROR_OUT_OF_MEMORY : r;
}

}  // namespace

Managed& managed() {
  static auto* m = new Managed;
  return *m;
}

std::uint64_t ManagedRegion::bytes(std::size_t from, std::size_t to) const {
  return std::min(to * kUnit, size) - from * kUnit;
}

std::shared_ptr<ManagedRegion> managed_region(std::uint64_t address) {
  Managed& m = managed();
  std::shared_lock table(m.table);
  auto it = m.regions.upper_bound(address);
  if (it == m.regions.begin()) return nullptr;
  --it;
  return address - it->first < it->second->size ? it->second : nullptr;
}

std::vector<std::shared_ptr<ManagedRegion>> managed_regions(std::uint64_t address, std::uint64_t size) {
  Managed& m = managed();
  std::vector<std::shared_ptr<ManagedRegion>> found;
  std::shared_lock table(m.table);
  auto it = m.regions.upper_bound(address);
  if (it != m.regions.begin() && address - std::prev(it)->first < std::prev(it)->second->size) --it;
  for (; it != m.regions.end() && it->first - std::min(address, it->first) < size; ++it) found.push_back(it->second);
  return found;
}

// Maps shared memory, so that it can be mapped twice. In a device's range it replaces our own reservation; elsewhere
// (variables that a driver placed) it never replaces a mapping.
bool map_region(ManagedRegion& region) {
  const bool ours = device_of(region.base) != kEveryDevice;
  void* wanted = reinterpret_cast<void*>(region.base);
  void* got = ::mmap(wanted, region.size, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE | (ours ? MAP_FIXED : MAP_FIXED_NOREPLACE), -1, 0);
  if (got == MAP_FAILED) return false;
  if (got != wanted) {
    ::munmap(got, region.size);
    return false;
  }
  void* alias = ::mremap(got, 0, region.size, MREMAP_MAYMOVE);  // a second mapping of the same pages
  if (alias == MAP_FAILED) {
    unmap_region(region);
    return false;
  }
  region.alias = static_cast<std::uint8_t*>(alias);
  for (void* each : {got, alias}) ::madvise(each, region.size, MADV_DONTFORK);  // a child has no session
  return true;
}

void unmap_region(ManagedRegion& region) {
  void* there = reinterpret_cast<void*>(region.base);
  if (device_of(region.base) == kEveryDevice)
    ::munmap(there, region.size);
  else
    ::mmap(there, region.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (region.alias) ::munmap(region.alias, region.size);
  region.alias = nullptr;
}

bool protect(ManagedRegion& region, std::size_t from, std::size_t to, Newest newest) {
  return !::mprotect(region.at(from), region.bytes(from, to), rights(newest));
}

CUresult carrier_of(Managed& m, Context& context, Carrier*& carrier) {
  if (auto it = m.carriers.find(&context); it != m.carriers.end()) {
    carrier = &it->second;
    return CUDA_SUCCESS;
  }
  Section section(true);
  if (section.status()) return section.status();
  auto stream = std::make_unique<Stream>();  // never enrolled: the program has no handle of it
  stream->context = &context;
  stream->flags = CU_STREAM_NON_BLOCKING;
  wire::StreamCreate create{};
  create.stream = stream->number = next_number();
  create.context = context.number;
  create.flags = CU_STREAM_NON_BLOCKING;
  wire::EventCreate event{};
  event.event = next_number();
  event.context = context.number;
  event.flags = CU_EVENT_DISABLE_TIMING;
  if (CUresult r = section.publish(create); r) return r;
  if (CUresult r = section.publish(event); r) return r;
  carrier = &m.carriers[&context];
  carrier->stream = {stream->number, stream.release(), &context};
  carrier->event = event.event;
  return CUDA_SUCCESS;
}

void sent(Carrier& carrier, std::uint64_t seq) {
  carrier.last = seq;
  wire::EventRecord record{};
  record.event = carrier.event;
  record.stream = carrier.stream.number;
  submit_work(carrier.stream, record);
}

CUresult track_managed_variables(const Module& module, const std::vector<Global>& variables) {
  std::vector<Global> sorted = variables;
  std::erase_if(sorted, [](const Global& g) { return !g.size; });
  std::sort(sorted.begin(), sorted.end(), [](const Global& a, const Global& b) { return a.address < b.address; });
  for (std::size_t i = 0; i < sorted.size();) {
    auto region = std::make_shared<ManagedRegion>();
    region->base = page_down(sorted[i].address);
    region->context = module.context;
    region->device = session_device(module.context->device);
    region->module = module.number;
    for (; i < sorted.size() && (!region->size || sorted[i].address < region->base + region->size); ++i) {
      region->pieces.push_back({sorted[i].address - region->base, sorted[i].size});
      region->size = page_up(sorted[i].address + sorted[i].size) - region->base;
    }
    if (CUresult r = add_region(region, Newest::device); r) {
      log_once("managed variables", "__managed__ variables at %#llx: that address is taken in this process: %s",
               static_cast<unsigned long long>(region->base), std::strerror(errno));
      untrack_managed_variables(module);
      return r;
    }
  }
  return CUDA_SUCCESS;
}

CUresult track_managed_mapping(std::uint64_t address, std::uint64_t size, Context& context) {
  auto region = std::make_shared<ManagedRegion>();
  region->base = address;
  region->size = size;
  region->pieces = {{0, size}};
  region->context = &context;
  region->device = session_device(context.device);
  const CUresult r = add_region(region, Newest::device);
  return r == CUDA_ERROR_OPERATING_SYSTEM ? CUDA_ERROR_OUT_OF_MEMORY : r;
}

CUresult untrack_managed_mapping(std::uint64_t address, std::uint64_t size) {
  auto region = managed_region(address);
  if (!region || region->base != address) return CUDA_SUCCESS;  // its context has ended
  const StreamRef legacy{static_cast<std::uint64_t>(region->device), nullptr, region->context};
  ManagedUse use(legacy);
  use.range(address, size);
  if (CUresult r = use.upload(); r) return r;
  use.given(published());
  forget_managed(address);
  return CUDA_SUCCESS;
}

void untrack_managed_variables(const Module& module) {
  if (!any_managed()) return;
  Managed& m = managed();
  std::lock_guard guard(m.lock);
  std::vector<std::shared_ptr<ManagedRegion>> its;
  {
    std::shared_lock table(m.table);
    for (auto& [base, region] : m.regions)
      if (region->module == module.number) its.push_back(region);
  }
  for (auto& region : its) end_region(m, region);
}

void forget_managed(std::uint64_t address) {
  if (!any_managed()) return;
  auto region = managed_region(address);
  if (!region || region->module || region->base != address) return;
  Managed& m = managed();
  std::lock_guard guard(m.lock);
  end_region(m, region);
}

void release_managed(Context& context) {
  Managed& m = managed();
  std::lock_guard guard(m.lock);
  std::vector<std::shared_ptr<ManagedRegion>> its;
  {
    std::shared_lock table(m.table);
    for (auto& [base, region] : m.regions)
      if (region->context == &context) its.push_back(region);
  }
  for (auto& region : its) end_region(m, region);
  auto it = m.carriers.find(&context);
  if (it == m.carriers.end()) return;
  wire::EventDestroy event{};
  event.event = it->second.event;
  wire::StreamDestroy stream{};
  stream.stream = it->second.stream.number;
  m.carriers.erase(it);  // its stream's object is kept: another thread may be noting work
  ReservedSpace space;
  submit(event);
  submit(stream);
}

void managed_lose_stream(const Stream& stream) {
  if (!any_managed()) return;
  Managed& m = managed();
  std::lock_guard guard(m.lock);
  if (!complete_on(stream.number, stream.last.load())) m.lost.insert(stream.number);
  std::shared_lock table(m.table);
  for (auto& [base, region] : m.regions) {
    if (region->attached != CU_MEM_ATTACH_SINGLE || region->stream != stream.number) continue;
    region->attached = region->attached_first;
    if (auto it = m.uses.find(stream.number); it != m.uses.end()) region->uses[it->first] = it->second;
  }
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuMemAllocManaged(CUdeviceptr* dptr, size_t bytesize, unsigned int flags) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  if (!dptr || !bytesize || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = unsafe_call(); r) return r;
  std::uint64_t address = 0;
  if (CUresult r = allocate(*context, bytesize, flags, address); r) return r;
  *dptr = address;
  return CUDA_SUCCESS;
}

// Takes effect at once for work given to streams from here on; a touch by the CPU still waits for earlier work.
CUresult cuStreamAttachMemAsync(CUstream hStream, CUdeviceptr dptr, size_t length, unsigned int flags) {
  if (CUresult r = require(); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(hStream, stream); r) return r;
  if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST && flags != CU_MEM_ATTACH_SINGLE)
    return CUDA_ERROR_INVALID_VALUE;
  if (flags == CU_MEM_ATTACH_SINGLE && !stream.object) return CUDA_ERROR_INVALID_VALUE;  // the legacy one covers all
  auto region = managed_region(dptr);
  if (!region || region->module || region->base != dptr || (length && length != region->pieces[0].size))
    return CUDA_ERROR_INVALID_VALUE;
  if (capture_open())
    if (CUresult r = refuse_in_capture(stream, "cuStreamAttachMemAsync"); r) return r;
  Managed& m = managed();
  std::lock_guard guard(m.lock);
  if (region->attached == CU_MEM_ATTACH_GLOBAL)
    for (auto [number, seq] : m.uses) region->uses[number] = std::max(region->uses[number], seq);
  else if (auto it = m.uses.find(region->stream); region->attached == CU_MEM_ATTACH_SINGLE && it != m.uses.end())
    region->uses[it->first] = std::max(region->uses[it->first], it->second);
  region->attached = flags;
  region->stream = flags == CU_MEM_ATTACH_SINGLE ? stream.number : 0;
  return CUDA_SUCCESS;
}

}  // extern "C"
