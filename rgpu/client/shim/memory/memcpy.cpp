// The cuMemcpy family: linear memory and rows, in any direction.
//
// Every form becomes one `Copy`; the kind of memory of source and destination follows from their addresses (UVA).
// Sources are read at the call, copies to pageable memory are awaited (SEMANTICS 6), those to pinned memory are not
// (downloads.cpp). The 2D and 3D forms: arrays/copy_boxes.cpp.
#include <algorithm>
#include <cstring>
#include <deque>

#include "capturing.hpp"
#include "copying.hpp"
#include "copy_pool.hpp"
#include "downloads.hpp"
#include "managed.hpp"
#include "memory.hpp"
#include "session.hpp"
#include "profile.hpp"

namespace rgpu {
namespace {

constexpr std::uint64_t PIECE = 1ull << 30;  // longest payload of one call, either way
// Longer copies to the device are several calls: one is in transit while the next is being read, and all of them use
// the same few segments, whose memory has been touched before. The first are short, so that the transfer starts early;
// the size grows with the bytes published.
constexpr std::uint64_t FIRST_UPLOAD = 256ull << 10, UPLOAD_PIECE = 4ull << 20;
constexpr std::uint64_t SHORT_UPLOAD = 1ull << 20;  // up to which all are short: the last one's time is waited for
constexpr unsigned SEALED_UPLOADS = 4;

std::uint64_t upload_piece(std::uint64_t done, std::uint64_t total) {
  const std::uint64_t left = total - done;
  const std::uint64_t piece = total <= SHORT_UPLOAD ? FIRST_UPLOAD : std::clamp(done, FIRST_UPLOAD, UPLOAD_PIECE);
  return left <= piece + FIRST_UPLOAD / 2 ? left : piece;
}

std::uint8_t* bytes(std::uint64_t address) { return reinterpret_cast<std::uint8_t*>(address); }

// Determines the memory that a source or destination is in, and checks that all of it is there.
CUresult resolve(CopyEnd& end, const Copy& copy) {
  if (copy.height > 1 && end.pitch < copy.width) return CUDA_ERROR_INVALID_VALUE;
  std::uint64_t span;
  if (__builtin_mul_overflow(end.pitch, copy.height - 1, &span) || __builtin_add_overflow(span, copy.width, &span) ||
      end.address + span < end.address || !end.address)
    return CUDA_ERROR_INVALID_VALUE;
  const Place place = place_of(end.address);
  switch (place.kind) {
    case Place::Kind::device:
      end.host = false;
      end.device = place.device;
      end.managed = place.managed;  // and so does a host pointer
      return (end.type != CU_MEMORYTYPE_HOST || place.managed) && place.holds(end.address, span) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case Place::Kind::pinned:
    case Place::Kind::registered:
      end.host = true;
      if (!place.holds(end.address, span)) return CUDA_ERROR_INVALID_VALUE;
      end.address += place.host - place.base;  // from a device pointer to registered memory
      return CUDA_SUCCESS;
    case Place::Kind::host:
      end.host = true;
      // A pageable address is no device pointer, even if the call gives it as one.
      return end.type != CU_MEMORYTYPE_DEVICE ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

// The same for a copy that is only captured, as far as it can be determined. An address in no allocation is assumed to
// be device memory, and looked up when the graph is launched.
void place_captured(CopyEnd& end) {
  const Place place = place_of(end.address);
  const Place::Kind kind = place.kind;
  if (kind == Place::Kind::pinned) end.address += place.host - place.base;
  end.host = end.type == CU_MEMORYTYPE_HOST || kind == Place::Kind::pinned || kind == Place::Kind::registered ||
             (kind == Place::Kind::host && end.type == CU_MEMORYTYPE_UNIFIED);
}

// The longest answer: half of the area where there is one, so that the next fits while this one is copied out.
std::uint64_t download_piece() {
  const std::uint64_t area = session().ring.area_size.load(std::memory_order_relaxed);
  return area ? std::clamp<std::uint64_t>(area / 2 & ~0xFFFull, 1ull << 20, PIECE) : PIECE;
}

// Pieces that are copied at a time: sealed ones are sent more slowly than a few threads copy, and need processors, too.
std::size_t uploads_at_once() {
  const unsigned helpers = copy_helpers();
  return session().ring.area_size.load(std::memory_order_relaxed) ? helpers : std::min(helpers, SEALED_UPLOADS);
}

// Pieces of a long copy to the device that are being copied into the journal, published in their order.
class Uploads {
 public:
  explicit Uploads(const StreamRef& stream) : stream_(stream) {}
  ~Uploads() {
    for (Piece& piece : pieces_) wait_for_copy(piece.job);  // they read the program's memory
  }
  Uploads(const Uploads&) = delete;

  CUresult add(std::uint64_t destination, const std::uint8_t* from, std::uint64_t size) {
    // A thread that holds an unpublished extent must not wait for space: the extent's segment cannot be released.
    while (!pieces_.empty() && (pieces_.size() > at_once_ || !room_in_journal(size)))
      if (CUresult r = publish(); r) return r;
    Piece& piece = pieces_.emplace_back(Payload::reserve(size, pieces_.empty()));
    if (piece.payload.error) {
      const CUresult error = piece.payload.error;
      pieces_.pop_back();
      return error;
    }
    piece.call.destination = destination;
    piece.call.stream = stream_.number;
    piece.job = CopyJob(piece.payload.place(), from, size, true);
    start_copy(piece.job);
    return CUDA_SUCCESS;
  }

  CUresult finish() {
    while (!pieces_.empty())
      if (CUresult r = publish(); r) return r;
    return CUDA_SUCCESS;
  }

 private:
  struct Piece {
    explicit Piece(Payload&& made) : payload(std::move(made)) {}
    Payload payload;
    wire::MemcpyH2d call{};
    CopyJob job;
  };

  CUresult publish() {
    Piece& piece = pieces_.front();
    wait_for_copy(piece.job);
    piece.payload.crc = piece.job.crc;
    const CUresult r = submit_work(stream_, piece.call, piece.payload);
    pieces_.pop_front();
    return r;
  }

  const StreamRef& stream_;
  const std::size_t at_once_ = uploads_at_once();
  std::deque<Piece> pieces_;
};

CUresult to_device(const Copy& c, const StreamRef& stream) {
  const Place::Kind kind = place_of(c.source.address).kind;
  if (kind != Place::Kind::host)
    if (CUresult r = finish_writers_of_source(c.source.address, c.width); r) return r;
  if (c.packed(c.source) && c.packed(c.destination)) {
    const std::uint64_t total = c.width * c.height;
    if (total >= 2 * FIRST_UPLOAD && copy_helpers()) {
      Uploads uploads(stream);
      for (std::uint64_t done = 0, size = 0; done < total; done += size) {
        size = upload_piece(done, total);
        if (CUresult r = uploads.add(c.destination.address + done, bytes(c.source.address + done), size); r) return r;
      }
      return uploads.finish();
    }
    for (std::uint64_t done = 0, size = 0; done < total; done += size) {
      wire::MemcpyH2d call{};
      size = upload_piece(done, total);
      call.destination = c.destination.address + done;
      call.stream = stream.number;
      Payload payload(bytes(c.source.address + done), size);
      if (CUresult r = submit_work(stream, call, payload); r) return r;
    }
    return CUDA_SUCCESS;
  }
  const std::uint64_t most = std::max<std::uint64_t>(1, PIECE / c.width);
  for (std::uint64_t row = 0; row < c.height; row += most) {
    wire::Memcpy2dH2d call{};
    call.destination = c.destination.address + row * c.destination.pitch;
    call.pitch = c.destination.pitch;
    call.width = c.width;
    call.height = std::min(most, c.height - row);
    call.stream = stream.number;
    Payload payload = Payload::from(call.width * call.height, [&](std::uint8_t* to) {
      for (std::uint64_t i = 0; i < call.height; ++i)
        std::memcpy(to + i * c.width, bytes(c.source.address + (row + i) * c.source.pitch), c.width);
    });
    if (CUresult r = submit_work(stream, call, payload); r) return r;
  }
  return CUDA_SUCCESS;
}

CUresult to_host(const Copy& c, const StreamRef& stream, bool blocking) {
  std::uint64_t received = 0;
  if (CUresult r = finish_writers_of_destination(c.destination.address); r) return r;
  finish_downloads_into(c.destination.address, c.destination.pitch * (c.height - 1) + c.width);
  if (c.packed(c.source) && c.packed(c.destination)) {
    const std::uint64_t total = c.width * c.height;
    if (!blocking && total <= download_piece() && may_download_later(c.destination.address, total)) {
      wire::MemcpyD2h call{};
      call.source = c.source.address;
      call.size = total;
      call.stream = stream.number;
      return download_later(stream, call, bytes(c.destination.address));
    }
    for (std::uint64_t done = 0, size = 0; done < total; done += size) {
      wire::MemcpyD2h call{};
      call.source = c.source.address + done;
      call.size = size = std::min(download_piece(), total - done);
      call.stream = stream.number;
      if (CUresult r = await_work(stream, call, bytes(c.destination.address + done), call.size, &received); r) return r;
      if (received != call.size) return CUDA_ERROR_UNKNOWN;
    }
    return CUDA_SUCCESS;
  }
  const std::uint64_t most = std::max<std::uint64_t>(1, PIECE / c.width);
  std::vector<std::uint8_t> rows;
  for (std::uint64_t row = 0; row < c.height; row += most) {
    wire::Memcpy2dD2h call{};
    call.source = c.source.address + row * c.source.pitch;
    call.pitch = c.source.pitch;
    call.width = c.width;
    call.height = std::min(most, c.height - row);
    call.stream = stream.number;
    const std::uint64_t size = call.width * call.height;
    std::uint8_t* to = bytes(c.destination.address + row * c.destination.pitch);
    if (!c.packed(c.destination)) {
      rows.resize(size);
      to = rows.data();
    }
    if (CUresult r = await_work(stream, call, to, size, &received); r) return r;
    if (received != size) return CUDA_ERROR_UNKNOWN;
    if (c.packed(c.destination)) continue;
    for (std::uint64_t i = 0; i < call.height; ++i)
      std::memcpy(bytes(c.destination.address + (row + i) * c.destination.pitch), to + i * c.width, c.width);
  }
  return CUDA_SUCCESS;
}

CUresult await_stream(const StreamRef& stream) {
  wire::StreamSynchronize call{};
  call.stream = stream.number;
  return await_work(stream, call);
}

CUresult give_on_device(const Copy& c, const StreamRef& stream) {
  if (c.packed(c.source) && c.packed(c.destination)) {
    wire::MemcpyD2d call{};
    call.destination = c.destination.address;
    call.source = c.source.address;
    call.size = c.width * c.height;
    call.stream = stream.number;
    return submit_work(stream, call);
  }
  wire::Memcpy2dD2d call{};
  call.destination = c.destination.address;
  call.destination_pitch = c.destination.pitch;
  call.source = c.source.address;
  call.source_pitch = c.source.pitch;
  call.width = c.width;
  call.height = c.height;
  call.stream = stream.number;
  return submit_work(stream, call);
}

// In a legacy stream such a copy begins when all earlier work of either device is complete, and all later work of these
// devices is ordered after it (CUDA C++ Programming Guide, "Peer-to-Peer Memory Copy").
CUresult between_devices(const Copy& c, const StreamRef& stream) {
  for (int device : {c.source.device, c.destination.device})
    if (CUresult r = wait_for_device_number(device, true); r) return r;
  if (CUresult r = give_on_device(c, stream); r) return r;
  return await_stream(stream);
}

CUresult on_device(const Copy& c, const StreamRef& stream) {
  return c.source.device != c.destination.device && !stream.object ? between_devices(c, stream) : give_on_device(c, stream);
}

// Copies in stream order, by this thread: when the stream has reached the copy.
CUresult on_host(const Copy& c, const StreamRef& stream) {
  if (CUresult r = await_stream(stream); r) return r;
  for (const CopyEnd* end : {&c.source, &c.destination})
    finish_downloads_into(end->address, end->pitch * (c.height - 1) + c.width);
  for (std::uint64_t i = 0; i < c.height; ++i)
    std::memmove(bytes(c.destination.address + i * c.destination.pitch), bytes(c.source.address + i * c.source.pitch), c.width);
  return CUDA_SUCCESS;
}

// Captures the copy as a node: its source is read at every launch.
CUresult capture(Copy& c, const StreamRef& stream, bool& taken) {
  for (CopyEnd* end : {&c.source, &c.destination}) {
    if (c.height > 1 && end->pitch < c.width) return CUDA_ERROR_INVALID_VALUE;
    place_captured(*end);
  }
  CopyWork work;
  CUDA_MEMCPY3D& p = work.copy;
  p.srcMemoryType = c.source.host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  p.dstMemoryType = c.destination.host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  if (c.source.host)
    p.srcHost = bytes(c.source.address);
  else
    p.srcDevice = c.source.address;
  if (c.destination.host)
    p.dstHost = bytes(c.destination.address);
  else
    p.dstDevice = c.destination.address;
  p.srcPitch = c.source.pitch;
  p.dstPitch = c.destination.pitch;
  p.srcHeight = p.dstHeight = p.Height = c.height;
  p.WidthInBytes = c.width;
  p.Depth = 1;
  work.context = stream.context;
  return capture_work(stream, work, taken);
}

CUresult linear(CUmemorytype to, std::uint64_t destination, CUmemorytype from, std::uint64_t source, std::size_t n,
                CUstream stream, bool blocking = false) {
  Copy c;
  c.destination = {to, destination, n, false};
  c.source = {from, source, n, false};
  c.width = n;
  return run_copy(c, stream, blocking);
}

CUresult between(CUdeviceptr destination, CUcontext to, CUdeviceptr source, CUcontext from, std::size_t n, CUstream stream) {
  if (CUresult r = require(); r) return r;
  if (!find(to) || !find(from)) return CUDA_ERROR_INVALID_CONTEXT;
  return linear(CU_MEMORYTYPE_DEVICE, destination, CU_MEMORYTYPE_DEVICE, source, n, stream);
}

std::uint64_t number(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

// Looked up only while a profiler is active.
bool is_pinned(std::uint64_t address) {
  if (!profile::active.load(std::memory_order_relaxed)) [[likely]] return false;
  const Place::Kind kind = place_of(address).kind;
  return kind == Place::Kind::pinned || kind == Place::Kind::registered;
}

CUresult copy_resolved(const Copy& c, const StreamRef& stream, bool blocking) {
  if (c.source.host) {
    if (c.destination.host) return on_host(c, stream);
    const profile::CopyingHost end(is_pinned(c.source.address));
    const CUresult r = to_device(c, stream);
    return r || !blocking ? r : await_stream(stream);
  }
  if (!c.destination.host) return on_device(c, stream);
  const profile::CopyingHost end(is_pinned(c.destination.address));
  return to_host(c, stream, blocking);
}

}  // namespace

CUresult run_copy(Copy& c, CUstream handle, bool blocking) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(handle, stream); r) return r;
  if (!c.width || !c.height) return CUDA_SUCCESS;
  if (c.height == 1) c.source.pitch = c.destination.pitch = c.width;
  if (c.height > std::numeric_limits<std::uint64_t>::max() / c.width) return CUDA_ERROR_INVALID_VALUE;
  if (capture_open()) {
    bool taken = false;
    if (CUresult r = capture(c, stream, taken); r || taken) return r;
  }
  if (CUresult r = resolve(c.destination, c); r) return r;
  if (CUresult r = resolve(c.source, c); r) return r;
  ManagedUse managed(stream);
  for (const CopyEnd* end : {&c.source, &c.destination})
    if (end->managed) managed.range(end->address, end->pitch * (c.height - 1) + c.width);
  if (CUresult r = managed.upload(); r) return r;
  const CUresult r = copy_resolved(c, stream, blocking);
  managed.given(published());
  return r;
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount) {
  RGPU_PROFILED(305, "cuMemcpy", dst, src, ByteCount);
  if (CUresult r = unsafe_call(); r) return api_.leave(r);
  return api_.leave(linear(CU_MEMORYTYPE_UNIFIED, dst, CU_MEMORYTYPE_UNIFIED, src, ByteCount, nullptr, true));
}
CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream) {
  RGPU_PROFILED(306, "cuMemcpyAsync", dst, src, ByteCount, hStream);
  return api_.leave(linear(CU_MEMORYTYPE_UNIFIED, dst, CU_MEMORYTYPE_UNIFIED, src, ByteCount, hStream));
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr dstDevice, const void* srcHost, size_t ByteCount) {
  RGPU_PROFILED(276, "cuMemcpyHtoD_v2", dstDevice, srcHost, ByteCount);
  if (CUresult r = unsafe_call(); r) return api_.leave(r);
  return api_.leave(linear(CU_MEMORYTYPE_DEVICE, dstDevice, CU_MEMORYTYPE_UNIFIED, number(srcHost), ByteCount, nullptr, true));
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dstDevice, const void* srcHost, size_t ByteCount, CUstream hStream) {
  RGPU_PROFILED(277, "cuMemcpyHtoDAsync_v2", dstDevice, srcHost, ByteCount, hStream);
  return api_.leave(linear(CU_MEMORYTYPE_DEVICE, dstDevice, CU_MEMORYTYPE_UNIFIED, number(srcHost), ByteCount, hStream));
}

CUresult cuMemcpyDtoH_v2(void* dstHost, CUdeviceptr srcDevice, size_t ByteCount) {
  RGPU_PROFILED(278, "cuMemcpyDtoH_v2", dstHost, srcDevice, ByteCount);
  if (CUresult r = unsafe_call(); r) return api_.leave(r);
  return api_.leave(linear(CU_MEMORYTYPE_UNIFIED, number(dstHost), CU_MEMORYTYPE_DEVICE, srcDevice, ByteCount, nullptr, true));
}
CUresult cuMemcpyDtoHAsync_v2(void* dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream) {
  RGPU_PROFILED(279, "cuMemcpyDtoHAsync_v2", dstHost, srcDevice, ByteCount, hStream);
  return api_.leave(linear(CU_MEMORYTYPE_UNIFIED, number(dstHost), CU_MEMORYTYPE_DEVICE, srcDevice, ByteCount, hStream));
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount) {
  RGPU_PROFILED(280, "cuMemcpyDtoD_v2", dstDevice, srcDevice, ByteCount);
  return api_.leave(linear(CU_MEMORYTYPE_DEVICE, dstDevice, CU_MEMORYTYPE_DEVICE, srcDevice, ByteCount, nullptr, true));
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream) {
  RGPU_PROFILED(281, "cuMemcpyDtoDAsync_v2", dstDevice, srcDevice, ByteCount, hStream);
  return api_.leave(linear(CU_MEMORYTYPE_DEVICE, dstDevice, CU_MEMORYTYPE_DEVICE, srcDevice, ByteCount, hStream));
}

CUresult cuMemcpyPeer(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext,
                      size_t ByteCount) {
  RGPU_PROFILED(318, "cuMemcpyPeer", dstDevice, dstContext, srcDevice, srcContext, ByteCount);
  return api_.leave(between(dstDevice, dstContext, srcDevice, srcContext, ByteCount, nullptr));
}
CUresult cuMemcpyPeerAsync(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext,
                           size_t ByteCount, CUstream hStream) {
  RGPU_PROFILED(319, "cuMemcpyPeerAsync", dstDevice, dstContext, srcDevice, srcContext, ByteCount, hStream);
  return api_.leave(between(dstDevice, dstContext, srcDevice, srcContext, ByteCount, hStream));
}

}  // extern "C"
