// What a copy of this library tells the routing library, and is told by it.
#include "routed.hpp"

#include <atomic>
#include <map>
#include <mutex>
#include <vector>

#include "capturing.hpp"
#include "collectives.hpp"
#include "context.hpp"
#include "device.hpp"
#include "hostfn.hpp"
#include "memory.hpp"
#include "session.hpp"

// Defined by the routing library, if the program has it; else its address is null.
extern "C" [[gnu::weak, gnu::visibility("default")]] rgpu::RouterFacts rgpu_router_facts;

namespace rgpu {
namespace {

// Set by the library's constructors, before any other thread can use it.
unsigned number = 0, count = 1;

[[gnu::constructor(101)]] void learn_number() {
  if (const RouterFacts* router = router_facts()) {
    number = router->loading;
    count = router->members;
  }
}

// ---------------------------------------------------------------- waiting for events

// Streams of ours in which one event is waited for at a time: an event that is late delays no other.
struct Lanes {
  std::mutex lock;
  std::map<Context*, std::vector<CUstream>> free;
};

Lanes& lanes() {
  static auto* l = new Lanes;
  return *l;
}

CUresult take_lane(Context& context, CUstream& lane) {
  {
    std::lock_guard guard(lanes().lock);
    auto& free = lanes().free[&context];
    while (!free.empty()) {
      lane = free.back();
      free.pop_back();
      if (const Stream* stream = find(lane); stream && stream->context == &context) return CUDA_SUCCESS;
    }
  }
  return cuStreamCreate(&lane, CU_STREAM_NON_BLOCKING);
}

void give_lane(Context& context, CUstream lane) {
  std::lock_guard guard(lanes().lock);
  lanes().free[&context].push_back(lane);
}

CUresult when_recorded(CUevent handle, void (*reached)(void*), void* user) {
  if (CUresult r = require_session(); r) return r;
  Event* event = find(handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  if (event_asked(*event)) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  Context& context = *event->context;
  InContext inside(static_cast<CUcontext>(context.handle));
  if (inside.result) return inside.result;
  CUstream lane = nullptr;
  if (CUresult r = take_lane(context, lane); r) return r;
  if (CUresult r = cuStreamWaitEvent(lane, handle, 0); r) return r;
  return enqueue_host_function(lane, [=, &context](CUresult, const std::function<void()>& end) {
    end();
    give_lane(context, lane);
    reached(user);
  }, Notified::library);
}

// ---------------------------------------------------------------- holding a stream

using End = std::function<void()>;

CUresult hold_here(CUstream handle, void (*reached)(void*, void*), void* user) {
  if (capture_open()) {
    StreamRef stream;
    std::uint64_t id = 0;
    if (CUresult r = resolve_stream(handle, stream); r) return r;
    if (CUresult r = open_capture_of(stream, id); r) return r;
    if (id) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  return enqueue_host_function(handle, [=](CUresult status, const End& end) {
    if (status == CUDA_ERROR_SYSTEM_NOT_READY) {
      end();
      reached(user, nullptr);
    } else {
      reached(user, new End(end));
    }
  }, Notified::library);
}

CUresult hold(CUstream handle, bool per_thread, void (*reached)(void*, void*), void* user) {
  if (!per_thread) return hold_here(handle, reached, user);
  PerThreadScope scope;
  return hold_here(handle, reached, user);
}

void release(void* token) {
  auto* end = static_cast<End*>(token);
  (*end)();
  delete end;
}

// ---------------------------------------------------------------- the rest of the table

int member_of(CUdevice device) {
  if (initialised() && device >= 0 && static_cast<std::size_t>(device) < program_devices().size() &&
      device_facts(device) != nullptr)
    return device_facts(device)->attribute(kMemberAttribute, -1);
  return -1;
}

const char* session_name() { return facts().name.c_str(); }

bool registered(const void* address) {
  const Place place = place_of(reinterpret_cast<std::uint64_t>(address));
  return place.kind == Place::Kind::registered;
}

void complete_here(std::uint64_t seq) { note_observation(seq); }

}  // namespace

const RouterFacts* router_facts() { return &rgpu_router_facts; }

unsigned member_number() { return number; }
unsigned member_count() { return count; }

bool may_manage_memory() {
  if (!router_facts()) return true;
  int none = -1;
  std::atomic_ref<int> managing(rgpu_router_facts.managing);
  return managing.compare_exchange_strong(none, static_cast<int>(number)) || none == static_cast<int>(number);
}

bool of_own_pinned_range(std::uint64_t address) {
  if (address < kPinnedBase || address >= kPinnedBase + kPinnedSize) return false;
  if (count == 1) return true;
  const std::uint64_t part = part_of(kPinnedRoom, count);
  return address >= kPinnedFirst + number * part && address - (kPinnedFirst + number * part) < part;
}

const MemberTable& member_table() {
  static const MemberTable table{sizeof(MemberTable), handle_range().first, handle_range().second, member_of,
                                 session_name, when_recorded, hold, release, registered, last_group, complete_on,
                                 complete_here};
  return table;
}

}  // namespace rgpu
