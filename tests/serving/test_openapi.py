"""The OpenAPI document: whole, and of the stack that it describes."""

import json
from pathlib import Path
from typing import Any

import pytest

from serving.openapi import document
from serving.rundir import Model
from serving.topology import Limits

MODEL = Model(
    name="digits",
    version="1.2",
    digest="d",
    graph_digest="g",
    archive=Path("digits.mar"),
    image_shape=(16, 17, 1),
    classes=10,
)


@pytest.fixture
def described() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(document(MODEL, Limits(body_bytes=1234))))
    return made


def test_paths_are_those_of_the_model_and_its_version(described: dict[str, Any]) -> None:
    assert {path for path in described["paths"] if "digits" in path} == {
        "/predictions/digits",
        *(
            f"/v2/models/digits{version}{verb}"
            for version in ("", "/versions/1.2")
            for verb in ("", "/ready", "/infer")
        ),
    }


def test_limits_and_sizes_are_stated(described: dict[str, Any]) -> None:
    paths = described["paths"]
    assert "1234 bytes and 16 images" in paths["/predictions/digits"]["post"]["description"]
    assert "UINT8 [B, 16, 17, 1]" in paths["/v2/models/digits/infer"]["post"]["description"]


def test_every_reference_leads_somewhere(described: dict[str, Any]) -> None:
    text = json.dumps(described)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names == set(described["components"]["schemas"])


def test_every_operation_says_what_a_bad_request_gets(described: dict[str, Any]) -> None:
    operations = [operation for path in described["paths"].values() for operation in path.values()]
    assert len(operations) == 22
    assert all("400" in operation["responses"] and "200" in operation["responses"] for operation in operations)


def test_document_fits_the_balancers_buffer(described: dict[str, Any]) -> None:
    assert len(json.dumps(described)) < 60_000
