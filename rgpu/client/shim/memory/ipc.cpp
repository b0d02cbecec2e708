// Handles of memory for other processes. What is given out is a token that the worker makes; a process that shows it has
// the allocation mapped into room of its own. Which sessions may is for the servers to say.
#include "ipc.hpp"

#include <sys/random.h>

#include <map>
#include <mutex>

#include "capturing.hpp"
#include "context.hpp"
#include "device.hpp"
#include "profile.hpp"
#include "session.hpp"
#include "vmm.hpp"

namespace rgpu {
namespace {

struct Exported {
  std::uint64_t id = 0;  // of the allocation: another one may come to its address
  CUipcMemHandle handle{};
};

struct Imported {
  std::uint64_t size = 0, room = 0, id = 0;  // of the allocation; where its mappings begin
  unsigned opened = 0;
  int device = 0;
  Context* context = nullptr;
  std::array<std::uint8_t, IpcToken::kSize> token{};
};

struct Ipc {
  std::mutex changes;      // one thread exports, opens or closes at a time, and may wait for the server meanwhile
  std::shared_mutex lock;  // guards the tables; a leaf
  std::map<std::uint64_t, Exported> exported;  // by address of the allocation
  std::map<std::uint64_t, Imported> imported;  // … at which the program has it
  std::uint64_t next_id = 1ull << 42;
};

Ipc& ipc() {
  static auto* found = new Ipc;
  return *found;
}

CUresult export_memory(const Place& place, CUipcMemHandle& handle) {
  if (CUresult r = wait_for_device_number(place.device, true); r) return r;  // a device may bring it into another form
  const auto secret = ipc_secret();
  wire::MemoryExport call{};
  call.address = place.base;
  call.size = place.size;
  call.secret = {secret.data(), secret.size()};
  Answer answer;
  if (CUresult r = await(call, nullptr, 0, answer); r) return r;
  wire::MemoryExportReply reply;
  if (!reply.read(answer.reply.data(), answer.reply.size()) || reply.token.size != sizeof handle.reserved)
    return CUDA_ERROR_UNKNOWN;
  std::memcpy(handle.reserved, reply.token.data, sizeof handle.reserved);
  return CUDA_SUCCESS;
}

void forget_room(std::uint64_t address) {
  Virtual& v = virtual_memory();
  std::unique_lock guard(v.lock);
  v.reserved.erase(address);
}

// Maps what the token names; `found` says where.
CUresult import_memory(Context& context, const IpcToken& token, Imported& found, std::uint64_t& address) {
  const std::uint64_t first = token.number() - token.number() % kGranule;
  std::uint64_t end;
  if (!token.size() || token.size() > kReserveSize || __builtin_add_overflow(token.number(), token.size(), &end) ||
      end > ~0ull - kGranule)
    return CUDA_ERROR_INVALID_VALUE;
  const std::uint64_t span = (end + kGranule - 1) / kGranule * kGranule - first;
  const int device = session_device(context.device);
  {
    Virtual& v = virtual_memory();
    std::unique_lock guard(v.lock);
    const auto place = room(v, device, span, kGranule, 0);
    if (!place) return CUDA_ERROR_OUT_OF_MEMORY;
    v.reserved[found.room = *place] = {span, true};
  }
  wire::MemoryImport call{};
  call.address = found.room;
  call.size = span;
  call.device = device;
  call.token = {token.bytes.data(), IpcToken::kSize};
  if (CUresult r = await(call); r) {
    forget_room(found.room);
    if (r == CUDA_ERROR_INVALID_VALUE)
      log_once("handle that opens nothing",
               "cuIpcOpenMemHandle: the handle opens nothing here: it was freed or changed, or is not of a session of the "
               "same user on the same node and device; NCCL across sessions needs gangs or RGPU_NCCL=calls");
    return r;
  }
  address = found.room + (token.number() - first);
  found.size = token.size();
  found.device = device;
  found.context = &context;
  found.token = token.bytes;
  found.opened = 1;
  wire::MemoryAllocate allocate{};
  allocate.address = address;
  allocate.size = found.size;
  return submit(allocate);
}

// Takes away what no one has open any more; it is in no table.
CUresult end_import(std::uint64_t address, const Imported& found) {
  if (idle_on(found.device)) {
    wire::MemoryFree call{};
    call.address = address;
    if (CUresult r = submit(call); r) return r;
  } else {
    wire::MemoryFreeWait call{};
    call.address = address;
    if (CUresult r = await(call); r) return r;
  }
  wire::MemoryUnimport call{};
  call.address = found.room;
  const CUresult result = submit(call);
  forget_room(found.room);
  return result;
}

}  // namespace

std::array<std::uint8_t, IpcToken::kSecretSize> ipc_secret() {
  std::array<std::uint8_t, IpcToken::kSecretSize> secret;
  for (std::size_t have = 0; have < secret.size();) {
    const ssize_t got = ::getrandom(secret.data() + have, secret.size() - have, 0);
    if (got > 0) have += static_cast<std::size_t>(got);
  }
  return secret;
}

bool exported_memory(std::uint64_t address) {
  Ipc& all = ipc();
  std::shared_lock guard(all.lock);
  return all.exported.contains(address);
}

Place imported_place(std::uint64_t address) {
  Ipc& all = ipc();
  std::shared_lock guard(all.lock);
  auto it = at_or_before(all.imported, address);
  if (it == all.imported.end() || address - it->first >= it->second.size) return {};
  const Imported& found = it->second;
  return {Place::Kind::device, it->first, found.size, found.device, found.context, 0, found.id};
}

void release_imports(Context& context) {
  Ipc& all = ipc();
  std::lock_guard changes(all.changes);
  std::map<std::uint64_t, Imported> ended;
  {
    std::unique_lock guard(all.lock);
    for (auto it = all.imported.begin(); it != all.imported.end();) {
      if (it->second.context != &context) {
        ++it;
        continue;
      }
      ended.insert(*it);
      it = all.imported.erase(it);
    }
  }
  for (const auto& [address, found] : ended) end_import(address, found);
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuIpcGetMemHandle(CUipcMemHandle* pHandle, CUdeviceptr dptr) {
  RGPU_PROFILED(328, "cuIpcGetMemHandle", pHandle, dptr);
  Context* context = nullptr;
  if (CUresult r = current(context); r) return api_.leave(r);
  if (CUresult r = unsafe_call(); r) return api_.leave(r);
  const Place place = place_of(dptr);
  if (!pHandle || !place.exportable) return api_.leave(CUDA_ERROR_INVALID_VALUE);
  Ipc& all = ipc();
  std::lock_guard changes(all.changes);
  {
    std::shared_lock guard(all.lock);
    auto it = all.exported.find(place.base);
    if (it != all.exported.end() && it->second.id == place.id) {
      *pHandle = it->second.handle;
      return api_.leave(CUDA_SUCCESS);
    }
  }
  CUipcMemHandle made{};
  if (CUresult r = export_memory(place, made); r) return api_.leave(r);
  std::unique_lock guard(all.lock);
  all.exported[place.base] = {place.id, made};
  *pHandle = made;
  return api_.leave(CUDA_SUCCESS);
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* pdptr, CUipcMemHandle handle, unsigned int Flags) {
  RGPU_PROFILED(567, "cuIpcOpenMemHandle_v2", pdptr, handle, Flags);
  Context* context = nullptr;
  if (CUresult r = current(context); r) return api_.leave(r);
  if (CUresult r = unsafe_call(); r) return api_.leave(r);
  const IpcToken token(handle.reserved);
  if (!pdptr || Flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || !token.is(IpcToken::memory))
    return api_.leave(CUDA_ERROR_INVALID_VALUE);
  Ipc& all = ipc();
  std::lock_guard changes(all.changes);
  {
    std::unique_lock guard(all.lock);
    auto own = all.exported.find(token.number());
    if (own != all.exported.end() && !std::memcmp(own->second.handle.reserved, handle.reserved, sizeof handle.reserved))
      return api_.leave(CUDA_ERROR_INVALID_CONTEXT);  // a process does not open what it made
    for (auto& [address, found] : all.imported) {
      if (found.token != token.bytes) continue;
      if (found.context != context) return api_.leave(CUDA_ERROR_INVALID_CONTEXT);
      ++found.opened;
      *pdptr = address;
      return api_.leave(CUDA_SUCCESS);
    }
  }
  Imported found;
  std::uint64_t address = 0;
  if (CUresult r = import_memory(*context, token, found, address); r) return api_.leave(r);
  std::unique_lock guard(all.lock);
  found.id = all.next_id++;
  all.imported[address] = found;
  *pdptr = address;
  return api_.leave(CUDA_SUCCESS);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr dptr) {
  RGPU_PROFILED(330, "cuIpcCloseMemHandle", dptr);
  Context* context = nullptr;
  if (CUresult r = current(context); r) return api_.leave(r);
  if (CUresult r = unsafe_call(); r) return api_.leave(r);
  Ipc& all = ipc();
  std::lock_guard changes(all.changes);
  Imported ended;
  {
    std::unique_lock guard(all.lock);
    auto it = all.imported.find(dptr);
    if (it == all.imported.end()) return api_.leave(CUDA_ERROR_INVALID_VALUE);
    if (--it->second.opened) return api_.leave(CUDA_SUCCESS);
    ended = it->second;
    all.imported.erase(it);
  }
  return api_.leave(end_import(dptr, ended));
}

}  // extern "C"
