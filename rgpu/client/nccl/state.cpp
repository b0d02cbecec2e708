// The driver library's table, errors, and the group of the calling thread.
#include "state.hpp"

#include <cstdarg>
#include <cstdio>
#include <set>

#include "driver.hpp"

namespace rgpu::nccl {
namespace {

thread_local std::string said;

struct Group {
  int depth = 0;
  std::vector<Making> makings;
  std::vector<CollectiveOperation> operations;
  std::vector<CUcontext> contexts;
  std::vector<CollectiveRange> ranges;
};
thread_local Group open_group;

std::mutex known_lock;
std::set<const ncclComm *> &all_known() {
  static auto *found = new std::set<const ncclComm *>;
  return *found;
}

CUuuid table_id() {
  CUuuid id{};
  for (int i = 0; i < 16; ++i) {
    unsigned value = 0;
    std::sscanf(kCollectivesTable + 2 * i, "%2x", &value);
    id.bytes[i] = static_cast<char>(value);
  }
  return id;
}

ncclResult_t first(ncclResult_t one, ncclResult_t other) { return one ? one : other; }

ncclResult_t run(std::vector<Making> &makings) {
  ncclResult_t result = ncclSuccess;
  for (Making &one : makings) result = first(result, one.begin());
  for (Making &one : makings) result = first(result, one.end());
  return result;
}

}  // namespace

const CollectivesTable *table() {
  static const CollectivesTable *found = [] {
    const void *words = nullptr;
    const CUuuid id = table_id();
    if (cuGetExportTable(&words, &id)) words = nullptr;
    const auto *candidate = static_cast<const CollectivesTable *>(words);
    return candidate && candidate->size == sizeof(CollectivesTable) ? candidate : nullptr;
  }();
  return found;
}

ncclResult_t from_cuda(CUresult result) {
  if (!result) return ncclSuccess;
  if (result == CUDA_ERROR_EXTERNAL_DEVICE)
    return fail(ncclRemoteError, "a rank of another session is lost: the worker's log and `rgpu ps` say which");
  if (result == CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
    return fail(ncclInvalidUsage, "streams of one group are captured into the same graph, or none of them is");
  if (result == CUDA_ERROR_INVALID_VALUE) return fail(ncclInvalidArgument, "an address or an argument is not valid");
  return fail(ncclUnhandledCudaError, "CUDA error %d", static_cast<int>(result));
}

ncclResult_t fail(ncclResult_t result, const char *format, ...) {
  char text[512];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  said = text;
  return result;
}

const char *last_error() { return said.c_str(); }

ncclResult_t refused(const char *name) {
  if (table()) table()->unsupported(name);
  return fail(ncclInvalidUsage, "%s is not supported by this library (NCCL %d by calls)", name, kVersion);
}

bool known(const ncclComm *comm) {
  std::lock_guard guard(known_lock);
  return comm && all_known().count(comm);
}

ncclComm *remember(ncclComm *comm) {
  std::lock_guard guard(known_lock);
  all_known().insert(comm);
  return comm;
}

bool usable(const ncclComm *comm, ncclResult_t &why) {
  if (!known(comm) || !comm->alive) {
    why = fail(ncclInvalidArgument, "no communicator, or a destroyed one");
  } else if (comm->state == ncclInProgress) {
    why = fail(ncclInvalidArgument, "the communicator is not ready: ask ncclCommGetAsyncError");
  } else {
    why = comm->state;
  }
  return why == ncclSuccess;
}

ncclResult_t make(Making making) {
  if (open_group.depth) {
    open_group.makings.push_back(std::move(making));
    return ncclSuccess;
  }
  std::vector<Making> alone;
  alone.push_back(std::move(making));
  return run(alone);
}

ncclResult_t give(const CollectiveOperation &operation, ncclComm *comm, const std::vector<CollectiveRange> &ranges) {
  if (open_group.depth) {
    open_group.operations.push_back(operation);
    open_group.contexts.push_back(comm->context);
    open_group.ranges.insert(open_group.ranges.end(), ranges.begin(), ranges.end());
    return ncclSuccess;
  }
  return from_cuda(table()->group(&operation, &comm->context, 1, ranges.data(), ranges.size()));
}

}  // namespace rgpu::nccl

using namespace rgpu::nccl;

extern "C" {

ncclResult_t pncclGroupStart() {
  ++open_group.depth;
  return ncclSuccess;
}

ncclResult_t pncclGroupEnd() {
  if (!open_group.depth) return fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--open_group.depth) return ncclSuccess;
  Group group;
  std::swap(group, open_group);
  if (ncclResult_t r = run(group.makings); r) return r;
  if (group.operations.empty()) return ncclSuccess;
  return from_cuda(table()->group(group.operations.data(), group.contexts.data(), group.operations.size(),
                                  group.ranges.data(), group.ranges.size()));
}

}  // extern "C"
