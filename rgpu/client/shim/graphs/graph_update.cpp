// Executable graphs: changes of their parameters. See graph_exec.hpp.
#include <algorithm>

#include "capturing.hpp"
#include "graph_exec.hpp"
#include "session.hpp"

namespace rgpu {
namespace {


// Notes that the server's copy of the node is out of date: it is sent by itself, or, for a node in a body, with the
// whole graph. exec.lock held.
void note_change(GraphExec& exec, const Node& node) {
  if (exec.program.places.contains(&node))
    exec.changed.insert(&node);
  else
    exec.rebuild = true;
}

// Gives a node of the executable graph other work of the same kind. Both locks held.
void replace_work(GraphExec& exec, Node& node, Work work) {
  const bool was_client = on_client(node);
  const Context* const was = context_of_work(node.work);
  if (std::holds_alternative<CopyWork>(work) || std::holds_alternative<MemsetWork>(work) ||
      std::holds_alternative<BatchWork>(work) || std::holds_alternative<CollectivesWork>(work))
    exec.unsure = true;
  const auto before = encode_node(node);
  std::swap(node.work, work);
  const Context* const now = context_of_work(node.work);
  if (on_client(node) != was_client || (was ? was->device : -1) != (now ? now->device : -1))
    exec.rebuild = true;
  else if (!was_client && encode_node(node) != before)
    note_change(exec, node);
  exec.replaced.push_back(std::move(work));
}

struct Mismatch {
  CUgraphExecUpdateResult result = CU_GRAPH_EXEC_UPDATE_SUCCESS;
  Node *node = nullptr, *from = nullptr;
};

// Compares nodes in the order in which they were added, as the driver does for the same sequence of calls.
bool same_shape(const Graph& old, const Graph& now, Mismatch& found) {
  std::unordered_map<const Node*, std::size_t> index;
  for (std::size_t i = 0; i < old.nodes.size(); ++i) index[old.nodes[i]] = i;
  found.result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
  if (old.nodes.size() != now.nodes.size()) return false;
  for (std::size_t i = 0; i < now.nodes.size(); ++i) {
    Node *before = old.nodes[i], *node = now.nodes[i];
    found.node = node;
    if (before->work.index() != node->work.index()) {
      found.result = CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
      return false;
    }
    std::set<const Node*> wanted;
    for (const Node* dependency : before->dependencies) wanted.insert(now.nodes[index[dependency]]);
    if (wanted != std::set<const Node*>(node->dependencies.begin(), node->dependencies.end())) return false;
    const auto mine = embedded_in(*before), others = embedded_in(*node);
    if (mine.size() != others.size()) return false;
    const auto *c = std::get_if<ConditionalWork>(&before->work), *d = std::get_if<ConditionalWork>(&node->work);
    if (c && c->type != d->type) {
      found.result = CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
      return false;
    }
    for (std::size_t part = 0; part < mine.size(); ++part)
      if (!same_shape(*mine[part], *others[part], found)) return false;
    const auto *k = std::get_if<KernelWork>(&before->work), *l = std::get_if<KernelWork>(&node->work);
    if (k && k->context != l->context) {
      found.result = CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE;
      return false;
    }
  }
  found = {};
  return true;
}

void take_over(GraphExec& exec, const Graph& old, const Graph& now) {
  for (std::size_t i = 0; i < now.nodes.size(); ++i) {
    Node *mine = old.nodes[i], *node = now.nodes[i];
    exec.nodes[node->id] = mine;  // parameters may be set through the new graph's nodes as well
    const auto olds = embedded_in(*mine), news = embedded_in(*node);
    for (std::size_t part = 0; part < olds.size(); ++part) take_over(exec, *olds[part], *news[part]);
    if (auto* conditional = std::get_if<ConditionalWork>(&mine->work)) {
      conditional->condition = std::get<ConditionalWork>(node->work).condition;  // new kernels name that one
      exec.rebuild = true;
    } else if (!std::holds_alternative<ChildWork>(mine->work)) {
      replace_work(exec, *mine, node->work);
    }
  }
}

CUresult update(CUgraphExec handle, CUgraph graph_handle, Mismatch& found) {
  if (CUresult r = require(); r) return r;
  found.result = CU_GRAPH_EXEC_UPDATE_ERROR;
  GraphExec* exec = find_exec(handle);
  if (!exec) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard mine(exec->lock);
  std::lock_guard guard(graph_lock());
  Graph* graph = find(graph_handle);
  if (!graph || graph->capturing) return CUDA_ERROR_INVALID_VALUE;
  if (!same_shape(*exec->graph, *graph, found)) return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  if ((found.node = misplaced(*graph))) {
    found.result = CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED;
    return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  }
  take_over(*exec, *exec->graph, *graph);
  if (auto program = lower(*exec->graph, *exec->context)) {  // memory nodes may name other addresses
    exec->program.allocates = std::move(program->allocates);
    exec->program.frees = std::move(program->frees);
  }
  return CUDA_SUCCESS;
}

// Sets the parameters of one node of an executable graph; `make(old, new)` checks and fills in the new ones.
template <class Kind, class Make>
CUresult set_work(CUgraphExec handle, CUgraphNode node_handle, Make&& make) {
  if (CUresult r = require(); r) return r;
  GraphExec* exec = find_exec(handle);
  if (!exec) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard mine(exec->lock);
  Node* node = nullptr;
  Work old;
  {
    std::lock_guard guard(graph_lock());
    Node* given = find(node_handle);
    auto it = given ? exec->nodes.find(given->id) : exec->nodes.end();
    if (it == exec->nodes.end() || !std::holds_alternative<Kind>(it->second->work)) return CUDA_ERROR_INVALID_VALUE;
    node = it->second;
    old = node->work;
  }
  Work now = std::get<Kind>(old);
  if (CUresult r = make(std::get<Kind>(old), std::get<Kind>(now)); r) return r;
  std::lock_guard guard(graph_lock());
  replace_work(*exec, *node, std::move(now));
  return CUDA_SUCCESS;
}

CUresult can_be_disabled(CUgraphExec handle, CUgraphNode node_handle, GraphExec*& exec, Node*& node) {
  if (CUresult r = require(); r) return r;
  exec = find_exec(handle);
  if (!exec) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard guard(graph_lock());
  Node* given = find(node_handle);
  auto it = given ? exec->nodes.find(given->id) : exec->nodes.end();
  if (it == exec->nodes.end()) return CUDA_ERROR_INVALID_VALUE;
  node = it->second;
  const CUgraphNodeType type = node_type(node->work);
  const bool may = type == CU_GRAPH_NODE_TYPE_KERNEL || type == CU_GRAPH_NODE_TYPE_MEMCPY || type == CU_GRAPH_NODE_TYPE_MEMSET;
  return may ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

template <class V2, class V1>
V2 widened(const V1& params) {
  V2 wide{};
  static_assert(sizeof(V1) <= sizeof(V2));
  std::copy_n(reinterpret_cast<const char*>(&params), sizeof params, reinterpret_cast<char*>(&wide));
  return wide;
}

}  // namespace
}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode* hErrorNode_out,
                           CUgraphExecUpdateResult* updateResult_out) {
  Mismatch found;
  CUresult r = update(hGraphExec, hGraph, found);
  if (hErrorNode_out) *hErrorNode_out = found.node ? found.node->node_handle() : nullptr;
  if (updateResult_out) *updateResult_out = found.result;
  return r;
}

CUresult cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo* resultInfo) {
  Mismatch found;
  CUresult r = update(hGraphExec, hGraph, found);
  if (resultInfo) {
    resultInfo->result = found.result;
    resultInfo->errorNode = found.node ? found.node->node_handle() : nullptr;
    resultInfo->errorFromNode = found.from ? found.from->node_handle() : nullptr;
  }
  return r;
}

CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec hGraphExec, CUgraphNode hNode,
                                           const CUDA_KERNEL_NODE_PARAMS_v2* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return set_work<KernelWork>(hGraphExec, hNode, [&](const KernelWork& old, KernelWork& now) {
    CUresult r = kernel_work(*nodeParams, &old, now);
    return !r && now.context != old.context ? CUDA_ERROR_INVALID_VALUE : r;
  });
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                        const CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  const auto wide = widened<CUDA_KERNEL_NODE_PARAMS_v2>(*nodeParams);
  return cuGraphExecKernelNodeSetParams_v2(hGraphExec, hNode, &wide);
}

CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMCPY3D* copyParams,
                                        CUcontext ctx) {
  if (!copyParams) return CUDA_ERROR_INVALID_VALUE;
  return set_work<CopyWork>(hGraphExec, hNode,
                            [&](const CopyWork&, CopyWork& now) { return copy_work(*copyParams, ctx, now); });
}

CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                        const CUDA_MEMSET_NODE_PARAMS_v1* memsetParams, CUcontext ctx) {
  if (!memsetParams) return CUDA_ERROR_INVALID_VALUE;
  auto wide = widened<CUDA_MEMSET_NODE_PARAMS_v2>(*memsetParams);
  wide.ctx = ctx;
  return set_work<MemsetWork>(hGraphExec, hNode,
                              [&](const MemsetWork&, MemsetWork& now) { return memset_work(wide, now); });
}

CUresult cuGraphExecHostNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                      const CUDA_HOST_NODE_PARAMS_v1* nodeParams) {
  if (!nodeParams || !nodeParams->fn) return CUDA_ERROR_INVALID_VALUE;
  return set_work<HostWork>(hGraphExec, hNode, [&](const HostWork&, HostWork& now) {
    now = {nodeParams->fn, nodeParams->userData};
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event) {
  return set_work<EventRecordWork>(hGraphExec, hNode, [&](const EventRecordWork&, EventRecordWork& now) {
    now.event = event;
    return event_work(event);
  });
}

CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event) {
  return set_work<EventWaitWork>(hGraphExec, hNode, [&](const EventWaitWork&, EventWaitWork& now) {
    now.event = event;
    return event_work(event);
  });
}

CUresult cuGraphExecBatchMemOpNodeSetParams(CUgraphExec graphExec, CUgraphNode node,
                                            const CUDA_BATCH_MEM_OP_NODE_PARAMS* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return set_work<BatchWork>(graphExec, node, [&](const BatchWork&, BatchWork& now) { return batch_work(*nodeParams, now); });
}

CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph) {
  if (CUresult r = require(); r) return r;
  GraphExec* exec = find_exec(hGraphExec);
  if (!exec) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard mine(exec->lock);
  std::lock_guard guard(graph_lock());
  Node* given = find(hNode);
  Graph* graph = find(childGraph);
  auto it = given ? exec->nodes.find(given->id) : exec->nodes.end();
  if (!graph || it == exec->nodes.end()) return CUDA_ERROR_INVALID_VALUE;
  auto* child = std::get_if<ChildWork>(&it->second->work);
  Mismatch found;
  if (!child || !same_shape(*child->graph, *graph, found)) return CUDA_ERROR_INVALID_VALUE;
  take_over(*exec, *child->graph, *graph);
  return CUDA_SUCCESS;
}

CUresult cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  auto& value = nodeParams->value;
  switch (nodeParams->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: return cuGraphExecKernelNodeSetParams_v2(hGraphExec, hNode, &value.kernel);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return cuGraphExecMemcpyNodeSetParams(hGraphExec, hNode, &value.memcpy.copyParams, value.memcpy.copyCtx);
    case CU_GRAPH_NODE_TYPE_MEMSET:
      return set_work<MemsetWork>(hGraphExec, hNode,
                                  [&](const MemsetWork&, MemsetWork& now) { return memset_work(value.memset, now); });
    case CU_GRAPH_NODE_TYPE_HOST: return cuGraphExecHostNodeSetParams(hGraphExec, hNode, &value.host);
    case CU_GRAPH_NODE_TYPE_GRAPH: return cuGraphExecChildGraphNodeSetParams(hGraphExec, hNode, value.graph.graph);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: return cuGraphExecEventWaitNodeSetEvent(hGraphExec, hNode, value.eventWait.event);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: return cuGraphExecBatchMemOpNodeSetParams(hGraphExec, hNode, &value.memOp);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return cuGraphExecEventRecordNodeSetEvent(hGraphExec, hNode, value.eventRecord.event);
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuGraphNodeSetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled) {
  GraphExec* exec;
  Node* node;
  if (CUresult r = can_be_disabled(hGraphExec, hNode, exec, node); r) return r;
  std::lock_guard mine(exec->lock);
  const bool moved = isEnabled ? exec->disabled.erase(node) : exec->disabled.insert(node).second;
  if (moved) note_change(*exec, *node);
  if (moved && isEnabled) exec->unsure = true;
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int* isEnabled) {
  GraphExec* exec;
  Node* node;
  if (CUresult r = can_be_disabled(hGraphExec, hNode, exec, node); r) return r;
  if (!isEnabled) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard mine(exec->lock);
  *isEnabled = !exec->disabled.contains(node);
  return CUDA_SUCCESS;
}

}  // extern "C"
