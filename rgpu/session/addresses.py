"""The fixed address ranges of a session (docs/developers/devices.md, "Address ranges")."""

DEVICE_BASE = 0x2000_0000_0000
DEVICE_STRIDE = 0x0800_0000_0000  #: 8 TiB for each device
#: More ranges would overlap the addresses at which position-independent programs are loaded (0x55…).
SESSION_DEVICES = 6
ALLOCATION_SIZE = 0x0700_0000_0000  #: the 7 TiB of a device's range that the allocator uses
GLOBALS_OFFSET = ALLOCATION_SIZE  #: module globals of the cpu device: the last 1 TiB
GLOBALS_SIZE = DEVICE_STRIDE - ALLOCATION_SIZE
PINNED_BASE = 0x1800_0000_0000
PINNED_SIZE = 0x0100_0000_0000  #: 1 TiB
#: First address of pinned memory that the shim gives out. Two adjacent 32-bit parameters can look like an address
#: (high << 32 | low): 0x1800 is 6144, a common layer size, and a kernel with such parameters would be taken to use
#: pinned memory.
PINNED_FIRST = 0x1853_9E37_0000
GRANULE = 2 * 1024 * 1024
ALIGNMENT = 512
PAGE = 64 * 1024


def device_base(number: int) -> int:
    """Return the address at which the range of the session's device ``number`` begins."""
    return DEVICE_BASE + number * DEVICE_STRIDE


def device_of(address: int) -> int | None:
    """Return the session's number of the device in whose range the address is; None: in no device's range."""
    number = (address - DEVICE_BASE) // DEVICE_STRIDE
    return number if 0 <= number < SESSION_DEVICES else None
