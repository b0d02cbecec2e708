// The capture machine. See capture.hpp.
#include "capture.hpp"

#include <algorithm>

namespace rgpu {
namespace {

void join(std::vector<Node*>& into, const std::vector<Node*>& more) {
  for (Node* node : more)
    if (std::ranges::find(into, node) == into.end()) into.push_back(node);
}

}  // namespace

Sequence* CaptureMachine::by_id(std::uint64_t id) {
  auto it = sequences_.find(id);
  return it == sequences_.end() ? nullptr : &it->second;
}

Sequence* CaptureMachine::find(std::uint64_t stream) {
  auto it = capturing_.find(stream);
  return it == capturing_.end() ? nullptr : by_id(it->second);
}

const Sequence* CaptureMachine::of(std::uint64_t stream) const {
  return const_cast<CaptureMachine*>(this)->find(stream);
}

bool CaptureMachine::legacy_is_implicit(std::uint64_t context) const {
  for (auto& [id, sequence] : sequences_)
    if (sequence.active)
      for (auto& [number, branch] : sequence.streams)
        if (branch.blocking && branch.context == context) return true;
  return false;
}

// Refuses a use of the legacy stream while a blocking stream captures: it would have to order with that stream.
CUresult CaptureMachine::refuse_legacy(std::uint64_t context) {
  bool refused = false;
  for (auto& [id, sequence] : sequences_)
    for (auto& [number, branch] : sequence.streams)
      if (sequence.active && branch.blocking && branch.context == context) {
        sequence.active = false;
        refused = true;
      }
  return refused ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}

// ---------------------------------------------------------------- life

CUresult CaptureMachine::may_begin(const StreamId& stream, CUstreamCaptureMode mode) const {
  if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  if (stream.legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return capturing_.contains(stream.number) ? CUDA_ERROR_ILLEGAL_STATE : CUDA_SUCCESS;
}

void CaptureMachine::begin(const StreamId& stream, CUstreamCaptureMode mode, std::uint32_t thread, Graph* graph,
                           bool own_graph, std::vector<Node*> dependencies) {
  const std::uint64_t id = ++last_id_;
  Sequence& sequence = sequences_[id];
  sequence.id = id;
  sequence.mode = mode;
  sequence.thread = thread;
  sequence.origin = stream.number;
  sequence.graph = graph;
  sequence.own_graph = own_graph;
  std::vector<Node*> once;
  join(once, dependencies);
  sequence.streams[stream.number] = {std::move(once), stream.blocking, stream.context};
  capturing_[stream.number] = id;
}

CaptureMachine::Ended CaptureMachine::finish(std::uint64_t id, CUresult result) {
  Sequence& sequence = sequences_.at(id);
  Ended ended{result, sequence.graph, sequence.own_graph};
  for (auto& [number, branch] : sequence.streams) capturing_.erase(number);
  // Its events remain "last recorded in a capture", without the nodes: these may end with the graph.
  for (auto& [number, recorded] : events_)
    if (recorded.sequence == id) recorded.dependencies.clear();
  sequences_.erase(id);
  return ended;
}

std::optional<CaptureMachine::Ended> CaptureMachine::end(const StreamId& stream, std::uint32_t thread, CUresult& refused) {
  refused = CUDA_SUCCESS;
  Sequence* sequence = find(stream.number);
  if (stream.legacy || !sequence) {
    refused = CUDA_ERROR_ILLEGAL_STATE;
    return std::nullopt;
  }
  if (sequence->origin != stream.number) {
    sequence->active = false;  // ending a fork invalidates the capture that it belongs to
    refused = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    return std::nullopt;
  }
  if (sequence->thread != thread && sequence->mode != CU_STREAM_CAPTURE_MODE_RELAXED) {
    refused = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    return std::nullopt;
  }
  if (!sequence->active) return finish(sequence->id, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  const auto& joined = sequence->streams.at(stream.number).dependencies;
  for (auto& [number, branch] : sequence->streams)
    for (const Node* node : branch.dependencies)
      if (!reachable_(joined, node)) return finish(sequence->id, CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  return finish(sequence->id, CUDA_SUCCESS);
}

std::optional<CaptureMachine::Ended> CaptureMachine::stream_gone(std::uint64_t stream) {
  Sequence* sequence = find(stream);
  if (!sequence) return std::nullopt;
  if (sequence->origin == stream) return finish(sequence->id, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  // A forked stream whose work was joined may be destroyed; otherwise the capture is invalidated.
  const auto& joined = sequence->streams.at(sequence->origin).dependencies;
  for (const Node* node : sequence->streams.at(stream).dependencies)
    if (!reachable_(joined, node)) sequence->active = false;
  sequence->streams.erase(stream);
  capturing_.erase(stream);
  return std::nullopt;
}

// ---------------------------------------------------------------- work

CUresult CaptureMachine::target(const StreamId& stream, Sequence*& into) {
  into = nullptr;
  if (stream.legacy) return refuse_legacy(stream.context);
  Sequence* sequence = find(stream.number);
  if (!sequence) return CUDA_SUCCESS;
  if (!sequence->active) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  into = sequence;
  return CUDA_SUCCESS;
}

void CaptureMachine::added(Sequence& sequence, std::uint64_t stream, Node* node) {
  sequence.streams.at(stream).dependencies = {node};
}

CUresult CaptureMachine::record(std::uint64_t event, const StreamId& stream, bool& taken) {
  taken = false;
  Sequence* sequence = nullptr;
  if (CUresult r = target(stream, sequence); r) return r;
  if (!sequence) {
    events_.erase(event);
    return CUDA_SUCCESS;
  }
  taken = true;
  events_[event] = {sequence->id, sequence->streams.at(stream.number).dependencies};
  return CUDA_SUCCESS;
}

CUresult CaptureMachine::wait(const StreamId& stream, std::uint64_t event, bool recorded, bool& taken) {
  taken = false;
  Sequence* mine = nullptr;
  if (CUresult r = target(stream, mine); r) return r;
  auto it = events_.find(event);
  if (it == events_.end()) {
    if (!mine) return CUDA_SUCCESS;
    taken = true;
    if (!recorded) return CUDA_SUCCESS;  // nothing to wait for, as outside of a capture
    mine->active = false;
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  taken = true;
  Sequence* other = by_id(it->second.sequence);
  if (!other) return CUDA_ERROR_CAPTURED_EVENT;  // of a capture that has ended
  if (!other->active) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (mine && mine != other) {
    mine->active = other->active = false;
    return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  if (stream.legacy) {
    other->active = false;
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  if (!mine) {
    other->streams[stream.number] = {{}, stream.blocking, stream.context};
    capturing_[stream.number] = other->id;
  }
  join(other->streams.at(stream.number).dependencies, it->second.dependencies);
  return CUDA_SUCCESS;
}

CUresult CaptureMachine::update(const StreamId& stream, const std::vector<Node*>& nodes, bool replace) {
  Sequence* sequence = stream.legacy ? nullptr : find(stream.number);
  if (!sequence) return CUDA_ERROR_ILLEGAL_STATE;
  if (!sequence->active) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  auto& dependencies = sequence->streams.at(stream.number).dependencies;
  if (replace) dependencies.clear();
  join(dependencies, nodes);
  return CUDA_SUCCESS;
}

void CaptureMachine::node_gone(Node* node) {
  for (auto& [id, sequence] : sequences_)
    for (auto& [number, branch] : sequence.streams) std::erase(branch.dependencies, node);
  for (auto& [number, recorded] : events_) std::erase(recorded.dependencies, node);
}

// ---------------------------------------------------------------- questions

CUresult CaptureMachine::event_asked(std::uint64_t event) {
  auto it = events_.find(event);
  if (it == events_.end()) return CUDA_SUCCESS;
  if (Sequence* sequence = by_id(it->second.sequence)) sequence->active = false;
  return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult CaptureMachine::stream_asked(const StreamId& stream) {
  if (stream.legacy) return refuse_legacy(stream.context);
  Sequence* sequence = find(stream.number);
  if (!sequence) return CUDA_SUCCESS;
  if (!sequence->active) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  sequence->active = false;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult CaptureMachine::context_asked(std::uint64_t context) {
  bool refused = false;
  for (auto& [id, sequence] : sequences_)
    for (auto& [number, branch] : sequence.streams)
      if (sequence.active && branch.context == context) {
        sequence.active = false;
        refused = true;
      }
  return refused ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult CaptureMachine::unsafe(std::uint32_t thread, CUstreamCaptureMode mode) {
  if (mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  bool refused = false;
  for (auto& [id, sequence] : sequences_) {
    const bool own = sequence.thread == thread && sequence.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    const bool global = mode == CU_STREAM_CAPTURE_MODE_GLOBAL && sequence.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!sequence.active || (!own && !global)) continue;
    sequence.active = false;
    refused = true;
  }
  return refused ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

}  // namespace rgpu
