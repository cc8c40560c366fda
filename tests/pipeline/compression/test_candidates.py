"""An int8 candidate is traced back to the weights that it was quantized from."""

import pytest

from pipeline.compression.candidates import float_of, is_int8


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("fp32", "fp32"),
        ("pruned", "pruned"),
        ("dynamic", "fp32"),
        ("static", "fp32"),
        ("pruned-dynamic", "pruned"),
        ("pruned-static", "pruned"),
    ],
)
def test_candidate_has_its_float_origin(name: str, base: str) -> None:
    assert float_of(name) == base
    assert is_int8(name) is (name != base)
