// Checks of where nodes may be, and of the memory they point to: at the instantiation, and before a launch.
#include "graph_exec.hpp"
#include "memory.hpp"

namespace rgpu {
namespace {

// Checks a side of a copy that is no host pointer: device memory, or host memory that is addressed as such.
bool there(CUmemorytype type, std::uint64_t address, std::uint64_t span) {
  const Place place = place_of(address);
  if (place.kind == Place::Kind::invalid || address + span < address) return false;
  if (place.kind == Place::Kind::host) return type == CU_MEMORYTYPE_UNIFIED;  // pageable: its size is not known
  return place.holds(address, span);
}

// Bytes from the first byte of a copy's side to behind its last; nullopt: more than there are addresses.
std::optional<std::uint64_t> span_of(std::uint64_t pitch, std::uint64_t plane, const CUDA_MEMCPY3D& c) {
  std::uint64_t rows, planes, span;
  if (__builtin_mul_overflow(pitch, c.Height - 1, &rows) || __builtin_mul_overflow(plane, c.Depth - 1, &planes) ||
      __builtin_add_overflow(rows, planes, &span) || __builtin_add_overflow(span, c.WidthInBytes, &span))
    return std::nullopt;
  return span;
}

bool stray(const CUDA_MEMCPY3D& c) {
  if (names_array(c) && check_box(c)) return true;
  const CopyEnds ends = ends_of(c);
  const auto source = span_of(ends.from, ends.from_plane, c), destination = span_of(ends.to, ends.to_plane, c);
  if (!source || !destination) return true;
  const auto addressed = [](CUmemorytype type) { return type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED; };
  return (addressed(c.srcMemoryType) && !there(c.srcMemoryType, ends.source, *source)) ||
         (addressed(c.dstMemoryType) && !there(c.dstMemoryType, ends.destination, *destination));
}

bool stray(const CUDA_MEMSET_NODE_PARAMS_v2& set) {
  return check_device_rows(set.dst, set.pitch, set.width * set.elementSize, set.height) != CUDA_SUCCESS;
}

}  // namespace

bool on_server(const CUDA_MEMCPY3D& c) {
  if (names_array(c)) return false;
  const CopyEnds ends = ends_of(c);
  const auto source = span_of(ends.from, ends.from_plane, c), destination = span_of(ends.to, ends.to_plane, c);
  const auto reachable = [](CUmemorytype type, std::uint64_t address, const std::optional<std::uint64_t>& span) {
    const Place place = place_of(address);
    if (place.kind == Place::Kind::pinned) return span && place.holds(address, *span);
    if (place.kind == Place::Kind::registered) return false;
    return place.kind != Place::Kind::host || type == CU_MEMORYTYPE_DEVICE;  // strays are found at the launch
  };
  return reachable(c.srcMemoryType, ends.source, source) && reachable(c.dstMemoryType, ends.destination, destination);
}

const Node* find_stray(const Graph& graph, const std::set<const Node*>& disabled) {
  for (const Node* node : graph.nodes) {
    if (disabled.contains(node)) continue;
    if (const auto* copy = std::get_if<CopyWork>(&node->work); copy && stray(copy->copy)) return node;
    if (const auto* set = std::get_if<MemsetWork>(&node->work); set && stray(set->set)) return node;
    if (const auto* batch = std::get_if<BatchWork>(&node->work); batch && !words_there(batch->operations)) return node;
    if (const auto* group = std::get_if<CollectivesWork>(&node->work); group && !ranges_there(group->ranges)) return node;
    for (const Graph* embedded : embedded_in(*node))
      if (const Node* found = find_stray(*embedded, disabled)) return found;
  }
  return nullptr;
}

Node* misplaced(const Graph& graph, const Condition* body) {
  for (Node* node : graph.nodes) {
    const Work& work = node->work;
    if (const auto* copy = std::get_if<CopyWork>(&work); body && copy && !on_server(copy->copy)) return node;
    if (body && !(std::holds_alternative<KernelWork>(work) || std::holds_alternative<MemsetWork>(work) ||
                  std::holds_alternative<CopyWork>(work) || std::holds_alternative<EmptyWork>(work) ||
                  std::holds_alternative<ChildWork>(work) || std::holds_alternative<ConditionalWork>(work)))
      return node;
    const Context* context = context_of_work(work);
    if (body && body->context && context && context->device != body->context->device) return node;
    const auto* conditional = std::get_if<ConditionalWork>(&work);
    for (const Graph* embedded : embedded_in(*node))
      if (Node* found = misplaced(*embedded, conditional ? &conditional->condition : body)) return found;
  }
  return nullptr;
}

}  // namespace rgpu
