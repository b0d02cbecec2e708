"""The fixed address ranges of a session (docs/developers/devices.md, "Address ranges")."""

DEVICE_BASE = 0x2000_0000_0000
DEVICE_STRIDE = 0x0800_0000_0000  #: 8 TiB for each device
#: The ranges of more would reach to where position-independent programs are loaded (0x55…).
SESSION_DEVICES = 6
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


def device_base(number: int) -> int:
    """Where the range of the session's device ``number`` begins."""
    return DEVICE_BASE + number * DEVICE_STRIDE


def device_of(address: int) -> int | None:
    """The session's number of the device in whose range the address is; None: below or beyond all of them."""
    number = (address - DEVICE_BASE) // DEVICE_STRIDE
    return number if 0 <= number < SESSION_DEVICES else None
