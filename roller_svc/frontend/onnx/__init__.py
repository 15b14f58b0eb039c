"""ONNX nodes → tensor expressions."""
