"""Driver functions: launches and occupancy."""

from __future__ import annotations

from rgpu.session.calls.functions.model import ASYNC, LOCAL, SYNC, function

FUNCTIONS = (
    function("cuFuncSetBlockShape", "CUfunction hfunc, int x, int y, int z", "cuFuncSetBlockShape 2000"),
    function("cuFuncSetSharedSize", "CUfunction hfunc, unsigned int bytes", "cuFuncSetSharedSize 2000"),
    function("cuLaunch", "CUfunction f", "cuLaunch 2000"),
    function(
        "cuLaunchCooperativeKernel",
        "CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int "
        "blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream "
        "hStream, void **kernelParams", "cuLaunchCooperativeKernel 9000 ptsz 9000", ASYNC, "launch",
        "configuration errors are found on the client",
    ),
    function(
        "cuLaunchCooperativeKernelMultiDevice",
        "CUDA_LAUNCH_PARAMS *launchParamsList, unsigned int numDevices, unsigned int flags",
        "cuLaunchCooperativeKernelMultiDevice 9000",
    ),
    function("cuLaunchGrid", "CUfunction f, int grid_width, int grid_height", "cuLaunchGrid 2000"),
    function(
        "cuLaunchGridAsync", "CUfunction f, int grid_width, int grid_height, CUstream hStream",
        "cuLaunchGridAsync 2000",
    ),
    function(
        "cuLaunchHostFunc", "CUstream hStream, CUhostFn fn, void *userData", "cuLaunchHostFunc 10000 ptsz 10000",
        ASYNC, "host_function host_function_done", "runs on a thread of the client when the stream gets there",
    ),
    function(
        "cuLaunchKernel",
        "CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int "
        "blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream "
        "hStream, void **kernelParams, void **extra", "cuLaunchKernel 4000 ptsz 7000", ASYNC, "launch",
        "configuration errors are found on the client",
    ),
    function(
        "cuLaunchKernelEx", "const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra",
        "cuLaunchKernelEx 11060 ptsz 11060", ASYNC, "launch", "configuration errors are found on the client",
    ),
    function(
        "cuOccupancyAvailableDynamicSMemPerBlock",
        "size_t *dynamicSmemSize, CUfunction func, int numBlocks, int blockSize",
        "cuOccupancyAvailableDynamicSMemPerBlock 10020", LOCAL, "",
        "computed from the kernel table and the device facts",
    ),
    function(
        "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        "int *numBlocks, CUfunction func, int blockSize, size_t dynamicSMemSize",
        "cuOccupancyMaxActiveBlocksPerMultiprocessor 6050", LOCAL, "",
        "computed from the kernel table and the device facts",
    ),
    function(
        "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags",
        "int *numBlocks, CUfunction func, int blockSize, size_t dynamicSMemSize, unsigned int flags",
        "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags 7000", LOCAL, "",
        "computed from the kernel table and the device facts",
    ),
    function(
        "cuOccupancyMaxActiveClusters", "int *numClusters, CUfunction func, const CUlaunchConfig *config",
        "cuOccupancyMaxActiveClusters 11070", SYNC, "cluster_occupancy",
        "answered by the server's driver, once for each set of arguments",
    ),
    function(
        "cuOccupancyMaxPotentialBlockSize",
        "int *minGridSize, int *blockSize, CUfunction func, CUoccupancyB2DSize blockSizeToDynamicSMemSize, "
        "size_t dynamicSMemSize, int blockSizeLimit", "cuOccupancyMaxPotentialBlockSize 6050", LOCAL, "",
        "computed from the kernel table and the device facts",
    ),
    function(
        "cuOccupancyMaxPotentialBlockSizeWithFlags",
        "int *minGridSize, int *blockSize, CUfunction func, CUoccupancyB2DSize blockSizeToDynamicSMemSize, "
        "size_t dynamicSMemSize, int blockSizeLimit, unsigned int flags",
        "cuOccupancyMaxPotentialBlockSizeWithFlags 7000", LOCAL, "",
        "computed from the kernel table and the device facts",
    ),
    function(
        "cuOccupancyMaxPotentialClusterSize", "int *clusterSize, CUfunction func, const CUlaunchConfig *config",
        "cuOccupancyMaxPotentialClusterSize 11070", SYNC, "cluster_occupancy",
        "answered by the server's driver, once for each set of arguments",
    ),
    function("cuParamSetSize", "CUfunction hfunc, unsigned int numbytes", "cuParamSetSize 2000"),
    function("cuParamSetTexRef", "CUfunction hfunc, int texunit, CUtexref hTexRef", "cuParamSetTexRef 2000"),
    function("cuParamSetf", "CUfunction hfunc, int offset, float value", "cuParamSetf 2000"),
    function("cuParamSeti", "CUfunction hfunc, int offset, unsigned int value", "cuParamSeti 2000"),
    function("cuParamSetv", "CUfunction hfunc, int offset, void *ptr, unsigned int numbytes", "cuParamSetv 2000"),
)
