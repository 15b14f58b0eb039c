"""What `compile_peers.py` compares: cases, and for each peer the kernels that people write in it."""
