// The program's devices: the session's, filtered and ordered by CUDA_VISIBLE_DEVICES.
//
// A CUdevice is the program's number; the wire and Facts::devices count the
// session's. With CUDA_VISIBLE_DEVICES unset they are the same.
#pragma once

#include <cstdint>

#include "core.hpp"

namespace rgpu {

// Makes the session that has the program's device, where this process has none yet (choose_device). Before anything is
// published that names a device without a context.
CUresult use_device(CUdevice device);

// session_device(), or -1 for a device of another member of the gang than this process uses.
int own_device(CUdevice device);

// After initialise(): reads CUDA_VISIBLE_DEVICES. CUDA_ERROR_NO_DEVICE when
// nothing is visible, CUDA_ERROR_INVALID_DEVICE when a device is named twice.
CUresult apply_visibility();

// CUDA_VISIBLE_DEVICES alone says that there is no device, whatever the session has.
bool nothing_visible();

// How many devices the program has; 0 before cuInit succeeded.
int device_count();

// The program's number → index into Facts::devices (and device on the wire); -1 for none.
int session_device(CUdevice device);

// What the server said of the program's device; nullptr for none.
const DeviceFacts* device_facts(CUdevice device);

// Whether kernels on the program's device `device` reach the memory of `peer`, another one; `atomics`: so, too.
bool can_access_peer(CUdevice device, CUdevice peer, bool atomics = false);

// A CUdevice_attribute as this library answers it: what it refuses is never
// claimed, whatever the server's driver supports. False for no attribute.
bool device_attribute(const DeviceFacts& device, int attribute, int* value);

// The newest CUDA interface that this library speaks, as CUDA_VERSION.
inline constexpr int kSpokenVersion = 13000;

// cuDriverGetVersion's answer, also before cuInit: the session's, where it is
// known. A program may ask for it and fork before it calls cuInit, so asking
// opens no session: before cuInit it is RGPU_DRIVER_VERSION (set by the
// launcher), without that kSpokenVersion.
int driver_version();

}  // namespace rgpu
