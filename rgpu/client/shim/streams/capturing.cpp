// Stream capture: the capture machine under its lock, and the driver functions that begin, end and query a capture.
// Nothing of it is on the wire.
#include "capturing.hpp"

#include <algorithm>

#include "capture.hpp"
#include "memory.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

CaptureMachine& machine() {  // guarded by graph_lock()
  static auto* m = new CaptureMachine(reachable);
  return *m;
}

// The array that cuStreamGetCaptureInfo returns, valid until its next call for the stream.
std::map<std::uint64_t, std::vector<CUgraphNode>>& handed_out() {
  static auto* m = new std::map<std::uint64_t, std::vector<CUgraphNode>>;
  return *m;
}

thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

CaptureMachine::StreamId id_of(const StreamRef& s) {
  return {s.number, !s.object, s.object && !(s.object->flags & CU_STREAM_NON_BLOCKING), s.context->number};
}

// The locked machine; its state afterwards is copied into the flags.
struct Locked {
  std::unique_lock<std::mutex> guard{graph_lock()};
  CaptureMachine* operator->() { return &machine(); }
  ~Locked() {
    detail::captures_open.store(machine().open(), std::memory_order_release);
    detail::captured_events.store(machine().has_events(), std::memory_order_release);
  }
};

// Ends a capture: its graph is returned, or ended when the capture failed.
CUgraph finish_capture(const CaptureMachine::Ended& ended, std::vector<std::shared_ptr<void>>& garbage) {
  ended.graph->capturing = false;
  if (!ended.result) return ended.graph->graph_handle();
  if (ended.own_graph) end_graph(*ended.graph, garbage);
  return nullptr;
}

CUresult begin(CUstream handle, CUgraph into, const CUgraphNode* dependencies, std::size_t n, CUstreamCaptureMode mode,
               bool own) {
  if (CUresult r = require(); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(handle, stream); r) return r;
  Locked locked;
  if (CUresult r = locked->may_begin(id_of(stream), mode); r) return r;
  Graph* graph = own ? make_graph() : find(into);
  if (!graph) return own ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
  std::vector<Node*> nodes;
  for (std::size_t i = 0; i < n; ++i) {
    Node* node = find(dependencies[i]);
    if (!node || node->graph != graph) return CUDA_ERROR_INVALID_VALUE;
    nodes.push_back(node);
  }
  graph->capturing = true;
  locked->begin(id_of(stream), mode, thread_number(), graph, own, std::move(nodes));
  return CUDA_SUCCESS;
}

CUresult info(CUstream handle, CUstreamCaptureStatus* status, uint64_t* id, CUgraph* graph, const CUgraphNode** nodes,
              std::size_t* n) {
  if (CUresult r = require(); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(handle, stream); r) return r;
  if (!status) return CUDA_ERROR_INVALID_VALUE;
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (!capture_open()) return CUDA_SUCCESS;
  Locked locked;
  if (!stream.object) return locked->legacy_is_implicit(stream.context->number) ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
  const Sequence* sequence = locked->of(stream.number);
  if (!sequence) return CUDA_SUCCESS;
  *status = sequence->active ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  if (!sequence->active) return CUDA_SUCCESS;
  if (id) *id = sequence->id;
  if (graph) *graph = sequence->graph->graph_handle();
  auto& kept = handed_out()[stream.number];
  kept.clear();
  for (Node* node : sequence->streams.at(stream.number).dependencies) kept.push_back(node->node_handle());
  if (nodes) *nodes = kept.data();
  if (n) *n = kept.size();
  return CUDA_SUCCESS;
}

// Adds an edge from the previous collectives: ranks must agree on the order of collectives, whatever streams these are
// in, and a launch numbers them.
void order_collectives(Graph& graph, Node& node) {
  for (auto it = graph.nodes.rbegin(); it != graph.nodes.rend(); ++it) {
    if (*it == &node || !std::holds_alternative<CollectivesWork>((*it)->work)) continue;
    add_edge(**it, node);  // nothing depends on the new node yet
    return;
  }
}

}  // namespace

// ---------------------------------------------------------------- for the rest of the shim

std::atomic<bool> detail::captures_open{false};
std::atomic<bool> detail::captured_events{false};

CUresult capture_work(const StreamRef& stream, Work work, bool& taken) {
  Locked locked;
  Sequence* sequence = nullptr;
  CUresult r = locked->target(id_of(stream), sequence);
  taken = sequence != nullptr;
  if (r || !sequence) return r;
  Node* node = add_node(*sequence->graph, std::move(work), sequence->streams.at(stream.number).dependencies);
  if (!node) return CUDA_ERROR_OUT_OF_MEMORY;
  if (std::holds_alternative<CollectivesWork>(node->work)) order_collectives(*sequence->graph, *node);
  locked->added(*sequence, stream.number, node);
  return CUDA_SUCCESS;
}

CUresult refuse_in_capture(const StreamRef& stream, const char* name) {
  Locked locked;
  Sequence* sequence = nullptr;
  CUresult r = locked->target(id_of(stream), sequence);
  if (r || !sequence) return r;
  log_once(name, "%s: not permitted in a stream capture", name);
  return locked->stream_asked(id_of(stream));
}

CUresult open_capture_of(const StreamRef& stream, std::uint64_t& id) {
  Locked locked;
  Sequence* sequence = nullptr;
  CUresult r = locked->target(id_of(stream), sequence);
  id = sequence ? sequence->id : 0;
  return r;
}

CUresult capture_record(const StreamRef& stream, Event& event, unsigned flags, bool& taken) {
  if (flags & CU_EVENT_RECORD_EXTERNAL) return capture_work(stream, EventRecordWork{static_cast<CUevent>(event.handle)}, taken);
  Locked locked;
  return locked->record(event.number, id_of(stream), taken);
}

CUresult capture_wait(const StreamRef& stream, Event& event, unsigned flags, bool& taken) {
  if (flags & CU_EVENT_WAIT_EXTERNAL) return capture_work(stream, EventWaitWork{static_cast<CUevent>(event.handle)}, taken);
  bool recorded;
  {
    std::lock_guard guard(event.lock);
    recorded = event.record != 0;
  }
  Locked locked;
  return locked->wait(id_of(stream), event.number, recorded, taken);
}

CUresult detail::unsafe_call() {
  Locked locked;
  return locked->unsafe(thread_number(), thread_mode);
}

CUresult detail::event_asked(const Event& event) {
  Locked locked;
  if (CUresult r = locked->event_asked(event.number); r) return r;
  return locked->unsafe(thread_number(), thread_mode);
}

CUresult detail::stream_asked(const StreamRef& stream) {
  Locked locked;
  if (CUresult r = locked->stream_asked(id_of(stream)); r) return r;
  return locked->unsafe(thread_number(), thread_mode);
}

CUresult detail::context_asked(const Context& context) {
  Locked locked;
  if (CUresult r = locked->context_asked(context.number); r) return r;
  return locked->unsafe(thread_number(), thread_mode);
}

void detail::stream_gone(const Stream& stream) {
  std::vector<std::shared_ptr<void>> garbage;  // freed after the lock is released
  Locked locked;
  handed_out().erase(stream.number);
  if (auto ended = locked->stream_gone(stream.number)) finish_capture(*ended, garbage);
}

void detail::event_gone(const Event& event) {
  Locked locked;
  locked->event_gone(event.number);
}

void capture_node_gone(Node* node) { machine().node_gone(node); }

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuStreamBeginCapture(CUstream hStream) {
  return begin(hStream, nullptr, nullptr, 0, CU_STREAM_CAPTURE_MODE_GLOBAL, true);
}

CUresult cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode) {
  return begin(hStream, nullptr, nullptr, 0, mode, true);
}

CUresult cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode* dependencies,
                                     const CUgraphEdgeData*, size_t numDependencies, CUstreamCaptureMode mode) {
  if (numDependencies && !dependencies) return CUDA_ERROR_INVALID_VALUE;
  return begin(hStream, hGraph, dependencies, numDependencies, mode, false);
}

CUresult cuStreamEndCapture(CUstream hStream, CUgraph* phGraph) {
  if (CUresult r = require_session(); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(hStream, stream); r) return r;
  if (!phGraph) return CUDA_ERROR_INVALID_VALUE;
  *phGraph = nullptr;
  std::vector<std::shared_ptr<void>> garbage;
  Locked locked;
  CUresult refused;
  auto ended = locked->end(id_of(stream), thread_number(), refused);
  handed_out().erase(stream.number);
  if (!ended) return refused;
  *phGraph = finish_capture(*ended, garbage);
  return ended->result;
}

CUresult cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus* captureStatus) {
  return info(hStream, captureStatus, nullptr, nullptr, nullptr, nullptr);
}

CUresult cuStreamGetCaptureInfo(CUstream hStream, CUstreamCaptureStatus* captureStatus_out, uint64_t* id_out) {
  return info(hStream, captureStatus_out, id_out, nullptr, nullptr, nullptr);
}

CUresult cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus* captureStatus_out, uint64_t* id_out,
                                   CUgraph* graph_out, const CUgraphNode** dependencies_out,
                                   size_t* numDependencies_out) {
  return info(hStream, captureStatus_out, id_out, graph_out, dependencies_out, numDependencies_out);
}

// Every edge of ours is a full dependency, which a null array represents.
CUresult cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus* captureStatus_out, uint64_t* id_out,
                                   CUgraph* graph_out, const CUgraphNode** dependencies_out,
                                   const CUgraphEdgeData** edgeData_out, size_t* numDependencies_out) {
  CUresult r = info(hStream, captureStatus_out, id_out, graph_out, dependencies_out, numDependencies_out);
  if (!r && edgeData_out) *edgeData_out = nullptr;
  return r;
}

CUresult cuStreamUpdateCaptureDependencies(CUstream hStream, CUgraphNode* dependencies, size_t numDependencies,
                                           unsigned int flags) {
  if (CUresult r = require(); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(hStream, stream); r) return r;
  if (flags > CU_STREAM_SET_CAPTURE_DEPENDENCIES || (numDependencies && !dependencies)) return CUDA_ERROR_INVALID_VALUE;
  Locked locked;
  const Sequence* sequence = stream.object ? locked->of(stream.number) : nullptr;
  std::vector<Node*> nodes;
  for (std::size_t i = 0; sequence && i < numDependencies; ++i) {
    Node* node = find(dependencies[i]);
    if (!node || node->graph != sequence->graph) return CUDA_ERROR_INVALID_VALUE;
    nodes.push_back(node);
  }
  return locked->update(id_of(stream), nodes, flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES);
}

CUresult cuStreamUpdateCaptureDependencies_v2(CUstream hStream, CUgraphNode* dependencies, const CUgraphEdgeData*,
                                              size_t numDependencies, unsigned int flags) {
  return cuStreamUpdateCaptureDependencies(hStream, dependencies, numDependencies, flags);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  if (!mode || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
    return CUDA_ERROR_INVALID_VALUE;
  std::swap(*mode, thread_mode);
  return CUDA_SUCCESS;
}

}  // extern "C"
