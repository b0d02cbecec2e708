// The handle arena and table, context stacks, and the resolution of stream handles.
#include "handles.hpp"

#include <pthread.h>
#include <sys/mman.h>

#include <deque>

#include "device.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

constexpr std::uint64_t SLOT = 4096;           // readable zeros behind each handle
constexpr std::uint64_t SLOTS = 1ull << 22;    // objects alive at one time
constexpr std::size_t GRAVEYARD = 4096;        // dead objects that are still allocated
constexpr std::size_t RESTING_SLOTS = 16384;   // freed slots that are not reused yet

struct Table {
  std::uint8_t* arena = nullptr;               // SLOTS x SLOT bytes, read-only: all one page of zeros
  std::atomic<Object*>* objects = nullptr;     // by slot
  std::mutex lock;                             // guards the fields below
  std::uint64_t fresh = 0;                     // slots never used
  std::deque<std::uint64_t> freed;             // oldest first: a stale handle stays invalid for long
  std::deque<std::unique_ptr<Object>> dead;

  Table() {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* a = ::mmap(nullptr, (SLOTS + 1) * SLOT, PROT_READ, flags, -1, 0);
    void* o = ::mmap(nullptr, SLOTS * sizeof(void*), PROT_READ | PROT_WRITE, flags, -1, 0);
    if (a == MAP_FAILED || o == MAP_FAILED) return;
    ::madvise(a, (SLOTS + 1) * SLOT, MADV_NOHUGEPAGE);
    ::madvise(a, (SLOTS + 1) * SLOT, MADV_DONTDUMP);
    arena = static_cast<std::uint8_t*>(a);
    objects = static_cast<std::atomic<Object*>*>(o);
  }
};

Table& table() {
  static auto* t = new Table;
  return *t;
}

// The slot that a handle names; SLOTS for an address outside of the arena.
std::uint64_t slot_of(const Table& t, const void* handle) {
  const auto offset = reinterpret_cast<std::uintptr_t>(handle) - reinterpret_cast<std::uintptr_t>(t.arena);
  return t.arena && offset < SLOTS * SLOT && offset % SLOT == 0 ? offset / SLOT : SLOTS;
}

}  // namespace

void* enroll(std::unique_ptr<Object> object) {
  Table& t = table();
  if (!t.arena) return nullptr;
  std::lock_guard guard(t.lock);
  std::uint64_t slot;
  if (t.freed.size() > RESTING_SLOTS || (t.fresh == SLOTS && !t.freed.empty())) {
    slot = t.freed.front();
    t.freed.pop_front();
  } else if (t.fresh < SLOTS) {
    slot = t.fresh++;
  } else {
    return nullptr;
  }
  object->handle = t.arena + slot * SLOT;
  void* handle = object->handle;
  t.objects[slot].store(object.release(), std::memory_order_release);
  return handle;
}

bool retire(Object* object) {
  Table& t = table();
  const std::uint64_t slot = slot_of(t, object->handle);
  Object* expected = object;
  if (slot == SLOTS || !t.objects[slot].compare_exchange_strong(expected, nullptr)) return false;
  std::unique_ptr<Object> oldest;  // destroyed after the lock is released
  std::lock_guard guard(t.lock);
  t.freed.push_back(slot);
  if (object->kind == Kind::context) return true;  // threads' stacks may name it for ever; contexts are few
  t.dead.emplace_back(object);
  if (t.dead.size() > GRAVEYARD) {
    oldest = std::move(t.dead.front());
    t.dead.pop_front();
  }
  return true;
}

std::pair<const void*, std::size_t> handle_range() { return {table().arena, SLOTS * SLOT}; }

Object* find_object(const void* handle, Kind kind) {
  Table& t = table();
  const std::uint64_t slot = slot_of(t, handle);
  if (slot == SLOTS) return nullptr;
  Object* object = t.objects[slot].load(std::memory_order_acquire);
  return object && object->kind == kind ? object : nullptr;
}

void for_each_object(Kind kind, const std::function<void(Object*)>& each) {
  Table& t = table();
  if (!t.arena) return;
  std::uint64_t used;
  {
    std::lock_guard guard(t.lock);
    used = t.fresh;
  }
  for (std::uint64_t slot = 0; slot < used; ++slot)
    if (Object* object = t.objects[slot].load(std::memory_order_acquire); object && object->kind == kind) each(object);
}

Function* find(CUfunction h) {
  if (Object* function = find_object(h, Kind::function)) return static_cast<Function*>(function);
  auto* kernel = static_cast<Kernel*>(find_object(h, Kind::kernel));
  return kernel ? kernel->function : nullptr;
}

// ---------------------------------------------------------------- the calling thread

namespace {

// Plain pointers in thread-local storage, freed by a key's destructor: the main thread's is kept for static destructors
// that call CUDA.
struct ThreadState {
  std::vector<Context*> contexts;
  struct Own {
    Context* context;
    CUstream handle;        // looked up at each use: the end of the context retires the stream
    std::uint64_t number;
  };
  std::vector<Own> streams;  // per-thread default streams
};
thread_local constinit ThreadState* thread_state = nullptr;

void end_thread(void* state) {
  auto* mine = static_cast<ThreadState*>(state);
  for (auto& own : mine->streams) {
    Stream* stream = find(own.handle);
    if (!stream || stream->number != own.number || !retire(stream) || require_session()) continue;
    mirrors_lose_stream(*stream);
    wire::StreamDestroy call{};
    call.stream = stream->number;
    submit(call);
  }
  delete mine;
  thread_state = nullptr;
}

ThreadState& mine() {
  static pthread_key_t key = [] {
    pthread_key_t made{};
    ::pthread_key_create(&made, end_thread);
    return made;
  }();
  if (!thread_state) {
    thread_state = new ThreadState;
    ::pthread_setspecific(key, thread_state);
  }
  return *thread_state;
}

// The thread's own default stream in a context, made on first use. On the wire it is an ordinary stream with flags 0,
// so that it orders with the legacy stream.
CUresult per_thread_stream(Context* context, StreamRef& ref) {
  auto& streams = mine().streams;
  for (auto it = streams.begin(); it != streams.end(); ++it) {
    if (it->context != context) continue;
    if (Stream* stream = find(it->handle); stream && stream->number == it->number) {
      ref = {stream->number, stream, context};
      return CUDA_SUCCESS;
    }
    streams.erase(it);
    break;
  }
  auto made = std::make_unique<Stream>();
  Stream* stream = made.get();
  stream->context = context;
  stream->per_thread = true;
  CUresult r = submit_with<wire::StreamCreate>([&](wire::StreamCreate& call) {
    stream->number = stream->unique_id = next_number();
    call.stream = stream->number;
    call.context = context->number;
    return CUDA_SUCCESS;
  });
  if (r) return r;
  if (!enroll(std::move(made))) return CUDA_ERROR_OUT_OF_MEMORY;
  streams.push_back({context, static_cast<CUstream>(stream->handle), stream->number});
  ref = {stream->number, stream, context};
  return CUDA_SUCCESS;
}

}  // namespace

std::vector<Context*>& context_stack() { return mine().contexts; }

Context* current_context() {
  auto& stack = context_stack();
  return stack.empty() || !stack.back()->alive ? nullptr : stack.back();
}

CUresult current(Context*& context) {
  if (CUresult r = require(); r) return r;
  auto& stack = context_stack();
  if (stack.empty() || !stack.back())
    return in_host_function() ? CUDA_ERROR_NOT_PERMITTED : CUDA_ERROR_INVALID_CONTEXT;
  if (!stack.back()->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  context = stack.back();
  return CUDA_SUCCESS;
}

CUresult resolve_stream(CUstream handle, StreamRef& stream) {
  const auto value = reinterpret_cast<std::uintptr_t>(handle);
  if (value > 2) {
    Stream* found = find(handle);
    if (!found) return CUDA_ERROR_INVALID_HANDLE;
    stream = {found->number, found, found->context};
    return CUDA_SUCCESS;
  }
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  if (value == 2 || (value == 0 && per_thread_default_stream)) return per_thread_stream(context, stream);
  stream = {legacy_stream(*context), nullptr, context};
  return CUDA_SUCCESS;
}

std::uint64_t legacy_stream(const Context& context) { return static_cast<std::uint64_t>(session_device(context.device)); }

void note_work(const StreamRef& stream, std::uint64_t seq) {
  const bool blocking = !stream.object || !(stream.object->flags & CU_STREAM_NON_BLOCKING);
  given(stream.number, seq, session_device(stream.context->device), blocking);
  if (!stream.object) return;
  std::uint64_t before = stream.object->last.load();
  while (before < seq && !stream.object->last.compare_exchange_weak(before, seq)) {
  }
}

}  // namespace rgpu
