// NVIDIA's CUPTI in this process: when the GPU worked on kernels, copies and memsets, by the driver call that launched
// them. It is found at run time, and costs nothing until it is asked to record.
//
// Source: NVIDIA's "CUPTI" reference, cupti_activity.h and cupti_callbacks.h of 12.4 to 13.0 (layouts: see
// rgpu/client/cupti/records.hpp); seen on an H100 with 13.0: an enabled callback is told a call's correlation id when
// the call begins, and records of a context that was made before CUPTI was loaded have the same ids.
#pragma once

#include <cstdint>
#include <string>

namespace rgpu::activity {

// Opens the library at that path, once in a process; returns an empty string, or why not.
std::string open(const char *path);
// Begins or ends to record. Returns CUPTI's result, 0 for success.
int record(bool on);
// Fetches the records of all complete work, unless that was done 5 ms ago or another thread does it. Any thread may.
void collect();
// Gives and forgets when a call's work began and ended, ns of CLOCK_MONOTONIC; false while it is not known.
// `complete`: when the work was seen to be complete: what was collected before may be only a part of it.
bool take(uint32_t correlation, uint64_t complete, uint64_t *start, uint64_t *end);
// Correlation id of the driver call that this thread made last while recording; 0: none since it was asked for.
uint32_t last_call();

}  // namespace rgpu::activity
