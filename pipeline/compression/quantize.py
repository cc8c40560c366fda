"""Row-wise int8 of a linear layer. Weights at rest per output channel, activations per row at run time.

One scale per row, not per tensor: an image's answer cannot depend on who shares its batch. The graph that the ordinary
exporter makes of `RowwiseInt8Linear` is QuantizeLinear -> MatMulIntegerToFloat, ONNX Runtime's fused int8 kernel, and
both compute the same bits. Shape legend: R rows, I inputs, O outputs of a layer.
"""

from typing import Final

import torch
from torch import Tensor, nn

ACTIVATION_STEPS: Final = 127  # the largest value of a row becomes 127, stored as uint8 128 +- 127
ZERO_POINT: Final = 128
TINY: Final = 1e-30  # a row without a larger value is quantized as if it had this one: zeros stay zeros
EXACT_IN_FLOAT32: Final = 2**24


def weight_steps(bits: int) -> int:
    """Return the largest magnitude of a weight code: 63 for 7 bits, 127 for 8."""
    return int(2 ** (bits - 1)) - 1


def row_steps(rows_RI: Tensor) -> Tensor:
    """Return the distance [R] between two codes of each row; NaN for a row that holds a NaN or an infinity.

    ONNX Runtime's ReduceMax loses a NaN, its ReduceSum does not. So a row whose sum overflows is NaN, too.
    """
    largest_R = torch.maximum(rows_RI.amax(dim=-1), -rows_RI.amin(dim=-1))
    finite_R = rows_RI.sum(dim=-1) * 0.0
    return torch.maximum(largest_R, torch.tensor(TINY)) * (1.0 / ACTIVATION_STEPS) + finite_R


class RowwiseInt8Linear(nn.Module):
    """A linear layer with int8 weights [I, O], a float scale for each output, and a scale for each row of the input."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, *, bits: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bits = in_features, out_features, bits
        self.register_buffer("weight", torch.zeros(in_features, out_features, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(out_features))
        self.register_buffer("bias", torch.zeros(out_features) if bias else None)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, bits: int) -> "RowwiseInt8Linear":
        """Quantize a trained layer: symmetric, each output channel by its own largest weight."""
        new = cls(linear.in_features, linear.out_features, bits=bits, bias=linear.bias is not None)
        weight_OI = linear.weight.detach()
        scale_O = weight_OI.abs().amax(dim=1).clamp_min(TINY) / weight_steps(bits)
        new.weight.copy_((weight_OI / scale_O[:, None]).round().to(torch.int8).T)
        new.scale.copy_(scale_O)
        if new.bias is not None:
            new.bias.copy_(linear.bias.detach())
        return new.to(weight_OI.device)

    def forward(self, x: Tensor) -> Tensor:
        """Return float32 [..., O] for float32 [..., I]; NaN in every output of a row that `row_steps` refuses."""
        rows_RI = x.reshape(-1, self.in_features)
        step_R = row_steps(rows_RI)
        multiply = self._multiply_in_graph if torch.onnx.is_in_onnx_export() else self._multiply
        y = multiply(rows_RI, step_R).reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def _multiply(self, rows_RI: Tensor, step_R: Tensor) -> Tensor:
        """Multiply in integers: the type holds every sum of products exactly, so this is int32 arithmetic."""
        largest_sum = ACTIVATION_STEPS * weight_steps(self.bits) * self.in_features
        exact = torch.float32 if largest_sum <= EXACT_IN_FLOAT32 else torch.float64
        codes_RI = (rows_RI / step_R[:, None]).round().to(exact)  # NaN stays, where an integer could not hold it
        sums_RO = (codes_RI @ self.weight.to(exact)).float()
        return sums_RO * self.scale * step_R[:, None]

    def _multiply_in_graph(self, rows_RI: Tensor, step_R: Tensor) -> Tensor:
        codes_RI = torch.onnx.ops.symbolic(
            "QuantizeLinear",
            (rows_RI, step_R, torch.full_like(step_R, ZERO_POINT, dtype=torch.uint8)),
            attrs={"axis": 0},
            dtype=torch.uint8,
            shape=rows_RI.shape,
        )
        # ONNX Runtime multiplies the output by any scale that broadcasts over it: here by a column, one for each row.
        return torch.onnx.ops.symbolic(
            "com.microsoft::MatMulIntegerToFloat",
            (codes_RI, self.weight, step_R[:, None], self.scale, torch.tensor(ZERO_POINT, dtype=torch.uint8)),
            dtype=torch.float32,
            shape=(rows_RI.shape[0], self.out_features),
            version=1,
        )
