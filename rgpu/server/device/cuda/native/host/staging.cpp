#include "staging.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace rgpu {

namespace {

// Memory that other processes may map read-only, and not change; null where that is not available.
uint8_t *shareable(size_t size, int &fd) {
    fd = memfd_create("rgpu-answers", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return nullptr;
    void *memory = MAP_FAILED;
    if (!ftruncate(fd, static_cast<off_t>(size)) && !posix_fallocate(fd, 0, static_cast<off_t>(size)))
        memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (memory != MAP_FAILED &&
        !fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | F_SEAL_FUTURE_WRITE))
        return static_cast<uint8_t *>(memory);
    if (memory != MAP_FAILED) munmap(memory, size);
    close(fd);
    fd = -1;
    return nullptr;
}

}  // namespace

CUresult Staging::open_arena(size_t size) {
    size = (size + 4095) & ~size_t{4095};
    arena_size_ = size;
    arena_ = shareable(size, area_);
    if (arena_) {
        if (!driver_.host_register(arena_, size, kRegisterPortable)) return kSuccess;
        munmap(arena_, size);
        ::close(area_);
        area_ = -1;
    }
    void *memory = nullptr;
    const CUresult result = driver_.host_alloc(&memory, size, kHostPortable);
    arena_ = static_cast<uint8_t *>(memory);
    return result;
}

CUresult Staging::open(size_t ring, size_t arena) {
    ring = std::max(ring, size_t{16} << 20);
    void *memory = nullptr;
    if (CUresult result = driver_.host_alloc(&memory, ring, kHostPortable)) return result;
    base_ = static_cast<uint8_t *>(memory);
    if (CUresult result = open_arena(arena)) return result;
    holes_[0] = arena_size_;

    // A sixteenth for each of the small sizes, a quarter for large slots, the rest for frames.
    uint8_t *at = base_;
    const size_t shares[3] = {ring / 16, ring / 16, ring / 4};
    for (int grade = 0; grade < 3; ++grade) {
        const size_t count = shares[grade] / kSlotSizes[grade];
        for (size_t i = 0; i < count; ++i, at += kSlotSizes[grade]) free_[grade].push_back({at, kSlotSizes[grade], grade});
    }
    frames_begin_ = at;
    frames_.resize(static_cast<size_t>(base_ + ring - at) / kFrameSize);
    for (Frame &frame : frames_) {
        frame.data = at;
        at += kFrameSize;
        free_frames_.push_back(&frame);
    }
    return kSuccess;
}

void Staging::close() {
    for (auto &[size, data] : kept_) driver_.host_free(data);
    kept_.clear();
    if (base_) driver_.host_free(base_);
    if (arena_ && area_ >= 0) {
        driver_.host_unregister(arena_);
        munmap(arena_, arena_size_);
        ::close(area_);
    } else if (arena_) {
        driver_.host_free(arena_);
    }
    base_ = arena_ = nullptr;
    area_ = -1;
}

bool Staging::take_slot(size_t wanted, Slot &slot) {
    int grade = wanted <= kSlotSizes[0] ? 0 : wanted <= kSlotSizes[1] ? 1 : 2;
    for (; grade < 3; ++grade)
        if (!free_[grade].empty()) {
            slot = free_[grade].back();
            free_[grade].pop_back();
            return true;
        }
    return false;
}

void Staging::give_slot(const Slot &slot) { free_[slot.grade].push_back(slot); }

Frame *Staging::take_frame() {
    if (free_frames_.empty()) return nullptr;
    Frame *frame = free_frames_.back();
    free_frames_.pop_back();
    frame->references = 1;
    return frame;
}

void Staging::give_frame(Frame *frame) {
    if (--frame->references == 0) free_frames_.push_back(frame);
}

Frame *Staging::frame_of(const uint8_t *data) {
    if (data < frames_begin_ || data >= frames_begin_ + frames_.size() * kFrameSize) return nullptr;
    return &frames_[static_cast<size_t>(data - frames_begin_) / kFrameSize];
}

CUresult Staging::take_buffer(size_t size, HostBuffer &buffer) {
    size = (size + 4095) & ~size_t{4095};
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
        if (hole->second < size) continue;
        const auto [offset, length] = *hole;
        holes_.erase(hole);
        if (length > size) holes_[offset + size] = length - size;
        buffer = {arena_ + offset, size, false};
        return kSuccess;
    }
    size = std::bit_ceil(size);
    if (auto found = kept_.find(size); found != kept_.end()) {
        buffer = {found->second, size, true};
        kept_.erase(found);
        kept_bytes_ -= size;
        return kSuccess;
    }
    void *memory = nullptr;
    if (CUresult result = driver_.host_alloc(&memory, size, kHostPortable)) return result;
    buffer = {static_cast<uint8_t *>(memory), size, true};
    return kSuccess;
}

void Staging::give_buffer(const HostBuffer &buffer) {
    if (!buffer.data) return;
    if (buffer.own) {
        if (kept_bytes_ + buffer.size > kKept) {
            driver_.host_free(buffer.data);
        } else {
            kept_.emplace(buffer.size, buffer.data);
            kept_bytes_ += buffer.size;
        }
        return;
    }
    auto offset = static_cast<size_t>(buffer.data - arena_);
    size_t size = buffer.size;
    auto next = holes_.lower_bound(offset);
    if (next != holes_.end() && next->first == offset + size) {
        size += next->second;
        next = holes_.erase(next);
    }
    if (next != holes_.begin()) {
        auto before = std::prev(next);
        if (before->first + before->second == offset) {
            offset = before->first;
            size += before->second;
            holes_.erase(before);
        }
    }
    holes_[offset] = size;
}

}  // namespace rgpu
