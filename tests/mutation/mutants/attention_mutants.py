"""What can be wrong in attention: maxima, corrections, masks, fragments of the second product, pieces to be joined."""

from __future__ import annotations

from roller_svc.ir.constraints import OpClass
from tests.mutation.mutants.mutation import Case, Edit, Kind, Mutation, Tiles, mutant

_SOFTMAX = (
    "s[h, i, j] +=! q[h, i, d] * k[0, j, d]; p[h, i, j] = (s[h, i, j] * 0.125).when([j <= i + 32], -60000.0);"
    "m[h, i] >=! p[h, i, j]; e[h, i, j] = exp(p[h, i, j] - m[h, i]); z[h, i] +=! e[h, i, j];"
    "y[h, i, d] +=! e[h, i, j] * v[0, j, d]; o[h, i, d] = y[h, i, d] / z[h, i]"
)
CAUSAL = Case(
    "attention causal",
    "attention",
    _SOFTMAX,
    (("q", "float16", (2, 40, 32)), ("k", "float16", (1, 72, 32)), ("v", "float16", (1, 72, 32))),
    Tiles((32, 32, 32, 32), (16, 32, 32, 32), lanes=32, stages=3),
    unit=OpClass.MMA,
)
DECODE = Case(
    "attention decode",
    "attention",
    _SOFTMAX.replace(".when([j <= i + 32], -60000.0)", "").replace("0.125", "0.25"),
    (("q", "bfloat16", (6, 1, 40)), ("k", "bfloat16", (1, 200, 40)), ("v", "bfloat16", (1, 200, 40))),
    Tiles((16, 48, 64, 48), (16, 48, 32, 48), lanes=64, split_k=2, stages=2),
    unit=OpClass.MMA,
)

MUTATIONS: tuple[Mutation, ...] = (
    mutant(CAUSAL, "no barrier in the loop", Kind.BARRIER,
           Edit(r"(await_copies<1>\(\);\n) +__syncthreads\(\);\n", r"\1")),
    mutant(CAUSAL, "no barrier before queries are kept", Kind.BARRIER,
           Edit(r"(await_copies<2>\(\);\n) +__syncthreads\(\);\n", r"\1")),
    mutant(CAUSAL, "queries are not awaited", Kind.WAIT, Edit(r"await_copies<2>\(\);", "await_copies<3>();")),
    mutant(CAUSAL, "keys are not awaited", Kind.WAIT, Edit(r"await_copies<1>\(\);", "await_copies<2>();")),
    mutant(CAUSAL, "values of the step before", Kind.SLOT,
           Edit(r"(v_shared \+ )slot( \* 1024)", r"\1((slot + 2) % 3)\2", 2)),
    mutant(CAUSAL, "the slot that is read is filled", Kind.SLOT,
           Edit(r"(v_shared \+ )\(\(k_step \+ 2\) % 3\)", r"\1(k_step % 3)")),
    mutant(CAUSAL, "maxima of two lanes only", Kind.SHUFFLE, Edit(r"(lane_max_f32\(peak\[half_\], )4", r"\g<1>2")),
    mutant(CAUSAL, "sums of two lanes only", Kind.SHUFFLE, Edit(r"(lane_sum_f32\(total\[half_\], )4", r"\g<1>2")),
    mutant(CAUSAL, "sums are not joined", Kind.SHUFFLE, Edit(r".* = lane_sum_f32\(.*\n", "")),
    mutant(CAUSAL, "results are not corrected", Kind.EPILOGUE,
           Edit(r"(acc\[[^\n]*\]) \* rescale\[half_\];", r"\1;")),
    mutant(CAUSAL, "sums are not corrected", Kind.EPILOGUE,
           Edit(r"total\[half_\] \* rescale\[half_\]", "total[half_]")),
    mutant(CAUSAL, "the maximum is not kept", Kind.INITIAL, Edit(r" +maximum\[half_\] = peak\[half_\];\n", "")),
    mutant(CAUSAL, "powers of two of natural exponents", Kind.INSTRUCTION,
           Edit(r"(scores\[[^\n]*\] = \(scores\[[^\n]*\]) \* 0\.18033688011112042f", r"\1 * 0.125f")),
    mutant(CAUSAL, "both halves have the first one's rows", Kind.LANES,
           Edit(r"(const int m_place = .*\(lane_id / 4\) \+ \(half_ \* )8", r"\g<1>0")),
    mutant(CAUSAL, "rows are told apart by heads", Kind.PLACE,
           Edit(r"(const int i = )m_place / 2(;\n +const int h = m_place % 2;\n +peak)", r"\1m_place % 40\2")),
    mutant(CAUSAL, "keys of a lane one too far", Kind.LANES,
           Edit(r"\(\(\(lane_id % 4\) \* 2\) \+ pair\)\);(\n +const int j)",
                r"(((lane_id % 4) * 2) + 1 + pair));\1")),
    mutant(CAUSAL, "the mask is one key wider", Kind.GUARD, Edit(r"j <= \(i \+ 32\)", "j <= (i + 33)")),
    mutant(CAUSAL, "one step of seen keys is left out", Kind.STEPS, Edit(r"\+ 32\) \+ 32\) / 32", "+ 32) + 0) / 32")),
    mutant(CAUSAL, "words of weights change places", Kind.FRAGMENT,
           Edit(r"weights\[1\] = (pack_f16\(\(scores \+ )2\)\[0\], \(scores \+ 2\)",
                r"weights[1] = \g<1>1 * 4)[0], (scores + 1 * 4)")),
    mutant(CAUSAL, "halves of a word change places", Kind.FRAGMENT,
           Edit(r"(pack_f16\()(\(scores \+ 0\)\[0\]), (\(scores \+ 0\)\[1\])\)", r"\1\3, \2)")),
    mutant(CAUSAL, "the second product of a step has the first one's weights", Kind.FRAGMENT,
           Edit(r".*weights\[\d\] = pack_f16\(\(scores \+ [23] \* 4.*\n", "", 4)),
    mutant(CAUSAL, "values are not turned", Kind.TRANSPOSED,
           Edit(r"load_matrix_4_transposed(\(\(b \+)", r"load_matrix_4\1", 2)),
    mutant(CAUSAL, "scores go on from the step before", Kind.INITIAL, Edit(r"scores\[[^\]]*word\] = 0\.0f;", ";")),
    mutant(CAUSAL, "queries of the other warp", Kind.PLACE,
           Edit(r"(a_shared \+ \(\()m_warp( \* 16\) \+ \(lane_id % 16\)\) \* 32)", r"\1(1 - m_warp)\2", 2)),
    mutant(CAUSAL, "rows beyond the last one are stored", Kind.GUARD,
           Edit(r"if \(m_place < 80\)", "if (m_place < 96)")),
    mutant(CAUSAL, "no barrier before results take the memory of queries", Kind.BARRIER,
           Edit(r"^  __syncthreads\(\);\n(?=  #pragma unroll\n  for \(int n_fragment)", "")),
    mutant(DECODE, "pieces of a block in one place", Kind.PART,
           Edit(r"\(\(k_part \* 2\) \+ k_warp\)", "(k_part * 2)", 3)),
    mutant(DECODE, "the second part begins a step too early", Kind.PART,
           Edit(r"first_step = k_part \* 2;", "first_step = k_part * 1;")),
    mutant(DECODE, "warps have the same keys", Kind.LANES,
           Edit(r"\(k_warp \* 32\) \+ \(pair \* 16\)", "(pair * 16)", 6)),
    mutant(DECODE, "warps have the same values", Kind.LANES,
           Edit(r"k_warp \* 2\)( \+ 1\))? \* 16", r"0 * 2)\1 * 16", 4)),
    mutant(DECODE, "sums of pieces are not below one maximum", Kind.PART,
           Edit(r"(z_acc \+= z_partial\[[^\]]*\]) \* expf\(.*\);", r"\1;")),
    mutant(DECODE, "maxima of pieces are the sums", Kind.PART,
           Edit(r"(z_high_partial\[[^\n]*\] = )maximum", r"\1total")),
    mutant(DECODE, "columns beyond the last one are stored", Kind.GUARD, Edit(r"n_place < 40", "n_place < 48")),
    mutant(DECODE, "halves for bfloats", Kind.INSTRUCTION, Edit(r"pack_bf16\(\(", "pack_f16((", 8)),
)  # fmt: skip
