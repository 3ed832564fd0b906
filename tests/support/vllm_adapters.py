"""Write LoRA adapters for the tiny model."""

import itertools
import json
from pathlib import Path

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR


def write_adapter(folder: Path, seed: int) -> str:
    """Random weights on the queries and values of the tiny model's four layers."""
    import torch
    from safetensors.torch import save_file

    generator, rank, hidden = torch.Generator().manual_seed(seed), 8, 192
    weights = {}
    for layer, (name, size) in itertools.product(range(4), (("q_proj", 192), ("v_proj", 64))):
        at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[f"{at}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
        weights[f"{at}.lora_B.weight"] = torch.randn(size, rank, generator=generator)
    folder.mkdir(exist_ok=True)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    described = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16, "bias": "none"}
    described |= {"target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": str(CHECKPOINT_DIR)}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return str(folder)
