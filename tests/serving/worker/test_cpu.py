"""A graph made for another kind of CPU is told so once, and loudly only where answers suffer."""

import pytest

from serving.worker.cpu import mismatch, sums_in_32_bits

AVX2, VNNI = "flags\t\t: fma avx2\n", "flags\t\t: avx2 avx512f avx512_vnni\n"


@pytest.mark.parametrize(
    ("flags", "wide"),
    [("fma avx2", False), ("avx2 avx512f", False), ("avx2 avx_vnni", True), ("asimd asimddp", True), ("asimd", False)],
)
def test_dot_products_are_summed_in_32_bits_where_an_instruction_does(flags: str, wide: bool) -> None:
    assert sums_in_32_bits(f"flags\t\t: {flags}\n") is wide


@pytest.mark.parametrize(
    ("bits", "cpuinfo", "suffers"),
    [("8", AVX2, True), ("7", VNNI, False), ("7", AVX2, None), ("8", VNNI, None), (None, AVX2, None)],
)
def test_only_weights_for_another_kind_of_cpu_are_worth_a_line(
    bits: str | None, cpuinfo: str, suffers: bool | None
) -> None:
    found = mismatch({"weight_bits": bits, "cpu": "Big Iron"} if bits else {}, cpuinfo)
    assert (found and found[0]) is suffers
    assert found is None or "Big Iron" in found[1]
