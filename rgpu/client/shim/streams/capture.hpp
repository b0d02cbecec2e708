// The capture machine (SEMANTICS 10): which streams capture, the dependencies of their next node, and the errors 900 to
// 908. It refers to streams and events by number and to nodes by opaque pointers, and publishes nothing, so that it is
// tested without a session (tests/client/shim/graphs/test_capture.py).
//
// A *sequence* is one capture, from begin to end. It begins in its origin stream, and spreads to every stream that
// waits for an event recorded in it.
//
// Sources: CUDA Driver API 13.0, "Stream Management" (cuStreamBeginCapture, cuThreadExchangeStreamCaptureMode,
// cuStreamGetCaptureInfo, cuStreamUpdateCaptureDependencies); CUDA C++ Programming Guide, "Creating a Graph Using
// Stream Capture": a prohibited operation invalidates the capture.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "cuda_types.hpp"

namespace rgpu {

struct Graph;
struct Node;

struct Sequence {
  std::uint64_t id = 0;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::uint32_t thread = 0;  // the thread that began it
  std::uint64_t origin = 0;  // stream
  Graph* graph = nullptr;
  bool own_graph = true;     // made by the capture, so ended with it when it fails
  bool active = true;        // false: invalidated
  struct Branch {
    std::vector<Node*> dependencies;  // of the stream's next node, each once
    bool blocking = false;            // the stream orders with the legacy one
    std::uint64_t context = 0;
  };
  std::map<std::uint64_t, Branch> streams;  // by number
};

class CaptureMachine {
 public:
  struct StreamId {
    std::uint64_t number = 0;
    bool legacy = false, blocking = false;
    std::uint64_t context = 0;
  };
  struct Ended {
    CUresult result = CUDA_SUCCESS;
    Graph* graph = nullptr;  // must be ended too when the result is an error and `own_graph` is set
    bool own_graph = true;
  };
  using Reachable = bool (*)(const std::vector<Node*>& from, const Node* node);

  explicit CaptureMachine(Reachable reachable) : reachable_(reachable) {}

  // ---- the life of a sequence
  CUresult may_begin(const StreamId& stream, CUstreamCaptureMode mode) const;
  void begin(const StreamId& stream, CUstreamCaptureMode mode, std::uint32_t thread, Graph* graph, bool own_graph,
             std::vector<Node*> dependencies);
  // nullopt: the sequence continues, and `refused` is the reason.
  std::optional<Ended> end(const StreamId& stream, std::uint32_t thread, CUresult& refused);
  // A stream is destroyed. Returns the sequence that ended with it.
  std::optional<Ended> stream_gone(std::uint64_t stream);

  // ---- work
  // Work is given to the stream. `into`: the sequence that captures it, or nullptr.
  CUresult target(const StreamId& stream, Sequence*& into);
  void added(Sequence& sequence, std::uint64_t stream, Node* node);
  // An event is recorded in the stream; `taken`: by a capture.
  CUresult record(std::uint64_t event, const StreamId& stream, bool& taken);
  // The stream waits for an event; `recorded`: it was ever recorded. `taken`: the wait is captured, or has no effect.
  CUresult wait(const StreamId& stream, std::uint64_t event, bool recorded, bool& taken);
  // Sets the dependencies of the stream's next node (`replace`), or adds to them.
  CUresult update(const StreamId& stream, const std::vector<Node*>& nodes, bool replace);
  void event_gone(std::uint64_t event) { events_.erase(event); }
  void node_gone(Node* node);

  // ---- questions
  CUresult event_asked(std::uint64_t event);         // a query of its status, or a wait for it
  CUresult stream_asked(const StreamId& stream);     // the same for a stream
  CUresult context_asked(std::uint64_t context);     // the same for all streams in a context
  // Handles a potentially unsafe call by a thread whose own mode is `mode`.
  CUresult unsafe(std::uint32_t thread, CUstreamCaptureMode mode);
  const Sequence* of(std::uint64_t stream) const;    // the sequence of the stream
  // Whether the legacy stream would order with a capturing one.
  bool legacy_is_implicit(std::uint64_t context) const;
  bool open() const { return !sequences_.empty(); }
  bool has_events() const { return !events_.empty(); }

 private:
  struct Recorded {
    std::uint64_t sequence = 0;
    std::vector<Node*> dependencies;
  };
  Sequence* find(std::uint64_t stream);
  Sequence* by_id(std::uint64_t id);
  Ended finish(std::uint64_t id, CUresult result);
  CUresult refuse_legacy(std::uint64_t context);

  Reachable reachable_;
  std::uint64_t last_id_ = 0;
  std::map<std::uint64_t, Sequence> sequences_;           // by id
  std::map<std::uint64_t, std::uint64_t> capturing_;      // stream → sequence
  std::map<std::uint64_t, Recorded> events_;              // events last recorded in a capture, open or ended
};

}  // namespace rgpu
