"""Every function of ``nccl.h`` by name: its prototype where it is implemented; the others are refused by name.

The names are those that NCCL 2.32.3 exports (``symbols.txt``). The library reports version :data:`VERSION`:
later functions are refused with ncclInvalidUsage, as are the device API, windows and the functions named in
docs/users/limits.md.
"""

from __future__ import annotations

from pathlib import Path

VERSION = 22809  #: NCCL_VERSION_CODE of 2.28.9

_BUFFERS = "const void *sendbuff, void *recvbuff"
_WHERE = "ncclComm_t comm, cudaStream_t stream"
_TYPED = "size_t count, ncclDataType_t datatype"

#: name → arguments of the C function. All return ncclResult_t, but those in :data:`TEXTS`.
PROTOTYPES: dict[str, str] = {
    "ncclMemAlloc": "void **ptr, size_t size",
    "ncclMemFree": "void *ptr",
    "ncclGetVersion": "int *version",
    "ncclGetUniqueId": "ncclUniqueId *uniqueId",
    "ncclCommInitRankConfig": "ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t *config",
    "ncclCommInitRank": "ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank",
    "ncclCommInitRankScalable":
        "ncclComm_t *newcomm, int nranks, int myrank, int nId, ncclUniqueId *commIds, ncclConfig_t *config",
    "ncclCommInitAll": "ncclComm_t *comm, int ndev, const int *devlist",
    "ncclCommFinalize": "ncclComm_t comm",
    "ncclCommDestroy": "ncclComm_t comm",
    "ncclCommAbort": "ncclComm_t comm",
    "ncclCommSplit": "ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config",
    "ncclCommShrink": "ncclComm_t comm, int *excludeRanksList, int excludeRanksCount, ncclComm_t *newcomm, "
                      "ncclConfig_t *config, int shrinkFlags",
    "ncclGetErrorString": "ncclResult_t result",
    "ncclGetLastError": "ncclComm_t comm",
    "ncclCommGetAsyncError": "ncclComm_t comm, ncclResult_t *asyncError",
    "ncclCommCount": "const ncclComm_t comm, int *count",
    "ncclCommCuDevice": "const ncclComm_t comm, int *device",
    "ncclCommUserRank": "const ncclComm_t comm, int *rank",
    "ncclCommRegister": "const ncclComm_t comm, void *buff, size_t size, void **handle",
    "ncclCommDeregister": "const ncclComm_t comm, void *handle",
    "ncclRedOpCreatePreMulSum": "ncclRedOp_t *op, void *scalar, ncclDataType_t datatype, "
                                "ncclScalarResidence_t residence, ncclComm_t comm",
    "ncclRedOpDestroy": "ncclRedOp_t op, ncclComm_t comm",
    "ncclReduce": f"{_BUFFERS}, {_TYPED}, ncclRedOp_t op, int root, {_WHERE}",
    "ncclBcast": f"void *buff, {_TYPED}, int root, {_WHERE}",
    "ncclBroadcast": f"{_BUFFERS}, {_TYPED}, int root, {_WHERE}",
    "ncclAllReduce": f"{_BUFFERS}, {_TYPED}, ncclRedOp_t op, {_WHERE}",
    "ncclReduceScatter": f"{_BUFFERS}, {_TYPED}, ncclRedOp_t op, {_WHERE}",
    "ncclAllGather": f"{_BUFFERS}, {_TYPED}, {_WHERE}",
    "ncclAlltoAll": f"{_BUFFERS}, {_TYPED}, {_WHERE}",
    "ncclGather": f"{_BUFFERS}, {_TYPED}, int root, {_WHERE}",
    "ncclScatter": f"{_BUFFERS}, {_TYPED}, int root, {_WHERE}",
    "ncclSend": f"const void *sendbuff, {_TYPED}, int peer, {_WHERE}",
    "ncclRecv": f"void *recvbuff, {_TYPED}, int peer, {_WHERE}",
    "ncclGroupStart": "",
    "ncclGroupEnd": "",
}
TEXTS = frozenset({"ncclGetErrorString", "ncclGetLastError"})


def symbols() -> list[str]:
    """Every name that the library exports without its ``pnccl`` twin, sorted."""
    return (Path(__file__).parent / "symbols.txt").read_text(encoding="ascii").split()
