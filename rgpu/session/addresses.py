"""The fixed address ranges of a session (docs/architecture.md, "Address ranges")."""

DEVICE_BASE = 0x2000_0000_0000
DEVICE_STRIDE = 0x0800_0000_0000  #: 8 TiB for each device
ALLOCATION_SIZE = 0x0700_0000_0000  #: the allocator's 7 TiB of it
GLOBALS_OFFSET = ALLOCATION_SIZE  #: module globals of the cpu device: the last 1 TiB
GLOBALS_SIZE = DEVICE_STRIDE - ALLOCATION_SIZE
PINNED_BASE = 0x1800_0000_0000
PINNED_SIZE = 0x0100_0000_0000  #: 1 TiB
#: Where the shim begins to give out pinned memory. Two integers side by side look like an address (high << 32 | low):
#: 0x1800 is 6144, a size that networks have, and a kernel with such parameters was taken to use pinned memory.
PINNED_FIRST = 0x1853_9E37_0000
GRANULE = 2 * 1024 * 1024
ALIGNMENT = 512
PAGE = 64 * 1024


def device_base(ordinal: int) -> int:
    return DEVICE_BASE + ordinal * DEVICE_STRIDE
