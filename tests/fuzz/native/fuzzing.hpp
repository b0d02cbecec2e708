// The loop of a fuzzer for compiled readers: inputs are changed at random and kept where they reach new code, which the
// compiler's -fsanitize-coverage=trace-pc reports. AddressSanitizer and UndefinedBehaviorSanitizer stop at what they
// find, CHECK at what does not hold; the input is then in the file that --finding names. Built and run by
// tests/fuzz/compiled.py; the last line of output is in libFuzzer's form.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

// A message's body: its head, and so many bytes behind it.
template <class Head>
Bytes with(const Head &head, size_t more, uint8_t filled = 7) {
    Bytes body(sizeof head + more, filled);
    std::memcpy(body.data(), &head, sizeof head);
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

// The other side's end of a sealed link.
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
    // Sends a message of the link.
    void send(uint8_t kind, const Bytes &body) {
        Bytes frame(4 + 1 + body.size() + rgpu::kTag);
        const auto length = static_cast<uint32_t>(frame.size() - 4);
        std::memcpy(frame.data(), &length, 4);
        CHECK(sealer_.seal(sealed_++, {{&kind, 1}, {body.data(), body.size()}}, frame.data() + 4));
        send_raw(frame);
    }
    void send_raw(const Bytes &bytes) {
        if (bytes.size()) CHECK(::send(ends[1], bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0);
    }
    // Sends bytes that are no message.
    void send_noise(Input &input) {
        Bytes noise(input.up_to(200));
        input.fill(noise.data(), noise.size());
        send_raw(noise);
    }
    // Opens what was sent to it, and `unsent` behind that; each frame must be whole and open. Calls use(kind, body).
    template <class Use>
    void open(const uint8_t *unsent, size_t size, Use use) {
        static Bytes came(1 << 20), message(rgpu::kShort + rgpu::kTag);
        size_t end = 0;
        for (ssize_t count; (count = ::recv(ends[1], came.data() + end, came.size() - end, MSG_DONTWAIT)) > 0;)
            end += static_cast<size_t>(count);
        if (size) std::memcpy(came.data() + end, unsent, size);
        end += size;
        for (size_t at = 0; at < end;) {
            uint32_t length;
            CHECK(end - at >= sizeof length);
            std::memcpy(&length, came.data() + at, sizeof length);
            at += sizeof length;
            CHECK(length > rgpu::kTag && length <= rgpu::kShort + rgpu::kTag && length <= end - at);
            CHECK(opener_.open(opened++, came.data() + at, length - rgpu::kTag, message.data()));
            use(message[0], message.data() + 1, length - rgpu::kTag - 1);
            at += length;
        }
    }
    // For the next input.
    void renew() {
        static Bytes waste(1 << 16);
        for (const int end : ends)
            while (::recv(end, waste.data(), waste.size(), MSG_DONTWAIT) > 0) continue;
        sealed_ = opened = 0;
    }

    int ends[2];  // of the code under test, and of this
    uint64_t opened = 0;
    static constexpr uint8_t send_key[32] = {1}, receive_key[32] = {2}, data[8] = {3};

   private:
    rgpu::Cipher sealer_, opener_;
    uint64_t sealed_ = 0;
};

inline constexpr size_t kPlaces = 1 << 16;
extern std::array<uint8_t, kPlaces> hit;  // places of the code that this input reached

void one(Input &input);  // of each fuzzer
}  // namespace fuzzing
