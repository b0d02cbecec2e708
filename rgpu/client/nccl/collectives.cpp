// Collectives, sends and receives: arguments checked, then an operation of a group.
#include <cstring>

#include "state.hpp"

namespace rgpu::nccl {
namespace {

// rgpu/session/objects/collectives.py, Kind and Reduction.
enum Kind : std::uint8_t {
  kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter, kAllToAll, kGather, kScatter, kSend, kReceive
};
constexpr std::uint8_t kPreMulSum = 5, kScalarOnDevice = 1;
constexpr std::size_t kSizes[kNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

struct Extent {
  std::size_t reads, writes;  // in units of count
};

Extent extent(Kind kind, std::size_t ranks, bool root) {
  switch (kind) {
    case kAllReduce: return {1, 1};
    case kReduce: return {1, root};
    case kBroadcast: return {root, 1};
    case kAllGather: return {1, ranks};
    case kReduceScatter: return {ranks, 1};
    case kAllToAll: return {ranks, ranks};
    case kGather: return {1, root ? ranks : 0};
    case kScatter: return {root ? ranks : 0, 1};
    case kSend: return {1, 0};
    default: return {0, 1};
  }
}

ncclResult_t reduction(CollectiveOperation &operation, ncclComm *comm, int op, std::vector<CollectiveRange> &ranges) {
  if (op < 0) return fail(ncclInvalidArgument, "reduction %d", op);
  operation.reduction = static_cast<std::uint8_t>(op);
  if (op < kNumOps) return ncclSuccess;
  std::lock_guard guard(comm->lock);
  const auto index = static_cast<std::size_t>(op - kNumOps);
  if (index >= comm->scalars.size() || !comm->scalars[index].alive)
    return fail(ncclInvalidArgument, "reduction %d is unknown to this communicator", op);
  const Scalar &scalar = comm->scalars[index];
  if (scalar.data_type != operation.data_type)
    return fail(ncclInvalidArgument, "the reduction is of another data type than the buffers");
  operation.reduction = kPreMulSum;
  operation.scalar = scalar.value;
  if (scalar.on_device) {
    operation.flags = kScalarOnDevice;
    ranges.push_back({scalar.value, kSizes[scalar.data_type]});
  }
  return ncclSuccess;
}

ncclResult_t collective(Kind kind, const void *send, void *receive, std::size_t count, int type, int op, int peer,
                        ncclComm *comm, cudaStream_t stream) {
  ncclResult_t why;
  if (!usable(comm, why)) return why;
  if (type < 0 || type >= kNumTypes) return fail(ncclInvalidArgument, "data type %d", type);
  const bool wants_peer = kind == kReduce || kind == kBroadcast || kind >= kGather;
  if (wants_peer && (peer < 0 || peer >= comm->ranks))
    return fail(ncclInvalidArgument, "rank %d of %d", peer, comm->ranks);
  const auto ranks = static_cast<std::size_t>(comm->ranks);
  std::size_t bytes;
  if (__builtin_mul_overflow(count, kSizes[type] * ranks, &bytes) || bytes >> 47)
    return fail(ncclInvalidArgument, "%zu elements", count);
  CollectiveOperation operation;
  operation.kind = kind;
  operation.data_type = static_cast<std::uint8_t>(type);
  operation.peer = wants_peer ? peer : -1;
  operation.communicator = comm->number;
  operation.stream = reinterpret_cast<std::uint64_t>(stream);
  operation.send = reinterpret_cast<std::uint64_t>(send);
  operation.receive = reinterpret_cast<std::uint64_t>(receive);
  operation.count = count;
  std::vector<CollectiveRange> ranges;
  if (kind == kAllReduce || kind == kReduce || kind == kReduceScatter)
    if (ncclResult_t r = reduction(operation, comm, op, ranges); r) return r;
  const Extent units = extent(kind, ranks, comm->rank == peer);
  const std::size_t size = count * kSizes[type];
  if (units.reads && size) ranges.push_back({operation.send, units.reads * size});
  if (units.writes && size) ranges.push_back({operation.receive, units.writes * size});
  return give(operation, comm, ranges);
}

}  // namespace
}  // namespace rgpu::nccl

using namespace rgpu::nccl;

extern "C" {

ncclResult_t pncclReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                         int root, ncclComm_t comm, cudaStream_t stream) {
  return collective(kReduce, sendbuff, recvbuff, count, datatype, op, root, comm, stream);
}
ncclResult_t pncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                        cudaStream_t stream) {
  return collective(kBroadcast, buff, buff, count, datatype, 0, root, comm, stream);
}
ncclResult_t pncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
                            ncclComm_t comm, cudaStream_t stream) {
  return collective(kBroadcast, sendbuff, recvbuff, count, datatype, 0, root, comm, stream);
}
ncclResult_t pncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                            ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return collective(kAllReduce, sendbuff, recvbuff, count, datatype, op, -1, comm, stream);
}
ncclResult_t pncclReduceScatter(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                                ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return collective(kReduceScatter, sendbuff, recvbuff, count, datatype, op, -1, comm, stream);
}
ncclResult_t pncclAllGather(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                            ncclComm_t comm, cudaStream_t stream) {
  return collective(kAllGather, sendbuff, recvbuff, count, datatype, 0, -1, comm, stream);
}
ncclResult_t pncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                           ncclComm_t comm, cudaStream_t stream) {
  return collective(kAllToAll, sendbuff, recvbuff, count, datatype, 0, -1, comm, stream);
}
ncclResult_t pncclGather(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
                         ncclComm_t comm, cudaStream_t stream) {
  return collective(kGather, sendbuff, recvbuff, count, datatype, 0, root, comm, stream);
}
ncclResult_t pncclScatter(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
                          ncclComm_t comm, cudaStream_t stream) {
  return collective(kScatter, sendbuff, recvbuff, count, datatype, 0, root, comm, stream);
}
ncclResult_t pncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                       cudaStream_t stream) {
  return collective(kSend, sendbuff, nullptr, count, datatype, 0, peer, comm, stream);
}
ncclResult_t pncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                       cudaStream_t stream) {
  return collective(kReceive, nullptr, recvbuff, count, datatype, 0, peer, comm, stream);
}

ncclResult_t pncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
                                       ncclScalarResidence_t residence, ncclComm_t comm) {
  ncclResult_t why;
  if (!usable(comm, why)) return why;
  if (!op || !scalar || datatype < 0 || datatype >= kNumTypes || residence < 0 || residence > 1)
    return fail(ncclInvalidArgument, "data type %d, residence %d", datatype, residence);
  Scalar made{datatype, reinterpret_cast<std::uint64_t>(scalar), residence == 0};
  if (!made.on_device) {
    made.value = 0;
    std::memcpy(&made.value, scalar, kSizes[datatype]);
  }
  std::lock_guard guard(comm->lock);
  comm->scalars.push_back(made);
  *op = kNumOps + static_cast<int>(comm->scalars.size()) - 1;
  return ncclSuccess;
}

ncclResult_t pncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  ncclResult_t why;
  if (!usable(comm, why)) return why;
  std::lock_guard guard(comm->lock);
  const auto index = static_cast<std::size_t>(op - kNumOps);
  if (op < kNumOps || index >= comm->scalars.size() || !comm->scalars[index].alive)
    return fail(ncclInvalidArgument, "reduction %d cannot be destroyed", op);
  comm->scalars[index].alive = false;
  return ncclSuccess;
}

}  // extern "C"
