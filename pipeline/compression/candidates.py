"""The names of the candidates, from `compress` to `verify`."""

DENSE = "fp32"  # what all others are compared with
PRUNED = "pruned"
INT8_OF = {DENSE: "int8", PRUNED: "pruned-int8"}


def float_of(name: str) -> str:
    """Return the candidate whose weights `name` holds in float32: itself, or what it was quantized from."""
    return next((base for base, int8 in INT8_OF.items() if int8 == name), name)
