// Client-side objects behind the program's handles.
//
// A handle is the address of a 4 KiB slot in an arena of read-only zeros (libraries read memory behind handles), the
// object is elsewhere, and a flat table leads from slot to object: looking up a wild pointer costs a range check and
// never reads it. Destroyed objects stay allocated for a while (a graveyard of the last few thousand), so that a race
// with a destroy gives an error code. The wire carries `number`, never the address.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core.hpp"

namespace rgpu {

enum class Kind : std::uint8_t {
  context = 1, stream, event, module, library, function, kernel, pool, link, physical, graph, graph_node, graph_exec, user_object,
  array, mipmapped_array, other
};

struct Object {
  explicit Object(Kind k) : kind(k) {}
  virtual ~Object() = default;
  const Kind kind;
  std::uint64_t number = 0;  // on the wire; 0 for objects that have none (functions, kernels)
  void* handle = nullptr;    // the program's handle; set by enroll()
};

// Gives the object a handle and puts it into the table, which owns it from now on. nullptr only when 4 Mi objects are
// alive.
void* enroll(std::unique_ptr<Object> object);
// Removes the object from the table: later look-ups fail. The object itself is freed much later. Returns true to
// exactly one of several racing callers.
bool retire(Object* object);
// Where all handles are: address and bytes.
std::pair<const void*, std::size_t> handle_range();
// The object behind a handle, nullptr if there is none of that kind.
Object* find_object(const void* handle, Kind kind);
// Calls `each` for every living object of a kind (a snapshot; any thread).
void for_each_object(Kind kind, const std::function<void(Object*)>& each);

// ---------------------------------------------------------------- objects

struct Context : Object {
  Context() : Object(Kind::context) {}
  CUdevice device = 0;
  unsigned flags = 0;
  bool primary = false;
  std::uint64_t unique_id = 0;   // cuCtxGetId
  std::atomic<bool> alive{true};
  int references = 0;            // primary retains; guarded by the lock of the code that counts them
  std::mutex lock;               // guards the fields below
  std::map<int, std::uint64_t> limits;
  std::map<const void*, std::pair<void*, void (*)(CUcontext, void*, void*)>> local_storage;
  std::shared_ptr<void> extension;  // for the handshake side
};

struct Stream : Object {
  Stream() : Object(Kind::stream) {}
  Context* context = nullptr;
  unsigned flags = 0;  // CU_STREAM_NON_BLOCKING
  int priority = 0;
  bool per_thread = false;              // a thread's default stream: cannot be destroyed
  std::uint64_t unique_id = 0;          // cuStreamGetId
  std::atomic<std::uint64_t> last{0};   // seq of the last call given to the stream
  std::atomic<std::uint64_t> seen{0};   // highest seq of it whose completion was reported to the program
  std::mutex lock;                      // guards `attributes`
  std::map<int, CUstreamAttrValue> attributes;  // cuStreamSetAttribute, by CUstreamAttrID
};

struct Event : Object {
  Event() : Object(Kind::event) {}
  Context* context = nullptr;
  unsigned flags = 0;
  std::mutex lock;               // guards the fields below
  std::uint64_t record = 0;      // seq of the last event_record, 0: never recorded
  std::uint64_t stream = 0;      // number of the stream it was recorded on
  std::uint64_t seen = 0;        // record whose completion was reported to the program
  bool exported = false;         // other processes may wait for it: ipc_event.cpp
  bool imported = false;         // another process's; set once, before the program gets the handle
};

struct Parameter {
  std::uint32_t offset = 0, size = 0;
};

struct Global {
  std::string name;
  std::uint64_t address = 0, size = 0;
  bool managed = false;
};

struct Function;

// A loaded module or library, with its decoded module table.
struct Module : Object {
  Module() : Object(Kind::module) {}
  Context* context = nullptr;
  bool library = false;
  std::vector<Function*> functions;  // index as in the table; owned by the handle table
  std::map<std::string, std::uint32_t> function_index;
  std::vector<Global> globals;
  std::map<std::string, std::uint32_t> global_index;
};

struct Function : Object {
  Function() : Object(Kind::function) {}
  Module* module = nullptr;
  std::uint32_t index = 0;
  std::string name;
  std::vector<Parameter> parameters;
  std::uint32_t parameter_bytes = 0;   // end of the last parameter
  std::atomic<int> attributes[16] = {};  // CUfunction_attribute 0…15, -1 unknown
  std::atomic<bool> complete = true;     // false: some attributes are unknown until the worker has loaded the function
  int attribute(int which, int otherwise) const {
    if (which < 0 || which >= 16) return otherwise;
    int v = attributes[which].load(std::memory_order_relaxed);
    return v < 0 ? otherwise : v;
  }
};

struct Library : Object {
  Library() : Object(Kind::library) {}
  Module* module = nullptr;  // the module that it is loaded as
  std::vector<struct Kernel*> kernels;
};

struct Kernel : Object {
  Kernel() : Object(Kind::kernel) {}
  Library* library = nullptr;
  Function* function = nullptr;
};

inline Context* find(CUcontext h) { return static_cast<Context*>(find_object(h, Kind::context)); }
inline Event* find(CUevent h) { return static_cast<Event*>(find_object(h, Kind::event)); }
inline Module* find(CUmodule h) { return static_cast<Module*>(find_object(h, Kind::module)); }
inline Library* find(CUlibrary h) { return static_cast<Library*>(find_object(h, Kind::library)); }
inline Kernel* find(CUkernel h) { return static_cast<Kernel*>(find_object(h, Kind::kernel)); }
// Accepts a CUkernel cast to CUfunction, too, as the driver does.
Function* find(CUfunction h);
// Created streams only; see resolve_stream for 0, 1, 2.
inline Stream* find(CUstream h) { return static_cast<Stream*>(find_object(h, Kind::stream)); }

// ---------------------------------------------------------------- the calling thread

// The calling thread's context stack, top last. An entry may be a context that
// has been destroyed meanwhile (`alive` is false, the object is not yet freed).
std::vector<Context*>& context_stack();
// The top of the calling thread's stack if that context is alive, else nullptr.
Context* current_context();
// require(), then the current context: CUDA_ERROR_INVALID_CONTEXT (201) when
// there is none, CUDA_ERROR_CONTEXT_IS_DESTROYED (709) when it is dead.
CUresult current(Context*& context);

// hostfn.cpp: whether the calling thread runs a host function now; CUDA calls are not permitted there.
bool in_host_function();
long host_function_thread();  // the system's number of the thread that runs one now; 0: none

// ---------------------------------------------------------------- streams

// The number of the legacy stream of the context's device, which is the session's number of that device.
std::uint64_t legacy_stream(const Context& context);

// A stream as a call refers to it. `object` is nullptr for a legacy stream.
struct StreamRef {
  std::uint64_t number = 0;
  Stream* object = nullptr;
  Context* context = nullptr;
};

// Resolves a handle: 0 is the legacy stream (the thread's own default stream when the call used a _ptds/_ptsz name),
// CU_STREAM_LEGACY (1), CU_STREAM_PER_THREAD (2, made on first use for each thread and context), else a created stream.
// CUDA_ERROR_INVALID_CONTEXT without a current context where one is needed, CUDA_ERROR_INVALID_HANDLE (400) for a
// handle that names no stream.
CUresult resolve_stream(CUstream handle, StreamRef& stream);
// Records that call `seq` was given to the stream.
void note_work(const StreamRef& stream, std::uint64_t seq);

// A stream complete up to a call. `object` is nullptr for a legacy stream.
struct StreamMark {
  Stream* object = nullptr;
  std::uint64_t stream = 0, seq = 0;
};
// stream.cpp: whether all work of the context's device is known to be complete, which is then recorded as observed …
bool device_finished(const Context& context);
// … and a wait for it (memory.hpp: wait_for_device), which reports to the program that all of its streams are complete.
CUresult wait_and_tell(const Context& context);
// Work that precedes the work given to the stream now, as far as its end was not reported to the program.
std::vector<StreamMark> untold_before(const StreamRef& stream);

// mirrors.cpp: the stream is about to be destroyed: no event can be recorded in it, and no call can wait for it, any
// more.
void mirrors_lose_stream(const Stream& stream);

}  // namespace rgpu
