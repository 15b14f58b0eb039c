"""Parts of attention kernels: mask, tile, KV loop, online softmax."""
