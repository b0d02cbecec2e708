"""cuSOLVER and MAGMA: decompositions and solvers; compared by value, and checked by what they must satisfy."""

from common import DEVICE, digest, says, torch_setup, value

torch = torch_setup(deterministic=False)
a = torch.randn(300, 300, dtype=torch.float64, device=DEVICE)
b = torch.randn(300, 20, dtype=torch.float64, device=DEVICE)
positive = a @ a.t() + 300 * torch.eye(300, dtype=torch.float64, device=DEVICE)


def near(name, x, y):  # noqa: ANN001, ANN201
    says(name, bool(torch.allclose(x, y, rtol=1e-8, atol=1e-8)))


u, s, v = torch.linalg.svd(a)
near("svd", u @ torch.diag(s) @ v, a)
value("singular", s.sum().item(), 1e-9)
values, vectors = torch.linalg.eigh(positive)
near("eigh", vectors @ torch.diag(values) @ vectors.t(), positive)
value("eigenvalues", values.sum().item(), 1e-9)
near("solve", a @ torch.linalg.solve(a, b), b)
low = torch.linalg.cholesky(positive)
near("cholesky", low @ low.t(), positive)
near("cholesky_solve", positive @ torch.cholesky_solve(b, low), b)
q, r = torch.linalg.qr(a)
near("qr", q @ r, a)
near("inverse", a @ torch.linalg.inv(a), torch.eye(300, dtype=torch.float64, device=DEVICE))
value("determinant", torch.linalg.slogdet(a).logabsdet.item(), 1e-9)
near("lstsq", torch.linalg.lstsq(positive, b).solution, torch.linalg.solve(positive, b))
batch = torch.randn(64, 24, 24, device=DEVICE) + 24 * torch.eye(24, device=DEVICE)
value("batched", torch.linalg.inv(batch).double().abs().sum().item(), 1e-4)
value("eig", torch.linalg.eigvals(a).abs().sum().item(), 1e-8)
digest("triangular", torch.triu(torch.ones(50, 50, device=DEVICE)))
