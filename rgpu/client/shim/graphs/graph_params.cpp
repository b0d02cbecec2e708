// Parameters of nodes as programs give them: checked as in the same calls outside of graphs, except for the memory that
// their pointers point to. A graph may be made with pointers to no memory (cuDNN captures its engines so, to read the
// grids); they are looked up before a launch (graph_pointers.cpp).
#include "capturing.hpp"
#include "device.hpp"
#include "graph_exec.hpp"
#include "memory.hpp"
#include "session.hpp"

namespace rgpu {

CUresult context_of(CUcontext handle, Context*& context) {
  if (!handle) return current(context);
  context = static_cast<Context*>(find_object(handle, Kind::context));
  return context && context->alive ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

namespace {

CUresult conditional_work(const CUDA_CONDITIONAL_NODE_PARAMS& params, ConditionalWork& work) {
  const bool fits = (params.type == CU_GRAPH_COND_TYPE_IF && (params.size == 1 || params.size == 2)) ||
                    (params.type == CU_GRAPH_COND_TYPE_WHILE && params.size == 1) ||
                    (params.type == CU_GRAPH_COND_TYPE_SWITCH && params.size > 0);
  if (!fits) return CUDA_ERROR_INVALID_VALUE;
  if (params.size > kMostBodies) {
    log_once("bodies", "cuGraphAddNode: a conditional node with more than %u bodies is not supported", kMostBodies);
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  Context* context = nullptr;
  if (!params.ctx) return CUDA_ERROR_INVALID_CONTEXT;  // as for the handle
  if (CUresult r = context_of(params.ctx, context); r) return r;
  work.condition.handle = params.handle;
  work.type = params.type;
  std::lock_guard guard(graph_lock());
  if (make_bodies(work, params.size)) return CUDA_SUCCESS;
  std::vector<std::shared_ptr<void>> garbage;
  for (Graph* body : work.bodies) end_graph(*body, garbage);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult allocate_work(CUDA_MEM_ALLOC_NODE_PARAMS_v1& params, AllocateWork& work) {
  const CUmemLocation& where = params.poolProps.location;
  if (!params.bytesize || params.poolProps.allocType != CU_MEM_ALLOCATION_TYPE_PINNED || params.poolProps.handleTypes ||
      where.type != CU_MEM_LOCATION_TYPE_DEVICE || (params.accessDescCount && !params.accessDescs))
    return CUDA_ERROR_INVALID_VALUE;
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  if (where.id != context->device) {
    log_once("graph memory elsewhere", "cuGraphAddMemAllocNode: memory of another device than the current one's is not supported");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (CUresult r = make_graph_memory(*context, params.bytesize, work.memory); r) return r;
  params.dptr = work.memory->address;
  work.params = params;
  work.access.assign(params.accessDescs, params.accessDescs + params.accessDescCount);
  work.params.accessDescs = nullptr;  // the program's array; returned from `access` instead
  return CUDA_SUCCESS;
}

}  // namespace

CUresult kernel_work(const CUDA_KERNEL_NODE_PARAMS_v2& p, const KernelWork* keep, KernelWork& work) {
  if (CUresult r = require(); r) return r;
  if (!p.func && !p.kern) return CUDA_ERROR_INVALID_VALUE;  // `kern` is used only where there is no `func`
  KernelWork made;
  if (keep) made.attributes = keep->attributes, made.cooperative = keep->cooperative;
  made.handle = p.func ? p.func : reinterpret_cast<CUfunction>(p.kern);
  if (CUresult r = context_of(p.ctx, made.context); r) return r;
  const unsigned grid[3] = {p.gridDimX, p.gridDimY, p.gridDimZ}, block[3] = {p.blockDimX, p.blockDimY, p.blockDimZ};
  std::copy_n(grid, 3, made.grid);
  std::copy_n(block, 3, made.block);
  made.shared = p.sharedMemBytes;
  if (CUresult r = fill_kernel_work(made, p.kernelParams, p.extra); r) return r;
  work = std::move(made);
  return CUDA_SUCCESS;
}

CUresult copy_work(const CUDA_MEMCPY3D& p, CUcontext handle, CopyWork& work) {
  if (CUresult r = require(); r) return r;
  if (!p.WidthInBytes || !p.Height || !p.Depth) return CUDA_ERROR_INVALID_VALUE;
  if (names_array(p)) {
    if (CUresult r = check_box(p); r) return r;
    work.copy = p;
    return context_of(handle, work.context);
  }
  const std::uint64_t from = p.srcPitch ? p.srcPitch : p.WidthInBytes + p.srcXInBytes;
  const std::uint64_t to = p.dstPitch ? p.dstPitch : p.WidthInBytes + p.dstXInBytes;
  const std::uint64_t from_height = p.srcHeight ? p.srcHeight : p.Height + p.srcY;
  const std::uint64_t to_height = p.dstHeight ? p.dstHeight : p.Height + p.dstY;
  if (p.srcLOD || p.dstLOD || from < p.srcXInBytes + p.WidthInBytes || to < p.dstXInBytes + p.WidthInBytes ||
      (p.Depth > 1 && (from_height < p.srcY + p.Height || to_height < p.dstY + p.Height)))
    return CUDA_ERROR_INVALID_VALUE;
  const auto given = [](CUmemorytype type, const void* host, CUdeviceptr device) {
    return type == CU_MEMORYTYPE_HOST ? host != nullptr : device != 0;
  };
  if (!given(p.srcMemoryType, p.srcHost, p.srcDevice) || !given(p.dstMemoryType, p.dstHost, p.dstDevice))
    return CUDA_ERROR_INVALID_VALUE;
  work.copy = p;
  return context_of(handle, work.context);
}

CUresult memset_work(const CUDA_MEMSET_NODE_PARAMS_v2& p, MemsetWork& work) {
  if (CUresult r = require(); r) return r;
  Context* context = nullptr;
  if (CUresult r = context_of(p.ctx, context); r) return r;
  if (p.elementSize != 1 && p.elementSize != 2 && p.elementSize != 4) return CUDA_ERROR_INVALID_VALUE;
  std::size_t bytes;
  if (!p.width || !p.height || __builtin_mul_overflow(p.width, std::size_t{p.elementSize}, &bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (p.dst % p.elementSize || (p.height > 1 && (p.pitch < bytes || p.pitch % p.elementSize))) return CUDA_ERROR_INVALID_VALUE;
  work.set = p;
  work.set.ctx = static_cast<CUcontext>(context->handle);
  return CUDA_SUCCESS;
}

CUresult batch_work(const CUDA_BATCH_MEM_OP_NODE_PARAMS& p, BatchWork& work) {
  if (CUresult r = require(); r) return r;
  Context* context = nullptr;
  if (CUresult r = context_of(p.ctx, context); r) return r;
  if (CUresult r = check_operations(p.count, p.paramArray, p.flags); r) return r;
  work = {{p.paramArray, p.paramArray + p.count}, static_cast<CUcontext>(context->handle), p.flags};
  return CUDA_SUCCESS;
}

CUresult event_work(CUevent event) {
  const Event* found = find(event);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  if (!found->imported) return CUDA_SUCCESS;
  log_once("node of an imported event", "a graph holds no event of another process");
  return CUDA_ERROR_NOT_SUPPORTED;
}

// `keep`: the work that this replaces, if any. For an embedded graph the copy is made here.
CUresult any_work(CUgraphNodeParams& params, const Work* keep, Work& work) {
  if (CUresult r = require(); r) return r;
  auto& value = params.value;
  switch (params.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      KernelWork made;
      CUresult r = kernel_work(value.kernel, keep ? std::get_if<KernelWork>(keep) : nullptr, made);
      work = std::move(made);
      return r;
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY: {
      CopyWork made;
      CUresult r = copy_work(value.memcpy.copyParams, value.memcpy.copyCtx, made);
      work = made;
      return r;
    }
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      MemsetWork made;
      CUresult r = memset_work(value.memset, made);
      work = made;
      return r;
    }
    case CU_GRAPH_NODE_TYPE_HOST:
      work = HostWork{value.host.fn, value.host.userData};
      return value.host.fn ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_GRAPH_NODE_TYPE_GRAPH: {
      std::lock_guard guard(graph_lock());
      Graph* graph = find(value.graph.graph);
      if (!graph || graph->capturing) return CUDA_ERROR_INVALID_VALUE;
      if (has_conditionals(*graph)) return CUDA_ERROR_NOT_SUPPORTED;  // as a driver: no embedded graph may have them
      const bool moved = value.graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
      if (moved && graph->owner) return CUDA_ERROR_INVALID_VALUE;
      Graph* embedded = moved ? graph : clone_graph(*graph);
      work = ChildWork{embedded};
      return embedded ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    case CU_GRAPH_NODE_TYPE_EMPTY:
      work = EmptyWork{};
      return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      work = EventWaitWork{value.eventWait.event};
      return event_work(value.eventWait.event);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      work = EventRecordWork{value.eventRecord.event};
      return event_work(value.eventRecord.event);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: {
      AllocateWork made;
      CUresult r = allocate_work(value.alloc, made);
      work = std::move(made);
      return r;
    }
    case CU_GRAPH_NODE_TYPE_MEM_FREE: {
      const Place place = place_of(value.free.dptr);
      work = FreeWork{value.free.dptr};
      return place.kind == Place::Kind::device && place.base == value.free.dptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    case CU_GRAPH_NODE_TYPE_CONDITIONAL: {
      ConditionalWork made;
      CUresult r = conditional_work(value.conditional, made);
      work = std::move(made);
      return r;
    }
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: {
      BatchWork made;
      CUresult r = batch_work(value.memOp, made);
      work = std::move(made);
      return r;
    }
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT:
      log_once("node type", "cuGraphAddNode: semaphore nodes are not supported");
      return CUDA_ERROR_NOT_SUPPORTED;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

}  // namespace rgpu
