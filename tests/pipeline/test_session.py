"""Sessions are opened as the worker opens them."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import PipelineError
from pipeline.machine import gpu_names
from pipeline.session import open_session, probabilities, require_provider
from tests.colour import LABELS, colour_onnx


def test_session_uses_one_thread_and_does_not_spin(tmp_path: Path) -> None:
    (tmp_path / "colour.onnx").write_bytes(colour_onnx())
    options = open_session(tmp_path / "colour.onnx").get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_answers_are_probabilities_for_every_image(tmp_path: Path) -> None:
    (tmp_path / "colour.onnx").write_bytes(colour_onnx())
    images = np.zeros((3, 32, 32, 3), np.uint8)
    images[1, :, :, 0] = 255
    answers = probabilities(open_session(tmp_path / "colour.onnx"), images)
    assert [LABELS[k] for k in answers.argmax(1)] == ["black", "red", "black"]


def test_provider_of_this_machine_loads() -> None:
    require_provider("cpu")


@pytest.mark.skipif(bool(gpu_names()), reason="needs a machine without an NVIDIA GPU")
@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_provider_that_does_not_load_is_named_with_the_remedy(provider: str) -> None:
    with pytest.raises(PipelineError, match=rf"^export\.provider = '{provider}' does not load here: .* --export\.prov"):
        require_provider(provider)
