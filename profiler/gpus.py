"""List GPUs with the rates of their data sheets: dense rates, because structured sparsity does not help LLMs."""

from msgspec import Struct

from kvmesh.protocol.errors import ConfigError


class Gpu(Struct, frozen=True, kw_only=True):
    name: str
    bf16_flops_s: float
    fp8_flops_s: float  # 0: the GPU has no FP8
    memory_bytes: float
    memory_bytes_s: float
    link_bytes_s: float  # to the other GPUs of a node, in one direction
    aiconfigurator: str = ""  # its name in that tool

    def flops_s(self, weight_bits: int) -> float:
        """Return the FLOP/s for weights of that size. Common kernels multiply weights of 4 bits as bf16."""
        return self.fp8_flops_s if weight_bits == 8 and self.fp8_flops_s else self.bf16_flops_s


GPUS = {
    gpu.name: gpu
    for gpu in [
        # NVIDIA A100 Tensor Core GPU data sheet (2021), column "A100 80GB SXM": BFLOAT16 312 TFLOPS, 2,039 GB/s,
        # NVLink 600 GB/s both ways.
        Gpu(
            name="a100",
            bf16_flops_s=312e12,
            fp8_flops_s=0,
            memory_bytes=80e9,
            memory_bytes_s=2.039e12,
            link_bytes_s=300e9,
            aiconfigurator="a100_sxm",
        ),
        # NVIDIA L40S data sheet (2023): BFLOAT16 362.05 | 733 and FP8 733 | 1,466 TFLOPS (dense | sparse), 48 GB,
        # 864 GB/s, PCIe Gen4 x16 64 GB/s both ways, no NVLink.
        Gpu(
            name="l40s",
            bf16_flops_s=362.05e12,
            fp8_flops_s=733e12,
            memory_bytes=48e9,
            memory_bytes_s=0.864e12,
            link_bytes_s=32e9,
            aiconfigurator="l40s",
        ),
        # NVIDIA H100 Tensor Core GPU data sheet (2023), column "H100 SXM": with sparsity BFLOAT16 1,979 and FP8 3,958
        # TFLOPS, 80 GB, 3.35 TB/s, NVLink 900 GB/s both ways.
        Gpu(
            name="h100",
            bf16_flops_s=989.5e12,
            fp8_flops_s=1979e12,
            memory_bytes=80e9,
            memory_bytes_s=3.35e12,
            link_bytes_s=450e9,
            aiconfigurator="h100_sxm",
        ),
        # NVIDIA H200 Tensor Core GPU data sheet (2024), column "H200 SXM": rates as H100, 141 GB, 4.8 TB/s.
        Gpu(
            name="h200",
            bf16_flops_s=989.5e12,
            fp8_flops_s=1979e12,
            memory_bytes=141e9,
            memory_bytes_s=4.8e12,
            link_bytes_s=450e9,
            aiconfigurator="h200_sxm",
        ),
        # NVIDIA DGX B200 data sheet (2024), an eighth of the system: FP8 72 PFLOPS with sparsity, 1,440 GB, 64 TB/s,
        # NVLink 14.4 TB/s both ways; BFLOAT16 is half of FP8 (NVIDIA Blackwell architecture brief).
        Gpu(
            name="b200",
            bf16_flops_s=2.25e15,
            fp8_flops_s=4.5e15,
            memory_bytes=180e9,
            memory_bytes_s=8e12,
            link_bytes_s=900e9,
            aiconfigurator="b200_sxm",
        ),
    ]
}


def find_gpu(name: str) -> Gpu:
    """Return the GPU. Raise ConfigError for an unknown name."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ConfigError(f"no data sheet of a GPU {name!r}", hint=f"there are: {', '.join(GPUS)}")
    return gpu
