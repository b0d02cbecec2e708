"""NVML through nvidia-ml-py: what PyTorch, JAX and monitors ask."""

from common import note, says, skip

try:
    import pynvml as n
except ImportError as error:
    skip(f"pynvml cannot be imported: {error}")

n.nvmlInit()
says("driver", n.nvmlSystemGetDriverVersion())
says("cuda", n.nvmlSystemGetCudaDriverVersion_v2())
note("count", n.nvmlDeviceGetCount())
device = n.nvmlDeviceGetHandleByIndex(0)
says("name", n.nvmlDeviceGetName(device))
says("uuid", n.nvmlDeviceGetUUID(device))
says("index", n.nvmlDeviceGetIndex(device))
says("by_uuid", n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(device))))
says("capability", n.nvmlDeviceGetCudaComputeCapability(device))
says("bus", n.nvmlDeviceGetPciInfo(device).busId)
memory = n.nvmlDeviceGetMemoryInfo(device)
note("total", memory.total)
says("adds_up", memory.free + memory.used <= memory.total and memory.total > 0)
for name in ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetPowerUsage"):
    try:
        note(name, getattr(n, name)(device))
    except n.NVMLError as error:
        note(name, error)
try:
    n.nvmlDeviceGetHandleByIndex(99)
    says("index_99", "no error")
except n.NVMLError as error:
    says("index_99", error)
n.nvmlShutdown()
