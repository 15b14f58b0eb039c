"""What can be wrong in attention on warpgroups: rings of keys and of values, queries, products whose left factor is in
registers, the order of products and weights, the vote of both roles on a second pass."""

from __future__ import annotations

from roller_svc.ir.constraints import OpClass
from tests.mutation.mutants.mutation import H200, Case, Edit, Kind, Mutation, Tiles, mutant

_SOFTMAX = (
    "s[h, i, j] +=! q[h, i, d] * k[0, j, d]; p[h, i, j] = (s[h, i, j] * 0.125).when([j <= i - 6], -60000.0);"
    "m[h, i] >=! p[h, i, j]; e[h, i, j] = exp(p[h, i, j] - m[h, i]); z[h, i] +=! e[h, i, j];"
    "y[h, i, d] +=! e[h, i, j] * v[0, j, d]; o[h, i, d] = y[h, i, d] / z[h, i]"
)
# two consumers, a mask, rows that see no key
BULK = Case(
    "attention groups",
    "attention",
    _SOFTMAX,
    (("q", "float16", (2, 100, 32)), ("k", "float16", (1, 144, 32)), ("v", "float16", (1, 144, 32))),
    Tiles((128, 32, 32, 32), (64, 32, 32, 32), lanes=128, stages=2),
    H200,
    OpClass.WGMMA,
)
# blocks that stay, keys and values by cp.async
COPIED = Case(
    "attention groups, copied",
    "attention",
    _SOFTMAX.replace(".when([j <= i - 6], -60000.0)", ""),
    (("q", "bfloat16", (3, 70, 36)), ("k", "bfloat16", (1, 150, 36)), ("v", "bfloat16", (1, 150, 36))),
    Tiles((64, 48, 48, 48), (64, 48, 48, 48), lanes=128, stages=3, blocks=2),
    H200,
    OpClass.WGMMA,
)

_LEFT = r"( +if \(lane_id == 0\) \{\n) +barrier_arrive\(\(%s_shared_empty \+ (slot|0)\)\);\n"

RINGS: tuple[Mutation, ...] = (
    mutant(BULK, "keys are awaited with the other parity", Kind.PHASE,
           Edit(r"(k_shared_full \+ slot\), )(mod_i32\(floordiv[^;]*\))\);", r"\1(1 - \2));", 2)),
    mutant(BULK, "values are awaited with the parity of the keys", Kind.PHASE,
           Edit(r"(v_shared_full \+ slot\), mod_i32\(floordiv_i32\()iteration", r"\1(iteration + 1)", 2, only=0)),
    mutant(BULK, "the phase begins anew with the second pass", Kind.PHASE,
           Edit(r"(const int iteration = )before \+ k_step;(\n +const int slot = [^\n]*\n +const int key_step)",
                r"\1k_step;\2")),
    mutant(BULK, "the second pass counts its steps from the first on", Kind.STEPS,
           Edit(r"before = \(pass == 0\) \? 0 : seen_steps", "before = 0", 2)),
    mutant(BULK, "slots of values are not awaited", Kind.WAIT, Edit(r" +barrier_wait\(\(v_shared_empty[^\n]*\n", "")),
    mutant(BULK, "values are not awaited", Kind.WAIT, Edit(r" +barrier_wait\(\(v_shared_full[^\n]*\n", "", 2)),
    mutant(BULK, "queries are not awaited", Kind.WAIT, Edit(r" +barrier_wait\(\(q_shared_full[^\n]*\n", "", 2)),
    mutant(BULK, "keys of the first step are not left", Kind.RELEASE,
           Edit(_LEFT % "k" + r"(?= +\}\n( +#pragma[^\n]*\n)? +const int key_step = begin;)", r"\1")),
    mutant(BULK, "keys of later steps are not left", Kind.RELEASE, Edit(_LEFT % "k", r"\1", 2, only=1)),
    mutant(BULK, "values of the last step are not left", Kind.RELEASE, Edit(_LEFT % "v", r"\1", 2, only=1)),
    mutant(BULK, "values of the step before are not left", Kind.RELEASE, Edit(_LEFT % "v", r"\1", 2, only=0)),
    mutant(BULK, "values are left before products have read them", Kind.RELEASE,
           Edit(r" +wgmma_wait<0>\(\); hold_results_16\(acc \+ 0\);\n", "", 2, only=0)),
    mutant(BULK, "keys count on the barriers of values", Kind.PHASE,
           Edit(r"(&k_shared_map, \()k_shared_full", r"\1v_shared_full")),
    mutant(BULK, "half of the queries' bytes are expected", Kind.PHASE, Edit("8192\\)(?=;\\n +tma_load_3d)", "4096)")),
    mutant(BULK, "four warps leave keys", Kind.PHASE, Edit(r"(k_shared_empty \+ stage\), )8", r"\g<1>4")),
    mutant(COPIED, "queries of the next tile take the place of those in use", Kind.RELEASE,
           Edit(r" +barrier_wait\(\(q_shared_empty[^\n]*\n", "")),
    mutant(COPIED, "queries are left before the last keys are multiplied", Kind.RELEASE,
           Edit(r" +if \(lane_id == 0\) \{\n +barrier_arrive\(\(q_shared_empty \+ 0\)\);\n +\}\n", ""),
           Edit(r"( +)(barrier_wait\(\(q_shared_full \+ 0\), [^\n]*\n)",
                r"\1\2\1if (lane_id == 0) barrier_arrive((q_shared_empty + 0));\n")),
    mutant(COPIED, "queries of every tile have one phase", Kind.PHASE,
           Edit(r"(q_shared_full \+ 0\), )\(visit % 2\)", r"\g<1>0")),
    mutant(COPIED, "what threads copied is not fenced", Kind.FENCE,
           Edit(r" +fence_async\(\);\n(?= +barrier_arrive\(\(k_shared_full)", "")),
    mutant(COPIED, "the last values never arrive", Kind.PHASE,
           Edit(r" +barrier_arrive\(\(v_shared_full \+ \(\(\(\(visit[^\n]*\n", "")),
    mutant(COPIED, "steps begin anew with each tile", Kind.SLOT,
           Edit(r"const int iteration = \(visit \* 4\) \+ k_step;", "const int iteration = k_step;", 3, only=1)),
)  # fmt: skip

PRODUCTS: tuple[Mutation, ...] = (
    mutant(BULK, "scores are read while products are under way", Kind.WAIT,
           Edit(r"wgmma_wait<1>", "wgmma_wait<2>")),
    mutant(BULK, "products with keys are no group of their own", Kind.COMMIT,
           Edit(r" +wgmma_commit\(\);\n(?= +\{\n +const int iteration = before \+ k_step;)", "")),
    mutant(BULK, "results that are kept from moving are others", Kind.WAIT,
           Edit(r"(wgmma_wait<1>\(\); )hold_results_16\(scores", r"\1hold_results_16(acc")),
    mutant(BULK, "registers are not fenced", Kind.FENCE,
           Edit(r" +wgmma_fence\(\);\n(?= +wgmma_m64n32k16_f16_kk)", "", 2, only=1)),
    mutant(BULK, "weights are packed while products read them", Kind.RELEASE,
           Edit(r"( +)(wgmma_wait<1>\(\); [^\n]*\n)",
                r"\1\2\1weights[0] = pack_f16((scores + 0)[0], (scores + 0)[1]);\n")),
    mutant(BULK, "weights of the next 16 keys", Kind.FRAGMENT,
           Edit(r"\(weights \+ 1 \* 4\)", "(weights + 0)", 2, only=0)),
    mutant(BULK, "scores go on from the step before", Kind.INITIAL,
           Edit(r"(wgmma_m64n32k16_f16_kk\([^\n]*, 2048, 512\), )0\)", r"\g<1>1)", 2, only=1)),
    mutant(BULK, "results begin anew with each step", Kind.INITIAL,
           Edit(r"(wgmma_m64n32k16_f16_rm\(acc, \(weights \+ 0\)[^\n]*, )1\)", r"\g<1>0)", 2, only=0)),
    mutant(BULK, "queries of the first warpgroup for both", Kind.PLACE,
           Edit(r"q_shared \+ \(group \* 64\) \* 32", "q_shared", 4)),
    mutant(BULK, "groups of eight keys lie closer", Kind.DESCRIPTOR,
           Edit(r"(matrix_descriptor_64\(k_shared \+ slot \* 1024, 2048, )512", r"\g<1>256", 4)),
    mutant(BULK, "values of the first 16 keys twice", Kind.DESCRIPTOR,
           Edit(r"(v_shared \+ slot \* 1024, 2048, 512\)) \+ 64", r"\1", 2)),
)  # fmt: skip

WEIGHTS: tuple[Mutation, ...] = (
    mutant(BULK, "results are not corrected in later steps", Kind.SOFTMAX,
           Edit(r"(acc\[[^\n]*\]) \* rescale\[half_\];", r"\1;", 2, only=1)),
    mutant(BULK, "results are corrected by sums", Kind.SOFTMAX,
           Edit(r"(acc\[[^\n]*\]) \* rescale\[half_\];", r"\1 * total[half_];", 2, only=1)),
    mutant(BULK, "a step that crosses the mask counts as whole", Kind.GUARD,
           Edit(r"\(0 - \(\(floordiv_i32\(\(m_block \* 128\), 2\) \* \(-1\)\) \+ 6\)\)", "1000", 2, only=1)),
    mutant(BULK, "whole steps are one key longer", Kind.GUARD,
           Edit(r"(\(-1\)\) \+ )6\)\) \+ 1\)", r"\g<1>5)) + 20)", 2)),
    mutant(BULK, "the producer does not hear that rows see no key", Kind.DIVERGENCE,
           Edit(r"again = named_any\(1, 384, 0\)", "again = 0 * named_any(1, 384, 0)")),
    mutant(BULK, "roles vote apart", Kind.DIVERGENCE, Edit(r"named_any\(1, 384, 0\)", "named_any(2, 384, 0)")),
    mutant(BULK, "no row sees too few keys", Kind.STEPS,
           Edit(r"named_any\(1, 384, \(\(!", "0 * named_any(1, 384, ((!")),
    mutant(COPIED, "keys beyond the last one have weights", Kind.PADDING,
           Edit(r"\(key_place < 150\) \? ", "(key_place < 192) ? ", 1)),
)  # fmt: skip

MUTATIONS: tuple[Mutation, ...] = (*RINGS, *PRODUCTS, *WEIGHTS)
