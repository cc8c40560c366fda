"""What is exported is what was trained: parity is checked, and a wrong graph fails it."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from pipeline.artifact import Artifact, StageResult, publish
from pipeline.compression.half import in_half
from pipeline.config import ExportConfig, StaticConfig, load_recipe
from pipeline.data import Arrays, DataSet, Split
from pipeline.errors import PipelineError
from pipeline.export import add_half, add_static, check_parity, compare, export, export_onnx
from pipeline.loader import Images, open_images
from pipeline.models import Classifier, ModelSpec, build, save_weights
from pipeline.session import open_session, probabilities
from pipeline.stage import Context
from serving.worker.contents import PROVIDERS
from serving.worker.preprocess import Preprocessing


def spec_of(name: str = "lenet", *, channels: int = 1, size: int = 16) -> ModelSpec:
    return ModelSpec(
        name=name,
        num_classes=4,
        channels=channels,
        height=size,
        width=size,
        mean=(0.4,) * channels,
        std=(0.3,) * channels,
    )


def network(name: str = "lenet", *, seed: int = 0) -> Classifier:
    torch.manual_seed(seed)
    return build(spec_of(name))


def exported(model: Classifier, folder: Path) -> Path:
    path = folder / "model.onnx"
    export_onnx(model, path, opset=20, metadata={"labels": "[]"})
    return path


@pytest.fixture
def images(tmp_path: Path) -> Images:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 16, 16), dtype=np.uint8)
    split = Split(Arrays(pixels), np.arange(20), np.zeros(20, np.int64), "noise")
    return open_images(split, Preprocessing(height=16, width=16, channels=1, resize=16), cache=tmp_path)


def with_dropout_and_batchnorm(*, num_classes: int, channels: int, height: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Dropout(0.5), nn.LazyLinear(num_classes)
    )


def without_statistics(*, num_classes: int, channels: int, height: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm2d(channels, track_running_stats=False),
        nn.Flatten(),
        nn.Linear(channels * height * width, num_classes),
    )


def with_uneven_pooling(*, num_classes: int, channels: int, height: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(7), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)
    )


def test_graph_takes_pixels_and_gives_probabilities(tmp_path: Path, images: Images) -> None:
    session = open_session(exported(network(), tmp_path))
    (taken,), (given,) = session.get_inputs(), session.get_outputs()
    assert (taken.name, taken.type, taken.shape[1:]) == ("images", "tensor(uint8)", [16, 16, 1])
    assert isinstance(taken.shape[0], str)
    assert given.name == "probabilities"
    answers = probabilities(session, images.batch(np.arange(5)))
    assert answers.sum(axis=1) == pytest.approx(np.ones(5), abs=1e-6)


def test_nothing_lies_beside_the_graph(tmp_path: Path) -> None:
    path = exported(network("resnet20"), tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_graph_carries_labels_and_opset(tmp_path: Path) -> None:
    graph = onnx.load(exported(network(), tmp_path))
    assert {p.key: p.value for p in graph.metadata_props}["labels"] == "[]"
    assert [o.version for o in graph.opset_import if o.domain == ""] == [20]


def test_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    assert exported(network(), tmp_path).read_bytes() == exported(network(), tmp_path).read_bytes()


def test_parity_holds_for_what_was_exported(tmp_path: Path, images: Images) -> None:
    model = network().eval()
    parity = check_parity(model, exported(model, tmp_path), images, min_agreement=1.0, name="fp32")
    assert parity.agreement == 1
    assert parity.max_difference < 1e-5


def test_parity_keeps_to_one_thread_and_gives_the_others_back(tmp_path: Path, images: Images) -> None:
    seen: set[int] = set()
    model = network().eval()
    path, before = exported(model, tmp_path), torch.get_num_threads()
    model.register_forward_hook(lambda *_: seen.add(torch.get_num_threads()))
    torch.set_num_threads(3)
    check_parity(model, path, images, min_agreement=1.0, name="fp32")
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert (seen, after) == ({1}, 3)


def test_one_wrong_bias_in_the_graph_fails_parity(tmp_path: Path, images: Images) -> None:
    model = network().eval()
    path = exported(model, tmp_path)
    graph = onnx.load(path)
    bias = next(t for t in graph.graph.initializer if t.name.endswith("fc2.bias"))
    wrong = numpy_helper.to_array(bias).copy()
    wrong[0] += 3
    bias.CopyFrom(numpy_helper.from_array(wrong, bias.name))
    onnx.save(graph, path)
    with pytest.raises(PipelineError, match=r"candidate fp32: the ONNX graph agrees with PyTorch on .* Worst: image"):
        check_parity(model, path, images, min_agreement=1.0, name="fp32")


def test_training_mode_is_left_out_of_the_graph_and_given_back(tmp_path: Path, images: Images) -> None:
    model = build(spec_of("tests.pipeline.test_export:with_dropout_and_batchnorm"))
    model(torch.zeros(2, 16, 16, 1, dtype=torch.uint8))
    model.train()
    session = open_session(exported(model, tmp_path))
    assert model.training
    whole = probabilities(session, images.batch(np.arange(8)))
    assert (whole == probabilities(session, images.batch(np.arange(8)))).all()
    assert (whole[:1] == probabilities(session, images.batch(np.arange(1)))).all()


def test_batchnorm_without_statistics_is_refused(tmp_path: Path) -> None:
    model = build(spec_of("tests.pipeline.test_export:without_statistics"))
    with pytest.raises(PipelineError, match=r"layer 0 .* BatchNorm without running statistics"):
        exported(model, tmp_path)


def test_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    model = network()
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = float("nan")
    with pytest.raises(PipelineError, match=r"conv1\.weight of lenet is not finite"):
        exported(model, tmp_path)


def test_adaptive_pooling_that_does_not_divide_is_exact_or_refused(tmp_path: Path, images: Images) -> None:
    model = build(spec_of("tests.pipeline.test_export:with_uneven_pooling")).eval()
    try:
        path = exported(model, tmp_path)
    except PipelineError as error:
        assert "cannot be exported" in str(error)  # noqa: PT017  # either outcome is right, a wrong value is not
    else:
        assert check_parity(model, path, images, min_agreement=1.0, name="fp32").max_difference < 1e-4


def test_tie_is_counted_and_not_held_against_the_graph() -> None:
    reference = np.array([[0.50001, 0.49999], [0.9, 0.1]], np.float32)
    answers = np.array([[0.49999, 0.50001], [0.9, 0.1]], np.float32)
    parity = compare(reference, answers)
    assert (parity.disagreements, parity.ties, parity.agreement) == (0, 1, 1.0)


def test_other_top_1_beyond_a_tie_is_a_disagreement() -> None:
    parity = compare(np.array([[0.6, 0.4], [0.9, 0.1]], np.float32), np.array([[0.4, 0.6], [0.9, 0.1]], np.float32))
    assert (parity.disagreements, parity.agreement, parity.worst) == (1, 0.5, (0,))


def test_answer_that_is_not_finite_is_a_disagreement() -> None:
    parity = compare(np.array([[0.5, 0.5]], np.float32), np.array([[np.nan, 0.5]], np.float32))
    assert parity.disagreements == 1


def test_single_class_is_compared() -> None:
    assert compare(np.ones((3, 1), np.float32), np.ones((3, 1), np.float32)).agreement == 1


def with_static(folder: Path, images: Images, *, models: tuple[str, ...] = ("fp32", "pruned")) -> StageResult:
    for name in models:
        export_onnx(network(), folder / f"{name}.onnx", opset=20, metadata={"labels": "[]", "candidate": name})
    result = StageResult(data={"labels": []}, models={name: {"name": "lenet"} for name in models})
    config = StaticConfig(methods=("minmax",), max_loss=100)
    return add_static(result, folder, images.batch(np.arange(20)), images, config=config, bits="7")


def test_every_float_graph_gets_a_static_candidate(tmp_path: Path, images: Images) -> None:
    result = with_static(tmp_path, images)
    assert list(result.models) == ["fp32", "pruned", "static", "pruned-static"]
    assert result.models["static"] == result.models["fp32"]
    metadata = {p.key: p.value for p in onnx.load(tmp_path / "static.onnx").metadata_props}
    assert (metadata["labels"], metadata["candidate"], metadata["static_method"]) == ("[]", "static", "minmax")
    assert result.data["static"]["static"]["static_weight_bits"] == "7"
    assert result.metrics["static_onnx_bytes"] == (tmp_path / "static.onnx").stat().st_size
    assert result.report["static"]["static"]["trial"]["agreement"] == result.metrics["static_agreement"]


def compressed(folder: Path, *names: str) -> Artifact:
    """Publish a network under each name, as the compress stage does."""
    model = network()

    def work(out: Path) -> StageResult:
        for name in names:
            save_weights(model, out / f"{name}.safetensors")
        return StageResult(data={}, models={name: model.spec.model_dump(mode="json") for name in names})

    facts: dict[str, Any] = {"source": "", "config": {}, "parent": None, "versions": {}, "data": {}}
    return publish(folder, stage="compress", facts=facts, work=work)


@pytest.mark.parametrize(
    ("provider", "made"),
    [
        ("cpu", ["fp32", "pruned", "static", "pruned-static"]),
        ("cuda", ["fp32", "pruned", "fp16", "pruned-fp16"]),
        ("tensorrt", ["fp32", "pruned", "fp16", "pruned-fp16", "static", "pruned-static"]),
    ],
)
def test_stage_makes_what_the_provider_has_kernels_for(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch, provider: str, made: list[str]
) -> None:
    for name in ("cuda", "tensorrt"):
        monkeypatch.setitem(PROVIDERS, name, ())
    dataset = DataSet(("a", "b", "c", "d"), train=images.split, val=images.split, test=images.split)
    monkeypatch.setattr("pipeline.export.open_dataset", lambda _config, *, cache: dataset)
    size = ("--data.height=16", "--data.width=16", "--data.channels=1")
    loose = ("--static.max_loss=100", "--static.methods=minmax", "--export.min_agreement=0.5")
    recipe = load_recipe("digits", [*size, *loose, f"--export.provider={provider}"])
    out = tmp_path / "out"
    out.mkdir()
    source = compressed(tmp_path / "made", "fp32", "pruned")
    result = export(Context(recipe, source, out, tmp_path / "resume", tmp_path, tmp_path / "telemetry"))
    assert list(result.models) == made
    assert all((out / f"{name}.onnx").is_file() for name in made)


def with_half(folder: Path, images: Images, monkeypatch: pytest.MonkeyPatch, *, agreement: float) -> StageResult:
    """Add the float16 form of a published model; the CPU stands in for the GPU under its name."""
    monkeypatch.setitem(PROVIDERS, "cuda", ())
    source = compressed(folder / "made", "pruned")
    result = StageResult(data={}, models=source.manifest.models, report={"notes": ["first"]})
    config = ExportConfig(provider="cuda", min_agreement=agreement)
    return add_half(result, folder, source, images, labels=["a"], config=config)


def test_float_model_gets_a_float16_candidate_for_a_gpu(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = with_half(tmp_path, images, monkeypatch, agreement=0.9)
    assert list(result.models) == ["pruned", "pruned-fp16"]
    assert result.metrics["pruned-fp16_parity_agreement"] >= 0.9
    assert result.metrics["pruned-fp16_onnx_bytes"] == (tmp_path / "pruned-fp16.onnx").stat().st_size
    metadata = {p.key: p.value for p in onnx.load(tmp_path / "pruned-fp16.onnx").metadata_props}
    assert (metadata["candidate"], metadata["labels"]) == ("pruned-fp16", '["a"]')
    assert result.report["notes"] == ["first"]


def test_float16_candidate_that_answers_otherwise_is_a_note_and_no_failure(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.export.in_half", lambda model: in_half(network(seed=1)))
    result = with_half(tmp_path, images, monkeypatch, agreement=1.0)
    assert list(result.models) == ["pruned"]
    assert result.report["notes"][1].startswith("there is no candidate pruned-fp16: candidate pruned-fp16: the ONNX")
    assert not (tmp_path / "pruned-fp16.onnx").exists()


def test_static_candidate_answers_like_its_float_graph(tmp_path: Path, images: Images) -> None:
    with_static(tmp_path, images, models=("fp32",))
    pixels = images.batch(np.arange(20))
    exact, int8 = (probabilities(open_session(tmp_path / f"{name}.onnx"), pixels) for name in ("fp32", "static"))
    assert int8 == pytest.approx(exact, abs=0.02)


def test_static_candidate_that_cannot_be_made_is_a_note_and_no_failure(tmp_path: Path, images: Images) -> None:
    result = StageResult(data={}, models={"fp32": {}}, report={"notes": ["first"]})
    (tmp_path / "fp32.onnx").write_bytes(b"damaged")
    added = add_static(result, tmp_path, images.batch(np.arange(4)), images, config=StaticConfig(), bits="7")
    assert list(added.models) == ["fp32"]
    assert added.report["notes"][0] == "first"
    assert added.report["notes"][1].startswith("there is no candidate static: cannot quantise: fp32.onnx")
