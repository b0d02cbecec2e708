"""Driver functions: arrays, textures, surfaces and tensor maps."""

from __future__ import annotations

from rgpu.session.calls.functions.model import ASYNC, LOCAL, SYNC, function

_SPARSE = "sparse and deferred arrays cannot be made"
_REFERENCE = "texture and surface references ended with CUDA 12; objects do the same"
_OLD = "32-bit sizes: replaced in CUDA 3.2"

FUNCTIONS = (
    function(
        "cuArray3DCreate", "CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray", "cuArray3DCreate 2000",
        note=_OLD,
    ),
    function(
        "cuArray3DCreate_v2", "CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray",
        "cuArray3DCreate 3020", SYNC, "array_create memory_map memory_allocate", "8, 16 and 32 bits a channel",
    ),
    function(
        "cuArray3DGetDescriptor", "CUDA_ARRAY3D_DESCRIPTOR *pArrayDescriptor, CUarray hArray",
        "cuArray3DGetDescriptor 2000", note=_OLD,
    ),
    function(
        "cuArray3DGetDescriptor_v2", "CUDA_ARRAY3D_DESCRIPTOR *pArrayDescriptor, CUarray hArray",
        "cuArray3DGetDescriptor 3020", LOCAL,
    ),
    function(
        "cuArrayCreate", "CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray", "cuArrayCreate 2000",
        note=_OLD,
    ),
    function(
        "cuArrayCreate_v2", "CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray", "cuArrayCreate 3020",
        SYNC, "array_create memory_map memory_allocate", "8, 16 and 32 bits a channel",
    ),
    function(
        "cuArrayDestroy", "CUarray hArray", "cuArrayDestroy 2000",
        SYNC, "context_synchronize array_destroy memory_free memory_unmap",
    ),
    function(
        "cuArrayGetDescriptor", "CUDA_ARRAY_DESCRIPTOR *pArrayDescriptor, CUarray hArray",
        "cuArrayGetDescriptor 2000", note=_OLD,
    ),
    function(
        "cuArrayGetDescriptor_v2", "CUDA_ARRAY_DESCRIPTOR *pArrayDescriptor, CUarray hArray",
        "cuArrayGetDescriptor 3020", LOCAL,
    ),
    function(
        "cuArrayGetMemoryRequirements",
        "CUDA_ARRAY_MEMORY_REQUIREMENTS *memoryRequirements, CUarray array, CUdevice device",
        "cuArrayGetMemoryRequirements 11060", LOCAL,
    ),
    function(
        "cuArrayGetPlane", "CUarray *pPlaneArray, CUarray hArray, unsigned int planeIdx", "cuArrayGetPlane 11020",
        note="arrays of several planes (NV12 and the like) cannot be made",
    ),
    function(
        "cuArrayGetSparseProperties", "CUDA_ARRAY_SPARSE_PROPERTIES *sparseProperties, CUarray array",
        "cuArrayGetSparseProperties 11010", note=_SPARSE,
    ),
    function(
        "cuMipmappedArrayCreate",
        "CUmipmappedArray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pMipmappedArrayDesc, unsigned int "
        "numMipmapLevels", "cuMipmappedArrayCreate 5000",
        SYNC, "array_create memory_map memory_allocate", "8, 16 and 32 bits a channel",
    ),
    function(
        "cuMipmappedArrayDestroy", "CUmipmappedArray hMipmappedArray", "cuMipmappedArrayDestroy 5000",
        SYNC, "context_synchronize array_destroy memory_free memory_unmap",
    ),
    function(
        "cuMipmappedArrayGetLevel", "CUarray *pLevelArray, CUmipmappedArray hMipmappedArray, unsigned int level",
        "cuMipmappedArrayGetLevel 5000", LOCAL,
    ),
    function(
        "cuMipmappedArrayGetMemoryRequirements",
        "CUDA_ARRAY_MEMORY_REQUIREMENTS *memoryRequirements, CUmipmappedArray mipmap, CUdevice device",
        "cuMipmappedArrayGetMemoryRequirements 11060", LOCAL,
    ),
    function(
        "cuMipmappedArrayGetSparseProperties",
        "CUDA_ARRAY_SPARSE_PROPERTIES *sparseProperties, CUmipmappedArray mipmap",
        "cuMipmappedArrayGetSparseProperties 11010", note=_SPARSE,
    ),
    function(
        "cuSurfObjectCreate", "CUsurfObject *pSurfObject, const CUDA_RESOURCE_DESC *pResDesc",
        "cuSurfObjectCreate 5000", SYNC, "texture_create texture_place",
    ),
    function("cuSurfObjectDestroy", "CUsurfObject surfObject", "cuSurfObjectDestroy 5000", ASYNC, "texture_destroy",
    ),
    function(
        "cuSurfObjectGetResourceDesc", "CUDA_RESOURCE_DESC *pResDesc, CUsurfObject surfObject",
        "cuSurfObjectGetResourceDesc 5000", LOCAL,
    ),
    function("cuSurfRefGetArray", "CUarray *phArray, CUsurfref hSurfRef", "cuSurfRefGetArray 3000", note=_REFERENCE,
    ),
    function(
        "cuSurfRefSetArray", "CUsurfref hSurfRef, CUarray hArray, unsigned int Flags", "cuSurfRefSetArray 3000",
        note=_REFERENCE,
    ),
    function(
        "cuTensorMapEncodeIm2col",
        "CUtensorMap *tensorMap, CUtensorMapDataType tensorDataType, uint32_t tensorRank, void "
        "*globalAddress, const uint64_t *globalDim, const uint64_t *globalStrides, const int "
        "*pixelBoxLowerCorner, const int *pixelBoxUpperCorner, uint32_t channelsPerPixel, uint32_t "
        "pixelsPerColumn, const uint32_t *elementStrides, CUtensorMapInterleave interleave, "
        "CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2Promotion, CUtensorMapFloatOOBfill oobFill",
        "cuTensorMapEncodeIm2col 12000",
        SYNC, "tensor_map", "encoded by the server's driver, once for each set of arguments",
    ),
    function(
        "cuTensorMapEncodeIm2colWide",
        "CUtensorMap *tensorMap, CUtensorMapDataType tensorDataType, uint32_t tensorRank, void "
        "*globalAddress, const uint64_t *globalDim, const uint64_t *globalStrides, int "
        "pixelBoxLowerCornerWidth, int pixelBoxUpperCornerWidth, uint32_t channelsPerPixel, uint32_t "
        "pixelsPerColumn, const uint32_t *elementStrides, CUtensorMapInterleave interleave, "
        "CUtensorMapIm2ColWideMode mode, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2Promotion, "
        "CUtensorMapFloatOOBfill oobFill", "cuTensorMapEncodeIm2colWide 12080",
        SYNC, "tensor_map", "encoded by the server's driver, once for each set of arguments",
    ),
    function(
        "cuTensorMapEncodeTiled",
        "CUtensorMap *tensorMap, CUtensorMapDataType tensorDataType, uint32_t tensorRank, void "
        "*globalAddress, const uint64_t *globalDim, const uint64_t *globalStrides, const uint32_t *boxDim, "
        "const uint32_t *elementStrides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, "
        "CUtensorMapL2promotion l2Promotion, CUtensorMapFloatOOBfill oobFill", "cuTensorMapEncodeTiled 12000",
        SYNC, "tensor_map", "encoded by the server's driver, once for each set of arguments",
    ),
    function(
        "cuTensorMapReplaceAddress", "CUtensorMap *tensorMap, void *globalAddress", "cuTensorMapReplaceAddress 12000",
        SYNC, "tensor_map", "encoded by the server's driver, once for each set of arguments",
    ),
    function(
        "cuTexObjectCreate",
        "CUtexObject *pTexObject, const CUDA_RESOURCE_DESC *pResDesc, const CUDA_TEXTURE_DESC *pTexDesc, "
        "const CUDA_RESOURCE_VIEW_DESC *pResViewDesc", "cuTexObjectCreate 5000", SYNC, "texture_create texture_place",
    ),
    function("cuTexObjectDestroy", "CUtexObject texObject", "cuTexObjectDestroy 5000", ASYNC, "texture_destroy",
    ),
    function(
        "cuTexObjectGetResourceDesc", "CUDA_RESOURCE_DESC *pResDesc, CUtexObject texObject",
        "cuTexObjectGetResourceDesc 5000", LOCAL,
    ),
    function(
        "cuTexObjectGetResourceViewDesc", "CUDA_RESOURCE_VIEW_DESC *pResViewDesc, CUtexObject texObject",
        "cuTexObjectGetResourceViewDesc 5000", LOCAL,
    ),
    function(
        "cuTexObjectGetTextureDesc", "CUDA_TEXTURE_DESC *pTexDesc, CUtexObject texObject",
        "cuTexObjectGetTextureDesc 5000", LOCAL,
    ),
    function("cuTexRefCreate", "CUtexref *pTexRef", "cuTexRefCreate 2000", note=_REFERENCE,
    ),
    function("cuTexRefDestroy", "CUtexref hTexRef", "cuTexRefDestroy 2000", note=_REFERENCE,
    ),
    function("cuTexRefGetAddress", "unsigned int *pdptr, CUtexref hTexRef", "cuTexRefGetAddress 2000", note=_REFERENCE,
    ),
    function(
        "cuTexRefGetAddressMode", "CUaddress_mode *pam, CUtexref hTexRef, int dim", "cuTexRefGetAddressMode 2000",
        note=_REFERENCE,
    ),
    function(
        "cuTexRefGetAddress_v2", "CUdeviceptr *pdptr, CUtexref hTexRef", "cuTexRefGetAddress 3020", note=_REFERENCE,
    ),
    function("cuTexRefGetArray", "CUarray *phArray, CUtexref hTexRef", "cuTexRefGetArray 2000", note=_REFERENCE,
    ),
    function(
        "cuTexRefGetBorderColor", "float *pBorderColor, CUtexref hTexRef", "cuTexRefGetBorderColor 8000",
        note=_REFERENCE,
    ),
    function(
        "cuTexRefGetFilterMode", "CUfilter_mode *pfm, CUtexref hTexRef", "cuTexRefGetFilterMode 2000", note=_REFERENCE,
    ),
    function("cuTexRefGetFlags", "unsigned int *pFlags, CUtexref hTexRef", "cuTexRefGetFlags 2000", note=_REFERENCE,
    ),
    function(
        "cuTexRefGetFormat", "CUarray_format *pFormat, int *pNumChannels, CUtexref hTexRef", "cuTexRefGetFormat 2000",
        note=_REFERENCE,
    ),
    function(
        "cuTexRefGetMaxAnisotropy", "int *pmaxAniso, CUtexref hTexRef", "cuTexRefGetMaxAnisotropy 5000",
        note=_REFERENCE,
    ),
    function(
        "cuTexRefGetMipmapFilterMode", "CUfilter_mode *pfm, CUtexref hTexRef", "cuTexRefGetMipmapFilterMode 5000",
        note=_REFERENCE,
    ),
    function(
        "cuTexRefGetMipmapLevelBias", "float *pbias, CUtexref hTexRef", "cuTexRefGetMipmapLevelBias 5000",
        note=_REFERENCE,
    ),
    function(
        "cuTexRefGetMipmapLevelClamp", "float *pminMipmapLevelClamp, float *pmaxMipmapLevelClamp, CUtexref hTexRef",
        "cuTexRefGetMipmapLevelClamp 5000", note=_REFERENCE,
    ),
    function(
        "cuTexRefGetMipmappedArray", "CUmipmappedArray *phMipmappedArray, CUtexref hTexRef",
        "cuTexRefGetMipmappedArray 5000", note=_REFERENCE,
    ),
    function(
        "cuTexRefSetAddress", "unsigned int *ByteOffset, CUtexref hTexRef, unsigned int dptr, unsigned int bytes",
        "cuTexRefSetAddress 2000", note=_REFERENCE,
    ),
    function(
        "cuTexRefSetAddress2D",
        "CUtexref hTexRef, const CUDA_ARRAY_DESCRIPTOR *desc, unsigned int dptr, unsigned int Pitch",
        "cuTexRefSetAddress2D 2020", note=_REFERENCE,
    ),
    function(
        "cuTexRefSetAddress2D_v2",
        "CUtexref hTexRef, const CUDA_ARRAY_DESCRIPTOR *desc, CUdeviceptr dptr, size_t Pitch",
        "cuTexRefSetAddress2D 3020", note=_REFERENCE,
    ),
    function(
        "cuTexRefSetAddress2D_v3",
        "CUtexref hTexRef, const CUDA_ARRAY_DESCRIPTOR *desc, CUdeviceptr dptr, size_t Pitch",
        "cuTexRefSetAddress2D 4010", note=_REFERENCE,
    ),
    function(
        "cuTexRefSetAddressMode", "CUtexref hTexRef, int dim, CUaddress_mode am", "cuTexRefSetAddressMode 2000",
        note=_REFERENCE,
    ),
    function(
        "cuTexRefSetAddress_v2", "size_t *ByteOffset, CUtexref hTexRef, CUdeviceptr dptr, size_t bytes",
        "cuTexRefSetAddress 3020", note=_REFERENCE,
    ),
    function(
        "cuTexRefSetArray", "CUtexref hTexRef, CUarray hArray, unsigned int Flags", "cuTexRefSetArray 2000",
        note=_REFERENCE,
    ),
    function(
        "cuTexRefSetBorderColor", "CUtexref hTexRef, float *pBorderColor", "cuTexRefSetBorderColor 8000",
        note=_REFERENCE,
    ),
    function(
        "cuTexRefSetFilterMode", "CUtexref hTexRef, CUfilter_mode fm", "cuTexRefSetFilterMode 2000", note=_REFERENCE,
    ),
    function("cuTexRefSetFlags", "CUtexref hTexRef, unsigned int Flags", "cuTexRefSetFlags 2000", note=_REFERENCE,
    ),
    function(
        "cuTexRefSetFormat", "CUtexref hTexRef, CUarray_format fmt, int NumPackedComponents",
        "cuTexRefSetFormat 2000", note=_REFERENCE,
    ),
    function(
        "cuTexRefSetMaxAnisotropy", "CUtexref hTexRef, unsigned int maxAniso", "cuTexRefSetMaxAnisotropy 5000",
        note=_REFERENCE,
    ),
    function(
        "cuTexRefSetMipmapFilterMode", "CUtexref hTexRef, CUfilter_mode fm", "cuTexRefSetMipmapFilterMode 5000",
        note=_REFERENCE,
    ),
    function(
        "cuTexRefSetMipmapLevelBias", "CUtexref hTexRef, float bias", "cuTexRefSetMipmapLevelBias 5000",
        note=_REFERENCE,
    ),
    function(
        "cuTexRefSetMipmapLevelClamp", "CUtexref hTexRef, float minMipmapLevelClamp, float maxMipmapLevelClamp",
        "cuTexRefSetMipmapLevelClamp 5000", note=_REFERENCE,
    ),
    function(
        "cuTexRefSetMipmappedArray", "CUtexref hTexRef, CUmipmappedArray hMipmappedArray, unsigned int Flags",
        "cuTexRefSetMipmappedArray 5000", note=_REFERENCE,
    ),
)
