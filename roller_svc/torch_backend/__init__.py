"""The backend of torch.compile: `torch.compile(model, backend="roller")`.

AOTAutograd gives graphs of ATen operators. A capability-based partitioner groups the supported nodes; each group is
compiled as a model, and everything else stays with torch. `report()` says which nodes did, and why.
"""

from roller_svc.torch_backend.graphs import compile_graph
from roller_svc.torch_backend.reports import CompiledPart, GraphReport, LeftToTorchWarning, report, reset

__all__ = ["CompiledPart", "GraphReport", "LeftToTorchWarning", "compile_graph", "report", "reset"]


def __dir__() -> list[str]:
    return sorted(__all__)
