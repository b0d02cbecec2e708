// A driver library for tests without a GPU: the functions that the engine and
// CudaDevice call. "Device" memory is ordinary memory at the address asked for;
// each stream is a thread that runs its work in order. A module's image is text,
// one kernel a line ("add_one 12": name, bytes of parameters) or a variable as
// in PTX (".global .b8 NAME[SIZE];").
//
// Kernels: add_one(u64 address, u32 count) adds 1 to each u32; wait_flag(u64
// address) runs until the u32 there is not 0; slow(u32 microseconds); wild()
// is an illegal address; sum(u64 address, u32...) adds up its parameters; vprintf(u64 number, u32 lines) prints "NUMBER:
// LINE of LINES". What kernels print comes out where a real driver prints it, or after fake_print_at(1) only in
// cuCtxSynchronize; after fake_print_at(2) cuStreamSynchronize does not return before that is changed. A launch may be captured into a graph,
// with parameters as the real driver takes them there: a packed buffer of at most 4096 bytes. Our own module's (an image that cuModuleLoadData takes,
// whatever it is): rgpu_hash_pages and rgpu_copy_hash_pages, whose "hash" of a
// page is the sum of its bytes plus the key's first word, and its length.
// After fake_loads_wait(1) loading a module and unregistering memory wait for
// all streams, as they may on a real driver. FAKE_DRIVER_DELAY_US: each piece of work takes that long.
//
// There are two devices, which reach each other's memory. What is made belongs to the context that was current, and a
// call for a stream of another context than the current one, or with an event or a kernel of another than the stream's,
// is refused: stricter than a real driver, which lets some of it pass. Modules' variables are reached by the device that
// they are on alone, as with a real one: hashing another's is an illegal address.
#include <dlfcn.h>
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
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
using Result = int;
using Ptr = uint64_t;

namespace {

thread_local void *current = nullptr;

struct Kernel {
    std::string name;
    unsigned size;
    int max_dynamic = 49152;
    void *context = current;
};
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
    uint64_t wanted = 0, reached = 0;
    std::atomic<double> when{0};
};

// Never destroyed: at the process's end streams still wait on them, and the destructor would wait for those.
auto &lock = *new std::mutex;
auto &changed = *new std::condition_variable;
std::atomic<int> sticky{0}, injected{0}, starved{0};
std::atomic<long> launches{0};

auto &streams_lock = *new std::mutex;  // behind `lock`
auto &streams = *new std::vector<Stream *>;
std::atomic<bool> loads_wait{false};
std::atomic<int> print_at{0};
auto &variables_lock = *new std::mutex;  // behind the others
auto &variables = *new std::map<Ptr, Variable>;
auto &printed_lock = *new std::mutex;  // behind the others
auto &printed = *new std::string;

void print_out() {
    std::lock_guard guard(printed_lock);
    std::fwrite(printed.data(), 1, printed.size(), stdout);
    printed.clear();
}

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
    void run() {
        static const long delay = getenv("FAKE_DRIVER_DELAY_US") ? atol(getenv("FAKE_DRIVER_DELAY_US")) : 0;
        std::unique_lock guard(lock);
        for (;;) {
            given.wait(guard, [&] { return !work.empty(); });
            auto &item = work.front();
            guard.unlock();
            if (delay) usleep(static_cast<useconds_t>(delay));
            const bool done = sticky || item();
            guard.lock();
            if (!done) {
                changed.wait_for(guard, std::chrono::microseconds(50));
                continue;
            }
            work.pop_front();
            changed.notify_all();
        }
    }
};

Stream *legacy() {
    static auto &all = *new std::map<void *, Stream *>;
    static auto &guard = *new std::mutex;
    std::lock_guard held(guard);
    Stream *&stream = all[current];
    if (!stream) stream = new Stream(true);
    return stream;
}
Stream *of(void *handle) { return reinterpret_cast<uintptr_t>(handle) <= 2 ? legacy() : static_cast<Stream *>(handle); }

Result give(void *handle, std::function<bool()> work) {
    if (sticky) return sticky;
    if (int error = injected.exchange(0)) return error;
    if (of(handle)->context != current) return 201;
    std::lock_guard guard(lock);
    of(handle)->work.push_back(std::move(work));
    of(handle)->given.notify_one();
    return 0;
}
Result give_once(void *handle, std::function<void()> work) {
    return give(handle, [work = std::move(work)] { return work(), true; });
}

void rest() {  // until no stream has work
    const auto busy = [] {
        std::lock_guard guard(streams_lock);
        return std::any_of(streams.begin(), streams.end(), [](Stream *s) { return !s->work.empty(); });
    };
    std::unique_lock guard(lock);
    while (loads_wait && busy()) changed.wait_for(guard, std::chrono::milliseconds(1));
}

double milliseconds() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
}

struct Copy2D {
    size_t src_x, src_y;
    uint32_t src_type;
    const void *src_host;
    Ptr src_device;
    void *src_array;
    size_t src_pitch, dst_x, dst_y;
    uint32_t dst_type;
    void *dst_host;
    Ptr dst_device;
    void *dst_array;
    size_t dst_pitch, width, height;
};

Result set(Ptr to, size_t pitch, uint32_t value, size_t element, size_t width, size_t height, void *stream) {
    return give_once(stream, [=] {
        for (size_t row = 0; row < height; ++row)
            for (size_t i = 0; i < width; ++i)
                std::memcpy(reinterpret_cast<char *>(to + row * pitch + i * element), &value, element);
    });
}

// The parameters of rgpu_hash_pages; rgpu_copy_hash_pages has `staging` too.
struct HashPages {
    const uint64_t (*segments)[3];  // address, bytes, pages before
    uint32_t count, pages, per_warp;
    const uint32_t *key;
    uint64_t (*hashes)[2];
    uint8_t *zero;
    char *staging;
};

bool reaches(void *context, Ptr at) {
    std::lock_guard guard(variables_lock);
    auto behind = variables.upper_bound(at);
    if (behind == variables.begin()) return true;
    const auto &[start, found] = *std::prev(behind);
    return at >= start + found.size || found.context == context;
}

void hash_pages(const HashPages &p, void *context) {
    for (uint32_t s = 0; s < p.count; ++s)
        if (!reaches(context, p.segments[s][0])) sticky = 700;
    constexpr uint64_t page = 65536;
    for (uint32_t s = 0; s < p.count; ++s) {
        uint64_t number = p.segments[s][2];
        for (uint64_t at = 0; at < p.segments[s][1]; at += page, ++number) {
            const auto *bytes = reinterpret_cast<const uint8_t *>(p.segments[s][0] + at);
            const uint64_t size = std::min(page, p.segments[s][1] - at);
            uint64_t sum = 0;
            for (uint64_t i = 0; i < size; ++i) sum += bytes[i];
            p.hashes[number][0] = sum + p.key[0];
            p.hashes[number][1] = size;
            p.zero[number] = sum == 0;
            if (p.staging) std::memcpy(p.staging + number * page, bytes, size);
            if (p.staging) std::memset(p.staging + number * page + size, 0, page - size);
        }
    }
}

Result start(const Kernel *kernel, void *stream, void **extra) {
    std::vector<char> parameters(*static_cast<size_t *>(extra[3]));
    std::memcpy(parameters.data(), extra[1], parameters.size());
    if (kernel->name == "sum") {
        ++launches;
        return give_once(stream, [parameters = std::move(parameters)] {
            Ptr to;
            std::memcpy(&to, parameters.data(), 8);
            uint32_t sum = 0, word;
            for (size_t at = 8; at + 4 <= parameters.size(); at += 4) std::memcpy(&word, &parameters[at], 4), sum += word;
            *reinterpret_cast<uint32_t *>(to) = sum;
        });
    }
    parameters.resize(64);
    Ptr address;
    uint32_t count;
    std::memcpy(&address, parameters.data(), 8);
    ++launches;
    if (kernel->name == "add_one") {
        std::memcpy(&count, parameters.data() + 8, 4);
        return give_once(stream, [=] {
            for (uint32_t i = 0; i < count; ++i) ++reinterpret_cast<uint32_t *>(address)[i];
        });
    }
    if (kernel->name == "wait_flag")
        return give(stream, [=] { return *reinterpret_cast<volatile uint32_t *>(address) != 0; });
    if (kernel->name == "slow")
        return give_once(stream, [=] { usleep(static_cast<useconds_t>(address & 0xFFFFFFFF)); });
    if (kernel->name == "rgpu_hash_pages" || kernel->name == "rgpu_copy_hash_pages") {
        HashPages given;
        std::memcpy(&given, parameters.data(), sizeof given);
        return give_once(stream, [=, context = kernel->context] { hash_pages(given, context); });
    }
    if (kernel->name == "vprintf") {
        std::memcpy(&count, parameters.data() + 8, 4);
        return give_once(stream, [=] {
            std::string text;
            for (uint32_t i = 0; i < count; ++i)
                text += std::to_string(address) + ": " + std::to_string(i) + " of " + std::to_string(count) + "\n";
            std::lock_guard guard(printed_lock);
            printed += text;
        });
    }
    if (kernel->name == "wild") return give_once(stream, [] { sticky = 700; });
    return give_once(stream, [] {});
}

}  // namespace

API Result fake_inject(int error) { return injected = error, 0; }
API Result fake_print_at(int how) { return print_at = how, 0; }
API Result fake_reset() { return loads_wait = false, print_at = 0, injected = 0, sticky = 0, starved = 0; }
API Result fake_loads_wait(int on) { return loads_wait = on, 0; }
API Result fake_out_of_memory(int count) { return starved = count, 0; }
API long fake_launches() { return launches; }

API Result cuInit(unsigned) { return 0; }
API Result cuDriverGetVersion(int *version) { return *version = 13000, 0; }
API Result cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal < 2 ? 0 : 101; }
API Result cuDeviceGetCount(int *count) { return *count = 2, 0; }
API Result cuDeviceCanAccessPeer(int *can, int device, int peer) { return *can = device != peer, 0; }
API Result cuDeviceGetP2PAttribute(int *value, int, int, int) { return *value = 1, 0; }
API Result cuCtxEnablePeerAccess(void *peer, unsigned) { return !current ? 201 : peer == current ? 101 : 0; }
API Result cuDeviceGetName(char *name, int size, int) { return std::strncpy(name, "Fake", static_cast<size_t>(size)), 0; }
API Result cuDeviceGetUuid_v2(char *uuid, int device) { return std::memset(uuid, 7 + device, 16), 0; }
API Result cuDeviceTotalMem_v2(size_t *bytes, int) { return *bytes = size_t{1} << 30, 0; }
// Only asked of a module's variables: whether one is managed; none is.
API Result cuPointerGetAttribute(void *data, int attribute, std::uint64_t) {
  return attribute == 8 ? (*static_cast<unsigned *>(data) = 0, 0) : 1;
}
API Result cuDeviceGetAttribute(int *value, int attribute, int) { return *value = attribute == 75 ? 9 : 0, 0; }
API Result cuDevicePrimaryCtxRetain(void **context, int device) {
    return *context = reinterpret_cast<void *>(uintptr_t{0xC0} + static_cast<uintptr_t>(device)), 0;
}
API Result cuDevicePrimaryCtxRelease_v2(int) { return 0; }
API Result cuCtxSetCurrent(void *context) { return current = context, 0; }
API Result cuCtxSetLimit(int, size_t) { return 0; }
API Result cuGetErrorName(int, const char **name) { return *name = "CUDA_ERROR_FAKE", 0; }

API Result cuMemAddressReserve(Ptr *at, size_t, size_t, Ptr wanted, unsigned long long) { return *at = wanted, 0; }
API Result cuMemAddressFree(Ptr, size_t) { return 0; }
API Result cuMemCreate(unsigned long long *handle, size_t, const void *, unsigned long long) { return *handle = 1, 0; }
API Result cuMemRelease(unsigned long long) { return 0; }
API Result cuMemMap(Ptr at, size_t size, size_t, unsigned long long, unsigned long long) {
    void *got = mmap(reinterpret_cast<void *>(at), size, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    return got == reinterpret_cast<void *>(at) ? 0 : 2;
}
API Result cuMemUnmap(Ptr at, size_t size) { return munmap(reinterpret_cast<void *>(at), size) ? 1 : 0; }
API Result cuMemSetAccess(Ptr, size_t, const void *, size_t) { return 0; }
// Page-locked memory, by its address: a copy from any other host memory has read it when the call returns.
std::mutex pinned_lock;
auto &pinned = *new std::map<const char *, size_t>;
bool is_pinned(const void *at) {
    std::lock_guard guard(pinned_lock);
    auto next = pinned.upper_bound(static_cast<const char *>(at));
    return next != pinned.begin() && static_cast<const char *>(at) < std::prev(next)->first + std::prev(next)->second;
}
Result pin(const void *at, size_t size) {
    std::lock_guard guard(pinned_lock);
    return pinned[static_cast<const char *>(at)] = size, 0;
}
Result unpin(const void *at) {
    std::lock_guard guard(pinned_lock);
    return pinned.erase(static_cast<const char *>(at)), 0;
}

API Result cuMemHostAlloc(void **at, size_t size, unsigned) {
    *at = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    return *at ? pin(*at, size) : 2;
}
API Result cuMemAlloc_v2(Ptr *at, size_t size) { return *at = reinterpret_cast<Ptr>(aligned_alloc(4096, (size + 4095) / 4096 * 4096)), *at ? 0 : 2; }
API Result cuMemFree_v2(Ptr at) { return free(reinterpret_cast<void *>(at)), 0; }
API Result cuMemAllocAsync(Ptr *at, size_t size, void *) { return cuMemAlloc_v2(at, size); }
API Result cuMemFreeAsync(Ptr at, void *stream) { return give_once(stream, [=] { free(reinterpret_cast<void *>(at)); }); }
API Result cuMemFreeHost(void *at) { return unpin(at), free(at), 0; }

API Result cuMemHostRegister_v2(void *at, size_t size, unsigned) { return pin(at, size); }
API Result cuMemHostUnregister(void *at) { return rest(), unpin(at); }
API Result cuMemHostGetDevicePointer_v2(Ptr *at, void *host, unsigned) { return *at = reinterpret_cast<Ptr>(host), 0; }

API Result cuStreamCreateWithPriority(void **stream, unsigned flags, int) { return *stream = new Stream(!(flags & 1)), 0; }
API Result cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }
API Result cuStreamDestroy_v2(void *) { return 0; }
API Result cuStreamSynchronize(void *stream) {
    std::unique_lock guard(lock);
    changed.wait(guard, [&] { return of(stream)->work.empty(); });
    guard.unlock();
    while (print_at == 2) usleep(1000);
    if (!print_at) print_out();
    return sticky;
}
API Result cuCtxSynchronize() {
    std::unique_lock guard(lock);
    changed.wait(guard, [] {
        std::lock_guard inner(streams_lock);
        return std::all_of(streams.begin(), streams.end(),
                           [](Stream *s) { return s->context != current || s->work.empty(); });
    });
    guard.unlock();
    print_out();
    return sticky;
}
API Result cuStreamWaitEvent(void *stream, void *handle, unsigned) {
    auto *event = static_cast<Event *>(handle);
    std::unique_lock guard(lock);
    const uint64_t wanted = event->wanted;
    guard.unlock();
    return give(stream, [=] {
        std::lock_guard inner(lock);
        return event->reached >= wanted;
    });
}
API Result cuStreamWaitValue32_v2(void *stream, Ptr at, uint32_t value, unsigned) {
    return give(stream, [=] { return static_cast<int32_t>(*reinterpret_cast<volatile uint32_t *>(at) - value) >= 0; });
}
API Result cuStreamIsCapturing(void *, int *status) { return *status = 0, 0; }
API Result cuEventCreate(void **event, unsigned) { return *event = new Event, 0; }
API Result cuEventDestroy_v2(void *) { return 0; }
API Result cuEventRecord(void *handle, void *stream) {
    auto *event = static_cast<Event *>(handle);
    if (event->context != of(stream)->context) return 400;
    uint64_t mine;
    {
        std::lock_guard guard(lock);
        mine = ++event->wanted;
    }
    return give_once(stream, [=] {
        std::lock_guard guard(lock);
        event->reached = mine;
        event->when = milliseconds();
    });
}
API Result cuEventQuery(void *handle) {
    auto *event = static_cast<Event *>(handle);
    if (sticky) return sticky;
    std::lock_guard guard(lock);
    return event->reached < event->wanted ? 600 : 0;
}
API Result cuEventSynchronize(void *handle) {
    auto *event = static_cast<Event *>(handle);
    std::unique_lock guard(lock);
    changed.wait(guard, [&] { return event->reached >= event->wanted || sticky; });
    return sticky;
}
API Result cuEventElapsedTime_v2(float *ms, void *from, void *to) {
    if (static_cast<Event *>(from)->context != static_cast<Event *>(to)->context) return 400;
    *ms = static_cast<float>(static_cast<Event *>(to)->when - static_cast<Event *>(from)->when);
    return 0;
}
API Result cuEventElapsedTime(float *ms, void *from, void *to) { return cuEventElapsedTime_v2(ms, from, to); }

API Result cuMemcpyHtoDAsync_v2(Ptr to, const void *from, size_t size, void *stream) {
    if (!is_pinned(from)) {
        auto staged = std::make_shared<std::string>(static_cast<const char *>(from), size);
        return give_once(stream, [=] { std::memcpy(reinterpret_cast<void *>(to), staged->data(), size); });
    }
    return give_once(stream, [=] { std::memcpy(reinterpret_cast<void *>(to), from, size); });
}
API Result cuMemcpyDtoHAsync_v2(void *to, Ptr from, size_t size, void *stream) {
    return give_once(stream, [=] { std::memcpy(to, reinterpret_cast<void *>(from), size); });
}
API Result cuMemcpyDtoDAsync_v2(Ptr to, Ptr from, size_t size, void *stream) {
    return give_once(stream, [=] { std::memmove(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), size); });
}
API Result cuMemcpy2DAsync_v2(const Copy2D *given, void *stream) {
    const Copy2D copy = *given;
    return give_once(stream, [=] {
        auto *from = copy.src_type == 1 ? static_cast<const char *>(copy.src_host) : reinterpret_cast<const char *>(copy.src_device);
        auto *to = copy.dst_type == 1 ? static_cast<char *>(copy.dst_host) : reinterpret_cast<char *>(copy.dst_device);
        for (size_t row = 0; row < copy.height; ++row)
            std::memcpy(to + row * copy.dst_pitch, from + row * copy.src_pitch, copy.width);
    });
}
// As on a real driver: behind what the legacy stream was given, a memset of it included.
Result copy_now(void *to, const void *from, size_t size) {
    std::unique_lock guard(lock);
    changed.wait(guard, [] { return legacy()->work.empty(); });
    return std::memcpy(to, from, size), sticky.load();
}
API Result cuMemcpyDtoH_v2(void *to, Ptr from, size_t size) { return copy_now(to, reinterpret_cast<void *>(from), size); }
API Result cuMemcpyHtoD_v2(Ptr to, const void *from, size_t size) { return copy_now(reinterpret_cast<void *>(to), from, size); }
// As on a real driver: on the legacy stream, and not done when it returns.
API Result cuMemsetD8_v2(Ptr to, unsigned char value, size_t size) { return set(to, 0, value, 1, size, 1, nullptr); }
API Result cuMemsetD8Async(Ptr to, unsigned char v, size_t n, void *s) { return set(to, 0, v, 1, n, 1, s); }
API Result cuMemsetD16Async(Ptr to, unsigned short v, size_t n, void *s) { return set(to, 0, v, 2, n, 1, s); }
API Result cuMemsetD32Async(Ptr to, unsigned v, size_t n, void *s) { return set(to, 0, v, 4, n, 1, s); }
API Result cuMemsetD2D8Async(Ptr to, size_t p, unsigned char v, size_t w, size_t h, void *s) { return set(to, p, v, 1, w, h, s); }
API Result cuMemsetD2D16Async(Ptr to, size_t p, unsigned short v, size_t w, size_t h, void *s) { return set(to, p, v, 2, w, h, s); }
API Result cuMemsetD2D32Async(Ptr to, size_t p, unsigned v, size_t w, size_t h, void *s) { return set(to, p, v, 4, w, h, s); }

std::atomic<unsigned> links{0}, attribute_calls{0}, compile_ms{0};
API void fake_compile_ms(unsigned ms) { compile_ms = ms; }

API Result cuModuleLoadDataEx(void **handle, const void *image, unsigned, void *, void *) {
    rest();
    auto module = std::make_unique<Module>();
    if (*static_cast<const char *>(image) == '.') std::this_thread::sleep_for(std::chrono::milliseconds(compile_ms));
    std::istringstream text(static_cast<const char *>(image));
    for (std::string line; std::getline(text, line);) {
        std::istringstream words(line);
        std::string name;
        words >> name;
        if (name == "bad") return 218;
        if (name[0] == '\x7f' || (name[0] == '.' && name != ".global")) continue;  // a cubin of cuLinkComplete, directives
        if (name == ".global") {
            words >> name >> name;
            const size_t bracket = name.find('['), size = std::stoul(name.substr(bracket + 1));
            void *memory = calloc(1, size);
            module->globals[name.substr(0, bracket)] = {memory, size};
            std::lock_guard guard(variables_lock);
            variables[reinterpret_cast<Ptr>(memory)] = {size, current};
        } else if (!name.empty()) {
            auto kernel = std::make_unique<Kernel>(Kernel{name, 0, 49152});
            words >> kernel->size;
            module->kernels.push_back(std::move(kernel));
        }
    }
    *handle = module.release();
    return 0;
}
// What it links is the text behind a line that marks machine code; the order of the kernels is another then.
std::string linked;
API Result cuLinkCreate_v2(unsigned, void *, void *, void **state) { return linked.clear(), *state = &linked, ++links, 0; }
API Result cuLinkAddData_v2(void *, int, const void *data, size_t size, const char *, unsigned, void *, void *) {
    std::istringstream text(std::string(static_cast<const char *>(data), size - 1));
    std::string before;
    for (std::string line; std::getline(text, line);) {
        if (line == "unlinkable") return 218;
        before = line[0] == '.' ? before + line + "\n" : line + "\n" + before;
    }
    linked = "\x7f" "ELF\n" + before;
    return 0;
}
API Result cuLinkComplete(void *, const void **data, size_t *size) { return *data = linked.data(), *size = linked.size(), 0; }
API Result cuLinkDestroy(void *) { return 0; }
API unsigned fake_links() { return links; }
API unsigned fake_attribute_calls() { return attribute_calls; }
API Result cuModuleLoadData(void **handle, const void *) {
    auto module = std::make_unique<Module>();
    for (const char *name : {"rgpu_hash_pages", "rgpu_copy_hash_pages"})
        module->kernels.push_back(std::make_unique<Kernel>(Kernel{name, 64, 49152}));
    return *handle = module.release(), 0;
}
API Result cuModuleGetFunction(void **function, void *module, const char *name) {
    for (auto &kernel : static_cast<Module *>(module)->kernels)
        if (kernel->name == name) return *function = kernel.get(), 0;
    return 500;
}
API Result cuFuncLoad(void *) { return 0; }
API Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *, int, size_t) { return *blocks = 3, 0; }
API Result cuModuleUnload(void *) { return 0; }
API Result cuModuleGetFunctionCount(unsigned *count, void *module) {
    return *count = static_cast<unsigned>(static_cast<Module *>(module)->kernels.size()), 0;
}
API Result cuModuleEnumerateFunctions(void **functions, unsigned count, void *module) {
    for (unsigned i = 0; i < count; ++i) functions[i] = static_cast<Module *>(module)->kernels[i].get();
    return 0;
}
API Result cuFuncGetName(const char **name, void *function) { return *name = static_cast<Kernel *>(function)->name.c_str(), 0; }
API Result cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size) {
    if (index || !static_cast<Kernel *>(function)->size) return 1;
    return *offset = 0, *size = static_cast<Kernel *>(function)->size, 0;
}
API Result cuFuncGetAttribute(int *value, int attribute, void *function) {
    ++attribute_calls;
    return *value = attribute == 8 ? static_cast<Kernel *>(function)->max_dynamic : 0, 0;
}
API Result cuFuncSetAttribute(void *function, int attribute, int value) {
    if (attribute == 8) static_cast<Kernel *>(function)->max_dynamic = value;
    return 0;
}
API Result cuModuleGetGlobal_v2(Ptr *address, size_t *size, void *module, const char *name) {
    auto &globals = static_cast<Module *>(module)->globals;
    auto found = globals.find(name);
    if (found == globals.end()) return 500;
    return *address = reinterpret_cast<Ptr>(found->second.first), *size = found->second.second, 0;
}
API Result cuLaunchKernel(void *f, unsigned gx, unsigned, unsigned, unsigned bx, unsigned, unsigned, unsigned, void *stream, void **, void **extra) {
    if (!print_at) print_out();
    if (starved > 0) return --starved, 2;
    if (static_cast<Kernel *>(f)->context != of(stream)->context) return 400;
    return gx && bx ? start(static_cast<Kernel *>(f), stream, extra) : 1;
}
struct Config {
    uint32_t dims[7];
    void *stream;
    const uint8_t *attributes;
    uint32_t count;
};

API Result cuLaunchKernelEx(const Config *config, void *f, void **parameters, void **extra) {
    for (uint32_t i = 0; i < config->count; ++i)
        if (config->attributes[72 * i] != 2 && config->attributes[72 * i] != 4) return 801;
    auto *kernel = static_cast<Kernel *>(f);
    if (config->dims[6] > static_cast<uint32_t>(kernel->max_dynamic)) return 1;
    Stream *stream = of(config->stream);
    if (kernel->context != stream->context) return 400;
    if (!stream->capturing) return start(kernel, config->stream, extra);
    if (extra && *static_cast<size_t *>(extra[3]) > 4096) return 1;
    const char *from = static_cast<const char *>(extra ? extra[1] : parameters[0]);
    stream->capturing->nodes.push_back(std::make_unique<Node>(Node{kernel, {from, from + kernel->size}}));
    return stream->last = stream->capturing->nodes.back().get(), 0;
}

API Result cuGraphCreate(void **graph, unsigned) { return *graph = new Graph, 0; }
API Result cuGraphDestroy(void *) { return 0; }
API Result cuGraphExecDestroy(void *) { return 0; }
API Result cuGraphInstantiateWithFlags(void **made, void *graph, unsigned long long) { return *made = graph, 0; }
API Result cuStreamCreate(void **stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }
API Result cuStreamBeginCaptureToGraph(void *stream, void *graph, void **, const void *, size_t, int) {
    return of(stream)->capturing = static_cast<Graph *>(graph), of(stream)->last = nullptr, 0;
}
API Result cuStreamGetCaptureInfo_v2(void *stream, int *status, uint64_t *, void **, void ***nodes, size_t *count) {
    return *status = 1, *nodes = &of(stream)->last, *count = of(stream)->last != nullptr, 0;
}
API Result cuStreamEndCapture(void *stream, void **graph) {
    return *graph = of(stream)->capturing, of(stream)->capturing = nullptr, 0;
}
API Result cuGraphExecKernelNodeSetParams_v2(void *, void *handle, void *const *given) {
    auto *node = static_cast<Node *>(handle);  // given: function, shape in 28 bytes, parameters
    void *const *parameters = static_cast<void *const *>(given[5]);
    node->kernel = static_cast<Kernel *>(given[0]);
    const char *from = static_cast<const char *>(parameters[0]);
    return node->parameters.assign(from, from + node->kernel->size), 0;
}
// Conditions keep the value that they are made with: no kernel here sets one. A while body therefore runs once.
auto &conditions = *new std::map<uint64_t, unsigned>;
API Result cuGraphConditionalHandleCreate(uint64_t *handle, void *, void *, unsigned value, unsigned flags) {
    *handle = 1000 + conditions.size();
    conditions[*handle] = flags ? value : 0;
    return 0;
}
struct ConditionalParameters {
    int type, reserved[3];
    uint64_t handle;
    int kind;
    unsigned size;
    void **bodies;
    void *context;
};
API Result cuGraphAddNode_v2(void **made, void *graph, void **, const void *, size_t, ConditionalParameters *given) {
    if (given->type != 13 || !conditions.count(given->handle)) return 1;
    auto node = std::make_unique<Node>(Node{nullptr, {}, given->handle, given->kind});
    for (unsigned i = 0; i < given->size; ++i) node->bodies.push_back(new Graph);
    given->bodies = reinterpret_cast<void **>(node->bodies.data());
    *made = node.get();
    return static_cast<Graph *>(graph)->nodes.push_back(std::move(node)), 0;
}
API Result cuGraphLaunch(void *graph, void *stream) {
    for (auto &node : static_cast<Graph *>(graph)->nodes) {
        if (!node->bodies.empty()) {
            const unsigned value = conditions[node->condition];
            const size_t body = node->kind == 2 ? value : value ? 0 : 1;
            if (body < node->bodies.size())
                if (Result result = cuGraphLaunch(node->bodies[body], stream)) return result;
            continue;
        }
        size_t size = node->parameters.size();
        void *extra[] = {reinterpret_cast<void *>(1), node->parameters.data(), reinterpret_cast<void *>(2), &size, nullptr};
        if (Result result = start(node->kernel, stream, extra)) return result;
    }
    return 0;
}

API Result cuGetProcAddress_v2(const char *name, void **function, int, uint64_t, int *status) {
    void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *function = dlsym(self, (std::string(name) + "_v2").c_str());
    if (!*function) *function = dlsym(self, name);
    if (status) *status = *function ? 0 : 1;
    return *function ? 0 : 500;
}
API Result cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
