// Pinned host memory, allocated and touched once at start: slots and frames for data to the device, an arena for data
// from it.
//
// Slots have three sizes, so that a small copy does not hold a megabyte while it waits behind a kernel. A frame is a
// buffer into which the receiver decrypts a message; bulk data is copied to the device straight from it. The arena
// holds the payloads of answers until the program has them; a payload that does not fit is pinned on its own and kept
// for reuse. The arena is a memfd where available, so that a program on this host reads answers from it.
//
// Not locked: the engine calls it under its mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "driver.hpp"

namespace rgpu {

inline constexpr size_t kFrameSize = (4u << 20) + 4096;  // room for the longest message of a data link
inline constexpr size_t kSlotSizes[3] = {4096, 65536, 1u << 20};

struct Slot {
    uint8_t *data = nullptr;
    size_t size = 0;
    int grade = -1;
};

struct Frame {
    uint8_t *data = nullptr;
    int references = 0;
};

struct HostBuffer {
    uint8_t *data = nullptr;
    size_t size = 0;
    bool own = false;  // pinned on its own, not part of the arena
};

class Staging {
   public:
    explicit Staging(Driver &driver) : driver_(driver) {}

    // `ring` bytes for slots and frames (at least 16 MiB), `arena` bytes for answers.
    CUresult open(size_t ring, size_t arena);
    void close();

    bool take_slot(size_t wanted, Slot &slot);  // a smaller one than wanted if that is larger than the largest
    void give_slot(const Slot &slot);
    size_t long_slots() const { return free_[2].size(); }  // that are free
    Frame *take_frame();
    void hold(Frame *frame) { ++frame->references; }
    void give_frame(Frame *frame);
    Frame *frame_of(const uint8_t *data);  // the frame that holds this byte, or null

    // The arena, as memory that another process may map: a memfd, or -1 if it is none.
    int area(const uint8_t *&data, size_t &size) const {
        data = arena_;
        size = arena_size_;
        return area_;
    }

    CUresult take_buffer(size_t size, HostBuffer &buffer);
    void give_buffer(const HostBuffer &buffer);

   private:
    static constexpr size_t kKept = 1ull << 30;  // bytes of separately pinned buffers that are kept for reuse

    Driver &driver_;
    uint8_t *base_ = nullptr;
    uint8_t *arena_ = nullptr;
    size_t arena_size_ = 0;
    int area_ = -1;
    CUresult open_arena(size_t size);
    std::vector<Slot> free_[3];
    std::vector<Frame> frames_;
    std::vector<Frame *> free_frames_;
    uint8_t *frames_begin_ = nullptr;
    std::map<size_t, size_t> holes_;  // arena: offset → size
    std::multimap<size_t, uint8_t *> kept_;
    size_t kept_bytes_ = 0;
};

}  // namespace rgpu
