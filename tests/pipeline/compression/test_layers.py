"""Which layers can be int8, what the others are refused for, and that a network of replaced layers is rebuilt."""

import copy
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from pipeline.compression.attention import UnfoldedAttention
from pipeline.compression.layers import Shape, find_layers, quantize_layers
from pipeline.compression.quantize import RowwiseInt8Linear
from pipeline.models import Classifier, ModelSpec
from tests.pipeline.compression.graphs import vit

SPEC = ModelSpec(name="own", num_classes=4, channels=3, height=16, width=16, mean=(0.5,) * 3, std=(0.2,) * 3)
BLOCK = "encoder.layers.encoder_layer_0"


class Odd(nn.Module):
    """A network of layers that must stay as they are, and one that need not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(768, 16)
        self.read = nn.Linear(16, 16)
        self.constant = nn.Linear(16, 16)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.cross = nn.MultiheadAttention(16, 2, batch_first=True)
        self.added = nn.MultiheadAttention(16, 2, batch_first=True, add_zero_attn=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return [B, 4]."""
        x = self.first(x_BCHW.flatten(1))
        x = nn.functional.linear(x, self.read.weight) + self.constant(torch.ones(1, 16))
        x = self.normed(x)[:, None]
        x = self.cross(x, x + 1, x, need_weights=False)[0]
        return cast(Tensor, self.head(self.added(x, x, x, need_weights=False)[0][:, 0]))


def test_attention_projections_and_their_rows_are_found() -> None:
    shapes, refused = find_layers(Classifier(SPEC, vit()))
    assert shapes == {
        f"{BLOCK}.self_attention.in_proj": Shape(16, 48, 5),
        f"{BLOCK}.self_attention.out_proj": Shape(16, 16, 5),
        f"{BLOCK}.mlp.0": Shape(16, 32, 5),
        f"{BLOCK}.mlp.3": Shape(32, 16, 5),
        "heads.head": Shape(16, 4, 1),
    }
    assert refused == {}


def test_layers_that_cannot_be_int8_are_named_with_the_reason() -> None:
    shapes, refused = find_layers(Classifier(SPEC, Odd()))
    assert sorted(shapes) == ["cross.out_proj", "first", "head"]
    assert {name: reason.split(" ", 4)[:4] for name, reason in refused.items()} == {
        "added": ["it", "adds", "a", "key"],
        "read": ["its", "weights", "are", "read"],
        "constant": ["its", "input", "is", "the"],
        "normed": ["ParametrizedLinear", "may", "compute", "something"],
        "cross.in_proj": ["its", "queries,", "keys", "and"],
    }


def test_looking_for_layers_leaves_the_model_as_it_is() -> None:
    model = Classifier(SPEC, vit())
    before = copy.deepcopy(model.net.state_dict())
    find_layers(model)
    assert list(model.net.state_dict()) == list(before)
    assert not any(module._forward_hooks for module in model.net.modules())


def test_only_the_named_layers_become_int8() -> None:
    net = vit()
    quantize_layers(net, {f"{BLOCK}.self_attention.in_proj": 7, "heads.head": 8})
    kinds = {name: type(module) for name, module in net.named_modules()}
    assert kinds[f"{BLOCK}.self_attention"] is UnfoldedAttention
    assert kinds[f"{BLOCK}.self_attention.in_proj"] is RowwiseInt8Linear
    assert kinds[f"{BLOCK}.self_attention.out_proj"] is nn.Linear
    assert kinds[f"{BLOCK}.mlp.0"] is nn.Linear
    assert cast(RowwiseInt8Linear, net.get_submodule("heads.head")).bits == 8


def test_nothing_named_changes_nothing() -> None:
    net = vit()
    quantize_layers(net, {})
    assert isinstance(net.get_submodule(f"{BLOCK}.self_attention"), nn.MultiheadAttention)


@pytest.mark.parametrize("names", [("self_attn.in_proj", "self_attn.out_proj"), ("linear1", "linear2")])
def test_encoder_layer_of_pytorch_itself_answers_with_its_int8_layers(names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        before = block(x)
        quantize_layers(block, dict.fromkeys(names, 7))
        assert 0 < float((block(x) - before).abs().max()) < 0.05
        assert torch.equal(block(x)[0], block(torch.stack([x[0], 1e3 * x[1]]))[0])
