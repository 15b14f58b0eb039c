"""A table of estimates: programs by devices, none of which is needed. No compiler runs."""

import roller_svc

HALF = "float16"
PROGRAMS = {
    "matmul 4096^3": ("C = matmul(A, B)", {"A": (HALF, (4096, 4096)), "B": (HALF, (4096, 4096))}),
    "matmul, 16 rows": ("C = matmul(A, B)", {"A": (HALF, (16, 4096)), "B": (HALF, (4096, 4096))}),
    "softmax 8192 x 4096": ("Y = softmax(X)", {"X": (HALF, (8192, 4096))}),
    "attention 16 x 2048 x 128": ("Y = attention(Q, K, V, causal=true)", dict.fromkeys("QKV", (HALF, (16, 2048, 128)))),
}
DEVICES = ["nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi300x", "cpu-x86-avx512"]

print(f"{'microseconds':26}" + "".join(f"{device:>22}" for device in DEVICES))
for name, (expression, inputs) in PROGRAMS.items():
    found = roller_svc.estimate(expression, inputs, DEVICES)
    cells = [f"{found[device][0].seconds * 1e6:.1f} ({found[device][0].floor_share:.0%})" for device in DEVICES]
    print(f"{name:26}" + "".join(f"{cell:>22}" for cell in cells))
print("In brackets: the floor of the program, which no kernel can beat, as a share of the estimate.")
