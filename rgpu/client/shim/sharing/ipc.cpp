// Handles of memory for other processes. A handle contains a token that the worker makes; a process that presents it
// gets the allocation mapped at an address of its own. The servers decide which sessions may open it.
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
  std::uint64_t id = 0;  // of the allocation: another one may later have its address
  CUipcMemHandle handle{};
};

struct Imported {
  std::uint64_t size = 0, room = 0, id = 0;  // of the allocation; where its mappings begin
  unsigned opened = 0;
  bool pooled = false;  // from another process's pool: freed, not closed
  int device = 0;
  Context* context = nullptr;
  std::array<std::uint8_t, IpcToken::kSize> token{};
};

struct Ipc {
  std::mutex changes;      // one thread exports, opens or closes at a time, and may wait for the server meanwhile
  std::shared_mutex lock;  // guards the tables; a leaf
  std::map<std::uint64_t, Exported> exported;  // by address of the allocation
  std::map<std::uint64_t, Imported> imported;  // … at which it is mapped in the program
  std::map<std::uint64_t, Imported> hidden;    // … at which it was mapped: freed in a stream's order
  std::uint64_t next_id = 1ull << 42;
};

Ipc& ipc() {
  static auto* found = new Ipc;
  return *found;
}

CUresult export_memory(const Place& place, void* token) {
  if (CUresult r = wait_for_device_number(place.device, true); r) return r;  // a device may change the memory's form
  const auto secret = ipc_secret();
  wire::MemoryExport call{};
  call.address = place.base;
  call.size = place.size;
  call.secret = {secret.data(), secret.size()};
  Answer answer;
  if (CUresult r = await(call, nullptr, 0, answer); r) return r;
  wire::MemoryExportReply reply;
  if (!reply.read(answer.reply.data(), answer.reply.size()) || reply.token.size != IpcToken::kSize)
    return CUDA_ERROR_UNKNOWN;
  std::memcpy(token, reply.token.data, IpcToken::kSize);
  return CUDA_SUCCESS;
}

void forget_room(std::uint64_t address) {
  Virtual& v = virtual_memory();
  std::unique_lock guard(v.lock);
  v.reserved.erase(address);
}

// Maps the memory that the token names; `found` contains the position.
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
               "cuIpcOpenMemHandle (cuMemPoolImportPointer): the handle opens nothing here: it was freed or changed, or is not of a session of the "
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

// Unmaps an import that is not open any more and in no table. `complete`: all work that may use it is complete.
CUresult end_import(std::uint64_t address, const Imported& found, bool complete = false) {
  if (complete || idle_on(found.device)) {
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

CUresult token_of_memory(const Place& place, void* token) {
  Ipc& all = ipc();
  std::lock_guard changes(all.changes);
  {
    std::shared_lock guard(all.lock);
    auto it = all.exported.find(place.base);
    if (it != all.exported.end() && it->second.id == place.id) {
      std::memcpy(token, it->second.handle.reserved, IpcToken::kSize);
      return CUDA_SUCCESS;
    }
  }
  Exported made{place.id, {}};
  if (CUresult r = export_memory(place, made.handle.reserved); r) return r;
  std::memcpy(token, made.handle.reserved, IpcToken::kSize);
  std::unique_lock guard(all.lock);
  all.exported[place.base] = made;
  return CUDA_SUCCESS;
}

CUresult open_memory(Context& context, const IpcToken& token, bool pooled, std::uint64_t& address) {
  Ipc& all = ipc();
  std::lock_guard changes(all.changes);
  {
    std::unique_lock guard(all.lock);
    auto own = all.exported.find(token.number());
    if (own != all.exported.end() && !std::memcmp(own->second.handle.reserved, token.bytes.data(), IpcToken::kSize))
      return CUDA_ERROR_INVALID_CONTEXT;  // a process cannot open its own handles
    for (auto& [at, found] : all.imported) {
      if (found.token != token.bytes) continue;
      if (found.context != &context || found.pooled != pooled) return CUDA_ERROR_INVALID_CONTEXT;
      ++found.opened;
      address = at;
      return CUDA_SUCCESS;
    }
  }
  Imported found;
  if (CUresult r = import_memory(context, token, found, address); r) return r;
  std::unique_lock guard(all.lock);
  found.id = all.next_id++;
  found.pooled = pooled;
  all.imported[address] = found;
  return CUDA_SUCCESS;
}

namespace {

// Decrements the open count of the import at the address; at zero removes it from the table and returns it; nullopt:
// there is none of that kind.
std::optional<std::optional<Imported>> let_go(std::uint64_t address, bool pooled) {
  Ipc& all = ipc();
  std::unique_lock guard(all.lock);
  auto it = all.imported.find(address);
  if (it == all.imported.end() || it->second.pooled != pooled) return std::nullopt;
  if (--it->second.opened) return std::optional<Imported>();
  std::optional<Imported> ended = it->second;
  all.imported.erase(it);
  return ended;
}

// Whether an import of that kind is there. Called before `changes` is taken, which is held while other threads wait.
bool open_at(std::uint64_t address, bool pooled) {
  Ipc& all = ipc();
  std::shared_lock guard(all.lock);
  auto it = all.imported.find(address);
  return it != all.imported.end() && it->second.pooled == pooled;
}

std::optional<CUresult> close_memory(std::uint64_t address, bool pooled) {
  if (!open_at(address, pooled)) return std::nullopt;
  std::lock_guard changes(ipc().changes);
  const auto ended = let_go(address, pooled);
  if (!ended) return std::nullopt;
  return *ended ? end_import(address, **ended) : CUDA_SUCCESS;
}

}  // namespace

std::optional<CUresult> free_imported(std::uint64_t address) { return close_memory(address, true); }

bool hide_imported(std::uint64_t address, bool& last) {
  const auto ended = let_go(address, true);
  last = ended && *ended;
  if (!last) return ended.has_value();
  Ipc& all = ipc();
  std::unique_lock guard(all.lock);
  all.hidden[address] = **ended;
  return true;
}

void end_hidden_import(std::uint64_t address) {
  Ipc& all = ipc();
  Imported ended;
  {
    std::unique_lock guard(all.lock);
    auto it = all.hidden.find(address);
    if (it == all.hidden.end()) return;  // its context ended earlier
    ended = it->second;
    all.hidden.erase(it);
  }
  end_import(address, ended, true);
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
    for (auto* table : {&all.imported, &all.hidden})
      for (auto it = table->begin(); it != table->end();) {
        if (it->second.context != &context) {
          ++it;
          continue;
        }
        ended.insert(*it);
        it = table->erase(it);
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
  return api_.leave(token_of_memory(place, pHandle->reserved));
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* pdptr, CUipcMemHandle handle, unsigned int Flags) {
  RGPU_PROFILED(567, "cuIpcOpenMemHandle_v2", pdptr, handle, Flags);
  Context* context = nullptr;
  if (CUresult r = current(context); r) return api_.leave(r);
  if (CUresult r = unsafe_call(); r) return api_.leave(r);
  const IpcToken token(handle.reserved);
  if (!pdptr || Flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || !token.is(IpcToken::memory))
    return api_.leave(CUDA_ERROR_INVALID_VALUE);
  std::uint64_t address = 0;
  if (CUresult r = open_memory(*context, token, false, address); r) return api_.leave(r);
  *pdptr = address;
  return api_.leave(CUDA_SUCCESS);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr dptr) {
  RGPU_PROFILED(330, "cuIpcCloseMemHandle", dptr);
  Context* context = nullptr;
  if (CUresult r = current(context); r) return api_.leave(r);
  if (CUresult r = unsafe_call(); r) return api_.leave(r);
  return api_.leave(close_memory(dptr, false).value_or(CUDA_ERROR_INVALID_VALUE));
}

}  // extern "C"
