"""An equivariant layer of e3nn, in default settings: scripted tensor products, spherical harmonics; turned inputs."""

from common import DEVICE, says, skip, value

try:
    import torch
    from e3nn import o3
except ImportError as error:
    skip(f"e3nn cannot be imported: {error}")
torch.manual_seed(0)
given, made = o3.Irreps("8x0e + 8x1o"), o3.Irreps("8x0e + 8x1o + 4x2e")
product = o3.FullyConnectedTensorProduct(given, o3.Irreps.spherical_harmonics(2), made).to(DEVICE)
points = torch.randn(256, 3, device=DEVICE)
fields = given.randn(256, -1).to(DEVICE)
directions = o3.spherical_harmonics(o3.Irreps.spherical_harmonics(2), points, normalize=True)
out = product(fields, directions)
turn = o3.rand_matrix()  # e3nn makes D matrices on the CPU
turned = product(fields @ given.D_from_matrix(turn).T.to(DEVICE),
                 o3.spherical_harmonics(o3.Irreps.spherical_harmonics(2), points @ turn.T.to(DEVICE), normalize=True))
off = (turned - out @ made.D_from_matrix(turn).T.to(DEVICE)).abs().max()
says("equivariant", float(off) < 1e-3)
optimizer = torch.optim.Adam(product.parameters(), lr=0.02)
losses = []
for _ in range(80):
    optimizer.zero_grad()
    loss = (product(fields, directions) - turned.detach()).pow(2).mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
value("first", losses[0], 1e-3)
says("learned", losses[-1] < losses[0])
