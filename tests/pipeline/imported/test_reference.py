"""The given graph runs on images as its user prepared them, however many it takes at once."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import PipelineError
from pipeline.imported.reference import Floats, Normalisation, needs_softmax, open_reference, softmax_of
from tests.given import BODY, graph_text, write_graph

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
IMAGENET = Normalisation(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def answers(path: Path, normalisation: Normalisation = IMAGENET, *, layout: str = "auto") -> Floats:
    return open_reference(path, layout=layout, normalisation=normalisation).answers(IMAGES)


def by_hand(normalisation: Normalisation = IMAGENET) -> Floats:
    means = IMAGES.mean(axis=(1, 2)) / normalisation.scale
    logits: Floats = (20 * (means - normalisation.mean) / normalisation.std)[:, ::-1].astype(np.float32)
    return logits


def test_pixels_are_scaled_normalised_and_transposed(tmp_path: Path) -> None:
    assert answers(write_graph(tmp_path)) == pytest.approx(by_hand(), abs=1e-4)


def test_one_value_stands_for_all_channels(tmp_path: Path) -> None:
    how = Normalisation(scale=1, mean=(127.5,), std=(127.5,))
    assert answers(write_graph(tmp_path), how) == pytest.approx(by_hand(how), abs=1e-4)


def test_channels_last_are_left_last(tmp_path: Path) -> None:
    body = "t = Transpose<perm = [0, 3, 1, 2]>(x) m = GlobalAveragePool(t) " + BODY.partition("(x) ")[2]
    path = write_graph(tmp_path, graph_text(body, shape="N, 16, 16, 3"))
    assert answers(path) == pytest.approx(by_hand(), abs=1e-4)


def test_graph_with_a_fixed_batch_gets_full_batches(tmp_path: Path) -> None:
    path = write_graph(tmp_path, graph_text(batch="4", first=4))
    assert answers(path) == pytest.approx(by_hand(), abs=1e-4)


def test_double_precision_is_taken(tmp_path: Path) -> None:
    text = graph_text(BODY.replace("GlobalAveragePool(x)", "ReduceMean<axes = [2, 3]>(x)"), number="double")
    assert answers(write_graph(tmp_path, text.replace("float[3, 3]", "double[3, 3]"))) == (
        pytest.approx(by_hand(), abs=1e-4)
    )


def test_graph_of_pixels_takes_no_normalisation(tmp_path: Path) -> None:
    body = "c = Cast<to = 1>(x) m = GlobalAveragePool(c) " + BODY.partition("(x) ")[2]
    path = write_graph(tmp_path, graph_text(body).replace("float[N, 3, 16", "uint8[N, 3, 16"))
    assert answers(path, Normalisation()) == pytest.approx(by_hand(Normalisation(1, (0, 0, 0), (1, 1, 1))), rel=1e-5)
    with pytest.raises(PipelineError, match=r"takes uint8, so it normalises by itself; leave out onnx\.mean"):
        answers(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            graph_text("y = far.Away(x)").replace('"": 17', '"": 17, "far": 1'),
            r"given\.onnx: ONNX Runtime cannot open it: .*Away",
        ),
        (graph_text(batch="1", first=2), r"given\.onnx does not run on an image of shape \[1, 3, 16, 16\]: "),
        (
            graph_text("y = GlobalAveragePool(x)").replace("[N, 3] y", "[N, 3, 1, 1] y"),
            r"shape \[1, 3, 1, 1\], not \[B",
        ),
        (graph_text(BODY.replace("y =", "n =") + " y = Log(n)").replace("20", "-20"), "a value that is not finite"),
    ],
)
def test_graph_that_does_not_answer_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PipelineError, match=message) as caught:
        answers(write_graph(tmp_path, text), Normalisation())
    assert "\n" not in str(caught.value)


LOGITS = np.array([[2, -1, 0], [1, 1, 1]], np.float32)


def test_logits_and_probabilities_are_told_apart() -> None:
    assert needs_softmax(LOGITS, asked="auto", name="a.onnx")
    assert not needs_softmax(softmax_of(LOGITS), asked="auto", name="a.onnx")


@pytest.mark.parametrize(("asked", "given"), [("logits", softmax_of(LOGITS)), ("probabilities", LOGITS)])
def test_answers_that_are_not_what_the_recipe_says_are_refused(asked: str, given: Floats) -> None:
    with pytest.raises(PipelineError, match=rf"onnx\.outputs = '{asked}', but .* of a\.onnx"):
        needs_softmax(given, asked=asked, name="a.onnx")


def test_large_logits_do_not_overflow() -> None:
    assert softmax_of(np.array([[1000, 0]], np.float32)).tolist() == [[1, 0]]
