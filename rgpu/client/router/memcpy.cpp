// The copy functions that may concern two members.
#include <functional>
#include <memory>

#include "copies.hpp"

namespace rgpu::router {
namespace {

const void* host(std::uint64_t address) { return reinterpret_cast<const void*>(address); }

// Whose device memory an address is, seen by a call that concerns `mine`: nullptr for memory of the CPU. A module's
// variable is of the member that the call concerns.
Member* device_side(std::uint64_t address, Member& mine) {
  if (pinned_owner(host(address))) return nullptr;
  if (Member* member = owner(address)) return member;
  if (is_module_variable(address)) return &mine;
  CUmemorytype type{};
  const Borrowed at(Where{&mine, true});
  const CUresult r = AT(at, cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
  return !r && type == CU_MEMORYTYPE_DEVICE ? &mine : nullptr;
}

// The member of a call with a stream; without one, of the thread's context.
Member& member_for(CUstream stream) { return *of_handles({HANDLE(stream)}).member; }

bool crosses(std::uint64_t to, std::uint64_t from, Member& mine, Side& target, Side& source) {
  Member *a = owner(to), *b = owner(from);
  if (a == b && (a || (!is_module_variable(to) && !is_module_variable(from)))) return false;  // the common case
  target.member = device_side(to, mine);
  source.member = device_side(from, mine);
  return target.member && source.member && target.member != source.member;
}

// Memory of the CPU (pinned, registered) that work of another member may be writing before the stream gets there: it is
// read then.
bool is_foreign(const void* address, const Member& mine) {
  if (Member* member = pinned_owner(address)) return member != &mine || mine.waiting.load();
  for (unsigned i = 0; i < members(); ++i) {
    Member* member = loaded(i);
    if (!member || !member->last.load() || (member == &mine && !mine.waiting.load())) continue;
    if (member->table->registered(address)) return true;
  }
  return false;
}

// Where a synchronous copy is made: with the member whose device memory it concerns, in that member's context.
Where place_of_copy(std::uint64_t to, std::uint64_t from) {
  for (std::uint64_t address : {to, from})
    if (!pinned_owner(host(address)) && owner(address)) return of_address(address);
  return current();
}

// ---------------------------------------------------------------- copies made when the stream gets there

struct Deferred {
  Line line;
  std::function<CUresult(Member&, CUstream)> copy;
  void* token = nullptr;
};

void release_deferred(void* user) {
  const std::unique_ptr<Deferred> work(static_cast<Deferred*>(user));
  received(*work->line.member);
  work->line.member->table->release(work->token);
}

void make_deferred(void* user, void* token) {
  std::unique_ptr<Deferred> work(static_cast<Deferred*>(user));
  if (!token) return;
  work->token = token;
  Member& member = *work->line.member;
  const Borrowed at(member, work->line.context);
  CUstream lane = nullptr;
  CUevent event = nullptr;
  CUresult r = AT(at, cuStreamCreate)(&lane, CU_STREAM_NON_BLOCKING);
  if (!r) r = work->copy(member, lane);
  if (!r) r = AT(at, cuEventCreate)(&event, CU_EVENT_DISABLE_TIMING);
  if (!r) r = AT(at, cuEventRecord)(event, lane);
  if (!r) r = member.table->when_recorded(event, release_deferred, work.get());
  if (event) AT(at, cuEventDestroy_v2)(event);
  if (lane) AT(at, cuStreamDestroy_v2)(lane);
  if (!r) {
    work.release();
    return;
  }
  complain("a copy from pinned memory of another host's context failed");
  member.table->release(token);
}

CUresult defer(CUstream stream, bool per_thread, std::function<CUresult(Member&, CUstream)> copy) {
  auto work = std::make_unique<Deferred>();
  if (CUresult r = line_of(stream, per_thread, work->line); r) return r;
  work->copy = std::move(copy);
  const Borrowed at(*work->line.member, work->line.context);
  if (CUresult r = at.member().table->hold(stream, per_thread, make_deferred, work.get()); r) return r;
  work.release();
  return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- rows

// A side of a copy of rows: address, bytes from row to row and from layer to layer.
struct Rows {
  std::uint64_t address = 0, pitch = 0, layer = 0;
  bool memory = false;  // not an array
};

template <class Copy>
constexpr bool kHasDepth = requires(const Copy& copy) { copy.Depth; };

template <class Copy>
Rows target_rows(const Copy& c) {
  const bool by_host = c.dstMemoryType == CU_MEMORYTYPE_HOST;
  Rows rows{by_host ? reinterpret_cast<std::uint64_t>(c.dstHost) : c.dstDevice, c.dstPitch, 0,
            c.dstMemoryType != CU_MEMORYTYPE_ARRAY};
  if (!rows.pitch) rows.pitch = c.dstXInBytes + c.WidthInBytes;
  if constexpr (kHasDepth<Copy>) {
    rows.layer = rows.pitch * (c.dstHeight ? c.dstHeight : c.dstY + c.Height);
    rows.address += c.dstZ * rows.layer;
  }
  rows.address += c.dstY * rows.pitch + c.dstXInBytes;
  return rows;
}

template <class Copy>
Rows source_rows(const Copy& c) {
  const bool by_host = c.srcMemoryType == CU_MEMORYTYPE_HOST;
  Rows rows{by_host ? reinterpret_cast<std::uint64_t>(c.srcHost) : c.srcDevice, c.srcPitch, 0,
            c.srcMemoryType != CU_MEMORYTYPE_ARRAY};
  if (!rows.pitch) rows.pitch = c.srcXInBytes + c.WidthInBytes;
  if constexpr (kHasDepth<Copy>) {
    rows.layer = rows.pitch * (c.srcHeight ? c.srcHeight : c.srcY + c.Height);
    rows.address += c.srcZ * rows.layer;
  }
  rows.address += c.srcY * rows.pitch + c.srcXInBytes;
  return rows;
}

template <class Copy>
std::vector<Piece> pieces_of(const Copy& c) {
  const Rows to = target_rows(c), from = source_rows(c);
  std::uint64_t depth = 1;
  if constexpr (kHasDepth<Copy>) depth = c.Depth;
  std::vector<Piece> pieces;
  if (!c.WidthInBytes) return pieces;
  for (std::uint64_t z = 0; z < depth; ++z)
    for (std::uint64_t y = 0; y < c.Height; ++y) {
      const Piece next{to.address + z * to.layer + y * to.pitch, from.address + z * from.layer + y * from.pitch,
                       c.WidthInBytes};
      Piece* last = pieces.empty() ? nullptr : &pieces.back();
      if (last && last->to + last->size == next.to && last->from + last->size == next.from)
        last->size += next.size;
      else
        pieces.push_back(next);
    }
  return pieces;
}

// Makes a copy of rows: between members here, any other by `forward(member)`.
template <class Copy, class Forward>
CUresult copy_rows(const Copy* c, const CUstream* stream, bool per_thread, Forward forward) {
  Member& mine = stream ? member_for(*stream) : *current().member;
  if (!c) return forward(mine);
  const Rows to = target_rows(*c), from = source_rows(*c);
  if (to.memory && from.memory && c->dstMemoryType != CU_MEMORYTYPE_HOST && c->srcMemoryType != CU_MEMORYTYPE_HOST) {
    Side target, source;
    if (crosses(to.address, from.address, mine, target, source)) {
      if (!stream) return copy_between_and_wait(target, source, pieces_of(*c), per_thread);
      Line line;
      if (CUresult r = line_of(*stream, per_thread, line); r) return r;
      return copy_between(target, source, pieces_of(*c), line);
    }
  }
  if (stream && from.memory && to.memory && is_foreign(host(from.address), mine) && device_side(to.address, mine))
    return defer(*stream, per_thread, [copy = *c](Member& member, CUstream lane) {
      if constexpr (requires { copy.srcContext; })
        return CALL(member, cuMemcpy3DPeerAsync)(&copy, lane);
      else if constexpr (kHasDepth<Copy>)
        return CALL(member, cuMemcpy3DAsync_v2)(&copy, lane);
      else
        return CALL(member, cuMemcpy2DAsync_v2)(&copy, lane);
    });
  if (stream) {
    const Borrowed at(of_handles({HANDLE(*stream)}));
    return forward(at.member());
  }
  Member* array = nullptr;
  if (!to.memory) array = holder(c->dstArray);
  if (!from.memory && !array) array = holder(c->srcArray);
  const Borrowed at(array ? of_handles({HANDLE(to.memory ? c->srcArray : c->dstArray)})
                          : place_of_copy(to.memory ? to.address : 0, from.memory ? from.address : 0));
  return forward(at.member());
}

CUresult copy_bytes(bool per_thread, std::uint64_t to, std::uint64_t from, std::size_t size,
                    const std::function<CUresult(Member&)>& forward) {
  Side target, source;
  if (crosses(to, from, *current().member, target, source))
    return size ? copy_between_and_wait(target, source, {{to, from, size}}, per_thread) : CUDA_SUCCESS;
  const Borrowed at(place_of_copy(to, from));
  return forward(at.member());
}

CUresult copy_bytes_async(bool per_thread, std::uint64_t to, std::uint64_t from, std::size_t size, CUstream stream,
                          const std::function<CUresult(Member&, CUstream)>& forward) {
  Member& mine = member_for(stream);
  Side target, source;
  if (crosses(to, from, mine, target, source)) {
    Line line;
    if (CUresult r = line_of(stream, per_thread, line); r || !size) return r;
    return copy_between(target, source, {{to, from, size}}, line);
  }
  Member* there = device_side(to, mine);
  const bool into = there != nullptr;
  if (!there) there = device_side(from, mine);
  if (there && there != &mine) {  // memory of the CPU, and of another member's device
    Line line;
    if (CUresult r = line_of(stream, per_thread, line); r) return r;
    return copy_elsewhere(*there, into ? to : from, line, [&](const Line& lane) {
      return into && is_foreign(host(from), *there) ? defer(lane.stream, false, forward) : forward(*there, lane.stream);
    });
  }
  if (into && is_foreign(host(from), mine)) return defer(stream, per_thread, forward);
  const Borrowed at(of_handles({HANDLE(stream)}));
  return forward(at.member(), stream);
}

Side side_of(CUcontext context) { return {context ? holder(context) : nullptr, context}; }

}  // namespace

namespace hand {

CUresult cuMemcpy(bool per_thread, CUdeviceptr dst, CUdeviceptr src, size_t ByteCount) {
  return copy_bytes(per_thread, dst, src, ByteCount, [=](Member& m) {
    return per_thread ? CALL(m, cuMemcpy_ptds)(dst, src, ByteCount) : CALL(m, cuMemcpy)(dst, src, ByteCount);
  });
}

CUresult cuMemcpyDtoD_v2(bool per_thread, CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount) {
  return copy_bytes(per_thread, dstDevice, srcDevice, ByteCount, [=](Member& m) {
    return per_thread ? CALL(m, cuMemcpyDtoD_v2_ptds)(dstDevice, srcDevice, ByteCount)
                      : CALL(m, cuMemcpyDtoD_v2)(dstDevice, srcDevice, ByteCount);
  });
}

CUresult cuMemcpyPeer(bool per_thread, CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice,
                      CUcontext srcContext, size_t ByteCount) {
  const Side target = side_of(dstContext), source = side_of(srcContext);
  if (target.member && source.member && target.member != source.member)
    return ByteCount ? copy_between_and_wait(target, source, {{dstDevice, srcDevice, ByteCount}}, per_thread)
                     : CUDA_SUCCESS;
  const Borrowed at(of_handles({HANDLE(dstContext)}));
  return per_thread ? AT(at, cuMemcpyPeer_ptds)(dstDevice, dstContext, srcDevice, srcContext, ByteCount)
                    : AT(at, cuMemcpyPeer)(dstDevice, dstContext, srcDevice, srcContext, ByteCount);
}

CUresult cuMemcpyAsync(bool per_thread, CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream) {
  return copy_bytes_async(per_thread, dst, src, ByteCount, hStream, [=](Member& m, CUstream stream) {
    return per_thread && stream == hStream ? CALL(m, cuMemcpyAsync_ptsz)(dst, src, ByteCount, stream)
                                           : CALL(m, cuMemcpyAsync)(dst, src, ByteCount, stream);
  });
}

CUresult cuMemcpyDtoDAsync_v2(bool per_thread, CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount,
                              CUstream hStream) {
  return copy_bytes_async(per_thread, dstDevice, srcDevice, ByteCount, hStream, [=](Member& m, CUstream stream) {
    return per_thread && stream == hStream ? CALL(m, cuMemcpyDtoDAsync_v2_ptsz)(dstDevice, srcDevice, ByteCount, stream)
                                           : CALL(m, cuMemcpyDtoDAsync_v2)(dstDevice, srcDevice, ByteCount, stream);
  });
}

CUresult cuMemcpyDtoHAsync_v2(bool per_thread, void* dstHost, CUdeviceptr srcDevice, size_t ByteCount,
                              CUstream hStream) {
  const auto to = reinterpret_cast<std::uint64_t>(dstHost);
  return copy_bytes_async(per_thread, to, srcDevice, ByteCount, hStream, [=](Member& m, CUstream stream) {
    return per_thread && stream == hStream ? CALL(m, cuMemcpyDtoHAsync_v2_ptsz)(dstHost, srcDevice, ByteCount, stream)
                                           : CALL(m, cuMemcpyDtoHAsync_v2)(dstHost, srcDevice, ByteCount, stream);
  });
}

CUresult cuMemcpyHtoDAsync_v2(bool per_thread, CUdeviceptr dstDevice, const void* srcHost, size_t ByteCount,
                              CUstream hStream) {
  const auto from = reinterpret_cast<std::uint64_t>(srcHost);
  return copy_bytes_async(per_thread, dstDevice, from, ByteCount, hStream, [=](Member& m, CUstream stream) {
    return per_thread && stream == hStream ? CALL(m, cuMemcpyHtoDAsync_v2_ptsz)(dstDevice, srcHost, ByteCount, stream)
                                           : CALL(m, cuMemcpyHtoDAsync_v2)(dstDevice, srcHost, ByteCount, stream);
  });
}

CUresult cuMemcpyPeerAsync(bool per_thread, CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice,
                           CUcontext srcContext, size_t ByteCount, CUstream hStream) {
  const Side target = side_of(dstContext), source = side_of(srcContext);
  if (target.member && source.member && target.member != source.member) {
    Line line;
    if (CUresult r = line_of(hStream, per_thread, line); r || !ByteCount) return r;
    return copy_between(target, source, {{dstDevice, srcDevice, ByteCount}}, line);
  }
  const Borrowed at(of_handles({HANDLE(hStream), HANDLE(dstContext)}));
  return per_thread ? AT(at, cuMemcpyPeerAsync_ptsz)(dstDevice, dstContext, srcDevice, srcContext, ByteCount, hStream)
                    : AT(at, cuMemcpyPeerAsync)(dstDevice, dstContext, srcDevice, srcContext, ByteCount, hStream);
}

#define ROWS(symbol, suffix, Copy)                                                                       \
  CUresult symbol(bool per_thread, const Copy* pCopy) {                                                  \
    return copy_rows(pCopy, nullptr, per_thread, [=](Member& m) {                                        \
      return per_thread ? CALL(m, symbol##suffix)(pCopy) : CALL(m, symbol)(pCopy);                       \
    });                                                                                                  \
  }
#define ROWS_ASYNC(symbol, Copy)                                                                         \
  CUresult symbol(bool per_thread, const Copy* pCopy, CUstream hStream) {                                \
    return copy_rows(pCopy, &hStream, per_thread, [=](Member& m) {                                       \
      return per_thread ? CALL(m, symbol##_ptsz)(pCopy, hStream) : CALL(m, symbol)(pCopy, hStream);      \
    });                                                                                                  \
  }

ROWS(cuMemcpy2D_v2, _ptds, CUDA_MEMCPY2D)
ROWS(cuMemcpy2DUnaligned_v2, _ptds, CUDA_MEMCPY2D)
ROWS(cuMemcpy3D_v2, _ptds, CUDA_MEMCPY3D)
ROWS(cuMemcpy3DPeer, _ptds, CUDA_MEMCPY3D_PEER)
ROWS_ASYNC(cuMemcpy2DAsync_v2, CUDA_MEMCPY2D)
ROWS_ASYNC(cuMemcpy3DAsync_v2, CUDA_MEMCPY3D)
ROWS_ASYNC(cuMemcpy3DPeerAsync, CUDA_MEMCPY3D_PEER)

}  // namespace hand
}  // namespace rgpu::router
