"""An exact Gaussian process of GPyTorch, in default settings: Cholesky decompositions, conjugate gradients."""

from common import DEVICE, says, skip, value

try:
    import gpytorch
    import torch
except ImportError as error:
    skip(f"GPyTorch cannot be imported: {error}")
torch.manual_seed(0)
where = torch.linspace(0, 1, 400, device=DEVICE)
seen = torch.sin(where * 12.0) + 0.1 * torch.sin(where * 170.0)


class Process(gpytorch.models.ExactGP):
    """A constant mean and a scaled RBF kernel."""

    def __init__(self, likelihood) -> None:  # noqa: ANN001
        super().__init__(where, seen, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):  # noqa: ANN001, ANN202
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Process(likelihood).to(DEVICE)
likelihood = likelihood.to(DEVICE)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
losses = []
for _ in range(60):
    optimizer.zero_grad()
    loss = -objective(model(where), seen)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
model.eval()
likelihood.eval()
with torch.no_grad(), gpytorch.settings.fast_pred_var():
    told = likelihood(model(torch.linspace(0, 1, 51, device=DEVICE))).mean
value("first", losses[0], 1e-3)
value("last", losses[-1], 5e-2)
says("close", float((told - torch.sin(torch.linspace(0, 1, 51, device=DEVICE) * 12.0)).abs().max()) < 0.3)
