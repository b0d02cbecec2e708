"""cuSPARSE: COO and CSR products, with integers in floats, so that sums are exact in any order."""

from common import DEVICE, digest, says, torch_setup

torch = torch_setup(deterministic=False)
dense = torch.randint(-4, 5, (600, 500), device=DEVICE).float()
dense[torch.rand(600, 500, device=DEVICE) > 0.05] = 0
right = torch.randint(-8, 9, (500, 64), device=DEVICE).float()
expected = dense @ right
coo, csr = dense.to_sparse(), dense.to_sparse_csr()
for name, matrix in (("coo", coo), ("csr", csr)):
    product = matrix @ right
    says(f"{name}_right", bool((product == expected).all()))
    digest(name, product)
digest("vector", csr @ right[:, 0].contiguous())
square = torch.sparse.mm(coo, dense.t().to_sparse())
digest("sparse-sparse", square.to_dense())
digest("coalesced", coo.coalesce().indices(), coo.coalesce().values())
grown = (coo + coo).coalesce()
digest("sum", grown.values())
