"""An int8 candidate is traced back to the weights that it was quantized from."""

import pytest

from pipeline.compression.candidates import float_of


@pytest.mark.parametrize(
    ("name", "base"), [("int8", "fp32"), ("pruned-int8", "pruned"), ("fp32", "fp32"), ("pruned", "pruned")]
)
def test_float_weights_of_a_candidate(name: str, base: str) -> None:
    assert float_of(name) == base
