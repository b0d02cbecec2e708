// Events: recording, queries from the watermark, waits, elapsed time.
#include "capturing.hpp"
#include "downloads.hpp"
#include "ipc.hpp"
#include "memory.hpp"
#include "session.hpp"
#include "profile.hpp"

namespace rgpu {
namespace {

constexpr unsigned KNOWN_FLAGS = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;

// Call before the program is told that this record is complete. Another thread must not find it seen before that is in
// the journal and mapped memory is up to date.
void tell(Event& event, std::uint64_t record) {
  observed(record);
  after_observation();
  std::lock_guard guard(event.lock);
  event.seen = std::max(event.seen, record);
}

// Whether the last record is known to be complete, or there was none. If so, that is recorded as observed, once.
bool finished(Event& event) {
  std::uint64_t record;
  bool seen;
  {
    std::lock_guard guard(event.lock);
    record = event.record;
    seen = record <= event.seen;
    if (!seen && !complete_on(event.stream, record)) return false;
  }
  if (seen)
    bring_back_host_memory();  // for a launch that another thread had not noted yet when the record was seen
  else
    tell(event, record);
  return true;
}

CUresult record_event(CUevent handle, CUstream stream_handle, unsigned flags) {
  if (CUresult r = require(); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(stream_handle, stream); r) return r;
  Event* event = find(handle);
  if (!event || event->context != stream.context) return CUDA_ERROR_INVALID_HANDLE;
  if (flags & ~static_cast<unsigned>(CU_EVENT_RECORD_EXTERNAL)) return CUDA_ERROR_INVALID_VALUE;
  if (event->imported) {
    log_once("recording of an imported event", "cuEventRecord: an event is recorded by the process that made it only");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (capture_matters()) {
    bool taken = false;
    if (CUresult r = capture_record(stream, *event, flags, taken); r || taken) return r;
  }
  wire::EventRecord call{};
  call.event = event->number;
  call.stream = stream.number;
  call.flags = flags;
  {
    Section section;  // held until the event is updated: records of two threads keep the journal's order
    std::uint64_t seq = 0;
    if (CUresult r = section.publish(call, &seq); r) return r;
    note_work(stream, seq);
    std::lock_guard guard(event->lock);
    event->record = seq;
    event->stream = stream.number;
    if (!event->exported) return CUDA_SUCCESS;
  }
  return mark_exported(*event);
}

CUresult elapsed(float* milliseconds, CUevent start_handle, CUevent end_handle) {
  if (CUresult r = require(); r) return r;
  Event *start = find(start_handle), *end = find(end_handle);
  if (!start || !end) return CUDA_ERROR_INVALID_HANDLE;
  if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
  if (start->context->device != end->context->device) return CUDA_ERROR_INVALID_HANDLE;
  for (Event* event : {start, end}) {
    if (CUresult r = event_asked(*event); r) return r;
    std::lock_guard guard(event->lock);
    if (!event->record || (event->flags & CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_HANDLE;
  }
  wire::EventElapsed call{};
  call.start = start->number;
  call.end = end->number;
  Answer answer;
  Payload none;
  std::pair<std::uint64_t, std::uint64_t> marks[2];  // stream and record of each, as the worker will see them
  CUresult r = await_view(view(call), none, answer, nullptr, 0, [&](std::uint64_t, bool answered) {
    for (int i = 0; i < 2; ++i) {
      Event& event = i ? *end : *start;
      std::lock_guard guard(event.lock);
      if (answered)
        learned(marks[i].first, marks[i].second);
      else
        marks[i] = {event.stream, event.record};
    }
  });
  if (r) return r;
  tell(*start, marks[0].second);  // a time implies that both are complete
  tell(*end, marks[1].second);
  wire::EventElapsedReply reply;
  if (!reply.read(answer.reply.data(), answer.reply.size())) return CUDA_ERROR_UNKNOWN;
  *milliseconds = reply.milliseconds;
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuEventCreate(CUevent* phEvent, unsigned int Flags) {
  RGPU_PROFILED(118, "cuEventCreate", phEvent, Flags);
  Context* context = nullptr;
  if (CUresult r = current(context); r) return api_.leave(r);
  if (!phEvent || (Flags & ~KNOWN_FLAGS)) return api_.leave(CUDA_ERROR_INVALID_VALUE);
  if ((Flags & CU_EVENT_INTERPROCESS) && !(Flags & CU_EVENT_DISABLE_TIMING)) return api_.leave(CUDA_ERROR_INVALID_VALUE);
  auto made = std::make_unique<Event>();
  Event* event = made.get();
  event->context = context;
  event->flags = Flags;
  CUresult r = submit_with<wire::EventCreate>([&](wire::EventCreate& call) {
    event->number = next_number();
    call.event = event->number;
    call.context = context->number;
    call.flags = Flags & ~static_cast<unsigned>(CU_EVENT_INTERPROCESS);  // the driver's own event is never exported
    return CUDA_SUCCESS;
  });
  if (r) return api_.leave(r);
  void* handle = enroll(std::move(made));
  if (!handle) return api_.leave(CUDA_ERROR_OUT_OF_MEMORY);
  *phEvent = static_cast<CUevent>(handle);
  return api_.leave(CUDA_SUCCESS);
}

CUresult cuEventDestroy_v2(CUevent hEvent) {
  RGPU_PROFILED(325, "cuEventDestroy_v2", hEvent);
  if (CUresult r = require_session(); r) return api_.leave(r);
  Event* event = find(hEvent);
  if (!event || !retire(event)) return api_.leave(CUDA_ERROR_INVALID_HANDLE);
  event_gone(*event);
  if (event->imported) return api_.leave(destroy_imported(*event));
  wire::EventDestroy call{};
  call.event = event->number;
  if (CUresult r = submit(call); r || !event->exported) return api_.leave(r);
  return api_.leave(await(wire::Applied{}));  // a process that gets its handle cannot open it any more
}

CUresult cuEventRecord(CUevent hEvent, CUstream hStream) {
  RGPU_PROFILED(119, "cuEventRecord", hEvent, hStream);
  return api_.leave(record_event(hEvent, hStream, 0));
}

CUresult cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags) {
  return record_event(hEvent, hStream, flags);
}

CUresult cuEventQuery(CUevent hEvent) {
  RGPU_PROFILED(120, "cuEventQuery", hEvent);
  if (CUresult r = require(); r) return api_.leave(r);
  Event* event = find(hEvent);
  if (!event) return api_.leave(CUDA_ERROR_INVALID_HANDLE);
  if (CUresult r = event_asked(*event); r) return api_.leave(r);
  if (event->imported) return api_.leave(query_imported(*event));
  if (!downloads_on_their_way() && finished(*event)) return api_.leave(require());
  send_polled_words();
  flush();
  return api_.leave(CUDA_ERROR_NOT_READY);
}

CUresult cuEventSynchronize(CUevent hEvent) {
  RGPU_PROFILED(121, "cuEventSynchronize", hEvent);
  api_.waits(1);
  if (CUresult r = require(); r) return api_.leave(r);
  Event* event = find(hEvent);
  if (!event) return api_.leave(CUDA_ERROR_INVALID_HANDLE);
  if (CUresult r = event_asked(*event); r) return api_.leave(r);
  if (event->imported) return api_.leave(synchronize_imported(*event));
  if (finished(*event)) {
    print_device_text();
    return api_.leave(require());
  }
  send_polled_words();
  wire::EventSynchronize call{};
  call.event = event->number;
  Answer answer;
  Payload none;
  std::uint64_t record = 0, stream = 0;
  CUresult r = await_view(view(call), none, answer, nullptr, 0, [&](std::uint64_t, bool answered) {
    std::lock_guard guard(event->lock);
    if (answered) {
      learned(stream, record);
    } else {
      record = event->record;  // the worker waits for this record: it reads the same order
      stream = event->stream;
    }
  });
  if (r) return api_.leave(r);
  std::lock_guard guard(event->lock);  // only now, as in tell()
  event->seen = std::max(event->seen, record);
  return api_.leave(require());
}

CUresult cuEventElapsedTime(float* pMilliseconds, CUevent hStart, CUevent hEnd) {
  return elapsed(pMilliseconds, hStart, hEnd);
}

CUresult cuEventElapsedTime_v2(float* pMilliseconds, CUevent hStart, CUevent hEnd) {
  return elapsed(pMilliseconds, hStart, hEnd);
}

}  // extern "C"
