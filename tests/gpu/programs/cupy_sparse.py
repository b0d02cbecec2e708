"""Sparse products and solvers."""

import cupy as cp
from common import digest, says
from cupyx.scipy import sparse
from cupyx.scipy.sparse import linalg

dense = cp.random.RandomState(6).randint(-3, 4, (400, 300)).astype(cp.float64)
dense[cp.random.RandomState(7).random_sample((400, 300)) > 0.05] = 0
right = cp.random.RandomState(8).randint(-5, 6, (300, 20)).astype(cp.float64)
for name in ("csr_matrix", "csc_matrix", "coo_matrix"):
    matrix = getattr(sparse, name)(dense)
    says(name, bool(((matrix @ right) == dense @ right).all()))
    digest(name, matrix @ right, matrix.data)
square = sparse.csr_matrix(dense)
digest("product", (square @ square.T).todense())
system = square.T @ square + 50 * sparse.eye(300, format="csr")
answer, code = linalg.cg(system, right[:, 0])
says("cg", (code, bool(cp.allclose(system @ answer, right[:, 0], rtol=1e-3, atol=1e-3))))
