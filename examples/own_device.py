"""A device of your own: a spec with other numbers, for estimates and for kernels that are constructed for it."""

import dataclasses

import roller_svc
from roller_svc import hardware

MATMUL, MATRIX = "C = matmul(A, B)", ("float16", (8192, 8192))


def with_bandwidth(spec, factor):
    """Return the spec with faster device memory. `hardware.load_yaml(text)` reads a spec from a file like hwspecs/*.yaml."""
    levels = tuple(
        dataclasses.replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * factor) if level.name == "dram" else level
        for level in spec.levels
    )
    return dataclasses.replace(spec, id=f"{spec.id}-{factor}x-dram", levels=levels)


h200 = hardware.load("nvidia-h200-sxm")
devices = [h200, with_bandwidth(h200, 2), with_bandwidth(h200, 0.5)]
copy = roller_svc.estimate("Y[i, j] = A[i, j]", {"A": MATRIX}, devices)
product = roller_svc.estimate(MATMUL, {"A": MATRIX, "B": MATRIX}, devices)
print(f"{'device':26} {'copy':>9} {'matmul':>9}")
for device in devices:
    times = [each[device.id][0].seconds * 1e6 for each in (copy, product)]
    print(f"{device.id:26} {times[0]:6.0f} us {times[1]:6.0f} us")
