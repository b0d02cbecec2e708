// Memory of a process on this host, mapped here read-only and pinned: the device reads payloads in place.
//
// The driver may wait for the device when memory is pinned or unpinned, and the device may wait for a later call
// (SEMANTICS 19): so neither is done unless nothing is under way, by the only thread that could submit work.
#include "engine.hpp"

namespace rgpu {

int Engine::pin(const uint8_t *data, size_t size) {
    use();
    {
        std::lock_guard lock(mutex_);
        collect();
        if (!idle_locked() || inflow_.open) return -1;
    }
    if (driver_.host_register(const_cast<uint8_t *>(data), size, kRegisterPortable | kRegisterReadOnly)) return 0;
    windows_[data] = size;
    return 1;
}

bool Engine::unpin(const uint8_t *data) {
    use();
    {
        std::lock_guard lock(mutex_);
        collect();
        if (!idle_locked() || inflow_.open) return false;
    }
    if (windows_.erase(data)) driver_.host_unregister(const_cast<uint8_t *>(data));
    return true;
}

bool Engine::pinned(const uint8_t *data, size_t size) const {
    auto found = windows_.upper_bound(data);
    if (found == windows_.begin()) return false;
    --found;
    const auto offset = static_cast<size_t>(data - found->first);
    return offset <= found->second && size <= found->second - offset;
}

}  // namespace rgpu
