// User objects: counted references, held by graphs, to an object of the program's. Releasing the last one calls the
// program's destructor, outside of every lock.
#include "capturing.hpp"
#include "session.hpp"

namespace rgpu {

struct UserObject : Object {
  UserObject() : Object(Kind::user_object) {}
  void* pointer = nullptr;
  CUhostFn destroy = nullptr;
  std::uint64_t count = 0;  // guarded by graph_lock()
};

namespace {

UserObject* find_user(CUuserObject handle) { return static_cast<UserObject*>(find_object(handle, Kind::user_object)); }

// Requires graph_lock. The destructor runs when `garbage` is freed.
void release(UserObject& object, std::uint64_t n, std::vector<std::shared_ptr<void>>& garbage) {
  object.count -= n;
  if (object.count) return;
  garbage.push_back(std::shared_ptr<void>(nullptr, [destroy = object.destroy, pointer = object.pointer](void*) { destroy(pointer); }));
  retire(&object);
}

}  // namespace

void retain_references(Graph& to, const Graph& from) {
  for (auto [object, n] : from.references) {
    to.references[object] += n;
    object->count += n;
  }
}

void drop_references(Graph& graph, std::vector<std::shared_ptr<void>>& garbage) {
  for (auto [object, n] : graph.references) release(*object, n, garbage);
  graph.references.clear();
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuUserObjectCreate(CUuserObject* object_out, void* ptr, CUhostFn destroy, unsigned int initialRefcount,
                            unsigned int flags) {
  if (CUresult r = require(); r) return r;
  if (!object_out || !destroy || !initialRefcount || initialRefcount > INT32_MAX || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
    return CUDA_ERROR_INVALID_VALUE;
  auto made = std::make_unique<UserObject>();
  made->pointer = ptr;
  made->destroy = destroy;
  made->count = initialRefcount;
  void* handle = enroll(std::move(made));
  if (!handle) return CUDA_ERROR_OUT_OF_MEMORY;
  *object_out = static_cast<CUuserObject>(handle);
  return CUDA_SUCCESS;
}

CUresult cuUserObjectRetain(CUuserObject object, unsigned int count) {
  if (CUresult r = require(); r) return r;
  std::lock_guard guard(graph_lock());
  UserObject* found = find_user(object);
  if (!found || !count || count > INT32_MAX) return CUDA_ERROR_INVALID_VALUE;
  found->count += count;
  return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject object, unsigned int count) {
  if (CUresult r = require_session(); r) return r;
  std::vector<std::shared_ptr<void>> garbage;
  std::lock_guard guard(graph_lock());
  UserObject* found = find_user(object);
  if (!found || !count || count > found->count) return CUDA_ERROR_INVALID_VALUE;
  release(*found, count, garbage);
  return CUDA_SUCCESS;
}

CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags) {
  if (CUresult r = require(); r) return r;
  std::lock_guard guard(graph_lock());
  Graph* holder = find(graph);
  UserObject* found = find_user(object);
  if (!holder || !found || !count || count > INT32_MAX || (flags & ~unsigned{CU_GRAPH_USER_OBJECT_MOVE}))
    return CUDA_ERROR_INVALID_VALUE;
  if (!(flags & CU_GRAPH_USER_OBJECT_MOVE))
    found->count += count;
  else if (count > found->count)
    return CUDA_ERROR_INVALID_VALUE;
  holder->references[found] += count;
  return CUDA_SUCCESS;
}

CUresult cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned int count) {
  if (CUresult r = require_session(); r) return r;
  std::vector<std::shared_ptr<void>> garbage;
  std::lock_guard guard(graph_lock());
  Graph* holder = find(graph);
  UserObject* found = find_user(object);
  if (!holder || !found || !count) return CUDA_ERROR_INVALID_VALUE;
  auto it = holder->references.find(found);
  if (it == holder->references.end() || count > it->second) return CUDA_ERROR_INVALID_VALUE;
  it->second -= count;
  if (!it->second) holder->references.erase(it);
  release(*found, count, garbage);
  return CUDA_SUCCESS;
}

}  // extern "C"
