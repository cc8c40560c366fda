"""A given graph becomes a candidate if it says the same in our contract; what it does not get is told."""

from pathlib import Path

import onnx
import pytest
from PIL import Image

from pipeline.artifact import StageResult
from pipeline.chain import materialize
from pipeline.config import load_recipe
from pipeline.errors import PipelineError
from pipeline.imported.stage import import_graph
from pipeline.stage import Context
from tests.given import BODY, SOFTMAX, conv_text, graph_text, write_graph, write_images


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images")


def imported(folder: Path, path: Path, *overrides: str) -> StageResult:
    recipe = load_recipe("onnx", ["--onnx.file", str(path), "--data.root", str(folder / "images"), *overrides])
    out = folder / "out"
    out.mkdir()
    return import_graph(Context(recipe, None, out, folder / "resume", folder / "cache", folder / "telemetry"))


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(PipelineError) as caught:
        imported(folder, write_graph(folder, text), *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_candidate_is_the_given_graph_with_its_labels(tmp_path: Path, images: Path) -> None:
    result = imported(tmp_path, write_graph(tmp_path))
    metadata = {entry.key: entry.value for entry in onnx.load(tmp_path / "out/fp32.onnx").metadata_props}
    assert (metadata["labels"], metadata["candidate"]) == ('["blue", "green", "red"]', "fp32")
    assert result.models["fp32"] == {"outputs": "logits", "opset": 17}
    assert result.metrics["given_val_top1"] == 1
    assert result.metrics["fp32_parity_agreement"] == 1
    assert result.report["parity_max_difference"]["fp32"] < 1e-5
    *notes, last = result.report["notes"]
    assert last.startswith("there is no candidate static: cannot quantise: fp32.onnx has no convolution")
    assert notes == [
        "the given graph has a top-1 of 100.00% on 3 validation images",
        "not applied: pruned, dynamic, pruned-dynamic, pruned-static; they start from PyTorch weights",
    ]


def test_probabilities_stay_as_they_are(tmp_path: Path, images: Path) -> None:
    assert imported(tmp_path, write_graph(tmp_path, graph_text(SOFTMAX))).models["fp32"]["outputs"] == "probabilities"


def test_wrong_order_of_classes_is_warned_about(tmp_path: Path, images: Path) -> None:
    text = graph_text().replace("0, 0, 20, 0, 20, 0, 20, 0, 0", "0, 20, 0, 20, 0, 0, 0, 0, 20")
    notes = imported(tmp_path, write_graph(tmp_path, text)).report["notes"]
    assert notes[0] == "the given graph has a top-1 of 0.00% on 3 validation images"
    assert notes[1].startswith("warning: guessing among 3 classes has 33.33%; are the graph's outputs in the order of")


def test_normalisation_of_the_recipe_is_inside(tmp_path: Path, images: Path) -> None:
    how = ["--onnx.scale=1", "--onnx.mean=1,2,3", "--onnx.std=200,100,50"]
    assert imported(tmp_path, write_graph(tmp_path), *how).report["parity_max_difference"]["fp32"] < 1e-5


def test_other_number_of_classes_is_refused(tmp_path: Path, images: Path) -> None:
    (images / "train/white").mkdir()
    for name in "abc":
        Image.new("RGB", (16, 16), "white").save(images / f"train/white/{name}.png")
    assert refusal(tmp_path, graph_text()) == (
        "given.onnx tells 3 classes apart, but the data has 4 (blue, green, red, ...); each needs one folder in train/"
    )


def test_graph_whose_answers_depend_on_batch_mates_is_refused(tmp_path: Path, images: Path) -> None:
    body = "m = ReduceMean<axes = [2, 3], keepdims = 0>(x) b = ReduceMean<axes = [0]>(m) f = Sub(m, b) y = MatMul(f, w)"
    message = refusal(tmp_path, graph_text(body))
    assert "3 image(s) at a time, as pixels, get other answers than by the file as it is: " in message
    assert "train/" in message


def test_batch_that_is_fixed_for_good_is_refused(tmp_path: Path, images: Path) -> None:
    text = graph_text(BODY.replace("MatMul(f, w)", "MatMul(g, w)").replace("y =", "g = Concat<axis = 0>(f, one) y ="))
    fixed = (
        text.replace("N, 3", "1, 3")
        .replace("float[1, 3] y", "float[2, 3] y")
        .replace("<float", "<float[1, 3] one = {0, 0, 0}, float")
    )
    assert "answers 1 image(s) with the shape [2, 3], not [B, K]" in refusal(tmp_path, fixed)
    (tmp_path / "out").rmdir()
    body = "m = GlobalAveragePool(x) f = Reshape(m, flat) g = Expand(f, size) y = MatMul(g, w)"
    held = graph_text("s = Add(x, bias) " + body.replace("(x)", "(s)"), batch="2", first=2)
    held = held.replace("<float", "<float[2, 3, 16, 16] bias, int64[2] size = {2, 3}, float", 1)
    held = held.replace("bias,", "bias = {" + ", ".join(["0"] * (2 * 3 * 256)) + "},", 1)
    message = refusal(tmp_path, held)
    assert message.startswith("given.onnx is fixed to batches of 2 and does not run on batches of 1: ")
    assert message.endswith("; export it again with a dynamic batch")


def test_convolutions_get_a_static_candidate(tmp_path: Path, images: Path) -> None:
    result = imported(tmp_path, write_graph(tmp_path, conv_text()), "--onnx.bits=7", "--static.methods=minmax")
    assert list(result.models) == ["fp32", "static"]
    assert result.metrics["static_agreement"] == 1
    graph = onnx.load(tmp_path / "out/static.onnx")
    assert {entry.key: entry.value for entry in graph.metadata_props}["candidate"] == "static"
    assert "QuantizeLinear" in {node.op_type for node in graph.graph.node}
    assert result.report["static"]["static"]["bits"] == 7
    assert result.data["static"] == {"static": result.report["static"]["static"]["facts"]}


def test_half_precision_is_served_and_not_quantized(tmp_path: Path, images: Path) -> None:
    result = imported(tmp_path, write_graph(tmp_path, conv_text().replace("float", "float16")))
    assert list(result.models) == ["fp32"]
    assert result.report["notes"][-1].startswith("there is no candidate static: cannot quantise: node ")
    assert "computes in float16" in result.report["notes"][-1]


def test_size_of_a_graph_that_takes_any_comes_from_the_recipe(tmp_path: Path, images: Path) -> None:
    path = write_graph(tmp_path, graph_text(shape="?, 3, ?, ?"))
    imported(tmp_path, path, "--data.height=16", "--data.width=12")
    taken = onnx.load(tmp_path / "out/fp32.onnx").graph.input[0].type.tensor_type.shape
    assert [dim.dim_value for dim in taken.dim] == [0, 16, 12, 3]


def test_static_candidate_is_left_out_when_it_is_not_asked_for(tmp_path: Path, images: Path) -> None:
    result = imported(tmp_path, write_graph(tmp_path, conv_text()), "--static.enabled=false")
    assert list(result.models) == ["fp32"]
    assert not [note for note in result.report["notes"] if note.startswith("there is no candidate static")]


def test_static_candidate_that_was_made_is_not_made_of_again(tmp_path: Path, images: Path) -> None:
    imported(tmp_path, write_graph(tmp_path, conv_text()), "--static.methods=minmax")
    with pytest.raises(PipelineError, match=r"static\.onnx: node .* is quantized already; name the float model"):
        imported(tmp_path, tmp_path / "out/static.onnx")


def test_same_file_elsewhere_is_not_done_again_and_a_changed_one_is(tmp_path: Path, images: Path) -> None:
    def key(path: Path) -> str:
        words = ["--onnx.file", str(path), "--data.root", str(images)]
        return materialize("import", load_recipe("onnx", words), root=tmp_path)[0].manifest.key

    (tmp_path / "elsewhere").mkdir()
    first = key(write_graph(tmp_path))
    assert key(write_graph(tmp_path / "elsewhere", name="other.onnx")) == first
    assert key(write_graph(tmp_path, graph_text(opset=18))) != first


def test_nothing_is_written_beside_the_file(tmp_path: Path, images: Path) -> None:
    folder = tmp_path / "read only"
    folder.mkdir()
    path = write_graph(folder)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.bin", size_threshold=64)
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    folder.chmod(0o555)
    result = imported(tmp_path, path)
    folder.chmod(0o755)
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    assert result.metrics["given_bytes"] == sum(file.stat().st_size for file in before)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["fp32.onnx"]
