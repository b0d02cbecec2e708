"""Where a worker finds what it needs: the one list that its files' wall and its own root are made from."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from rgpu.server.device import mps

#: Programs and libraries of the system, and where drivers and CUDA put theirs.
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt", "/nix/store", "/gnu/store",
           "/run/opengl-driver")
#: What libraries read of the system's settings: names, never secrets.
_SETTINGS = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.preload", "/etc/localtime",
             "/etc/timezone", "/etc/nsswitch.conf", "/etc/passwd", "/etc/group", "/etc/hosts", "/etc/alternatives",
             "/etc/nvidia", "/etc/nvidia-container-runtime", "/etc/OpenCL", "/etc/glvnd", "/etc/vulkan")
_KERNEL = ("/proc", "/sys")
_PLAIN_NODES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SHARED = ("/dev/shm",)
#: Of the driver's helpers: a socket that keeps the device awake, those of the multi-process service.
_HELPERS = ("/run/nvidia-persistenced", "/var/run/nvidia-persistenced", "/tmp/nvidia-mps")


def device_nodes(folder: Path = Path("/dev")) -> list[str]:
    """Return the nodes of NVIDIA's driver: those of all GPUs, for a worker counts them as its node does."""
    return sorted(str(path) for pattern in ("nvidia*", "nvidia-caps/*", "dxg") for path in folder.glob(pattern))


def worker_places(home: Path, *, devices: Iterable[str], environ: Mapping[str, str], writable: Iterable[Path] = (),
                  driver_cache: bool = True) -> list[tuple[str, str]]:
    """Return (path, "d": names only | "r" | "rx" | "rw") of everything that a worker may reach.

    ``home``: its own folder. ``devices``: specs of the node (``cpu``, ``cuda:0``): one without a GPU has no driver's
    nodes. ``environ``: the worker's. ``writable``: what it shares with others (the cache of modules, a store).
    """
    package = Path(__file__).resolve().parents[3]
    read = [*_SYSTEM, sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix,
            *(str(package / "rgpu"), *_import_paths(package)), *_SETTINGS, *_KERNEL]
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_HOME", "CUDA_PATH", "RGPU_ENGINE_DIR", "RGPU_SHIM_DIR"):
        read += [part for part in environ.get(name, "").split(os.pathsep) if part.startswith("/") and part != "/"]
    write = [str(home), *map(str, writable), *_PLAIN_NODES, *_SHARED]
    if any(device.startswith("cuda") for device in devices):
        write += device_nodes() + list(_HELPERS)
        write += [environ["CUDA_CACHE_PATH"]] if environ.get("CUDA_CACHE_PATH") else []
        if driver_cache and environ.get("HOME"):
            write.append(str(Path(environ["HOME"]) / ".nv"))
    if environ.get(mps.PIPES):
        write.append(environ[mps.PIPES])
    for name in ("RGPU_EFFECTS", "RGPU_FAULT_FILE"):  # what tests watch and break
        if environ.get(name):
            write.append(str(Path(environ[name]).absolute().parent))
    found = {str(package): "d"} | dict.fromkeys(read, "rx") | dict.fromkeys(write, "rw")
    for path, rights in list(found.items()):  # a link and what it leads to, or only one of them would be there
        found.setdefault(os.path.realpath(path), rights)
    return sorted(found.items())


def _import_paths(package: Path) -> list[str]:
    """Where Python finds modules, but for the checkout itself: that may hold pools, keys and whatever else."""
    return [path for path in sys.path if os.path.isabs(path) and Path(path).resolve() != package]
