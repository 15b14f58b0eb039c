"""`roller bench cpu`: generated CPU kernels against numpy, torch and TVM."""
