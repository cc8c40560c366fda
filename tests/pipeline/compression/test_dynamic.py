"""The dynamic candidate: which layers, how it is kept, and answers that no batch-mate changes."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.compression import dynamic
from pipeline.compression.dynamic import choose_layers, quantized, why_none
from pipeline.compression.layers import Shape, quantize_layers
from pipeline.compression.rebuild import rebuild
from pipeline.models import Classifier, ModelSpec, build, load_weights, save_weights
from pipeline.training.group import Group
from tests.pipeline.compression.graphs import answer, exported, mlp, vit

SPEC = ModelSpec(
    name="tests.pipeline.compression.graphs:vit", num_classes=4, channels=3, height=16, width=16,
    mean=(0.5,) * 3, std=(0.2,) * 3,
)  # fmt: skip
BLOCK = "encoder.layers.encoder_layer_0"
LAYERS = [f"{BLOCK}.self_attention.in_proj", f"{BLOCK}.self_attention.out_proj", f"{BLOCK}.mlp.0", f"{BLOCK}.mlp.3"]
NEIGHBOURS = (0.0, 1.0, 1e6)


def gains_of(figures: dict[Shape, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(shapes: Collection[Shape], *, bits: int, cache: Path) -> dict[Shape, float]:
        return {shape: figures.get(shape, 0.5) for shape in shapes}

    monkeypatch.setattr(dynamic, "measured_gains", measured)


def test_layer_is_int8_where_it_gains_enough(group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gains_of({Shape(16, 48, 5): 1.5, Shape(16, 32, 5): 1.2, Shape(32, 16, 5): 1.1999}, monkeypatch)
    choices = choose_layers(build(SPEC), bits=7, min_gain=1.2, cache=tmp_path, group=group)
    assert [(c.layer, c.gain) for c in choices if c.int8] == [(LAYERS[0], 1.5), (LAYERS[2], 1.2)]
    kept = {c.layer: c.reason for c in choices if not c.int8}
    assert kept[LAYERS[1]] == "0.50x, 1.2x is asked for"
    assert quantized(build(SPEC), choices, bits=7).spec.int8 == {LAYERS[0]: 7, LAYERS[2]: 7}


def test_process_that_does_not_lead_measures_nothing(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figures are the leading process's: here nobody leads, so the sum over processes is 0."""
    gains_of({Shape(16, 48, 5): 1.5}, monkeypatch)
    follower = Group(1, 1, group.device)
    choices = choose_layers(build(SPEC), bits=7, min_gain=1.2, cache=tmp_path, group=follower)
    assert {c.gain for c in choices} == {0.0}


def test_no_least_gain_takes_every_layer_unmeasured(group: Group, tmp_path: Path) -> None:
    choices = choose_layers(build(SPEC), bits=7, min_gain=0, cache=tmp_path, group=group)
    assert [c.layer for c in choices if c.int8] == [*LAYERS, "heads.head"]
    assert {c.gain for c in choices} == {None}
    assert list(tmp_path.iterdir()) == []


def test_model_without_a_layer_to_gain_is_told_why(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gains_of({Shape(16, 48, 5): 1.04}, monkeypatch)
    choices = choose_layers(build(SPEC), bits=7, min_gain=1.05, cache=tmp_path, group=group)
    assert not any(c.int8 for c in choices)
    assert f"(best: {LAYERS[0]}, 1.04x)" in why_none("dynamic", choices)
    assert why_none("dynamic", []).endswith("no linear layer that can be int8")


def test_candidate_is_rebuilt_from_its_spec_and_weights(group: Group, tmp_path: Path) -> None:
    model = build(SPEC)
    choices = choose_layers(model, bits=7, min_gain=0, cache=tmp_path, group=group)
    int8 = quantized(model, choices, bits=7).eval()
    save_weights(int8, tmp_path / "dynamic.safetensors")
    again = load_weights(
        rebuild(ModelSpec.model_validate(int8.spec.model_dump(mode="json"))), tmp_path / "dynamic.safetensors"
    )
    images = torch.randint(0, 256, (3, 16, 16, 3), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(again.eval()(images), int8(images))
        assert 0 < float((int8(images) - model.eval()(images)).abs().max()) < 0.5
    assert isinstance(model, Classifier)
    assert model.spec.int8 == {}


def int8_network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    net = mlp() if name == "mlp" else vit()
    quantize_layers(net, dict.fromkeys(["0", "2"] if name == "mlp" else [*LAYERS, "heads.head"], 7))
    return net, (48,) if name == "mlp" else (3, 16, 16)


def batches(shape: tuple[int, ...]) -> list[Tensor]:
    """Return batches of 1, 2, 3 and 8 whose last input is the same: with zeros, ones, huge values, other inputs."""
    inputs = torch.randn(8, *shape, generator=torch.Generator().manual_seed(0))
    made = [inputs[-1:]]
    for size in (2, 3, 8):
        made += [torch.cat([torch.full((size - 1, *shape), value), inputs[-1:]]) for value in NEIGHBOURS]
        made.append(inputs[-size:])
    return made


@pytest.mark.parametrize("name", ["mlp", "vit"])
def test_answers_are_bit_identical_whoever_shares_the_batch(name: str, tmp_path: Path) -> None:
    net, shape = int8_network(name)
    session = exported(net, shape, tmp_path / "net.onnx")
    alone, *shared = batches(shape)
    in_ort = answer(session, alone)[0]
    with torch.no_grad():
        in_torch = net(alone)[0]
        for batch in shared:
            assert np.array_equal(answer(session, batch)[-1], in_ort)
            assert torch.equal(net(batch)[-1], in_torch)
    assert np.abs(in_ort - in_torch.numpy()).max() < 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["mlp", "vit"])
def test_input_that_is_not_finite_never_becomes_a_finite_answer(name: str, value: float, tmp_path: Path) -> None:
    net, shape = int8_network(name)
    session = exported(net, shape, tmp_path / "net.onnx")
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    x[0].view(-1)[17] = value
    with torch.no_grad():
        for answers in (answer(session, x), net(x).numpy()):
            assert np.isnan(answers[0]).all()
            assert np.isfinite(answers[1]).all()


def test_graph_multiplies_in_int8_everywhere_but_between_queries_and_keys(tmp_path: Path) -> None:
    import onnx

    net, shape = int8_network("vit")
    exported(net, shape, tmp_path / "net.onnx")
    graph = onnx.load(tmp_path / "net.onnx")
    kinds = [node.op_type for node in graph.graph.node]
    assert kinds.count("MatMulIntegerToFloat") == 5
    assert kinds.count("MatMul") == 2
    assert "Gemm" not in kinds
    onnx.checker.check_model(graph)
