"""Stories of models that no compiler made, as large as the page must bear."""

from __future__ import annotations

from typing import Any

STEP_S = 2e-6


def make_story(layers: int, width: int = 4, veus: int = 4) -> dict[str, Any]:
    """Return the story of a model whose layers have `width` operators side by side, executed by all vEUs in turns."""
    count = layers * width
    nodes = [
        {
            "name": f"/layer{number // width}/MatMul_{number}+/layer{number // width}/Relu_{number}", "operator": "fused",
            "members": [f"MatMul_{number}", f"Relu_{number}"], "seconds": STEP_S * (1 + number % 3), "result": "float32[64, 64]",
            "kernel": number % 3,
        }
        for number in range(count)
    ]  # fmt: skip
    edges = [
        {"from": number - width + (number + shift) % 2, "to": number, "bytes": 16384}
        for number in range(width, count)
        for shift in range(2)
    ]
    inputs = [["A", "float32", [64, 64]], ["B", "float32", [64, 64]]]
    kernels = [
        {"digest": f"sha256:{number:064x}", "expression": "C[i, j] +=! A[i, k] * B[k, j] where i in 64, j in 64, k in 64",
         "inputs": inputs, "outputs": ["C"], "constants": ["B"], "seconds": STEP_S * (1 + number), "floor_seconds": STEP_S}
        for number in range(3)
    ]  # fmt: skip
    steps = [
        {"name": node["name"], "kind": "kernel", "seconds": node["seconds"], "node": number, "kernel": node["kernel"]}
        for number, node in enumerate(nodes)
    ]
    instructions: list[dict[str, Any]] = []
    orders = [0] * veus
    spans: list[tuple[float, float]] = []
    for layer in range(layers):
        start = layer * 8 * STEP_S
        for veu in range(veus):
            if layer:
                waits = [[other, orders[other] - 1] for other in range(veus) if other != veu]
                waited = {"veu": veu, "order": orders[veu], "for": waits}
                instructions.append({"kind": "wait", "start_s": start - STEP_S, "end_s": start, **waited})
        for veu in range(veus):
            orders[veu] += bool(layer)
            for place in range(width):
                at = start + place * STEP_S
                instructions.append(
                    {"kind": "execute", "start_s": at, "end_s": at + STEP_S, "step": layer * width + place, "veu": veu,
                     "order": orders[veu], "phase": 0, "tasks": [veu, 1]}
                )  # fmt: skip
                orders[veu] += 1
        spans += [(start, start + 9 * STEP_S)] * width
    buffers = [
        {"name": f"tensor{number}", "offset_bytes": (number % (2 * width)) * 16384, "bytes": 16384, "start_s": spans[number][0],
         "end_s": spans[number][1], "read_by": [min(count - 1, number + width)], "written_by": [number]}
        for number in range(count)
    ]  # fmt: skip
    seconds = max(each["end_s"] for each in instructions)
    return {
        "dims": {}, "name": "towers", "target": "cpu-x86-avx2", "device": "x86 with AVX2", "plan": "rammer", "seconds": seconds,
        "veus": veus, "passes": [{"name": "fuse_operators", "nodes_before": 2 * count, "nodes_after": count}],
        "kernels": kernels, "nodes": nodes, "edges": edges, "steps": steps,
        "instructions": sorted(instructions, key=lambda each: each["start_s"]), "buffers": buffers,
        "arena_bytes": 2 * width * 16384, "tensor_bytes": count * 16384,
    }  # fmt: skip


def make_profile(story: dict[str, Any], slowdown: float) -> dict[str, Any]:
    """Return what `roller model profile --json` prints of a plan whose steps take longer than predicted."""
    return {
        "steps": [
            {"operator": story["steps"][each["step"]]["name"], "kernel": "", "veu": each.get("veu", 0),
             **{name: slowdown * each[name] for name in ("start_s", "end_s")}}
            for each in story["instructions"] if "step" in each
        ]
    }  # fmt: skip


def make_plan(story: dict[str, Any]) -> dict[str, Any]:
    """Return the plan of a story: a launch whose vEUs execute and wait as its instructions do."""
    programs: list[list[dict[str, Any]]] = [[] for _ in range(story["veus"])]
    for each in sorted(story["instructions"], key=lambda each: each["order"]):
        programs[each["veu"]].append({"wait": each["for"]} if "for" in each else {"execute": [each["step"], *each["tasks"]]})
    steps = [{"node": each["name"]} for each in story["steps"]]
    return {"steps": [{"steps": steps, "operators": [[number] for number in range(len(steps))], "vdevice": {"programs": programs}}]}


def make_slower(story: dict[str, Any], slowdown: float) -> dict[str, Any]:
    """Return a story all of whose instructions take longer."""
    instructions = [each | {name: slowdown * each[name] for name in ("start_s", "end_s")} for each in story["instructions"]]
    return story | {"seconds": slowdown * story["seconds"], "instructions": instructions}
