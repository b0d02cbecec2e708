"""Sums, scans, sorts, argmax, histograms; with integers, so that sums are exact."""

import cupy as cp
from common import digest

x = cp.random.RandomState(1).randint(-1000, 1000, (700, 901)).astype(cp.int64)
digest("sums", x.sum(), x.sum(0), x.sum(1), x.cumsum(), x.prod(0))
digest("extremes", x.max(1), x.argmin(0), x.any(0), cp.median(x, axis=0))
digest("sorted", cp.sort(x, axis=1), cp.argsort(x[0], kind="stable"), cp.unique(x))
digest("counted", cp.bincount(x.ravel() + 1000), cp.histogram(x, bins=50)[0])
digest("searched", cp.searchsorted(cp.arange(-1000, 1000, 3), x[0]))
norm = cp.ReductionKernel("int64 a", "int64 b", "a * a", "a + b", "b = a", "0", "squares")
digest("kernel", norm(x), norm(x, axis=1))
digest("floats", (x / 4).sum(0))
