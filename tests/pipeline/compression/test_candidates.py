"""A candidate is traced back to the weights that it was made from, and to the providers that can run it."""

import pytest

from pipeline.compression.candidates import FORMS, float_of, is_int8, runs_on


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("fp32", "fp32"),
        ("pruned", "pruned"),
        ("dynamic", "fp32"),
        ("static", "fp32"),
        ("pruned-dynamic", "pruned"),
        ("pruned-static", "pruned"),
        ("fp16", "fp32"),
        ("pruned-fp16", "pruned"),
    ],
)
def test_candidate_has_its_float_origin(name: str, base: str) -> None:
    assert float_of(name) == base
    assert is_int8(name) is (name.endswith(("dynamic", "static")))


@pytest.mark.parametrize(
    ("name", "providers"),
    [
        ("fp32", {"cpu", "cuda", "tensorrt"}),
        ("pruned", {"cpu", "cuda", "tensorrt"}),
        ("dynamic", {"cpu"}),
        ("pruned-static", {"cpu", "tensorrt"}),
        ("fp16", {"cuda", "tensorrt"}),
    ],
)
def test_candidate_runs_where_there_are_kernels_for_it(name: str, providers: set[str]) -> None:
    assert {provider for provider in FORMS if runs_on(name, provider)} == providers
