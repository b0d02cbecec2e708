// Launches of executable graphs: the stream that each step is given to, and the order of the steps. See graph_exec.hpp.
#include <algorithm>

#include "capturing.hpp"
#include "context.hpp"
#include "graph_exec.hpp"
#include "managed.hpp"
#include "memory.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

CUresult launch_section(const GraphPart& section, const StreamRef& stream) {
  MirrorUse mirrors(stream, section.pinned);
  if (CUresult r = mirrors.upload(); r) return r;
  ManagedUse managed(stream);
  managed.everything();
  if (CUresult r = managed.upload(); r) return r;
  wire::GraphLaunch call{};
  call.exec = section.number;
  call.stream = stream.number;
  std::uint64_t seq = 0;
  if (CUresult r = submit_work(stream, call, &seq); r) return r;
  mirrors.given(seq);
  managed.given(seq);
  return CUDA_SUCCESS;
}

// Carries out a node of the client's by the call that does the same outside of graphs.
CUresult do_step(const Work& work, CUstream stream) {
  if (const auto* copy = std::get_if<CopyWork>(&work)) return cuMemcpy3DAsync_v2(&copy->copy, stream);
  if (const auto* host = std::get_if<HostWork>(&work)) return cuLaunchHostFunc(stream, host->function, host->user);
  if (const auto* batch = std::get_if<BatchWork>(&work)) {
    std::vector<CUstreamBatchMemOpParams> operations = batch->operations;
    return cuStreamBatchMemOp_v2(stream, static_cast<unsigned>(operations.size()), operations.data(), batch->flags);
  }
  if (const auto* group = std::get_if<CollectivesWork>(&work)) return launch_collectives(*group, stream);
  CUresult r = CUDA_SUCCESS;
  bool there = false;
  if (const auto* record = std::get_if<EventRecordWork>(&work)) {
    there = find(record->event);
    r = cuEventRecord(record->event, stream);
  }
  if (const auto* wait = std::get_if<EventWaitWork>(&work)) {
    there = find(wait->event);
    r = cuStreamWaitEvent(stream, wait->event, 0);
  }
  return r == CUDA_ERROR_INVALID_HANDLE && !there ? CUDA_SUCCESS : r;  // the event was destroyed: no call can query it
}

// One launch of a graph with several steps. Steps of the launch's own device are given to its stream, those of another
// device to a stream of the executable graph's there (a lane), ordered after the launch's beginning; the launch's end
// is ordered after all of them.
class Launch {
 public:
  Launch(GraphExec& exec, const StreamRef& stream, CUstream handle)
      : exec_(exec), own_(*stream.context), own_number_(stream.number), steps_(exec.program.steps) {
    lanes_[own_.device] = {&own_, handle, 1, {}};  // its first event is recorded after the launch
  }

  CUresult run() {
    if (CUresult r = begin(); r) return r;
    CUresult result = CUDA_SUCCESS;
    for (std::size_t i = 0; i < steps_.size() && !result; ++i) result = take(i);
    const CUresult ended = end();  // also after a failure: the steps given so far are ordered into the launch's stream
    return result ? result : ended;
  }

 private:
  struct Lane {
    Context* context = nullptr;
    CUstream stream = nullptr;
    std::size_t used = 0;                       // number of its events in use
    std::map<CUdevice, std::size_t> waited;     // by device: it waited for that lane's steps below this
  };

  CUdevice device_of(std::size_t step) const {
    const Context* context = steps_[step].life.context;
    return context ? context->device : own_.device;
  }

  // A launch is ordered after the previous launch, whatever streams they are in.
  CUresult begin() {
    needed_.resize(steps_.size());
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      for (std::size_t before : steps_[i].after)
        if (device_of(before) != device_of(i)) needed_[before] = true;
      several_ = several_ || device_of(i) != own_.device;
    }
    events_.resize(steps_.size());
    Lane& own = lanes_[own_.device];
    if (exec_.last_event && !exec_.last_life.over() && exec_.last_stream != own_number_)
      if (CUresult r = cuStreamWaitEvent(own.stream, exec_.last_event, 0); r) return r;
    return several_ ? mark(own_.device, begun_) : CUDA_SUCCESS;
  }

  CUresult take(std::size_t i) {
    const CUdevice device = device_of(i);
    if (!lanes_.contains(device))
      if (CUresult r = open(*steps_[i].life.context); r) return r;
    Lane& lane = lanes_[device];
    for (std::size_t before : steps_[i].after) {
      std::size_t& waited = lane.waited[device_of(before)];
      if (device_of(before) == device || waited > before) continue;
      if (CUresult r = cuStreamWaitEvent(lane.stream, events_[before], 0); r) return r;
      waited = before + 1;
    }
    if (CUresult r = carry_out(steps_[i], lane); r) return r;
    return needed_[i] ? mark(device, events_[i]) : CUDA_SUCCESS;
  }

  CUresult carry_out(const LaunchStep& step, const Lane& lane) {
    if (const auto* index = std::get_if<std::size_t>(&step.what)) {
      StreamRef stream;
      if (CUresult r = resolve_stream(lane.stream, stream); r) return r;
      return launch_section(exec_.program.sections[*index], stream);
    }
    const Node* node = std::get<Node*>(step.what);
    if (exec_.disabled.contains(node)) return CUDA_SUCCESS;
    Work work;
    {
      std::lock_guard guard(graph_lock());
      work = node->work;
    }
    return do_step(work, lane.stream);
  }

  // Makes the stream on a device that is not the launch's, ordered after the launch's beginning.
  CUresult open(Context& context) {
    if (!context.alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    CUstream& stream = lane_of(context).stream;
    if (!stream) {
      const InContext inside(static_cast<CUcontext>(context.handle));
      if (CUresult r = inside.result ? inside.result : cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING); r) return r;
    }
    lanes_[context.device] = {&context, stream, 1, {}};
    return cuStreamWaitEvent(stream, begun_, 0);
  }

  GraphLane& lane_of(Context& context) { return exec_.lanes.try_emplace(context.number, ContextLife(&context)).first->second; }

  // Records the lane's next event.
  CUresult mark(CUdevice device, CUevent& event) {
    Lane& lane = lanes_[device];
    return record(lane, lane.used++, event);
  }

  CUresult record(Lane& lane, std::size_t number, CUevent& event) {
    std::vector<CUevent>& made = lane_of(*lane.context).events;
    while (made.size() <= number) {
      CUevent one = nullptr;
      const InContext inside(static_cast<CUcontext>(lane.context->handle));
      if (CUresult r = inside.result ? inside.result : cuEventCreate(&one, CU_EVENT_DISABLE_TIMING); r) return r;
      made.push_back(one);
    }
    return cuEventRecord(event = made[number], lane.stream);
  }

  CUresult end() {
    Lane& own = lanes_[own_.device];
    for (auto& [device, lane] : lanes_) {
      CUevent event = nullptr;
      if (device == own_.device) continue;
      if (CUresult r = mark(device, event); r) return r;
      if (CUresult r = cuStreamWaitEvent(own.stream, event, 0); r) return r;
    }
    exec_.last_stream = own_number_;
    exec_.last_life = ContextLife(&own_);
    return record(own, 0, exec_.last_event);
  }

  GraphExec& exec_;
  Context& own_;
  const std::uint64_t own_number_;
  const std::vector<LaunchStep>& steps_;
  std::map<CUdevice, Lane> lanes_;
  std::vector<bool> needed_;      // by a later step in another lane
  std::vector<CUevent> events_;   // recorded after each such step
  CUevent begun_ = nullptr;
  bool several_ = false;          // the launch uses several devices
};

}  // namespace

CUresult run_steps(GraphExec& exec, const StreamRef& stream, CUstream handle) {
  const auto elsewhere = [&](const LaunchStep& step) {  // a section alone may be given to any device's stream
    return std::holds_alternative<Node*>(step.what) && step.life.context && step.life.context->device != stream.context->device;
  };
  if (exec.program.steps.size() > 1 || std::ranges::any_of(exec.program.steps, elsewhere))
    return Launch(exec, stream, handle).run();
  for (const LaunchStep& step : exec.program.steps) {
    if (const auto* index = std::get_if<std::size_t>(&step.what))
      return launch_section(exec.program.sections[*index], stream);
    const Node* node = std::get<Node*>(step.what);
    Work work;
    {
      std::lock_guard guard(graph_lock());
      work = node->work;
    }
    return exec.disabled.contains(node) ? CUDA_SUCCESS : do_step(work, handle);
  }
  return CUDA_SUCCESS;
}

void end_lanes(GraphExec& exec) {
  for (auto& [number, lane] : exec.lanes) {
    if (lane.life.over()) continue;  // streams and events ended with the context
    for (CUevent event : lane.events) cuEventDestroy_v2(event);
    if (lane.stream) cuStreamDestroy_v2(lane.stream);
  }
  exec.lanes.clear();
}

}  // namespace rgpu
