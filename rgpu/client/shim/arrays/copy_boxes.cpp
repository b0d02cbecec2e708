// cuMemcpy2D, cuMemcpy3D, and the forms that name an array.
//
// An array is copied through its memory: that is updated from the array before the copy, or the array from it after the
// copy (array.hpp).
#include "array.hpp"
#include "capturing.hpp"
#include "copying.hpp"
#include "graph_exec.hpp"
#include "session.hpp"
#include "profile.hpp"

namespace rgpu {
namespace {

// Source or destination of the 2D and 3D forms, which name host pointer, device pointer and array separately.
struct Side {
  CUmemorytype type;
  const void* host;
  CUdeviceptr device;
  CUarray array;
  std::uint64_t x, y, z, pitch, height;  // pitch and height 0: those of the copy
};

template <class Copy>
Side source_of(const Copy& p) {
  Side s{p.srcMemoryType, p.srcHost, p.srcDevice, p.srcArray, p.srcXInBytes, p.srcY, 0, p.srcPitch, 0};
  if constexpr (requires { p.srcZ; }) s.z = p.srcZ, s.height = p.srcHeight;
  return s;
}
template <class Copy>
Side destination_of(const Copy& p) {
  Side s{p.dstMemoryType, p.dstHost, p.dstDevice, p.dstArray, p.dstXInBytes, p.dstY, 0, p.dstPitch, 0};
  if constexpr (requires { p.dstZ; }) s.z = p.dstZ, s.height = p.dstHeight;
  return s;
}

struct Extent {
  std::uint64_t width, height, depth;
};

// Position of the side's first byte, and the distance of its rows and planes in bytes.
struct Rows {
  CUmemorytype type = CU_MEMORYTYPE_UNIFIED;
  std::uint64_t address = 0, pitch = 0, height = 0;
  ArrayBox box;  // of an array

  CopyEnd plane(std::uint64_t z) const { return {type, address + z * height * pitch, pitch, false}; }
};

CUresult rows_of(const Side& side, const Extent& extent, Rows& rows) {
  rows.type = side.type;
  switch (side.type) {
    case CU_MEMORYTYPE_HOST:
      rows.address = reinterpret_cast<std::uint64_t>(side.host);
      break;
    case CU_MEMORYTYPE_DEVICE:
    case CU_MEMORYTYPE_UNIFIED:
      rows.address = side.device;
      break;
    case CU_MEMORYTYPE_ARRAY: {
      Array* array = find(side.array);
      if (!array) return CUDA_ERROR_INVALID_HANDLE;
      rows.box = {array, side.x, side.y, side.z, extent.width, extent.height, extent.depth};
      if (!rows.box.valid()) return CUDA_ERROR_INVALID_VALUE;
      rows.type = CU_MEMORYTYPE_DEVICE;
      rows.address = rows.box.address();
      rows.pitch = array->layout().pitch;
      rows.height = array->layout().rows;
      return CUDA_SUCCESS;
    }
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  if (!rows.address) return CUDA_ERROR_INVALID_VALUE;
  rows.pitch = side.pitch ? side.pitch : extent.width + side.x;
  rows.height = side.height ? side.height : extent.height + side.y;
  if (rows.pitch < side.x + extent.width || (extent.depth > 1 && rows.height < side.y + extent.height))
    return CUDA_ERROR_INVALID_VALUE;
  rows.address += (side.z * rows.height + side.y) * rows.pitch + side.x;
  return CUDA_SUCCESS;
}

// Copies plane by plane; planes without a gap between them are copied as one.
CUresult planes(const Rows& from, const Rows& to, const Extent& extent, CUstream stream, bool blocking) {
  const bool whole = extent.depth == 1 || (from.height == extent.height && to.height == extent.height);
  for (std::uint64_t z = 0; z < (whole ? 1 : extent.depth); ++z) {
    Copy c;
    c.width = extent.width;
    c.height = whole ? extent.height * extent.depth : extent.height;
    c.source = from.plane(z);
    c.destination = to.plane(z);
    if (CUresult r = run_copy(c, stream, blocking); r) return r;
  }
  return CUDA_SUCCESS;
}

CUresult wait_for_stream(const StreamRef& stream) {
  wire::StreamSynchronize call{};
  call.stream = stream.number;
  return await_work(stream, call);
}

// The copy as a node of a graph, whose launches do it (graph_launch.cpp).
CUDA_MEMCPY3D as_node(const Side& source, const Side& destination, const Extent& extent) {
  CUDA_MEMCPY3D copy{};
  copy.srcXInBytes = source.x, copy.srcY = source.y, copy.srcZ = source.z;
  copy.srcMemoryType = source.type, copy.srcHost = source.host, copy.srcDevice = source.device;
  copy.srcArray = source.array, copy.srcPitch = source.pitch, copy.srcHeight = source.height;
  copy.dstXInBytes = destination.x, copy.dstY = destination.y, copy.dstZ = destination.z;
  copy.dstMemoryType = destination.type, copy.dstHost = const_cast<void*>(destination.host);
  copy.dstDevice = destination.device, copy.dstArray = destination.array;
  copy.dstPitch = destination.pitch, copy.dstHeight = destination.height;
  copy.WidthInBytes = extent.width, copy.Height = extent.height, copy.Depth = extent.depth;
  return copy;
}

CUresult with_arrays(const Rows& from, const Rows& to, const Extent& extent, CUstream handle, bool blocking,
                     const CUDA_MEMCPY3D& node) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(handle, stream); r) return r;
  if (capture_open()) {
    if (CUresult r = blocking ? unsafe_call() : CUDA_SUCCESS; r) return r;
    bool taken = false;
    if (CUresult r = capture_work(stream, CopyWork{node, stream.context}, taken); r || taken) return r;
  }
  if (from.box.array)
    if (CUresult r = box_to_memory(from.box, stream); r) return r;
  if (CUresult r = planes(from, to, extent, handle, blocking && !to.box.array); r || !to.box.array) return r;
  if (CUresult r = box_to_array(to.box, stream); r) return r;
  return blocking && !from.box.array ? wait_for_stream(stream) : CUDA_SUCCESS;
}

CUresult copy_box(const Side& source, const Side& destination, const Extent& extent, CUstream stream, bool blocking) {
  if (!extent.width || !extent.height || !extent.depth) return CUDA_SUCCESS;
  Rows from, to;
  if (CUresult r = rows_of(source, extent, from); r) return r;
  if (CUresult r = rows_of(destination, extent, to); r) return r;
  if (!from.box.array && !to.box.array) return planes(from, to, extent, stream, blocking);
  return with_arrays(from, to, extent, stream, blocking, as_node(source, destination, extent));
}

CUresult rows(const CUDA_MEMCPY2D* p, CUstream stream, bool blocking) {
  if (CUresult r = require(); r) return r;
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  return copy_box(source_of(*p), destination_of(*p), {p->WidthInBytes, p->Height, 1}, stream, blocking);
}

template <class Copy3D>
CUresult volume(const Copy3D* p, CUstream stream, bool blocking) {
  if (CUresult r = require(); r) return r;
  if (!p || p->srcLOD || p->dstLOD) return CUDA_ERROR_INVALID_VALUE;
  return copy_box(source_of(*p), destination_of(*p), {p->WidthInBytes, p->Height, p->Depth}, stream, blocking);
}

// Sides of the one-dimensional forms: bytes of the first row.
Side in_array(CUarray array, std::size_t offset) { return {CU_MEMORYTYPE_ARRAY, nullptr, 0, array, offset, 0, 0, 0, 0}; }
Side in_host(const void* host) { return {CU_MEMORYTYPE_HOST, host, 0, nullptr, 0, 0, 0, 0, 0}; }
Side in_device(CUdeviceptr address) { return {CU_MEMORYTYPE_DEVICE, nullptr, address, nullptr, 0, 0, 0, 0, 0}; }

CUresult one_row(const Side& destination, const Side& source, std::size_t n, CUstream stream, bool blocking) {
  if (CUresult r = require(); r) return r;
  return copy_box(source, destination, {n, 1, 1}, stream, blocking);
}

}  // namespace

CUresult check_box(const CUDA_MEMCPY3D& copy) {
  const Extent extent{copy.WidthInBytes, copy.Height, copy.Depth};
  Rows from, to;
  if (copy.srcLOD || copy.dstLOD) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = rows_of(source_of(copy), extent, from); r) return r;
  return rows_of(destination_of(copy), extent, to);
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuMemcpyHtoA_v2(CUarray dstArray, size_t dstOffset, const void* srcHost, size_t ByteCount) {
  RGPU_PROFILED(292, "cuMemcpyHtoA_v2", dstArray, dstOffset, srcHost, ByteCount);
  return api_.leave(one_row(in_array(dstArray, dstOffset), in_host(srcHost), ByteCount, nullptr, true));
}
CUresult cuMemcpyHtoAAsync_v2(CUarray dstArray, size_t dstOffset, const void* srcHost, size_t ByteCount, CUstream hStream) {
  RGPU_PROFILED(293, "cuMemcpyHtoAAsync_v2", dstArray, dstOffset, srcHost, ByteCount, hStream);
  return api_.leave(one_row(in_array(dstArray, dstOffset), in_host(srcHost), ByteCount, hStream, false));
}
CUresult cuMemcpyAtoH_v2(void* dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount) {
  RGPU_PROFILED(282, "cuMemcpyAtoH_v2", dstHost, srcArray, srcOffset, ByteCount);
  return api_.leave(one_row(in_host(dstHost), in_array(srcArray, srcOffset), ByteCount, nullptr, true));
}
CUresult cuMemcpyAtoHAsync_v2(void* dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount, CUstream hStream) {
  RGPU_PROFILED(283, "cuMemcpyAtoHAsync_v2", dstHost, srcArray, srcOffset, ByteCount, hStream);
  return api_.leave(one_row(in_host(dstHost), in_array(srcArray, srcOffset), ByteCount, hStream, false));
}
CUresult cuMemcpyDtoA_v2(CUarray dstArray, size_t dstOffset, CUdeviceptr srcDevice, size_t ByteCount) {
  RGPU_PROFILED(285, "cuMemcpyDtoA_v2", dstArray, dstOffset, srcDevice, ByteCount);
  return api_.leave(one_row(in_array(dstArray, dstOffset), in_device(srcDevice), ByteCount, nullptr, false));
}
CUresult cuMemcpyAtoD_v2(CUdeviceptr dstDevice, CUarray srcArray, size_t srcOffset, size_t ByteCount) {
  RGPU_PROFILED(284, "cuMemcpyAtoD_v2", dstDevice, srcArray, srcOffset, ByteCount);
  return api_.leave(one_row(in_device(dstDevice), in_array(srcArray, srcOffset), ByteCount, nullptr, false));
}
CUresult cuMemcpyAtoA_v2(CUarray dstArray, size_t dstOffset, CUarray srcArray, size_t srcOffset, size_t ByteCount) {
  RGPU_PROFILED(286, "cuMemcpyAtoA_v2", dstArray, dstOffset, srcArray, srcOffset, ByteCount);
  return api_.leave(one_row(in_array(dstArray, dstOffset), in_array(srcArray, srcOffset), ByteCount, nullptr, false));
}

CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D* pCopy) {
  RGPU_PROFILED(287, "cuMemcpy2D_v2", pCopy);
  return api_.leave(rows(pCopy, nullptr, true));
}
CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D* pCopy) {
  RGPU_PROFILED(288, "cuMemcpy2DUnaligned_v2", pCopy);
  return api_.leave(rows(pCopy, nullptr, true));
}
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* pCopy, CUstream hStream) {
  RGPU_PROFILED(289, "cuMemcpy2DAsync_v2", pCopy, hStream);
  return api_.leave(rows(pCopy, hStream, false));
}

CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D* pCopy) {
  RGPU_PROFILED(290, "cuMemcpy3D_v2", pCopy);
  return api_.leave(volume(pCopy, nullptr, true));
}
CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D* pCopy, CUstream hStream) {
  RGPU_PROFILED(291, "cuMemcpy3DAsync_v2", pCopy, hStream);
  return api_.leave(volume(pCopy, hStream, false));
}
CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER* pCopy) {
  RGPU_PROFILED(320, "cuMemcpy3DPeer", pCopy);
  return api_.leave(volume(pCopy, nullptr, true));
}
CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER* pCopy, CUstream hStream) {
  RGPU_PROFILED(321, "cuMemcpy3DPeerAsync", pCopy, hStream);
  return api_.leave(volume(pCopy, hStream, false));
}

}  // extern "C"
