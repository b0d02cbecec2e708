// Nodes: adding them, and reading and setting their parameters.
#include <algorithm>
#include <cstring>

#include "capturing.hpp"
#include "graph_exec.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

// Takes the condition of a new node: one made for the graph, or for a graph that contains it, which no other node has.
CUresult take_condition(Graph& graph, Condition& condition) {
  for (Graph* at = &graph; at; at = at->owner ? at->owner->graph : nullptr) {
    auto it = at->conditions.find(condition.handle);
    if (it == at->conditions.end()) continue;
    condition = it->second;
    at->conditions.erase(it);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

// Adds a node whose parameters are checked. On a failure `garbage` is freed after the lock is released.
CUresult add(CUgraphNode* out, CUgraph handle, const CUgraphNode* before, std::size_t n, Work work) {
  if (CUresult r = require(); r) return r;
  if (!out || (n && !before)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard guard(graph_lock());
  Graph* graph = find(handle);
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  std::vector<Node*> dependencies;
  for (std::size_t i = 0; i < n; ++i) {
    Node* node = find(before[i]);
    if (!node || node->graph != graph || std::ranges::find(dependencies, node) != dependencies.end())
      return CUDA_ERROR_INVALID_VALUE;
    dependencies.push_back(node);
  }
  if (auto* conditional = std::get_if<ConditionalWork>(&work))
    if (CUresult r = take_condition(*graph, conditional->condition); r) return r;
  Node* node = add_node(*graph, std::move(work), dependencies);
  if (!node) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = node->node_handle();
  return CUDA_SUCCESS;
}

CUresult add_any(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, std::size_t n, CUgraphNodeParams& params) {
  Work work;
  if (CUresult r = any_work(params, nullptr, work); r) return r;
  std::vector<Graph*> made;  // by any_work(), for the node
  if (const auto* child = std::get_if<ChildWork>(&work); child && child->graph->graph_handle() != params.value.graph.graph)
    made = {child->graph};
  if (const auto* child = std::get_if<ChildWork>(&work)) params.value.graph.graph = child->graph->graph_handle();
  if (const auto* conditional = std::get_if<ConditionalWork>(&work)) {
    made = conditional->bodies;
    params.value.conditional.phGraph_out = conditional->handles->data();
  }
  CUresult r = add(out, graph, before, n, std::move(work));
  if (!r) return r;
  std::vector<std::shared_ptr<void>> garbage;
  std::lock_guard guard(graph_lock());
  for (Graph* embedded : made) end_graph(*embedded, garbage);
  return r;
}

template <class Member, class Params>
CUresult add_typed(CUgraphNodeType type, Member CUgraphNodeParamsValue::*member, CUgraphNode* out, CUgraph graph,
                   const CUgraphNode* before, std::size_t n, const Params& given) {
  static_assert(sizeof(Params) <= sizeof(Member));
  CUgraphNodeParams params{};
  params.type = type;
  std::memcpy(&(params.value.*member), &given, sizeof given);
  return add_any(out, graph, before, n, params);
}

// Calls `use(work)` for a node of that kind.
template <class Kind, class Use>
CUresult with(CUgraphNode handle, Use&& use) {
  if (CUresult r = require(); r) return r;
  std::lock_guard guard(graph_lock());
  Node* node = find(handle);
  if (!node || !std::holds_alternative<Kind>(node->work)) return CUDA_ERROR_INVALID_VALUE;
  return use(std::get<Kind>(node->work));
}

// Gives a node new work, checked by any_work(). The old work is freed after the lock is released.
CUresult set(CUgraphNode handle, CUgraphNodeParams& params) {
  if (CUresult r = require(); r) return r;
  if (params.type == CU_GRAPH_NODE_TYPE_GRAPH || params.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC ||
      params.type == CU_GRAPH_NODE_TYPE_MEM_FREE || params.type == CU_GRAPH_NODE_TYPE_CONDITIONAL)
    return CUDA_ERROR_INVALID_VALUE;
  Work old, now;
  {
    std::lock_guard guard(graph_lock());
    Node* node = find(handle);
    if (!node || node_type(node->work) != params.type) return CUDA_ERROR_INVALID_VALUE;
    old = node->work;
  }
  if (CUresult r = any_work(params, &old, now); r) return r;
  if (now.index() != old.index()) return CUDA_ERROR_INVALID_VALUE;  // a captured collective is reported as a host node
  std::lock_guard guard(graph_lock());
  Node* node = find(handle);
  if (!node) return CUDA_ERROR_INVALID_VALUE;
  std::swap(node->work, now);
  return CUDA_SUCCESS;
}

template <class Member, class Params>
CUresult set_typed(CUgraphNodeType type, Member CUgraphNodeParamsValue::*member, CUgraphNode node, const Params* given) {
  if (!given) return CUDA_ERROR_INVALID_VALUE;
  CUgraphNodeParams params{};
  params.type = type;
  std::memcpy(&(params.value.*member), given, sizeof *given);
  return set(node, params);
}

// Gives the program pointers into the node's own copy of the parameters.
template <class Params>
void show_kernel(const KernelWork& work, Params& out) {
  out = {};
  out.func = work.handle;
  out.gridDimX = work.grid[0];
  out.gridDimY = work.grid[1];
  out.gridDimZ = work.grid[2];
  out.blockDimX = work.block[0];
  out.blockDimY = work.block[1];
  out.blockDimZ = work.block[2];
  out.sharedMemBytes = work.shared;
  work.pointers.clear();
  for (const Parameter& parameter : work.table)
    work.pointers.push_back(const_cast<std::uint8_t*>(work.parameters.data()) + parameter.offset);
  out.kernelParams = work.pointers.empty() ? nullptr : work.pointers.data();
}

CUlaunchAttribute* find_attribute(KernelWork& work, int id) {
  for (CUlaunchAttribute& attribute : work.attributes)
    if (attribute.id == id) return &attribute;
  return nullptr;
}

}  // namespace
}  // namespace rgpu

using namespace rgpu;

extern "C" {

// ---------------------------------------------------------------- adding

CUresult cuGraphAddKernelNode_v2(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                 size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v2* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return add_typed(CU_GRAPH_NODE_TYPE_KERNEL, &CUgraphNodeParamsValue::kernel, phGraphNode, hGraph, dependencies,
                   numDependencies, *nodeParams);
}

CUresult cuGraphAddKernelNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                              size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return add_typed(CU_GRAPH_NODE_TYPE_KERNEL, &CUgraphNodeParamsValue::kernel, phGraphNode, hGraph, dependencies,
                   numDependencies, *nodeParams);
}

CUresult cuGraphAddMemcpyNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                              size_t numDependencies, const CUDA_MEMCPY3D* copyParams, CUcontext ctx) {
  if (!copyParams) return CUDA_ERROR_INVALID_VALUE;
  return add_typed(CU_GRAPH_NODE_TYPE_MEMCPY, &CUgraphNodeParamsValue::memcpy, phGraphNode, hGraph, dependencies,
                   numDependencies, CUDA_MEMCPY_NODE_PARAMS{0, 0, ctx, *copyParams});
}

CUresult cuGraphAddMemsetNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                              size_t numDependencies, const CUDA_MEMSET_NODE_PARAMS_v1* memsetParams, CUcontext ctx) {
  if (!memsetParams) return CUDA_ERROR_INVALID_VALUE;
  const CUDA_MEMSET_NODE_PARAMS_v2 wide{memsetParams->dst,         memsetParams->pitch, memsetParams->value,
                                        memsetParams->elementSize, memsetParams->width, memsetParams->height, ctx};
  return add_typed(CU_GRAPH_NODE_TYPE_MEMSET, &CUgraphNodeParamsValue::memset, phGraphNode, hGraph, dependencies,
                   numDependencies, wide);
}

CUresult cuGraphAddHostNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                            size_t numDependencies, const CUDA_HOST_NODE_PARAMS_v1* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return add_typed(CU_GRAPH_NODE_TYPE_HOST, &CUgraphNodeParamsValue::host, phGraphNode, hGraph, dependencies,
                   numDependencies, *nodeParams);
}

CUresult cuGraphAddChildGraphNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                  size_t numDependencies, CUgraph childGraph) {
  return add_typed(CU_GRAPH_NODE_TYPE_GRAPH, &CUgraphNodeParamsValue::graph, phGraphNode, hGraph, dependencies,
                   numDependencies, CUDA_CHILD_GRAPH_NODE_PARAMS{childGraph, CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE});
}

CUresult cuGraphAddEmptyNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                             size_t numDependencies) {
  return add(phGraphNode, hGraph, dependencies, numDependencies, EmptyWork{});
}

CUresult cuGraphAddEventRecordNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                   size_t numDependencies, CUevent event) {
  return add_typed(CU_GRAPH_NODE_TYPE_EVENT_RECORD, &CUgraphNodeParamsValue::eventRecord, phGraphNode, hGraph,
                   dependencies, numDependencies, CUDA_EVENT_NODE_PARAMS{event});
}

CUresult cuGraphAddEventWaitNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                 size_t numDependencies, CUevent event) {
  return add_typed(CU_GRAPH_NODE_TYPE_WAIT_EVENT, &CUgraphNodeParamsValue::eventWait, phGraphNode, hGraph,
                   dependencies, numDependencies, CUDA_EVENT_NODE_PARAMS{event});
}

CUresult cuGraphAddMemAllocNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                size_t numDependencies, CUDA_MEM_ALLOC_NODE_PARAMS_v1* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  CUgraphNodeParams params{};
  params.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
  params.value.alloc = *nodeParams;
  CUresult r = add_any(phGraphNode, hGraph, dependencies, numDependencies, params);
  if (!r) nodeParams->dptr = params.value.alloc.dptr;
  return r;
}

CUresult cuGraphAddMemFreeNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                               size_t numDependencies, CUdeviceptr dptr) {
  return add_typed(CU_GRAPH_NODE_TYPE_MEM_FREE, &CUgraphNodeParamsValue::free, phGraphNode, hGraph, dependencies,
                   numDependencies, CUDA_MEM_FREE_NODE_PARAMS{dptr});
}

CUresult cuGraphAddBatchMemOpNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                  size_t numDependencies, const CUDA_BATCH_MEM_OP_NODE_PARAMS* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return add_typed(CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, &CUgraphNodeParamsValue::memOp, phGraphNode, hGraph, dependencies,
                   numDependencies, *nodeParams);
}

// The value is the session's own: a server replaces it by the driver's wherever it builds the graph
// (docs/developers/graphs.md).
CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle* pHandle_out, CUgraph hGraph, CUcontext ctx,
                                        unsigned int defaultLaunchValue, unsigned int flags) {
  if (CUresult r = require(); r) return r;
  if (!pHandle_out || (flags & ~CU_GRAPH_COND_ASSIGN_DEFAULT)) return CUDA_ERROR_INVALID_VALUE;
  Condition made;
  if (!ctx) return CUDA_ERROR_INVALID_CONTEXT;  // as a driver (580.159): the current context is not used instead
  if (CUresult r = context_of(ctx, made.context); r) return r;
  std::lock_guard guard(graph_lock());
  Graph* graph = find(hGraph);
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  static std::uint64_t last = 0;
  made.handle = kConditions + ++last;
  made.value = defaultLaunchValue;
  made.assigned = flags & CU_GRAPH_COND_ASSIGN_DEFAULT;
  graph->conditions[made.handle] = made;
  *pHandle_out = made.handle;
  return CUDA_SUCCESS;
}

CUresult cuGraphAddNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                        size_t numDependencies, CUgraphNodeParams* nodeParams) {
  return nodeParams ? add_any(phGraphNode, hGraph, dependencies, numDependencies, *nodeParams) : CUDA_ERROR_INVALID_VALUE;
}

// Programmatic edges become full ones, which wait for more.
CUresult cuGraphAddNode_v2(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                           const CUgraphEdgeData*, size_t numDependencies, CUgraphNodeParams* nodeParams) {
  return cuGraphAddNode(phGraphNode, hGraph, dependencies, numDependencies, nodeParams);
}

// ---------------------------------------------------------------- parameters

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v2* nodeParams) {
  return with<KernelWork>(hNode, [&](const KernelWork& work) {
    if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
    show_kernel(work, *nodeParams);
    if (find_object(work.handle, Kind::kernel)) {
      nodeParams->func = nullptr;
      nodeParams->kern = reinterpret_cast<CUkernel>(work.handle);
    }
    nodeParams->ctx = static_cast<CUcontext>(work.context->handle);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphKernelNodeGetParams(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
  return with<KernelWork>(hNode, [&](const KernelWork& work) {
    if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
    show_kernel(work, *nodeParams);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v2* nodeParams) {
  return set_typed(CU_GRAPH_NODE_TYPE_KERNEL, &CUgraphNodeParamsValue::kernel, hNode, nodeParams);
}

CUresult cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
  return set_typed(CU_GRAPH_NODE_TYPE_KERNEL, &CUgraphNodeParamsValue::kernel, hNode, nodeParams);
}

CUresult cuGraphKernelNodeGetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, CUkernelNodeAttrValue* value_out) {
  return with<KernelWork>(hNode, [&](KernelWork& work) {
    if (!value_out || attr <= CU_LAUNCH_ATTRIBUTE_IGNORE || attr >= CU_LAUNCH_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
    *value_out = {};
    if (attr == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
      value_out->cooperative = work.cooperative;
    else if (const CUlaunchAttribute* found = find_attribute(work, attr))
      *value_out = found->value;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphKernelNodeSetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, const CUkernelNodeAttrValue* value) {
  return with<KernelWork>(hNode, [&](KernelWork& work) {
    switch (attr) {
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        if (!value) return CUDA_ERROR_INVALID_VALUE;
        work.cooperative = value->cooperative != 0;
        return CUDA_SUCCESS;
      case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      case CU_LAUNCH_ATTRIBUTE_PRIORITY:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        break;
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (!value) return CUDA_ERROR_INVALID_VALUE;
    CUlaunchAttribute* found = find_attribute(work, attr);
    if (!found) {
      work.attributes.push_back({});
      found = &work.attributes.back();
      found->id = attr;
    }
    found->value = *value;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphKernelNodeCopyAttributes(CUgraphNode dst, CUgraphNode src) {
  std::vector<CUlaunchAttribute> attributes;
  bool cooperative = false;
  CUresult r = with<KernelWork>(src, [&](const KernelWork& work) {
    attributes = work.attributes;
    cooperative = work.cooperative;
    return CUDA_SUCCESS;
  });
  if (r) return r;
  return with<KernelWork>(dst, [&](KernelWork& work) {
    work.attributes = attributes;
    work.cooperative = cooperative;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphMemcpyNodeGetParams(CUgraphNode hNode, CUDA_MEMCPY3D* nodeParams) {
  return with<CopyWork>(hNode, [&](const CopyWork& work) {
    if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
    *nodeParams = work.copy;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphMemcpyNodeSetParams(CUgraphNode hNode, const CUDA_MEMCPY3D* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  const CUDA_MEMCPY_NODE_PARAMS wide{0, 0, nullptr, *nodeParams};
  return set_typed(CU_GRAPH_NODE_TYPE_MEMCPY, &CUgraphNodeParamsValue::memcpy, hNode, &wide);
}

CUresult cuGraphMemsetNodeGetParams(CUgraphNode hNode, CUDA_MEMSET_NODE_PARAMS_v1* nodeParams) {
  return with<MemsetWork>(hNode, [&](const MemsetWork& work) {
    if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
    std::memcpy(nodeParams, &work.set, sizeof *nodeParams);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphMemsetNodeSetParams(CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS_v1* nodeParams) {
  return set_typed(CU_GRAPH_NODE_TYPE_MEMSET, &CUgraphNodeParamsValue::memset, hNode, nodeParams);
}

CUresult cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS_v1* nodeParams) {
  return with<HostWork>(hNode, [&](const HostWork& work) {
    if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
    *nodeParams = {work.function, work.user};
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphHostNodeSetParams(CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS_v1* nodeParams) {
  return set_typed(CU_GRAPH_NODE_TYPE_HOST, &CUgraphNodeParamsValue::host, hNode, nodeParams);
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode hNode, CUgraph* phGraph) {
  return with<ChildWork>(hNode, [&](const ChildWork& work) {
    if (!phGraph) return CUDA_ERROR_INVALID_VALUE;
    *phGraph = work.graph->graph_handle();
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphEventRecordNodeGetEvent(CUgraphNode hNode, CUevent* event_out) {
  return with<EventRecordWork>(hNode, [&](const EventRecordWork& work) {
    if (!event_out) return CUDA_ERROR_INVALID_VALUE;
    *event_out = work.event;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode hNode, CUevent event) {
  const CUDA_EVENT_NODE_PARAMS params{event};
  return set_typed(CU_GRAPH_NODE_TYPE_EVENT_RECORD, &CUgraphNodeParamsValue::eventRecord, hNode, &params);
}

CUresult cuGraphEventWaitNodeGetEvent(CUgraphNode hNode, CUevent* event_out) {
  return with<EventWaitWork>(hNode, [&](const EventWaitWork& work) {
    if (!event_out) return CUDA_ERROR_INVALID_VALUE;
    *event_out = work.event;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode hNode, CUevent event) {
  const CUDA_EVENT_NODE_PARAMS params{event};
  return set_typed(CU_GRAPH_NODE_TYPE_WAIT_EVENT, &CUgraphNodeParamsValue::eventWait, hNode, &params);
}

CUresult cuGraphMemAllocNodeGetParams(CUgraphNode hNode, CUDA_MEM_ALLOC_NODE_PARAMS_v1* params_out) {
  return with<AllocateWork>(hNode, [&](const AllocateWork& work) {
    if (!params_out) return CUDA_ERROR_INVALID_VALUE;
    *params_out = work.params;
    params_out->accessDescs = work.access.empty() ? nullptr : work.access.data();
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphMemFreeNodeGetParams(CUgraphNode hNode, CUdeviceptr* dptr_out) {
  return with<FreeWork>(hNode, [&](const FreeWork& work) {
    if (!dptr_out) return CUDA_ERROR_INVALID_VALUE;
    *dptr_out = work.address;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphBatchMemOpNodeGetParams(CUgraphNode hNode, CUDA_BATCH_MEM_OP_NODE_PARAMS* nodeParams_out) {
  return with<BatchWork>(hNode, [&](BatchWork& work) {
    if (!nodeParams_out) return CUDA_ERROR_INVALID_VALUE;
    *nodeParams_out = {work.context, static_cast<unsigned>(work.operations.size()), work.operations.data(), work.flags};
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphBatchMemOpNodeSetParams(CUgraphNode hNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS* nodeParams) {
  return set_typed(CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, &CUgraphNodeParamsValue::memOp, hNode, nodeParams);
}

CUresult cuGraphNodeSetParams(CUgraphNode hNode, CUgraphNodeParams* nodeParams) {
  return nodeParams ? set(hNode, *nodeParams) : CUDA_ERROR_INVALID_VALUE;
}

}  // extern "C"
