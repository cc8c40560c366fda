"""Rows in, answers out: one bad row harms no other."""

import base64
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from serving.worker.handler import Handler, rank
from serving.worker.model import Model, Probabilities
from serving.worker.protocol import read_request
from tests.colour import LABELS, colour_archive, png, unpack
from tests.serving.worker.batch import Answers, FakeContext, initialize
from tests.serving.worker.images import BLUE, GREEN, RED, encode, halves, photo, solid


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(colour_archive(tmp_path_factory.mktemp("colour")))


@pytest.fixture(scope="module")
def loaded(directory: Path) -> Handler:
    return initialize(directory)


@pytest.fixture
def failing(directory: Path) -> Handler:
    """A handler of its own, whose model may be replaced."""
    return initialize(directory)


def send(served: Handler, *bodies: Any, top_k: str | None = None) -> Answers:
    headers = [{} if top_k is None else {"x-top-k": top_k}] * len(bodies)
    return Answers(served, [{"body": body} for body in bodies], FakeContext(Path(), headers=headers))


def listed(*images: bytes) -> bytes:
    return json.dumps([base64.b64encode(image).decode() for image in images]).encode()


def test_an_answer_names_class_probability_and_the_model_that_gave_it(loaded: Handler, directory: Path) -> None:
    answers = send(loaded, png("red"))
    body = answers.bodies[0]
    assert answers.statuses == [200]
    assert list(body) == ["predictions", "model", "version", "digest"]
    assert body["predictions"][0] == {"label": "red", "index": 0, "probability": body["predictions"][0]["probability"]}
    assert body["predictions"][0]["probability"] > 0.999
    package = json.loads((directory / "package.json").read_text())
    assert (body["model"], body["version"]) == ("colour", "1.0")
    assert body["digest"] == package["files"]["model.onnx"]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_red_is_red_in_every_mode_that_can_hold_it(loaded: Handler, mode: str) -> None:
    expected = send(loaded, png("red")).bodies[0]["predictions"]
    found = send(loaded, encode(solid(RED).convert(mode))).bodies[0]["predictions"]
    assert [item["label"] for item in found] == [item["label"] for item in expected]
    assert [item["probability"] for item in found] == pytest.approx(
        [item["probability"] for item in expected], abs=1e-3
    )


@pytest.mark.parametrize("mode", ["L", "LA", "1"])
def test_grey_images_are_answered(loaded: Handler, mode: str) -> None:
    white = encode(Image.new("L", (48, 48), 255).convert(mode))
    assert send(loaded, white).best() == "white"


@pytest.mark.parametrize(("colour", "label"), [(RED, "red"), (GREEN, "green"), (BLUE, "blue")])
def test_a_cmyk_photo_is_answered_like_its_original(loaded: Handler, colour: tuple[int, int, int], label: str) -> None:
    assert send(loaded, encode(solid(colour).convert("CMYK"), "JPEG")).best() == label


def test_top_and_bottom_are_told_apart(loaded: Handler) -> None:
    two = encode(halves(RED, BLUE, size=(48, 48)))
    assert send(loaded, two).best() == "red over blue"


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_an_animation_is_answered_by_its_first_frame_every_time(loaded: Handler, kind: str) -> None:
    frames = [solid(colour, size=(48, 48)) for colour in (RED, GREEN, BLUE)]
    moving = encode(frames[0], kind, save_all=True, append_images=frames[1:])
    assert {send(loaded, moving).best() for _ in range(3)} == {"red"}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "no_image"),
        (b"\0", 415, "unsupported_image"),
        (b"some text", 415, "unsupported_image"),
        (b"%PDF-1.7", 415, "unsupported_image"),
        (b"\0\0\0\x18ftypheic", 415, "unsupported_image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415, "unsupported_image"),
        (encode(photo(), "JPEG")[:2000], 400, "bad_image"),
        (b'"lone quote', 400, "bad_json"),
    ],
)
def test_what_is_no_usable_image_is_the_clients_fault(loaded: Handler, body: bytes, status: int, code: str) -> None:
    answers = send(loaded, body)
    assert answers.statuses == [status]
    assert answers.bodies[0]["error"]["code"] == code


def test_accepted_formats_are_named_when_another_one_comes(loaded: Handler) -> None:
    message = send(loaded, b"\0\0\0\x18ftypheic").bodies[0]["error"]["message"]
    assert "JPEG, PNG, WebP, GIF, BMP and TIFF" in message


def test_requests_with_one_two_and_five_images_get_lists_of_their_own_length(loaded: Handler) -> None:
    answers = send(
        loaded,
        listed(png("blue")),
        png("white"),
        listed(png("red"), png("green")),
        listed(*(png(colour) for colour in ("green", "blue", "red", "black", "white"))),
    )
    assert answers.statuses == [200] * 4
    assert answers.best(1) == "white"
    labels = [[image[0]["label"] for image in answers.bodies[idx]["predictions"]] for idx in (0, 2, 3)]
    assert labels == [["blue"], ["red", "green"], ["green", "blue", "red", "black", "white"]]


def test_a_bad_image_is_refused_alone(loaded: Handler) -> None:
    answers = send(loaded, png("red"), png("green")[:50], b"", listed(png("blue"), b"no image"), png("black"))
    assert answers.statuses == [200, 400, 400, 415, 200]
    assert (answers.best(0), answers.best(4)) == ("red", "black")
    assert answers.bodies[3]["error"]["message"].startswith("images[1]: ")


def test_the_only_image_of_a_request_is_refused_without_a_position(loaded: Handler) -> None:
    assert send(loaded, png("red")[:50]).bodies[0]["error"]["message"].startswith("the PNG image is damaged")


def test_a_batch_without_any_image_is_answered_without_a_run(loaded: Handler, caplog: pytest.LogCaptureFixture) -> None:
    assert send(loaded, b"", b"x").statuses == [400, 415]
    assert caplog.records == []


def test_an_image_gets_the_same_bits_alone_and_in_company(loaded: Handler) -> None:
    alone = send(loaded, png("red"), top_k="7").bodies[0]["predictions"]
    company = send(loaded, png("blue"), png("red"), png("black"), b"", png("white"), top_k="7")
    assert company.bodies[1]["predictions"] == alone


def test_a_whole_batch_is_one_run(failing: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    run = Model.run

    def counted(model: Model, images: Any) -> Probabilities:
        shapes.append(images.shape)
        return run(model, images)

    monkeypatch.setattr(Model, "run", counted)
    send(failing, png("red"), listed(png("red"), png("blue")), b"bad", png("green"))
    assert shapes == [(4, 32, 32, 3)]


@pytest.mark.parametrize(("top_k", "count"), [(None, 5), ("1", 1), ("7", 7), ("1000000000", 7)])
def test_top_k_is_clamped_to_the_classes(loaded: Handler, top_k: str | None, count: int) -> None:
    predictions = send(loaded, png("red"), top_k=top_k).bodies[0]["predictions"]
    assert len(predictions) == count
    assert [item["probability"] for item in predictions] == sorted(
        (item["probability"] for item in predictions), reverse=True
    )
    assert all(item["label"] == LABELS[item["index"]] for item in predictions)


def test_each_row_has_its_own_top_k(loaded: Handler) -> None:
    context = FakeContext(Path(), headers=[{"x-top-k": "1"}, {}, {"x-top-k": "0"}])
    answers = Answers(loaded, [{"body": png("red")}] * 3, context)
    assert answers.statuses == [200, 200, 400]
    assert [len(body["predictions"]) for body in answers.bodies[:2]] == [1, 5]


@pytest.mark.parametrize("top_k", ["0", "-1", "many"])
def test_a_meaningless_top_k_is_refused(loaded: Handler, top_k: str) -> None:
    answers = send(loaded, png("red"), top_k=top_k)
    assert answers.statuses == [400]
    assert answers.bodies[0]["error"]["code"] == "bad_top_k"


@pytest.mark.parametrize("labels", [1, 2])
def test_a_model_with_few_classes_answers_with_all_of_them(tmp_path: Path, labels: int) -> None:
    served = initialize(unpack(colour_archive(tmp_path, labels=labels)))
    answers = send(served, png("red"))
    assert answers.best() == "red"
    assert len(answers.bodies[0]["predictions"]) == labels


def test_logits_beyond_a_naive_softmax_give_valid_probabilities(tmp_path: Path) -> None:
    served = initialize(unpack(colour_archive(tmp_path, scale=3e37)))
    answers = send(served, png("red"), png("blue"))
    assert (answers.best(0), answers.best(1)) == ("red", "blue")
    assert answers.bodies[0]["predictions"][0]["probability"] == 1.0


def test_a_non_finite_output_is_our_fault_and_only_its_requests_error(failing: Handler, directory: Path) -> None:
    replace_run(failing, lambda answers: spoil(answers, 1))
    answers = send(failing, png("red"), png("green"), png("blue"))
    assert answers.statuses == [200, 500, 200]
    assert answers.bodies[1] == {"error": {"code": "non_finite_output", "message": "model produced non-finite output"}}
    assert (answers.best(0), answers.best(2)) == ("red", "blue")


def test_one_non_finite_output_fails_the_whole_request_that_it_belongs_to(failing: Handler) -> None:
    replace_run(failing, lambda answers: spoil(answers, 1))
    assert send(failing, listed(png("red"), png("green")), png("blue")).statuses == [500, 200]


def test_a_failing_run_is_answered_without_hurting_the_worker(
    failing: Handler, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_answers: Probabilities) -> Probabilities:
        raise RuntimeError("secret path")

    replace_run(failing, fail)
    answers = send(failing, png("red"), b"bad")
    assert answers.statuses == [500, 415]
    assert "secret" not in json.dumps(answers.bodies)
    assert "secret path" in caplog.text


def test_an_unexpected_error_in_one_row_spares_its_batch_mates(
    loaded: Handler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def sometimes(row: Any, **options: Any) -> Any:
        if row["body"] == b"trap":
            raise KeyError("secret")
        return read_request(row, **options)

    monkeypatch.setattr("serving.worker.handler.read_request", sometimes)
    answers = send(loaded, png("red"), b"trap", png("blue"))
    assert answers.statuses == [200, 500, 200]
    assert answers.bodies[1]["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(answers.bodies)
    assert "secret" in caplog.text


def test_a_row_that_needs_too_much_memory_may_be_sent_again(loaded: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(_model: Model, image: bytes) -> Any:
        raise MemoryError

    monkeypatch.setattr(Model, "decode", exhausted)
    answers = send(loaded, png("red"))
    assert answers.statuses == [503]
    assert answers.bodies[0]["error"]["code"] == "out_of_memory"


def test_nothing_is_logged_for_requests_good_or_bad(loaded: Handler, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    send(loaded, png("red"), b"bad", b"", b"{")
    assert caplog.records == []


def test_equal_probabilities_are_ranked_by_index(loaded: Handler) -> None:
    assert loaded._model is not None
    many = replace(loaded._model, labels=tuple(str(k) for k in range(100)))
    ranked = rank(many, np.tile(np.array([0.005, 0.015], np.float32), 50), top_k=100)
    assert [item["index"] for item in ranked] == [*range(1, 100, 2), *range(0, 100, 2)]


@pytest.mark.parametrize("gpu_id", [None, 0, 3])
def test_the_gpu_that_torchserve_assigns_is_the_one_that_is_opened(
    monkeypatch: pytest.MonkeyPatch, gpu_id: int | None
) -> None:
    asked: list[tuple[Path, int | None]] = []

    def record(directory: Path, *, gpu_id: int | None) -> None:
        asked.append((directory, gpu_id))

    monkeypatch.setattr("serving.worker.handler.load_model", record)
    context = FakeContext(Path("unpacked"))
    context.system_properties["gpu_id"] = gpu_id
    Handler().initialize(context)
    assert asked == [(Path("unpacked"), gpu_id)]


def test_a_probability_is_the_very_float_that_the_graph_gave(loaded: Handler) -> None:
    assert loaded._model is not None
    ranked = rank(loaded._model, np.array([0.1, *[0] * 6], np.float32), top_k=1)
    assert np.float32(json.loads(json.dumps(ranked))[0]["probability"]) == np.float32(0.1)


def replace_run(served: Handler, change: Any) -> None:
    """Let `change` see, and return, what the model answers."""
    model = served._model
    assert model is not None

    class Changed(Model):
        def run(self, images_BHWC: Any) -> Probabilities:
            answers: Probabilities = change(super().run(images_BHWC))
            return answers

    served._model = Changed(**vars(model))


def spoil(answers: Probabilities, row: int) -> Probabilities:
    answers[row, 3] = np.nan
    return answers
