"""Whether a CPU sums int8 products in 32 bits, and what a graph made for another kind of CPU is told."""

from collections.abc import Mapping
from pathlib import Path

SUMS_IN_32_BITS = frozenset({"avx512_vnni", "avx_vnni", "asimddp"})


def sums_in_32_bits(cpuinfo: str | None = None) -> bool:
    """Tell whether u8 x s8 products are summed in 32 bits (VNNI, ARM dot product), or two of them in 16 first.

    AVX2's vpmaddubsw saturates at 32767: 255 x 127 x 2 is more, 255 x 63 x 2 is not. `cpuinfo` is the text of
    /proc/cpuinfo; None reads this machine's.
    """
    return not SUMS_IN_32_BITS.isdisjoint((Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo).split())


def mismatch(metadata: Mapping[str, str], cpuinfo: str | None = None) -> tuple[bool, str] | None:
    """Compare a graph's metadata with the CPU; return (whether answers suffer, one line), or None when they fit."""
    bits, made_for = metadata.get("weight_bits"), metadata.get("cpu", "another CPU")
    if bits == "8" and not sums_in_32_bits(cpuinfo):
        return True, (
            f"the model's int8 weights have 8 bits, for {made_for}; this CPU saturates with them and answers are wrong "
            "by more than quantization: compress it with --compress.quantize.bits 7"
        )
    if bits == "7" and sums_in_32_bits(cpuinfo):
        return False, f"the model's int8 weights have 7 bits, for {made_for}; 8 would cost this CPU no more"
    return None
