// The loop of a fuzzer for compiled readers: inputs are changed at random and kept where they reach new code, which the
// compiler's -fsanitize-coverage=trace-pc reports. AddressSanitizer and UndefinedBehaviorSanitizer stop at what they
// find, CHECK at what does not hold; the input is then in the file that --finding names. Built and run by
// tests/fuzz/compiled.py; the last line of output is in libFuzzer's form.
#pragma once

#include <dlfcn.h>
#include <sanitizer/asan_interface.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <vector>

#include "channel.hpp"

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (condition) break;                                                    \
        std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
        std::abort();                                                            \
    } while (0)

namespace fuzzing {

using Bytes = std::vector<uint8_t>;

// Fills memory with bytes that are found again at no other place nearby, nor by another number.
inline void fill(uint8_t *to, size_t size, uint64_t number = 0) {
    static const Bytes known = [] {
        Bytes made((1 << 16) + 4096);
        std::mt19937 random;
        for (uint8_t &one : made) one = static_cast<uint8_t>(random());
        return made;
    }();
    for (size_t at = 0; at < size; at += 1 << 16, number += 257)
        std::memcpy(to + at, known.data() + number * 37 % 4096, std::min<size_t>(size - at, 1 << 16));
}

// A message's body: its head, and so many bytes behind it.
template <class Head>
Bytes with(const Head &head, size_t more, uint64_t number = 0) {
    Bytes body(sizeof head + more);
    std::memcpy(body.data(), &head, sizeof head);
    fill(body.data() + sizeof head, more, number);
    return body;
}

// One input, read from its beginning; zeros behind its end.
class Input {
   public:
    Input(const uint8_t *data, size_t size) : data_(data), left_(size) {}

    template <class T>
    T take() {
        T value{};
        const size_t size = std::min(sizeof value, left_);
        if (size) std::memcpy(&value, data_, size);
        data_ += size, left_ -= size;
        return value;
    }
    // 0 to `most`.
    uint64_t up_to(uint64_t most) { return most == ~0ull ? take<uint64_t>() : take<uint32_t>() % (most + 1); }
    // True once in so many times; at the end of the input never.
    bool rarely(uint8_t times) { return left_ && take<uint8_t>() % times == 1; }
    // A value in place of the one that is right: mostly that one, at times one beside it or any.
    template <class T>
    T maybe(T right) {
        if (!left_) return right;
        switch (take<uint8_t>() % 24) {
            case 1: return take<T>();
            case 2: return static_cast<T>(right + 1);
            case 3: return static_cast<T>(right - 1);
            case 4: return static_cast<T>(~T{0} - take<uint8_t>());
            default: return right;
        }
    }
    void fill(uint8_t *to, size_t size) {
        for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
            const auto word = take<uint64_t>();
            std::memcpy(to + i, &word, std::min(sizeof word, size - i));
        }
    }

   private:
    const uint8_t *data_;
    size_t left_;
};

// A message that a peer has sent and that can be opened.
struct Sent {
    uint8_t kind;
    Bytes body;
    size_t end;  // of its frame, in the peer's stream
};

// The other side's end of a sealed link. What it sends is one stream of bytes that is delivered in portions: some bytes
// were received before the run, and others arrive while it goes on. What it is sent it may receive meanwhile, too.
class Peer {
   public:
    Peer() {
        CHECK(!::socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
        for (const int end : ends) {
            const int size = 1 << 20;
            ::setsockopt(end, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
        }
        CHECK(sealer_.start(receive_key, data, sizeof data, true) && opener_.start(send_key, data, sizeof data, false));
    }
    void start(rgpu::Channel &channel) {  // of the code under test
        CHECK(channel.start(send_key, data, sizeof data, receive_key, data, sizeof data));
    }

    // -- what it sends --
    // Sends a message of the link; `altered`: one that does not open.
    void send(uint8_t kind, const Bytes &body, bool altered = false) {
        const size_t begin = stream.size(), size = 1 + body.size();
        const auto length = static_cast<uint32_t>(size + rgpu::kTag);
        stream.resize(begin + sizeof length + length);
        std::memcpy(stream.data() + begin, &length, sizeof length);
        CHECK(sealer_.seal(sealed_++, {{&kind, 1}, {body.data(), body.size()}}, stream.data() + begin + sizeof length));
        if (altered) stream[begin + sizeof length + size / 2] ^= 1;
        legible_ = legible_ && !altered && size <= rgpu::kShort;
        if (legible_) messages.push_back({kind, body, stream.size()});
    }
    // Sends bytes that are no message.
    void send_noise(Input &input) {
        Bytes noise(1 + input.up_to(200));
        input.fill(noise.data(), noise.size());
        stream.insert(stream.end(), noise.begin(), noise.end());
        legible_ = false;
    }
    // Has the beginning of the stream received already, and not opened.
    void hand_over(rgpu::ChannelState &state, size_t size) {
        const auto end = static_cast<ptrdiff_t>(std::min({size, stream.size(), rgpu::kBuffer}));
        handed_ = Bytes(stream.begin(), stream.begin() + end);
        delivered_ = handed_.size();
        state.pending = handed_.data();
        state.pending_size = handed_.size();
    }
    // Delivers so many more of its bytes, as far as the socket takes them.
    void deliver(size_t size) {
        const size_t end = delivered_ + std::min(size, stream.size() - delivered_);
        while (delivered_ < end) {
            const uint8_t *from = stream.data() + delivered_;
            const ssize_t count = ::send(ends[1], from, end - delivered_, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (count <= 0) return;
            delivered_ += static_cast<size_t>(count);
        }
    }
    // What the run has not opened, or not received, is that which follows the messages that it took.
    void check_left(const rgpu::ChannelState &state) const {
        CHECK(state.opened <= messages.size());
        const size_t at = state.opened ? messages[state.opened - 1].end : 0;
        CHECK(at + state.pending_size == handed_.size() + state.received && at + state.pending_size <= delivered_);
        CHECK(!state.pending_size || !std::memcmp(state.pending, stream.data() + at, state.pending_size));
    }

    // -- what it is sent --
    // Receives what was sent, and returns how many bytes that were so far. May be called by several threads.
    size_t collect() {
        std::lock_guard lock(collecting_);
        static Bytes portion(1 << 18);
        for (ssize_t count; (count = ::recv(ends[1], portion.data(), portion.size(), MSG_DONTWAIT)) > 0;)
            came_.insert(came_.end(), portion.begin(), portion.begin() + count);
        return came_.size();
    }
    // Opens what was sent, and the run's `unsent` behind that; each frame must be whole and open. Calls
    // use(kind, body, size, end), where `end` is the number of bytes up to the frame's end.
    template <class Use>
    void open(const rgpu::ChannelState &state, Use use) {
        static Bytes message(rgpu::kShort + rgpu::kTag);
        collect();
        came_.insert(came_.end(), state.unsent, state.unsent + state.unsent_size);
        for (size_t at = 0; at < came_.size();) {
            uint32_t length;
            CHECK(came_.size() - at >= sizeof length);
            std::memcpy(&length, came_.data() + at, sizeof length);
            at += sizeof length;
            CHECK(length > rgpu::kTag && length <= rgpu::kShort + rgpu::kTag && length <= came_.size() - at);
            CHECK(opener_.open(opened_++, came_.data() + at, length - rgpu::kTag, message.data()));
            at += length;
            use(message[0], message.data() + 1, length - rgpu::kTag - 1, at);
        }
        CHECK(opened_ == state.sealed);
    }
    // For the next input.
    void renew() {
        static Bytes waste(1 << 18);
        for (const int end : ends)
            while (::recv(end, waste.data(), waste.size(), MSG_DONTWAIT) > 0) continue;
        sealed_ = opened_ = delivered_ = 0;
        legible_ = true;
        for (Bytes *one : {&stream, &handed_, &came_}) one->clear();
        messages.clear();
    }

    int ends[2];  // of the code under test, and of this
    Bytes stream;
    std::vector<Sent> messages;  // in it, up to the first bytes that are none
    static constexpr uint8_t send_key[32] = {1}, receive_key[32] = {2}, data[8] = {3};

   private:
    rgpu::Cipher sealer_, opener_;
    uint64_t sealed_ = 0, opened_ = 0;
    bool legible_ = true;
    Bytes handed_, came_;
    size_t delivered_ = 0;
    std::mutex collecting_;
};

// libcrypto is not instrumented: memory that it reads and writes is touched ahead of it where that is not allowed.
inline void touch(const void *data, size_t size) {
    void *bad = size ? __asan_region_is_poisoned(const_cast<void *>(data), size) : nullptr;
    if (bad) *static_cast<volatile uint8_t *>(bad) = 0;
    CHECK(!bad);
}

using Update = int (*)(void *, uint8_t *, int *, const uint8_t *, int);
inline Update update = nullptr;
inline int checked_update(void *context, uint8_t *out, int *done, const uint8_t *in, int size) {
    touch(in, static_cast<size_t>(size));
    if (out) touch(out, static_cast<size_t>(size));
    return update(context, out, done, in, size);
}

inline constexpr size_t kPlaces = 1 << 16;
extern std::array<uint8_t, kPlaces> hit;  // places of the code that this input reached

void one(Input &input);  // of each fuzzer
}  // namespace fuzzing

// Where channel.cpp looks up libcrypto's functions (tests/fuzz/compiled.py).
extern "C" __attribute__((used)) inline void *checked_dlsym(void *library, const char *name) {
    void *found = ::dlsym(library, name);
    if (!found || std::strcmp(name, "EVP_CipherUpdate")) return found;
    fuzzing::update = reinterpret_cast<fuzzing::Update>(found);
    return reinterpret_cast<void *>(&fuzzing::checked_update);
}
