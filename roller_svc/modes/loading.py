"""Built models, and saved ones → models that can be called."""

from __future__ import annotations

from collections.abc import Sequence

from roller_svc.compiler.backends import reject_load
from roller_svc.graph.compile import BuiltModel
from roller_svc.graph.lowerings.cuda_graph import CUDA_GRAPH
from roller_svc.graph.weights import Weights, place_weights
from roller_svc.ir.kernel import Language
from roller_svc.ir.model_plan import ModelPlan
from roller_svc.ir.options import RuntimeChoice
from roller_svc.runtime.binding import Array
from roller_svc.runtime.graphs.cpu import CpuModel
from roller_svc.runtime.graphs.cuda import CudaModel
from roller_svc.runtime.graphs.emulated import EmulatedModel
from roller_svc.runtime.graphs.gpu import GpuModel, Runner
from roller_svc.runtime.saved.models import ModelBundle, VariantBundle
from roller_svc.runtime.saved.serialization import KernelBundle
from roller_svc.toolchain import compile_cxx


def load_built(built: BuiltModel, name: str, binary: bytes, weights: Weights, runtime: RuntimeChoice) -> CpuModel | GpuModel:
    """Return a built model with its weights. `binary` is the shared object of that name, empty for a GPU."""
    plan = built.plan
    block = place_weights(plan, weights)
    return CpuModel(plan, name, binary, block) if binary else gpu_model(plan, built.kernels, block, runtime)


def load_variant(variant: VariantBundle, model: ModelBundle, runtime: RuntimeChoice) -> CpuModel | GpuModel:
    """Return a saved model for one set of shapes."""
    if variant.binary:
        return CpuModel(variant.plan, variant.name, variant.binary, variant.weights, variant.packed)
    return gpu_model(variant.plan, tuple(model.kernels[position] for position in variant.kernels), variant.weights, runtime)


def gpu_model(plan: ModelPlan, bundles: Sequence[KernelBundle], weights: Array, runtime: RuntimeChoice) -> GpuModel:
    """Return a GPU's model, which is loaded at its first call. `bundles` are its kernels in the order of the plan."""
    compiled = tuple(bundle.compiled for bundle in bundles)

    def load() -> Runner:
        if runtime is RuntimeChoice.EMULATOR:
            return EmulatedModel(plan, compiled, weights, compile_cxx)
        for each in compiled:
            if each.source.language is Language.HIP:
                return reject_load(each)
        return CudaModel(plan, compiled, weights, as_graph=plan.lowering == CUDA_GRAPH.kind)

    return GpuModel(plan, weights, load)
