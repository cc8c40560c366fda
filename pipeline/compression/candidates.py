"""The names of the candidates, from `compress` to `verify`, and which of them a provider can run."""

DENSE = "fp32"  # what all others are compared with
PRUNED = "pruned"
DYNAMIC_OF = {DENSE: "dynamic", PRUNED: "pruned-dynamic"}  # linear layers in int8, quantized in PyTorch
STATIC_OF = {DENSE: "static", PRUNED: "pruned-static"}  # convolutions in int8, quantized in ONNX
HALF_OF = {DENSE: "fp16", PRUNED: "pruned-fp16"}  # everything but normalisation and softmax in float16, for GPUs

# ONNX Runtime's CUDA provider has no int8 kernels and hands such layers to the CPU; TensorRT takes QDQ, and no others.
FORMS = {
    "cpu": (DYNAMIC_OF, STATIC_OF),
    "cuda": (HALF_OF,),
    "tensorrt": (HALF_OF, STATIC_OF),
}


def float_of(name: str) -> str:
    """Return the candidate whose weights `name` holds in float32: itself, or what it was quantized from."""
    made = {low: base for of in (DYNAMIC_OF, STATIC_OF, HALF_OF) for base, low in of.items()}
    return made.get(name, name)


def is_int8(name: str) -> bool:
    """Tell whether some layers of the candidate compute in int8."""
    return name in (*DYNAMIC_OF.values(), *STATIC_OF.values())


def runs_on(name: str, provider: str) -> bool:
    """Tell whether `provider` (cpu, cuda or tensorrt) has kernels for the candidate."""
    return name == float_of(name) or any(name in of.values() for of in FORMS[provider])
