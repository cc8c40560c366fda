"""Attention with its projections as layers computes what nn.MultiheadAttention does, in every way it is called."""

from typing import Any

import pytest
import torch
from torch import nn

from pipeline.compression.attention import UnfoldedAttention, why_not

CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
PADDED = torch.tensor([[False] * 4 + [True], [False] * 3 + [True] * 2, [False] * 5])
PER_HEAD = torch.randn(12, 5, 5, generator=torch.Generator().manual_seed(0))


def attention(*, batch_first: bool = True, **options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 4, batch_first=batch_first, **options).eval()
    if layer.in_proj_bias is not None:
        nn.init.normal_(layer.in_proj_bias)
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inputs", ["self", "cross", "unbatched", "sequence first"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
        {"key_padding_mask": PADDED},
        {"attn_mask": PER_HEAD},
    ],
)
def test_unfolded_attention_computes_the_same(inputs: str, bias: bool, options: dict[str, Any]) -> None:
    layer = attention(batch_first=inputs != "sequence first", bias=bias)
    x, y = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(1))
    if inputs == "sequence first":
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    if inputs == "unbatched":
        x, y = x[0], y[0]
        short = {"key_padding_mask": PADDED[0], "attn_mask": CAUSAL if "is_causal" in options else PER_HEAD[:4]}
        options = {name: short.get(name, value) for name, value in options.items()}
    arguments = (x, y, y) if inputs == "cross" else (x, x, x)
    with torch.no_grad():
        expected, weights = layer(*arguments, **options)
        found, own_weights = UnfoldedAttention(layer)(*arguments, **options)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (weights is None) == (own_weights is None)
    if weights is not None and own_weights is not None:
        torch.testing.assert_close(own_weights, weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"bias": False}, None),
        ({"kdim": 8}, "another size"),
        ({"vdim": 8}, "another size"),
        ({"add_bias_kv": True}, "add_bias_kv"),
        ({"add_zero_attn": True}, "add_zero_attn"),
    ],
)
def test_attention_with_additions_keeps_its_own_arithmetic(options: dict[str, Any], reason: str | None) -> None:
    found = why_not(attention(**options))
    assert found is None if reason is None else found is not None and reason in found


def test_encoder_layer_calls_the_unfolded_attention() -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        before = block(x)
        block.self_attn = UnfoldedAttention(block.self_attn)  # type: ignore[assignment]
        torch.testing.assert_close(block(x), before, atol=1e-5, rtol=0)
        block.self_attn.out_proj.weight *= 10.0
        assert float((block(x) - before).abs().max()) > 0.1
