"""Loading an archive's model: its files, its session, its golden images."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import pytest

from serving.worker import cpu
from serving.worker.contents import PackageError
from serving.worker.model import Model, Probabilities, load_model, open_session
from tests.colour import LABELS, SPEC, colour_archive, colour_onnx, png, unpack

Json = dict[str, Any]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(colour_archive(tmp_path_factory.mktemp("colour")))


@pytest.fixture
def directory(packed: Path, tmp_path: Path) -> Path:
    """An unpacked archive of its own, to be changed."""
    return Path(shutil.copytree(packed, tmp_path / "model", ignore=shutil.ignore_patterns("__pycache__")))


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def repack(directory: Path, name: str) -> None:
    """List the file as it is now, as somebody does who packs by hand."""
    digest = hashlib.sha256((directory / name).read_bytes()).hexdigest()
    edit(directory / "package.json", lambda package: package["files"].update({name: digest}))


def test_a_loaded_model_is_the_one_that_was_packed(packed: Path) -> None:
    model = load_model(packed)
    assert (model.name, model.version) == ("colour", "1.0")
    assert model.labels == tuple(LABELS)
    assert model.preprocessing == SPEC
    assert model.digest == hashlib.sha256(colour_onnx()).hexdigest()
    answers = model.run(np.stack([model.decode(png("blue")), model.decode(png("red"))]))
    assert answers.argmax(axis=1).tolist() == [LABELS.index("blue"), LABELS.index("red")]


@pytest.mark.parametrize("bits", ["7", "8", None])
def test_weights_for_another_kind_of_cpu_are_one_warning(
    directory: Path, bits: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "sums_in_32_bits", lambda _cpuinfo: False)
    graph = onnx.load(directory / "model.onnx")
    onnx.helper.set_model_props(graph, {"weight_bits": bits} if bits else {})
    (directory / "model.onnx").write_bytes(graph.SerializeToString())
    repack(directory, "model.onnx")
    load_model(directory)
    lines = [record.message for record in caplog.records]
    assert len(lines) == (bits == "8")
    assert all(line.startswith("the model's int8 weights have 8 bits") for line in lines)


@pytest.mark.parametrize("name", ["model.onnx", "golden.json", "quartet_entry.py", "quartet_worker/protocol.py"])
def test_a_changed_file_is_named(directory: Path, name: str) -> None:
    with (directory / name).open("ab") as stream:
        stream.write(b" ")
    with pytest.raises(PackageError, match=rf"{name} was changed"):
        load_model(directory)


@pytest.mark.parametrize("name", ["model.onnx", "package.json", "quartet_worker/__init__.py"])
def test_a_missing_file_is_named(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(PackageError, match=rf"{Path(name).name} is missing"):
        load_model(directory)


@pytest.mark.parametrize("name", ["numpy.py", "quartet_worker/extra.py", "PIL/__init__.py", "onnxruntime.so"])
def test_code_that_was_not_packed_is_refused(directory: Path, name: str) -> None:
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_text("")
    with pytest.raises(PackageError, match=rf"{name} was added"):
        load_model(directory)


def test_what_torchserve_and_python_write_beside_the_files_is_no_reason_to_refuse(directory: Path) -> None:
    (directory / "MAR-INF" / "MANIFEST.json").write_text("{}")
    (directory / "quartet_worker" / "__pycache__").mkdir(exist_ok=True)
    (directory / "quartet_worker" / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"")
    (directory / "logs").mkdir()
    assert load_model(directory).name == "colour"


def test_another_schema_is_refused(directory: Path) -> None:
    edit(directory / "package.json", lambda package: package.update(schema=2))
    with pytest.raises(PackageError, match="schema 2"):
        load_model(directory)


def test_a_golden_image_with_another_answer_is_refused_by_its_number(directory: Path) -> None:
    edit(directory / "golden.json", lambda golden: golden[1].update(probabilities=golden[0]["probabilities"]))
    repack(directory, "golden.json")
    with pytest.raises(PackageError, match=r"golden image 1, alone, is answered wrongly.*off by 1.*1 of 3 images"):
        load_model(directory)


@pytest.mark.parametrize(("off", "accepted"), [(0.0005, True), (0.002, False)])
def test_the_tolerance_decides(directory: Path, off: float, accepted: bool) -> None:
    def move(golden: list[Json]) -> None:
        golden[2]["probabilities"][0] += off

    edit(directory / "golden.json", move)
    repack(directory, "golden.json")
    if accepted:
        load_model(directory)
    else:
        with pytest.raises(PackageError, match="golden image 2"):
            load_model(directory)


def test_another_graph_with_a_right_digest_is_refused(directory: Path) -> None:
    (directory / "model.onnx").write_bytes(colour_onnx(scale=1.0))
    repack(directory, "model.onnx")
    with pytest.raises(PackageError, match="golden image 0, alone, is answered wrongly"):
        load_model(directory)


def test_a_graph_with_another_number_of_classes_is_refused(directory: Path) -> None:
    (directory / "model.onnx").write_bytes(colour_onnx(3))
    repack(directory, "model.onnx")
    with pytest.raises(PackageError, match=r"gives \(3,\) probabilities for 7 labels"):
        load_model(directory)


@pytest.mark.parametrize(("spoiled", "way"), [(1, "alone"), (3, "in a batch")])
def test_golden_images_are_answered_alone_and_as_one_batch(
    packed: Path, monkeypatch: pytest.MonkeyPatch, spoiled: int, way: str
) -> None:
    run = Model.run

    def wrong_for_one_size(model: Model, images_BHWC: Any) -> Probabilities:
        answers = run(model, images_BHWC)
        return answers * np.float32(np.nan) if len(images_BHWC) == spoiled else answers

    monkeypatch.setattr(Model, "run", wrong_for_one_size)
    with pytest.raises(PackageError, match=f"golden image 0, {way}, is answered wrongly"):
        load_model(packed)


def test_a_golden_image_that_cannot_be_decoded_is_refused(directory: Path) -> None:
    edit(directory / "golden.json", lambda golden: golden[0].update(image="aGVsbG8="))
    repack(directory, "golden.json")
    with pytest.raises(PackageError, match="golden image cannot be decoded: this is not an image"):
        load_model(directory)


def test_a_damaged_graph_is_one_line(directory: Path) -> None:
    (directory / "model.onnx").write_bytes(b"no graph")
    repack(directory, "model.onnx")
    with pytest.raises(PackageError, match=r"^model.onnx cannot be opened: [^\n]+$"):
        load_model(directory)


def test_a_session_has_one_thread_that_does_not_spin(packed: Path) -> None:
    options = open_session(packed / "model.onnx").get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


class SessionWithoutCuda:
    """What ONNX Runtime hands out, with no more than a warning, where CUDA cannot be loaded."""

    asked: object = None

    def __init__(self, _path: str, _options: object, *, providers: list[Any], **_more: object) -> None:
        SessionWithoutCuda.asked = providers

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]


@pytest.mark.parametrize(
    ("provider", "names"),
    [
        ("cuda", ["CUDAExecutionProvider"]),
        ("tensorrt", ["TensorrtExecutionProvider", "CUDAExecutionProvider"]),
    ],
)
def test_a_provider_that_does_not_load_is_refused(
    packed: Path, monkeypatch: pytest.MonkeyPatch, provider: str, names: list[str]
) -> None:
    preloaded: list[bool] = []
    monkeypatch.setattr(onnxruntime, "InferenceSession", SessionWithoutCuda)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: preloaded.append(True))
    message = f"{provider} was asked for, but {names[0]} cannot be used on GPU 1; only CPUExecutionProvider"
    with pytest.raises(PackageError, match=message):
        open_session(packed / "model.onnx", provider=provider, gpu_id=1)
    assert SessionWithoutCuda.asked == [*((name, {"device_id": 1}) for name in names), "CPUExecutionProvider"]
    assert preloaded == [True]


@pytest.mark.parametrize("gpu_id", [None, 0])
def test_a_graph_for_the_cpu_asks_for_nothing_else(
    packed: Path, monkeypatch: pytest.MonkeyPatch, gpu_id: int | None
) -> None:
    """Also where TorchServe assigns a GPU: what was measured on the CPU is served there."""
    monkeypatch.setattr(onnxruntime, "InferenceSession", SessionWithoutCuda)
    open_session(packed / "model.onnx", gpu_id=gpu_id)
    assert SessionWithoutCuda.asked == ["CPUExecutionProvider"]


def test_a_package_is_opened_with_the_provider_that_it_names(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = json.loads((directory / "package.json").read_text())
    (directory / "package.json").write_text(json.dumps(package | {"provider": "tensorrt"}))
    monkeypatch.setattr(onnxruntime, "InferenceSession", SessionWithoutCuda)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None)
    with pytest.raises(PackageError, match="tensorrt was asked for"):
        load_model(directory, gpu_id=0)


def test_a_package_with_a_provider_that_nobody_knows_is_refused(directory: Path) -> None:
    package = json.loads((directory / "package.json").read_text())
    (directory / "package.json").write_text(json.dumps(package | {"provider": "tpu"}))
    with pytest.raises(PackageError, match="provider 'tpu', one of cpu, cuda, tensorrt is needed"):
        load_model(directory)


def test_a_large_batch_is_run_in_parts_of_bounded_size(packed: Path) -> None:
    model = load_model(packed)
    images = np.stack([model.decode(png(colour)) for colour in ("red", "green", "blue")] * 15)
    sizes: list[int] = []

    class Counting:
        def run(self, names: list[str], feed: dict[str, Any]) -> Any:
            sizes.append(len(feed["images"]))
            return model.session.run(names, feed)

    counting = dataclasses.replace(model, session=cast(onnxruntime.InferenceSession, Counting()))
    answers = counting.run(images)
    assert sizes == [16, 16, 13]
    assert np.array_equal(answers, np.concatenate([model.run(image[None]) for image in images]))
