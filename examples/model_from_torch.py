"""A model from torch: a module and example inputs, compiled as one call for this CPU."""

import numpy as np
import torch

import roller_svc

torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128), torch.nn.Linear(128, 32)).eval()
x = torch.randn(8, 64)

model = roller_svc.compile_model((module, (x,)), select="model", threads=1)
(name,) = (each.name for each in model.inputs)
(got,) = model.run({name: x.numpy()}).values()
with torch.no_grad():
    np.testing.assert_allclose(got, module(x).numpy(), rtol=1e-4, atol=1e-5)
print(f"CPU: agrees with torch; {len(model.kernels)} kernels for 4 layers")
# The same inside of torch: torch.compile(module, backend="roller", dynamic=False)(x), under torch.no_grad().
