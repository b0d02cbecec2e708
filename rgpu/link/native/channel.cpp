#include "channel.hpp"

#include <dlfcn.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

namespace rgpu {
namespace {

constexpr int kGetTag = 0x10, kSetTag = 0x11;  // EVP_CTRL_AEAD_GET_TAG, EVP_CTRL_AEAD_SET_TAG (openssl/evp.h)
constexpr size_t kLength = 4;                  // bytes of a frame's length field
constexpr size_t kFrame = kLength + kShort + kTag;
constexpr size_t kReceived = 256u << 10;       // bytes received by one call: opening them begins meanwhile
constexpr size_t kInPlace = 4096;              // bytes from which on a message is opened where its body is wanted

// The part of OpenSSL's EVP interface that is used here, which 1.1 and 3 have alike.
struct Crypto {
    void *(*context_new)();
    void (*context_free)(void *);
    const void *(*aes_256_gcm)();
    int (*init)(void *, const void *, void *, const uint8_t *, const uint8_t *, int);
    int (*update)(void *, uint8_t *, int *, const uint8_t *, int);
    int (*finish)(void *, uint8_t *, int *);
    int (*control)(void *, int, int, void *);

    bool find(void *library) {
        const auto get = [library](auto &function, const char *name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
            return function != nullptr;
        };
        return get(context_new, "EVP_CIPHER_CTX_new") && get(context_free, "EVP_CIPHER_CTX_free") &&
               get(aes_256_gcm, "EVP_aes_256_gcm") && get(init, "EVP_CipherInit_ex") &&
               get(update, "EVP_CipherUpdate") && get(finish, "EVP_CipherFinal_ex") &&
               get(control, "EVP_CIPHER_CTX_ctrl");
    }
};

// Null where the system has no libcrypto: then the Python side does all of it.
const Crypto *crypto() {
    static Crypto functions;
    static const bool found = [] {
        for (const char *name : {"libcrypto.so.3", "libcrypto.so.1.1"})
            if (void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL); library && functions.find(library)) return true;
        return false;
    }();
    return found ? &functions : nullptr;
}

}  // namespace

Cipher::~Cipher() {
    if (context_) crypto()->context_free(context_);
}

bool Cipher::start(const uint8_t *key, const uint8_t *associated, size_t size, bool encrypt) {
    const Crypto *c = crypto();
    if (!c || !(context_ = c->context_new())) return false;
    associated_.assign(associated, associated + size);
    return c->init(context_, c->aes_256_gcm(), nullptr, key, nullptr, encrypt) == 1;
}

bool Cipher::begin(uint64_t counter) {
    uint8_t nonce[12] = {};
    std::memcpy(nonce + 4, &counter, sizeof counter);  // <IQ: zero, then the counter
    int size = 0;
    return crypto()->init(context_, nullptr, nullptr, nullptr, nonce, -1) == 1 &&
           crypto()->update(context_, nullptr, &size, associated_.data(), static_cast<int>(associated_.size())) == 1;
}

bool Cipher::seal(uint64_t counter, std::initializer_list<Part> parts, uint8_t *out) {
    if (!begin(counter)) return false;
    int size = 0;
    for (const Part &part : parts) {
        if (!part.size) continue;
        if (crypto()->update(context_, out, &size, static_cast<const uint8_t *>(part.data),
                             static_cast<int>(part.size)) != 1)
            return false;
        out += size;
    }
    return crypto()->finish(context_, out, &size) == 1 &&
           crypto()->control(context_, kGetTag, static_cast<int>(kTag), out) == 1;
}

bool Cipher::open(uint64_t counter, const uint8_t *frame, size_t message, uint8_t *out) {
    int size = 0;
    return begin(counter) &&
           crypto()->control(context_, kSetTag, static_cast<int>(kTag), const_cast<uint8_t *>(frame) + message) == 1 &&
           crypto()->update(context_, out, &size, frame, static_cast<int>(message)) == 1 &&
           crypto()->finish(context_, out + size, &size) == 1;
}

Channel::Channel() : received_(kBuffer), opening_(kShort + kTag), frames_(kBuffer / 4) {}

bool Channel::start(const uint8_t *send_key, const uint8_t *send_data, size_t send_size, const uint8_t *receive_key,
                    const uint8_t *receive_data, size_t receive_size) {
    return sealer_.start(send_key, send_data, send_size, true) &&
           opener_.start(receive_key, receive_data, receive_size, false);
}

void Channel::begin(const ChannelState &state) {
    sealed_ = state.sealed;
    opened_ = state.opened;
    start_ = open_ = sent_ = out_ = 0;
    came_ = 0;
    end_ = std::min<size_t>(state.pending_size, received_.size());
    if (end_) std::memcpy(received_.data(), state.pending, end_);
}

void Channel::end(ChannelState &state) const {
    state.sealed = sealed_;
    state.opened = opened_;
    state.pending = received_.data() + start_;
    state.pending_size = end_ - start_;
    state.unsent = frames_.data() + sent_;
    state.unsent_size = out_ - sent_;
    state.received = came_;
}

bool Channel::receive(int socket) {
    if (start_ == end_) {
        start_ = end_ = 0;
    } else if (received_.size() - end_ < kFrame) {
        std::memmove(received_.data(), received_.data() + start_, end_ - start_);
        end_ -= start_;
        start_ = 0;
    }
    open_ = 0;
    const size_t room = std::min(kReceived, received_.size() - end_);
    if (!room) return false;
    const ssize_t count = ::recv(socket, received_.data() + end_, room, MSG_DONTWAIT);
    if (count <= 0) return false;  // its end is found by the Python side, which receives again
    end_ += static_cast<size_t>(count);
    came_ += static_cast<uint64_t>(count);
    return true;
}

Found Channel::next(Message &message, uint8_t *place, size_t room) {
    if (!whole()) return Found::nothing;
    uint32_t length = 0;
    std::memcpy(&length, received_.data() + start_, kLength);
    if (length <= kTag || length > kShort + kTag) return Found::foreign;
    if (!open_) {
        const size_t size = length - kTag;
        uint8_t *to = place && size >= kInPlace && size <= room ? place : opening_.data();
        // A frame that does not open is left as it is: the Python side opens it again, and raises.
        if (!opener_.open(opened_, received_.data() + start_ + kLength, size, to)) return Found::foreign;
        open_ = kLength + length;
        opened_at_ = to;
    }
    message = {opened_at_[0], opened_at_ + 1, length - kTag - 1};
    return Found::message;
}

bool Channel::whole() const {
    uint32_t length = 0;
    if (end_ - start_ < kLength) return false;
    std::memcpy(&length, received_.data() + start_, kLength);
    return length <= kTag || length > kShort + kTag || end_ - start_ >= kLength + length;
}

void Channel::take() {
    start_ += open_;
    ++opened_;
    open_ = 0;
}

bool Channel::put(uint8_t kind, std::initializer_list<Part> parts) {
    size_t size = 1;
    for (const Part &part : parts) size += part.size;
    const size_t end = out_ + kLength + size + kTag;
    if (size > kShort || end > kUnsent || parts.size() > 4) return false;
    if (frames_.size() < end) frames_.resize(std::min(kUnsent, 2 * end));
    uint8_t *frame = frames_.data() + out_;
    const auto length = static_cast<uint32_t>(size + kTag);
    std::memcpy(frame, &length, kLength);
    const Part none{nullptr, 0}, *at = parts.begin();
    const auto part = [&](size_t index) { return index < parts.size() ? at[index] : none; };
    if (!sealer_.seal(sealed_, {Part{&kind, 1}, part(0), part(1), part(2), part(3)}, frame + kLength)) return false;
    ++sealed_;
    out_ += kLength + length;
    return true;
}

void Channel::flush(int socket) {
    while (sent_ < out_) {
        const ssize_t count = ::send(socket, frames_.data() + sent_, out_ - sent_, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count <= 0) return;  // full, or broken: the Python side sends the rest, and finds out
        sent_ += static_cast<size_t>(count);
    }
    sent_ = out_ = 0;
}

}  // namespace rgpu
