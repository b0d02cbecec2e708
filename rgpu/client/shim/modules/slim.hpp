// The part of a fat binary that a device can use.
//
// A library's fat binary contains machine code for every architecture that it supports, and often PTX besides. The
// driver uses one entry of it: machine code of the device's major and the highest minor that is not above its own;
// without such the PTX for the highest architecture that is not above the device (CUDA C++ Programming Guide,
// "Application Compatibility"). The others need not be sent.
//
// Flags of an entry, as `fatbinary` of CUDA 13.0 writes them for sm_90, sm_90a, sm_100, sm_100a and sm_100f: bit 0
// 64-bit code; bit 20 "a", for exactly this architecture; bit 21 "f", for its family.
// architecture; bit 21 "f", for its family.
#pragma once

#include <string>

#include "fatbin.hpp"

namespace rgpu::module_binary {

// The device that is to run the code, and how.
struct Target {
    int major = 0, minor = 0;
    bool only_ptx = false;   // it executes PTX and no machine code
    bool force_ptx = false;  // the program requires PTX to be compiled (CUDA_FORCE_PTX_JIT)
};

// A fat binary with only those entries of `binary` that the target may use. It always contains the entry that the
// driver would use: unknown entries are kept. Empty where nothing can be left out, and for other than fat binaries.
std::string slim(const Binary& binary, const Target& target);

}  // namespace rgpu::module_binary
