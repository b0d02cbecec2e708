// Functions on whole graphs: creation, copies, nodes and edges, the drawing for debugging.
#include <algorithm>
#include <cstdio>

#include "capturing.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

// Returns handles as all of these functions do: as many as *n has room for, or only their number.
template <class Handle>
CUresult hand_out(const std::vector<Handle>& found, Handle* out, std::size_t* n) {
  if (!n) return CUDA_ERROR_INVALID_VALUE;
  if (out) {
    const std::size_t filled = std::min(*n, found.size());
    std::copy_n(found.begin(), filled, out);
    std::fill(out + filled, out + *n, nullptr);
    *n = filled;
  } else {
    *n = found.size();
  }
  return CUDA_SUCCESS;
}

std::vector<CUgraphNode> handles(const std::vector<Node*>& nodes) {
  std::vector<CUgraphNode> found;
  for (const Node* node : nodes) found.push_back(node->node_handle());
  return found;
}

template <class Use>
CUresult with_graph(CUgraph handle, Use&& use) {
  if (CUresult r = require(); r) return r;
  std::lock_guard guard(graph_lock());
  Graph* graph = find(handle);
  return graph ? use(*graph) : CUDA_ERROR_INVALID_VALUE;
}

template <class Use>
CUresult with_node(CUgraphNode handle, Use&& use) {
  if (CUresult r = require(); r) return r;
  std::lock_guard guard(graph_lock());
  Node* node = find(handle);
  return node ? use(*node) : CUDA_ERROR_INVALID_VALUE;
}

// All edges are checked before the first is changed.
CUresult change_edges(CUgraph handle, const CUgraphNode* from, const CUgraphNode* to, std::size_t n, bool adding) {
  if (n && (!from || !to)) return CUDA_ERROR_INVALID_VALUE;
  return with_graph(handle, [&](Graph& graph) {
    std::vector<std::pair<Node*, Node*>> edges;
    for (std::size_t i = 0; i < n; ++i) {
      Node *a = find(from[i]), *b = find(to[i]);
      if (!a || !b || a == b || a->graph != &graph || b->graph != &graph) return CUDA_ERROR_INVALID_VALUE;
      const bool there = std::ranges::find(b->dependencies, a) != b->dependencies.end();
      const std::pair<Node*, Node*> edge{a, b};
      if (there == adding || std::ranges::find(edges, edge) != edges.end()) return CUDA_ERROR_INVALID_VALUE;
      edges.push_back(edge);
    }
    for (auto [a, b] : edges) adding ? add_edge(*a, *b) : remove_edge(*a, *b);
    return CUDA_SUCCESS;
  });
}

const char* type_name(CUgraphNodeType type) {
  static constexpr const char* names[] = {"KERNEL", "MEMCPY", "MEMSET", "HOST", "GRAPH", "EMPTY", "WAIT_EVENT",
                                          "EVENT_RECORD", "", "", "MEM_ALLOC", "MEM_FREE"};
  return names[type];
}

void print(std::FILE* file, const Graph& graph, const std::string& prefix) {
  std::fprintf(file, "subgraph cluster_%llu {\nlabel=\"graph_%llu\";\n", static_cast<unsigned long long>(graph.id),
               static_cast<unsigned long long>(graph.id));
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = *graph.nodes[i];
    std::fprintf(file, "\"%snode_%zu\" [shape=box, label=\"%zu\\n%s\"];\n", prefix.c_str(), i, i, type_name(node_type(node.work)));
    for (const Node* dependency : node.dependencies) {
      const auto at = std::ranges::find(graph.nodes, dependency) - graph.nodes.begin();
      std::fprintf(file, "\"%snode_%td\" -> \"%snode_%zu\";\n", prefix.c_str(), at, prefix.c_str(), i);
    }
    for (std::size_t part = 0; const Graph* embedded : embedded_in(node))
      print(file, *embedded, prefix + std::to_string(i) + "_" + (part++ ? std::to_string(part) + "_" : ""));
  }
  std::fprintf(file, "}\n");
}

}  // namespace
}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuGraphCreate(CUgraph* phGraph, unsigned int flags) {
  if (CUresult r = require(); r) return r;
  if (!phGraph || flags) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard guard(graph_lock());
  Graph* graph = make_graph();
  if (!graph) return CUDA_ERROR_OUT_OF_MEMORY;
  *phGraph = graph->graph_handle();
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph hGraph) {
  if (CUresult r = require_session(); r) return r;
  std::vector<std::shared_ptr<void>> garbage;
  std::lock_guard guard(graph_lock());
  Graph* graph = find(hGraph);
  if (!graph || graph->owner || graph->capturing) return CUDA_ERROR_INVALID_VALUE;
  end_graph(*graph, garbage);
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroyNode(CUgraphNode hNode) {
  if (CUresult r = require_session(); r) return r;
  std::vector<std::shared_ptr<void>> garbage;
  std::lock_guard guard(graph_lock());
  Node* node = find(hNode);
  if (!node || std::holds_alternative<AllocateWork>(node->work) || std::holds_alternative<FreeWork>(node->work))
    return CUDA_ERROR_INVALID_VALUE;
  capture_node_gone(node);
  end_node(*node, garbage);
  return CUDA_SUCCESS;
}

CUresult cuGraphClone(CUgraph* phGraphClone, CUgraph originalGraph) {
  if (!phGraphClone) return CUDA_ERROR_INVALID_VALUE;
  return with_graph(originalGraph, [&](Graph& graph) {
    const bool memory = any_node(graph, [](const Node& node) {
      return std::holds_alternative<AllocateWork>(node.work) || std::holds_alternative<FreeWork>(node.work) ||
             std::holds_alternative<ConditionalWork>(node.work);
    });
    if (memory) return CUDA_ERROR_NOT_SUPPORTED;  // as a driver answers for graphs with memory or conditional nodes
    Graph* copy = clone_graph(graph);
    if (!copy) return CUDA_ERROR_OUT_OF_MEMORY;
    *phGraphClone = copy->graph_handle();
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphNodeFindInClone(CUgraphNode* phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph) {
  return with_graph(hClonedGraph, [&](Graph& clone) {
    Node* original = find(hOriginalNode);
    Node* found = phNode && original ? find_clone(clone, original->id) : nullptr;
    if (!found) return CUDA_ERROR_INVALID_VALUE;
    *phNode = found->node_handle();
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphGetNodes(CUgraph hGraph, CUgraphNode* nodes, size_t* numNodes) {
  return with_graph(hGraph, [&](Graph& graph) { return hand_out(handles(graph.nodes), nodes, numNodes); });
}

CUresult cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode* rootNodes, size_t* numRootNodes) {
  return with_graph(hGraph, [&](Graph& graph) {
    std::vector<CUgraphNode> roots;
    for (const Node* node : graph.nodes)
      if (node->dependencies.empty()) roots.push_back(node->node_handle());
    return hand_out(roots, rootNodes, numRootNodes);
  });
}

CUresult cuGraphGetEdges(CUgraph hGraph, CUgraphNode* from, CUgraphNode* to, size_t* numEdges) {
  if ((from != nullptr) != (to != nullptr)) return CUDA_ERROR_INVALID_VALUE;
  return with_graph(hGraph, [&](Graph& graph) {
    std::vector<CUgraphNode> sources, targets;
    for (const Node* node : graph.nodes)
      for (const Node* dependency : node->dependencies) {
        sources.push_back(dependency->node_handle());
        targets.push_back(node->node_handle());
      }
    std::size_t room = numEdges ? *numEdges : 0;
    if (CUresult r = hand_out(sources, from, numEdges); r) return r;
    return hand_out(targets, to, &room);
  });
}

CUresult cuGraphGetEdges_v2(CUgraph hGraph, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* edgeData,
                            size_t* numEdges) {
  const std::size_t room = numEdges ? *numEdges : 0;
  CUresult r = cuGraphGetEdges(hGraph, from, to, numEdges);
  if (!r && edgeData && from) std::fill_n(edgeData, room, CUgraphEdgeData{});
  return r;
}

CUresult cuGraphAddDependencies(CUgraph hGraph, const CUgraphNode* from, const CUgraphNode* to, size_t numDependencies) {
  return change_edges(hGraph, from, to, numDependencies, true);
}

CUresult cuGraphAddDependencies_v2(CUgraph hGraph, const CUgraphNode* from, const CUgraphNode* to,
                                   const CUgraphEdgeData*, size_t numDependencies) {
  return change_edges(hGraph, from, to, numDependencies, true);
}

CUresult cuGraphRemoveDependencies(CUgraph hGraph, const CUgraphNode* from, const CUgraphNode* to,
                                   size_t numDependencies) {
  return change_edges(hGraph, from, to, numDependencies, false);
}

CUresult cuGraphRemoveDependencies_v2(CUgraph hGraph, const CUgraphNode* from, const CUgraphNode* to,
                                      const CUgraphEdgeData*, size_t numDependencies) {
  return change_edges(hGraph, from, to, numDependencies, false);
}

CUresult cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType* type) {
  return with_node(hNode, [&](Node& node) {
    if (!type) return CUDA_ERROR_INVALID_VALUE;
    *type = node_type(node.work);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode* dependencies, size_t* numDependencies) {
  return with_node(hNode, [&](Node& node) { return hand_out(handles(node.dependencies), dependencies, numDependencies); });
}

CUresult cuGraphNodeGetDependencies_v2(CUgraphNode hNode, CUgraphNode* dependencies, CUgraphEdgeData* edgeData,
                                       size_t* numDependencies) {
  const std::size_t room = numDependencies ? *numDependencies : 0;
  CUresult r = cuGraphNodeGetDependencies(hNode, dependencies, numDependencies);
  if (!r && edgeData && dependencies) std::fill_n(edgeData, room, CUgraphEdgeData{});
  return r;
}

CUresult cuGraphNodeGetDependentNodes(CUgraphNode hNode, CUgraphNode* dependentNodes, size_t* numDependentNodes) {
  return with_node(hNode, [&](Node& node) { return hand_out(handles(node.dependents), dependentNodes, numDependentNodes); });
}

CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode hNode, CUgraphNode* dependentNodes, CUgraphEdgeData* edgeData,
                                         size_t* numDependentNodes) {
  const std::size_t room = numDependentNodes ? *numDependentNodes : 0;
  CUresult r = cuGraphNodeGetDependentNodes(hNode, dependentNodes, numDependentNodes);
  if (!r && edgeData && dependentNodes) std::fill_n(edgeData, room, CUgraphEdgeData{});
  return r;
}

CUresult cuGraphDebugDotPrint(CUgraph hGraph, const char* path, unsigned int) {
  if (!path) return CUDA_ERROR_INVALID_VALUE;
  return with_graph(hGraph, [&](Graph& graph) {
    std::FILE* file = std::fopen(path, "w");
    if (!file) return CUDA_ERROR_OPERATING_SYSTEM;
    std::fprintf(file, "digraph dot {\n");
    print(file, graph, "");
    std::fprintf(file, "}\n");
    return std::fclose(file) ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
  });
}

}  // extern "C"
