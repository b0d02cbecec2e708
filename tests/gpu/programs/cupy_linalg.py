"""svd, solve, qr, eigh, matrix products."""

import cupy as cp
from common import digest, says, value

a = cp.random.RandomState(3).standard_normal((200, 200))
b = cp.random.RandomState(4).standard_normal((200, 5))
u, s, v = cp.linalg.svd(a)
says("svd", bool(cp.allclose((u * s) @ v, a)))
value("singular", s.sum(), 1e-9)
says("solve", bool(cp.allclose(a @ cp.linalg.solve(a, b), b)))
q, r = cp.linalg.qr(a)
says("qr", bool(cp.allclose(q @ r, a)))
w, vectors = cp.linalg.eigh(a @ a.T)
value("eigh", w.sum(), 1e-9)
says("cholesky", bool(cp.allclose(cp.linalg.cholesky(a @ a.T + 200 * cp.eye(200)).sum(), cp.linalg.cholesky(
    a @ a.T + 200 * cp.eye(200)).sum())))
whole = cp.random.RandomState(5).randint(-9, 9, (512, 512)).astype(cp.float32)
digest("exact-product", whole @ whole, cp.einsum("ij,kj->ik", whole, whole))
value("half", float(cp.abs(whole.astype(cp.float16) @ whole.astype(cp.float16)).astype(cp.float64).sum()), 1e-2)
