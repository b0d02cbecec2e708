// The current context of each thread. The copies have stacks of their own: each has the contexts of its member in the
// order of the thread's whole stack, which is kept here.
#include "members.hpp"

namespace rgpu::router {
namespace {

void push_entry(Member& member, CUcontext context) {
  stack().push_back({&member, context});
  member.last.store(context, std::memory_order_release);
}

// The copy has made a context current by itself, where the call succeeded.
template <class Create>
CUresult created(CUdevice device, CUcontext* out, Create create) {
  const Borrowed at(of_device(device));
  const CUresult r = create(at.member());
  if (!r) push_entry(at.member(), *out);
  return r;
}

CUresult pop(CUcontext* out) {
  auto& entries = stack();
  if (entries.empty()) return CALL(first(), cuCtxPopCurrent_v2)(out);
  Member& member = *entries.back().member;
  const CUresult r = CALL(member, cuCtxPopCurrent_v2)(out);
  if (!r) entries.pop_back();
  return r;
}

CUresult push(CUcontext context) {
  Member* member = context ? holder(context) : nullptr;
  const CUresult r = CALL(member ? *member : first(), cuCtxPushCurrent_v2)(context);
  if (!r && member) push_entry(*member, context);
  return r;
}

// A context ended: where it was the thread's current one, its copy has removed it from its stack.
CUresult destroy(CUcontext context) {
  Member* member = context ? holder(context) : nullptr;
  const Borrowed at(member ? Where{member, false} : current());
  const CUresult r = CALL(at.member(), cuCtxDestroy_v2)(context);
  if (r || !member) return r;
  CUcontext none = context;
  member->last.compare_exchange_strong(none, nullptr);
  auto& entries = stack();
  if (!entries.empty() && entries.back().context == context) entries.pop_back();
  return r;
}

}  // namespace

namespace hand {

CUresult cuCtxCreate(CUcontext* pctx, unsigned int flags, CUdevice dev) {
  return created(dev, pctx, [&](Member& m) { return CALL(m, cuCtxCreate)(pctx, flags, dev); });
}

CUresult cuCtxCreate_v2(CUcontext* pctx, unsigned int flags, CUdevice dev) {
  return created(dev, pctx, [&](Member& m) { return CALL(m, cuCtxCreate_v2)(pctx, flags, dev); });
}

CUresult cuCtxCreate_v3(CUcontext* pctx, CUexecAffinityParam* paramsArray, int numParams, unsigned int flags,
                        CUdevice dev) {
  return created(dev, pctx,
                 [&](Member& m) { return CALL(m, cuCtxCreate_v3)(pctx, paramsArray, numParams, flags, dev); });
}

CUresult cuCtxCreate_v4(CUcontext* pctx, CUctxCreateParams* ctxCreateParams, unsigned int flags, CUdevice dev) {
  return created(dev, pctx, [&](Member& m) { return CALL(m, cuCtxCreate_v4)(pctx, ctxCreateParams, flags, dev); });
}

CUresult cuCtxDestroy(CUcontext ctx) { return destroy(ctx); }
CUresult cuCtxDestroy_v2(CUcontext ctx) { return destroy(ctx); }

CUresult cuCtxAttach(CUcontext* pctx, unsigned int flags) {
  const Borrowed at(current());
  return AT(at, cuCtxAttach)(pctx, flags);
}

CUresult cuCtxDetach(CUcontext ctx) {
  const Borrowed at(of_handles({HANDLE(ctx)}));
  const CUresult r = AT(at, cuCtxDetach)(ctx);
  CUcontext now = nullptr;
  auto& entries = stack();
  if (!r && !entries.empty() && entries.back().context == ctx &&
      (AT(at, cuCtxGetCurrent)(&now) || now != ctx))  // that was the last reference
    entries.pop_back();
  return r;
}

CUresult cuCtxGetCurrent(CUcontext* pctx) {
  if (stack().empty()) return CALL(first(), cuCtxGetCurrent)(pctx);
  return CALL(*stack().back().member, cuCtxGetCurrent)(pctx);
}

CUresult cuCtxSetCurrent(CUcontext ctx) {
  auto& entries = stack();
  Member* before = entries.empty() ? nullptr : entries.back().member;
  Member* member = ctx ? holder(ctx) : nullptr;
  if (member == before || !member) {  // also for a handle that is none: the copy knows the error
    const CUresult r = CALL(before ? *before : first(), cuCtxSetCurrent)(ctx);
    if (r) return r;
    if (before) entries.pop_back();
    if (member) push_entry(*member, ctx);
    return r;
  }
  if (CUresult r = CALL(*member, cuCtxPushCurrent_v2)(ctx); r) return r;
  CUcontext popped;
  if (before) {
    CALL(*before, cuCtxPopCurrent_v2)(&popped);
    entries.pop_back();
  }
  push_entry(*member, ctx);
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext ctx) { return push(ctx); }
CUresult cuCtxPushCurrent_v2(CUcontext ctx) { return push(ctx); }
CUresult cuCtxPopCurrent(CUcontext* pctx) { return pop(pctx); }
CUresult cuCtxPopCurrent_v2(CUcontext* pctx) { return pop(pctx); }

}  // namespace hand
}  // namespace rgpu::router
