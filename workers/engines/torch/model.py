"""The transformer: Llama, Qwen2 and Qwen3 are one computation with different switches."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engines.torch.batch import DecodeGroup, PrefillSpan, StepBatch
from workers.engines.torch.cache import PagedKv
from workers.engines.torch.config import ModelConfig, RopeConfig
from workers.engines.torch.weights import LayerWeights, ModelWeights

_SCORED_LOGITS = 1 << 24  # computed at once for the logprobs of a prompt: 64 MiB


class Transformer:
    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self._config = config
        self.scored_at_once = max(1, _SCORED_LOGITS // config.vocab_size)  # tokens of a prompt
        self._weights = weights
        self._rope = rope_table(config).to(weights.embed.device, weights.embed.dtype)

    def forward(self, batch: StepBatch, kv: PagedKv) -> Tensor:
        """Compute the batch, write its keys and values to `kv`; what it knows at `told_tokens`: [S + P, hidden]."""
        eps = self._config.rms_norm_eps
        if batch.begun_blocks is not None:
            kv.clear(batch.begun_blocks)
        x = F.embedding(batch.token_ids, self._weights.embed)
        cos, sin = self._rope[batch.positions].unbind(1)
        for index, layer in enumerate(self._weights.layers):
            normed = F.rms_norm(x, layer.input_norm.shape, layer.input_norm, eps)
            x += self._attention(index, layer, normed, cos, sin, batch, kv)
            normed = F.rms_norm(x, layer.post_norm.shape, layer.post_norm, eps)
            x += _mlp(layer, normed)
        return F.rms_norm(x[batch.told_tokens], self._weights.norm.shape, self._weights.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token from what `forward` gave: [S, hidden] -> float32 [S, vocab]."""
        return F.linear(hidden, self._weights.lm_head).float()

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, batch: StepBatch, kv: PagedKv
    ) -> Tensor:
        """Compute one layer's attention. x: [T, hidden]; cos, sin: [T, 1, head_dim]; returns [T, hidden]."""
        config = self._config
        num_kv, head_dim = config.num_kv_heads, config.head_dim
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, head_dim)
        qk = qkv[:, : config.num_heads + num_kv]
        normed = qk
        if layer.qk_norm is not None:
            normed = F.rms_norm(qk, (head_dim,), None, config.rms_norm_eps) * layer.qk_norm
        # Rotation in place, into `qkv`, so that k and v stay side by side: one write to the cache.
        halves_swapped = normed.roll(head_dim // 2, -1)
        torch.mul(normed, cos, out=qk)
        qk.addcmul_(halves_swapped, sin)
        q = qkv[:, : config.num_heads].view(len(x), num_kv, config.group_size, head_dim)
        new_kv = qkv[:, config.num_heads :].view(len(x), 2, num_kv, head_dim)
        kv.write(index, batch.write_blocks, batch.write_offsets, new_kv)
        mixed = torch.empty_like(q, memory_format=torch.contiguous_format)
        for span in batch.spans:
            _attend_span(index, span, q, new_kv, kv, into=mixed)
        for group in batch.groups:
            _attend_group(index, group, q, kv, into=mixed)
        return F.linear(mixed.view(len(x), -1), layer.o, layer.o_bias)


def _attend_span(index: int, span: PrefillSpan, q: Tensor, new_kv: Tensor, kv: PagedKv, into: Tensor) -> None:
    """Attention of one row's new tokens. q, into: [T, kv heads, group, head_dim].

    The group's heads share one key through a stride of 0: nothing is repeated in memory.
    """
    here = slice(span.first, span.last)
    if span.gather is None:
        keys, values = new_kv[here].permute(1, 2, 0, 3)  # each [kv heads, L, head_dim]
    else:
        assert span.mask is not None
        keys, values = kv.gather(index, span.gather, 1)[:, 0, :, : span.mask.shape[1]]
    group_size = q.shape[2]
    mixed = F.scaled_dot_product_attention(
        q[here].permute(1, 2, 0, 3),
        keys[:, None].expand(-1, group_size, -1, -1),
        values[:, None].expand(-1, group_size, -1, -1),
        attn_mask=span.mask,
        is_causal=span.mask is None,
    )
    into[here] = mixed.permute(2, 0, 1, 3)


def _attend_group(index: int, group: DecodeGroup, q: Tensor, kv: PagedKv, into: Tensor) -> None:
    """Attention of rows with one new token each. q, into: [T, kv heads, group, head_dim].

    All queries of a KV head see the same keys, so they stand where SDPA expects a sequence.
    """
    here = slice(group.first, group.last)
    keys, values = kv.gather(index, group.gather, group.last - group.first)[:, :, :, : group.num_keys]
    into[here] = F.scaled_dot_product_attention(q[here], keys, values, attn_mask=group.mask)


def _mlp(layer: LayerWeights, x: Tensor) -> Tensor:
    """[T, hidden] -> [T, hidden]"""
    gate, up = F.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
    return F.linear(F.silu(gate) * up, layer.down, layer.down_bias)


def rope_table(config: ModelConfig) -> Tensor:
    """Return cos and sin of every position, for the formula x * cos + roll(x, head_dim / 2) * sin.

    float32 [context_tokens, 2, 1, head_dim]. The first half of sin is negative: there, rolling brings in the second
    half of x, which the rotation subtracts.
    """
    angles = torch.arange(config.context_tokens).float()[:, None] * inverse_frequencies(config.rope, config.head_dim)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)[:, :, None]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions: float32 [head_dim / 2]."""
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Slow down long wavelengths by `factor`, leave short ones, and blend in between.

    Turns within the original context: fewer than low_freq_factor is long, more than high_freq_factor short.
    """
    turns = rope.original_context_tokens * frequencies / (2 * math.pi)
    short = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(frequencies / rope.factor, frequencies, short.clamp(0.0, 1.0))
