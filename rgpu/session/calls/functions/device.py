"""Driver functions: devices."""

from __future__ import annotations

from rgpu.session.calls.functions.model import LOCAL, function

FUNCTIONS = (
    function(
        "cuDeviceCanAccessPeer", "int *canAccessPeer, CUdevice dev, CUdevice peerDev", "cuDeviceCanAccessPeer 4000",
        LOCAL, "", "from the session facts",
    ),
    function(
        "cuDeviceComputeCapability", "int *major, int *minor, CUdevice dev", "cuDeviceComputeCapability 2000", LOCAL,
        "", "from the session facts",
    ),
    function("cuDeviceGet", "CUdevice *device, int ordinal", "cuDeviceGet 2000", LOCAL, "", "from the session facts"),
    function(
        "cuDeviceGetAttribute", "int *pi, CUdevice_attribute attrib, CUdevice dev", "cuDeviceGetAttribute 2000",
        LOCAL, "", "from the session facts",
    ),
    function(
        "cuDeviceGetByPCIBusId", "CUdevice *dev, const char *pciBusId", "cuDeviceGetByPCIBusId 4010", LOCAL, "",
        "from the session facts",
    ),
    function("cuDeviceGetCount", "int *count", "cuDeviceGetCount 2000", LOCAL, "", "from the session facts"),
    function(
        "cuDeviceGetDevResource", "CUdevice dev, CUdevResource *result, CUdevResourceType type",
        "cuDeviceGetDevResource 12040",
    ),
    function(
        "cuDeviceGetExecAffinitySupport", "int *pi, CUexecAffinityType type, CUdevice dev",
        "cuDeviceGetExecAffinitySupport 11040",
    ),
    function(
        "cuDeviceGetHostAtomicCapabilities",
        "unsigned int *capabilities, const CUatomicOperation *operations, unsigned int count, CUdevice dev",
        "cuDeviceGetHostAtomicCapabilities 13000",
    ),
    function(
        "cuDeviceGetLuid", "char *luid, unsigned int *deviceNodeMask, CUdevice dev", "cuDeviceGetLuid 10000", LOCAL,
        "", "from the session facts",
    ),
    function(
        "cuDeviceGetName", "char *name, int len, CUdevice dev", "cuDeviceGetName 2000", LOCAL, "",
        "from the session facts",
    ),
    function(
        "cuDeviceGetNvSciSyncAttributes", "void *nvSciSyncAttrList, CUdevice dev, int flags",
        "cuDeviceGetNvSciSyncAttributes 10020",
    ),
    function(
        "cuDeviceGetP2PAtomicCapabilities",
        "unsigned int *capabilities, const CUatomicOperation *operations, unsigned int count, CUdevice "
        "srcDevice, CUdevice dstDevice", "cuDeviceGetP2PAtomicCapabilities 13000",
    ),
    function(
        "cuDeviceGetP2PAttribute", "int *value, CUdevice_P2PAttribute attrib, CUdevice srcDevice, CUdevice dstDevice",
        "cuDeviceGetP2PAttribute 8000", LOCAL, "", "from the session facts",
    ),
    function(
        "cuDeviceGetPCIBusId", "char *pciBusId, int len, CUdevice dev", "cuDeviceGetPCIBusId 4010", LOCAL, "",
        "from the session facts",
    ),
    function(
        "cuDeviceGetProperties", "CUdevprop *prop, CUdevice dev", "cuDeviceGetProperties 2000", LOCAL, "",
        "from the session facts",
    ),
    function(
        "cuDeviceGetTexture1DLinearMaxWidth",
        "size_t *maxWidthInElements, CUarray_format format, unsigned int numChannels, CUdevice dev",
        "cuDeviceGetTexture1DLinearMaxWidth 11010",
    ),
    function(
        "cuDeviceGetUuid", "CUuuid *uuid, CUdevice dev", "cuDeviceGetUuid 9020", LOCAL, "", "from the session facts",
    ),
    function(
        "cuDeviceGetUuid_v2", "CUuuid *uuid, CUdevice dev", "cuDeviceGetUuid 11040", LOCAL, "",
        "from the session facts",
    ),
    function(
        "cuDeviceRegisterAsyncNotification",
        "CUdevice device, CUasyncCallback callbackFunc, void *userData, CUasyncCallbackHandle *callback",
        "cuDeviceRegisterAsyncNotification 12040",
    ),
    function(
        "cuDeviceTotalMem", "unsigned int *bytes, CUdevice dev", "cuDeviceTotalMem 2000",
        note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuDeviceTotalMem_v2", "size_t *bytes, CUdevice dev", "cuDeviceTotalMem 3020", LOCAL, "",
        "from the session facts",
    ),
    function(
        "cuDeviceUnregisterAsyncNotification", "CUdevice device, CUasyncCallbackHandle callback",
        "cuDeviceUnregisterAsyncNotification 12040",
    ),
)
