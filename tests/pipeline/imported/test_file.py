"""What a given file says about itself is read right, and what cannot be served is refused on one line."""

from pathlib import Path

import onnx
import pytest
from onnx.external_data_helper import uses_external_data

from pipeline.errors import PipelineError
from pipeline.imported.file import digest_of, files_of, inspect, read_whole
from tests.given import graph_text, write_graph


def refusal(path: Path, *, layout: str = "auto") -> str:
    with pytest.raises(PipelineError) as caught:
        inspect(path, layout=layout)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def beside(path: Path) -> Path:
    """Move the weights of a graph into a file beside it."""
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.bin", size_threshold=64)
    return path.parent / "w.bin"


def test_input_and_output_are_described(tmp_path: Path) -> None:
    given = inspect(write_graph(tmp_path, graph_text(number="float16", batch="4")), layout="auto")
    assert (given.input, given.output, given.number, given.layout, given.batch) == ("x", "y", "float16", "nchw", 4)
    assert given.image_size == {"height": 16, "width": 16, "channels": 3}


@pytest.mark.parametrize(
    ("shape", "asked", "layout", "size"),
    [
        ("N, 3, H, W", "auto", "nchw", {"channels": 3}),
        ("N, 32, 24, 1", "auto", "nhwc", {"height": 32, "width": 24, "channels": 1}),
        ("N, 3, 24, 3", "nhwc", "nhwc", {"height": 3, "width": 24, "channels": 3}),
        ("N, C, H, W", "nchw", "nchw", {}),
    ],
)
def test_layout_and_size_follow_from_the_shape(
    tmp_path: Path, shape: str, asked: str, layout: str, size: dict[str, int]
) -> None:
    given = inspect(write_graph(tmp_path, graph_text(shape=shape)), layout=asked)
    assert (given.layout, given.image_size) == (layout, size)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (graph_text(shape="N, 3, 24, 3"), "x [?, 3, 24, 3] may have its channels first or last; pass --onnx.layout"),
        (graph_text(shape="N, C, H, W"), "x [?, ?, ?, ?] may have its channels first or last; pass --onnx.layout"),
        (graph_text(shape="N, 768"), "its input x is no batch of images: [?, 768], not 4 dimensions"),
        (graph_text(number="int64"), "its input x is no image: int64, not one of float16, float32, float64, uint8"),
        (graph_text().replace(" x)", " x, float[1] second)"), "has 2 inputs (x, second); a classifier has one input"),
        (
            graph_text().replace("3] y)", "3] y, float[N, 3, 1, 1] m)"),
            "has 2 outputs (y, m); a classifier has one output",
        ),
        (
            graph_text("m = GlobalAveragePool(x) f = Reshape(m, flat) y = ArgMax(f)").replace(
                "float[N, 3] y", "int64[N, 3] y"
            ),
            "its output y holds no logits or probabilities: int64",
        ),
    ],
)
def test_graph_that_is_no_classifier_of_images_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(write_graph(tmp_path, text))


def test_number_of_channels_that_no_image_has_is_refused(tmp_path: Path) -> None:
    path = write_graph(tmp_path, graph_text(shape="N, 5, 16, 16"))
    assert "x [?, 5, 16, 16] has 5 channels as nchw; images have 1 or 3" in refusal(path, layout="nchw")


DROPOUT = "r = Constant<value_float = 0.5>() t = Constant<value = bool {{{mode}}}>() d = Dropout(x, r, t) "
NORM = "d, mean, var = BatchNormalization<training_mode = {mode}>(x, s, s, s, s) "
REST = "m = GlobalAveragePool(d) f = Reshape(m, flat) y = MatMul(f, w)"


def with_scale(text: str) -> str:
    return text.replace("float[3, 3] w", "float[3] s = {1, 1, 1}, float[3, 3] w")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (graph_text(DROPOUT.format(mode=1) + REST), "node d (Dropout) is in training mode"),
        (with_scale(graph_text(NORM.format(mode=1) + REST)), "node d (BatchNormalization) is in training mode"),
        (graph_text("d = RandomNormalLike(x) " + REST), "node d (RandomNormalLike) draws at random"),
        (
            graph_text("d, s, z = DynamicQuantizeLinear(x) " + REST),
            "node d (DynamicQuantizeLinear) is quantized already",
        ),
    ],
)
def test_node_that_would_not_answer_twice_alike_is_named(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(write_graph(tmp_path, text))


def test_dropout_in_inference_mode_is_taken(tmp_path: Path) -> None:
    text = graph_text(DROPOUT.format(mode=0) + REST)
    assert inspect(write_graph(tmp_path, text), layout="auto").number == "float32"


def test_node_inside_a_branch_is_found(tmp_path: Path) -> None:
    branch = (
        "c = Constant<value = bool {1}>() d = If(c) <then_branch = a () => (float[] p) { p = RandomNormalLike(x) }, "
    )
    branch += "else_branch = b () => (float[] q) { q = Identity(x) }> "
    assert "node p (RandomNormalLike) draws at random" in refusal(write_graph(tmp_path, graph_text(branch + REST)))


@pytest.mark.parametrize("content", [b"", b"no graph at all", bytes(range(256))])
def test_file_that_is_no_onnx_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.onnx").write_bytes(content)
    assert refusal(tmp_path / "bad.onnx").startswith("bad.onnx is no valid ONNX file: ")


def test_missing_file_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.onnx") == f"there is no ONNX file {tmp_path}/none.onnx; pass --onnx FILE"


def test_weights_that_lie_beside_the_file_are_merged_and_count_for_the_digest(tmp_path: Path) -> None:
    path = write_graph(tmp_path)
    whole = {tensor.name: tensor.raw_data for tensor in onnx.load(path).graph.initializer}
    weights = beside(path)
    assert files_of(path) == [path, weights]
    merged = read_whole(path)
    assert {tensor.name: tensor.data_location for tensor in merged.graph.initializer} == dict.fromkeys(whole, 0)
    before = digest_of(path)
    assert digest_of(path) == before
    weights.write_bytes(weights.read_bytes()[::-1])
    assert digest_of(path) != before


def test_missing_weights_are_named(tmp_path: Path) -> None:
    path = write_graph(tmp_path)
    beside(path).unlink()
    assert "w.bin" in refusal(path)


def test_weights_outside_the_folder_are_refused(tmp_path: Path) -> None:
    path = write_graph(tmp_path)
    beside(path)
    (tmp_path / "w.bin").rename(tmp_path.parent / "w.bin")
    model = onnx.load(path, load_external_data=False)
    for tensor in filter(uses_external_data, model.graph.initializer):
        next(entry for entry in tensor.external_data if entry.key == "location").value = "../w.bin"
    path.write_bytes(model.SerializeToString())
    assert "../w.bin" in refusal(path)


def test_functions_of_the_file_are_inlined(tmp_path: Path) -> None:
    text = graph_text("y = own.Head(x, flat, w)").replace('"": 17', '"": 17, "own": 1')
    text += '<domain: "own", opset_import: ["": 17]> Head (a, s, v) => (b) '
    text += "{ m = GlobalAveragePool(a) f = Reshape(m, s) d = RandomNormalLike(f) b = MatMul(d, v) }"
    assert "(RandomNormalLike) draws at random" in refusal(write_graph(tmp_path, text))
