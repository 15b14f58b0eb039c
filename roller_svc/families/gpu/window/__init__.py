"""Pooling and depthwise convolution on a GPU: sliding windows."""
