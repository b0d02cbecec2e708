"""Driver functions: interoperation with OpenGL, EGL and VDPAU."""

from __future__ import annotations

from rgpu.session.calls.functions.model import function

FUNCTIONS = (
    function("cuEGLApiInit", None, ""),
    function(
        "cuEGLStreamConsumerAcquireFrame",
        "CUeglStreamConnection CUDAAPI *conn, CUgraphicsResource CUDAAPI *pCudaResource, CUstream CUDAAPI "
        "*pStream, unsigned int timeout", "cuEGLStreamConsumerAcquireFrame 7000",
    ),
    function(
        "cuEGLStreamConsumerConnect", "CUeglStreamConnection CUDAAPI *conn, EGLStreamKHR stream",
        "cuEGLStreamConsumerConnect 7000",
    ),
    function(
        "cuEGLStreamConsumerConnectWithFlags",
        "CUeglStreamConnection CUDAAPI *conn, EGLStreamKHR stream, unsigned int flags",
        "cuEGLStreamConsumerConnectWithFlags 8000",
    ),
    function(
        "cuEGLStreamConsumerDisconnect", "CUeglStreamConnection CUDAAPI *conn", "cuEGLStreamConsumerDisconnect 7000",
    ),
    function(
        "cuEGLStreamConsumerReleaseFrame",
        "CUeglStreamConnection CUDAAPI *conn, CUgraphicsResource pCudaResource, CUstream CUDAAPI *pStream",
        "cuEGLStreamConsumerReleaseFrame 7000",
    ),
    function(
        "cuEGLStreamProducerConnect",
        "CUeglStreamConnection CUDAAPI *conn, EGLStreamKHR stream, EGLint width, EGLint height",
        "cuEGLStreamProducerConnect 7000",
    ),
    function(
        "cuEGLStreamProducerDisconnect", "CUeglStreamConnection CUDAAPI *conn", "cuEGLStreamProducerDisconnect 7000",
    ),
    function(
        "cuEGLStreamProducerPresentFrame",
        "CUeglStreamConnection CUDAAPI *conn, CUeglFrame eglframe, CUstream CUDAAPI *pStream",
        "cuEGLStreamProducerPresentFrame 7000",
    ),
    function(
        "cuEGLStreamProducerReturnFrame",
        "CUeglStreamConnection CUDAAPI *conn, CUeglFrame CUDAAPI *eglframe, CUstream CUDAAPI *pStream",
        "cuEGLStreamProducerReturnFrame 7000",
    ),
    function("cuGLCtxCreate", "CUcontext *pCtx, unsigned int Flags, CUdevice device", "cuGLCtxCreate 2000"),
    function("cuGLCtxCreate_v2", "CUcontext *pCtx, unsigned int Flags, CUdevice device", "cuGLCtxCreate 3020"),
    function(
        "cuGLGetDevices",
        "unsigned int *pCudaDeviceCount, CUdevice *pCudaDevices, unsigned int cudaDeviceCount, CUGLDeviceList"
        " deviceList", "cuGLGetDevices 4010",
    ),
    function(
        "cuGLGetDevices_v2",
        "unsigned int *pCudaDeviceCount, CUdevice *pCudaDevices, unsigned int cudaDeviceCount, CUGLDeviceList"
        " deviceList", "cuGLGetDevices 6050",
    ),
    function("cuGLInit", "", "cuGLInit 2000"),
    function(
        "cuGLMapBufferObject", "unsigned int *dptr, unsigned int *size, GLuint buffer", "cuGLMapBufferObject 2000",
    ),
    function(
        "cuGLMapBufferObjectAsync", "unsigned int *dptr, unsigned int *size, GLuint buffer, CUstream hStream",
        "cuGLMapBufferObjectAsync 2030",
    ),
    function(
        "cuGLMapBufferObjectAsync_v2", "CUdeviceptr *dptr, size_t *size, GLuint buffer, CUstream hStream",
        "cuGLMapBufferObjectAsync 3020 ptsz 7000",
    ),
    function(
        "cuGLMapBufferObject_v2", "CUdeviceptr *dptr, size_t *size, GLuint buffer",
        "cuGLMapBufferObject 3020 ptds 7000",
    ),
    function("cuGLRegisterBufferObject", "GLuint buffer", "cuGLRegisterBufferObject 2000"),
    function("cuGLSetBufferObjectMapFlags", "GLuint buffer, unsigned int Flags", "cuGLSetBufferObjectMapFlags 2030"),
    function("cuGLUnmapBufferObject", "GLuint buffer", "cuGLUnmapBufferObject 2000"),
    function("cuGLUnmapBufferObjectAsync", "GLuint buffer, CUstream hStream", "cuGLUnmapBufferObjectAsync 2030"),
    function("cuGLUnregisterBufferObject", "GLuint buffer", "cuGLUnregisterBufferObject 2000"),
    function(
        "cuGraphicsEGLRegisterImage",
        "CUgraphicsResource CUDAAPI *pCudaResource, EGLImageKHR image, unsigned int flags",
        "cuGraphicsEGLRegisterImage 7000",
    ),
    function(
        "cuGraphicsGLRegisterBuffer", "CUgraphicsResource *pCudaResource, GLuint buffer, unsigned int Flags",
        "cuGraphicsGLRegisterBuffer 3000",
    ),
    function(
        "cuGraphicsGLRegisterImage",
        "CUgraphicsResource *pCudaResource, GLuint image, GLenum target, unsigned int Flags",
        "cuGraphicsGLRegisterImage 3000",
    ),
    function(
        "cuGraphicsMapResources", "unsigned int count, CUgraphicsResource *resources, CUstream hStream",
        "cuGraphicsMapResources 3000 ptsz 7000",
    ),
    function(
        "cuGraphicsResourceGetMappedEglFrame",
        "CUeglFrame CUDAAPI *eglFrame, CUgraphicsResource resource, unsigned int index, unsigned int mipLevel",
        "cuGraphicsResourceGetMappedEglFrame 7000",
    ),
    function(
        "cuGraphicsResourceGetMappedMipmappedArray", "CUmipmappedArray *pMipmappedArray, CUgraphicsResource resource",
        "cuGraphicsResourceGetMappedMipmappedArray 5000",
    ),
    function(
        "cuGraphicsResourceGetMappedPointer",
        "unsigned int *pDevPtr, unsigned int *pSize, CUgraphicsResource resource",
        "cuGraphicsResourceGetMappedPointer 3000",
    ),
    function(
        "cuGraphicsResourceGetMappedPointer_v2", "CUdeviceptr *pDevPtr, size_t *pSize, CUgraphicsResource resource",
        "cuGraphicsResourceGetMappedPointer 3020",
    ),
    function(
        "cuGraphicsResourceSetMapFlags", "CUgraphicsResource resource, unsigned int flags",
        "cuGraphicsResourceSetMapFlags 3000",
    ),
    function(
        "cuGraphicsResourceSetMapFlags_v2", "CUgraphicsResource resource, unsigned int flags",
        "cuGraphicsResourceSetMapFlags 6050",
    ),
    function(
        "cuGraphicsSubResourceGetMappedArray",
        "CUarray *pArray, CUgraphicsResource resource, unsigned int arrayIndex, unsigned int mipLevel",
        "cuGraphicsSubResourceGetMappedArray 3000",
    ),
    function(
        "cuGraphicsUnmapResources", "unsigned int count, CUgraphicsResource *resources, CUstream hStream",
        "cuGraphicsUnmapResources 3000 ptsz 7000",
    ),
    function("cuGraphicsUnregisterResource", "CUgraphicsResource resource", "cuGraphicsUnregisterResource 3000"),
    function(
        "cuGraphicsVDPAURegisterOutputSurface",
        "CUgraphicsResource *pCudaResource, VdpOutputSurface vdpSurface, unsigned int flags",
        "cuGraphicsVDPAURegisterOutputSurface 3010",
    ),
    function(
        "cuGraphicsVDPAURegisterVideoSurface",
        "CUgraphicsResource *pCudaResource, VdpVideoSurface vdpSurface, unsigned int flags",
        "cuGraphicsVDPAURegisterVideoSurface 3010",
    ),
    function(
        "cuVDPAUCtxCreate",
        "CUcontext *pCtx, unsigned int flags, CUdevice device, VdpDevice vdpDevice, VdpGetProcAddress "
        "*vdpGetProcAddress", "cuVDPAUCtxCreate 3010",
    ),
    function(
        "cuVDPAUCtxCreate_v2",
        "CUcontext *pCtx, unsigned int flags, CUdevice device, VdpDevice vdpDevice, VdpGetProcAddress "
        "*vdpGetProcAddress", "cuVDPAUCtxCreate 3020",
    ),
    function(
        "cuVDPAUGetDevice", "CUdevice *pDevice, VdpDevice vdpDevice, VdpGetProcAddress *vdpGetProcAddress",
        "cuVDPAUGetDevice 3010",
    ),
)
