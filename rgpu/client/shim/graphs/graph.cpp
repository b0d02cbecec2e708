// The graph model: nodes, edges, copies, order. See graph.hpp.
#include "graph.hpp"

#include <algorithm>
#include <unordered_set>

#include "memory.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

std::uint64_t next_id() {  // graph_lock held
  static std::uint64_t last = 0;
  return ++last;
}

// ---------------------------------------------------------------- modules

// How many graphs use a module of the program, and whether the program unloaded it.
struct UsedModule {
  unsigned uses = 0;
  bool unloaded = false;  // by the program
};

struct Modules {
  std::mutex lock;
  std::unordered_map<std::uint64_t, UsedModule> used;
};

Modules& modules() {
  static auto* m = new Modules;
  return *m;
}

}  // namespace

ModuleUse::ModuleUse(std::uint64_t module) : module_(module) {
  Modules& m = modules();
  std::lock_guard guard(m.lock);
  ++m.used[module].uses;
}

ModuleUse::~ModuleUse() {
  Modules& m = modules();
  {
    std::lock_guard guard(m.lock);
    auto it = m.used.find(module_);
    if (it == m.used.end() || --it->second.uses) return;
    const bool unload = it->second.unloaded;
    m.used.erase(it);
    if (!unload) return;
  }
  wire::ModuleUnload call{};
  call.module = module_;
  if (!require_session()) submit(call);
}

bool module_used_by_graphs(std::uint64_t module) {
  Modules& m = modules();
  std::lock_guard guard(m.lock);
  auto it = m.used.find(module);
  if (it == m.used.end()) return false;
  it->second.unloaded = true;
  return true;
}

void forget_module(std::uint64_t module) {
  Modules& m = modules();
  std::lock_guard guard(m.lock);
  m.used.erase(module);
}

// ---------------------------------------------------------------- nodes

std::mutex& graph_lock() {
  static auto* lock = new std::mutex;
  return *lock;
}

CUgraphNodeType node_type(const Work& work) {
  static constexpr CUgraphNodeType types[] = {
      CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEMCPY, CU_GRAPH_NODE_TYPE_MEMSET,     CU_GRAPH_NODE_TYPE_HOST,
      CU_GRAPH_NODE_TYPE_GRAPH,  CU_GRAPH_NODE_TYPE_EMPTY,  CU_GRAPH_NODE_TYPE_WAIT_EVENT, CU_GRAPH_NODE_TYPE_EVENT_RECORD,
      CU_GRAPH_NODE_TYPE_MEM_ALLOC, CU_GRAPH_NODE_TYPE_MEM_FREE, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
      // The last type stands for collectives: NCCL's own nodes are kernels, whose parameters would be of no use here.
      CU_GRAPH_NODE_TYPE_CONDITIONAL, CU_GRAPH_NODE_TYPE_HOST};
  static_assert(std::size(types) == std::variant_size_v<Work>);
  return types[work.index()];
}

Graph::~Graph() = default;

Graph* make_graph() {
  auto made = std::make_unique<Graph>();
  Graph* graph = made.get();
  graph->id = next_id();
  return enroll(std::move(made)) ? graph : nullptr;
}

Node* add_node(Graph& graph, Work work, const std::vector<Node*>& dependencies) {
  auto made = std::make_unique<Node>();
  Node* node = made.get();
  node->graph = &graph;
  node->id = next_id();
  node->work = std::move(work);
  if (!enroll(std::move(made))) return nullptr;
  for (Graph* embedded : embedded_in(*node)) embedded->owner = node;
  graph.nodes.push_back(node);
  for (Node* dependency : dependencies) add_edge(*dependency, *node);
  return node;
}

bool add_edge(Node& from, Node& to) {
  if (std::ranges::find(to.dependencies, &from) != to.dependencies.end()) return false;
  to.dependencies.push_back(&from);
  from.dependents.push_back(&to);
  return true;
}

bool remove_edge(Node& from, Node& to) {
  if (!std::erase(to.dependencies, &from)) return false;
  std::erase(from.dependents, &to);
  return true;
}

void end_node(Node& node, std::vector<std::shared_ptr<void>>& garbage) {
  for (Node* other : node.dependencies) std::erase(other->dependents, &node);
  for (Node* other : node.dependents) std::erase(other->dependencies, &node);
  node.dependencies.clear();
  node.dependents.clear();
  std::erase(node.graph->nodes, &node);
  for (Graph* embedded : embedded_in(node)) end_graph(*embedded, garbage);
  // Uses of modules and memory are released outside of the lock: their release publishes calls.
  garbage.push_back(std::make_shared<Work>(std::move(node.work)));
  node.work = EmptyWork{};
  node.graph = nullptr;
  retire(&node);
}

void end_graph(Graph& graph, std::vector<std::shared_ptr<void>>& garbage) {
  for (Node* node : graph.nodes) {
    for (Graph* embedded : embedded_in(*node)) end_graph(*embedded, garbage);
    garbage.push_back(std::make_shared<Work>(std::move(node->work)));
    node->work = EmptyWork{};
    node->graph = nullptr;
    node->dependencies.clear();
    node->dependents.clear();
    retire(node);
  }
  graph.nodes.clear();
  drop_references(graph, garbage);
  retire(&graph);
}

Graph* clone_graph(const Graph& graph) {
  Graph* copy = make_graph();
  if (!copy) return nullptr;
  copy->cloned_from = graph.id;
  std::unordered_map<const Node*, Node*> twins;
  for (const Node* node : graph.nodes) {
    Work work = node->work;
    if (auto* child = std::get_if<ChildWork>(&work)) {
      Graph* embedded = clone_graph(*child->graph);
      if (!embedded) return nullptr;
      child->graph = embedded;
    }
    if (auto* conditional = std::get_if<ConditionalWork>(&work)) {
      conditional->handles = std::make_shared<std::vector<CUgraph>>();
      for (Graph*& body : conditional->bodies) {
        if (!(body = clone_graph(*body))) return nullptr;
        conditional->handles->push_back(body->graph_handle());
      }
    }
    if (auto* kernel = std::get_if<KernelWork>(&work)) kernel->pointers.clear();
    Node* twin = add_node(*copy, std::move(work), {});
    if (!twin) return nullptr;
    twin->cloned_from = node->id;
    twins[node] = twin;
  }
  for (const Node* node : graph.nodes)
    for (const Node* dependency : node->dependencies) add_edge(*twins[dependency], *twins[node]);
  retain_references(*copy, graph);
  return copy;
}

std::optional<std::vector<Node*>> ordered(const Graph& graph) {
  std::unordered_map<const Node*, std::size_t> waiting;
  std::vector<Node*> found;
  for (Node* node : graph.nodes) {
    if (node->dependencies.empty())
      found.push_back(node);
    else
      waiting[node] = node->dependencies.size();
  }
  for (std::size_t at = 0; at < found.size(); ++at)
    for (Node* next : found[at]->dependents)
      if (--waiting[next] == 0) found.push_back(next);
  if (found.size() != graph.nodes.size()) return std::nullopt;
  return found;
}

bool reachable(const std::vector<Node*>& from, const Node* node) {
  std::unordered_set<const Node*> seen(from.begin(), from.end());
  std::vector<const Node*> todo(from.begin(), from.end());
  while (!todo.empty()) {
    const Node* at = todo.back();
    todo.pop_back();
    if (at == node) return true;
    for (const Node* before : at->dependencies)
      if (seen.insert(before).second) todo.push_back(before);
  }
  return false;
}

std::vector<Graph*> embedded_in(const Node& node) {
  if (const auto* child = std::get_if<ChildWork>(&node.work)) return {child->graph};
  if (const auto* conditional = std::get_if<ConditionalWork>(&node.work)) return conditional->bodies;
  return {};
}

bool make_bodies(ConditionalWork& work, std::size_t n) {
  work.handles = std::make_shared<std::vector<CUgraph>>();
  for (std::size_t i = 0; i < n; ++i) {
    Graph* body = make_graph();
    if (!body) return false;
    work.bodies.push_back(body);
    work.handles->push_back(body->graph_handle());
  }
  return true;
}

bool in_body(const Node& node) {
  for (const Node* owner = node.graph ? node.graph->owner : nullptr; owner; owner = owner->graph ? owner->graph->owner : nullptr)
    if (std::holds_alternative<ConditionalWork>(owner->work)) return true;
  return false;
}

bool has_conditionals(const Graph& graph) {
  return any_node(graph, [](const Node& node) { return std::holds_alternative<ConditionalWork>(node.work); });
}

Node* find_clone(const Graph& clone, std::uint64_t id) {
  for (Node* node : clone.nodes) {
    if (node->cloned_from == id) return node;
    for (const Graph* embedded : embedded_in(*node))
      if (Node* found = find_clone(*embedded, id)) return found;
  }
  return nullptr;
}

bool any_node(const Graph& graph, bool (*test)(const Node&)) {
  for (const Node* node : graph.nodes) {
    if (test(*node)) return true;
    for (const Graph* embedded : embedded_in(*node))
      if (any_node(*embedded, test)) return true;
  }
  return false;
}

}  // namespace rgpu
