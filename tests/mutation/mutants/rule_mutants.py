"""Faults in the rules of schedules, each with the quick test that fails with it."""

from __future__ import annotations

import re

from tests.mutation.mutants.mutation import Edit
from tests.mutation.mutants.rules import RuleMutation

_FAULTS: dict[str, dict[str, tuple[tuple[str, str, str], ...]]] = {  # module → test that fails → name, text, what replaces it
    "schedule.legality": {
        "test_legality:test_row_28_an_illegal_tree_is_refused": (
            (
                "loops in vector loops",
                "if any(outer.kind is LoopKind.VECTOR for outer in self.scopes.loops):",
                "if False and any(outer.kind is LoopKind.VECTOR for outer in self.scopes.loops):",
            ),
            ("unrolled loops end early", "if loop.kind is not LoopKind.SERIAL:", "if loop.kind is LoopKind.VECTOR:"),
            ("vector loops end early", "if loop.kind is not LoopKind.SERIAL:", "if loop.kind is LoopKind.UNROLL:"),
            ("the end of a loop is out of scope", "self.scopes.check_expr(loop.stop)", "pass"),
            (
                "threads leave a loop before a barrier",
                'alike = self._convergence_widths(loop.stop, f"the end of loop {loop.var}")',
                "alike = ()",
            ),
            (
                "a barrier is in a branch of some threads",
                'alike = self._convergence_widths(branch.cond, "a condition")',
                "alike = ()",
            ),
            ("a condition is out of scope", "self.scopes.check_expr(branch.cond)", "pass"),
            ("a variable's value is out of scope", "self.scopes.check_expr(node.value)\n", "pass\n"),
            ("a second storage node has the contents of the first", "self.written.discard(name)", "pass"),
            (
                "what is read at the end of storage is never written",
                "self.check_written(self.pending & {name})",
                "pass",
            ),
            (
                "an alias is in scope",
                "if alive := [t for t in storage.aliases if t in self.storages_in_scope]:",
                "if alive := [t for t in storage.aliases if False]:",
            ),
            ("the overlaid tensor is used", "if storage.overlays and (used", "if not storage.overlays and (used"),
            ("storage is used outside", "if tensor in self.storages or (", "if ("),
            (
                "a loop variable is out of scope",
                "if outside:",
                "if False and outside:",
            ),
            (
                "a tensor is read before it is written",
                "if tensor not in self.written:\n            self._read",
                "if False and tensor not in self.written:\n            self._read",
            ),
            ("the first iteration reads what none wrote", "if not in_branch or all(", "if all("),
            (
                "another thread's iteration wrote it",
                "if not in_branch or all(loop.kind is not LoopKind.SERIAL for loop in self.loops[depth_of_storage:]):",
                "if not in_branch:",
            ),
            (
                "any branch of any loop is one that follows a write",
                "any(each.depth > depth_of_storage for each in self.dependence.branches)",
                "any(self.dependence.branches)",
            ),
            ("a warp is one thread", "alike % known[threads]]", "alike % 1]"),
            (
                "collective nodes in parallel loops",
                "if x.kind in (LoopKind.VECTOR, LoopKind.PARALLEL)]",
                "if False]",
            ),
            (
                "threads agree on what they wrote",
                "if threads and value.from_data:",
                "if False and threads and value.from_data:",
            ),
            (
                "threads that differ in two loops agree as in the first",
                "_Width(math.gcd(*strides.values()),",
                "_Width(max(strides.values()),",
            ),
            (
                "what a branch leaves of threads is forgotten",
                "del self.widths[len(self.widths) - len(alike) :]\n\n    def _routine",
                "self.widths.clear()\n\n    def _routine",
            ),
        ),
        "test_legality:test_a_legal_tree_passes": (
            ("no iteration writes for the next", "self.scopes.end_iteration()", "pass"),
            (
                "storage of the iteration before",
                "self.storage_site(t)[0] <= len(self.loops)",
                "self.storage_site(t)[0] < len(self.loops)",
            ),
            (
                "an accumulator without a first value",
                "if node.combine is not None and node.tensor in",
                "if node.combine is None and node.tensor in",
            ),
            ("only atomic writes are compared", "if not node.atomic:", "if node.atomic:"),
            (
                "the other branch is the same one",
                "for holds, nodes in ((True, branch.then), (False, branch.otherwise)):",
                "for holds, nodes in ((True, branch.then), (True, branch.otherwise)):",
            ),
        ),
        "test_legality:test_buffers_are_known_by_name": (
            ("an unknown buffer is used", "(self.buffers is not None and tensor not in self.buffers)", "False"),
        ),
        "test_legality:test_half_a_wave_is_a_warp_of_other_devices": (
            ("strides of threads are sums", "stride *= loop.extent", "stride += loop.extent"),
        ),
    },
    "schedule.dependence": {
        "test_legality:test_row_28_an_illegal_tree_is_refused": (
            (
                "two threads are the first",
                "case Op(kind=OpKind.LT, args=(a, Const(value=1))):",
                "case Op(kind=OpKind.LT, args=(a, _)):",
            ),
            (
                "a difference of 0 is the first thread",
                "return var in dict(terms) and all(name and c > 0 for name, c in terms)",
                "return var in dict(terms)",
            ),
            (
                "a number below 3 is the first thread",
                "return var in dict(terms) and all(name and c > 0 for name, c in terms)",
                "return var in dict(terms) and all(c > 0 for name, c in terms if name)",
            ),
            ("tiles overlap by one", "if abs(c) <= span:", "if abs(c) < span:"),
            ("all write where one does not", "each.holds and each.depth > level and", "each.depth > level and"),
            ("a branch around a loop selects its iteration", "each.holds and each.depth > level and", "each.holds and"),
            ("threads at or above a bound", "if branch.holds:\n", "if True:\n"),
            ("a bound is rounded down", "-(-bound // c)", "bound // c"),
            ("a bound of a difference", "if all(name and c > 0 for name, c in terms):", "if terms:"),
            ("any thread is the last", "extents.get(v) == last + 1}", "v in extents}"),
            (
                "the first of two reads touches the last write",
                "if invariant == other_invariant and (high < first or last < low):",
                "if invariant == other_invariant and (high <= first or last < low):",
            ),
            (
                "the last of two reads touches the first write",
                "if invariant == other_invariant and (high < first or last < low):",
                "if invariant == other_invariant and (high < first or last <= low):",
            ),
            ("other tiles are compared", "if invariant == other_invariant and (", "if ("),
            (
                "iterations of inner loops are one",
                "moving = {loop.var: loop.extent, **accesses.inner}",
                "moving = {loop.var: loop.extent}",
            ),
            (
                "iterations of the loop are one",
                "moving = {loop.var: loop.extent, **accesses.inner}",
                "moving = {**accesses.inner}",
            ),
            ("equal places in all iterations", "any(a == b and var in a.loops for", "any(a == b for"),
            (
                "iterations read each other's elements",
                "if not all(never_alias(write, read, moving) for write in writes):",
                "if False:",
            ),
            (
                "one of several writes is compared",
                "if not all(never_alias(write, read, moving) for write in writes):",
                "if not any(never_alias(write, read, moving) for write in writes):",
            ),
            ("storage directly around a loop is its own", "shared = level >= depth or", "shared = level > depth or"),
            (
                "threads have shared memory of their own",
                "or (scope is Scope.SHARED and loop.kind is LoopKind.THREAD)",
                "or False",
            ),
            ("extents of inner loops", "accesses.inner[loop.var] = loop.extent", "accesses.inner[loop.var] = 1"),
        ),
        "test_legality:test_a_legal_tree_passes": (
            ("spans are one too long", "span += abs(c) * (varying[name] - 1)", "span += abs(c) * varying[name]"),
            ("coefficients have signs", "if abs(c) <= span:", "if c <= span:"),
            ("terms are in any order", "sorted(value.terms, key=lambda term: abs(term[1]))", "reversed(value.terms)"),
            ("loops of one iteration are counted", "if n > 1}", "if n >= 1}"),
            (
                "threads have elements of their own",
                "if loop.kind is LoopKind.THREAD or are_disjoint",
                "if are_disjoint",
            ),
            ("the last thread alone", "if not branch.holds:", "if branch.holds:"),
            ("an iteration reads its own element", "any(a == b and var in a.loops for", "any(False for"),
            ("storage in a loop is shared", "shared = level >= depth or", "shared = level >= depth - 1 or"),
            ("loops of one iteration", "or loop.extent == 1:", "or False:"),
            ("a disjunction selects", "case Op(kind=OpKind.LAND, args=args):", "case Op(kind=OpKind.LOR, args=args):"),
            ("contents of storage come from nowhere", "loops |= self.contents.get(node.tensor, frozenset())", "pass"),
        ),
    },
    "schedule.bounds": {
        "test_steps:test_a_tile_has_the_region_that_is_written": (
            ("a region of the tensor's size has another start", "if high - low + 1 >= size:", "if high - low + 1 > size:"),
            ("data selects in its dimension alone", "part = None if any(load.bounds_checked) else _part(", "part = _part("),
            ("a tile is smaller than what is written", "Range(num(0), size) if part.extent == size else stored", "stored"),
            (
                "data selects one element",
                "if any(isinstance(node, Load) for node in iter_subexpressions(index)):",
                "if False:",
            ),
        ),
        "test_steps:test_iterations_of_a_reduction_have_accumulators": (
            (
                "accumulators beyond the end",
                "guards.append(Guard(expression(linear(substitute(value, placed))), size, below=False, above=True))",
                "pass",
            ),
        ),
        "test_schedule:test_what_is_refused_is_refused_for_its_reason": (
            (
                "stored inside of where it is computed",
                "if path[: len(stored_path)] != stored_path:",
                "if False and path[: len(stored_path)] != stored_path:",
            ),
            ("outputs in loops", "if path and name in nests.outputs:", "if False and path and name in nests.outputs:"),
            (
                "scatters in loops",
                "if path and function.statement.kind is StatementKind.SCATTER:",
                "if False and path and function.statement.kind is StatementKind.SCATTER:",
            ),
            (
                "readers elsewhere",
                "if nest.scope[: len(path)] != path:",
                "if False and nest.scope[: len(path)] != path:",
            ),
            ("storage around concurrent loops", "if loop.kind in CONCURRENT:", "if False and loop.kind in CONCURRENT:"),
            ("many copies", "if copies > MAX_COPIES:", "if False and copies > MAX_COPIES:"),
            (
                "copies of outer loops are not counted",
                "for x in nest.scope if x.kind is LoopKind.UNROLL)",
                "for x in nest.loops if x.kind is LoopKind.UNROLL)",
            ),
            (
                "long vectors",
                "if loop.kind is LoopKind.VECTOR and loop.extent > MAX_LANES:",
                "if False and loop.kind is LoopKind.VECTOR and loop.extent > MAX_LANES:",
            ),
            ("long fused loops", "if whole[fused] > MAX_EXTENT:", "if False and whole[fused] > MAX_EXTENT:"),
            ("no scattering loop is concurrent", "if scatters and not axes <= plain:", "if scatters:"),
            (
                "nests of changed bodies are kept",
                "or known.bodies[name] is not found.bodies[name]:",
                "or name not in known.bodies:",
            ),
            (
                "bodies of changed producers are kept",
                "if known is not None and _are_the_same(producers, known.producers):",
                "if known is not None:",
            ),
        ),
        "test_gpu_steps:test_threads_share_tiles_between_barriers": (
            (
                "the region of one iteration of threads for all",
                "if function.scope is not Scope.SHARED or loop.kind is not LoopKind.THREAD}",
                "}",
            ),
        ),
        "test_schedule:test_tiles_have_what_their_readers_need": (
            (
                "a region is one too small",
                "return Range(expression({**parts[0][0], None: low}), high - low + 1)",
                "return Range(expression({**parts[0][0], None: low}), high - low)",
            ),
            (
                "a region begins with the first read",
                "low, high = min(p[1] for p in parts), max(p[2] for p in parts)",
                "low, high = parts[0][1], max(p[2] for p in parts)",
            ),
            (
                "a region ends with the first read",
                "low, high = min(p[1] for p in parts), max(p[2] for p in parts)",
                "low, high = min(p[1] for p in parts), parts[0][2]",
            ),
            (
                "reads that move apart",
                "if not parts or any(still != parts[0][0] for still, _, _ in parts):",
                "if not parts:",
            ),
            ("terms that vary are fixed", "axes_of(term) <= fixed else varying", "True else varying"),
            (
                "the last round of a split is left out",
                "ceil_div(whole[loop], whole[cut.inner])",
                "(whole[loop] // whole[cut.inner])",
            ),
            ("the last round of a split is not guarded", "if whole[loop] % whole[cut.inner]:", "if False:"),
            (
                "quotient and remainder change places",
                "values[cut.outer] = div(values[fused], whole[cut.inner])",
                "values[cut.outer] = mod(values[fused], whole[cut.inner])",
            ),
            (
                "a fused loop is divided by its outer extent",
                "values[cut.outer] = div(values[fused], whole[cut.inner])",
                "values[cut.outer] = div(values[fused], whole[cut.outer])",
            ),
            ("a region below 0 is not guarded", "below, above = low < 0,", "below, above = False,"),
            ("a region beyond the end is not guarded", "high + extent > axis.extent", "False"),
            (
                "nests of changed functions are kept",
                "if known is None or known.functions.get(name) is not function or known.bodies[name] is not "
                "found.bodies[name]:",
                "if known is None or known.functions.get(name) is None or known.bodies[name] is not "
                "found.bodies[name]:",
            ),
        ),
        "test_schedule:test_a_factor_is_at_most_the_extent_where_a_stage_is_computed": (
            (
                "a factor above a smaller extent",
                "whole[cut.inner] = min(factor, whole[loop])",
                "whole[cut.inner] = factor",
            ),
        ),
        "test_schedule:TestTransforms.test_row_26_golden_tree_of_the_blur": (
            (
                "a region that ends with its tensor is guarded",
                "high + extent > axis.extent",
                "high + extent >= axis.extent",
            ),
        ),
        "test_steps:test_a_nest_that_is_too_deep_is_refused": (
            (
                "deep nests",
                "if outer + len(stage.loops) > MAX_NESTED_LOOPS:",
                "if False and outer + len(stage.loops) > MAX_NESTED_LOOPS:",
            ),
        ),
        "test_gpu_steps:test_what_a_gpu_cannot_run_is_refused": (
            ("memory that each block writes", "if path and not stored_path:", "if False and path and not stored_path:"),
            (
                "blocks in loops",
                "if nest.outer and loop.kind is LoopKind.BLOCK:",
                "if False and nest.outer and loop.kind is LoopKind.BLOCK:",
            ),
            (
                "threads share a tile of one",
                "if threads and loop.kind is LoopKind.THREAD and function.scope is not Scope.SHARED:",
                "if False and threads and loop.kind is LoopKind.THREAD and function.scope is not Scope.SHARED:",
            ),
        ),
        "test_schedule:test_row_29_an_illegal_step_is_refused": (
            ("reduced loops are concurrent", "if axes & reduced:", "if False and axes & reduced:"),
            (
                "scattering loops are concurrent",
                "if scatters and not axes <= plain:",
                "if False and scatters and not axes <= plain:",
            ),
        ),
    },
    "schedule.build_tree": {
        "test_schedule:test_what_is_refused_is_refused_for_its_reason": (
            ("a barrier before a private tile", "uses = function.scope is Scope.SHARED and", "uses ="),
        ),
        "test_gpu_steps:test_all_threads_reach_the_barriers_of_a_tail": (
            ("tails are around the tiles that threads share", "if divergent and depth == meeting:", "if divergent and depth == 0:"),
            (
                "guards of outer thread loops stay",
                "for loop in nest.scope if loop.kind is LoopKind.THREAD)",
                "for loop in nest.loops if loop.kind is LoopKind.THREAD)",
            ),
            (
                "tiles of accumulators have no barriers",
                "any(f.scope is Scope.SHARED for f in computed) or any(self._has_barriers(each) for each in inside)",
                "any(f.scope is Scope.SHARED for f in computed)",
            ),
            ("guards are on both sides of a barrier", "== depth and g not in divergent]", "== depth]"),
        ),
        "test_gpu_steps:test_threads_share_tiles_between_barriers": (
            ("no barrier before a tile is read", "return (Barrier(), *nodes) if uses else nodes", "return nodes"),
            (
                "no barrier before a tile is written again",
                "return (Barrier(), *nodes)\n        return nodes",
                "return nodes\n        return nodes",
            ),
            (
                "a barrier before each tile",
                "uses = function.scope is Scope.SHARED and tile_name(function.name) in "
                "tensors_of(_before_barrier(nodes)[0])",
                "uses = function.scope is Scope.SHARED",
            ),
            (
                "a tile in serial loops is written once",
                "any(x.kind not in CONCURRENT and x.extent > 1 for x in loops)",
                "False",
            ),
            (
                "a barrier ends nothing",
                "if isinstance(node, Barrier):\n            return before, True",
                "if isinstance(node, Barrier):\n            continue",
            ),
            (
                "a barrier in a storage node is not seen",
                "if isinstance(node, Storage) else ((node,), False)",
                "if False else ((node,), False)",
            ),
        ),
        "test_schedule:test_tiles_have_what_their_readers_need": (
            (
                "stages of a function change places",
                "nodes = (*own, *_after_barrier(function, nodes))",
                "nodes = (*nodes, *own)",
            ),
            ("lower sides of guards", "if guard.below:\n            cond", "if False:\n            cond"),
            ("upper sides of guards", "if guard.above:\n            cond", "if False:\n            cond"),
            (
                "upper sides of guards are one too far",
                "cond = logical_and(cond, lt(guard.value, num(guard.size)))",
                "cond = logical_and(cond, le(guard.value, num(guard.size)))",
            ),
            ("a limit is rounded down", "div(add(remaining, num(step - 1)), step)", "div(remaining, step)"),
            ("a limit of a step", "return remaining if step == 1 else div(", "return remaining if step >= 1 else div("),
            (
                "the first of several limits",
                "found = limit if found is None else min_(found, limit)",
                "found = limit if found is None else found",
            ),
            (
                "guards below are decided by limits",
                "guards_left = [g if limit is None else replace(g, above=False) for g, limit in limits]",
                "guards_left = [g for g, limit in limits if limit is None]",
            ),
            (
                "the first lane decides",
                "last = expression(linear(substitute(guard.value, {loop.var: num(loop.extent - 1)})))",
                "last = expression(linear(substitute(guard.value, {loop.var: num(0)})))",
            ),
            ("a tile's first element is 0", "if part.first == num(0):", "if True:"),
            (
                "axes at which loops begin have their name",
                "return f\"{name}.at\" if any(loop.var == name for loop in nest.loops) else name",
                "return name",
            ),
            (
                "guards of inner loops are before all loops",
                "guards = [g for g in nest.guards if _depth(nest, g.value) == depth and",
                "guards = [g for g in nest.guards if depth == 0 and",
            ),
            (
                "a reduction begins with its first value",
                "return body.index, identity(body.combine or Combine.SUM, body.accumulator), None",
                "return body.index, identity(Combine.SUM, body.accumulator), None",
            ),
            (
                "updates of a reduction replace",
                "return body.index, value, body.combine",
                "return body.index, value, None",
            ),
        ),
        "test_schedule:TestTransforms.test_row_26_golden_tree_of_the_blur": (
            ("variables that vary with lanes", "return not axes_of(value) & lanes", "return True"),
        ),
        "test_gpu_steps:test_what_a_gpu_cannot_run_is_refused": (
            ("every thread makes a tile", "own = _on_one_thread(nest, own)", "pass"),
            (
                "the first of some threads makes a tile",
                "if loop.kind is LoopKind.THREAD and loop.extent > 1:",
                "if loop.kind is LoopKind.BLOCK and loop.extent > 1:",
            ),
        ),
        "test_schedule:test_row_29_an_illegal_step_is_refused": (
            (
                "a private tile is written again by others",
                "return function.scope is Scope.SHARED and any(",
                "return any(",
            ),
            (
                "changed nests are not checked",
                "if known is None or any(nests.nests[stage] is not known.nests.get(stage) for stage in stages):",
                "if known is None:",
            ),
        ),
        "test_gpu_steps:test_barriers_are_where_a_tile_changes_hands": (
            (
                "a tile in blocks is written again",
                "any(x.kind not in CONCURRENT and x.extent > 1 for x in loops)",
                "True",
            ),
            (
                "barriers between stages of a tile",
                "nodes = (*own, *_after_barrier(function, nodes))",
                "nodes = (*own, *nodes)",
            ),
        ),
        "test_gpu_steps:test_threads_are_numbered_as_in_their_launch": (
            (
                "the number of a thread",
                "number, threads = add(mul(number, num(outer.extent)), ref(outer.var)), threads * outer.extent",
                "number, threads = add(number, ref(outer.var)), threads * outer.extent",
            ),
            ("threads beyond a tile", "elif inside * loop.extent != threads:", "elif False:"),
            (
                "each thread loop has all threads",
                "inside = math.prod(x.extent for x in own[own.index(loop) + 1 :])",
                "inside = 1",
            ),
            ("an outer thread loop without a remainder", "if loop is not own[0]:", "if loop is own[0]:"),
        ),
        "test_schedule:TestTransforms.test_row_36_recomputing_against_storing": (
            (
                "functions at root are outside of storage",
                "if function.stored == site and function.name not in self.outputs:",
                "if function.stored == site:",
            ),
        ),
    },
    "schedule.transforms": {
        "test_steps:test_iterations_of_a_reduction_have_accumulators": (
            ("a ragged factored loop is whole", "if ragged else ()", "if not ragged else ()"),
            ("limits of a factored axis", "(substitute(value, {cut.loop: whole}), size) for", "(value, size) for"),
            (
                "tiles in factored loops stay behind",
                "schedule = _moved(schedule, At(stage, stage_loop.name), At(name + UPDATE, stage_loop.name))",
                "pass",
            ),
        ),
        "test_steps:test_copies_and_accumulators_have_names_of_their_own": (
            ("two copies of one name", ".cache{n if n > 1 else ''}\") not in names", ".cache{n if n > 1 else ''}\") or True"),
            ("two parts of one name", ".part{n if n > 1 else ''}\") not in names", ".part{n if n > 1 else ''}\") or True"),
        ),
        "test_steps:test_what_has_no_accumulators_or_threads_is_refused": (
            (
                "any loop has accumulators",
                "if isinstance(c, Split) and c.loop in reduced and loop in (",
                "if isinstance(c, Split) and loop in (",
            ),
            ("any number of threads", "if not 1 <= extent <= MAX_LANES:", "if not 1 <= extent:"),
            ("no threads", "if not 1 <= extent <= MAX_LANES:", "if not extent <= MAX_LANES:"),
        ),
        "test_schedule:test_what_is_refused_is_refused_for_its_reason": (
            ("a factor of the extent", "if not 1 <= factor <= extent:", "if not 1 <= factor < extent:"),
            ("exact splits", "if exact and extent % factor:", "if False and exact and extent % factor:"),
            ("fused loops are apart", "if here.position(inner) != at + 1:", "if here.position(inner) < at + 1:"),
            (
                "two loops of one name",
                "if name in stage.loop_names or name in names[:i]:",
                "if name in stage.loop_names:",
            ),
            (
                "inlined functions have storage",
                "if computed is Fixed.INLINE:",
                "if False and computed is Fixed.INLINE:",
            ),
        ),
        "test_schedule:test_tiles_have_what_their_readers_need": (
            (
                "positions of an order are not sorted",
                "zip(sorted(positions), positions, strict=True)",
                "zip(positions, positions, strict=True)",
            ),
            (
                "sites stay at a loop that is split",
                "return _legal(_moved(new, At(stage, loop), At(stage, cut.inner)))",
                "return _legal(new)",
            ),
        ),
        "test_schedule:test_row_29_an_illegal_step_is_refused": (
            ("a factor of 0", "if not 1 <= factor <= extent:", "if not 0 <= factor <= extent:"),
            ("a factor above the extent", "if not 1 <= factor <= extent:", "if not 1 <= factor:"),
            (
                "loops named twice in an order",
                "if len(set(loops)) != len(loops):",
                "if False and len(set(loops)) != len(loops):",
            ),
            (
                "overwriting scatters are reordered",
                "and statement.combine is None:",
                "and statement.combine is not None:",
            ),
            (
                "a function between fused loops",
                "if between := _sites(schedule, At(stage, outer)):",
                "if between := _sites(schedule, At(stage, inner))[:0]:",
            ),
            ("marked loops are split", "if kind is not LoopKind.SERIAL:", "if False and kind is not LoopKind.SERIAL:"),
            ("outputs are inlined", "if producer in schedule.outputs:", "if False and producer in schedule.outputs:"),
            (
                "reductions are inlined",
                "if not is_inlinable(function.statement, (f.statement for f in schedule.functions)):",
                "if False and not is_inlinable(function.statement, (f.statement for f in schedule.functions)):",
            ),
            (
                "steps are not checked",
                "return replace(schedule, nests=check_launches(schedule))",
                "return replace(schedule, nests=infer_bounds(schedule))",
            ),
        ),
        "test_schedule:TestTransforms.test_a_site_moves_with_the_loop_that_is_split_or_fused": (
            ("sites move to the outer loop", "At(stage, cut.inner)))", "At(stage, cut.outer)))"),
            (
                "sites stay at a loop that is fused",
                "return _legal(_moved(new, At(stage, inner), At(stage, cut.fused)))",
                "return _legal(new)",
            ),
        ),
        "test_steps:test_what_cannot_be_accumulated_in_a_loop_is_refused": (
            (
                "tiles at root",
                "if not isinstance(function.stored, At):",
                "if False and not isinstance(function.stored, At):",
            ),
            ("accumulators of maps", "elif all(f.name != producer for f in schedule.functions):", "elif False:"),
            ("an update is split as its reduction", "if stage != function.name:", "if False:"),
        ),
        "test_gpu_steps:test_what_cannot_be_cached_is_refused": (
            (
                "caches of data",
                "if any(any(load.bounds_checked) for load in loads):",
                "if False and any(any(load.bounds_checked) for load in loads):",
            ),
            ("caches of what is not read", "if not loads:", "if False and not loads:"),
        ),
    },
    "schedule.gpu_launch": {
        "test_gpu_steps:test_what_a_gpu_cannot_run_is_refused": (
            ("launches of two stages", "if len(root.stages) > 1:", "if False and len(root.stages) > 1:"),
            ("launches without blocks", "if not blocks:", "if False and not blocks:"),
            (
                "many blocks",
                "if (grid := _extent(blocks)) > MAX_GRID_BLOCKS:",
                "if False and (grid := _extent(blocks)) > MAX_GRID_BLOCKS:",
            ),
            (
                "many threads",
                "if _extent(threads) > (most := hw.limits.max_threads_per_block):",
                "if False and _extent(threads) > (most := hw.limits.max_threads_per_block):",
            ),
            (
                "parallel loops on GPUs",
                "for loop in _loops_of(nest.loops, LoopKind.PARALLEL):",
                "for loop in _loops_of(nest.loops):",
            ),
            ("tiles outside of thread loops", "if around != threads and (", "if around == threads and ("),
            (
                "tiles that no loop distributes",
                "if around != threads and (own or function.scope is Scope.SHARED):",
                "if around != threads and own:",
            ),
            (
                "more threads than the launch",
                "if _extent(own) > _extent(threads):",
                "if False and _extent(own) > _extent(threads):",
            ),
            (
                "shared tiles of any size",
                "hw.limits.shared_bytes_per_block)",
                "1 << 60)",
            ),
            ("lanes of GPUs are counted as those of CPUs", "check_copies(nest, lanes_per_copy=1)", "check_copies(nest, 8)"),
            ("private tiles of any size", "THREAD_BYTES[hw.family])", "1 << 60)"),
        ),
        "test_gpu_steps:test_tiles_of_threads_need_no_shared_memory": (
            (
                "private tiles outside of thread loops",
                "if around != threads and (own or function.scope is Scope.SHARED):",
                "if around != threads:",
            ),
            ("registers are shared memory", "[tile for tile in tiles if tile.scope is Scope.SHARED]", "tiles"),
            (
                "tiles side by side take the memory of both",
                "needed = max(_private_bytes(node) for node in tree.body)",
                "needed = sum(tile.bytes for tile in private)",
            ),
        ),
        "test_gpu_steps:test_a_cpu_has_no_blocks_and_no_shared_memory": (
            ("shared memory of CPUs", "if function.scope is Scope.SHARED:", "if False:"),
            (
                "blocks of CPUs",
                "for loop in _loops_of(nest.loops, LoopKind.BLOCK, LoopKind.THREAD):",
                "for loop in _loops_of(nest.loops, LoopKind.THREAD):",
            ),
        ),
    },
    "schedule.whole_tiles": {
        "test_whole_tiles:test_a_guard_is_decided_outside_where_it_is_a_sum_of_loops": (
            ("the best end of a loop decides", "worst += min(0, step", "worst += max(0, step"),
            ("the last lane has no guard", "(inner[name] - 1))", "(inner[name] - 2))"),
            ("one part of a condition decides", "return (*_parts(a), *_parts(b))", "return _parts(b)"),
            ("one of two ends decides", "(*_full_extent(a, extent), *_full_extent(b, extent))", "_full_extent(b, extent)"),
            ("an end leaves a lane", "return (le(num(extent), stop),)", "return (le(num(extent - 1), stop),)"),
            ("one of several guards is tested", "condition = logical_and(condition, each)", "condition = each"),
            ("guards that hold nowhere are tested", "if outer == num(0) and worst < 0:", "if False and worst < 0:"),
            ("the tile with guards is not kept", "Branch(condition, (whole,), (_tail(node),))", "Branch(condition, (whole,))"),
        ),
    },
    "schedule.combine_lanes": {
        "test_combine_lanes:test_only_loops_over_all_lanes_of_a_tile_are_combined": (
            ("some lanes are all lanes", "or loop.stop is not None or combine is None", "or combine is None"),
            ("half of a tile is all of it", "or tile.shape[-1] != loop.extent", ""),
            ("shared tiles are in registers", "tile.scope is Scope.SHARED or ", ""),
            ("a map is a sum", "(*load.index[:-1], *update.index)", "load.index[:-1]"),
            ("lanes in any order", " or load.index[-1:] != (ref(loop.var),)", ""),
            ("vectors are loops", "if loop.kind not in (LoopKind.SERIAL, LoopKind.UNROLL) or", "if"),
        ),
        "test_combine_lanes:test_lanes_of_whole_vectors_are_combined_in_registers": (
            (
                "halves overlap",
                "(*row, add(ref(loop.var), num(lanes))), tile.dtype), combine)",
                "(*row, ref(loop.var)), tile.dtype), combine)",
            ),
            ("halves are not halved", "lanes //= 2\n        nodes.append", "lanes //= 2\n        (nodes[:].append)"),
        ),
    },
}  # fmt: skip

RULE_MUTATIONS = tuple(
    RuleMutation(module, name, Edit(re.escape(text), replacement.replace("\\", r"\\")), test)
    for module, tests in _FAULTS.items()
    for test, faults in tests.items()
    for name, text, replacement in faults
)
