// Making and ending communicators.
#include <sys/random.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "driver.hpp"
#include "rendezvous.hpp"
#include "state.hpp"

namespace rgpu::nccl {
namespace {

constexpr char kMagic[8] = {'R', 'G', 'P', 'U', 'N', 'C', 'C', 'L'};

const std::string &process_id() {
  static const std::string *id = [] {
    std::string random(32, '\0');
    if (getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) std::abort();
    return new std::string(std::move(random));
  }();
  return *id;
}

bool of_this_library(const ncclUniqueId &id) { return !std::memcmp(id.internal, kMagic, sizeof kMagic); }

// A colour and a key packed into the payload that a rank sends to the others.
std::uint64_t packed(int color, int key) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(color)) << 32 | static_cast<std::uint32_t>(key);
}
int color_of(const Came &came) { return static_cast<int>(came.payload >> 32); }
int key_of(const Came &came) { return static_cast<int>(came.payload); }

ncclResult_t create_on_worker(ncclComm *comm) {
  cuCtxPushCurrent_v2(comm->context);
  std::uint64_t number = 0;
  const std::string members = members_of(comm->members);
  const CUresult r = table()->create(static_cast<unsigned>(comm->ranks), static_cast<unsigned>(comm->rank),
                                     comm->unique.data(), static_cast<unsigned>(comm->unique.size()),
                                     members.data(), static_cast<unsigned>(members.size()), &number);
  CUcontext popped;
  cuCtxPopCurrent_v2(&popped);
  if (r == CUDA_ERROR_NOT_SUPPORTED) return fail(ncclInvalidUsage, "communicators by calls are for cpu devices so far");
  if (!r) comm->number = number;
  return from_cuda(r);
}

// Creates the communicator object on the current device.
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
  if (table()->session) comm->session = table()->session();
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

// Finishes a blocking communicator now, any other in a thread; the program then polls ncclCommGetAsyncError.
ncclResult_t finish(ncclComm *comm, std::function<ncclResult_t()> rest) {
  if (comm->blocking) return conclude(comm, rest());
  std::thread([comm, rest = std::move(rest)] { conclude(comm, rest()); }).detach();
  return ncclInProgress;
}

// A rank that is in no new communicator reports that and does not wait for the others, as with NCCL.
ncclResult_t show(std::function<ncclResult_t()> rest) {
  std::thread([rest = std::move(rest)] { rest(); }).detach();
  return ncclSuccess;
}

bool is_blocking(const ncclConfig_t *config, bool otherwise = true) {
  if (!config || config->size < offsetof(ncclConfig_t, blocking) + sizeof(int) || config->blocking == INT_MIN)
    return otherwise;
  return config->blocking != 0;
}

// Whether all ranks are threads of this process. In one with several sessions they have to be.
bool only_here(const ncclComm *comm) {
  return !comm->session.empty() || comm->ranks == 1 || (!comm->members.empty() && members_of(comm->members).empty());
}

ncclResult_t init(ncclComm_t *out, int ranks, const ncclUniqueId &id, int rank, bool blocking) {
  if (!out || ranks < 1 || rank < 0 || rank >= ranks) return fail(ncclInvalidArgument, "rank %d of %d", rank, ranks);
  if (ranks > 1 && !of_this_library(id)) {
    const char *text = "ncclCommInitRank: the unique id was made by another NCCL than the one of rgpu: the process "
                       "that called ncclGetUniqueId does not run under `rgpu run` with RGPU_NCCL=calls";
    if (table()) table()->complain("nccl unique id", text);
    return fail(ncclInvalidUsage, "%s", text);
  }
  ncclComm *comm = nullptr;
  if (ncclResult_t r = begin_object(out, ranks, rank, blocking, comm); r) return r;
  comm->unique.assign(id.internal, sizeof id.internal);
  auto joined = std::make_shared<ncclResult_t>(ncclSuccess);
  return make({[=] {
                 if (!come(comm->unique, rank, 0, comm->session))
                   *joined = fail(ncclInvalidUsage, "rank %d of that unique id has come before", rank);
                 return ncclSuccess;  // the other half reports the error
               },
               [=] {
                 return finish(comm, [=]() -> ncclResult_t {
                   if (*joined) return *joined;
                   if (ncclResult_t r = gather("ncclCommInitRank", comm->unique, ranks, rank, 0, only_here(comm),
                                               comm->members))
                     return r;
                   return create_on_worker(comm);
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

// Computes the rank's place among the ranks of its colour, ordered by key and then by rank. `came`: the parent's ranks.
void place_in_split(ncclComm *child, const ncclComm *parent, const std::vector<Came> &came) {
  const Came &mine = came[static_cast<std::size_t>(parent->rank)];
  std::vector<std::pair<int, int>> order;
  for (int other = 0; other < parent->ranks; ++other)
    if (color_of(came[static_cast<std::size_t>(other)]) == color_of(mine))
      order.emplace_back(key_of(came[static_cast<std::size_t>(other)]), other);
  std::sort(order.begin(), order.end());
  child->ranks = static_cast<int>(order.size());
  for (std::size_t at = 0; at < order.size(); ++at) {
    if (order[at].second == parent->rank) child->rank = static_cast<int>(at);
    child->members.push_back(parent->members[static_cast<std::size_t>(order[at].second)]);
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
  const std::uint64_t payload = packed(color, key);
  return make({[=] { return come(where, comm->rank, payload, comm->session), ncclSuccess; },
               [=] {
                 const auto rest = [=]() -> ncclResult_t {
                   std::vector<Came> came;
                   if (ncclResult_t r = gather("ncclCommSplit", where, comm->ranks, comm->rank, payload,
                                               only_here(comm), came))
                     return r;
                   if (!child) return ncclSuccess;
                   place_in_split(child, comm, came);
                   child->unique = where + " colour " + std::to_string(color);
                   return create_on_worker(child);
                 };
                 return child ? finish(child, rest) : show(rest);
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
  for (int other = 0; other < comm->ranks; ++other)
    if (!std::binary_search(out.begin(), out.end(), other))
      child->members.push_back(comm->members[static_cast<std::size_t>(other)]);
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
