// Making and ending communicators. All ranks of one are in this process; they meet here.
#include <sys/random.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "driver.hpp"
#include "state.hpp"

namespace rgpu::nccl {
namespace {

constexpr char kMagic[8] = {'R', 'G', 'P', 'U', 'N', 'C', 'C', 'L'};

// Who of a communicator's ranks has come. For a split: with which colour and key.
struct Gathering {
  std::map<int, std::pair<int, int>> came;
  int wanted = 0;
};
std::mutex lock;  // guards what follows
std::condition_variable changed;
std::map<std::string, Gathering> gatherings;

const std::string &process_id() {
  static const std::string *id = [] {
    std::string random(32, '\0');
    if (getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) std::abort();
    return new std::string(std::move(random));
  }();
  return *id;
}

bool of_this_process(const ncclUniqueId &id) {
  return !std::memcmp(id.internal, kMagic, sizeof kMagic) &&
         !std::memcmp(id.internal + sizeof kMagic, process_id().data(), process_id().size());
}

std::chrono::seconds patience() {
  const char *text = std::getenv("RGPU_NCCL_TIMEOUT");
  const int seconds = text ? std::atoi(text) : 0;
  return std::chrono::seconds(seconds > 0 ? seconds : 60);
}

bool come(const std::string &where, int wanted, int rank, int color, int key) {
  std::lock_guard guard(lock);
  Gathering &gathering = gatherings[where];
  gathering.wanted = wanted;
  const bool first = gathering.came.emplace(rank, std::pair(color, key)).second;
  changed.notify_all();
  return first;
}

// Waits until all have come; false: `missing` names those that did not.
bool all_came(const std::string &where, std::map<int, std::pair<int, int>> &came, std::string &missing) {
  std::unique_lock guard(lock);
  const auto whole = [&] { return static_cast<int>(gatherings[where].came.size()) >= gatherings[where].wanted; };
  const bool done = changed.wait_for(guard, patience(), whole);
  came = gatherings[where].came;
  for (int rank = 0; !done && rank < gatherings[where].wanted; ++rank)
    if (!came.count(rank)) missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
  return done;
}

ncclResult_t too_late(const char *what, const std::string &missing) {
  char text[256];
  std::snprintf(text, sizeof text, "%s: after %d s these ranks had not come: %s", what,
                static_cast<int>(patience().count()), missing.c_str());
  table()->complain(text, text);
  return fail(ncclSystemError, "%s", text);
}

ncclResult_t create_on_worker(ncclComm *comm) {
  cuCtxPushCurrent_v2(comm->context);
  std::uint64_t number = 0;
  const CUresult r = table()->create(static_cast<unsigned>(comm->ranks), static_cast<unsigned>(comm->rank),
                                     comm->unique.data(), static_cast<unsigned>(comm->unique.size()), &number);
  CUcontext popped;
  cuCtxPopCurrent_v2(&popped);
  if (r == CUDA_ERROR_NOT_SUPPORTED) return fail(ncclInvalidUsage, "communicators by calls are for cpu devices so far");
  if (!r) comm->number = number;
  return from_cuda(r);
}

// The communicator object of the current device.
ncclResult_t begin_object(ncclComm_t *out, int ranks, int rank, bool blocking, ncclComm *&comm) {
  if (!table()) return fail(ncclSystemError, "libcuda.so.1 is not the one that belongs to this libnccl.so.2");
  CUcontext context = nullptr;
  CUdevice device = 0;
  if (CUresult r = cuCtxGetCurrent(&context); r) return from_cuda(r);
  if (!context) return fail(ncclInvalidUsage, "no CUDA context is current: call cudaSetDevice first");
  if (CUresult r = cuCtxGetDevice(&device); r) return from_cuda(r);
  comm = remember(new ncclComm);
  comm->ranks = ranks;
  comm->rank = rank;
  comm->context = context;
  comm->device = device;
  comm->blocking = blocking;
  *out = comm;
  return ncclSuccess;
}

ncclResult_t conclude(ncclComm *comm, ncclResult_t result) {
  if (result && comm->number) table()->destroy(comm->number, true);
  comm->state = result;
  return result;
}

// Blocking: now. Else by a thread, and the program asks ncclCommGetAsyncError.
ncclResult_t finish(ncclComm *comm, std::function<ncclResult_t()> rest) {
  if (comm->blocking) return conclude(comm, rest());
  std::thread([comm, rest = std::move(rest)] { conclude(comm, rest()); }).detach();
  return ncclInProgress;
}

bool is_blocking(const ncclConfig_t *config, bool otherwise = true) {
  if (!config || config->size < offsetof(ncclConfig_t, blocking) + sizeof(int) || config->blocking == INT_MIN)
    return otherwise;
  return config->blocking != 0;
}

ncclResult_t init(ncclComm_t *out, int ranks, const ncclUniqueId &id, int rank, bool blocking) {
  if (!out || ranks < 1 || rank < 0 || rank >= ranks) return fail(ncclInvalidArgument, "rank %d of %d", rank, ranks);
  if (ranks > 1 && !of_this_process(id)) {
    const char *text =
        "ncclCommInitRank: the unique id is another process's; ranks in several processes are not supported yet: run "
        "one process with several devices";
    if (table()) table()->complain("nccl between processes", text);
    return fail(ncclInvalidUsage, "%s", text);
  }
  ncclComm *comm = nullptr;
  if (ncclResult_t r = begin_object(out, ranks, rank, blocking, comm); r) return r;
  comm->unique.assign(id.internal, sizeof id.internal);
  auto joined = std::make_shared<ncclResult_t>(ncclSuccess);
  return make({[=] {
                 *joined = come(comm->unique, ranks, rank, 0, 0)
                               ? create_on_worker(comm)
                               : fail(ncclInvalidUsage, "rank %d of that unique id has come before", rank);
                 return ncclSuccess;  // the other half says it
               },
               [=] {
                 return finish(comm, [=]() -> ncclResult_t {
                   if (*joined) return *joined;
                   std::map<int, std::pair<int, int>> came;
                   std::string missing;
                   return all_came(comm->unique, came, missing) ? ncclSuccess : too_late("ncclCommInitRank", missing);
                 });
               }});
}

ncclResult_t child_of(ncclComm *parent, ncclComm_t *out, bool blocking, ncclComm *&comm) {
  cuCtxPushCurrent_v2(parent->context);
  const ncclResult_t r = begin_object(out, 0, 0, blocking, comm);
  CUcontext popped;
  cuCtxPopCurrent_v2(&popped);
  return r;
}

// The rank's place among those of its colour, ordered by key and then by rank.
void place_in_split(ncclComm *comm, int rank, const std::map<int, std::pair<int, int>> &came) {
  const auto [color, key] = came.at(rank);
  for (const auto &[other, told] : came) {
    if (told.first != color) continue;
    ++comm->ranks;
    if (std::pair(told.second, other) < std::pair(key, rank)) ++comm->rank;
  }
}

ncclResult_t end(ncclComm_t comm, bool abort) {
  if (!known(comm) || !comm->alive.exchange(false)) return fail(ncclInvalidArgument, "no communicator");
  if (comm->number && comm->state == ncclSuccess) return from_cuda(table()->destroy(comm->number, abort));
  return ncclSuccess;
}

}  // namespace
}  // namespace rgpu::nccl

using namespace rgpu::nccl;

extern "C" {

ncclResult_t pncclGetUniqueId(ncclUniqueId *uniqueId) {
  if (!uniqueId) return fail(ncclInvalidArgument, "uniqueId is NULL");
  static std::atomic<std::uint64_t> made{0};
  std::memset(uniqueId, 0, sizeof *uniqueId);
  std::memcpy(uniqueId->internal, kMagic, sizeof kMagic);
  std::memcpy(uniqueId->internal + 8, process_id().data(), process_id().size());
  const std::uint64_t number = ++made;
  std::memcpy(uniqueId->internal + 8 + process_id().size(), &number, sizeof number);
  return ncclSuccess;
}

ncclResult_t pncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank,
                                     ncclConfig_t *config) {
  return init(comm, nranks, commId, rank, is_blocking(config));
}

ncclResult_t pncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank) {
  return init(comm, nranks, commId, rank, true);
}

ncclResult_t pncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId, ncclUniqueId *commIds,
                                       ncclConfig_t *config) {
  if (nId < 1 || !commIds) return fail(ncclInvalidArgument, "no unique id");
  return init(newcomm, nranks, commIds[0], myrank, is_blocking(config));
}

ncclResult_t pncclCommInitAll(ncclComm_t *comm, int ndev, const int *devlist) {
  if (!comm || ndev < 1) return fail(ncclInvalidArgument, "%d devices", ndev);
  if (CUresult r = cuInit(0); r) return from_cuda(r);
  ncclUniqueId id;
  pncclGetUniqueId(&id);
  ncclResult_t result = ncclSuccess;
  pncclGroupStart();
  for (int i = 0; i < ndev && !result; ++i) {
    CUdevice device;
    CUcontext context, popped;
    CUresult r = cuDeviceGet(&device, devlist ? devlist[i] : i);
    if (!r) r = cuDevicePrimaryCtxRetain(&context, device);
    if (!r) r = cuCtxPushCurrent_v2(context);
    if (!r) {
      result = init(comm + i, ndev, id, i, true);
      cuCtxPopCurrent_v2(&popped);
    } else {
      result = fail(ncclInvalidUsage, "device %d: CUDA error %d", devlist ? devlist[i] : i, static_cast<int>(r));
    }
  }
  const ncclResult_t ended = pncclGroupEnd();
  return result ? result : ended;
}

ncclResult_t pncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config) {
  ncclResult_t why;
  if (!usable(comm, why)) return why;
  if (!newcomm || color < -1) return fail(ncclInvalidArgument, "colour %d", color);
  const std::string where = comm->unique + "/split " + std::to_string(comm->children++);
  ncclComm *child = nullptr;
  *newcomm = nullptr;
  if (color >= 0)
    if (ncclResult_t r = child_of(comm, newcomm, is_blocking(config, comm->blocking), child); r) return r;
  return make({[=] { return come(where, comm->ranks, comm->rank, color, key), ncclSuccess; },
               [=] {
                 const auto rest = [=]() -> ncclResult_t {
                   std::map<int, std::pair<int, int>> came;
                   std::string missing;
                   if (!all_came(where, came, missing)) return too_late("ncclCommSplit", missing);
                   place_in_split(child, comm->rank, came);
                   child->unique = where + " colour " + std::to_string(color);
                   return create_on_worker(child);
                 };
                 return child ? finish(child, rest) : ncclSuccess;
               }});
}

ncclResult_t pncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount, ncclComm_t *newcomm,
                             ncclConfig_t *config, int shrinkFlags) {
  ncclResult_t why;
  if (!usable(comm, why)) return why;
  if (!newcomm || !excludeRanksList || excludeRanksCount < 1 || excludeRanksCount >= comm->ranks)
    return fail(ncclInvalidArgument, "%d ranks to exclude", excludeRanksCount);
  if (shrinkFlags) return refused("ncclCommShrink with NCCL_SHRINK_ABORT");
  std::vector<int> out(excludeRanksList, excludeRanksList + excludeRanksCount);
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  if (out.front() < 0 || out.back() >= comm->ranks || std::binary_search(out.begin(), out.end(), comm->rank))
    return fail(ncclInvalidArgument, "the list of excluded ranks names this one, or none of the communicator");
  ncclComm *child = nullptr;
  if (ncclResult_t r = child_of(comm, newcomm, is_blocking(config, comm->blocking), child); r) return r;
  child->ranks = comm->ranks - static_cast<int>(out.size());
  child->rank = comm->rank - static_cast<int>(std::lower_bound(out.begin(), out.end(), comm->rank) - out.begin());
  child->unique = comm->unique + "/shrink " + std::to_string(comm->children++);
  return make({[] { return ncclSuccess; }, [=] { return finish(child, [=] { return create_on_worker(child); }); }});
}

ncclResult_t pncclCommFinalize(ncclComm_t comm) {
  ncclResult_t why;
  return usable(comm, why) ? ncclSuccess : why;
}

ncclResult_t pncclCommDestroy(ncclComm_t comm) { return comm ? end(comm, false) : ncclSuccess; }
ncclResult_t pncclCommAbort(ncclComm_t comm) { return comm ? end(comm, true) : ncclSuccess; }

}  // extern "C"
