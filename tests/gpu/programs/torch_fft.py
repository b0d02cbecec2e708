"""cuFFT: one to three dimensions, real and complex, batched, sizes with large prime factors."""

from common import DEVICE, digest, torch_setup, value

torch = torch_setup()
for size in (64, 1000, 1009, 4096, 65536):
    x = torch.randn(8, size, device=DEVICE)
    y = torch.fft.rfft(x)
    digest(f"rfft-{size}", torch.view_as_real(y))
    value(f"back-{size}", (torch.fft.irfft(y, n=size) - x).abs().max().item() < 1e-4, 0)
z = torch.randn(4, 48, 80, dtype=torch.complex64, device=DEVICE)
digest("fft2", torch.view_as_real(torch.fft.fft2(z)))
digest("fftn", torch.view_as_real(torch.fft.fftn(z)))
d = torch.randn(16, 30, 42, dtype=torch.float64, device=DEVICE)
digest("rfftn-double", torch.view_as_real(torch.fft.rfftn(d)))
digest("stft", torch.view_as_real(torch.stft(torch.randn(16000, device=DEVICE), 400, 160, return_complex=True,
                                             window=torch.hann_window(400, device=DEVICE))))
