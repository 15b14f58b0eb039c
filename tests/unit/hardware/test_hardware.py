"""Hardware specs: shipped specs, rejected specs, detection of the local CPU."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from roller_svc import hardware
from roller_svc.errors import SpecError, UnknownHardwareError
from roller_svc.hardware.detect import Machine, adapt_to_machine, base_id, probe
from roller_svc.hardware.mapping import validate
from roller_svc.hardware.schema import field_paths, plain_name, source_matches
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec, Scope, TargetKind, UnitKind, arch_named

SHIPPED = tuple(hardware_id for hardware_id in hardware.ids() if hardware_id != hardware.LOCAL)
REQUIRED = {
    "nvidia-v100-sxm2", "nvidia-t4", "nvidia-a100-sxm-80gb", "nvidia-rtx3090", "nvidia-rtx4090", "nvidia-rtx5090",
    "nvidia-l40s", "nvidia-h100-sxm", "nvidia-h200-sxm", "nvidia-b200", "nvidia-k80", "amd-mi50", "amd-mi250x",
    "amd-mi300x", "graphcore-mk2", "cpu-x86-avx2", "cpu-x86-avx512", "cpu-arm-neon",
}  # fmt: skip
EPYC = Machine(
    machine="x86_64",
    vendor="amd",
    model_name="AMD EPYC 9R45",
    cpu_family=26,
    flags=frozenset({"avx", "avx2", "fma", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}),
    cores=8,
    clock_hz=4.0e9,
    cache_bytes=((1, 48 << 10), (2, 1 << 20), (3, 32 << 20)),
    memory_bytes=64 << 30,
)


def a100(**changes: Any) -> dict[str, Any]:
    return {**hardware.to_mapping(hardware.load("nvidia-a100-sxm-80gb")), **changes}


def refusal(data: object) -> str:
    with pytest.raises(SpecError) as caught:
        hardware.from_mapping(data, "spec.json")
    return caught.value.message


def test_every_promised_device_ships() -> None:
    assert set(SHIPPED) == REQUIRED
    assert hardware.ids()[-1] == hardware.LOCAL
    assert [spec.id for spec in hardware.all_specs()] == list(hardware.ids())


@pytest.mark.parametrize("hardware_id", hardware.ids())
def test_round_trips_through_json(hardware_id: str) -> None:
    spec = hardware.load(hardware_id)
    text = json.dumps(hardware.to_mapping(spec), allow_nan=False)
    assert hardware.from_mapping(json.loads(text)) == spec
    assert hardware.load_yaml(text) == spec  # JSON is YAML


@pytest.mark.parametrize("hardware_id", hardware.ids())
def test_every_field_has_a_source(hardware_id: str) -> None:
    model, problems = validate(hardware.to_mapping(hardware.load(hardware_id)))
    assert model is not None, problems
    patterns = [pattern for source in model.sources for pattern in source.fields]
    stated = model.model_dump(exclude_defaults=True)
    named = {f"{part}.{each['name']}": each for part in ("levels", "units") for each in stated[part]}
    owners = {"": stated, "limits": stated.get("limits", {}), **named}
    for path in field_paths(model):
        owner, _, field = path.rpartition(".")
        assert field not in owners[owner] or any(source_matches(pattern, path) for pattern in patterns), path


@pytest.mark.parametrize("hardware_id", hardware.ids())
def test_inner_levels_are_faster(hardware_id: str) -> None:
    levels = hardware.load(hardware_id).levels
    for outer, inner in pairwise(levels):
        assert inner.bandwidth_bytes_per_s > outer.bandwidth_bytes_per_s, inner.name
        assert inner.latency_s <= outer.latency_s, inner.name
        if inner.scope is outer.scope:
            assert inner.capacity_bytes < outer.capacity_bytes, inner.name


@pytest.mark.parametrize("hardware_id", hardware.ids())
def test_rates_are_in_proportion(hardware_id: str) -> None:
    spec = hardware.load(hardware_id)
    float32, float64 = spec.unit_for(DType.FLOAT32), spec.unit_for(DType.FLOAT64)
    assert float32.in_dtype is DType.FLOAT32
    assert float64.flops_per_s <= float32.flops_per_s
    for unit in spec.units:
        if unit.kind not in (UnitKind.FMA, UnitKind.VECTOR) and unit.in_dtype.bits < 64:
            assert unit.flops_per_s > 0.9 * float32.flops_per_s, unit.name
    # Two flops a lane a clock, and no device of these has more than 256 float32 lanes a core.
    assert float32.flops_per_s < 2 * 256 * spec.num_cores * spec.clock_hz


@pytest.mark.parametrize("hardware_id", SHIPPED)
def test_tile_levels_follow_the_family(hardware_id: str) -> None:
    spec = hardware.load(hardware_id)
    wanted = {TargetKind.CPU: ("l2", "register"), TargetKind.IPU: ("sram", "register")}
    assert spec.tile_levels == wanted.get(spec.family, ("shared", "register"))
    assert spec.block_level.scope is Scope.CORE
    assert spec.thread_level.scope is Scope.THREAD


def test_matrix_units_are_what_the_instruction_sets_have() -> None:
    def kinds(hardware_id: str, dtype: DType) -> set[tuple[UnitKind, tuple[int, ...]]]:
        units = hardware.load(hardware_id).units
        return {(u.kind, u.shape) for u in units if u.in_dtype is dtype and len(u.shape) == 3}

    assert kinds("nvidia-t4", DType.FLOAT16) == {(UnitKind.MMA, (16, 8, 8))}
    assert kinds("nvidia-t4", DType.BFLOAT16) == set()
    assert kinds("nvidia-a100-sxm-80gb", DType.BFLOAT16) == {(UnitKind.MMA, (16, 8, 16))}
    assert kinds("nvidia-a100-sxm-80gb", DType.FLOAT8_E4M3FN) == set()
    assert kinds("nvidia-rtx4090", DType.FLOAT8_E4M3FN) == {(UnitKind.MMA, (16, 8, 32))}
    assert kinds("nvidia-h200-sxm", DType.INT8) == {(UnitKind.MMA, (16, 8, 32)), (UnitKind.WGMMA, (64, 16, 32))}
    assert kinds("nvidia-b200", DType.FLOAT16) == {(UnitKind.MMA, (16, 8, 16))}
    assert kinds("amd-mi50", DType.FLOAT16) == set()
    assert kinds("amd-mi250x", DType.FLOAT64) == {(UnitKind.MFMA, (16, 16, 4))}


def test_architectures_are_ordered_as_numbers() -> None:
    names = ("sm_37", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
    archs = [arch_named(name) for name in names]
    assert archs == sorted(archs)  # none of them is None
    assert [str(arch) for arch in archs] == list(names)
    gfx = [arch_named(name) for name in ("gfx906", "gfx908", "gfx90a", "gfx942", "gfx1100")]
    assert gfx == sorted(gfx)  # none of them is None
    assert str(gfx[2]) == "gfx90a"
    assert arch_named("sm_90; rm") is None


def test_an_unknown_id_names_the_nearest_and_the_list() -> None:
    with pytest.raises(UnknownHardwareError) as caught:
        hardware.load("nvidia-h20")
    assert "did you mean nvidia-h200-sxm?" in caught.value.message
    assert "graphcore-mk2" in (caught.value.hint or "")
    for odd in ("", "../hwspecs/nvidia-t4", "x" * 10_000, "nvidia-t4.yaml"):
        with pytest.raises(UnknownHardwareError):
            hardware.load(odd)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("h200", "nvidia-h200-sxm"), ("H200", "nvidia-h200-sxm"), ("NVIDIA H200", "nvidia-h200-sxm"),
        ("a100_sxm", "nvidia-a100-sxm-80gb"),
        ("MI300X", "amd-mi300x"), ("gfx90a", "amd-mi250x"), ("avx512", "cpu-x86-avx512"), ("GFX942", "amd-mi300x"),
        ("rtx 4090", "nvidia-rtx4090"), ("a100-80gb", "nvidia-a100-sxm-80gb"), ("sm_80", "nvidia-a100-sxm-80gb"),
        ("cpu", "local"), ("Local", "local"),
    ],
)  # fmt: skip
def test_a_device_is_known_by_what_people_call_it(name: str, wanted: str) -> None:
    assert hardware.find_id(name) == wanted
    assert hardware.load(name).id == wanted


@pytest.mark.parametrize(
    ("name", "suggestions"),
    [
        ("4090", "did you mean nvidia-rtx4090?"), ("mi300", "did you mean amd-mi300x?"),
        ("nvidia-h20", "did you mean nvidia-h200-sxm?"), ("h100-pcie", "did you mean nvidia-h100-sxm?"),
        ("amd-mi355x", "did you mean amd-mi"),
        ("nvidia", "'nvidia' names 11 devices"), ("cuda", "'cuda' names 11 devices"), ("sm_90", "'sm_90' names 2 devices"),
        ("H200" + " " * 97 + "; x", ""),
    ],
)  # fmt: skip
def test_a_name_of_several_devices_or_a_part_of_a_word_is_no_target(name: str, suggestions: str) -> None:
    with pytest.raises(UnknownHardwareError) as caught:
        hardware.load(name)
    assert suggestions in caught.value.message


def test_lists_and_words_for_several_devices_are_expanded_where_several_may_be_given() -> None:
    assert hardware.expand_targets(["h200, mi300x", "h200"]) == ["h200", "mi300x"]
    assert hardware.expand_targets(["sm_90a"]) == ["nvidia-h100-sxm", "nvidia-h200-sxm"]
    assert hardware.expand_targets(["all"]) == [spec.id for spec in hardware.shipped_specs()]
    assert hardware.expand_targets(["rocm"]) == ["amd-mi250x", "amd-mi300x", "amd-mi50"]
    assert hardware.expand_targets(["cpu,", "Host"]) == ["local"]
    spec = hardware.load("nvidia-t4")
    assert hardware.expand_targets([["h200"]]) == [["h200"]]  # refused where targets are checked
    assert hardware.expand_targets(["nothing", spec, "local"]) == ["nothing", spec, "local"]


def test_a_misspelt_field_is_named_with_its_file() -> None:
    text = yaml.safe_dump(a100(), sort_keys=False).replace("num_cores:", "num_coers:")
    with pytest.raises(SpecError) as caught:
        hardware.load_yaml(text, "hwspecs/h100.yaml")
    assert "hwspecs/h100.yaml: num_coers: unknown field; did you mean num_cores?" in caught.value.message
    assert "hwspecs/h100.yaml: num_cores: missing" in caught.value.message  # every error, not only the first
    assert caught.value.code == "invalid-spec"


def test_a_wrong_value_in_yaml_has_a_place() -> None:
    text = yaml.safe_dump(a100(), sort_keys=False).replace("warp_size: 32", "warp_size: 80e9")
    with pytest.raises(SpecError) as caught:
        hardware.load_yaml(text, "a.yaml")
    assert "a.yaml: limits.warp_size: Input should be a valid integer; write it out" in caught.value.message
    assert text.splitlines()[(caught.value.line or 0) - 1].strip() == "warp_size: 80e9"
    assert caught.value.column == 3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_cores": 0}, "num_cores: "),
        ({"num_cores": 10**9}, "num_cores: "),
        ({"num_cores": True}, "num_cores: "),
        ({"num_cores": "108"}, "num_cores: "),
        ({"clock_hz": float("inf")}, "clock_hz: "),
        ({"clock_hz": float("nan")}, "clock_hz: "),
        ({"clock_hz": 10**400}, "clock_hz: "),
        ({"arch": "sm_"}, "arch: must be an architecture"),
        ({"arch": "gfx942"}, "arch: gfx942 is not a cuda architecture"),
        ({"family": "tpu"}, "family: "),
        ({"id": "../x"}, "id: "),
        ({"tile_levels": ["l1", "register"]}, "tile_levels: there is no level l1; levels are dram, l2, shared, reg"),
        ({"tile_levels": ["register", "shared"]}, "tile_levels: must name the outer level first"),
        ({"units": []}, "units: "),
        ({"levels": []}, "levels: "),
        ({"limits": None}, "limits: "),
        ({"sources": [{"fields": ["levels.l9"], "text": "x"}]}, "sources.0.fields: levels.l9 matches no field"),
        ({"sources": [{"fields": ["levels.*a*"], "text": "x"}]}, "sources.0.fields.0: "),
        ({"sources": [{"fields": ["*"] * 32, "text": "x"}] * 9}, "sources: more than 256 field patterns"),
    ],
)
def test_inconsistent_specs_are_rejected(changes: dict[str, Any], complaint: str) -> None:
    assert f"spec.json: {complaint}" in refusal(a100(**changes))


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("max_threads_per_block", 1000, "limits.max_threads_per_block: must be a multiple of warp_size"),
        ("max_threads_per_core", 512, "limits.max_threads_per_block: more than max_threads_per_core"),
        ("shared_bytes_per_block", 165 * 1024, "limits.shared_bytes_per_block: more than shared_bytes_per_core"),
        ("shared_bytes_per_core", 1 << 20, "limits.shared_bytes_per_core: more than shared holds"),
        ("max_registers_per_thread", 100_000, "limits.max_registers_per_thread: "),
        ("launch_overhead_s", -1, "limits.launch_overhead_s: "),
    ],
)
def test_inconsistent_limits_are_rejected(field: str, value: float, complaint: str) -> None:
    data = a100()
    data["limits"] = {**data["limits"], field: value}
    assert f"spec.json: {complaint}" in refusal(data)


@pytest.mark.parametrize(
    ("part", "index", "changes", "complaint"),
    [
        ("levels", 0, {"bandwidth_bytes_per_s": 1e-300}, "levels.0.bandwidth_bytes_per_s: "),
        ("levels", 0, {"bandwidth_bytes_per_s": 3e12}, "levels.0.bandwidth_bytes_per_s: above peak_bandwidth"),
        ("levels", 1, {"latency_s": 1e-4}, "levels.1.latency_s: longer than that of dram around it"),
        ("levels", 1, {"scope": "thread"}, "levels.2.scope: wider than the scope of l2 around it"),
        ("levels", 2, {"name": "smem"}, "levels: must be dram, l2, shared, register in this order"),
        ("levels", 3, {"transaction_bytes": 2048}, "levels.3.transaction_bytes: more than capacity_bytes"),
        ("levels", 2, {"capacity_bytes": 1 << 40}, "levels.2.capacity_bytes: more than any core holds"),
        ("units", 0, {"in_dtype": "float31"}, "units.0.in_dtype: must be one of float64"),
        ("units", 0, {"shape": [16, 8, 8]}, "units.0.shape: must be [m, n, k] for a matrix unit"),
        ("units", 0, {"max_shape": [3, 2]}, "units.0.max_shape: must be a multiple of shape"),
        ("units", 1, {"name": "fma_f32"}, "units.1.name: fma_f32 is named twice"),
        ("units", 0, {"flop_per_s": 1}, "units.0.flop_per_s: unknown field; did you mean flops_per_s?"),
    ],
)
def test_inconsistent_parts_are_rejected(part: str, index: int, changes: dict[str, Any], complaint: str) -> None:
    data = a100()
    data[part] = [{**item, **changes} if at == index else item for at, item in enumerate(data[part])]
    assert f"spec.json: {complaint}" in refusal(data)


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [([2, 4], "must have the 8 lanes of a vector of 32 bytes"), ([4, 8], "must have 32 bits of int16 in k"), ([2, 8], "")],
)
def test_dot_units_have_whole_vectors_of_words(shape: list[int], complaint: str) -> None:
    data = yaml.safe_load(hardware.to_yaml(hardware.load("cpu-x86-avx2")))
    (unit,) = (each for each in data["units"] if each["kind"] == "dot")
    unit["shape"] = shape
    if complaint:
        assert f".shape: {complaint}" in refusal(data)
    else:
        hardware.from_mapping(data, "spec.json")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "a spec is a mapping"),
        ("[1, 2]", "a spec is a mapping"),
        ("a: [", "not YAML"),
        ("a: 1\na: 2", "duplicate key a"),
        ("a: &x [1]\nb: *x", "aliases are not allowed"),
        ("[" * 5000, "nested too deep"),
        ("x: !!python/object/apply:os.getcwd []", "not YAML"),
        ("x: 2020-13-45", "not YAML"),
        ("x: " + "9" * 6000, "not YAML"),
        ("x: \x00", "not YAML"),
        ("? [a]\n: 1", "not YAML"),
        ("x: " + "y" * 200_000, "more than 131072 bytes"),
        ("1: 2", "1: Keys should be strings"),
    ],
)
def test_hostile_yaml_is_rejected(text: str, complaint: str) -> None:
    with pytest.raises(SpecError) as caught:
        hardware.load_yaml(text, "s.yaml")
    assert "s.yaml: " in caught.value.message
    assert complaint in caught.value.message


def test_many_faults_make_a_short_message() -> None:
    message = refusal(a100(**{f"field_{n}": 0 for n in range(1000)}))
    assert message.count("\n") == 20
    assert message.endswith("and 980 more")


def test_the_local_cpu_is_sane() -> None:
    spec = hardware.load("local")
    assert (spec.id, spec.family) == ("local", TargetKind.CPU)
    assert 1 <= spec.num_cores <= 4096
    assert 5e8 < spec.clock_hz < 1e10
    assert spec.unit_for(DType.FLOAT32).shape == (spec.vector_bytes // 4,)
    assert spec.limits.registers_per_core == (32 if spec.vector_bytes != 32 else 16)
    assert spec.level("l1").capacity_bytes <= spec.level("l2").capacity_bytes
    assert hardware.detect_local() == spec


def test_a_larger_machine_scales_the_base() -> None:
    base = hardware.load("cpu-x86-avx512")
    spec = adapt_to_machine(base, EPYC)
    float32 = spec.unit_for(DType.FLOAT32)
    assert float32.peak_flops_per_s == pytest.approx(8 * 4.0e9 * 16 * 2 * 2)
    assert spec.unit_for(DType.FLOAT64).flops_per_s == pytest.approx(float32.flops_per_s / 2)
    assert spec.level("l2").bandwidth_bytes_per_s == pytest.approx(
        base.level("l2").bandwidth_bytes_per_s * 8 * 4.0e9 / (base.num_cores * base.clock_hz)
    )
    assert (spec.num_cores, spec.name, spec.dram.capacity_bytes) == (8, "AMD EPYC 9R45", 64 << 30)
    assert {"avx512f", "avx512vnni"} <= set(spec.isa)
    assert hardware.from_mapping(hardware.to_mapping(spec)) == spec


@pytest.mark.parametrize(
    ("changes", "base", "lanes", "flops_per_clock"),
    [
        ({}, "cpu-x86-avx512", 16, 64),
        ({"cpu_family": 25}, "cpu-x86-avx512", 16, 32),  # Zen 4
        ({"vendor": "intel", "model_name": "Intel(R) Core(TM) i7-1165G7"}, "cpu-x86-avx512", 16, 32),
        ({"vendor": "intel", "model_name": "Intel(R) Xeon(R) Platinum 8488C"}, "cpu-x86-avx512", 16, 64),
        ({"flags": frozenset({"avx2", "fma"})}, "cpu-x86-avx2", 8, 32),
        ({"flags": frozenset({"avx2", "fma", "avx512f"})}, "cpu-x86-avx2", 8, 32),  # Xeon Phi has F alone
        ({"flags": frozenset({"sse4_2"})}, "cpu-x86-avx2", 4, 8),
        ({"machine": "aarch64", "vendor": "arm", "flags": frozenset({"asimd"})}, "cpu-arm-neon", 4, 16),
    ],
)
def test_the_nearest_base_and_its_ports(changes: dict[str, Any], base: str, lanes: int, flops_per_clock: int) -> None:
    machine = Machine(**{**{field: getattr(EPYC, field) for field in Machine.__dataclass_fields__}, **changes})
    assert base_id(machine) == base
    spec = adapt_to_machine(hardware.load(base), machine)
    unit = spec.unit_for(DType.FLOAT32)
    assert unit.shape == (lanes,)
    assert unit.peak_flops_per_s == pytest.approx(8 * 4.0e9 * flops_per_clock)
    assert spec.level("register").capacity_bytes == spec.limits.registers_per_core * lanes * 4
    assert_loads(spec)


def assert_loads(spec: HardwareSpec) -> None:
    assert hardware.from_mapping(hardware.to_mapping(spec)) == spec


def test_a_machine_that_says_nothing_is_its_base(tmp_path: Path) -> None:
    machine = probe(proc=tmp_path, sys=tmp_path)
    assert (machine.flags, machine.clock_hz, machine.cache_bytes) == (frozenset(), None, ())
    base = hardware.load("cpu-x86-avx2")
    spec = adapt_to_machine(base, machine)
    assert (spec.clock_hz, spec.isa, spec.level("l3").capacity_bytes) == (
        base.clock_hz,
        base.isa,
        base.level("l3").capacity_bytes,
    )
    assert_loads(spec)


@pytest.mark.parametrize(
    "name",
    [
        "Intel(R) Xeon(R) Processor @ 2.50GHz",
        "AMD EPYC 9R45 96-Core Processor",
        "Neoverse-N1",
        "ARMv7 (v7l)/rev 4",
        "11th Gen Intel(R) Core(TM) i7-1165G7 @ 2.80GHz",
        "Dan's [test] A&B, 1:2; x_y+z",
        "x",
        "x" * 120,
    ],
)
def test_names_of_devices(name: str) -> None:
    assert hardware.from_mapping(a100(name=name)).name == name == plain_name(name)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("", "''"),
        ("x" * 121, "'xxx"),
        (" a", "' a'"),
        ("a ", "'a '"),
        ("a\nb", r"'a\nb'"),
        ("a\n", r"'a\n'"),
        ("a\\b", r"'a\\b'"),
        ("a\0b", r"'a\x00b'"),
        ("a\x1b[0m", r"'a\x1b[0m'"),
        ("caf\u00e9", r"'caf\xe9'"),
        ("a\u2028b", r"\u2028"),
        ("a*b", "'a*b'"),
        ("a?b", "'a?b'"),
        ('a"b', "'a\"b'"),
        ("a#b", "'a#b'"),
        ("a<b>", "'a<b>'"),
        ("a%b", "'a%b'"),
        ("a{b}", "'a{b}'"),
        ("a`b", "'a`b'"),
    ],
)
def test_invalid_names_are_rejected_and_a_detected_one_is_cleaned(name: str, shown: str) -> None:
    message = refusal(a100(name=name))
    assert "spec.json: name: must be 1 to 120 letters and digits of ASCII" in message
    assert shown in message
    assert "leave the others out" in message
    assert message.isascii()
    assert hardware.from_mapping(a100(name=plain_name(name))).name == plain_name(name)


def test_a_strange_cpu_is_still_local(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name : Caf\u00e9*/\x1b[31m \\ 3000 (TM)\nflags : avx2 fma\n")
    machine = probe(proc=tmp_path, sys=tmp_path)
    assert machine.model_name == "Caf / [31m 3000 (TM)"
    assert_loads(adapt_to_machine(hardware.load("cpu-x86-avx2"), machine))


@pytest.mark.parametrize("text", ["\x1b[2J", "a\0", "a\tb", "a\rb", "\x7f", "\x9b1m", "a\u2028b"])
def test_texts_for_people_have_no_control_characters(text: str) -> None:
    source = {"fields": ["num_cores"], "text": text, "assumed": True}
    assert "sources.0.text: must be text without control characters" in refusal(a100(sources=[source]))
    measured = {"name": "x", "unit": "s", "cores": 1, "min": 1.0, "median": 1.0, "max": 1.0, "quiet": 1.0, "samples": 1}
    assert "measured.0.how: must be text without" in refusal(a100(measured=[measured | {"how": text}]))


def test_texts_for_people_may_have_lines_and_letters() -> None:
    text = "Table 3 \u2014 caf\u00e9\nhttps://example.org/*/a?b=\\c"
    spec = hardware.from_mapping(a100(sources=[{"fields": ["*"], "text": text, "assumed": False}]))
    assert spec.sources[0].text == text


def test_sysfs_is_read(tmp_path: Path) -> None:
    def put(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    put("cpuinfo", "processor : 0\nvendor_id : AuthenticAMD\ncpu family : 26\ncpu MHz : 2599.998\nflags : avx2 fma\n\n")
    put("fs/cgroup/cpu.max", "100000 100000\n")
    for index, (level, kind, size) in enumerate(
        [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "1024K"), ("3", "Unified", "32M")]
    ):
        folder = f"devices/system/cpu/cpu0/cache/index{index}"
        put(f"{folder}/level", level)
        put(f"{folder}/type", kind)
        put(f"{folder}/size", size)
    machine = probe(proc=tmp_path, sys=tmp_path)
    assert machine.cores == 1  # the container's quota
    assert machine.clock_hz == 2.6e9
    assert machine.cache_bytes == ((1, 48 << 10), (2, 1 << 20), (3, 32 << 20))
    assert (machine.vendor, machine.cpu_family) == ("amd", 26)
    put("devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "4500000\n")
    assert probe(proc=tmp_path, sys=tmp_path).clock_hz == 4.5e9


def test_a_family_without_a_spec_has_no_base() -> None:
    machine = Machine(**{**{field: getattr(EPYC, field) for field in Machine.__dataclass_fields__}, "machine": "riscv64"})
    assert base_id(machine) is None
