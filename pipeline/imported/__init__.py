"""A finished `.onnx` in place of a trained model: read, wrapped into our contract, compared, quantized."""
