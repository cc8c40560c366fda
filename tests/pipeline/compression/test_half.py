"""Float16 forms answer as their float32 originals, in our contract, with half of the bytes."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper

from pipeline.compression.half import in_half
from pipeline.errors import PipelineError
from pipeline.export import export_onnx
from pipeline.session import open_session, probabilities
from serving.worker.contents import PROVIDERS
from tests.pipeline.compression.networks import HERE, random_model


def weight_bytes(path: Path) -> int:
    return sum(len(numpy_helper.to_array(t).tobytes()) for t in onnx.load(path).graph.initializer)


@pytest.mark.parametrize(("name", "size"), [("resnet20", 32), (f"{HERE}:small_vit", 32), ("convnext_tiny", 32)])
def test_answers_differ_by_rounding_and_the_weights_take_half_of_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    model = random_model(name, size)
    paths = [tmp_path / "float.onnx", tmp_path / "half.onnx"]
    for path, form in zip(paths, (model, in_half(model)), strict=True):
        export_onnx(form, path, opset=20, metadata={})
    monkeypatch.setitem(PROVIDERS, "cuda", ())  # the CPU computes float16, too, slowly
    images = np.random.default_rng(0).integers(0, 256, (4, size, size, 3), dtype=np.uint8)
    whole, half = (probabilities(open_session(path, provider="cuda"), images) for path in paths)
    assert half.dtype == np.float32
    assert 0 < np.abs(whole - half).max() < 5e-3
    weights = [t for t in onnx.load(paths[1]).graph.initializer if len(t.dims) > 1]
    assert {t.data_type for t in weights if max(t.dims) > 3} == {TensorProto.FLOAT16}
    assert weight_bytes(paths[1]) < 0.55 * weight_bytes(paths[0])


def test_the_original_stays_as_it_is() -> None:
    model = random_model()
    in_half(model)
    assert {p.dtype for p in model.net.parameters()} == {torch.float32}


def test_weight_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = random_model()
    with torch.no_grad():
        model.net.get_parameter("fc.weight")[0, 0] = 1e6
    with pytest.raises(PipelineError, match="not finite"):
        export_onnx(in_half(model), tmp_path / "half.onnx", opset=20, metadata={})
