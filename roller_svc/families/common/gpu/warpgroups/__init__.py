"""Parts of wgmma kernels: tile, TMA loads, producer, tile scheduler, mainloop, epilogue."""
