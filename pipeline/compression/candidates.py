"""The names of the candidates, from `compress` to `verify`."""

DENSE = "fp32"  # what all others are compared with
PRUNED = "pruned"
DYNAMIC_OF = {DENSE: "dynamic", PRUNED: "pruned-dynamic"}  # linear layers in int8, quantized in PyTorch
STATIC_OF = {DENSE: "static", PRUNED: "pruned-static"}  # convolutions in int8, quantized in ONNX


def float_of(name: str) -> str:
    """Return the candidate whose weights `name` holds in float32: itself, or what it was quantized from."""
    quantized = {int8: base for of in (DYNAMIC_OF, STATIC_OF) for base, int8 in of.items()}
    return quantized.get(name, name)


def is_int8(name: str) -> bool:
    """Tell whether some layers of the candidate compute in int8."""
    return name != float_of(name)
