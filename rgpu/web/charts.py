"""Charts and fill bars as SVG, without scripts and without inline styles: the classes' colours are in style.css."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

WIDTH, HEIGHT = 600.0, 120.0  #: of a chart's area, in its own units
MOST_POINTS = 200


def bar(*parts: tuple[float, str], label: str) -> Markup:
    """Return a bar filled by ``parts``: (share 0 to 1, class of CSS), one over the other. ``label``: in words."""
    rects = Markup("").join(
        Markup('<rect class="{}" x="0" y="{}" width="{:.1f}" height="{}"/>').format(
            kind, 0 if index == 0 else 3, 100 * min(1.0, max(0.0, share)), 10 if index == 0 else 4)
        for index, (share, kind) in enumerate(parts))
    return Markup('<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{}">'
                  '<title>{}</title><rect class="track" x="0" y="0" width="100" height="10"/>{}</svg>').format(
        label, label, rects)


def line(points: Sequence[tuple[float, float]], name: str, text: Callable[[float], str], until: float, span: float,
         top: float = 0.0) -> Markup:
    """Return a chart of (time, value) over the ``span`` s that end at ``until``. ``top``: the least top of its scale.

    ``text(value)``: how a value is written.
    """
    step = max(1, len(points) // MOST_POINTS)
    shown = [point for index, point in enumerate(points) if index % step == 0 or index == len(points) - 1]
    highest = max([top, *(value for _, value in points)])
    scale = highest if highest > 0 else 1.0
    xy = [(WIDTH * (1 - (until - when) / span), HEIGHT * (1 - value / scale)) for when, value in shown
          if until - when <= span]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in xy)
    now = text(points[-1][1]) if points else "nothing yet"
    area = Markup('<polygon class="area" points="{:.1f},{} {} {:.1f},{}"/>').format(
        xy[0][0], HEIGHT, path, xy[-1][0], HEIGHT) if len(xy) > 1 else Markup("")
    drawn = Markup('<polyline class="line" points="{}"/>').format(path) if len(xy) > 1 else Markup("")
    return Markup(
        '<figure class="chart"><figcaption><b>{}</b> <span>{}</span><span class="dim">top {}</span></figcaption>'
        '<svg viewBox="0 0 600 120" preserveAspectRatio="none" role="img" aria-label="{}: {}">'
        '<line class="grid" x1="0" y1="0" x2="600" y2="0"/><line class="grid" x1="0" y1="60" x2="600" y2="60"/>'
        '<line class="grid" x1="0" y1="120" x2="600" y2="120"/>{}{}</svg>'
        '<div class="axis dim"><span>{} ago</span><span>now</span></div></figure>').format(
        name, now, text(highest) if points else "", name, now, area, drawn, _minutes(span))


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min"
