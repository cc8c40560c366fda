"""A wrapped graph takes pixels and gives probabilities, and says what the given one says."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from pipeline.errors import PipelineError
from pipeline.imported.file import inspect, read_whole
from pipeline.imported.reference import Floats, Normalisation, open_reference, softmax_of
from pipeline.imported.wrap import wrap
from pipeline.session import open_session, probabilities
from tests.given import BODY, SOFTMAX, graph_text, write_graph

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
HOW = Normalisation(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))


def wrapped(path: Path, *, how: Normalisation = HOW, softmax: bool = True) -> Path:
    model = wrap(
        read_whole(path),
        inspect(path, layout="auto"),
        normalisation=how,
        softmax=softmax,
        image_HWC=(16, 16, 3),
        num_classes=3,
        metadata={"labels": "[]"},
    )
    target = path.with_name("fp32.onnx")
    target.write_bytes(model.SerializeToString(deterministic=True))
    return target


def difference(path: Path, *, how: Normalisation = HOW, softmax: bool = True) -> float:
    """Return the largest difference of a probability between the given graph and the wrapped one at 1, 3 and 5."""
    expected = open_reference(path, layout="auto", normalisation=how).probabilities(IMAGES, softmax=softmax)
    session = open_session(wrapped(path, how=how, softmax=softmax))
    answers: list[Floats] = [probabilities(session, IMAGES[:count]) for count in (1, 3, 5)]
    return max(float(np.abs(answer - expected[: len(answer)]).max()) for answer in answers)


DOUBLE = graph_text(BODY.replace("GlobalAveragePool(x)", "ReduceMean<axes = [2, 3]>(x)"), number="double")
DOUBLE = DOUBLE.replace("float[3, 3]", "double[3, 3]")
NHWC = "t = Transpose<perm = [0, 3, 1, 2]>(x) m = GlobalAveragePool(t) " + BODY.partition("(x) ")[2]


@pytest.mark.parametrize(
    "text",
    [
        graph_text(),
        graph_text(NHWC, shape="N, 16, 16, 3"),
        DOUBLE,
        graph_text(batch="1", first=1),
        graph_text(batch="4", first=4),
        graph_text(BODY.replace("Reshape", "Reshape<allowzero = 1>"), batch="1", first=1),
        graph_text("flat = Constant<value = int64[2] {1, 3}>() " + BODY, batch="1").replace(
            ", int64[2] flat = {-1, 3}", ""
        ),
        graph_text(opset=10),
        graph_text(opset=12),
        graph_text().replace(" x)", " images)").replace("(x)", "(images)").replace("y", "probabilities"),
    ],
    ids=[
        "nchw",
        "nhwc",
        "double",
        "batch 1",
        "batch 4",
        "batch 1, newer exporter",
        "batch 1, constant",
        "opset 10",
        "opset 12",
        "our own names",
    ],
)
def test_wrapped_graph_gives_the_answers_of_the_given_one(tmp_path: Path, text: str) -> None:
    assert difference(write_graph(tmp_path, text)) < 1e-5


def test_rows_stay_rows(tmp_path: Path) -> None:
    ramp = ", ".join(str(row) for row in range(16))
    text = graph_text("r = Mul(x, ramp) " + BODY.replace("(x)", "(r)"))
    path = write_graph(tmp_path, text.replace("<float[3, 3] w", f"<float[16, 1] ramp = {{{ramp}}}, float[3, 3] w"))
    assert difference(path) < 1e-5


def test_half_precision_differs_by_its_rounding_only(tmp_path: Path) -> None:
    path = write_graph(tmp_path, graph_text(number="float16").replace("float[3, 3]", "float16[3, 3]"))
    assert difference(path) < 1e-3


def test_probabilities_get_no_second_softmax(tmp_path: Path) -> None:
    assert difference(write_graph(tmp_path, graph_text(SOFTMAX)), softmax=False) < 1e-5


def test_graph_of_pixels_gets_no_normalisation(tmp_path: Path) -> None:
    body = "c = Cast<to = 1>(x) n = Div(c, full) m = GlobalAveragePool(n) " + BODY.partition("(x) ")[2]
    text = (
        graph_text(body)
        .replace("float[N, 3, 16", "uint8[N, 3, 16")
        .replace("<float[3, 3] w", "<float full = {255}, float[3, 3] w")
    )
    assert difference(write_graph(tmp_path, text), how=Normalisation()) < 1e-6


def test_contract_is_that_of_an_exported_graph(tmp_path: Path) -> None:
    path = wrapped(write_graph(tmp_path))
    session = open_session(path)
    (taken,), (given,) = session.get_inputs(), session.get_outputs()
    assert (taken.name, taken.type, taken.shape) == ("images", "tensor(uint8)", ["batch", 16, 16, 3])
    assert (given.name, given.type, given.shape) == ("probabilities", "tensor(float)", ["batch", 3])
    metadata = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert metadata == {"labels": "[]", "quartet": "1"}


def test_wrapped_graph_can_be_wrapped_again(tmp_path: Path) -> None:
    once = wrapped(write_graph(tmp_path))
    expected = probabilities(open_session(once), IMAGES)
    again = wrapped(once.rename(tmp_path / "once.onnx"), how=Normalisation(), softmax=False)
    assert (probabilities(open_session(again), IMAGES) == expected).all()


def test_weights_that_old_files_list_as_inputs_are_kept(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(graph_text(opset=11))
    model.ir_version = 3
    for tensor in model.graph.initializer:
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    onnx.save(model, tmp_path / "old.onnx")
    assert difference(tmp_path / "old.onnx") < 1e-5


def test_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    path = write_graph(tmp_path)
    assert wrapped(path).read_bytes() == wrapped(path).read_bytes()


def test_operators_that_cannot_be_upgraded_are_refused(tmp_path: Path) -> None:
    text = graph_text(BODY.replace("MatMul(f, w)", "Gemm<broadcast = 1>(f, w, bias)"), opset=6)
    path = write_graph(tmp_path, text.replace("<float[3, 3] w", "<float[3] bias = {0, 0, 0}, float[3, 3] w"))
    with pytest.raises(
        PipelineError, match=r"given\.onnx has opset 6 and cannot be upgraded to 13 .*; export it again"
    ):
        wrapped(path)


def test_shapes_that_are_no_longer_used_are_left_out(tmp_path: Path) -> None:
    graph = onnx.load(wrapped(write_graph(tmp_path, graph_text(batch="1", first=1)))).graph
    used = {name for node in graph.node for name in node.input}
    assert {tensor.name for tensor in graph.initializer} - used == set()


def test_softmax_is_over_the_classes(tmp_path: Path) -> None:
    path = write_graph(tmp_path)
    expected = softmax_of(open_reference(path, layout="auto", normalisation=HOW).answers(IMAGES))
    assert probabilities(open_session(wrapped(path)), IMAGES) == pytest.approx(expected, abs=1e-6)
