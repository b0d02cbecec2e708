// Executable graphs: what a graph becomes at instantiation.
//
// A server sees only work on the device: kernels, memsets, copies within device
// memory, and empty nodes that join. Everything that involves this side (a copy
// from or to host memory, a host function, an event) is a *step* between two
// *sections* of such work, and is given to the stream as the ordinary call it
// is: so sources are read, and results delivered, at every launch (SEMANTICS 6).
// A graph without such nodes, the usual one, is one section.
#pragma once

#include <set>
#include <unordered_map>

#include "graph.hpp"

namespace rgpu {

struct GraphPart {
  std::uint64_t number = 0;               // of the executable graph on the wire
  std::vector<Node*> nodes;               // each behind those it depends on
  std::vector<std::vector<std::uint32_t>> dependencies;  // indexes into nodes
  std::vector<std::uint64_t> pinned;      // words of parameters that point into pinned memory
};

// One part of a launch: a section (its index), or a node that this side does.
using LaunchStep = std::variant<std::size_t, Node*>;

struct Program {
  std::vector<GraphPart> sections;
  std::vector<LaunchStep> steps;
  std::unordered_map<const Node*, std::pair<std::size_t, std::uint32_t>> places;  // section, index
  std::vector<std::shared_ptr<GraphMemory>> allocates;
  std::vector<CUdeviceptr> frees;
};

struct GraphExec : Object {
  GraphExec() : Object(Kind::graph_exec) {}
  std::mutex lock;  // launches and updates of it, one at a time; before graph_lock()
  std::uint64_t flags = 0;
  Context* context = nullptr;
  std::uint64_t context_number = 0;  // the life of the context that it belongs to
  Graph* graph = nullptr;            // its own copy
  std::unordered_map<std::uint64_t, Node*> nodes;  // by the id of the node copied, also of embedded graphs
  std::set<const Node*> disabled;
  Program program;
  std::set<const Node*> changed;     // not yet told to the server
  std::vector<Work> replaced;        // let go when graph_lock() is not held: that may publish calls
  bool rebuild = false;              // a change moved work between server and client
  std::uint64_t event = 0;           // recorded behind each launch that has several steps
  std::uint64_t last_stream = ~0ull; // of the last such launch
};

// graph_lower.cpp; graph_lock held
// nullopt: a cycle, here or in an embedded graph.
std::optional<Program> lower(const Graph& graph);
bool on_client(const Node& node);  // a step, not in a section
// docs/developers/graphs.md, "Graphs"
std::vector<std::uint8_t> encode_section(const GraphPart& section, const std::set<const Node*>& disabled);
std::vector<std::uint8_t> encode_changes(const std::vector<std::pair<std::uint32_t, const Node*>>& changes,
                                         const std::set<const Node*>& disabled);
std::vector<std::uint8_t> encode_node(const Node& node, const std::vector<std::uint32_t>& dependencies, bool disabled);
void find_pinned(GraphPart& section);

// graph_memory.cpp: a launch allocates this. CUDA_ERROR_INVALID_VALUE: some of
// it is still allocated from an earlier launch, and free_first is not set.
CUresult begin_graph_memory(const std::vector<std::shared_ptr<GraphMemory>>& made, bool free_first);

// graph_params.cpp: parameters of nodes, checked. No lock held.
CUresult kernel_work(const CUDA_KERNEL_NODE_PARAMS_v2& params, const KernelWork* keep, KernelWork& work);
CUresult copy_work(const CUDA_MEMCPY3D& params, CUcontext context, CopyWork& work);
CUresult memset_work(const CUDA_MEMSET_NODE_PARAMS_v2& params, MemsetWork& work);
CUresult event_work(CUevent event);
CUresult any_work(CUgraphNodeParams& params, const Work* keep, Work& work);

}  // namespace rgpu
