"""The endpoint answers as its OpenAPI document says: a generator of requests, not ours, looks for breaches."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serving.archive import verify_archive
from serving.rundir import Stack
from serving.stack import Options
from tests.colour import colour_archive
from tests.stacks import served

pytestmark = pytest.mark.e2e

EXAMPLES = 25  # requests of each kind for each operation
# A schema cannot say which bytes are an image, or that a tensor has as many values as its shape says.
CONFIG = """
[checks]
positive_data_acceptance.expected-statuses = ["2xx", 400, 413, 415]
negative_data_rejection.expected-statuses = [400, 404, 405, 413, 415]
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    archive = verify_archive(colour_archive(tmp_path_factory.mktemp("colour")))
    with served(archive, Options(replicas=1, workers=1)) as stack:
        yield stack


def test_every_answer_is_one_that_the_document_describes(running: Stack, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{running.topology.url}/openapi.json"]
    command += ["--max-examples", str(EXAMPLES), "--seed", "7", "--no-color", "--request-timeout", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_document_names_every_path_of_the_model(running: Stack) -> None:
    paths = httpx.get(f"{running.topology.url}/openapi.json", trust_env=False).json()["paths"]
    assert {path.split("/")[1] for path in paths} == {"predictions", "healthz", "readyz", "v2"}
    assert "/v2/models/colour/versions/1.0/infer" in paths
