"""Whether compressing pages pays: one decision from three measured values, with its reason. Pure.

A lane of a page stream handles a page in two steps: compress it (or not), then
carry it (seal, send, wait for buffer space). With b bytes, a compressor of
speed c that leaves the share r, and a lane that carries v bytes a second, a page
costs

    raw:         b / v
    compressed:  b / c + r · b / v

so compressing pays where r + v / c < 1. Lanes work side by side, each with its
share of the link, so v is what *this* lane carries, not the link's speed.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Share of the time that compressing must save before it is begun. It is ended only when it costs time: hysteresis.
GAIN = 0.10
WORTHLESS = 0.95  #: the compressed share from which on pages count as incompressible


@dataclass(frozen=True, slots=True)
class Probe:
    """Measurement of a sample of pages."""

    share: float  #: compressed bytes for each raw byte
    speed: float  #: raw bytes that one thread compresses in a second


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a page's chunk is stored compressed, and why."""

    compress: bool
    reason: str


def decide(probe: Probe | None, carried: float | None, compressing: bool = False) -> Decision:
    """Decide whether a lane compresses. ``carried``: bytes a second that the lane carries now, None while unknown;
    ``compressing``: whether it compresses now.
    """
    if probe is None or not carried or carried <= 0 or probe.speed <= 0:
        return Decision(False, "raw: the link's speed or the pages' nature is not known yet")
    if probe.share >= WORTHLESS:
        return Decision(False, f"raw: the pages hardly become smaller (to {probe.share:.0%})")
    cost = probe.share + carried / probe.speed
    words = (f"{carried / 1e9:.2f} GB/s carried, {probe.speed / 1e9:.2f} GB/s compressed to {probe.share:.0%}: "
             f"{cost:.2f} of the time of raw pages")
    pays = cost < (1.0 if compressing else 1.0 - GAIN)
    return Decision(pays, ("lz4: " if pays else "raw: ") + words)


class Smoothed:
    """A speed as an exponential mean over the last few measurements. Not thread-safe."""

    WEIGHT = 0.25

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, amount: float, seconds: float) -> None:
        """Add a measurement: ``amount`` took ``seconds``. It is ignored if either is not positive."""
        if seconds > 0 and amount > 0:
            now = amount / seconds
            self.value = now if self.value is None else self.value + self.WEIGHT * (now - self.value)
