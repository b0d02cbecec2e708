// A driver library for tests without a GPU: the functions that the engine and CudaDevice call. Here is what its parts
// share: streams and what is given to them, objects, and what a test has set by the functions fake_*.
//
// streams.cpp   streams, events, waits
// memory.cpp    memory, copies, memsets
// kernels.cpp   what kernels do, launches, what they print
// modules.cpp   modules, linking, functions
// graphs.cpp    graphs and capture
// devices.cpp   devices, contexts, what tests set, names of functions
//
// There are two devices, which reach each other's memory. What is made belongs to the context that was current, and a
// call for a stream of another context than the current one, or with an event or a kernel of another than the stream's,
// is refused: stricter than a real driver, which lets some of it pass.
#pragma once
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
using Result = int;
using Ptr = uint64_t;

namespace fake {

inline thread_local void *current = nullptr;

struct Kernel {
    std::string name;
    unsigned size;
    int max_dynamic = 49152;
    void *context = current;
};
// What a profiling library in the process is told: a traced call begins, and gets its number; its work was done.
inline std::atomic<uint32_t (*)()> trace_call{nullptr};
inline std::atomic<void (*)(uint32_t, uint64_t, uint64_t)> trace_done{nullptr};
inline thread_local uint32_t traced = 0;  // the call that is being made
uint64_t realtime();

struct Graph;
struct Node {
    Kernel *kernel;
    std::vector<char> parameters;
    uint64_t condition = 0;
    int kind = 0;
    std::vector<Graph *> bodies{};  // of a conditional node
};
struct Graph {
    std::vector<std::unique_ptr<Node>> nodes;  // launched one behind the other
};
struct Module {
    std::vector<std::unique_ptr<Kernel>> kernels;
    std::map<std::string, std::pair<void *, size_t>> globals;
};
struct Variable {
    size_t size;
    void *context;
};
struct Stream;
struct Event {
    void *context = current;
    // Of the last record. A wait is for the record that was the last one when it was given.
    std::shared_ptr<bool> reached = std::make_shared<bool>(true);
    std::atomic<double> when{0};
};

// Never destroyed: at the process's end streams still wait on them, and the destructor would wait for those.
inline auto &lock = *new std::mutex;
inline auto &changed = *new std::condition_variable;
inline std::atomic<int> sticky{0}, injected{0}, starved{0};
inline std::atomic<long> launches{0};

inline auto &streams_lock = *new std::mutex;  // behind `lock`
inline auto &streams = *new std::vector<Stream *>;
inline std::atomic<bool> loads_wait{false};
inline std::atomic<unsigned> queue{0};  // of a stream; 0: without end
inline std::atomic<int> print_at{0};
inline auto &variables_lock = *new std::mutex;  // behind the others
inline auto &variables = *new std::map<Ptr, Variable>;

struct Stream {
    std::deque<std::function<bool()>> work;  // false: not yet
    std::condition_variable given;           // its own: with one for all, each call would wake every stream
    void *context;
    bool blocking;
    Graph *capturing = nullptr;
    void *last = nullptr;  // node
    std::thread thread;
    explicit Stream(bool blocking) : context(current), blocking(blocking) {
        std::lock_guard guard(streams_lock);
        streams.push_back(this);
        thread = std::thread([this] { run(); });
        thread.detach();
    }
    void run();
};

Stream *of(void *handle);                                // null: the legacy one of the current context
Result give(void *handle, std::function<bool()> work);   // false: not yet done
Result give_once(void *handle, std::function<void()> work);
void rest();                                             // until no stream has work, if loads wait
void print_out();
Result start(const Kernel *kernel, void *stream, void **extra);

}  // namespace fake

using namespace fake;
