"""LSTM and embedding, forward and backward, packed sequences, GRU."""

from common import DEVICE, digest, torch_setup, value

torch = torch_setup(9)
nn = torch.nn
words, recurrent, head = nn.Embedding(1000, 64), nn.LSTM(64, 128, 2, batch_first=True), nn.Linear(128, 1000)
model = nn.ModuleList([words, recurrent, head]).to(DEVICE)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
tokens = torch.randint(0, 1000, (32, 41)).to(DEVICE)
for _ in range(10):
    optimizer.zero_grad()
    out, _ = recurrent(words(tokens[:, :-1]))
    loss = nn.functional.cross_entropy(head(out).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
value("loss", loss.item(), 1e-4)
digest("weights", *model.state_dict().values())
lengths = torch.tensor([20, 15, 9, 3])
packed = nn.utils.rnn.pack_padded_sequence(torch.randn(4, 20, 64).to(DEVICE), lengths, batch_first=True)
out, state = recurrent(packed)
digest("packed", out.data, state[0])
gate = nn.GRU(64, 32, bidirectional=True).to(DEVICE)
digest("gru", gate(torch.randn(12, 4, 64, device=DEVICE))[0])
