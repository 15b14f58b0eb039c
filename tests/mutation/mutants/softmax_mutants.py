"""What can be wrong in attention's softmax: factors of new maxima, masks, a second pass, keys of several blocks."""

from __future__ import annotations

from roller_svc.ir.constraints import OpClass
from tests.mutation.mutants.mutation import Case, Edit, Kind, Mutation, Tiles, Types, mutant

MMA = OpClass.MMA
_SCORE = r"scores\[key_fragment \* 4 \+ \(\(half_ \* 2\) \+ pair\)\]"
_SOFTMAX = (
    "s[h, i, j] +=! q[h, i, d] * k[h // 2, j, d]; p[h, i, j] = (s[h, i, j] * 0.2).when([{}], -60000.0);"
    "high[h, i] >=! p[h, i, j]; e[h, i, j] = exp(p[h, i, j] - high[h, i]); z[h, i] +=! e[h, i, j];"
    "y[h, i, d] +=! e[h, i, j] * v[h // 2, j, d]; o[h, i, d] = y[h, i, d] / z[h, i]"
)


def _types(queries: int, keys: int) -> Types:
    return (("q", "float16", (4, queries, 32)), ("k", "float16", (2, keys, 32)), ("v", "float16", (2, keys, 32)))


STEPS = Case(  # rows that see no key of a block's later steps
    "attention steps",
    "attention",
    _SOFTMAX.format("j <= i"),
    _types(60, 75),
    Tiles((1, 64, 32, 16, 32), (1, 16, 32, 16, 32), lanes=32, stages=3),
    unit=MMA,
)
FADING = Case(  # rows that see no key at all: what the mask left out counts for them
    "attention fading",
    "attention",
    _SOFTMAX.format("j <= 27 - i"),
    _types(40, 60),
    Tiles((1, 32, 32, 16, 32), (1, 16, 32, 16, 32), lanes=32, stages=2),
    unit=MMA,
)
PADDED = Case(  # keys of the first steps vanish: maxima of -1e30, which no exponential of the base holds
    "attention padding",
    "attention",
    "s[h, i, j] +=! q[h, i, d] * k[h // 2, j, d];"
    "p[h, i, j] = (s[h, i, j].cast(`float32`) * 0.2).when([j > i + 19], -1e30);"
    "high[h, i] >=! p[h, i, j]; e[h, i, j] = exp(p[h, i, j] - high[h, i]); z[h, i] +=! e[h, i, j];"
    "o[h, i, d] +=! (e[h, i, j] / z[h, i]).cast(`float16`) * v[h // 2, j, d]",
    _types(40, 75),
    Tiles((1, 32, 32, 16, 32), (1, 16, 32, 16, 32), lanes=32, stages=2),
    unit=MMA,
)
MASKED = Case(
    "attention mask",
    "attention",
    "o = attention(q, k, v, m, causal=1)",
    (
        ("q", "float16", (1, 2, 37, 40)),
        ("k", "float16", (1, 1, 53, 40)),
        ("v", "float16", (1, 1, 53, 24)),
        ("m", "float16", (37, 53)),
    ),
    Tiles((32, 32, 32, 48), (16, 32, 32, 48), lanes=32, stages=2),
    unit=MMA,
)
KEYS = Case(  # a warp without any; scores below 0, of which keys that are not there would be the highest
    "attention keys",
    "attention",
    "o = attention(q, k, v)",
    (("q", "float16", (1, 8, 1, 32)), ("k", "float16", (1, 2, 150, 32)), ("v", "float16", (1, 2, 150, 40))),
    Tiles((1, 16, 48, 64, 32), (1, 16, 48, 32, 32), lanes=64, stages=2, split_k=2),
    unit=MMA,
    ranges=(("q", 0, 2), ("k", -2, 0)),
)

SOFTMAX: tuple[Mutation, ...] = (
    mutant(STEPS, "the maximum of a step alone", Kind.SOFTMAX,
           Edit(r"peak\[half_\] = maximum\[half_\]", "peak[half_] = -__int_as_float(0x7f800000)")),
    mutant(STEPS, "results are scaled by the other row's factor", Kind.SOFTMAX,
           Edit(r"(pair\)\] \* rescale)\[half_\]", r"\1[1 - half_]")),
    mutant(STEPS, "the factor of a new maximum is 1", Kind.SOFTMAX,
           Edit(r"rescale\[half_\] = \(maximum\[half_\]", "rescale[half_] = (peak[half_]")),
    mutant(STEPS, "the factor is no power", Kind.SOFTMAX,
           Edit(r" +rescale\[half_\] = exp2_approx\(rescale\[half_\]\);\n", "")),
    mutant(STEPS, "maxima are shifted in another base", Kind.SOFTMAX,
           Edit(r"(shift\[half_\] = shift\[half_\] \* )0\.2885390081777927f", r"\g<1>0.2f")),
    mutant(STEPS, "maxima are not joined", Kind.SHUFFLE, Edit(r" +peak\[half_\] = lane_max_f32[^\n]*\n", "")),
    mutant(STEPS, "sums are joined over eight lanes", Kind.SHUFFLE,
           Edit(r"lane_sum_f32\(total\[half_\], 4\)", "lane_sum_f32(total[half_], 8)")),
    mutant(STEPS, "sums are joined with each step too", Kind.SHUFFLE,
           Edit(r"(total\[half_\] = )(total\[half_\]) \* rescale", r"\1lane_sum_f32(\2, 4) * rescale")),
    mutant(STEPS, "results are not divided by the sums", Kind.SOFTMAX,
           Edit(r"(pair\)\]) \* total\[half_\]", r"\1")),
    mutant(STEPS, "maxima begin with zero and sums count it", Kind.INITIAL,
           Edit(r"maximum\[half_\] = -__int_as_float\(0x7f800000\);\n( +)total\[half_\] = 0\.0f",
                r"maximum[half_] = 0.0f;\n\1total[half_] = 1.0f")),
    mutant(STEPS, "sums are of scores, not of their powers", Kind.SOFTMAX,
           Edit(rf"( +{_SCORE} = exp2_approx\({_SCORE}\);\n)( +total\[half_\] \+= {_SCORE};\n)", r"\2\1")),
    mutant(STEPS, "the second features meet the first queries", Kind.FRAGMENT,
           Edit(r"\(a \+ 1 \* 4 \+ 0 \* 4\), \(b \+ 0 \* 2\)", "(a + 0 * 4 + 0 * 4), (b + 0 * 2)")),
    mutant(STEPS, "values are staged without their swizzle", Kind.SWIZZLE,
           Edit(r"(v_shared \+ \(\(k_step \+ 2\) % 3\) \* 512 \+ row \* 32 \+ )\(element \^ [^,]*\)\)\)",
                r"\1element)")),
    mutant(STEPS, "values are brought a step late", Kind.STEPS,
           Edit(r"k_place = \(\(begin \+ \(k_step \+ 2\)\)", "k_place = ((begin + (k_step + 1))")),
    mutant(STEPS, "heads of queries change places", Kind.PLACE, Edit(r"h_1 = place % 2", "h_1 = (place + 1) % 2")),
    mutant(STEPS, "queries have the room of keys", Kind.ROOM,
           Edit(r"\(shared_memory \+ 4096\)", "(shared_memory + 2048)")),
)  # fmt: skip

LARGE: tuple[Mutation, ...] = (
    mutant(PADDED, "large maxima are not subtracted", Kind.SOFTMAX, Edit(r"> 4096\.0f", "> 1e38f")),
    mutant(PADDED, "large maxima are subtracted twice", Kind.SOFTMAX,
           Edit(r" +shift\[half_\] = 0\.0f;\n", "")),
)  # fmt: skip

MASKS: tuple[Mutation, ...] = (
    mutant(STEPS, "a row does not see its own key", Kind.GUARD, Edit(r"\(j <= i\)", "(j < i)")),
    mutant(STEPS, "what the mask leaves out is zero", Kind.GUARD, Edit(r": \(-300000\.0f\)\) :", ": 0.0f) :")),
    mutant(STEPS, "the steps of another block's mask", Kind.STEPS,
           Edit(r"min_i32\(\(\(m_block \* 64\) \+ 63\)", "min_i32(((m_position * 64) + 63)")),
    mutant(STEPS, "the mask of rows, not of queries", Kind.GUARD,
           Edit(r"i = m_place / 2;\n( +const int h_1 = m_place % 2;\n +peak)", r"i = m_place;\n\1")),
    mutant(FADING, "no second pass", Kind.STEPS, Edit(r"\(again \* ", "(0 * ")),
    mutant(FADING, "the second pass begins with the first key", Kind.STEPS,
           Edit(r"begin = \(pass == 0\) \? 0 : seen_steps", "begin = 0")),
    mutant(FADING, "the second pass is a step short", Kind.STEPS, Edit(r"again \* \(4 -", "again * (3 -")),
    mutant(FADING, "the first row of a thread asks for both", Kind.STEPS,
           Edit(r" \|\| \(!\(\(maximum\[1\] [^|]*f\)\)\)\) != 0", ")) != 0")),
    mutant(FADING, "both rows of a thread must ask", Kind.STEPS, Edit(r"\)\) \|\| \(!", ")) && (!")),
    mutant(FADING, "each thread asks for itself", Kind.DIVERGENCE, Edit(r"__syncthreads_or\(", "(")),
    mutant(MASKED, "the causal mask of as many keys as queries", Kind.GUARD, Edit(r"j <= \(i \+ 16\)", "j <= i")),
    mutant(MASKED, "the mask of the neighbours", Kind.PLACE, Edit(r"m\[i \* 53 \+ j\]", "m[i * 53 + (j ^ 1)]")),
    mutant(MASKED, "the mask is scaled too", Kind.SOFTMAX,
           Edit(rf"\(\(({_SCORE}) \* (0\.158\d+f)\) \+ ([^)]*\)\]?)\)", r"((\1 + \3) * \2)")),
    mutant(MASKED, "the mask is read beyond the rows", Kind.GUARD,
           Edit(r"\(\(m_place < 74\) && \(key_place < 53\)\)", "(key_place < 53)")),
    mutant(MASKED, "features beyond the last are read", Kind.PREDICATE,
           Edit(r"\(\(k_place < 40\) && (\(place < 74\))\)", r"\1", 2)),
)  # fmt: skip

SHARES: tuple[Mutation, ...] = (
    mutant(KEYS, "keys beyond the end count", Kind.GUARD, Edit(r"\(key_place < 150\)", "(key_place < 151)")),
    mutant(KEYS, "the second warp's keys end where the first's do", Kind.GUARD,
           Edit(r"key_place = \(\(key_step \* 64\) \+ \(k_warp \* 32\)\)", "key_place = (key_step * 64)")),
    mutant(KEYS, "a warp without keys is not looked for", Kind.SOFTMAX,
           Edit(r"\(peak\[half_\] == [^?]*\? 0\.0f : ", "")),
    mutant(KEYS, "a part is a step short", Kind.PART, Edit(r"\(k_part \* 2\) \+ 2\)", "(k_part * 2) + 1)")),
    mutant(KEYS, "warps leave their maxima in one place", Kind.PART,
           Edit(r"(o_sum_high_partial\[)\(\(k_part \* 2\) \+ k_warp\)", r"\1(k_part * 2)")),
    mutant(KEYS, "results of parts are added as they are", Kind.PART,
           Edit(r"(o_mixed_joined_acc \+= o_mixed_partial\[[^\]]*\]) \* expf[^;]*", r"\1")),
    mutant(KEYS, "the results of a block alone", Kind.PART, Edit("in_flight < 4", "in_flight < 2", 4, only=3)),
    mutant(KEYS, "the sums of a block alone", Kind.PART, Edit("in_flight < 4", "in_flight < 2", 4, only=2)),
    mutant(KEYS, "factors of parts upside down", Kind.PART,
           Edit(r"\(o_sum_high_partial_loaded0\[round_\] - o_sum_high_row\)",
                "(o_sum_high_row - o_sum_high_partial_loaded0[round_])", 2)),
    mutant(KEYS, "parts are joined, not divided by their sum", Kind.PART, Edit(r" / o_sum_row;", ";")),
)  # fmt: skip

MUTATIONS = (*SOFTMAX, *LARGE, *MASKS, *SHARES)
