// Executable graphs: instantiation, and the checks and updates before a launch. See graph_exec.hpp; graph_launch.cpp,
// graph_update.cpp.
#include "graph_exec.hpp"
#include "profile.hpp"

#include <algorithm>

#include "capturing.hpp"
#include "memory.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

constexpr std::uint64_t KNOWN_FLAGS = 15;

bool context_lives(const GraphExec& exec) {
  return exec.context->alive && exec.context->number == exec.context_number;
}

// Indexes nodes by id, those of embedded graphs too.
void index_nodes(const Graph& graph, std::unordered_map<std::uint64_t, Node*>& nodes) {
  for (Node* node : graph.nodes) {
    nodes[node->cloned_from] = node;
    for (const Graph* embedded : embedded_in(*node)) index_nodes(*embedded, nodes);
  }
}

// Contexts that nodes name, also in embedded graphs, in the order of the nodes.
void contexts_of_nodes(const Graph& graph, std::vector<Context*>& found) {
  for (const Node* node : graph.nodes) {
    for (const Graph* embedded : embedded_in(*node)) contexts_of_nodes(*embedded, found);
    if (Context* its = context_of_work(node->work)) found.push_back(its);
  }
}

// The context of an executable graph: the current one, or the last node's where no node is on the current one's device.
Context* home_of(const Graph& graph, Context* current) {
  std::vector<Context*> found;
  contexts_of_nodes(graph, found);
  const bool there = std::ranges::any_of(found, [&](const Context* one) { return one->device == current->device; });
  return found.empty() || there ? current : found.back();
}

// Publishes the sections of a program that has none on the server yet. exec.lock held.
CUresult publish_sections(GraphExec& exec, Program& program) {
  std::vector<std::vector<std::uint8_t>> encoded;
  {
    std::lock_guard guard(graph_lock());
    for (GraphPart& section : program.sections) encoded.push_back(encode_section(section, exec.disabled));
  }
  for (std::size_t i = 0; i < program.sections.size(); ++i) {
    Payload payload(encoded[i].data(), encoded[i].size());
    if (payload.error) return payload.error;
    GraphPart& part = program.sections[i];
    wire::GraphInstantiate call{};
    Section section(payload.external());
    if (section.status()) return section.status();
    call.exec = part.number = next_number();
    call.context = part.life.number;
    call.flags = exec.flags & CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
    if (CUresult r = section.publish(call, payload); r) return r;
  }
  return CUDA_SUCCESS;
}

void destroy_sections(const Program& program) {
  for (const GraphPart& section : program.sections) {
    wire::GraphExecDestroy call{};
    call.exec = section.number;
    if (section.number && !section.life.over()) submit(call);  // otherwise the section ended with the context
  }
}

struct Problem {
  CUgraphInstantiateResult result = CUDA_GRAPH_INSTANTIATE_SUCCESS;
  Node* node = nullptr;
};

// Whether a condition was made for the graph, or for one within it, that no node has.
bool unused_conditions(const Graph& graph) {
  if (!graph.conditions.empty()) return true;
  for (const Node* node : graph.nodes)
    for (const Graph* embedded : embedded_in(*node))
      if (unused_conditions(*embedded)) return true;
  return false;
}

CUresult check_conditions(const Graph& graph, const Program& program, Problem& problem) {
  if ((problem.node = misplaced(graph))) {
    problem.result = CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED;
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (unused_conditions(graph)) {
    problem.result = CUDA_GRAPH_INSTANTIATE_CONDITIONAL_HANDLE_UNUSED;
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!divided(program)) return CUDA_SUCCESS;
  log_once("divided condition", "cuGraphInstantiate: a condition that is set before, and asked after, a node of the host "
                                "(a copy with host memory, a host function, an event) is not supported");
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult instantiate(CUgraphExec* out, CUgraph handle, std::uint64_t flags, Problem& problem) {
  Context* context = nullptr;
  problem.result = CUDA_GRAPH_INSTANTIATE_ERROR;
  if (CUresult r = current(context); r) return r;
  if (!out || (flags & ~KNOWN_FLAGS)) return CUDA_ERROR_INVALID_VALUE;
  if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) {
    log_once("device launch", "cuGraphInstantiate: graphs that are launched from the device are not supported");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  auto made = std::make_unique<GraphExec>();
  GraphExec* exec = made.get();
  exec->flags = flags;
  {
    std::lock_guard guard(graph_lock());
    Graph* graph = find(handle);
    if (!graph || graph->capturing) return CUDA_ERROR_INVALID_VALUE;
    exec->context = home_of(*graph, context);
    exec->context_number = exec->context->number;
    const auto program = lower(*graph, *exec->context);
    if (!program) {
      problem.result = CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE;
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (CUresult r = check_conditions(*graph, *program, problem); r) return r;
    exec->graph = clone_graph(*graph);
    if (!exec->graph) return CUDA_ERROR_OUT_OF_MEMORY;
    index_nodes(*exec->graph, exec->nodes);
    exec->program = *lower(*exec->graph, *exec->context);
    exec->unsure = find_stray(*exec->graph, exec->disabled) != nullptr;
  }
  if (exec->unsure)
    exec->rebuild = true;  // at the first launch, if the memory that its nodes point to exists by then
  else if (CUresult r = publish_sections(*exec, exec->program); r)
    return r;
  void* given = enroll(std::move(made));
  if (!given) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = static_cast<CUgraphExec>(given);
  problem.result = CUDA_GRAPH_INSTANTIATE_SUCCESS;
  return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- launches

bool misplaced_now(const GraphExec& exec) {
  std::lock_guard guard(graph_lock());
  return misplaced(*exec.graph) != nullptr;
}

// Sends the server the changes since the last launch. exec.lock held.
CUresult send_changes(GraphExec& exec) {
  exec.replaced.clear();
  if (exec.rebuild) {
    std::optional<Program> program;
    {
      std::lock_guard guard(graph_lock());
      program = lower(*exec.graph, *exec.context);
    }
    if (divided(*program) || misplaced_now(exec)) return CUDA_ERROR_NOT_SUPPORTED;
    destroy_sections(exec.program);
    exec.program = std::move(*program);  // without a cycle: its edges are those of a graph that was ordered before
    exec.rebuild = false;
    exec.changed.clear();
    return publish_sections(exec, exec.program);
  }
  if (exec.changed.empty()) return CUDA_SUCCESS;
  std::vector<std::pair<std::uint64_t, std::vector<std::uint8_t>>> updates;
  {
    std::lock_guard guard(graph_lock());
    std::map<std::size_t, std::vector<std::pair<std::uint32_t, const Node*>>> of_section;
    for (const Node* node : exec.changed)
      if (auto it = exec.program.places.find(node); it != exec.program.places.end())
        of_section[it->second.first].push_back({it->second.second, node});
    for (auto& [index, changes] : of_section) {
      std::ranges::sort(changes);
      find_pinned(exec.program.sections[index]);
      updates.push_back({exec.program.sections[index].number, encode_changes(changes, exec.disabled)});
    }
  }
  exec.changed.clear();
  for (auto& [number, bytes] : updates) {
    wire::GraphExecUpdate call{};
    call.exec = number;
    if (CUresult r = submit(call, bytes.data(), bytes.size()); r) return r;
  }
  return CUDA_SUCCESS;
}

// Looks up pointers that were set since the last check: as a call outside of graphs would, but at the launch. A pointer
// found once is not looked up again: if its memory is freed meanwhile, the device reports the error. exec.lock held.
CUresult check_pointers(GraphExec& exec) {
  if (!exec.unsure) return CUDA_SUCCESS;
  std::lock_guard guard(graph_lock());
  if (const Node* node = find_stray(*exec.graph, exec.disabled)) {
    log_once("stray graph node", "cuGraphLaunch: a node of type %d points to no memory of the program's; nothing was "
                                 "launched", static_cast<int>(node_type(node->work)));
    return CUDA_ERROR_INVALID_VALUE;
  }
  exec.unsure = false;
  return CUDA_SUCCESS;
}

// Checks that the contexts, communicators and arrays that steps need exist. Nothing is launched before that. exec.lock
// held.
CUresult check_steps(const GraphExec& exec) {
  std::lock_guard guard(graph_lock());
  for (const LaunchStep& step : exec.program.steps) {
    if (step.life.over()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    Node* const* node = std::get_if<Node*>(&step.what);
    if (!node || exec.disabled.contains(*node)) continue;
    const auto* copy = std::get_if<CopyWork>(&(*node)->work);
    if (copy && names_array(copy->copy))
      if (CUresult r = check_box(copy->copy); r) return r;
    const auto* group = std::get_if<CollectivesWork>(&(*node)->work);
    if (!group || communicators_there(group->operations)) continue;
    log_once("graph without communicator", "cuGraphLaunch: the communicator of a captured collective was destroyed; "
                                           "nothing was launched");
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

// Launching into a capturing stream captures the graph as an embedded one.
CUresult capture_launch(GraphExec& exec, const StreamRef& stream, bool& taken) {
  CUstreamCaptureStatus status;
  Graph* copy = nullptr;
  std::vector<std::shared_ptr<void>> garbage;
  if (stream.object) {
    if (CUresult r = cuStreamIsCapturing(static_cast<CUstream>(stream.object->handle), &status); r) return r;
    if (status == CU_STREAM_CAPTURE_STATUS_NONE) return CUDA_SUCCESS;
    std::lock_guard guard(graph_lock());
    if (has_conditionals(*exec.graph)) return CUDA_ERROR_NOT_SUPPORTED;  // no embedded graph may have conditional nodes
    copy = clone_graph(*exec.graph);
    if (!copy) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  CUresult r = capture_work(stream, ChildWork{copy}, taken);
  if (copy && (r || !taken)) {
    std::lock_guard guard(graph_lock());
    end_graph(*copy, garbage);
  }
  return r;
}

CUresult launch(CUgraphExec handle, CUstream stream_handle) {
  if (CUresult r = require(); r) return r;
  GraphExec* exec = find_exec(handle);
  if (!exec) return CUDA_ERROR_INVALID_VALUE;
  StreamRef stream;
  if (CUresult r = resolve_stream(stream_handle, stream); r) return r;
  if (!context_lives(*exec)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  std::lock_guard guard(exec->lock);
  if (capture_open()) {
    bool taken = false;
    if (CUresult r = capture_launch(*exec, stream, taken); r || taken) return r;
  }
  if (CUresult r = check_pointers(*exec); r) return r;
  if (CUresult r = check_steps(*exec); r) return r;
  const bool free_first = exec->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
  if (CUresult r = begin_graph_memory(exec->program.allocates, free_first); r) return r;
  if (CUresult r = send_changes(*exec); r) return r;
  if (CUresult r = run_steps(*exec, stream, stream_handle); r) return r;
  for (CUdeviceptr address : exec->program.frees) free_graph_memory(address);
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuGraphInstantiate_v2(CUgraphExec* phGraphExec, CUgraph hGraph, CUgraphNode* phErrorNode, char* logBuffer,
                               size_t bufferSize) {
  RGPU_PROFILED(578, "cuGraphInstantiate_v2", phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize);
  Problem problem;
  CUresult r = instantiate(phGraphExec, hGraph, 0, problem);
  if (phErrorNode) *phErrorNode = problem.node ? problem.node->node_handle() : nullptr;
  if (logBuffer && bufferSize) *logBuffer = 0;
  return api_.leave(r);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* phGraphExec, CUgraph hGraph, unsigned long long flags) {
  RGPU_PROFILED(643, "cuGraphInstantiateWithFlags", phGraphExec, hGraph, flags);
  Problem problem;
  return api_.leave(instantiate(phGraphExec, hGraph, flags, problem));
}

CUresult cuGraphInstantiateWithParams(CUgraphExec* phGraphExec, CUgraph hGraph,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS* instantiateParams) {
  RGPU_PROFILED(656, "cuGraphInstantiateWithParams", phGraphExec, hGraph, instantiateParams);
  if (!instantiateParams) return api_.leave(CUDA_ERROR_INVALID_VALUE);
  Problem problem;
  CUresult r = instantiate(phGraphExec, hGraph, instantiateParams->flags, problem);
  instantiateParams->result_out = problem.result;
  instantiateParams->hErrNode_out = problem.node ? problem.node->node_handle() : nullptr;
  return api_.leave(r);
}

CUresult cuGraphExecDestroy(CUgraphExec hGraphExec) {
  if (CUresult r = require_session(); r) return r;
  GraphExec* exec = find_exec(hGraphExec);
  if (!exec || !retire(exec)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard mine(exec->lock);
  destroy_sections(exec->program);
  end_lanes(*exec);
  std::vector<std::shared_ptr<void>> garbage;
  exec->program = {};
  exec->replaced.clear();
  std::lock_guard guard(graph_lock());
  end_graph(*exec->graph, garbage);
  return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec hGraph, CUstream hStream) {
  RGPU_PROFILED(514, "cuGraphLaunch", hGraph, hStream);
  print_device_text();
  return api_.leave(launch(hGraph, hStream));
}

CUresult cuGraphUpload(CUgraphExec hGraph, CUstream hStream) {  // an instantiated graph is on the server already
  if (CUresult r = require(); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(hStream, stream); r) return r;
  return find_exec(hGraph) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphExecGetFlags(CUgraphExec hGraphExec, uint64_t* flags) {
  if (CUresult r = require(); r) return r;
  GraphExec* exec = find_exec(hGraphExec);
  if (!exec || !flags) return CUDA_ERROR_INVALID_VALUE;
  *flags = exec->flags;
  return CUDA_SUCCESS;
}

}  // extern "C"
