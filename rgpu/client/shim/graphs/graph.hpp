// Graphs, which exist in the client alone: nodes with their parameters and edges, cloning, order. The server's form of
// a graph is made at instantiation (graph_exec.cpp); an open capture or a graph is not on the wire.
//
// Everything here is guarded by graph_lock(); while it is held, no call is published and no function of the program's
// runs.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <variant>
#include <vector>

#include "collectives.hpp"
#include "handles.hpp"

namespace rgpu {

struct Graph;

// A module that kernel nodes need: it is unloaded on the server only when no graph and no executable graph holds a
// ModuleUse of it (SEMANTICS 13).
class ModuleUse {
 public:
  explicit ModuleUse(std::uint64_t module);
  ~ModuleUse();
  ModuleUse(const ModuleUse&) = delete;

 private:
  const std::uint64_t module_;
};
// The program unloads a module. True: graphs hold it, and module_unload is published when they release it.
bool module_used_by_graphs(std::uint64_t module);
// The context has ended, and its modules with it: no unload is sent for them later.
void forget_module(std::uint64_t module);

// The common part of cuLaunchKernel and kernel nodes, checked and packed (launch.cpp).
struct KernelWork {
  CUfunction handle = nullptr;  // the program's handle: a function, or a kernel
  std::uint64_t module = 0;     // on the wire
  std::uint32_t function = 0;
  Context* context = nullptr;
  unsigned grid[3] = {}, block[3] = {};
  unsigned shared = 0;
  bool cooperative = false;
  std::vector<Parameter> table;  // position of each parameter in `parameters`
  std::vector<std::uint8_t> parameters;
  std::vector<CUlaunchAttribute> attributes;
  std::shared_ptr<ModuleUse> use;
  mutable std::vector<void*> pointers;  // returned by cuGraphKernelNodeGetParams
};

// launch.cpp: checks handle, grid, block, shared and cooperative of `work` in its context as cuLaunchKernel does, and
// fills in the other fields except the attributes.
CUresult fill_kernel_work(KernelWork& work, void** kernel_params, void** extra);

struct CopyWork {
  CUDA_MEMCPY3D copy{};
  Context* context = nullptr;
};

struct MemsetWork {
  CUDA_MEMSET_NODE_PARAMS_v2 set{};
};

struct HostWork {
  CUhostFn function = nullptr;
  void* user = nullptr;
};

struct ChildWork {
  Graph* graph = nullptr;  // embedded: ends with the node
};

struct EmptyWork {};

struct EventRecordWork {
  CUevent event = nullptr;
};

struct EventWaitWork {
  CUevent event = nullptr;
};

// Memory of a graph: its address is the same in every launch. It is freed when no graph, no executable graph and no
// allocation that the program has not freed needs it.
struct GraphMemory {
  explicit GraphMemory(std::uint64_t at, std::uint64_t n, Context& owner) : address(at), size(n), context(owner) {}
  ~GraphMemory();
  GraphMemory(const GraphMemory&) = delete;
  const std::uint64_t address, size;
  Context& context;
};

struct AllocateWork {
  CUDA_MEM_ALLOC_NODE_PARAMS_v1 params{};
  std::vector<CUmemAccessDesc> access;
  std::shared_ptr<GraphMemory> memory;
};

struct FreeWork {
  CUdeviceptr address = 0;
};

// Operations on words of device memory, one after the other.
struct BatchWork {
  std::vector<CUstreamBatchMemOpParams> operations;
  CUcontext context = nullptr;
  unsigned flags = 0;
};

// A condition that kernels of the launch set by cudaGraphSetConditional.
struct Condition {
  std::uint64_t handle = 0;
  unsigned value = 0;     // at the beginning of a launch …
  bool assigned = false;  // … where this is set; undefined otherwise
  Context* context = nullptr;
};

struct ConditionalWork {
  Condition condition;
  CUgraphConditionalNodeType type = CU_GRAPH_COND_TYPE_IF;
  std::vector<Graph*> bodies;             // end with the node
  std::shared_ptr<std::vector<CUgraph>> handles;  // of the bodies: those given to the program
};

// A group of NCCL's collectives, given to a launch's stream as outside of graphs, with new numbers at each launch:
// collectives outside of the graph are counted too (collectives.cpp).
struct CollectivesWork {
  std::vector<CollectiveOperation> operations;  // their streams are the launch's
  std::vector<CollectiveRange> ranges;
  Context* context = nullptr;
};

// The work of a node, in the order of CUgraphNodeType where there is one; node_type() translates.
using Work = std::variant<KernelWork, CopyWork, MemsetWork, HostWork, ChildWork, EmptyWork, EventWaitWork,
                          EventRecordWork, AllocateWork, FreeWork, BatchWork, ConditionalWork, CollectivesWork>;

CUgraphNodeType node_type(const Work& work);

struct Node : Object {
  Node() : Object(Kind::graph_node) {}
  Graph* graph = nullptr;
  std::uint64_t id = 0;           // never reused in this process
  std::uint64_t cloned_from = 0;  // id of the node that this one is a copy of, 0: none
  Work work;
  std::vector<Node*> dependencies, dependents;  // in the order added, each once
  CUgraphNode node_handle() const { return static_cast<CUgraphNode>(handle); }
};

struct UserObject;

struct Graph : Object {
  Graph() : Object(Kind::graph) {}
  ~Graph() override;
  std::uint64_t id = 0;
  std::uint64_t cloned_from = 0;
  Node* owner = nullptr;        // embedded in this node: cannot be destroyed by itself
  bool capturing = false;       // a capture adds to it
  std::vector<Node*> nodes;     // in the order added; owned by the handle table
  std::map<UserObject*, unsigned> references;  // of user objects
  std::map<std::uint64_t, Condition> conditions;  // by handle; only conditions that no node has yet
  CUgraph graph_handle() const { return static_cast<CUgraph>(handle); }
};

std::mutex& graph_lock();

inline Graph* find(CUgraph h) { return static_cast<Graph*>(find_object(h, Kind::graph)); }
inline Node* find(CUgraphNode h) { return static_cast<Node*>(find_object(h, Kind::graph_node)); }

// A new graph with a handle; nullptr when the handle table is full.
Graph* make_graph();
// Adds a node ordered after `dependencies` (each once). nullptr: the handle table is full.
Node* add_node(Graph& graph, Work work, const std::vector<Node*>& dependencies);
// Ends the graph, its nodes, the graphs embedded in them and its references. The user objects to destroy and the memory
// to free are released with `garbage`.
void end_graph(Graph& graph, std::vector<std::shared_ptr<void>>& garbage);
void end_node(Node& node, std::vector<std::shared_ptr<void>>& garbage);
bool add_edge(Node& from, Node& to);     // false: the edge existed
bool remove_edge(Node& from, Node& to);  // false: there was no such edge
// A copy, node by node in the same order, with handles. nullptr: the handle table is full.
Graph* clone_graph(const Graph& graph);
// The nodes with each after all that it depends on; nullopt: a cycle.
std::optional<std::vector<Node*>> ordered(const Graph& graph);
// Whether `node` is one of `from`, or one of `from` depends on it, directly or not.
bool reachable(const std::vector<Node*>& from, const Node* node);
// The node of `clone` (or of a graph embedded in it) that was cloned from the node with that id.
Node* find_clone(const Graph& clone, std::uint64_t id);
// Makes bodies for a conditional node, empty, with their handles. False: the handle table is full.
bool make_bodies(ConditionalWork& work, std::size_t n);
// Whether the node is in a body of a conditional node, at any depth.
bool in_body(const Node& node);
bool has_conditionals(const Graph& graph);
// The graphs within a node: the one embedded in it, or the bodies of a conditional node.
std::vector<Graph*> embedded_in(const Node& node);
// Whether a node of the graph, or of a graph embedded in it, satisfies `test`.
bool any_node(const Graph& graph, bool (*test)(const Node&));

// user_object.cpp
void retain_references(Graph& to, const Graph& from);
void drop_references(Graph& graph, std::vector<std::shared_ptr<void>>& garbage);

}  // namespace rgpu
