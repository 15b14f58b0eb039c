"""Pooling and depthwise convolution on a CPU: sliding windows over planes."""
