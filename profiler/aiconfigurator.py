"""Estimate with NVIDIA's aiconfigurator, which adds up kernels measured on GPUs. The package is optional."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvmesh.profiler.gpus import Gpu
from kvmesh.profiler.grid import WorkerLimits
from kvmesh.profiler.shape import config_of
from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.engines.mapping import MappingKind, ParallelMapping


class AiConfigurator:
    """An `Estimator`. Its first call takes some seconds, because the package reads its tables."""

    name = "aiconfigurator"

    def __init__(
        self, model_path: Path, gpu: Gpu, mapping: ParallelMapping, engine: str, limits: Callable[[int], WorkerLimits]
    ) -> None:
        """Raise ConfigError without the package or its data. `limits` returns what fits, which the package does not."""
        try:
            from aiconfigurator.cli.api import cli_estimate

            self.version = version("aiconfigurator")
        except (ImportError, PackageNotFoundError) as error:
            raise ConfigError(
                f"--provider aiconfigurator needs that package: {error}",
                hint="pip install 'kvmesh[aiconfigurator]', or leave --provider out",
            ) from error
        if not gpu.aiconfigurator:
            raise ConfigError(f"aiconfigurator has no data of {gpu.name}", hint="leave --provider out")
        if not config_of(model_path).get("architectures"):
            raise ConfigError(
                f"the config.json of {model_path} has no `architectures`, by which aiconfigurator knows a model",
                hint='add it, as "architectures": ["LlamaForCausalLM"], or leave --provider out',
            )
        self._estimate: Callable[..., Any] = cli_estimate
        self._mapping = mapping
        self._common: dict[str, Any] = {
            "model_path": str(model_path if model_path.is_dir() else model_path.parent),
            "system_name": gpu.aiconfigurator,
            "backend_name": engine,
            "tp_size": 1 if mapping.kind == MappingKind.DEP else mapping.gpus,
            "attention_dp_size": mapping.ranks,
            "moe_tp_size": mapping.gpus if mapping.kind == MappingKind.TP else 1,
            "moe_ep_size": 1 if mapping.kind == MappingKind.TP else mapping.gpus,
        }
        self._limits = limits

    def limits(self, max_num_seqs: int) -> WorkerLimits:
        return self._limits(max_num_seqs)

    def prefill_s(self, isl_tokens: int) -> float:
        return float(self._ask(mode="static_ctx", isl=isl_tokens, osl=1, batch_size=1).ttft) / 1e3

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """Ask for the batch of one rank, as the package counts."""
        each = -(-batch // self._mapping.ranks)
        return float(self._ask(mode="static_gen", isl=context_tokens, osl=2, batch_size=each).tpot) / 1e3

    def _ask(self, **question: Any) -> Any:
        """Return the package's estimate. Every exception of the package becomes a ConfigError: it has many kinds."""
        try:
            answer = self._estimate(**self._common, **question)
            self._common["backend_version"] = answer.backend_version  # finding the newest takes a second each time
            return answer
        except Exception as error:
            raise ConfigError(
                f"aiconfigurator cannot estimate {self._mapping.name}: {type(error).__name__}: {str(error)[:300]}",
                hint="leave --provider out for a roofline",
            ) from error
