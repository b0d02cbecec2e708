"""More memory than there is: OutOfMemoryError, and the program goes on.

Without ``--quota`` it limits itself, so that a native run leaves the GPU to others.
"""

import sys

from common import digest, note, says, torch_setup

torch = torch_setup(14)
if "--quota" not in sys.argv:
    torch.cuda.set_per_process_memory_fraction(16 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
total = torch.cuda.get_device_properties(0).total_memory
note("total", total)
x = torch.arange(1 << 20, device="cuda")
for attempt in range(3):
    try:
        torch.empty(total + (1 << 30), dtype=torch.uint8, device="cuda")
        says(f"too_much-{attempt}", "no error")
    except torch.cuda.OutOfMemoryError as error:
        says(f"too_much-{attempt}", type(error).__name__)
        says(f"begins-{attempt}", str(error).split(".")[0])
held = []
try:
    while True:
        held.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError:
    says("filled", len(held) > 2)
    note("held_gib", len(held))
digest("goes_on", x * 3)
del held
torch.cuda.empty_cache()
y = torch.full((1 << 28,), 7, dtype=torch.uint8, device="cuda")
says("after", int(y[::4096].sum().item()))
free, whole = torch.cuda.mem_get_info()
says("free_again", free > 1 << 30)
