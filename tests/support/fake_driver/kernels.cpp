// What the kernels of the fake driver do, their launches, and what they print.
//
// add_one(u64 address, u32 count) adds 1 to each u32; wait_flag(u64 address) runs until the u32 there is not 0;
// slow(u32 microseconds); wild() is an illegal address; sum(u64 address, u32...) adds up its parameters;
// vprintf(u64 number, u32 lines) prints "NUMBER: LINE of LINES". Our own module's are rgpu_hash_pages and
// rgpu_copy_hash_pages, one page after the other, and rgpu_combine, of float32 only.
// Modules' variables are reached by the device that they are on alone, as with a real one: hashing another's is an
// illegal address. What kernels print comes out where a real driver prints it, or after fake_print_at(1) only in
// cuCtxSynchronize. A launch may be captured into a graph, with parameters as the real driver takes them there: a
// packed buffer of at most 4096 bytes.
#include "driver.hpp"

namespace {

auto &printed_lock = *new std::mutex;  // behind the others
auto &printed = *new std::string;

constexpr uint64_t kPage = 65536, kPrime = (uint64_t{1} << 61) - 1;

struct Key {
    uint32_t words[520];
    uint64_t multipliers[2][257];
};

// The page hash as rgpu/checkpoint/pages/pagehash.py defines it; `page` has zeros behind `size`.
void hash_page(const uint32_t *page, uint64_t size, const Key &key, uint64_t (&hash)[2]) {
    unsigned __int128 sums[2] = {};
    for (uint32_t column = 0; column < 32; ++column) {
        uint64_t n[4] = {};
        for (uint32_t row = 0; row < 128; ++row) {
            const uint32_t *m = page + row * 128 + column * 4;
            for (uint32_t lane = 0; lane < 4; ++lane) {
                const uint32_t *k = key.words + 4 * row + 2 * lane;
                n[lane] += uint64_t{m[0] + k[0]} * uint64_t{m[1] + k[1]};
                n[lane] += uint64_t{m[2] + k[2]} * uint64_t{m[3] + k[3]};
            }
        }
        for (uint32_t i = 0; i < 8; ++i)
            for (uint32_t j = 0; j < 2; ++j)
                sums[j] += (unsigned __int128){n[i / 2] >> 32 * (i & 1) & 0xffffffff} * key.multipliers[j][column * 8 + i];
    }
    for (uint32_t j = 0; j < 2; ++j)
        hash[j] = static_cast<uint64_t>((sums[j] + (unsigned __int128){size} * key.multipliers[j][256]) % kPrime);
}

// The parameters of rgpu_hash_pages; rgpu_copy_hash_pages has `staging` too.
struct HashPages {
    const uint64_t (*segments)[3];  // address, bytes, pages before
    uint32_t count, pages, per_warp;
    const Key *key;
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
    constexpr uint64_t page = kPage;
    std::vector<uint32_t> whole(page / 4);
    for (uint32_t s = 0; s < p.count; ++s) {
        uint64_t number = p.segments[s][2];
        for (uint64_t at = 0; at < p.segments[s][1]; at += page, ++number) {
            const auto *bytes = reinterpret_cast<const uint8_t *>(p.segments[s][0] + at);
            const uint64_t size = std::min(page, p.segments[s][1] - at);
            std::memset(whole.data(), 0, page);
            std::memcpy(whole.data(), bytes, size);
            hash_page(whole.data(), size, *p.key, p.hashes[number]);
            p.zero[number] = std::all_of(whole.begin(), whole.end(), [](uint32_t word) { return !word; });
            if (p.staging) std::memcpy(p.staging + number * page, whole.data(), page);
        }
    }
}

// The parameters of rgpu_combine point to this.
struct Combine {
    uint32_t mode, type, ranks, scaled;
    uint64_t bytes;
    char *target;
    const char *sources[8];
    float factors[16];  // each in the first half of 8 bytes
};

void combine(const Combine &p, uint64_t begin, uint64_t end) {
    end = std::min(end, p.bytes);
    if (!p.mode || begin >= end) return;
    if (p.mode == 2) {
        for (uint32_t r = 0; r < p.ranks; ++r) std::memmove(p.target + r * p.bytes + begin, p.sources[r] + begin, end - begin);
        return;
    }
    if (p.type != 7) abort();
    for (uint64_t at = begin; at < end; at += 4) {
        float total = 0;
        for (uint32_t r = 0; r < p.ranks; ++r) {
            float one;
            std::memcpy(&one, p.sources[r] + at, 4);
            if (p.scaled) one *= p.factors[2 * r];
            total = r ? total + one : one;
        }
        std::memcpy(p.target + at, &total, 4);
    }
}

struct Config {
    uint32_t dims[7];
    void *stream;
    const uint8_t *attributes;
    uint32_t count;
};

}  // namespace

void fake::print_out() {
    std::lock_guard guard(printed_lock);
    std::fwrite(printed.data(), 1, printed.size(), stdout);
    printed.clear();
}

Result fake::start(const Kernel *kernel, void *stream, void **extra) {
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
    if (kernel->name == "rgpu_combine") {
        uint64_t part[2];
        std::memcpy(part, parameters.data() + 8, 16);
        return give_once(stream, [=] { combine(*reinterpret_cast<const Combine *>(address), part[0], part[1]); });
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

API Result cuLaunchKernel(void *f, unsigned gx, unsigned, unsigned, unsigned bx, unsigned, unsigned, unsigned, void *stream, void **, void **extra) {
    if (!print_at) print_out();
    if (starved > 0) return --starved, 2;
    if (static_cast<Kernel *>(f)->context != of(stream)->context) return 400;
    if (!gx || !bx) return 1;
    const auto begun = trace_call.load();
    traced = begun ? begun() : 0;
    return start(static_cast<Kernel *>(f), stream, extra);
}
// Of a profiling library in this process; null: it wants to know no more.
API void fake_trace(uint32_t (*begun)(), void (*done)(uint32_t, uint64_t, uint64_t)) {
    trace_call = nullptr;
    trace_done = done;
    trace_call = begun;
}
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
