"""Handles, scalar names, structures and constants (interface facts of cuda.h 13.0).

A structure is (name, size in bytes on LP64, C members). The size is asserted
in the generated header, so a mistake here fails the build.
"""

from __future__ import annotations

#: CUcontext = struct CUctx_st *: the names that programs and debuggers use.
HANDLES: dict[str, str] = {
    "CUcontext": "CUctx_st", "CUmodule": "CUmod_st", "CUfunction": "CUfunc_st", "CUlibrary": "CUlib_st",
    "CUkernel": "CUkern_st", "CUstream": "CUstream_st", "CUevent": "CUevent_st", "CUarray": "CUarray_st",
    "CUgraph": "CUgraph_st", "CUgraphNode": "CUgraphNode_st", "CUgraphDeviceNode": "CUgraphDeviceUpdatableNode_st",
    "CUgraphExec": "CUgraphExec_st", "CUuserObject": "CUuserObject_st",
    "CUmemoryPool": "CUmemPoolHandle_st", "CUlinkState": "CUlinkState_st", "CUgreenCtx": "CUgreenCtx_st",
    "CUtexref": "CUtexref_st", "CUsurfref": "CUsurfref_st", "CUmipmappedArray": "CUmipmappedArray_st",
}

#: name → C type
SCALARS: dict[str, str] = {
    "CUdeviceptr": "unsigned long long", "CUdevice": "int", "CUmemGenericAllocationHandle": "unsigned long long",
    "CUtexObject": "unsigned long long", "CUsurfObject": "unsigned long long",
    "CUgraphConditionalHandle": "unsigned long long",
}

#: name → C declaration of the pointer type
CALLBACKS: dict[str, str] = {
    "CUstreamCallback": "void (*CUstreamCallback)(CUstream stream, CUresult status, void *user)",
    "CUhostFn": "void (*CUhostFn)(void *user)",
    "CUoccupancyB2DSize": "size_t (*CUoccupancyB2DSize)(int block)",
}

_COPY_SIDE_2D = "size_t {0}XInBytes; size_t {0}Y; CUmemorytype {0}MemoryType; {1}void *{0}Host; " \
    "CUdeviceptr {0}Device; CUarray {0}Array; size_t {0}Pitch; "
_COPY_SIDE_3D = "size_t {0}XInBytes; size_t {0}Y; size_t {0}Z; size_t {0}LOD; CUmemorytype {0}MemoryType; " \
    "{1}void *{0}Host; CUdeviceptr {0}Device; CUarray {0}Array; {2}; size_t {0}Pitch; size_t {0}Height; "

STRUCTS: tuple[tuple[str, int, str], ...] = (
    ("CUuuid", 16, "char bytes[16];"),
    ("CUipcEventHandle", 64, "char reserved[64];"),
    ("CUipcMemHandle", 64, "char reserved[64];"),
    ("CUDA_MEMCPY2D", 128,
     _COPY_SIDE_2D.format("src", "const ") + _COPY_SIDE_2D.format("dst", "") + "size_t WidthInBytes; size_t Height;"),
    ("CUDA_MEMCPY3D", 200,
     _COPY_SIDE_3D.format("src", "const ", "void *reserved0") + _COPY_SIDE_3D.format("dst", "", "void *reserved1")
     + "size_t WidthInBytes; size_t Height; size_t Depth;"),
    ("CUDA_MEMCPY3D_PEER", 200,
     _COPY_SIDE_3D.format("src", "const ", "CUcontext srcContext")
     + _COPY_SIDE_3D.format("dst", "", "CUcontext dstContext") + "size_t WidthInBytes; size_t Height; size_t Depth;"),
    ("CUDA_ARRAY_DESCRIPTOR", 24, "size_t Width; size_t Height; CUarray_format Format; unsigned int NumChannels;"),
    ("CUDA_ARRAY3D_DESCRIPTOR", 40,
     "size_t Width; size_t Height; size_t Depth; CUarray_format Format; unsigned int NumChannels; unsigned int Flags;"),
    ("CUDA_ARRAY_MEMORY_REQUIREMENTS", 32, "size_t size; size_t alignment; unsigned int reserved[4];"),
    ("CUresourceArray", 8, "CUarray hArray;"),
    ("CUresourceMipmap", 8, "CUmipmappedArray hMipmappedArray;"),
    ("CUresourceLinear", 24,
     "CUdeviceptr devPtr; CUarray_format format; unsigned int numChannels; size_t sizeInBytes;"),
    ("CUresourcePitch2D", 40,
     "CUdeviceptr devPtr; CUarray_format format; unsigned int numChannels; size_t width; size_t height; "
     "size_t pitchInBytes;"),
    ("CUDA_RESOURCE_DESC", 144, "CUresourcetype resType; CUresourceDescription res; unsigned int flags;"),
    ("CUDA_TEXTURE_DESC", 104,
     "CUaddress_mode addressMode[3]; CUfilter_mode filterMode; unsigned int flags; unsigned int maxAnisotropy; "
     "CUfilter_mode mipmapFilterMode; float mipmapLevelBias; float minMipmapLevelClamp; float maxMipmapLevelClamp; "
     "float borderColor[4]; int reserved[12];"),
    ("CUDA_RESOURCE_VIEW_DESC", 112,
     "CUresourceViewFormat format; size_t width; size_t height; size_t depth; unsigned int firstMipmapLevel; "
     "unsigned int lastMipmapLevel; unsigned int firstLayer; unsigned int lastLayer; unsigned int reserved[16];"),
    ("CUdevprop", 56,
     "int maxThreadsPerBlock; int maxThreadsDim[3]; int maxGridSize[3]; int sharedMemPerBlock; "
     "int totalConstantMemory; int SIMDWidth; int memPitch; int regsPerBlock; int clockRate; int textureAlign;"),
    ("CUaccessPolicyWindow", 32,
     "void *base_ptr; size_t num_bytes; float hitRatio; CUaccessProperty hitProp; CUaccessProperty missProp;"),
    ("CUlaunchMemSyncDomainMap", 2, "unsigned char default_; unsigned char remote;"),
    ("CUlaunchDim", 12, "unsigned int x; unsigned int y; unsigned int z;"),
    ("CUlaunchProgrammaticEvent", 16, "CUevent event; int flags; int triggerAtBlockStart;"),
    ("CUlaunchCompletionEvent", 16, "CUevent event; int flags;"),
    ("CUlaunchUpdatableNode", 16, "int deviceUpdatable; CUgraphDeviceNode devNode;"),
    ("CUlaunchAttribute", 72, "CUlaunchAttributeID id; char pad[4]; CUlaunchAttributeValue value;"),
    ("CUlaunchConfig", 56,
     "unsigned int gridDimX; unsigned int gridDimY; unsigned int gridDimZ; "
     "unsigned int blockDimX; unsigned int blockDimY; unsigned int blockDimZ; "
     "unsigned int sharedMemBytes; CUstream hStream; CUlaunchAttribute *attrs; unsigned int numAttrs;"),
    ("CUmemLocation", 8, "CUmemLocationType type; int id;"),
    ("CUmemPoolProps", 88,
     "CUmemAllocationType allocType; CUmemAllocationHandleType handleTypes; CUmemLocation location; "
     "void *win32SecurityAttributes; size_t maxSize; unsigned short usage; unsigned char reserved[54];"),
    ("CUmemPoolPtrExportData", 64, "unsigned char reserved[64];"),
    ("CUmemAllocationProp", 32,
     "CUmemAllocationType type; CUmemAllocationHandleType requestedHandleTypes; CUmemLocation location; "
     "void *win32HandleMetaData; unsigned char compressionType; unsigned char gpuDirectRDMACapable; "
     "unsigned short usage; unsigned char reserved[4];"),
    ("CUmemAccessDesc", 12, "CUmemLocation location; CUmemAccess_flags flags;"),
    ("CUtensorMap", 128, "unsigned long long opaque[16];"),
    ("CUexecAffinityParam", 8, "CUexecAffinityType type; unsigned int smCount;"),
    ("CUctxCigParam", 16, "CUcigDataType sharedDataType; void *sharedData;"),
    ("CUctxCreateParams", 24,
     "CUexecAffinityParam *execAffinityParams; int numExecAffinityParams; CUctxCigParam *cigParams;"),
    ("CUgraphEdgeData", 8,
     "unsigned char from_port; unsigned char to_port; unsigned char type; unsigned char reserved[5];"),
    ("CUDA_KERNEL_NODE_PARAMS_v1", 56,
     "CUfunction func; unsigned int gridDimX; unsigned int gridDimY; unsigned int gridDimZ; "
     "unsigned int blockDimX; unsigned int blockDimY; unsigned int blockDimZ; unsigned int sharedMemBytes; "
     "void **kernelParams; void **extra;"),
    ("CUDA_KERNEL_NODE_PARAMS_v2", 72,
     "CUfunction func; unsigned int gridDimX; unsigned int gridDimY; unsigned int gridDimZ; "
     "unsigned int blockDimX; unsigned int blockDimY; unsigned int blockDimZ; unsigned int sharedMemBytes; "
     "void **kernelParams; void **extra; CUkernel kern; CUcontext ctx;"),
    ("CUDA_MEMSET_NODE_PARAMS_v1", 40,
     "CUdeviceptr dst; size_t pitch; unsigned int value; unsigned int elementSize; size_t width; size_t height;"),
    ("CUDA_MEMSET_NODE_PARAMS_v2", 48,
     "CUdeviceptr dst; size_t pitch; unsigned int value; unsigned int elementSize; size_t width; size_t height; "
     "CUcontext ctx;"),
    ("CUDA_HOST_NODE_PARAMS_v1", 16, "CUhostFn fn; void *userData;"),
    ("CUDA_MEMCPY_NODE_PARAMS", 216, "int flags; int reserved; CUcontext copyCtx; CUDA_MEMCPY3D copyParams;"),
    ("CUDA_CHILD_GRAPH_NODE_PARAMS", 16, "CUgraph graph; CUgraphChildGraphNodeOwnership ownership;"),
    ("CUDA_EVENT_NODE_PARAMS", 8, "CUevent event;"),
    ("CUDA_MEM_ALLOC_NODE_PARAMS_v1", 120,
     "CUmemPoolProps poolProps; const CUmemAccessDesc *accessDescs; size_t accessDescCount; size_t bytesize; "
     "CUdeviceptr dptr;"),
    ("CUDA_MEM_FREE_NODE_PARAMS", 8, "CUdeviceptr dptr;"),
    ("CUstreamBatchMemOpWord", 40,
     "CUstreamBatchMemOpType operation; CUdeviceptr address; uint64_t value64; unsigned int flags; CUdeviceptr alias;"),
    ("CUstreamBatchMemOpOrder", 8, "CUstreamBatchMemOpType operation; unsigned int flags;"),
    ("CUDA_BATCH_MEM_OP_NODE_PARAMS", 32,
     "CUcontext ctx; unsigned int count; CUstreamBatchMemOpParams *paramArray; unsigned int flags;"),
    ("CUDA_CONDITIONAL_NODE_PARAMS", 32,
     "CUgraphConditionalHandle handle; CUgraphConditionalNodeType type; unsigned int size; CUgraph *phGraph_out; "
     "CUcontext ctx;"),
    ("CUgraphNodeParams", 256, "CUgraphNodeType type; int reserved0[3]; CUgraphNodeParamsValue value; "
     "long long reserved2;"),
    ("CUDA_GRAPH_INSTANTIATE_PARAMS", 32,
     "uint64_t flags; CUstream hUploadStream; CUgraphNode hErrNode_out; CUgraphInstantiateResult result_out;"),
    ("CUgraphExecUpdateResultInfo", 24,
     "CUgraphExecUpdateResult result; CUgraphNode errorNode; CUgraphNode errorFromNode;"),
)

#: (name, size, members), each declared just before the structure that needs it
UNIONS: dict[str, tuple[str, int, str]] = {
    "CUDA_RESOURCE_DESC": (
        "CUresourceDescription", 128,
        "CUresourceArray array; CUresourceMipmap mipmap; CUresourceLinear linear; CUresourcePitch2D pitch2D; "
        "int reserved[32];"),
    "CUlaunchAttribute": (
        "CUlaunchAttributeValue", 64,
        "char pad[64]; CUaccessPolicyWindow accessPolicyWindow; int cooperative; CUsynchronizationPolicy syncPolicy; "
        "CUlaunchDim clusterDim; CUclusterSchedulingPolicy clusterSchedulingPolicyPreference; "
        "int programmaticStreamSerializationAllowed; CUlaunchProgrammaticEvent programmaticEvent; "
        "CUlaunchCompletionEvent launchCompletionEvent; int priority; CUlaunchMemSyncDomainMap memSyncDomainMap; "
        "CUlaunchMemSyncDomain memSyncDomain; CUlaunchDim preferredClusterDim; "
        "CUlaunchUpdatableNode deviceUpdatableKernelNode; unsigned int sharedMemCarveout; "
        "unsigned int nvlinkUtilCentricScheduling;"),
    "CUDA_BATCH_MEM_OP_NODE_PARAMS": (
        "CUstreamBatchMemOpParams", 48,
        "uint64_t pad[6]; CUstreamBatchMemOpType operation; CUstreamBatchMemOpWord value; "
        "CUstreamBatchMemOpOrder order;"),
    "CUgraphNodeParams": (
        "CUgraphNodeParamsValue", 232,
        "long long reserved1[29]; CUDA_KERNEL_NODE_PARAMS_v2 kernel; CUDA_MEMCPY_NODE_PARAMS memcpy; "
        "CUDA_MEMSET_NODE_PARAMS_v2 memset; CUDA_HOST_NODE_PARAMS_v1 host; CUDA_CHILD_GRAPH_NODE_PARAMS graph; "
        "CUDA_EVENT_NODE_PARAMS eventWait; CUDA_EVENT_NODE_PARAMS eventRecord; "
        "CUDA_MEM_ALLOC_NODE_PARAMS_v1 alloc; CUDA_MEM_FREE_NODE_PARAMS free; CUDA_BATCH_MEM_OP_NODE_PARAMS memOp; "
        "CUDA_CONDITIONAL_NODE_PARAMS conditional;"),
}

#: alias → type
ALIASES: dict[str, str] = {
    "CUstreamAttrID": "CUlaunchAttributeID", "CUstreamAttrValue": "CUlaunchAttributeValue",
    "CUkernelNodeAttrID": "CUlaunchAttributeID", "CUkernelNodeAttrValue": "CUlaunchAttributeValue",
}

#: name → C++ expression
CONSTANTS: dict[str, str] = {
    "CUDA_ARRAY3D_LAYERED": "0x01u", "CUDA_ARRAY3D_SURFACE_LDST": "0x02u", "CUDA_ARRAY3D_CUBEMAP": "0x04u",
    "CUDA_ARRAY3D_TEXTURE_GATHER": "0x08u", "CUDA_ARRAY3D_DEPTH_TEXTURE": "0x10u",
    "CUDA_ARRAY3D_COLOR_ATTACHMENT": "0x20u", "CUDA_ARRAY3D_SPARSE": "0x40u", "CUDA_ARRAY3D_DEFERRED_MAPPING": "0x80u",
    "CUDA_ARRAY3D_VIDEO_ENCODE_DECODE": "0x100u",
    "CU_TRSF_READ_AS_INTEGER": "0x01u", "CU_TRSF_NORMALIZED_COORDINATES": "0x02u", "CU_TRSF_SRGB": "0x10u",
    "CU_TRSF_DISABLE_TRILINEAR_OPTIMIZATION": "0x20u", "CU_TRSF_SEAMLESS_CUBEMAP": "0x40u",
    "CU_STREAM_LEGACY": "reinterpret_cast<CUstream>(uintptr_t{1})",
    "CU_STREAM_PER_THREAD": "reinterpret_cast<CUstream>(uintptr_t{2})",
    "CU_MEMHOSTALLOC_PORTABLE": "1u", "CU_MEMHOSTALLOC_DEVICEMAP": "2u", "CU_MEMHOSTALLOC_WRITECOMBINED": "4u",
    "CU_MEMHOSTREGISTER_PORTABLE": "1u", "CU_MEMHOSTREGISTER_DEVICEMAP": "2u", "CU_MEMHOSTREGISTER_IOMEMORY": "4u",
    "CU_MEMHOSTREGISTER_READ_ONLY": "8u",
    "CU_LAUNCH_PARAM_END": "static_cast<void *>(nullptr)",
    "CU_LAUNCH_PARAM_BUFFER_POINTER": "reinterpret_cast<void *>(uintptr_t{1})",
    "CU_LAUNCH_PARAM_BUFFER_SIZE": "reinterpret_cast<void *>(uintptr_t{2})",
    "CU_GRAPH_COND_ASSIGN_DEFAULT": "1u",
    "CU_DEVICE_CPU": "CUdevice{-1}", "CU_DEVICE_INVALID": "CUdevice{-2}",
}
