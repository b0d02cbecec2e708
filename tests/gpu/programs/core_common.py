"""cuda.core for the programs of the suite: the module, and copies between arrays and buffers."""

from typing import Any

from common import skip

try:
    try:
        import cuda.core as core

        core.Program  # noqa: B018 - before 0.5 all of it was experimental
    except AttributeError:
        import cuda.core.experimental as core
except ImportError as error:
    skip(f"cuda.core cannot be imported: {error}")

from cuda.bindings import driver  # noqa: E402


def check(result: tuple[Any, ...]) -> Any:
    """The values of a driver call; its error ends the program."""
    error, *values = result
    if int(error):
        raise SystemExit(f"driver error {error!r}")
    return values[0] if len(values) == 1 else tuple(values)


def array_at(buffer: Any, array: Any, stream: Any, back: bool = False) -> Any:
    """Copies an array to a buffer, or with ``back`` a buffer to an array, and waits."""
    if back:
        check(driver.cuMemcpyDtoHAsync(array.ctypes.data, int(buffer.handle), array.nbytes, int(stream.handle)))
    else:
        check(driver.cuMemcpyHtoDAsync(int(buffer.handle), array.ctypes.data, array.nbytes, int(stream.handle)))
    check(driver.cuStreamSynchronize(int(stream.handle)))
    return array
