"""Each pass: fewer nodes, equal results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from graphs import add_input, add_random, builder_of, check_equal, operators, program_of

from roller_svc.frontend.graph_builder import GraphBuilder, forms_of_call
from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.parse import parse, parse_forms
from roller_svc.graph.branches import concatenated_dims
from roller_svc.graph.concats import is_contiguous_concat
from roller_svc.graph.costs import Cost, CostTable
from roller_svc.graph.merge import merge_nodes
from roller_svc.graph.passes import run_passes
from roller_svc.graph.passes.batch_norms import fold_batch_norms
from roller_svc.graph.passes.batching import MAX_BATCH, batch_operators
from roller_svc.graph.passes.boundaries import ERROR_RATIO, Boundaries, Boundary
from roller_svc.graph.passes.constants import fold_constants
from roller_svc.graph.passes.dead import remove_dead_nodes
from roller_svc.graph.passes.duplicates import merge_duplicates
from roller_svc.graph.passes.forms import choose_forms
from roller_svc.graph.passes.fusion import _Fusion, fuse_operators
from roller_svc.graph.passes.horizontal import fuse_horizontally
from roller_svc.graph.serialize import FORMAT, graph_from_json
from roller_svc.graph.views import view_offset_elements
from roller_svc.graph.weights import Weights
from roller_svc.hardware import load
from roller_svc.ir.dtype import DType
from roller_svc.ir.graph import FUSED, Constant, Graph, LoopNode, Node, OpNode, iter_nodes, verify
from roller_svc.ir.printer import text
from roller_svc.ir.program import TensorType

CPU = load("cpu-x86-avx2")


def normalized_convolutions() -> tuple[Graph, Weights]:
    """Convolution, batch norm, relu; once more with a residual; and one whose result something else reads."""
    builder, weights = builder_of()
    x = add_input(builder, "x", 1, 4, 10, 10)

    def block(x: Operand, seed: int, *, bias: bool) -> tuple[Operand, Operand]:
        operands = [x, add_random(builder, seed, 4, 4, 3, 3), *([add_random(builder, seed + 1, 4)] if bias else [])]
        y = builder.call("conv2d", operands, padding=1)
        variance = builder.add_constant(np.linspace(0.5, 2, 4).astype(np.float32), DType.FLOAT32)
        norm = [add_random(builder, seed + 2 + i, 4) for i in range(3)]
        return y, builder.call("batch_norm", [y, *norm, variance], epsilon=1e-3)

    first = builder.call("relu", [block(x, 10, bias=False)[1]])
    second = builder.call("relu", [builder.call("add", [block(first, 20, bias=True)[1], x])])
    raw, third = block(second, 30, bias=True)
    return builder.finish([("y", third), ("raw", raw)]), weights


def test_row_21_constants_are_folded() -> None:
    builder, weights = builder_of()
    x, w = add_input(builder, "x", 130, 150), add_random(builder, 0, 150, 130)
    transposed = builder.call("transpose", [w], permutation=(1, 0))  # too large to fold while the graph is built
    graph = builder.finish([("y", builder.call("add", [x, transposed]))])
    folded = verify(remove_dead_nodes(fold_constants(graph, weights)))
    assert operators(graph) == ["transpose", "add"]
    assert operators(folded) == ["add"]
    assert len(folded.constants) == 1
    check_equal(graph, folded, weights)


def test_batch_norms_become_weights_and_biases() -> None:
    graph, weights = normalized_convolutions()
    folded = verify(fold_batch_norms(graph, weights))
    assert operators(graph).count("batch_norm") == 3
    assert operators(folded).count("batch_norm") == 1  # the one whose convolution is an output
    check_equal(graph, folded, weights)


def test_row_21_equal_nodes_are_merged() -> None:
    builder, weights = builder_of()
    x = add_input(builder, "x", 7, 9)
    same = [builder.call("exp", [builder.call("relu", [x])]) for _ in range(3)]
    other = builder.call("relu", [builder.call("exp", [x])])
    graph = builder.finish([(f"y{i}", each) for i, each in enumerate([*same, other])])
    merged = verify(merge_duplicates(graph))
    assert sorted(operators(merged)) == ["exp", "exp", "relu", "relu"]
    check_equal(graph, merged, weights)


def test_equal_operators_with_other_parameters_stay() -> None:
    builder, _ = builder_of()
    x = add_input(builder, "x", 4, 6)
    pieces = [builder.call("reduce_sum", [x], axis=(axis,), keepdims=False) for axis in (0, 1)]
    graph = builder.finish([("a", pieces[0]), ("b", pieces[1])])
    assert len(merge_duplicates(graph).nodes) == 2


def test_operators_that_differ_by_the_sign_of_zero_stay() -> None:
    builder, _ = builder_of()
    x = add_input(builder, "x", 4)
    pads = [builder.call("pad", [x], pads=(1, 1), value=value) for value in (0.0, -0.0, 0.0)]
    graph = builder.finish([(f"y{i}", each) for i, each in enumerate(pads)])
    assert len(merge_duplicates(graph).nodes) == 2
    assert "-0.0" in text(graph.nodes[1].program)


def test_dead_nodes_go_with_their_constants() -> None:
    builder, weights = builder_of()
    x = add_input(builder, "x", 8)
    kept = builder.call("mul", [x, add_random(builder, 1, 8)])
    builder.call("exp", [builder.call("add", [kept, add_random(builder, 2, 8)])])
    graph = builder.finish([("y", kept)])
    alive = verify(remove_dead_nodes(graph))
    assert operators(alive) == ["mul"]
    assert len(alive.constants) == 1
    check_equal(graph, alive, weights)


def test_row_21_a_chain_of_maps_is_one_kernel() -> None:
    builder, weights = builder_of()
    y = x = add_input(builder, "x", 64, 96)
    for operator in ("exp", "relu", "sigmoid", "tanh"):
        y = builder.call(operator, [y])
    graph = builder.finish([("y", builder.call("add", [y, x]))])
    fused = verify(fuse_operators(graph, CostTable(CPU)))
    assert operators(fused) == [FUSED]
    (node,) = (node for node in fused.nodes if isinstance(node, OpNode))
    assert node.members == tuple(each.name for each in graph.nodes)
    (again,) = (each for each in fuse_operators(fused, CostTable(CPU)).nodes if isinstance(each, OpNode))
    assert again.members == node.members
    check_equal(graph, fused, weights)


@pytest.mark.parametrize(
    ("merged_s", "is_merged", "is_unsure"), [(1.7, True, False), (1.9, True, True), (2.2, False, True), (2.3, False, False)]
)
def test_a_boundary_within_the_error_of_the_model_may_be_the_other_way(merged_s: float, is_merged: bool, is_unsure: bool) -> None:
    """Two maps take 1 s each, and as one the given seconds; the model's error is 13 %."""

    class Costs(CostTable):
        def cost(self, node: OpNode, constants: Mapping[str, Constant]) -> Cost:
            return Cost(1, merged_s if len(node.program.statements) > 1 else 1.0)

    builder, weights = builder_of()
    graph = builder.finish([("y", builder.call("relu", [builder.call("exp", [add_input(builder, "x", 8)])]))])
    met = Boundaries()
    fused = fuse_operators(graph, Costs(CPU), met)
    assert operators(fused) == ([FUSED] if is_merged else ["exp", "relu"])
    unsure = met.list_unsure(0.0, 8)
    assert [(each.is_merged, each.merged_s, each.apart_s) for each in unsure] == [(is_merged, merged_s, 2.0)][: int(is_unsure)]
    assert met.list_unsure(1.0, 8) == met.list_unsure(0.0, 0) == []
    program = merge_nodes([node for node in graph.nodes if isinstance(node, OpNode)], {graph.outputs[0][1]}).program
    flipped = verify(fuse_operators(graph, Costs(CPU), Boundaries([program])))
    assert operators(flipped) == ([FUSED] if is_merged != is_unsure else ["exp", "relu"])
    check_equal(graph, flipped, weights)


def test_equal_layers_share_a_merged_program_and_zeros_keep_their_sign() -> None:
    def merged(zero: str) -> tuple[OpNode, OpNode]:
        x = TensorType(DType.FLOAT32, (8,))
        first = parse(f"y[i] = x0[i] * {zero}", {"x0": x}, ("y",))
        second = parse("y[i] = x0[i] + x1[i]", {"x0": x, "x1": x}, ("y",))
        layers = []
        for layer in "ab":
            product = OpNode(f"{layer}0", FUSED, first, (f"{layer}x",), (f"{layer}y",))
            total = OpNode(f"{layer}1", FUSED, second, (f"{layer}y", "bias"), (f"{layer}z",))
            layers.append(merge_nodes([product, total], {f"{layer}z"}))
        return layers[0], layers[1]

    (a, b), (negative, _) = merged("0.0"), merged("-0.0")
    assert a.program is b.program
    assert (b.name, b.inputs, b.outputs, b.members) == ("b0+b1", ("bx", "bias"), ("bz",), ("b0", "b1"))
    assert text(a.program) == "t0[i] = x0[i] * 0.0 where i in 8; y0[i] = t0[i] + x1[i] where i in 8"
    assert a.program != negative.program
    assert text(negative.program) != text(a.program)


def test_boundaries_of_equal_nodes_are_one_and_those_of_loops_count_for_each_step() -> None:
    builder, _ = builder_of()
    builder.call("exp", [add_input(builder, "x", 8)])
    program = builder.finish([]).nodes[0]
    assert isinstance(program, OpNode)
    met = Boundaries()
    boundary = Boundary(program.program, True, 1.0, 1.0)
    assert met.decide(boundary, ["a", "b"], 1)
    assert met.decide(boundary, ["b", "a"], 1)  # in another round
    assert met.decide(boundary, ["c", "d"], 20)
    gain_s = 21 * (ERROR_RATIO - 1)
    assert met.list_unsure(0.999 * gain_s, 1) == [boundary]
    assert met.list_unsure(1.001 * gain_s, 1) == []


def test_an_epilogue_joins_its_product() -> None:
    builder, weights = builder_of()
    x = add_input(builder, "x", 64, 96)
    product = builder.call("matmul", [x, add_random(builder, 0, 96, 128)])
    graph = builder.finish([("y", builder.call("relu", [builder.call("add", [product, add_random(builder, 1, 128)])]))])
    fused = verify(fuse_operators(graph, CostTable(CPU)))
    assert operators(fused) == [FUSED]
    check_equal(graph, fused, weights)


def test_two_products_stay_two_kernels() -> None:
    builder, weights = builder_of()
    y = add_input(builder, "x", 64, 96)
    for seed in (0, 1):
        y = builder.call("relu", [builder.call("matmul", [y, add_random(builder, seed, 96, 96)])])
    graph = builder.finish([("y", y)])
    fused = verify(fuse_operators(graph, CostTable(CPU)))
    assert operators(fused) == [FUSED, FUSED]
    check_equal(graph, fused, weights)


def scores_and_values(*outputs: str) -> Graph:
    """Return two products around a softmax, whose heads are one axis, with the tensors of these names as outputs."""
    builder, _ = builder_of()
    query, keys, values = (add_input(builder, name, 2, 64, 64, dtype=DType.FLOAT16) for name in "qkv")
    scores = builder.call("matmul", [query, builder.call("transpose", [keys], permutation=(0, 2, 1))])
    weights = builder.call("softmax", [builder.call("reshape", [scores], shape=(128, 64))])
    mixed = builder.call("matmul", [builder.call("reshape", [weights], shape=(2, 64, 64)), values])
    found = {"scores": scores, "weights": weights, "mixed": mixed}
    return builder.finish([(name, found[name]) for name in outputs])


def test_products_around_a_softmax_are_one_node_where_attention_is_one_kernel() -> None:
    for target, nodes in (("nvidia-h200-sxm", 1), ("nvidia-v100-sxm2", 3), ("cpu-x86-avx2", 3)):
        graph = scores_and_values("mixed")
        fused = verify(fuse_operators(graph, CostTable(load(target))))
        kernels = [node for node in fused.nodes if isinstance(node, OpNode) and view_offset_elements(node) is None]
        assert len(kernels) == nodes, target
    check_equal(graph, fused, Weights())


def test_products_around_a_softmax_stay_apart_where_others_read_between() -> None:
    for name in ("scores", "weights"):
        fused = verify(fuse_operators(scores_and_values("mixed", name), CostTable(load("nvidia-h200-sxm"))))
        assert sum(isinstance(node, OpNode) and view_offset_elements(node) is None for node in fused.nodes) > 1


def rotations() -> tuple[Graph, Weights]:
    """Return two tensors that are multiplied by the same two tables, which are repeated first."""
    builder, weights = builder_of()
    angles = builder.call("mul", [add_input(builder, "position", 1, 1), add_random(builder, 0, 1, 32)])
    tables = [builder.call("tile", [builder.call(name, [angles])], repeats=(1, 2)) for name in ("cos", "sin")]
    results = []
    for name, heads in (("q", 8), ("k", 2)):
        x = add_input(builder, name, heads, 1, 64)
        low, high = (builder.call("slice", [x], axes=(2,), starts=(i,), stops=(i + 32,)) for i in (0, 32))
        crossed = builder.call("concat", [builder.call("neg", [high]), low], axis=2)
        turned = [builder.call("mul", [each, table]) for each, table in zip((x, crossed), tables, strict=True)]
        results.append((name, builder.call("add", turned)))
    return builder.finish([(f"{name}_turned", result) for name, result in results]), weights


def test_maps_that_several_nodes_share_are_computed_by_each() -> None:
    graph, weights = rotations()
    for target in ("nvidia-h200-sxm", "cpu-x86-avx2"):
        costs = CostTable(load(target))
        fused = verify(fuse_operators(graph, costs))
        stored = verify(_Fusion(graph, costs).run())
        before, after = (costs.graph_seconds(each) or 0.0 for each in (stored, fused))
        assert 0.0 < after < before, target
        assert len(fused.nodes) == 3 < len(stored.nodes), target  # the tables, and a node for each rotation
        check_equal(graph, fused, weights)


def test_shared_maps_of_shared_maps_are_copied_with_unused_names() -> None:
    """The graph has the name that a copy would take."""
    builder, weights = builder_of()
    base = builder.call("mul", [add_input(builder, "p", 1, 1024)] * 2)
    rows = builder.call("tile", [builder.call("exp", [base])], repeats=(8, 1))
    q, r, s = (add_input(builder, name, height, 1024) for name, height in (("q", 8), ("r", 8), ("s", 16)))
    results = [
        builder.call("reduce_sum", [builder.call("mul", [q, rows])], axis=(1,)),
        builder.call("reduce_max", [builder.call("sub", [r, rows])], axis=(1,)),
        builder.call("reduce_sum", [builder.call("mul", [s, base])], axis=(1,)),
        builder.call("reduce_sum", [builder.call("relu", [q])], axis=(1,)),
    ]
    graph = builder.finish([(f"y{i}", result) for i, result in enumerate(results)])
    costs = CostTable(load("nvidia-h200-sxm"))
    copied = _Fusion(graph, costs)
    copied.run()
    first = copied.copy_shared_maps()
    assert first is not None
    names = {node.name for node in verify(first).nodes} - {node.name for node in graph.nodes}
    (relu,) = [node for node in graph.nodes if isinstance(node, OpNode) and node.operator == "relu"]
    taken = min(names)

    def renamed(node: Node) -> Node:
        if node is relu:
            return replace(relu, name=taken, outputs=(taken,))
        return replace(node, inputs=tuple(taken if each == relu.outputs[0] else each for each in node.inputs))

    graph = replace(graph, nodes=tuple(map(renamed, graph.nodes)))
    fused = verify(fuse_operators(graph, costs))
    assert any(taken + "_" in node.name for node in fused.nodes)
    check_equal(graph, fused, weights)


def test_a_mask_that_attentions_share_does_not_keep_them_apart() -> None:
    """The mask of the second attention would be read from the fused node of the first one's scores."""
    builder, _ = builder_of()
    places, last = (add_input(builder, name, *shape, dtype=DType.INT32) for name, shape in (("places", (2048,)), ("last", (1, 1))))
    hidden = builder.call("logical_not", [builder.call("less_equal", [places, last])])
    low = builder.add_constant(np.array(-1000, np.float16), DType.FLOAT16)
    mixed = add_input(builder, "query", 2, 4, 64, dtype=DType.FLOAT16)
    for layer in "ab":
        keys, values = (add_input(builder, f"{name}{layer}", 2, 2048, 64, dtype=DType.FLOAT16) for name in ("keys", "values"))
        scores = builder.call("matmul", [mixed, builder.call("transpose", [keys], permutation=(0, 2, 1))])
        scores = builder.call("reshape", [scores], shape=(8, 1, 2048))
        weights = builder.call("softmax", [builder.call("where", [hidden, low, scores])])
        weights = builder.call("reshape", [weights], shape=(2, 4, 2048))
        mixed = builder.call("matmul", [weights, values])
    graph = builder.finish([("mixed", mixed)])
    costs = CostTable(load("nvidia-h200-sxm"))
    stored, fused = (verify(each) for each in (_Fusion(graph, costs).run(), fuse_operators(graph, costs)))
    assert len(fused.nodes) == 3 < len(stored.nodes)  # both attentions, and the mask


def test_shared_maps_that_are_outputs_are_stored() -> None:
    for target in ("nvidia-h200-sxm", "cpu-x86-avx2"):
        graph, weights = rotations()
        tables = [node for node in graph.nodes if isinstance(node, OpNode) and node.operator == "tile"]
        graph = replace(graph, outputs=(*graph.outputs, *((each.name, each.outputs[0]) for each in tables)))
        fused = verify(fuse_operators(graph, CostTable(load(target))))
        assert not any(f"{table.name}@" in node.name for node in fused.nodes for table in tables), target
        check_equal(graph, fused, weights)


def test_a_view_between_nodes_does_not_keep_them_apart() -> None:
    builder, weights = builder_of()
    x = add_input(builder, "x", 64, 96)
    grown = builder.call("exp", [x])
    shaped = builder.call("reshape", [grown], shape=(4, 16, 96))
    graph = builder.finish([("y", builder.call("relu", [shaped]))])
    fused = verify(fuse_operators(graph, CostTable(CPU)))
    assert operators(fused) == [FUSED]
    check_equal(graph, fused, weights)


def test_what_others_read_is_still_written() -> None:
    builder, weights = builder_of()
    x = add_input(builder, "x", 64, 96)
    a = builder.call("exp", [x])
    b = builder.call("relu", [a])
    total = builder.call("reduce_sum", [a], axis=(1,), keepdims=True)
    graph = builder.finish([("y", builder.call("div", [b, total])), ("a", a)])
    fused = verify(fuse_operators(graph, CostTable(CPU)))
    assert len(fused.nodes) < len(graph.nodes)
    check_equal(graph, fused, weights)


def test_no_cycle_arises() -> None:
    """A node between two others that would fuse: it reads the first, and the second reads it."""
    builder, weights = builder_of()
    x = add_input(builder, "x", 64, 64)
    a = builder.call("exp", [x])
    between = builder.call("matmul", [a, add_random(builder, 0, 64, 64)])
    graph = builder.finish([("y", builder.call("add", [a, between]))])
    fused = verify(fuse_operators(graph, CostTable(CPU)))
    check_equal(graph, fused, weights)


def test_passes_reach_into_loops() -> None:
    builder, weights = builder_of()
    x, h = add_input(builder, "x", 5, 1, 32), add_input(builder, "h", 1, 32)
    body = builder.subgraph("body")
    state, piece = body.add_input(h.type), body.add_input(type(x.type)(DType.FLOAT32, (1, 32)))
    product = body.call("matmul", [state, add_random(body, 0, 32, 32)])
    after = body.call("tanh", [body.call("add", [product, piece])])
    body.call("exp", [after])  # dead
    inner = body.finish([("h", after), ("y", after)])
    last, whole = builder.add_loop(inner, 5, 1, [False], [True], [h, x])
    graph = verify(builder.finish([("last", last), ("all", whole)]))
    after_passes, reports = run_passes(graph, weights, CostTable(CPU))
    (loop,) = after_passes.nodes
    assert isinstance(loop, LoopNode)
    assert operators(loop.body) == [FUSED]
    assert reports[0].nodes_before == 5
    check_equal(graph, after_passes, weights)


def test_operators_take_the_form_that_the_model_prefers() -> None:
    builder, _ = builder_of()
    x = add_input(builder, "x", 64, 1024)
    body = builder.subgraph("body")
    state = body.add_input(x.type)
    inner = body.finish([("x", state), ("places", body.call("top_k_indices", [state], k=50))])
    _, inside = builder.add_loop(inner, 2, 1, [], [True], [x])
    graph = verify(builder.finish([("i", builder.call("top_k_indices", [x], k=50)), ("inside", inside)]))
    selection, ranks = forms_of_call("top_k_indices", (x.type,), (("k", 50),))
    for target, form in (("nvidia-h200-sxm", ranks), ("cpu-x86-avx512", selection)):
        chosen = verify(choose_forms(graph, CostTable(load(target))))
        assert [node.program for node in iter_nodes(chosen) if isinstance(node, OpNode)] == [form, form]


def test_an_expression_takes_the_form_that_the_model_prefers() -> None:
    x, text = {"dtype": "float32", "shape": [64, 128]}, "I = top_k_indices(x, k=16)"
    node = {"name": "i", "expression": text, "inputs": {"x": "x"}, "outputs": {"I": "i"}}
    document = {"format": FORMAT, "inputs": {"x": x}, "nodes": [node], "outputs": {"i": "i"}}
    graph = graph_from_json(document, Weights())
    first, other = parse_forms(text, {"x": graph.types["x"]}, ("I",))
    (read,), (chosen,) = graph.nodes, verify(choose_forms(graph, CostTable(load("nvidia-h200-sxm")))).nodes
    assert isinstance(read, OpNode)
    assert chosen == replace(read, program=other, forms=())
    assert read.program == first != other


def test_a_program_of_another_origin_keeps_its_statements() -> None:
    program = parse("y[i, k] = x0[i, k] where k in 50", {"x0": TensorType(DType.FLOAT32, (64, 1024))})
    node = OpNode("n", "top_k_indices", program, ("x",), ("y",), (("k", 50),))
    graph = Graph("g", (("x", program.types["x0"]),), {}, (node,), (("y", "y"),))
    assert choose_forms(graph, CostTable(load("nvidia-h200-sxm"))) == graph


def test_a_fused_program_names_no_tensor_of_the_model() -> None:
    builder, _ = builder_of()
    x = add_input(builder, "*/ system(x) /*", 8)
    graph = builder.finish([("y", builder.call("relu", [builder.call("exp", [x])]))])
    node = program_of(fuse_operators(graph, CostTable(CPU)), FUSED)
    assert [name for name, _ in node.program.inputs] == ["x0"]
    assert [output.name for output in node.program.outputs] == ["y0"]


def projections(rows: int, extents: tuple[int, ...] = (32, 48, 48)) -> tuple[Graph, Weights]:
    """Several products over one input, each with a bias and an activation, and a reader."""
    builder, weights = builder_of()
    x = add_input(builder, "x", rows, 64)
    results = []
    for i, extent in enumerate(extents):
        y = builder.call("matmul", [x, add_random(builder, i, 64, extent)])
        y = builder.call("add", [y, add_random(builder, 10 + i, extent)])
        results.append(builder.call("relu", [y]))
    sums = [builder.call("reduce_sum", [y], axis=(1,), keepdims=False) for y in results]
    total = builder.call("add", [builder.call("add", sums[:2]), sums[2]])
    return builder.finish([("y", total)]), weights


def fused_horizontally(graph: Graph, weights: Weights) -> tuple[Graph, Graph]:
    """Return the graph after vertical fusion, and after horizontal fusion too."""
    costs = CostTable(CPU)
    fused = fuse_operators(graph, costs)
    return fused, verify(fuse_horizontally(fused, weights, costs))


def test_products_of_one_row_over_one_input_become_one() -> None:
    graph, weights = projections(1)
    fused, merged = fused_horizontally(graph, weights)
    products = [node for node in merged.nodes if node.name.count("|") == 2]
    assert len(products) == 1
    assert products[0].output_types[0].shape == (1, 128)
    assert sum("slice" in node.operator for node in merged.nodes) == 3
    assert len(fused.constants) == 6
    assert len(merged.constants) == 2
    check_equal(graph, merged, weights)


def test_convolutions_of_other_filters_over_one_input_become_one() -> None:
    builder, weights = builder_of()
    x = add_input(builder, "x", 1, 16, 8, 8)
    results = []
    for i, filters in enumerate((8, 24)):
        y = builder.call("conv2d", [x, add_random(builder, i, filters, 16, 1, 1), add_random(builder, 5 + i, filters)])
        pool = builder.call("max_pool2d", [builder.call("relu", [y])], kernel=(2, 2))
        results.append(builder.call("reduce_sum", [pool], axis=(0, 1), keepdims=False))
    graph = builder.finish([("y", builder.call("add", results))])
    _, merged = fused_horizontally(graph, weights)
    assert any(node.output_types[0].shape == (1, 32, 8, 8) for node in merged.nodes)
    check_equal(graph, merged, weights)


def test_strided_slices_are_merged_only_where_readers_take_them() -> None:
    graph, weights = projections(40)
    fused, merged = fused_horizontally(graph, weights)
    costs = CostTable(CPU)

    def seconds(of: Graph) -> float:
        known = [costs.cost(node, of.constants) for node in of.nodes if isinstance(node, OpNode)]
        return sum(cost.seconds for cost in known if cost is not None)

    assert seconds(merged) <= seconds(fused)
    check_equal(graph, merged, weights)


def test_branches_stay_where_results_are_placed_or_weights_vary() -> None:
    builder, weights = builder_of()
    x = add_input(builder, "x", 1, 64)
    w = add_input(builder, "w", 64, 32)  # not a constant
    concatenated = [builder.call("matmul", [x, add_random(builder, i, 64, 32)]) for i in range(2)]
    whole = builder.call("concat", concatenated, axis=1)
    given = [builder.call(name, [builder.call("matmul", [x, w])]) for name in ("exp", "tanh")]
    retransposed = builder.call("matmul", [x, add_random(builder, 7, 64, 32)])
    inner = builder.call("matmul", [retransposed, add_random(builder, 8, 32, 64)])  # depends on a branch: another input
    graph = builder.finish(
        [("c", whole), ("g", builder.call("add", given)), ("r", retransposed), ("i", builder.call("exp", [inner]))]
    )
    fused, merged = fused_horizontally(graph, weights)
    assert [node.name for node in merged.nodes] == [node.name for node in fused.nodes]


def test_parts_of_weights_are_not_concatenated() -> None:
    """A product that reads the first columns of a matrix needs them apart from the others."""
    builder, weights = builder_of()
    x = add_input(builder, "x", 1, 200)
    results = []
    for i in range(2):
        part = builder.call("slice", [add_random(builder, i, 200, 150)], starts=(0,), stops=(100,), axes=(1,))
        results.append(builder.call("matmul", [x, part]))
    graph = builder.finish([("y", builder.call("exp", [builder.call("add", results)]))])
    _, merged = fused_horizontally(graph, weights)
    check_equal(graph, merged, weights)
    program = parse(
        "y[i, j] +=! x[i, k] * w[k, j] where i in 1, j in 100",
        {"x": TensorType(DType.FLOAT32, (1, 200)), "w": TensorType(DType.FLOAT32, (200, 150))},
        ("y",),
    )
    assert concatenated_dims(program, 1) is None
    assert concatenated_dims(program, 0) == {"y": 0, "x": 0}


def test_reversed_weights_are_not_concatenated() -> None:
    """An axis that is part of an expression, as a reversed one, does not qualify."""
    builder, weights = builder_of()
    x = add_input(builder, "x", 1, 64)
    results = []
    for i in range(2):
        y = builder.call("matmul", [x, add_random(builder, i, 64, 32)])
        results.append(builder.call("flip", [y], axis=(1,)))
    graph = builder.finish([("y", builder.call("exp", [builder.call("add", results)]))])
    _, merged = fused_horizontally(graph, weights)
    check_equal(graph, merged, weights)


def add_matrix(builder: GraphBuilder, seed: int, width: int) -> Operand:
    """Add a random matrix whose product with a vector has the vector's scale."""
    array = np.random.default_rng(seed).standard_normal((width, width)) / width**0.5
    return builder.add_constant(array.astype(np.float32), DType.FLOAT32)


def unrolled_layers(layers: int, steps: int, width: int) -> tuple[Graph, Weights]:
    """Recurrent layers, step by step: h = tanh(x W + h U)."""
    builder, weights = builder_of()
    sequence = [add_input(builder, f"x{t}", 1, width) for t in range(steps)]
    for layer in range(layers):
        w, u = (add_matrix(builder, 2 * layer + i, width) for i in range(2))
        state = add_input(builder, f"h{layer}", 1, width)
        states = []
        for x in sequence:
            products = [builder.call("matmul", [x, w]), builder.call("matmul", [state, u])]
            state = builder.call("tanh", [builder.call("add", products)])
            states.append(state)
        sequence = states
    return builder.finish([(f"y{t}", state) for t, state in enumerate(sequence)]), weights


def test_products_with_one_matrix_are_batched_over_steps() -> None:
    graph, weights = unrolled_layers(2, 6, 128)
    batched = verify(batch_operators(graph, CostTable(CPU)))
    products = [node.output_types[0].shape[0] for node in batched.nodes if node.operator == "matmul"]
    assert sorted(products) == [1] * 12 + [6, 6]  # those of states depend on each other
    assert all(is_contiguous_concat(node) for node in batched.nodes if node.operator == "concat")
    check_equal(graph, batched, weights)
    check_equal(graph, verify(fuse_operators(batched, CostTable(CPU))), weights)


def test_batches_of_dependent_nodes_make_no_cycle() -> None:
    """Two chains over two matrices, in opposite orders: merging both pairs of equal matrices would be a cycle."""
    builder, weights = builder_of()
    a, b = (add_matrix(builder, i, 128) for i in range(2))
    results = []
    for i, (first, second) in enumerate(((a, b), (b, a))):
        x = add_input(builder, f"x{i}", 1, 128)
        results.append(builder.call("matmul", [builder.call("matmul", [x, first]), second]))
    graph = builder.finish([("y", results[0]), ("z", results[1])])
    batched = verify(batch_operators(graph, CostTable(CPU)))
    assert [node.output_types[0].shape[0] for node in batched.nodes if node.operator == "matmul"].count(2) == 1
    check_equal(graph, batched, weights)


def test_long_sequences_are_batched_in_equal_parts() -> None:
    graph, weights = unrolled_layers(1, MAX_BATCH + 2, 64)
    batched = verify(batch_operators(graph, CostTable(CPU)))
    products = [node.output_types[0].shape[0] for node in batched.nodes if node.operator == "matmul"]
    assert sorted(products)[-2:] == [MAX_BATCH // 2 + 1] * 2
    check_equal(graph, batched, weights)


def test_operators_on_large_inputs_are_not_batched() -> None:
    """Reading weights once does not pay for copies of inputs that are larger."""
    builder, weights = builder_of()
    w = add_random(builder, 0, 8, 4, 3, 3)
    convolved = [builder.call("conv2d", [add_input(builder, f"x{i}", 1, 4, 40, 40), w], padding=1) for i in range(2)]
    graph = builder.finish([("y", convolved[0]), ("z", convolved[1])])
    assert batch_operators(graph, CostTable(CPU)) == graph
    del weights


def test_batched_convolutions_have_a_batch() -> None:
    builder, weights = builder_of()
    w = add_random(builder, 0, 64, 64, 3, 3)
    convolved = [builder.call("conv2d", [add_input(builder, f"x{i}", 1, 64, 5, 5), w], padding=1) for i in range(3)]
    graph = builder.finish([(f"y{i}", builder.call("relu", [each])) for i, each in enumerate(convolved)])
    batched = verify(batch_operators(graph, CostTable(CPU)))
    assert program_of(batched, "conv2d").output_types[0].shape == (3, 64, 5, 5)
    check_equal(graph, batched, weights)
