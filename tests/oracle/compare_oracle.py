"""Compare the reference interpreter with an independent evaluator, case by case. Prints counts as JSON.

    python tests/oracle/compare_oracle.py --oracle PATH/oracle.py --cases bench/data/public.json

The evaluator is a module with `gen_inputs`, `run`, `compare`, `norm_dtype`, `is_float` and `FLOATS`.
Each case is one of: `exact` (unrounded values agree to a relative 1e-9), `close` (within the evaluator's
tolerance), `wrong`, `refused` (rejected by the parser), `error`.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from roller_svc.analysis.wide_values import storage_dtype
from roller_svc.errors import InputError
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import dtype_named
from roller_svc.ir.printer import text
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import Value, evaluate, reference


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("oracle", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensor_types(inputs: dict[str, Any]) -> dict[str, TensorType]:
    types = {}
    for name, meta in inputs.items():
        dtype = dtype_named(meta["dtype"])
        if dtype is None:
            raise SystemExit(f"unknown type {meta['dtype']}")
        types[name] = TensorType(dtype, tuple(meta["shape"]))
    return types


def variant(case: dict[str, Any], *, full: bool) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return expression, inputs and hints of a case, in the small form if there is one."""
    form = case if full or not case.get("small") else case["small"]
    hints = {
        name: hint
        for name, hint in (case.get("hints") or {}).items()
        if "values" not in hint or len(hint["values"]) == int(np.prod(form["inputs"][name]["shape"]))
    }
    return form["expr"], form["inputs"], hints


def compare_output(oracle: ModuleType, ours: Value, theirs: Any, case: dict[str, Any]) -> tuple[str, str]:
    """Compare one output; return (status, detail)."""
    if oracle.norm_dtype(ours.dtype.value) != theirs.dtype:
        return "wrong", f"type {ours.dtype.value}, expected {theirs.dtype}"
    array = np.asarray(theirs.array)
    if array.shape != ours.wide.shape and array.size != 1:
        return "wrong", f"shape {ours.wide.shape}, expected {array.shape}"
    wide = ours.wide.reshape(array.shape)
    if not ours.dtype.is_float:
        same = np.array_equal(wide.astype(np.int64), array.astype(np.int64))
        return ("exact", "") if same else ("wrong", f"{np.count_nonzero(wide.astype(np.int64) != array)} differ")
    with np.errstate(invalid="ignore"):
        near = np.abs(wide - array) <= 1e-9 * (np.abs(array) + np.sqrt(case.get("k") or 1))
    if (near | (wide == array) | (np.isnan(wide) & np.isnan(array))).all():
        return "exact", ""
    rounded = ours.rounded.astype(np.float64).reshape(array.shape)
    close, worst, _ = oracle.compare(rounded, array, theirs.dtype, case.get("k") or 1)
    return ("close", f"{worst:.3g}") if close else ("wrong", f"differs by up to {worst:.3g}")


def judge(oracle: ModuleType, case: dict[str, Any], *, full: bool, seed: int) -> tuple[str, str]:
    expression, inputs, hints = variant(case, full=full)
    outputs = list(case["out_meta"])
    try:
        program = parse(expression, tensor_types(inputs), outputs)
    except InputError as refusal:
        return "refused", f"{type(refusal).__name__}: {refusal}"
    wide = oracle.gen_inputs(expression, inputs, seed, hints)
    types = dict(program.inputs)
    arrays = {name: wide[name].astype(storage_dtype(types[name].dtype)).reshape(types[name].shape) for name in wide}
    want = oracle.run(expression, wide, inputs, outputs)
    got = evaluate(program, arrays)
    rows = [compare_output(oracle, got[name], want[name], case) for name in outputs]
    order = ["exact", "close", "wrong"]
    status, detail = max(rows, key=lambda row: order.index(row[0]))
    if status != "wrong":
        problem = check_ourselves(program, expression, got, arrays, case, seed)
        return ("wrong", problem) if problem else (status, detail)
    return status, detail


def check_ourselves(
    program: TensorProgram, expression: str, got: dict[str, Value], arrays: dict[str, Any], case: dict[str, Any], seed: int
) -> str:
    """Check the printer's round trip, random inputs, and the interpreter against its own error bounds."""
    again = parse(text(program), dict(program.inputs), [out.name for out in program.outputs])
    if again != program:
        return f"printed as {text(program)}, which is another program than {expression}"
    plain = reference(program, arrays)
    verdict = agrees(program, plain, got)
    if not verdict.ok or verdict.unchecked:
        return f"against its own bound: {verdict}"
    ours = random_inputs(program, seed, case.get("hints"))
    for name, value in evaluate(program, ours).items():
        if value.dtype.is_float and not np.isfinite(value.wide).any():
            return f"nothing of {name} is finite on random inputs"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oracle", type=Path, required=True)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--full", action="store_true", help="the full shapes, not the small ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=1)
    opts = parser.parse_args()
    oracle = load_module(opts.oracle)
    cases = json.loads(opts.cases.read_text())["cases"][:: opts.every]
    began = time.perf_counter()
    rows = []
    for case in cases:
        try:
            status, detail = judge(oracle, case, full=opts.full, seed=opts.seed)
        except Exception as failure:  # noqa: BLE001 - one case's crash is its row
            place = traceback.extract_tb(failure.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            status, detail = "error", f"{type(failure).__name__}: {failure} ({where})"
        if status not in ("exact", "close"):
            print(f"{status:8}{case['id']:40}{case['cls']:20}{detail[:300]}", file=sys.stderr)
        rows.append({"id": case["id"], "status": status, "detail": detail})
    counts = collections.Counter(row["status"] for row in rows)
    seconds = round(time.perf_counter() - began, 1)
    odd = [row for row in rows if row["status"] != "exact"]
    print(json.dumps({"cases": len(rows), "counts": dict(counts), "seconds": seconds, "not_exact": odd}, indent=1))
    return 0 if counts["exact"] + counts["close"] == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
