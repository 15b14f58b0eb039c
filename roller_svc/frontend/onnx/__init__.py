"""Import of ONNX nodes as tensor expressions."""
