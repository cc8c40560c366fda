"""How many bits a weight may have on the machine that will serve. Apart from `quantize`: asking needs no PyTorch."""

from serving.worker.cpu import sums_in_32_bits


def weight_bits(asked: str, cpuinfo: str | None = None) -> int:
    """Return 7 or 8 as asked; for `auto` 8 where the CPU sums int8 products in 32 bits, else 7.

    `cpuinfo` is the text of /proc/cpuinfo; None reads this machine's.
    """
    if asked != "auto":
        return int(asked)
    return 8 if sums_in_32_bits(cpuinfo) else 7
