// Handles of memory for other processes as descriptors: a small file that contains the token of ipc.hpp. The bytes of
// an imported handle are mapped at an address of ours, where the worker keeps them mapped, and are mapped from the
// other session once more wherever the program maps the handle.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "device.hpp"
#include "ipc.hpp"
#include "session.hpp"
#include "vmm.hpp"

namespace rgpu {
namespace {

Physical* find_shared(CUmemGenericAllocationHandle handle) {
  auto* physical = static_cast<Physical*>(find_object(reinterpret_cast<const void*>(handle), Kind::physical));
  return physical && physical->references ? physical : nullptr;
}

// Makes the token by which other processes open the handle's bytes, which are at `address`, as mapping `id`.
CUresult make_token(Physical& physical, std::uint64_t address, std::uint64_t id) {
  if (physical.token && physical.token_of == id) return CUDA_SUCCESS;
  if (CUresult r = wait_for_device_number(physical.device, true); r) return r;  // as cuIpcGetMemHandle
  const auto secret = ipc_secret();
  wire::MemoryExport call{};
  call.address = address;
  call.size = physical.size;
  call.secret = {secret.data(), secret.size()};
  Answer answer;
  if (CUresult r = await(call, nullptr, 0, answer); r) return r;
  wire::MemoryExportReply reply;
  char bytes[IpcToken::kSize];
  if (!reply.read(answer.reply.data(), answer.reply.size()) || reply.token.size != sizeof bytes) return CUDA_ERROR_UNKNOWN;
  std::memcpy(bytes, reply.token.data, sizeof bytes);
  physical.token.emplace(bytes);
  physical.token_of = id;
  return CUDA_SUCCESS;
}

std::optional<IpcToken> token_of(int fd) {
  const auto bytes = bytes_of_file(fd);
  return bytes ? std::optional(IpcToken(bytes->data())) : std::nullopt;
}

// The handle of this process, its own or an imported one, that the token names. Virtual::lock held.
Physical* known(const IpcToken& token) {
  Physical* found = nullptr;
  for_each_object(Kind::physical, [&](Object* object) {
    auto* physical = static_cast<Physical*>(object);
    if (physical->references && physical->token && physical->token->bytes == token.bytes) found = physical;
  });
  return found;
}

CUresult import_at(const Physical& physical, std::uint64_t address) {
  wire::MemoryImport call{};
  call.address = address;
  call.size = physical.size;
  call.device = physical.device;
  call.token = {physical.token->bytes.data(), IpcToken::kSize};
  return await(call);
}

}  // namespace

int file_of_bytes(const void* bytes) {
  const int fd = ::memfd_create("rgpu-handle", MFD_CLOEXEC);
  if (fd < 0) return fd;
  if (::write(fd, bytes, IpcToken::kSize) == static_cast<ssize_t>(IpcToken::kSize)) return fd;
  ::close(fd);
  return -1;
}

std::optional<std::array<char, IpcToken::kSize>> bytes_of_file(int fd) {
  struct stat found;
  std::array<char, IpcToken::kSize> bytes;
  if (::fstat(fd, &found) || !S_ISREG(found.st_mode) || found.st_size != static_cast<off_t>(bytes.size()) ||
      ::pread(fd, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    return std::nullopt;
  return bytes;
}

CUresult map_imported(Virtual& v, Physical& physical, std::uint64_t address) {
  if (CUresult r = import_at(physical, address); r) return r;
  Section section;
  if (section.status()) return section.status();
  std::unique_lock guard(v.lock);
  wire::MemoryAllocate call{};
  call.address = address;
  call.size = physical.size;
  if (CUresult r = section.publish(call); r) return r;
  ++physical.aliases;
  v.mapped[address] = {physical.size, &physical, v.next_id++, {}, true};
  return CUDA_SUCCESS;
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuMemExportToShareableHandle(void* shareableHandle, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType handleType, unsigned long long flags) {
  if (CUresult r = require(); r) return r;
  Virtual& v = virtual_memory();
  std::lock_guard changes(v.changes);
  Physical* physical = find_shared(handle);
  if (!shareableHandle || flags || !physical || handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
      !(physical->prop.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
    return CUDA_ERROR_INVALID_VALUE;
  if (!physical->imported) {
    std::uint64_t id = 0;
    {
      std::shared_lock guard(v.lock);
      if (auto it = v.mapped.find(physical->mapped); physical->mapped && it != v.mapped.end()) id = it->second.id;
    }
    if (!id || physical->in_host()) {
      log_once("export of what is not mapped",
               "cuMemExportToShareableHandle: a handle is exported while it is mapped, and no memory of the CPU is");
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (CUresult r = make_token(*physical, physical->mapped, id); r) return r;
  }
  const int fd = file_of_bytes(physical->token->bytes.data());
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *static_cast<int*>(shareableHandle) = fd;
  return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* osHandle,
                                        CUmemAllocationHandleType shHandleType) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  if (!handle || shHandleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  const auto token = token_of(static_cast<int>(reinterpret_cast<std::intptr_t>(osHandle)));
  if (!token || !token->is(IpcToken::memory) || !whole_granules(token->size()) || token->number() % kGranule ||
      token->size() > kReserveSize)
    return CUDA_ERROR_INVALID_VALUE;
  Virtual& v = virtual_memory();
  std::lock_guard changes(v.changes);
  auto made = std::make_unique<Physical>();
  {
    std::unique_lock guard(v.lock);
    if (Physical* found = known(*token)) {
      ++found->references;
      *handle = reinterpret_cast<CUmemGenericAllocationHandle>(found->handle);
      return CUDA_SUCCESS;
    }
    made->device = session_device(context->device);
    made->size = token->size();
    const auto place = room(v, made->device, made->size, kGranule, 0);
    if (!place) return CUDA_ERROR_OUT_OF_MEMORY;
    v.reserved[made->imported = *place] = {made->size, true};
  }
  made->prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  made->prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, context->device};
  made->prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  made->owner = context->device;
  made->token = token;
  const std::uint64_t at = made->imported;
  CUresult result = import_at(*made, at);
  void* found = result ? nullptr : enroll(std::move(made));
  if (!found) {
    std::unique_lock guard(v.lock);
    v.reserved.erase(at);
    return result ? result : CUDA_ERROR_OUT_OF_MEMORY;
  }
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(found);
  return CUDA_SUCCESS;
}

}  // extern "C"
