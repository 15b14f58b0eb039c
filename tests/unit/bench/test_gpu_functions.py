"""Functions, unpacking, a histogram, a GEMM of few tiles: their instructions in machine code do not grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roller_bench.cases import performance_cases
from roller_bench.lint import LintTask, lint_cases

CASES = Path(__file__).resolve().parents[3] / "bench" / "data" / "gpu_functions.json"
ELEMENT_BITS = 16
MOST_PER_ELEMENT = {"gelu-map": 23.0, "softmax": 14.0, "softmax-vocabulary": 15.1, "layernorm-odd": 8.4}
# Instructions of products with packed weights: a loop over chunks, the sum of lanes, and a loop that seldom runs.
MOST_OF_DECODING = {
    "decode-int4": 1200, "decode-awq": 1000, "decode-gptq": 900, "decode-int8": 770, "decode-nvfp4": 1110,
    "decode-mxfp4": 1680,
}  # fmt: skip
MOST_OF_STREAMED_DECODING = 570  # requests of pages, a loop over steps, results
MOST_OF_GELU_EPILOGUE = 750  # the mainloop, ten pieces of accumulators, and eight elements, in loops


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in lint_cases(LintTask(performance_cases(CASES), "nvidia-h200-sxm"))}


@pytest.mark.slow
@pytest.mark.parametrize("case", MOST_PER_ELEMENT)
def test_instructions_per_element_stay(rows: dict[str, dict[str, Any]], case: str) -> None:
    """Straight-line kernels: a thread's instructions over the elements that it stores."""
    (launch,) = rows[case]["launches"]
    assert rows[case]["spill_bytes"] == 0
    stored = sum(count * int(name.removeprefix("STG.")) for name, count in launch["counts"].items() if name.startswith("STG."))
    assert launch["instructions"] * ELEMENT_BITS / stored <= MOST_PER_ELEMENT[case]


def test_gelu_epilogue_stays(rows: dict[str, dict[str, Any]]) -> None:
    (launch,) = rows["gelu-epilogue"]["launches"]
    assert launch["counts"]["MUFU"] == 2 * 8
    assert launch["instructions"] <= MOST_OF_GELU_EPILOGUE
    assert rows["gelu-epilogue"]["spill_bytes"] == 0


def test_decode_attention_stays(rows: dict[str, dict[str, Any]]) -> None:
    partial, combine = rows["decode-attention"]["launches"]
    assert rows["decode-attention"]["spill_bytes"] == 0
    assert partial["counts"]["HMMA"] == 64
    assert partial["counts"]["MUFU"] <= 18
    assert partial["instructions"] <= 1520
    assert combine["instructions"] <= 350


@pytest.mark.parametrize("case", MOST_OF_DECODING)
def test_decoding_unpacks_weights_in_pairs(rows: dict[str, dict[str, Any]], case: str) -> None:
    """A thread has 128 to 512 weights, with an FFMA each in a loop or alone. A pair has one HFMA2, HADD2 or PRMT."""
    (launch,) = rows[case]["launches"]
    assert rows[case]["spill_bytes"] == 0
    assert launch["counts"]["FFMA"] >= 128
    assert launch["instructions"] <= MOST_OF_DECODING[case]


def test_streamed_decoding_multiplies_on_the_matrix_unit(rows: dict[str, dict[str, Any]]) -> None:
    """A lane has 16 weights of two rows in a step, which are four products; copies and loads are wide."""
    (launch,) = rows["decode-nf4"]["launches"]
    counts = launch["counts"]
    assert rows["decode-nf4"]["spill_bytes"] == 0
    assert counts["HMMA"] == 4
    assert counts["LDGSTS.128"] > 0
    assert counts["LDS.64"] == 2
    assert launch["instructions"] <= MOST_OF_STREAMED_DECODING


@pytest.mark.parametrize(("case", "lanes", "columns"), [("softmax-vocabulary", 512, 50257), ("layernorm-odd", 64, 4097)])
def test_long_row_is_loaded_once_in_vectors(rows: dict[str, dict[str, Any]], case: str, lanes: int, columns: int) -> None:
    """A row that begins at any alignment has aligned vectors, and one element of a lane before and after them."""
    (launch,) = rows[case]["launches"]
    vectors = -(-(columns // 8) // lanes)
    assert launch["counts"]["LDG.128"] == launch["counts"]["STG.128"] == vectors
    assert launch["counts"]["LDG.16"] == launch["counts"]["STG.16"] == 1


def test_weights_of_an_odd_norm_are_vectors_of_shared_memory(rows: dict[str, dict[str, Any]]) -> None:
    """A block copies two weights once for 16 rows: 32 elements of a thread for 260 that it stores."""
    (launch,) = rows["layernorm-odd-weights"]["launches"]
    counts = launch["counts"]
    assert rows["layernorm-odd-weights"]["spill_bytes"] == 0
    assert counts["LDG.128"] == counts["STG.128"] == 8
    assert counts["LDS.128"] == 2 * 8
    assert counts["LDG.16"] == counts["STS.16"] + 3 == 2 * 16 + 3
    assert launch["instructions"] <= 850
    assert 0 <= launch["planned_shared_bytes"] - launch["shared_bytes"] < 128  # the end of the last buffer


def test_online_softmax_rescales_once_for_a_vector(rows: dict[str, dict[str, Any]]) -> None:
    """41 elements in five vectors and one edge: an exponential for each, and one to rescale each of the six."""
    (launch,) = rows["logsumexp"]["launches"]
    merges = 8 + 1  # of the sums of a lane
    assert launch["counts"]["MUFU"] <= 41 + 6 + merges
    assert launch["instructions"] <= 460


def test_few_tiles_add_their_parts_in_one_launch(rows: dict[str, dict[str, Any]]) -> None:
    """A thread reads eight vectors of its own block's part and of another's, then stores eight results."""
    (launch,) = rows["few-tiles"]["launches"]
    assert rows["few-tiles"]["spill_bytes"] == 0
    assert rows["few-tiles"]["findings"] == []
    counts = launch["counts"]
    assert counts["LD.128"] == counts["LDS.128"] == counts["STG.64"] == 8
    assert counts["STS.64"] == 32
    assert launch["instructions"] <= 640


def test_histogram_is_reduced_in_shared_memory(rows: dict[str, dict[str, Any]]) -> None:
    """Each of 20 updates of a thread is a load and an atomic in shared memory; a bin is one reduction in memory."""
    _, launch = rows["histogram"]["launches"]
    memory = {name: n for name, n in launch["counts"].items() if name.startswith(("LD", "ST", "RED", "ATOM"))}
    assert memory == {"LDG.32": 20, "ATOMS": 20, "STS.32": 1, "LDS.32": 1, "REDG": 1}
