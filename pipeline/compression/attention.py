"""`nn.MultiheadAttention` with its projections as layers of their own, so that each can be quantized.

Shape legend: B batch, L queries, S keys, H heads, E embedding, D embedding of one head.
"""

import math

import torch
from torch import Tensor, nn


def why_not(attention: nn.MultiheadAttention) -> str | None:
    """Return why an attention layer keeps its own arithmetic; None when `UnfoldedAttention` computes the same."""
    if attention.in_proj_weight is None:
        return "its keys or values have another size than its queries"
    if attention.bias_k is not None or attention.bias_v is not None:
        return "it adds a learned key and value (add_bias_kv)"
    return "it adds a key and a value of zeros (add_zero_attn)" if attention.add_zero_attn else None


class UnfoldedAttention(nn.Module):
    """Attention of one embedding size; its children `in_proj` and `out_proj` are called, so they may be replaced."""

    in_proj_bias = None  # nn.TransformerEncoderLayer looks here, and calls us instead of its fused kernel
    _qkv_same_embed_dim = True  # nn.TransformerEncoder looks here

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = attention.embed_dim, attention.num_heads
        self.batch_first, self.dropout = attention.batch_first, attention.dropout
        self.in_proj = _linear(attention.in_proj_weight, attention.in_proj_bias)
        self.out_proj = _linear(attention.out_proj.weight, attention.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attended values and, if asked for, the weights: as `nn.MultiheadAttention`, without dropout.

        `is_causal` says what `attn_mask` holds, so it changes nothing.
        """
        unbatched = query.dim() == 2
        q_BHLD, k_BHSD, v_BHSD = (self._heads(x, unbatched) for x in self._projected(query, key, value))
        scores_BHLS = q_BHLD * (1 / math.sqrt(q_BHLD.shape[-1])) @ k_BHSD.transpose(-2, -1)
        if attn_mask is not None:
            scores_BHLS = scores_BHLS + self._of_heads(_additive(attn_mask))
        if key_padding_mask is not None:
            scores_BHLS = scores_BHLS + _additive(key_padding_mask).reshape(-1, 1, 1, k_BHSD.shape[2])
        weights_BHLS = torch.softmax(scores_BHLS, dim=-1)
        y_BLE = (weights_BHLS @ v_BHSD).transpose(1, 2).flatten(2)
        y_BLE = self.out_proj(y_BLE)
        y = y_BLE[0] if unbatched else y_BLE if self.batch_first else y_BLE.transpose(0, 1)
        if not need_weights:
            return y, None
        shown = weights_BHLS.mean(dim=1) if average_attn_weights else weights_BHLS
        return y, shown[0] if unbatched else shown

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project each input. One tensor in all three places is quantized and multiplied once."""
        if query is key and key is value:
            q, k, v = self.in_proj(query).chunk(3, dim=-1)
            return q, k, v
        q, k, v = (self.in_proj(x).chunk(3, dim=-1)[place] for place, x in enumerate((query, key, value)))
        return q, k, v

    def _heads(self, x: Tensor, unbatched: bool) -> Tensor:
        """Return [B, H, L, D] for an input in any of the layouts of `nn.MultiheadAttention`."""
        x_BLE = x[None] if unbatched else x if self.batch_first else x.transpose(0, 1)
        return x_BLE.view(*x_BLE.shape[:2], self.num_heads, -1).transpose(1, 2)

    def _of_heads(self, mask: Tensor) -> Tensor:
        """Return a mask [L, S] as it is and one of [B x H, L, S] as [B, H, L, S]."""
        return mask if mask.dim() == 2 else mask.view(-1, self.num_heads, *mask.shape[1:])


def _linear(weight_OI: Tensor, bias_O: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=bias_O is not None, device=weight_OI.device)
    with torch.no_grad():
        linear.weight.copy_(weight_OI)
        if bias_O is not None:
            linear.bias.copy_(bias_O)
    return linear


def _additive(mask: Tensor) -> Tensor:
    """Return a mask that is added to the scores: -inf where a boolean one is true."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -math.inf)
