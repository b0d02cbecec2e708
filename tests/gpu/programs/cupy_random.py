"""Random generators, old and new."""

import cupy as cp
from common import digest

state = cp.random.RandomState(9)
digest("old", state.random_sample(10001), state.standard_normal(1001), state.randint(0, 1 << 30, 777),
       state.permutation(1000))
cp.random.seed(5)
digest("global", cp.random.rand(3, 1000), cp.random.choice(100, 50))
new = cp.random.default_rng(11)
digest("new", new.random(5001), new.standard_normal(999), new.integers(0, 1 << 20, 500), new.exponential(size=300))
for kind in (cp.random.Philox4x3210, cp.random.MRG32k3a):
    digest(kind.__name__, cp.random.Generator(kind(3)).random(2000))
