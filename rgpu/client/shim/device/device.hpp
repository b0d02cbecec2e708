// The program's devices: the session's, filtered and ordered by CUDA_VISIBLE_DEVICES.
//
// A CUdevice is the program's number; the wire and Facts::devices use the session's. With CUDA_VISIBLE_DEVICES unset
// they are the same.
#pragma once

#include <cstdint>

#include "core.hpp"

namespace rgpu {

// Opens the session that has the program's device, where this process has none yet (choose_device). Call it before
// anything is published that names a device without a context.
CUresult use_device(CUdevice device);

// session_device(), or -1 for a device of another member of the gang than this process uses.
int own_device(CUdevice device);

// After initialise(): reads CUDA_VISIBLE_DEVICES. CUDA_ERROR_NO_DEVICE when
// nothing is visible, CUDA_ERROR_INVALID_DEVICE when a device is named twice.
CUresult apply_visibility();

// CUDA_VISIBLE_DEVICES alone hides every device, whatever the session has.
bool nothing_visible();

// How many devices the program has; 0 before cuInit succeeded.
int device_count();

// The program's number → index into Facts::devices (and device on the wire); -1 for none.
int session_device(CUdevice device);

// The server's facts of the program's device; nullptr for none.
const DeviceFacts* device_facts(CUdevice device);

// Whether kernels on the program's device `device` reach the memory of `peer`, another device; `atomics`: also with
// atomics.
bool can_access_peer(CUdevice device, CUdevice peer, bool atomics = false);

// The value of a CUdevice_attribute as this library answers it: a refused feature is never reported as supported,
// whatever the server's driver supports. False for a number that is no attribute.
bool device_attribute(const DeviceFacts& device, int attribute, int* value);

// The newest CUDA interface that this library implements, as CUDA_VERSION.
inline constexpr int kSpokenVersion = 13000;

// The answer of cuDriverGetVersion, also before cuInit: the session's, where it is known. A program may call it and
// fork before it calls cuInit, so it opens no session: before cuInit the answer is RGPU_DRIVER_VERSION (set by the
// launcher), without that kSpokenVersion.
int driver_version();

}  // namespace rgpu
