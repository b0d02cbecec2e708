"""Networks on graphs of PyTorch Geometric, in default settings: GCN, attention (GAT), batches of graphs, pooling."""

from common import DEVICE, says, skip, value

try:
    import torch
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GATConv, GCNConv, global_mean_pool
except ImportError as error:
    skip(f"PyTorch Geometric cannot be imported: {error}")
torch.manual_seed(0)


class Network(torch.nn.Module):
    """GCN, GAT, mean over each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(16, 64), GATConv(64, 32, heads=2)
        self.out = torch.nn.Linear(64, 3)

    def forward(self, batch):  # noqa: ANN001, ANN202
        x = torch.relu(self.first(batch.x, batch.edge_index))
        x = torch.relu(self.second(x, batch.edge_index))
        return self.out(global_mean_pool(x, batch.batch))


graphs = [Data(x=torch.randn(n, 16), edge_index=torch.randint(0, n, (2, 4 * n)), y=torch.tensor([n % 3]))
          for n in range(20, 84)]
batch = Batch.from_data_list(graphs).to(DEVICE)
model = Network().to(DEVICE)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(100):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(batch), batch.y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
value("first", losses[0], 1e-3)
says("learned", losses[-1] < 0.7 * losses[0])
