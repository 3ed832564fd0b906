"""The transformer: Llama, Qwen2 and Qwen3 are one computation with different switches."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvmesh.workers.engines.torch.batch import DecodeGroup, PrefillSpan, StepBatch, ToldRows
from kvmesh.workers.engines.torch.cache import PagedKv
from kvmesh.workers.engines.torch.config import ModelConfig, RopeConfig
from kvmesh.workers.engines.torch.kernels import CpuKernels, Projection
from kvmesh.workers.engines.torch.weights import LayerWeights, ModelWeights

_SCORED_LOGITS = 1 << 24  # computed at once for the logprobs of a prompt: 64 MiB


class Transformer:
    def __init__(self, config: ModelConfig, weights: ModelWeights, kernels: CpuKernels | None = None) -> None:
        """Compute with torch; `kernels` replace what they are faster at."""
        self._config = config
        self.kernels = kernels
        self.scored_at_once = max(1, _SCORED_LOGITS // config.vocab_size)  # tokens of a prompt
        self._weights = weights
        kv_width = config.num_kv_heads * config.head_dim
        self._qkv_widths = (config.num_heads * config.head_dim, kv_width, kv_width)
        self._rope = rope_table(config).to(weights.embed.device, weights.embed.dtype)

    def forward(self, batch: StepBatch, kv: PagedKv) -> Tensor:
        """Compute the batch, write its keys and values to `kv`; what it knows at `told_tokens`: [S + P, hidden].

        After the keys and values of the last layer are written, only these tokens are computed.
        """
        if batch.begun_blocks is not None:
            kv.clear(batch.begun_blocks)
        x = F.embedding(batch.token_ids, self._weights.embed)
        cos, sin = self._rope[batch.positions].unbind(1)  # unused by kernels
        more, told = None, batch.told_tokens
        for index, layer in enumerate(self._weights.layers):
            normed = self._add_and_norm(x, more, layer.input_norm)
            is_cut = told is not None and index + 1 == len(self._weights.layers)
            if is_cut and batch.told is not None:
                mixed = self._attention_of_told(index, layer, normed, batch, batch.told, kv)
            else:
                mixed = self._attention(index, layer, normed, cos, sin, batch, kv)
                mixed = mixed[told] if is_cut else mixed
            x = x[told] if is_cut else x
            attended = self._project(mixed, layer.o)
            more = self._mlp(layer, self._add_and_norm(x, attended, layer.post_norm))
        return self._add_and_norm(x, more, self._weights.norm)

    def _add_and_norm(self, x: Tensor, more: Tensor | None, weight: Tensor) -> Tensor:
        """Add `more` to `x` in place; return it normed."""
        if self.kernels is not None:
            return self.kernels.add_and_norm(x, more, weight, self._config.rms_norm_eps)
        if more is not None:
            x += more
        return F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token from what `forward` gave: [S, hidden] -> float32 [S, vocab]."""
        return self._project(hidden, self._weights.lm_head).float()

    def _project(self, x: Tensor, projection: Projection) -> Tensor:
        """[T, inputs] -> [T, outputs]"""
        if self.kernels is not None and len(x) <= self.kernels.share.linear_tokens:
            return self.kernels.linear(x, projection)
        outputs = self._apart(x, projection)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def _apart(self, x: Tensor, projection: Projection) -> list[Tensor]:
        """Return what torch makes of x by each matrix of `projection`: [T, inputs] -> [T, its outputs] each."""
        linear = F.linear if self.kernels is None else self.kernels.share.further
        return [linear(x, *part) for part in zip(projection.weights, projection.biases, strict=True)]

    def _cut(self, x: Tensor, projection: Projection, widths: Sequence[int]) -> Sequence[Tensor]:
        """Return what `projection` makes of x, cut into `widths`: [T, inputs] -> [T, width] each.

        The rows of a part may lie apart.
        """
        is_few = self.kernels is not None and len(x) <= self.kernels.share.linear_tokens
        if not is_few and len(projection.weights) == len(widths):
            return self._apart(x, projection)
        return self._project(x, projection).split_with_sizes(list(widths), -1)

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, batch: StepBatch, kv: PagedKv
    ) -> Tensor:
        """Compute what one layer's heads see. x: [T, hidden]; cos, sin: [T, 1, head_dim]; returns [T, heads * dim]."""
        config = self._config
        num_kv, head_dim = config.num_kv_heads, config.head_dim
        if self.kernels is not None:
            queries, keys, values = self._cut(x, layer.qkv, self._qkv_widths)
            norm, eps = layer.qk_norm, config.rms_norm_eps
            self.kernels.prepare(index, queries, keys, values, self._rope, norm, eps, batch, kv)
            return self._attend_in_place(index, queries, keys, values, batch, kv)
        qkv = self._project(x, layer.qkv).view(len(x), -1, head_dim)
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
        return mixed.view(len(x), -1)

    def _attention_of_told(
        self, index: int, layer: LayerWeights, x: Tensor, batch: StepBatch, told: ToldRows, kv: PagedKv
    ) -> Tensor:
        """Compute what the heads of the told tokens alone see, by kernels: [T, hidden] -> [S, heads * dim].

        Of the other tokens only keys and values are projected.
        """
        assert self.kernels is not None
        config, norm = self._config, layer.qk_norm
        eps, q_width, kv_widths = config.rms_norm_eps, self._qkv_widths[0], self._qkv_widths[1:]
        queries, own_keys, own_values = self._cut(x[batch.told_tokens], layer.qkv, self._qkv_widths)
        self.kernels.prepare(index, queries, own_keys, own_values, self._rope, norm, eps, told, kv)
        kv_norm = None if norm is None else norm[config.num_heads :]
        keys, values = self._cut(x, layer.qkv.without_first(q_width), kv_widths)
        self.kernels.prepare(index, keys[:, :0], keys, values, self._rope, kv_norm, eps, batch, kv)
        return self.kernels.attend(index, queries, told.rows, kv)

    def _attend_in_place(
        self, index: int, queries: Tensor, keys: Tensor, values: Tensor, batch: StepBatch, kv: PagedKv
    ) -> Tensor:
        """Let the kernels attend, and torch for rows with many new tokens. All [T, heads * head_dim]."""
        assert self.kernels is not None
        num_kv, head_dim = self._config.num_kv_heads, self._config.head_dim
        mixed = self.kernels.attend(index, queries, batch.paged, kv)
        if batch.spans:
            q = queries.view(len(queries), num_kv, -1, head_dim)
            new_kv = torch.stack((keys, values), 1).view(len(keys), 2, num_kv, head_dim)
            for span in batch.spans:
                _attend_span(index, span, q, new_kv, kv, into=mixed.view(q.shape))
        return mixed

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        width = layer.gate_up.num_outputs // 2
        gate, up = self._cut(x, layer.gate_up, (width, width))
        gated = F.silu(gate) * up if self.kernels is None else self.kernels.gate(gate, up)
        return self._project(gated, layer.down)


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
