"""Names that the archiver, the URL and the file system all take, and the refusal of others."""

import subprocess
import sys

import pytest

from pipeline.errors import PipelineError
from pipeline.names import validate_name


@pytest.mark.parametrize("value", ["digits", "resnet-50", "a", "9", "1.0", "2026.01-rc.1_x", "A" * 100])
def test_names_that_are_safe_everywhere_are_taken_as_they_are(value: str) -> None:
    assert validate_name(value, field="package.name") == value


@pytest.mark.parametrize(
    "value",
    [
        "",
        "my model/v1",
        "müller",
        "-x",
        ".x",
        "_x",
        "1.0 beta",
        "a\\b",
        "a ",
        " a",
        "a\n",
        "..",
        "a,b",
        "a*",
        "A" * 101,
    ],
)
def test_other_names_are_refused_with_the_argument_the_value_and_the_rule(value: str) -> None:
    with pytest.raises(PipelineError) as caught:
        validate_name(value, field="package.version")
    message = str(caught.value)
    assert message.startswith(f"package.version = {value!r} cannot be used")
    assert "beginning with a letter or a digit, at most 100 characters" in message
    assert "\n" not in message
    assert caught.value.exit_status == 2


def test_the_rule_can_be_checked_without_loading_torch_or_numpy() -> None:
    code = "import sys, pipeline.names; sys.exit(bool({'torch', 'numpy', 'onnxruntime'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
