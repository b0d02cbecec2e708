// Memory nodes (SEMANTICS 11): the address of an allocation node is chosen when the node is made, from the session's
// own range, and backed from then on. A launch marks it allocated; a free, in a graph or by the program, marks it free.
#include <unordered_map>

#include "capturing.hpp"
#include "device.hpp"
#include "memory.hpp"
#include "session.hpp"
#include "graph_exec.hpp"

namespace rgpu {
namespace {

struct GraphMemories {
  std::mutex lock;
  std::unordered_map<std::uint64_t, std::weak_ptr<GraphMemory>> known;     // by address
  std::unordered_map<std::uint64_t, std::shared_ptr<GraphMemory>> allocated;  // launched, and not freed
  std::map<int, std::uint64_t> reserved, used, reserved_high, used_high;   // bytes, by the session's device
};

GraphMemories& memories() {
  static auto* m = new GraphMemories;
  return *m;
}

int device_of(const GraphMemory& memory) { return session_device(memory.context.device); }

}  // namespace

GraphMemory::~GraphMemory() {
  GraphMemories& m = memories();
  {
    std::lock_guard guard(m.lock);
    m.known.erase(address);
    m.reserved[device_of(*this)] -= size;
  }
  if (context.alive && !require_session()) free_when_complete(address);
}

CUresult make_graph_memory(Context& context, std::uint64_t size, std::shared_ptr<GraphMemory>& memory) {
  std::uint64_t address = 0;
  if (CUresult r = allocate_device(context, size, address); r) return r;
  memory = std::make_shared<GraphMemory>(address, size, context);
  GraphMemories& m = memories();
  std::lock_guard guard(m.lock);
  m.known[address] = memory;
  const int device = device_of(*memory);
  m.reserved[device] += size;
  m.reserved_high[device] = std::max(m.reserved_high[device], m.reserved[device]);
  return CUDA_SUCCESS;
}

bool free_graph_memory(std::uint64_t address) {
  std::shared_ptr<GraphMemory> last;  // released outside of the lock: this may be the last reference
  GraphMemories& m = memories();
  std::lock_guard guard(m.lock);
  auto it = m.known.find(address);
  if (it == m.known.end()) return false;
  last = it->second.lock();
  if (auto live = m.allocated.find(address); live != m.allocated.end()) {
    m.used[device_of(*live->second)] -= live->second->size;
    m.allocated.erase(live);
  }
  return true;
}

CUresult begin_graph_memory(const std::vector<std::shared_ptr<GraphMemory>>& made, bool free_first) {
  GraphMemories& m = memories();
  std::lock_guard guard(m.lock);
  for (auto& memory : made)
    if (!free_first && m.allocated.contains(memory->address)) return CUDA_ERROR_INVALID_VALUE;
  for (auto& memory : made) {
    if (!m.allocated.emplace(memory->address, memory).second) continue;
    const int device = device_of(*memory);
    m.used[device] += memory->size;
    m.used_high[device] = std::max(m.used_high[device], m.used[device]);
  }
  return CUDA_SUCCESS;
}

CUresult capture_allocate(const StreamRef& stream, std::uint64_t size, CUdeviceptr* out, bool& taken) {
  AllocateWork work;
  work.params.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  work.params.poolProps.location = {CU_MEM_LOCATION_TYPE_DEVICE, stream.context->device};
  work.params.bytesize = size;
  if (CUresult r = make_graph_memory(*stream.context, size, work.memory); r) return r;
  work.params.dptr = work.memory->address;
  const CUdeviceptr address = work.memory->address;
  CUresult r = capture_work(stream, std::move(work), taken);
  if (!r && taken) *out = address;
  return r;
}

CUresult capture_free(const StreamRef& stream, CUdeviceptr address, bool& taken) {
  const Place place = place_of(address);
  if (place.kind != Place::Kind::device || place.base != address) return CUDA_ERROR_INVALID_VALUE;
  return capture_work(stream, FreeWork{address}, taken);
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void* value) {
  if (CUresult r = require(); r) return r;
  if (!device_facts(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  GraphMemories& m = memories();
  std::lock_guard guard(m.lock);
  const int index = own_device(device);
  auto& out = *static_cast<std::uint64_t*>(value);
  switch (attr) {
    case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT: out = m.used[index]; return CUDA_SUCCESS;
    case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH: out = m.used_high[index]; return CUDA_SUCCESS;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: out = m.reserved[index]; return CUDA_SUCCESS;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH: out = m.reserved_high[index]; return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}

// The high marks can only be set to zero, which resets them to the present values.
CUresult cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void* value) {
  if (CUresult r = require(); r) return r;
  if (!device_facts(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (!value || *static_cast<std::uint64_t*>(value)) return CUDA_ERROR_INVALID_VALUE;
  GraphMemories& m = memories();
  std::lock_guard guard(m.lock);
  const int index = own_device(device);
  if (attr == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH)
    m.used_high[index] = m.used[index];
  else if (attr == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH)
    m.reserved_high[index] = m.reserved[index];
  else
    return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGraphMemTrim(CUdevice device) {  // memory is freed with its graphs: nothing else is kept
  if (CUresult r = require(); r) return r;
  return device_facts(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

}  // extern "C"
