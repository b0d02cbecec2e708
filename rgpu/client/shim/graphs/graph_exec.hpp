// Executable graphs, as made from a graph at instantiation.
//
// A server sees only work on the device: kernels, memsets, copies within device memory, and empty nodes that join. A
// node that involves the client (a copy from or to host memory, a host function, an event) is a *step* between two
// *sections* of such work, and is given to the stream as the ordinary call: so sources are read, and results delivered,
// at every launch (SEMANTICS 6). A graph without such nodes, the usual case, is one section. Each section is of one
// device: a launch gives sections of other devices than its stream's to streams of the executable graph's own, ordered
// by events (graph_launch.cpp).
#pragma once

#include <map>
#include <set>
#include <unordered_map>

#include "graph.hpp"

namespace rgpu {

// A context in its present life: after a reset it has another number.
struct ContextLife {
  Context* context = nullptr;
  std::uint64_t number = 0;
  explicit ContextLife(Context* of = nullptr) : context(of), number(of ? of->number : 0) {}
  bool over() const { return context && (!context->alive || context->number != number); }
};

struct GraphPart {
  std::uint64_t number = 0;               // of the executable graph on the wire
  ContextLife life;
  std::vector<Node*> nodes;               // each after those it depends on
  std::vector<std::vector<std::uint32_t>> dependencies;  // indexes into nodes
  std::vector<std::uint64_t> pinned;      // words of parameters that point into pinned memory
};

// One part of a launch: a section (its index), or a node that the client carries out.
struct LaunchStep {
  std::variant<std::size_t, Node*> what;
  ContextLife life;                     // the context where it runs; none: the launch's
  std::vector<std::size_t> after;       // earlier steps, of other devices, that it waits for; in order
};

struct Program {
  std::vector<GraphPart> sections;
  std::vector<LaunchStep> steps;
  std::unordered_map<const Node*, std::pair<std::size_t, std::uint32_t>> places;  // section, index
  std::vector<std::shared_ptr<GraphMemory>> allocates;
  std::vector<CUdeviceptr> frees;
};

// Objects that launches of several steps need in a context, made at first use.
struct GraphLane {
  explicit GraphLane(ContextLife its) : life(its) {}
  ContextLife life;
  CUstream stream = nullptr;    // for the work of its device, where a launch's own stream is another device's
  std::vector<CUevent> events;  // the first is recorded after launches given there; the others between steps
};

struct GraphExec : Object {
  GraphExec() : Object(Kind::graph_exec) {}
  std::mutex lock;  // launches and updates of it, one at a time; before graph_lock()
  std::uint64_t flags = 0;
  Context* context = nullptr;
  std::uint64_t context_number = 0;  // the life of its context
  Graph* graph = nullptr;            // its own copy
  std::unordered_map<std::uint64_t, Node*> nodes;  // by the id of the node copied, also of embedded graphs
  std::set<const Node*> disabled;
  Program program;
  std::set<const Node*> changed;     // changes not yet sent to the server
  std::vector<Work> replaced;        // released when graph_lock() is not held: that may publish calls
  bool rebuild = false;              // a change moved work between server and client, or nothing is on the server yet
  bool unsure = true;                // pointers of its nodes have not been looked up
  std::map<std::uint64_t, GraphLane> lanes;  // by the number of the context
  std::uint64_t last_stream = ~0ull; // stream of the last launch that had several steps
  CUevent last_event = nullptr;      // recorded after that launch …
  ContextLife last_life;             // … in that context
};

// Where a copy within device memory begins, and the distance of its rows and planes in bytes (graph_lower.cpp).
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
// nullopt: a cycle, here or in an embedded graph. `home`: the context of work that names none.
std::optional<Program> lower(const Graph& graph, Context& home);
Context* context_of_work(const Work& work);  // nullptr: it names no context that is alive
bool on_client(const Node& node);  // whether it is a step, not in a section
// docs/developers/graphs.md, "Graphs"
std::vector<std::uint8_t> encode_section(const GraphPart& section, const std::set<const Node*>& disabled);
std::vector<std::uint8_t> encode_changes(const std::vector<std::pair<std::uint32_t, const Node*>>& changes,
                                         const std::set<const Node*>& disabled);
std::vector<std::uint8_t> encode_node(const Node& node);  // by itself, to detect a change
// Whether a kernel's parameters name a condition whose node is in another section: sections share no conditions on a
// server.
bool divided(const Program& program);
void find_pinned(GraphPart& section);

// graph_pointers.cpp; graph_lock held
// Bodies of conditional nodes hold only work of the device, as with a driver, and of the condition's device: returns a
// node that violates this, or nullptr. `body`: the graph is a body, of that condition.
Node* misplaced(const Graph& graph, const Condition* body = nullptr);
// Whether a server can do a copy in a body of a conditional node: host memory must be pinned, so that it has a mirror
// there.
bool on_server(const CUDA_MEMCPY3D& copy);
// The first node, also in embedded graphs, whose pointer is not memory of the program's for as many bytes as the node
// uses; nullptr: there is none. Disabled nodes are not checked.
const Node* find_stray(const Graph& graph, const std::set<const Node*>& disabled);

// copy_boxes.cpp: checks that a copy that names an array lies within it, and is otherwise valid.
CUresult check_box(const CUDA_MEMCPY3D& copy);

// graph_launch.cpp: gives a launch's steps to streams. exec.lock held.
CUresult run_steps(GraphExec& exec, const StreamRef& stream, CUstream handle);
void end_lanes(GraphExec& exec);

// collectives.cpp: gives a group to a stream. Nothing is published on an error.
CUresult launch_collectives(const CollectivesWork& work, CUstream stream);
bool ranges_there(const std::vector<CollectiveRange>& ranges);  // whether each range is memory of a device
bool communicators_there(const std::vector<CollectiveOperation>& operations);

// graph_memory.cpp: marks the memory of a launch allocated. CUDA_ERROR_INVALID_VALUE: some of it is still allocated
// from an earlier launch, and free_first is not set.
CUresult begin_graph_memory(const std::vector<std::shared_ptr<GraphMemory>>& made, bool free_first);

// graph_params.cpp: parameters of nodes, checked. No lock held.
CUresult kernel_work(const CUDA_KERNEL_NODE_PARAMS_v2& params, const KernelWork* keep, KernelWork& work);
CUresult copy_work(const CUDA_MEMCPY3D& params, CUcontext context, CopyWork& work);
CUresult memset_work(const CUDA_MEMSET_NODE_PARAMS_v2& params, MemsetWork& work);
CUresult batch_work(const CUDA_BATCH_MEM_OP_NODE_PARAMS& params, BatchWork& work);
CUresult event_work(CUevent event);
// The context that a handle names, or the current one.
CUresult context_of(CUcontext handle, Context*& context);

// Values of condition handles: above every address, so that no address equals one.
constexpr std::uint64_t kConditions = 0x9E3779B9ull << 32;
constexpr unsigned kMostBodies = 1024, kDeepest = 16;  // bodies of a conditional node; nesting of such nodes
CUresult any_work(CUgraphNodeParams& params, const Work* keep, Work& work);

}  // namespace rgpu
