"""How many bits a weight may have on the machine that will serve. Apart from `quantize`: asking needs no PyTorch."""

from pathlib import Path


def weight_bits(asked: str, cpuinfo: str | None = None) -> int:
    """Return 7 or 8 as asked; for `auto` 8 where the CPU sums u8 x s8 in 32 bits (VNNI, ARM dot product), else 7.

    AVX2's vpmaddubsw adds two products in 16 bits: 255 x 127 x 2 saturates, 255 x 63 x 2 does not.
    `cpuinfo` is the text of /proc/cpuinfo; None reads this machine's.
    """
    if asked != "auto":
        return int(asked)
    words = set((Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo).split())
    return 8 if words & {"avx512_vnni", "avx_vnni", "asimddp"} else 7
