"""cuda.core: a graph built by its builder, with a fork and a join, launched several times."""

import numpy as np
from common import digest, says, skip
from core_common import array_at, core

device = core.Device()
device.set_current()
if not hasattr(device, "create_graph_builder"):
    skip("this cuda.core has no graph builder")
SOURCE = r"""
extern "C" __global__ void triple(long long* x) { x[blockIdx.x * blockDim.x + threadIdx.x] *= 3; }
extern "C" __global__ void grow(long long* x) { x[blockIdx.x * blockDim.x + threadIdx.x] += 7; }
extern "C" __global__ void join(long long* x, const long long* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x; x[i] += y[i];
}
"""
options = core.ProgramOptions(arch=f"sm_{''.join(map(str, device.compute_capability))}")
module = core.Program(SOURCE, code_type="c++", options=options).compile("cubin")
triple, grow, join = (module.get_kernel(name) for name in ("triple", "grow", "join"))
stream = device.create_stream()
x, y = (device.allocate(4096 * 8, stream=stream) for _ in range(2))
array_at(x, np.arange(4096), stream)
array_at(y, np.arange(4096) * 5, stream)
config = core.LaunchConfig(grid=16, block=256)
builder = device.create_graph_builder().begin_building()
core.launch(builder, config, triple, x)
left, right = builder.split(2)
core.launch(left, config, grow, x)
core.launch(right, config, triple, y)
builder = type(left).join(left, right)
core.launch(builder, config, join, x, y)
graph = builder.end_building().complete()
graph.upload(stream)
digest("before", array_at(x, np.empty(4096, np.int64), stream, back=True))
for _ in range(5):
    graph.launch(stream)
stream.sync()
digest("after", array_at(x, np.empty(4096, np.int64), stream, back=True))
says("built", True)
