"""The profiling library: CUPTI's activity API, answered by the driver library."""
