"""Import and device properties."""

from common import digest, note, says, torch_setup

torch = torch_setup()
says("available", torch.cuda.is_available())
says("count", torch.cuda.device_count())
p = torch.cuda.get_device_properties(0)
for name in ("name", "major", "minor", "multi_processor_count", "max_threads_per_multi_processor", "warp_size",
             "regs_per_multiprocessor", "shared_memory_per_block", "shared_memory_per_block_optin",
             "shared_memory_per_multiprocessor", "L2_cache_size", "uuid", "is_integrated", "is_multi_gpu_board"):
    says(name, getattr(p, name, "none"))
note("total_memory", p.total_memory)
note("mem_get_info", torch.cuda.mem_get_info())
says("capability", torch.cuda.get_device_capability())
says("arches", " ".join(torch.cuda.get_arch_list()))
says("bf16", torch.cuda.is_bf16_supported())
says("cudnn", torch.backends.cudnn.version())
says("current", torch.cuda.current_device())
x = torch.arange(1000, device="cuda")
says("device_of", x.device)
digest("first", x * 2 + 1)
before = torch.cuda.memory_allocated()
y = torch.empty(1 << 20, device="cuda", dtype=torch.uint8)
says("allocated", torch.cuda.memory_allocated() - before)
