"""The rows of the compatibility suite: which program, with what, and what it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Part:
    """One program of a row. ``remote``: further arguments of the remote run only."""

    program: str  #: file in programs/, without ``.py``; with ``.cu`` a C++ program, compiled first
    arguments: tuple[str, ...] = ()
    remote: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """For a file's name and a failure's text."""
        words = "-".join([self.program.removesuffix(".cu"), *(a.strip("-") for a in self.arguments)])
        return "".join(c if c.isalnum() or c in "._-" else "_" for c in words)[:60]


@dataclass(frozen=True)
class Row:
    """Programs that run at the same time (mostly one), compared with a native run of the same."""

    name: str
    framework: str
    what: str
    parts: tuple[Part, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1
    ranks: int = 1  #: of a gang, which share one GPU
    memory: str = "16GiB"
    limit: float = 150.0  #: seconds for each run
    refusal: str = ""  #: the driver call that may be refused by name
    alone: bool = False  #: no other row beside it: it compares times, or others would be held back for its share


TORCH = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
JAX = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2",
       "XLA_FLAGS": "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"}


def _row(framework: str, name: str, what: str, program: str, *arguments: str, remote: Sequence[str] = (),
         environment: Mapping[str, str] = NOTHING, **options: object) -> Row:
    base: Mapping[str, str] = {"torch": TORCH, "jax": JAX}.get(framework, {})
    return Row(f"{framework}-{name}", framework, what, (Part(program, arguments, tuple(remote)),),
               {**base, **environment}, **options)  # type: ignore[arg-type]


def _torch() -> list[Row]:
    plain = [
        ("device", "import, device properties", "torch_device"),
        ("copies", "tensors; pinned, pageable, non_blocking copies both ways", "torch_copies"),
        ("cnn-amp", "CNN training, AMP with GradScaler", "torch_cnn_amp"),
        ("checkpoint", "save and load model and optimizer, go on training", "torch_checkpoint"),
        ("streams", "two streams ordered by events", "torch_streams"),
        ("fft", "FFT, 1D to 3D, real and complex", "torch_fft"),
        ("sparse", "sparse COO and CSR products", "torch_sparse_products"),
        ("linalg", "svd, eigh, solve, cholesky, qr, inverse", "torch_linalg"),
        ("attention", "scaled_dot_product_attention, every backend", "torch_attention"),
        ("rng", "Philox states, multinomial, dropout, normal", "torch_rng"),
        ("lstm", "LSTM and embedding training", "torch_lstm"),
        ("conv-half", "half and bfloat16 convolution", "torch_conv_half"),
        ("graphs", "CUDA graph capture and replay", "torch_graphs"),
    ]
    rows = [_row("torch", name, what, program) for name, what, program in plain]
    for start in ("fork", "spawn"):
        rows.append(_row("torch", f"dataloader-{start}", f"DataLoader workers ({start}), pin_memory",
                         "torch_dataloader", "--start", start))
    rows += [
        _row("torch", "expandable", "expandable_segments:True", "torch_cnn_amp",
             environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        _row("torch", "compile", "torch.compile", "torch_compile", limit=240),
        _row("torch", "compile-overhead", "torch.compile(mode='reduce-overhead')", "torch_compile",
             "--mode", "reduce-overhead", limit=240),
        _row("torch", "compile-no-linker", "torch.compile where the linker knows no libcuda (remote run only)",
             "torch_compile", remote=("--hide-driver",), limit=240),
        _row("torch", "profiler-on", "training under torch.profiler", "torch_profiler", "--profile", "on"),
        _row("torch", "profiler-off", "the same without", "torch_profiler", "--profile", "off"),
        _row("torch", "gpt2-fp32", "GPT-2 124M shape, training in fp32", "torch_gpt2", "--dtype", "fp32",
             memory="32GiB", limit=240),
        _row("torch", "gpt2-bf16", "GPT-2 124M shape, training in bf16", "torch_gpt2", "--dtype", "bf16",
             memory="32GiB", limit=240),
        _row("torch", "gpt2-generate", "GPT-2 124M shape, generation with KV cache, bf16", "torch_gpt2", "--generate"),
        _row("torch", "gemm-bf16", "GEMM of 8192, bf16", "torch_gemm", "--dtype", "bf16"),
        _row("torch", "gemm-fp32", "GEMM of 8192, fp32 and tf32", "torch_gemm", "--dtype", "fp32"),
        _row("torch", "gemm-fp8", "fp8 GEMM by torch._scaled_mm", "torch_gemm", "--dtype", "fp8"),
        _row("torch", "nccl-one", "torch.distributed, NCCL, world size 1", "torch_nccl", "--world"),
        _row("torch", "ranks", "torch.distributed, NCCL, two processes: collectives, messages, groups, DDP, FSDP2",
             "torch_ranks", "2", ranks=2, memory="4GiB", limit=240.0, alone=True),
        _row("torch", "ranks-captured", "torch.distributed, NCCL, two processes: collectives in a CUDA graph",
             "torch_ranks", "2", "--captured", ranks=2, memory="4GiB", alone=True),
        _row("torch", "shared", "torch.multiprocessing: two processes get tensors, and send some", "torch_shared",
             memory="6GiB", limit=120.0),
        _row("torch", "nccl-two", "NCCL in one process over two GPUs", "torch_nccl", gpus=2),
        _row("torch", "oom", "quota reached: OutOfMemoryError, and on it goes", "torch_oom",
             remote=("--quota",)),
    ]
    for fault, what in (("assert", "device assert (index out of range): sticky; a bystander is untouched"),
                        ("illegal", "illegal address: sticky; a bystander is untouched")):
        rows.append(Row(f"torch-{fault}", "torch", what,
                        (Part("torch_fault", ("--kind", fault)), Part("torch_cnn_amp", ("--steps", "2500"))), TORCH))
    return rows


def _jax() -> list[Row]:
    rows = [("jit", "jit, vmap, arithmetic", "jax_jit"), ("mlp", "grad, training an MLP", "jax_mlp"),
            ("random", "random keys and distributions", "jax_random"), ("conv", "convolution and its gradient",
                                                                        "jax_conv"),
            ("scan", "scan, while_loop, cond", "jax_scan"), ("linalg", "lax.linalg and jnp.linalg", "jax_linalg"),
            ("donate", "donated buffers, asynchronous dispatch, device_put", "jax_donate")]
    return [*(_row("jax", name, what, program) for name, what, program in rows),
            _row("jax", "preallocate", "memory taken ahead, as by default", "jax_jit",
                 environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}),
            _row("jax", "autotune", "MLP with XLA's autotuning", "jax_mlp", "--tolerant",
                 environment={"XLA_FLAGS": ""})]


def _arrays() -> list[Row]:
    cupy = [("elementwise", "elementwise and fused kernels"), ("reductions", "sums, scans, sort, argmax"),
            ("raw", "RawKernel; RawModule with constants and globals"), ("fft", "FFT"), ("linalg", "svd, solve, qr"),
            ("sparse", "sparse products"), ("random", "random generators"), ("streams", "streams and events"),
            ("pinned", "pinned pool, asynchronous copies"), ("graph", "stream capture and graph launch")]
    numba = [("kernels", "kernels, streams, device functions"), ("shared", "shared memory"), ("atomics", "atomics")]
    triton = [("add", "vector addition"), ("softmax", "softmax"), ("matmul", "matmul with autotune")]
    return [*(_row("cupy", name, what, f"cupy_{name}") for name, what in cupy),
            *(_row("numba", name, what, f"numba_{name}") for name, what in numba),
            *(_row("triton", name, what, f"triton_{name}", environment=TORCH) for name, what in triton)]


def _core() -> list[Row]:
    core = [("program", "cuda.core: NVRTC program, launch"), ("linker", "cuda.core: linker"),
            ("graph", "cuda.core: graph builder"), ("memory", "cuda.core: device and pinned memory pools")]
    return [*(_row("core", name, what, f"core_{name}") for name, what in core),
            _row("core", "vmm", "cuda.bindings: virtual-memory calls", "bindings_vmm")]


def _cpp() -> list[Row]:
    names = [("copies", "copies of all kinds, 2D and 3D", ""), ("streams", "streams, priorities, callbacks' order", ""),
             ("events", "events and their timing", ""), ("cooperative", "cooperative groups: grid sync", ""),
             ("clusters", "thread-block clusters, distributed shared memory", ""),
             ("constants", "constants and device variables", ""),
             ("managed", "managed memory: works or is refused by name", "cuMemAllocManaged"),
             ("hostfn", "host functions and stream callbacks", ""), ("printf", "device printf", ""),
             ("shared", "dynamic shared memory opt-in; launch errors that do not stick", ""),
             ("occupancy", "occupancy queries", ""), ("async_alloc", "cudaMallocAsync and pools", ""),
             ("graph", "graph API: nodes, update, launch", ""),
             ("texture", "texture object: works or is refused by name", "cuTexObjectCreate"),
             ("thrust", "thrust and cub: sort, reduce, scan", "")]
    return [_row("cpp", name.replace("_", "-"), what, f"cpp_{name}.cu", refusal=refusal, alone=name == "events")
            for name, what, refusal in names]


def _packages() -> list[Row]:
    """Packages on top of PyTorch and JAX, in default settings; but JAX leaves memory to the rows beside it."""
    torch = [("timm", "ResNet-18 under AMP, a small ViT", "timm_models"),
             ("transformers", "a small Llama trained and generating, a small BERT", "transformers_models"),
             ("pyg", "GCN and GAT over batches of graphs", "pyg_graphs"),
             ("gpytorch", "an exact Gaussian process", "gpytorch_regression"),
             ("e3nn", "equivariant tensor products", "e3nn_network")]
    jax = [("flax", "a CNN (nnx) trained with optax", "flax_cnn"),
           ("numpyro", "NUTS on the eight schools", "numpyro_nuts"),
           ("diffrax", "a neural differential equation", "diffrax_ode"),
           ("jax-conv", "JAX alone: convolutions that XLA tunes", "jax_conv")]
    return [*(_row("packages", name, what, program) for name, what, program in torch),
            *(_row("packages", name, what, program, environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
              for name, what, program in jax)]


def _rest() -> list[Row]:
    return [_row("nvml", "values", "NVML through nvidia-ml-py", "nvml_values"),
            Row("two-frameworks", "torch + jax", "PyTorch and JAX on one node at the same time",
                (Part("torch_cnn_amp", ("--steps", "1500")), Part("jax_mlp", ("--steps", "1500"))),
                {**TORCH, **JAX})]


ROWS: tuple[Row, ...] = tuple([*_torch(), *_jax(), *_arrays(), *_core(), *_cpp(), *_packages(), *_rest()])
