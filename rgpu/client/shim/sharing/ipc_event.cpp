// Events of other processes. A record of an exported event is awaited, so that a process which learns of it (by
// whatever means) waits for that record and no earlier one; a wait is awaited too, so that it uses no later record.
#include "ipc.hpp"

#include <mutex>
#include <set>

#include "capturing.hpp"
#include "profile.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

// The random bytes of each handle that this process made: it cannot open its own handles.
struct OwnSecrets {
  std::mutex lock;
  std::set<std::array<std::uint8_t, IpcToken::kSecretSize>> made;
};

OwnSecrets& own_secrets() {
  static auto* found = new OwnSecrets;
  return *found;
}

bool own(const IpcToken& token) {
  std::array<std::uint8_t, IpcToken::kSecretSize> secret;
  std::memcpy(secret.data(), token.bytes.data() + 16, secret.size());
  OwnSecrets& all = own_secrets();
  std::lock_guard guard(all.lock);
  return all.made.contains(secret);
}

}  // namespace

CUresult mark_exported(const Event& event) {
  wire::EventMark call{};
  call.event = event.number;
  if (CUresult r = submit(call); r) return r;
  return await(wire::Applied{});
}

CUresult query_imported(const Event& event) {
  wire::ImportedEventQuery call{};
  call.event = event.number;
  Answer answer;
  if (CUresult r = await(call, nullptr, 0, answer); r) return r;
  wire::ImportedEventQueryReply reply;
  if (!reply.read(answer.reply.data(), answer.reply.size())) return CUDA_ERROR_UNKNOWN;
  return reply.complete ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult synchronize_imported(const Event& event) {
  wire::ImportedEventSynchronize call{};
  call.event = event.number;
  return await(call);
}

CUresult wait_for_imported(const StreamRef& stream, const Event& event) {
  if (capture_open())
    if (CUresult r = refuse_in_capture(stream, "cuStreamWaitEvent (an event of another process)"); r) return r;
  wire::ImportedEventWait call{};
  call.stream = stream.number;
  call.event = event.number;
  if (CUresult r = submit_work(stream, call); r) return r;
  return await(wire::Applied{});
}

CUresult destroy_imported(const Event& event) {
  wire::EventUnimport call{};
  call.event = event.number;
  return submit(call);
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuIpcGetEventHandle(CUipcEventHandle* pHandle, CUevent event) {
  RGPU_PROFILED(334, "cuIpcGetEventHandle", pHandle, event);
  if (CUresult r = require(); r) return api_.leave(r);
  Event* found = find(event);
  if (!found || found->imported || !(found->flags & CU_EVENT_INTERPROCESS)) return api_.leave(CUDA_ERROR_INVALID_HANDLE);
  if (!pHandle) return api_.leave(CUDA_ERROR_INVALID_VALUE);
  if (CUresult r = unsafe_call(); r) return api_.leave(r);
  const auto secret = ipc_secret();
  wire::EventExport call{};
  call.event = found->number;
  call.context = found->context->number;
  call.secret = {secret.data(), secret.size()};
  {
    std::lock_guard guard(found->lock);
    found->exported = true;  // first: a concurrent record is then marked
  }
  Answer answer;
  if (CUresult r = await(call, nullptr, 0, answer); r) return api_.leave(r);
  if (CUresult r = mark_exported(*found); r) return api_.leave(r);
  wire::EventExportReply reply;
  if (!reply.read(answer.reply.data(), answer.reply.size()) || reply.token.size != sizeof pHandle->reserved)
    return api_.leave(CUDA_ERROR_UNKNOWN);
  std::memcpy(pHandle->reserved, reply.token.data, sizeof pHandle->reserved);
  {
    OwnSecrets& all = own_secrets();
    std::lock_guard guard(all.lock);
    all.made.insert(secret);
  }
  return api_.leave(CUDA_SUCCESS);
}

CUresult cuIpcOpenEventHandle(CUevent* phEvent, CUipcEventHandle handle) {
  RGPU_PROFILED(335, "cuIpcOpenEventHandle", phEvent, handle);
  Context* context = nullptr;
  if (CUresult r = current(context); r) return api_.leave(r);
  if (CUresult r = unsafe_call(); r) return api_.leave(r);
  const IpcToken token(handle.reserved);
  if (!phEvent || !token.is(IpcToken::event)) return api_.leave(CUDA_ERROR_INVALID_VALUE);
  if (own(token)) return api_.leave(CUDA_ERROR_INVALID_CONTEXT);
  auto made = std::make_unique<Event>();
  made->context = context;
  made->flags = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING;
  made->imported = true;
  wire::EventImport call{};
  call.event = made->number = next_number();
  call.context = context->number;
  call.token = {token.bytes.data(), IpcToken::kSize};
  if (CUresult r = await(call); r) return api_.leave(r);
  void* enrolled = enroll(std::move(made));
  if (!enrolled) return api_.leave(CUDA_ERROR_OUT_OF_MEMORY);
  *phEvent = static_cast<CUevent>(enrolled);
  return api_.leave(CUDA_SUCCESS);
}

}  // extern "C"
