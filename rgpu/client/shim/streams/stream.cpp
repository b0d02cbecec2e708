// Streams: creation, queries from the watermark, waits.
#include <algorithm>

#include "capturing.hpp"
#include "device.hpp"
#include "downloads.hpp"
#include "ipc.hpp"
#include "managed.hpp"
#include "memory.hpp"
#include "session.hpp"
#include "profile.hpp"

namespace rgpu {
namespace {

constexpr int GREATEST_PRIORITY = -5;  // as cuCtxGetStreamPriorityRange returns; 0 is the least

std::atomic<std::uint64_t> legacy_seen[wire::kFirstHandle];

// Highest call of the stream whose completion was reported to the program.
std::atomic<std::uint64_t>& seen_of(const StreamMark& mark) { return mark.object ? mark.object->seen : legacy_seen[mark.stream]; }

void raise(std::atomic<std::uint64_t>& value, std::uint64_t to) {
  std::uint64_t before = value.load();
  while (before < to && !value.compare_exchange_weak(before, to)) {
  }
}

// The streams whose work a wait for `stream` covers, with the last call given to each: itself, and for a legacy stream
// every blocking stream of its device.
std::vector<StreamMark> covered(const StreamRef& stream) {
  std::vector<StreamMark> found;
  if (stream.object) {
    found.push_back({stream.object, stream.number, stream.object->last.load()});
    return found;
  }
  found.push_back({nullptr, stream.number, last_given(stream.number)});
  for_each_object(Kind::stream, [&](Object* object) {
    auto* other = static_cast<Stream*>(object);
    if (!(other->flags & CU_STREAM_NON_BLOCKING) && other->context->device == stream.context->device)
      found.push_back({other, other->number, other->last.load()});
  });
  return found;
}

// Whether all work up to these marks is known to be complete. If so, that is recorded as observed, once for each call.
bool finished(const std::vector<StreamMark>& marks) {
  for (const StreamMark& mark : marks)
    if (mark.seq && !complete_on(mark.stream, mark.seq)) return false;
  bool news = false;
  for (const StreamMark& mark : marks) {
    if (seen_of(mark).load() >= mark.seq) continue;
    if (!is_download(mark.seq)) observed(mark.seq);
    news = true;
  }
  if (!news) {
    bring_back_host_memory();  // for a launch that another thread had not noted yet when its end was seen
    return true;
  }
  after_observation();
  // Only now: another thread that finds it seen returns at once, and its program continues.
  for (const StreamMark& mark : marks) raise(seen_of(mark), mark.seq);
  return true;
}

bool finished(const StreamRef& stream) { return finished(covered(stream)); }

// Whether a stream of the device was destroyed before the end of its last work was reported to the program. Its marks
// are deleted, so that only a wait for the device covers that work.
std::atomic<bool> destroyed_untold[kMaxDevices];

CUresult create_stream(CUstream* out, unsigned flags, int priority) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  if (!out || (flags & ~static_cast<unsigned>(CU_STREAM_NON_BLOCKING))) return CUDA_ERROR_INVALID_VALUE;
  auto made = std::make_unique<Stream>();
  Stream* stream = made.get();
  stream->context = context;
  stream->flags = flags;
  stream->priority = std::clamp(priority, GREATEST_PRIORITY, 0);
  CUresult r = submit_with<wire::StreamCreate>([&](wire::StreamCreate& call) {
    stream->number = stream->unique_id = next_number();
    call.stream = stream->number;
    call.context = context->number;
    call.flags = flags;
    call.priority = stream->priority;
    return CUDA_SUCCESS;
  });
  if (r) return r;
  void* handle = enroll(std::move(made));
  if (!handle) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = static_cast<CUstream>(handle);
  return CUDA_SUCCESS;
}

// Common part of functions that only query a stream of the calling thread's context, or a created one.
template <class T>
CUresult ask(CUstream handle, T* out, T (*answer)(const StreamRef&)) {
  if (CUresult r = require_session(); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(handle, stream); r) return r;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  *out = answer(stream);
  return CUDA_SUCCESS;
}

}  // namespace

static std::vector<StreamMark> all_streams(const Context& context) {
  const std::uint64_t legacy = legacy_stream(context);
  std::vector<StreamMark> found{{nullptr, legacy, last_given(legacy)}};
  for_each_object(Kind::stream, [&](Object* object) {
    auto* stream = static_cast<Stream*>(object);
    if (stream->context->device == context.device) found.push_back({stream, stream->number, stream->last.load()});
  });
  return found;
}

bool device_finished(const Context& context) {
  const int device = session_device(context.device);
  return device >= 0 && !destroyed_untold[device].load() && idle_on(device) && finished(all_streams(context));
}

CUresult wait_and_tell(const Context& context) {
  const auto marks = all_streams(context);  // work given before the wait
  if (const int device = session_device(context.device); device >= 0) destroyed_untold[device].store(false);
  if (CUresult r = wait_for_device(context); r) return r;
  for (const StreamMark& mark : marks) raise(seen_of(mark), mark.seq);
  return CUDA_SUCCESS;
}

std::vector<StreamMark> untold_before(const StreamRef& stream) {
  auto marks = covered(stream);
  if (stream.object && !(stream.object->flags & CU_STREAM_NON_BLOCKING)) {
    const std::uint64_t legacy = legacy_stream(*stream.context);
    marks.push_back({nullptr, legacy, last_given(legacy)});
  }
  std::erase_if(marks, [](const StreamMark& mark) { return seen_of(mark).load() >= mark.seq; });
  return marks;
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuStreamCreate(CUstream* phStream, unsigned int Flags) {
  RGPU_PROFILED(124, "cuStreamCreate", phStream, Flags);
  return api_.leave(create_stream(phStream, Flags, 0));
}

CUresult cuStreamCreateWithPriority(CUstream* phStream, unsigned int flags, int priority) {
  RGPU_PROFILED(367, "cuStreamCreateWithPriority", phStream, flags, priority);
  return api_.leave(create_stream(phStream, flags, priority));
}

CUresult cuStreamDestroy_v2(CUstream hStream) {
  RGPU_PROFILED(326, "cuStreamDestroy_v2", hStream);
  if (CUresult r = require_session(); r) return api_.leave(r);
  Stream* stream = find(hStream);
  if (!stream || stream->per_thread || !retire(stream)) return api_.leave(CUDA_ERROR_INVALID_HANDLE);
  if (const int device = session_device(stream->context->device); device >= 0 && stream->seen < stream->last)
    destroyed_untold[device].store(true);
  finish_downloads_of(stream->number);
  stream_gone(*stream);
  mirrors_lose_stream(*stream);
  managed_lose_stream(*stream);
  wire::StreamDestroy call{};
  call.stream = stream->number;
  return api_.leave(submit(call));
}

CUresult cuStreamSynchronize(CUstream hStream) {
  RGPU_PROFILED(126, "cuStreamSynchronize", hStream);
  api_.waits(3, hStream);
  if (CUresult r = require(); r) return api_.leave(r);
  StreamRef stream;
  if (CUresult r = resolve_stream(hStream, stream); r) return api_.leave(r);
  if (CUresult r = stream_asked(stream); r) return api_.leave(r);
  if (finished(stream)) {
    print_device_text();
    return api_.leave(require());
  }
  send_polled_words();
  const auto marks = covered(stream);  // work given before the wait
  CUresult copied = CUDA_SUCCESS;
  if (await_download(stream.number, marks, copied)) {
    if (!copied) finished(marks);
    print_device_text();
    return api_.leave(copied ? copied : require());
  }
  wire::StreamSynchronize call{};
  call.stream = stream.number;
  Answer answer;
  Payload none;
  std::uint64_t waited = 0;
  CUresult r = await_view(view(call), none, answer, nullptr, 0, [&](std::uint64_t seq, bool answered) {
    if (!answered) {
      note_work(stream, waited = seq);
      return;
    }
    learned(stream.number, seq);
    for (const StreamMark& mark : marks) learned(mark.stream, mark.seq);
  });
  if (r) return api_.leave(r);
  for (const StreamMark& mark : marks) raise(seen_of(mark), mark.stream == stream.number ? waited : mark.seq);
  return api_.leave(require());
}

CUresult cuStreamQuery(CUstream hStream) {
  RGPU_PROFILED(125, "cuStreamQuery", hStream);
  if (CUresult r = require(); r) return api_.leave(r);
  StreamRef stream;
  if (CUresult r = resolve_stream(hStream, stream); r) return api_.leave(r);
  if (CUresult r = stream_asked(stream); r) return api_.leave(r);
  if (!downloads_on_their_way() && finished(stream)) return api_.leave(require());
  send_polled_words();
  flush();
  return api_.leave(CUDA_ERROR_NOT_READY);
}

CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags) {
  RGPU_PROFILED(295, "cuStreamWaitEvent", hStream, hEvent, Flags);
  api_.waits(2, hStream);
  if (CUresult r = require(); r) return api_.leave(r);
  StreamRef stream;
  if (CUresult r = resolve_stream(hStream, stream); r) return api_.leave(r);
  Event* event = find(hEvent);
  if (!event) return api_.leave(CUDA_ERROR_INVALID_HANDLE);
  if (Flags & ~static_cast<unsigned>(CU_EVENT_WAIT_EXTERNAL)) return api_.leave(CUDA_ERROR_INVALID_VALUE);
  if (event->imported) return api_.leave(wait_for_imported(stream, *event));
  if (capture_matters()) {
    bool taken = false;
    if (CUresult r = capture_wait(stream, *event, Flags, taken); r || taken) return api_.leave(r);
  }
  wire::StreamWaitEvent call{};
  call.stream = stream.number;
  call.event = event->number;
  call.flags = Flags;
  Section section;  // held until the work is noted: the notes of two threads keep the journal's order
  std::uint64_t seq = 0;
  if (CUresult r = section.publish(call, &seq); r) return api_.leave(r);
  note_work(stream, seq);
  if (!host_memory_in_use()) return api_.leave(CUDA_SUCCESS);
  std::lock_guard guard(event->lock);
  waits_for(stream.number, seq, event->stream, event->record);
  return api_.leave(CUDA_SUCCESS);
}

CUresult cuStreamGetFlags(CUstream hStream, unsigned int* flags) {
  return ask<unsigned>(hStream, flags, [](const StreamRef& s) { return s.object ? s.object->flags : 0u; });
}

CUresult cuStreamGetPriority(CUstream hStream, int* priority) {
  return ask<int>(hStream, priority, [](const StreamRef& s) { return s.object ? s.object->priority : 0; });
}

CUresult cuStreamGetId(CUstream hStream, unsigned long long* streamId) {
  return ask<unsigned long long>(hStream, streamId, [](const StreamRef& s) -> unsigned long long {
    return s.object ? s.object->unique_id : 1;  // created streams start at FIRST_HANDLE
  });
}

CUresult cuStreamGetCtx(CUstream hStream, CUcontext* pctx) {
  return ask<CUcontext>(hStream, pctx, [](const StreamRef& s) { return static_cast<CUcontext>(s.context->handle); });
}

CUresult cuStreamGetDevice(CUstream hStream, CUdevice* device) {
  return ask<CUdevice>(hStream, device, [](const StreamRef& s) { return s.context->device; });
}

CUresult cuStreamGetAttribute(CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue* value) {
  if (CUresult r = require(); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(hStream, stream); r) return r;
  if (!value || attr <= CU_LAUNCH_ATTRIBUTE_IGNORE || attr >= CU_LAUNCH_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
  *value = {};
  if (attr == CU_LAUNCH_ATTRIBUTE_PRIORITY) {
    value->priority = stream.object ? stream.object->priority : 0;
  } else if (stream.object) {
    std::lock_guard guard(stream.object->lock);
    auto it = stream.object->attributes.find(attr);
    if (it != stream.object->attributes.end()) *value = it->second;
  }
  return CUDA_SUCCESS;
}

// Hints about caches and waiting: stored for cuStreamGetAttribute, without effect on the server.
CUresult cuStreamSetAttribute(CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue* param) {
  if (CUresult r = require(); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(hStream, stream); r) return r;
  if (!param) return CUDA_ERROR_INVALID_VALUE;
  switch (attr) {
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      break;
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
      if (param->priority > 0 || param->priority < GREATEST_PRIORITY) return CUDA_ERROR_INVALID_VALUE;
      if (stream.object) stream.object->priority = param->priority;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  if (!stream.object) return CUDA_SUCCESS;
  std::lock_guard guard(stream.object->lock);
  stream.object->attributes[attr] = *param;
  return CUDA_SUCCESS;
}

CUresult cuStreamCopyAttributes(CUstream dstStream, CUstream srcStream) {
  if (CUresult r = require(); r) return r;
  StreamRef to, from;
  if (CUresult r = resolve_stream(dstStream, to); r) return r;
  if (CUresult r = resolve_stream(srcStream, from); r) return r;
  if (!to.object || !from.object || to.object == from.object) return CUDA_SUCCESS;
  std::scoped_lock guard(to.object->lock, from.object->lock);
  to.object->attributes = from.object->attributes;
  to.object->priority = from.object->priority;
  return CUDA_SUCCESS;
}

}  // extern "C"
