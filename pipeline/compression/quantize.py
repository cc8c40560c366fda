"""Dynamic int8 quantization of linear layers. Weights at rest per output channel, activations per row at run time.

One scale per row, not per tensor: an image's answer cannot depend on who shares its batch. The graph that the ordinary
exporter makes of `RowwiseInt8Linear` is QuantizeLinear -> MatMulIntegerToFloat, ONNX Runtime's fused int8 kernel.
Shape legend: R rows, I inputs, O outputs of a layer.
"""

from typing import Final

import torch
from torch import Tensor, nn

ACTIVATION_STEPS: Final = 127  # a row is scaled to [-1, 1] and stored as uint8 128 +- 127
ZERO_POINT: Final = 128
TINY: Final = 1e-30  # an all-zero row divides by this and stays zero


def weight_steps(bits: int) -> int:
    """Return the largest magnitude of a weight code: 63 for 7 bits, 127 for 8."""
    return int(2 ** (bits - 1)) - 1


class RowwiseInt8Linear(nn.Module):
    """A linear layer with int8 weights [I, O], a float scale for each output, and a scale for each row of the input."""

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, in_features: int, out_features: int, *, bits: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bits = in_features, out_features, bits
        self.register_buffer("weight", torch.zeros(in_features, out_features, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(out_features))
        self.register_buffer("bias", torch.zeros(out_features))

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, bits: int) -> "RowwiseInt8Linear":
        """Quantize a trained layer: symmetric, each output channel by its own largest weight."""
        new = cls(linear.in_features, linear.out_features, bits=bits)
        weight_OI = linear.weight.detach()
        scale_O = weight_OI.abs().amax(dim=1).clamp_min(TINY) / weight_steps(bits)
        new.weight.copy_((weight_OI / scale_O[:, None]).round().to(torch.int8).T)
        new.scale.copy_(scale_O)
        if linear.bias is not None:
            new.bias.copy_(linear.bias.detach())
        return new

    def forward(self, x: Tensor) -> Tensor:
        """Return float32 [..., O] for float32 [..., I]."""
        row_scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(TINY)
        normalised = x / row_scale
        multiply = self._multiply_in_graph if torch.onnx.is_in_onnx_export() else self._multiply
        return multiply(normalised) * row_scale + self.bias

    def _multiply(self, normalised: Tensor) -> Tensor:
        """Multiply in integers: every product sum fits in float64 exactly, so this is int32 arithmetic."""
        codes = (normalised / torch.tensor(1.0 / ACTIVATION_STEPS)).round()  # as QuantizeLinear divides
        product = (codes.double() @ self.weight.double()).float()
        return product * (self.scale / ACTIVATION_STEPS)

    def _multiply_in_graph(self, normalised: Tensor) -> Tensor:
        step = torch.tensor(1.0 / ACTIVATION_STEPS)
        zero_point = torch.tensor(ZERO_POINT, dtype=torch.uint8)
        codes = torch.onnx.ops.symbolic(
            "QuantizeLinear", (normalised, step, zero_point), dtype=torch.uint8, shape=normalised.shape
        )
        product = torch.onnx.ops.symbolic(
            "com.microsoft::MatMulIntegerToFloat",
            (codes, self.weight, step, self.scale, zero_point),
            dtype=torch.float32,
            shape=(*normalised.shape[:-1], self.out_features),
            version=1,
        )
        return product


def quantize_linears(net: nn.Module, *, bits: int) -> dict[str, int]:
    """Replace the linear layers of `net` in place; return module -> bits, which a `ModelSpec` records as `int8`.

    Those inside `nn.MultiheadAttention` stay: it reads their weights without calling them.
    """
    attention = tuple(f"{name}." for name, module in net.named_modules() if isinstance(module, nn.MultiheadAttention))
    linears = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    names = [name for name in linears if not name.startswith(attention)]
    for name in names:
        linear = net.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        net.set_submodule(name, RowwiseInt8Linear.from_linear(linear, bits=bits))
    return dict.fromkeys(names, bits)
