"""Weight bits follow the CPU that will serve."""

import pytest

from pipeline.compression.bits import weight_bits


@pytest.mark.parametrize(
    ("flags", "bits"),
    [("fma avx2", 7), ("avx2 avx512f avx512_vnni", 8), ("avx2 avx_vnni", 8), ("asimd asimddp", 8), ("asimd", 7)],
)
def test_eight_bits_only_where_products_are_summed_in_32_bits(flags: str, bits: int) -> None:
    assert weight_bits("auto", f"flags\t\t: {flags}\n") == bits


def test_what_the_recipe_asks_for_is_taken() -> None:
    assert [weight_bits(asked, "avx512_vnni") for asked in ("7", "8")] == [7, 8]
