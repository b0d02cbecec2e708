"""When a GPU worked on calls that a profiler has timed: by timing events, and by NVIDIA's CUPTI where a node has it.
It knows nothing of profilers, answers and records.
"""
