// Executable graphs: what a graph becomes at instantiation.
//
// A server sees only work on the device: kernels, memsets, copies within device
// memory, and empty nodes that join. Everything that involves this side (a copy
// from or to host memory, a host function, an event) is a *step* between two
// *sections* of such work, and is given to the stream as the ordinary call it
// is: so sources are read, and results delivered, at every launch (SEMANTICS 6).
// A graph without such nodes, the usual one, is one section. Each section is of one device: a launch gives those of
// other devices than its stream's to streams of the executable graph's own, ordered by events (graph_launch.cpp).
#pragma once

#include <map>
#include <set>
#include <unordered_map>

#include "graph.hpp"

namespace rgpu {

// A context in the life that it has: after a reset its number is another one.
struct ContextLife {
  Context* context = nullptr;
  std::uint64_t number = 0;
  explicit ContextLife(Context* of = nullptr) : context(of), number(of ? of->number : 0) {}
  bool over() const { return context && (!context->alive || context->number != number); }
};

struct GraphPart {
  std::uint64_t number = 0;               // of the executable graph on the wire
  ContextLife life;
  std::vector<Node*> nodes;               // each behind those it depends on
  std::vector<std::vector<std::uint32_t>> dependencies;  // indexes into nodes
  std::vector<std::uint64_t> pinned;      // words of parameters that point into pinned memory
};

// One part of a launch: a section (its index), or a node that this side does.
struct LaunchStep {
  std::variant<std::size_t, Node*> what;
  ContextLife life;                     // of the context where it runs; none: wherever the launch is given
  std::vector<std::size_t> after;       // earlier steps, of other devices, that it waits for; in order
};

struct Program {
  std::vector<GraphPart> sections;
  std::vector<LaunchStep> steps;
  std::unordered_map<const Node*, std::pair<std::size_t, std::uint32_t>> places;  // section, index
  std::vector<std::shared_ptr<GraphMemory>> allocates;
  std::vector<CUdeviceptr> frees;
};

// What launches of several steps need in a context, made when first needed.
struct GraphLane {
  explicit GraphLane(ContextLife its) : life(its) {}
  ContextLife life;
  CUstream stream = nullptr;    // for the work of its device, where a launch's own stream is another device's
  std::vector<CUevent> events;  // the first: behind launches given there; the others: between steps
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
  bool rebuild = false;              // a change moved work between server and client, or nothing is there yet
  bool unsure = true;                // pointers of its nodes have not been looked up
  std::map<std::uint64_t, GraphLane> lanes;  // by the number of the context
  std::uint64_t last_stream = ~0ull; // of the last launch that had several steps
  CUevent last_event = nullptr;      // recorded behind it …
  ContextLife last_life;             // … in that context
};

// Where a copy within device memory begins, and how far its rows and planes are apart, in bytes (graph_lower.cpp).
struct CopyEnds {
  std::uint64_t source, from, from_plane, destination, to, to_plane;
};
CopyEnds ends_of(const CUDA_MEMCPY3D& copy);

inline bool names_array(const CUDA_MEMCPY3D& copy) {
  return copy.srcMemoryType == CU_MEMORYTYPE_ARRAY || copy.dstMemoryType == CU_MEMORYTYPE_ARRAY;
}

inline GraphExec* find_exec(CUgraphExec handle) {
  return static_cast<GraphExec*>(find_object(handle, Kind::graph_exec));
}

// graph_lower.cpp; graph_lock held
// nullopt: a cycle, here or in an embedded graph. `home`: where work goes that names no context.
std::optional<Program> lower(const Graph& graph, Context& home);
Context* context_of_work(const Work& work);  // nullptr: it names none that is alive
bool on_client(const Node& node);  // a step, not in a section
// docs/developers/graphs.md, "Graphs"
std::vector<std::uint8_t> encode_section(const GraphPart& section, const std::set<const Node*>& disabled);
std::vector<std::uint8_t> encode_changes(const std::vector<std::pair<std::uint32_t, const Node*>>& changes,
                                         const std::set<const Node*>& disabled);
std::vector<std::uint8_t> encode_node(const Node& node);  // by itself, to see whether it changed
// A kernel's parameters name a condition whose node is in another section: these share nothing on a server.
bool divided(const Program& program);
void find_pinned(GraphPart& section);

// graph_pointers.cpp; graph_lock held
// Bodies of conditional nodes hold work of the device alone, as with a driver, and of the condition's one: a node that is
// not so, or nullptr. `body`: the graph is one, of that condition.
Node* misplaced(const Graph& graph, const Condition* body = nullptr);
// A copy that a server can do in a body of a conditional node: host memory is pinned, so it has a mirror there.
bool on_server(const CUDA_MEMCPY3D& copy);
// The first node, in embedded graphs too, with a pointer that is no memory of the program's for as many bytes as it
// names; nullptr: there is none. Nodes that are disabled do nothing.
const Node* find_stray(const Graph& graph, const std::set<const Node*>& disabled);

// copy_boxes.cpp: whether a copy that names an array lies within it, and is sound otherwise.
CUresult check_box(const CUDA_MEMCPY3D& copy);

// graph_launch.cpp: gives a launch's steps to streams. exec.lock held.
CUresult run_steps(GraphExec& exec, const StreamRef& stream, CUstream handle);
void end_lanes(GraphExec& exec);

// collectives.cpp: gives them to a stream. Nothing is published on an error.
CUresult launch_collectives(const CollectivesWork& work, CUstream stream);
bool ranges_there(const std::vector<CollectiveRange>& ranges);  // of a device's memory, each
bool communicators_there(const std::vector<CollectiveOperation>& operations);

// graph_memory.cpp: a launch allocates this. CUDA_ERROR_INVALID_VALUE: some of
// it is still allocated from an earlier launch, and free_first is not set.
CUresult begin_graph_memory(const std::vector<std::shared_ptr<GraphMemory>>& made, bool free_first);

// graph_params.cpp: parameters of nodes, checked. No lock held.
CUresult kernel_work(const CUDA_KERNEL_NODE_PARAMS_v2& params, const KernelWork* keep, KernelWork& work);
CUresult copy_work(const CUDA_MEMCPY3D& params, CUcontext context, CopyWork& work);
CUresult memset_work(const CUDA_MEMSET_NODE_PARAMS_v2& params, MemsetWork& work);
CUresult batch_work(const CUDA_BATCH_MEM_OP_NODE_PARAMS& params, BatchWork& work);
CUresult event_work(CUevent event);
// The context that a handle names, or the current one.
CUresult context_of(CUcontext handle, Context*& context);

// Values of condition handles: above every address, so that none is taken for one.
constexpr std::uint64_t kConditions = 0x9E3779B9ull << 32;
constexpr unsigned kMostBodies = 1024, kDeepest = 16;  // of a conditional node; of conditional nodes in each other
CUresult any_work(CUgraphNodeParams& params, const Work* keep, Work& work);

}  // namespace rgpu
