// Stream capture as used by the rest of the shim: one check before work is published, one before a wait. Without an
// open capture each costs one load.
#pragma once

#include <atomic>

#include "graph.hpp"

namespace rgpu {

namespace detail {
extern std::atomic<bool> captures_open;    // a sequence exists, active or invalidated
extern std::atomic<bool> captured_events;  // an event was last recorded in a capture
CUresult unsafe_call();
CUresult event_asked(const Event& event);
CUresult stream_asked(const StreamRef& stream);
CUresult context_asked(const Context& context);
void stream_gone(const Stream& stream);
void event_gone(const Event& event);
}  // namespace detail

inline bool capture_open() { return detail::captures_open.load(std::memory_order_acquire); }
inline bool capture_matters() { return capture_open() || detail::captured_events.load(std::memory_order_acquire); }

// Call before work is published, when capture_open(): taken means that it became a node and must not be published.
// Errors are the call's result.
CUresult capture_work(const StreamRef& stream, Work work, bool& taken);
// The same for a call that no capture can contain (`name` is logged once).
CUresult refuse_in_capture(const StreamRef& stream, const char* name);
// The capture that work of the stream would be added to; 0: none.
CUresult open_capture_of(const StreamRef& stream, std::uint64_t& id);
CUresult capture_record(const StreamRef& stream, Event& event, unsigned flags, bool& taken);
CUresult capture_wait(const StreamRef& stream, Event& event, unsigned flags, bool& taken);

// Call before a function that the documentation names potentially unsafe (allocation, synchronous copies, waits).
inline CUresult unsafe_call() { return capture_open() ? detail::unsafe_call() : CUDA_SUCCESS; }
// Call before a query of the status, or a wait.
inline CUresult event_asked(const Event& event) { return capture_matters() ? detail::event_asked(event) : CUDA_SUCCESS; }
inline CUresult stream_asked(const StreamRef& stream) { return capture_open() ? detail::stream_asked(stream) : CUDA_SUCCESS; }
inline CUresult context_asked(const Context& context) { return capture_open() ? detail::context_asked(context) : CUDA_SUCCESS; }
inline void stream_gone(const Stream& stream) {
  if (capture_open()) detail::stream_gone(stream);
}
inline void event_gone(const Event& event) {
  if (capture_matters()) detail::event_gone(event);
}

void capture_node_gone(Node* node);  // graph_lock held

// Memory of graphs (graph_memory.cpp).
CUresult make_graph_memory(Context& context, std::uint64_t size, std::shared_ptr<GraphMemory>& memory);
// The program frees an address. True: it is a graph's, and is only marked as no longer allocated.
bool free_graph_memory(std::uint64_t address);
// Captures an allocation or a free in stream order.
CUresult capture_allocate(const StreamRef& stream, std::uint64_t size, CUdeviceptr* out, bool& taken);
CUresult capture_free(const StreamRef& stream, CUdeviceptr address, bool& taken);

}  // namespace rgpu
