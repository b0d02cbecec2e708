// Translates a graph into the parts of a launch: sections for the server, steps for the client, and the bytes of a
// section. The callers hold graph_lock().
#include <algorithm>
#include <cstring>
#include <map>
#include <queue>

#include "graph_exec.hpp"
#include "memory.hpp"

namespace rgpu {
namespace {

// One node of the graph with all embedded graphs unfolded, and the items it waits for.
struct Item {
  Node* node;
  std::vector<std::size_t> before;
};

void join(std::vector<std::size_t>& into, const std::vector<std::size_t>& more) {
  for (std::size_t item : more)
    if (std::ranges::find(into, item) == into.end()) into.push_back(item);
}

// Appends the graph's items, each after the items it waits for; roots wait for `entry`. `exits`: the items to wait for
// to have waited for the graph.
bool unfold(const Graph& graph, const std::vector<std::size_t>& entry, std::vector<Item>& items,
            std::vector<std::size_t>& exits) {
  auto order = ordered(graph);
  if (!order) return false;
  std::unordered_map<const Node*, std::vector<std::size_t>> ends;
  exits.clear();
  if (order->empty()) exits = entry;
  for (Node* node : *order) {
    std::vector<std::size_t> before;
    if (node->dependencies.empty()) before = entry;
    for (const Node* dependency : node->dependencies) join(before, ends[dependency]);
    auto& mine = ends[node];
    if (auto* child = std::get_if<ChildWork>(&node->work)) {
      if (!unfold(*child->graph, before, items, mine)) return false;
    } else {
      mine = {items.size()};
      items.push_back({node, std::move(before)});
    }
    if (node->dependents.empty()) join(exits, ends[node]);
  }
  return true;
}

bool in_host_memory(CUmemorytype type, std::uint64_t address) {
  if (type == CU_MEMORYTYPE_HOST) return true;
  const Place::Kind kind = place_of(address).kind;
  return kind == Place::Kind::pinned || kind == Place::Kind::registered || (type == CU_MEMORYTYPE_UNIFIED && kind == Place::Kind::host);
}

// Order among nodes that are ready: nodes that wait for work outside of the graph as late as possible, nodes that such
// work waits for as early as possible.
int rank(const Node& node) {
  if (std::holds_alternative<CollectivesWork>(node.work)) return 3;
  switch (node_type(node.work)) {
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: return 0;
    case CU_GRAPH_NODE_TYPE_MEMCPY: return 1;
    case CU_GRAPH_NODE_TYPE_HOST: return 2;
    default: return 3;
  }
}

struct Writer {
  std::vector<std::uint8_t> bytes;
  template <class T>
  void put(T value) {
    const auto* at = reinterpret_cast<const std::uint8_t*>(&value);
    bytes.insert(bytes.end(), at, at + sizeof value);
  }
  void put_bytes(const void* data, std::size_t n) {
    put(static_cast<std::uint32_t>(n));
    const auto* at = static_cast<const std::uint8_t*>(data);
    bytes.insert(bytes.end(), at, at + n);
  }
};

void write_kernel(Writer& out, const KernelWork& work) {
  out.put(work.module);
  out.put(work.function);
  for (unsigned n : work.grid) out.put(std::uint32_t{n});
  for (unsigned n : work.block) out.put(std::uint32_t{n});
  out.put(std::uint32_t{work.shared});
  out.put(std::uint32_t{work.cooperative ? 1u : 0u});
  out.put_bytes(work.parameters.data(), work.parameters.size());
  out.put_bytes(work.attributes.data(), work.attributes.size() * sizeof(CUlaunchAttribute));
}

void write_copy(Writer& out, const CUDA_MEMCPY3D& c) {
  const CopyEnds ends = ends_of(c);
  for (std::uint64_t value : {ends.destination, ends.to, ends.to_plane, ends.source, ends.from, ends.from_plane})
    out.put(value);
  out.put(std::uint64_t{c.WidthInBytes});
  out.put(std::uint64_t{c.Height});
  out.put(std::uint64_t{c.Depth});
}

void write_memset(Writer& out, const CUDA_MEMSET_NODE_PARAMS_v2& set) {
  out.put(std::uint64_t{set.dst});
  out.put(std::uint64_t{set.height > 1 ? set.pitch : set.width * set.elementSize});
  out.put(std::uint64_t{set.width});
  out.put(std::uint64_t{set.height});
  out.put(std::uint32_t{set.value});
  out.put(std::uint32_t{set.elementSize});
}

constexpr std::uint32_t FORMAT = 1;
constexpr std::uint32_t KERNEL = 0, COPY = 1, MEMSET = 2, EMPTY = 5, CONDITIONAL = 13;  // as CUgraphNodeType

using Indexes = std::vector<std::uint32_t>;
void write_node(Writer& out, const Node& node, const Indexes& dependencies, const std::set<const Node*>& disabled);

void write_conditional(Writer& out, const ConditionalWork& work, const std::set<const Node*>& disabled) {
  out.put(work.condition.handle);
  out.put(std::uint32_t{work.condition.value});
  out.put(std::uint32_t{work.condition.assigned ? 1u : 0u});
  out.put(static_cast<std::uint32_t>(work.type));
  out.put(static_cast<std::uint32_t>(work.bodies.size()));
  for (const Graph* body : work.bodies) {
    std::vector<Item> items;
    std::vector<std::size_t> exits;
    unfold(*body, {}, items, exits);  // lower() has found no cycle
    out.put(static_cast<std::uint32_t>(items.size()));
    for (const Item& item : items) write_node(out, *item.node, Indexes(item.before.begin(), item.before.end()), disabled);
  }
}

void write_node(Writer& out, const Node& node, const Indexes& dependencies, const std::set<const Node*>& disabled) {
  const auto head = [&](std::uint32_t type) {
    out.put(type);
    out.put(std::uint32_t{type != EMPTY && disabled.contains(&node) ? 1u : 0u});
    out.put(static_cast<std::uint32_t>(dependencies.size()));
    for (std::uint32_t index : dependencies) out.put(index);
  };
  if (const auto* kernel = std::get_if<KernelWork>(&node.work)) {
    head(KERNEL);
    write_kernel(out, *kernel);
  } else if (const auto* copy = std::get_if<CopyWork>(&node.work)) {
    head(COPY);
    write_copy(out, copy->copy);
  } else if (const auto* set = std::get_if<MemsetWork>(&node.work)) {
    head(MEMSET);
    write_memset(out, set->set);
  } else if (const auto* conditional = std::get_if<ConditionalWork>(&node.work)) {
    head(CONDITIONAL);
    write_conditional(out, *conditional, disabled);
  } else {  // memory nodes too: the client does their work
    head(EMPTY);
  }
}

// Calls `use(node)` for the nodes of a section, those in bodies too.
template <class Use>
void each_node(const std::vector<Node*>& nodes, Use&& use) {
  for (Node* node : nodes) {
    use(*node);
    for (const Graph* embedded : embedded_in(*node)) each_node(embedded->nodes, use);
  }
}

// … for each word of a kernel's parameters that may be an address, or a condition's handle.
template <class Use>
void each_word(const KernelWork& kernel, Use&& use) {
  for (std::size_t at = 0; at + 8 <= kernel.parameters.size(); at += 4) {  // packed structures may align to 4
    std::uint64_t word;
    std::memcpy(&word, kernel.parameters.data() + at, sizeof word);
    use(word);
  }
}

// Whether all bodies are without a cycle, and no deeper than servers read them.
bool in_order(const std::vector<Item>& items, unsigned depth) {
  for (const Item& item : items) {
    const auto* conditional = std::get_if<ConditionalWork>(&item.node->work);
    if (!conditional) continue;
    if (depth == kDeepest) return false;
    for (const Graph* body : conditional->bodies) {
      std::vector<Item> inner;
      std::vector<std::size_t> exits;
      if (!unfold(*body, {}, inner, exits) || !in_order(inner, depth + 1)) return false;
    }
  }
  return true;
}

}  // namespace

CopyEnds ends_of(const CUDA_MEMCPY3D& c) {
  CopyEnds ends{};
  ends.from = c.srcPitch ? c.srcPitch : c.WidthInBytes + c.srcXInBytes;
  ends.to = c.dstPitch ? c.dstPitch : c.WidthInBytes + c.dstXInBytes;
  ends.from_plane = (c.srcHeight ? c.srcHeight : c.Height + c.srcY) * ends.from;
  ends.to_plane = (c.dstHeight ? c.dstHeight : c.Height + c.dstY) * ends.to;
  const std::uint64_t source = c.srcMemoryType == CU_MEMORYTYPE_HOST ? reinterpret_cast<std::uint64_t>(c.srcHost) : c.srcDevice;
  const std::uint64_t destination = c.dstMemoryType == CU_MEMORYTYPE_HOST ? reinterpret_cast<std::uint64_t>(c.dstHost) : c.dstDevice;
  ends.source = source + c.srcZ * ends.from_plane + c.srcY * ends.from + c.srcXInBytes;
  ends.destination = destination + c.dstZ * ends.to_plane + c.dstY * ends.to + c.dstXInBytes;
  return ends;
}

bool on_client(const Node& node) {
  if (in_body(node)) return false;
  if (const auto* work = std::get_if<CopyWork>(&node.work)) {
    const CUDA_MEMCPY3D& c = work->copy;
    if (names_array(c)) return true;  // copied through the array's memory: several calls
    return in_host_memory(c.srcMemoryType, c.srcMemoryType == CU_MEMORYTYPE_HOST ? 0 : c.srcDevice) ||
           in_host_memory(c.dstMemoryType, c.dstMemoryType == CU_MEMORYTYPE_HOST ? 0 : c.dstDevice);
  }
  return std::holds_alternative<HostWork>(node.work) || std::holds_alternative<EventRecordWork>(node.work) ||
         std::holds_alternative<EventWaitWork>(node.work) || std::holds_alternative<BatchWork>(node.work) ||
         std::holds_alternative<CollectivesWork>(node.work);
}

Context* context_of_work(const Work& work) {
  Context* its = nullptr;
  if (auto* conditional = std::get_if<ConditionalWork>(&work)) its = conditional->condition.context;
  if (auto* kernel = std::get_if<KernelWork>(&work)) its = kernel->context;
  if (auto* copy = std::get_if<CopyWork>(&work)) its = copy->context;
  if (auto* set = std::get_if<MemsetWork>(&work)) its = find(set->set.ctx);
  if (auto* batch = std::get_if<BatchWork>(&work)) its = find(batch->context);
  if (auto* group = std::get_if<CollectivesWork>(&work)) its = group->context;
  if (auto* record = std::get_if<EventRecordWork>(&work)) {
    const Event* event = find(record->event);
    its = event ? event->context : nullptr;
  }
  return its && its->alive ? its : nullptr;
}

namespace {

// Puts items, each after those that it waits for, into steps.
class Stepping {
 public:
  Stepping(const std::vector<Item>& items, Context& home) : items_(items), home_(home), step_of_(items.size()) {}

  void on_device(std::size_t i) {
    const std::size_t step = section_for(i);
    GraphPart& section = program.sections[std::get<std::size_t>(program.steps[step].what)];
    const auto index = static_cast<std::uint32_t>(section.nodes.size());
    std::vector<std::uint32_t> before;
    for (std::size_t other : items_[i].before)
      if (step_of_[other] == step) before.push_back(local_[other]);
    place(i, step);
    local_[i] = index;
    program.places[items_[i].node] = {std::get<std::size_t>(program.steps[step].what), index};
    section.nodes.push_back(items_[i].node);
    section.dependencies.push_back(std::move(before));
    if (auto* work = std::get_if<AllocateWork>(&items_[i].node->work)) program.allocates.push_back(work->memory);
    if (auto* work = std::get_if<FreeWork>(&items_[i].node->work)) program.frees.push_back(work->address);
  }

  void on_client(std::size_t i) {
    open_.clear();
    program.steps.push_back({items_[i].node, ContextLife(context_of_work(items_[i].node->work)), {}});
    place(i, program.steps.size() - 1);
  }

  Program program;

 private:
  // The open section of the item's device, or a new one: after all that the item waits for on other devices. The
  // sections there are closed, because two sections could otherwise wait for each other.
  std::size_t section_for(std::size_t i) {
    Context* context = context_of_work(items_[i].node->work);
    if (!context || context->device == home_.device) context = &home_;
    for (std::size_t other : items_[i].before) {
      const Context* its = program.steps[step_of_[other]].life.context;
      if (its && its->device == context->device) continue;
      if (its) open_.erase(its->device);
      if (auto it = open_.find(context->device); it != open_.end() && it->second < step_of_[other]) open_.erase(it);
    }
    const auto [it, added] = open_.try_emplace(context->device, program.steps.size());
    if (added) {
      program.steps.push_back({program.sections.size(), ContextLife(context), {}});
      program.sections.emplace_back().life = ContextLife(context);
    }
    return it->second;
  }

  void place(std::size_t i, std::size_t step) {
    step_of_[i] = step;
    LaunchStep& mine = program.steps[step];
    for (std::size_t other : items_[i].before) {
      const Context *its = program.steps[step_of_[other]].life.context, *here = mine.life.context;
      if (step_of_[other] == step || (its && here && its->device == here->device)) continue;
      if (std::ranges::find(mine.after, step_of_[other]) == mine.after.end()) mine.after.push_back(step_of_[other]);
    }
  }

  const std::vector<Item>& items_;
  Context& home_;
  std::vector<std::size_t> step_of_;
  std::unordered_map<std::size_t, std::uint32_t> local_;  // item → index in its section
  std::map<CUdevice, std::size_t> open_;                  // steps: open sections
};

}  // namespace

std::optional<Program> lower(const Graph& graph, Context& home) {
  std::vector<Item> items;
  std::vector<std::size_t> exits;
  if (!unfold(graph, {}, items, exits) || !in_order(items, 0)) return std::nullopt;
  std::vector<std::vector<std::size_t>> followers(items.size());
  std::vector<std::size_t> waiting(items.size());
  using Entry = std::pair<int, std::size_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> device, client;
  const auto ready = [&](std::size_t i) {
    const Node& node = *items[i].node;
    if (on_client(node))
      client.push({rank(node), i});
    else
      device.push({0, i});
  };
  for (std::size_t i = 0; i < items.size(); ++i) {
    waiting[i] = items[i].before.size();
    for (std::size_t other : items[i].before) followers[other].push_back(i);
    if (!waiting[i]) ready(i);
  }
  Stepping steps(items, home);
  while (!device.empty() || !client.empty()) {
    auto& queue = device.empty() ? client : device;
    const std::size_t i = queue.top().second;
    device.empty() ? steps.on_client(i) : steps.on_device(i);
    queue.pop();
    for (std::size_t next : followers[i])
      if (--waiting[next] == 0) ready(next);
  }
  for (GraphPart& section : steps.program.sections) find_pinned(section);
  return std::move(steps.program);
}

void find_pinned(GraphPart& section) {
  section.pinned.clear();
  const auto add = [&](std::uint64_t word) {
    if (word >= kPinnedBase && word < kPinnedBase + kPinnedSize) section.pinned.push_back(word);
  };
  each_node(section.nodes, [&](const Node& node) {
    if (const auto* set = std::get_if<MemsetWork>(&node.work)) add(set->set.dst);
    if (const auto* kernel = std::get_if<KernelWork>(&node.work)) each_word(*kernel, add);
    if (const auto* copy = std::get_if<CopyWork>(&node.work)) {  // in a body: elsewhere such a copy is a step
      const CopyEnds ends = ends_of(copy->copy);
      add(ends.source);
      add(ends.destination);
    }
  });
}

bool divided(const Program& program) {
  std::unordered_map<std::uint64_t, std::size_t> homes;  // condition → the section with its node
  for (std::size_t i = 0; i < program.sections.size(); ++i)
    each_node(program.sections[i].nodes, [&](const Node& node) {
      if (const auto* work = std::get_if<ConditionalWork>(&node.work)) homes[work->condition.handle] = i;
    });
  bool found = false;
  for (std::size_t i = 0; i < program.sections.size() && homes.size() && program.sections.size() > 1; ++i)
    each_node(program.sections[i].nodes, [&](const Node& node) {
      if (const auto* kernel = std::get_if<KernelWork>(&node.work))
        each_word(*kernel, [&](std::uint64_t word) {
          if (auto it = homes.find(word); it != homes.end() && it->second != i) found = true;
        });
    });
  return found;
}

std::vector<std::uint8_t> encode_node(const Node& node) {
  Writer out;
  write_node(out, node, {}, {});
  return std::move(out.bytes);
}

std::vector<std::uint8_t> encode_section(const GraphPart& section, const std::set<const Node*>& disabled) {
  Writer out;
  out.put(FORMAT);
  out.put(static_cast<std::uint32_t>(section.nodes.size()));
  for (std::size_t i = 0; i < section.nodes.size(); ++i)
    write_node(out, *section.nodes[i], section.dependencies[i], disabled);
  return std::move(out.bytes);
}

std::vector<std::uint8_t> encode_changes(const std::vector<std::pair<std::uint32_t, const Node*>>& changes,
                                         const std::set<const Node*>& disabled) {
  Writer out;
  out.put(FORMAT);
  out.put(static_cast<std::uint32_t>(changes.size()));
  for (auto [index, node] : changes) {
    out.put(index);
    write_node(out, *node, {}, disabled);  // its dependencies are unchanged
  }
  return std::move(out.bytes);
}

}  // namespace rgpu
