// Queries that are answered in this process: versions, errors, numbers; memory and registered buffers.
#include "driver.hpp"
#include "state.hpp"

namespace rgpu::nccl {
namespace {

ncclResult_t ask(const ncclComm *comm, int *out, int ncclComm::*member) {
  ncclResult_t why;
  if (!usable(comm, why)) return why;
  if (!out) return fail(ncclInvalidArgument, "NULL");
  *out = comm->*member;
  return ncclSuccess;
}

}  // namespace
}  // namespace rgpu::nccl

using namespace rgpu::nccl;

extern "C" {

ncclResult_t pncclGetVersion(int *version) {
  if (!version) return fail(ncclInvalidArgument, "version is NULL");
  *version = kVersion;
  return ncclSuccess;
}

const char *pncclGetErrorString(ncclResult_t result) {
  static constexpr const char *kTexts[ncclNumResults] = {
      "no error", "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
      "unhandled system error (run with NCCL_DEBUG=INFO for details)",
      "internal error - please report this issue to the NCCL developers",
      "invalid argument (run with NCCL_DEBUG=WARN for details)", "invalid usage (run with NCCL_DEBUG=WARN for details)",
      "remote process exited or there was a network error", "NCCL operation in progress"};
  return result >= 0 && result < ncclNumResults ? kTexts[result] : "unknown result code";
}

const char *pncclGetLastError(ncclComm_t) { return last_error(); }

ncclResult_t pncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError) {
  if (!known(comm) || !asyncError) return fail(ncclInvalidArgument, "no communicator");
  *asyncError = comm->state;
  if (*asyncError == ncclSuccess && comm->alive)
    if (const CUresult r = table()->error(); r) *asyncError = from_cuda(r);
  return ncclSuccess;
}

ncclResult_t pncclCommCount(const ncclComm_t comm, int *count) { return ask(comm, count, &ncclComm::ranks); }
ncclResult_t pncclCommCuDevice(const ncclComm_t comm, int *device) { return ask(comm, device, &ncclComm::device); }
ncclResult_t pncclCommUserRank(const ncclComm_t comm, int *rank) { return ask(comm, rank, &ncclComm::rank); }

ncclResult_t pncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle) {
  ncclResult_t why;
  if (!usable(comm, why)) return why;
  if (!buff || !size || !handle) return fail(ncclInvalidArgument, "no buffer");
  *handle = buff;  // a hint: buffers need no registration here
  return ncclSuccess;
}

ncclResult_t pncclCommDeregister(const ncclComm_t comm, void *) {
  ncclResult_t why;
  return usable(comm, why) ? ncclSuccess : why;
}

ncclResult_t pncclMemAlloc(void **ptr, size_t size) {
  if (!ptr || !size) return fail(ncclInvalidArgument, "no size");
  CUdeviceptr address = 0;
  const CUresult r = cuMemAlloc_v2(&address, size);
  *ptr = reinterpret_cast<void *>(address);
  return from_cuda(r);
}

ncclResult_t pncclMemFree(void *ptr) { return ptr ? from_cuda(cuMemFree_v2(reinterpret_cast<CUdeviceptr>(ptr))) : ncclSuccess; }

}  // extern "C"
