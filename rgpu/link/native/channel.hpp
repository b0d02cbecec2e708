// One data link's frames for code that passes short messages on without the interpreter: the same frames as
// rgpu/link/data/sealing.py makes and opens, by the system's libcrypto. The counters belong to the Python side, which
// hands them over before a call and takes them back after it; so does the memory of what was received and not opened.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

namespace rgpu {

inline constexpr size_t kTag = 16;            // bytes of a frame's tag
inline constexpr size_t kRecords = 16u << 10;  // of a message: records without their long payloads, at most
inline constexpr size_t kChunk = 128u << 10;   // of a message: a part of a long payload, at most
inline constexpr size_t kShort = kRecords + kChunk + 64;  // longest message (type and body) that is handled here
inline constexpr size_t kBuffer = 512u << 10;   // bytes received and not opened, at most
inline constexpr size_t kUnsent = 4u << 20;     // bytes sealed and not taken by the socket, at most

struct Part {
    const void *data;
    size_t size;
};

struct Message {
    uint8_t kind = 0;
    const uint8_t *body = nullptr;
    size_t size = 0;
};

// What both sides hand to each other; mirrored in the library.py of both.
struct ChannelState {
    uint64_t sealed;         // frames sealed so far on this connection
    uint64_t opened;         // frames opened so far
    const uint8_t *pending;  // received and not opened: in, and out
    uint64_t pending_size;
    const uint8_t *unsent;  // out: sealed, and not taken by the socket
    uint64_t unsent_size;
    uint64_t received;  // out: bytes
};

// AES-256-GCM of one direction of one connection.
class Cipher {
   public:
    Cipher() = default;
    ~Cipher();
    Cipher(const Cipher &) = delete;
    Cipher &operator=(const Cipher &) = delete;
    bool start(const uint8_t *key, const uint8_t *associated, size_t size, bool encrypt);  // false: no libcrypto
    bool seal(uint64_t counter, std::initializer_list<Part> parts, uint8_t *out);          // message, then tag
    bool open(uint64_t counter, const uint8_t *frame, size_t message, uint8_t *out);       // false: it does not open

   private:
    bool begin(uint64_t counter);

    void *context_ = nullptr;
    std::vector<uint8_t> associated_;
};

enum class Found { nothing, message, foreign };  // foreign: a frame that is left to the Python side

class Channel {
   public:
    Channel();
    bool start(const uint8_t *send_key, const uint8_t *send_data, size_t send_size, const uint8_t *receive_key,
               const uint8_t *receive_data, size_t receive_size);
    void begin(const ChannelState &state);
    void end(ChannelState &state) const;

    bool receive(int socket);  // takes what is there, without waiting; false: nothing, or the connection ended
    // The next message, valid until receive(); the same one until take(). A long one is opened at `place`, where that is
    // given: `room` bytes, of its type, its body, and perhaps beyond. The bytes there are valid where the result is.
    Found next(Message &message, uint8_t *place = nullptr, size_t room = 0);
    bool whole() const;  // whether next() finds more than nothing
    void take();         // that message was handled

    // Seals a message behind the ones before; flush() sends them. False: no room, or a message that is not short.
    bool put(uint8_t kind, std::initializer_list<Part> parts);
    void flush(int socket);
    bool unsent() const { return sent_ < out_; }
    size_t room() const { return kUnsent - out_; }  // bytes of frames that put() takes before they are sent

   private:
    Cipher sealer_, opener_;
    uint64_t sealed_ = 0, opened_ = 0;
    std::vector<uint8_t> received_, opening_, frames_;
    size_t start_ = 0, end_ = 0;  // of what was received and not opened
    size_t open_ = 0;             // bytes of the frame that is open at opened_at_; 0: none is
    const uint8_t *opened_at_ = nullptr;
    size_t sent_ = 0, out_ = 0;   // in frames_
    uint64_t came_ = 0;           // bytes received since begin()
};

}  // namespace rgpu
