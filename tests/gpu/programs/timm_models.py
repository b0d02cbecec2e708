"""Models of timm, random weights, in default settings: ResNet-18 trained under AMP, a small ViT asked."""

from common import DEVICE, says, skip, value

try:
    import timm
    import torch
except ImportError as error:
    skip(f"timm cannot be imported: {error}")
torch.manual_seed(0)
steps, batch = (30, 32) if DEVICE == "cuda" else (3, 4)
images, classes = torch.randn(batch, 3, 96, 96, device=DEVICE), torch.randint(0, 10, (batch,), device=DEVICE)
model = timm.create_model("resnet18", num_classes=10).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scaler = torch.amp.GradScaler(DEVICE)
losses = []
for _ in range(steps):
    optimizer.zero_grad()
    with torch.autocast(DEVICE):
        loss = torch.nn.functional.cross_entropy(model(images), classes)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
value("first", losses[0], 2e-2)
says("learned", losses[-1] < losses[0])
vit = timm.create_model("vit_tiny_patch16_224", num_classes=10).to(DEVICE).eval()
with torch.inference_mode():
    value("vit", vit(torch.ones(2, 3, 224, 224, device=DEVICE)).float().abs().sum(), 1e-2)
