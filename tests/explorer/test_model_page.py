"""The pages of models and of the farm in Chromium: from a file to its slowest operator's kernel, and a build as it happens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest
from explorer_pages import (
    HOSTILE,
    MODEL_PATH,
    Explorer,
    answer_farm,
    answer_story,
    check_shown_as_text,
    link,
    make_operation,
    poison,
)
from model_stories import make_profile, make_story

from roller_svc.cli import explain, main
from roller_svc.cli.page_file import KERNEL, MODEL, write_page
from roller_svc.client import Client
from roller_svc.client.schemas import GraphOptions
from roller_svc.compiler.cards import draw_timeline, make_card
from roller_svc.errors import InputError, RollerError, ToolchainMissingError
from roller_svc.ir.canonical import from_json
from roller_svc.ir.model_story import ModelStory
from roller_svc.ir.report import BuildRequest

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.slow]

WITHOUT_HTTPS = "Object.defineProperty(Crypto.prototype, 'subtle', { get: () => undefined })"
PRODUCT = "C[i, j] +=! A[i, k] * B[k, j]"
GRAPH = {
    "format": "roller-graph/1",
    "name": "two",
    "inputs": {"x": {"dtype": "float32", "shape": [64, 64]}, "w": {"dtype": "float32", "shape": [64, 64]}},
    "constants": {},
    "nodes": [
        {"name": "product", "expression": PRODUCT, "inputs": {"A": "x", "B": "w"}, "outputs": {"C": "p"}},
        {"name": "rows", "expression": "C[i] +=! exp(A[i, j])", "inputs": {"A": "p"}, "outputs": {"C": "y"}},
    ],
    "outputs": {"y": "y"},
}


def test_a_model_is_opened_and_its_slowest_operator_leads_to_its_kernel(explorer: Explorer, tmp_path: Path) -> None:
    file = tmp_path / "two.json"
    file.write_text(json.dumps(GRAPH))
    page = explorer.open("/m", ready="[data-testid=model-file]")
    page.get_by_test_id("model-file").set_input_files(file)
    page.get_by_label("device").select_option("local")
    page.get_by_label("plan").select_option("rammer")
    page.get_by_test_id("compile").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-testid=timeline]")
    assert re.fullmatch(r"/m/sha256:[0-9a-f]{64}", page.evaluate("location.pathname"))
    story = httpx.get(f"{explorer.address}/v1/models/{page.evaluate('location.pathname')[3:]}/story", timeout=60.0).json()
    slowest = max(story["nodes"], key=lambda node: float(node["seconds"]))
    page.locator("[data-testid=operators] button").first.focus()
    page.keyboard.press("Enter")
    assert slowest["name"] in page.get_by_test_id("node").text_content()
    page.wait_for_function("() => location.search.includes('node=')")
    again = explorer.open(page.get_by_test_id("permalink").get_attribute("href"))
    assert slowest["name"] in again.get_by_test_id("node").text_content()
    assert again.get_by_test_id("estimate").text_content() == page.get_by_test_id("estimate").text_content()
    page.get_by_test_id("kernel-link").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-testid=programs]")
    assert page.locator(".diagnostics b").count() == 0
    page.go_back()
    page.wait_for_selector("[data-testid=timeline]")
    page.go_back()
    page.wait_for_selector("[data-testid=model-file]")
    for testid in ("graph", "timeline", "arena"):  # and the keys of the drawings
        again.get_by_test_id(testid).focus()
        again.keyboard.press("Escape")
    assert again.get_by_test_id("node").count() == 0
    again.get_by_test_id("graph").focus()
    again.keyboard.press("ArrowRight")
    again.wait_for_selector("[data-testid=node]")
    explorer.expected += ["404", "422"]
    unsafe = explorer.open("/m", ready="[data-testid=model-file]", prepare=lambda page: page.add_init_script(WITHOUT_HTTPS))
    unsafe.get_by_test_id("model-file").set_input_files({"name": "x.onnx", "mimeType": "", "buffer": bytes(range(256)) * 99})
    with unsafe.expect_response("**/v1/blobs/*") as stored:
        unsafe.get_by_test_id("compile").click()
    assert stored.value.status == 201  # its address is its hash
    unsafe.wait_for_selector("[data-testid=problem]")
    unknown = explorer.open("/m/sha256:0", ready="[data-testid=problem]")
    assert "sha256:0" in unknown.get_by_test_id("problem").text_content()


def make_towers() -> dict[str, Any]:
    """Return a graph of three products side by side, each with sums of its rows, which are added."""
    shapes = {"x": [64, 256]} | {name: [256, 256] for name in "abc"}
    nodes = [
        part
        for name in "abc"
        for part in (
            {"name": f"{name}0", "expression": PRODUCT, "inputs": {"A": "x", "B": name}, "outputs": {"C": f"{name}0"}},
            {"name": f"{name}1", "expression": "C[i] +=! exp(A[i, j])", "inputs": {"A": f"{name}0"}, "outputs": {"C": f"{name}1"}},
        )
    ]
    total = {"name": "sum", "expression": "C[i] = A[i] + B[i] + D[i]", "inputs": {"A": "a1", "B": "b1", "D": "c1"}}
    inputs = {name: {"dtype": "float32", "shape": shape} for name, shape in shapes.items()}
    return GRAPH | {"inputs": inputs, "nodes": [*nodes, total | {"outputs": {"C": "y"}}]}


def test_a_plan_is_edited_checked_and_estimated(explorer: Explorer) -> None:
    with Client(explorer.address) as client:
        built = client.compile_model(make_towers(), "cpu-x86-avx2", GraphOptions(plan="rammer", threads=2)).response
        assert built is not None
        plan, story = client.model_plan(built.digest), client.model_story(built.digest)
        programs = [step["vdevice"]["programs"] for step in plan["steps"] if "vdevice" in step]
        same = client.check_plan(built.digest, programs)
        assert (same["seconds"], same["instructions"]) == (story["seconds"], story["instructions"])
        for illegal in ([], ["x"], [[[{"execute": [0, 0, 1]}]]], [[[] for _ in program] for program in programs]):
            with pytest.raises(InputError):
                client.check_plan(built.digest, illegal)
    explorer.expected.append("422")
    executed = {story["steps"][each["step"]]["node"] for each in story["instructions"] if each["kind"] == "execute"}
    reader = min(edge["to"] for edge in story["edges"] if {edge["from"], edge["to"]} <= executed)
    page = explorer.open(f"/m/{built.digest}?node={reader}", ready="[data-testid=edit]")
    stored = page.get_by_test_id("estimate").text_content()
    page.get_by_test_id("edit").focus()
    page.keyboard.press("Enter")
    panel = page.get_by_test_id("edit-panel")
    for _ in range(20):  # until it is before what it reads
        earlier = panel.get_by_role("button", name="earlier")
        if earlier.is_disabled():
            break
        earlier.click()
        page.wait_for_function("() => !/Checking/.test(document.querySelector('[data-testid=edit-panel]').textContent)")
    assert "nothing orders them" in page.get_by_test_id("edit-fault").text_content()
    assert panel.get_by_role("button", name="copy plan").is_disabled()
    panel.get_by_role("button", name="end").click()
    page.get_by_test_id("edit").click()
    page.locator("[data-testid=operators] button").first.click()
    page.route("**/v1/plans:check", lambda _: None)  # the service does not answer
    panel.get_by_role("button", name="to the next core").click()
    page.wait_for_function("() => /Checking/.test(document.querySelector('[data-testid=edit-panel]').textContent)")
    panel.get_by_role("button", name="end").click()
    page.unroute("**/v1/plans:check")
    page.get_by_test_id("edit").click()
    assert "Not changed yet" in panel.text_content()
    explorer.expected.append("503")
    page.route("**/v1/plans:check", lambda route: route.fulfill(status=503, body="no healthy upstream"), times=1)
    panel.get_by_role("button", name="to the next core").focus()
    page.keyboard.press("Enter")
    page.get_by_test_id("edit-unanswered").wait_for()
    assert panel.get_by_role("button", name="copy plan").is_disabled()
    page.get_by_test_id("edit-again").click()
    page.wait_for_selector("[data-testid=edited], [data-testid=edit-fault]")
    if page.get_by_test_id("edit-fault").count():  # its reader had no wait
        panel.get_by_role("button", name="undo").click()
        page.wait_for_selector("[data-testid=edited]")
    moved = page.get_by_test_id("estimate").text_content()
    assert f"a call takes {moved}" in page.get_by_test_id("edited").text_content()
    assert "edited" in page.get_by_test_id("verdict").text_content()
    given = {"name": "profile.json", "mimeType": "application/json", "buffer": json.dumps(make_profile(story, 2.0)).encode()}
    page.get_by_test_id("profile").set_input_files(given)
    page.get_by_test_id("measured").wait_for()
    assert f"{stored} predicted are" in page.get_by_test_id("measured").text_content()
    assert "before it was edited" in page.get_by_test_id("measured").text_content()
    panel.get_by_role("button", name="end").click()
    assert ", edited" not in page.get_by_test_id("verdict").text_content()


def refuse_without_key(page: Any) -> None:
    problem = {"status": 401, "detail": "no key", "code": "unauthenticated", "errors": []}

    def answer(route: Any) -> None:
        if "authorization" in route.request.headers:
            route.fallback()
        else:
            route.fulfill(status=401, json=problem)

    page.route("**/v1/**", answer)


def test_pages_of_models_work_once_they_have_a_key(explorer: Explorer) -> None:
    explorer.expected.append("401")
    page = explorer.open("/m", ready=".key", prepare=refuse_without_key)
    page.wait_for_selector("[data-testid=problem]")
    assert page.get_by_label("device").locator("option").count() == 1
    page.get_by_label("API key").fill("secret")
    page.get_by_label("API key").press("Enter")
    page.wait_for_function("() => document.querySelector('[name=target]').options.length > 1")
    assert page.get_by_test_id("problem").count() == 0


def test_launches_and_signals_of_a_gpu_are_no_work(explorer: Explorer) -> None:
    story = make_story(3)
    work_s = [sum(each["end_s"] - each["start_s"] for each in story["instructions"] if each.get("veu") == veu and "step" in each)
              for veu in range(4)]  # fmt: skip
    whole_s = 20 * story["seconds"]
    story["instructions"].append({"kind": "synchronize", "start_s": story["seconds"], "end_s": whole_s})
    page = explorer.open(MODEL_PATH, prepare=lambda page: answer_story(page, story | {"seconds": whole_s}))
    works = re.search(r"the busiest works ([\d.]+) ?%", page.get_by_test_id("verdict").text_content())
    assert works is not None
    assert float(works[1]) == pytest.approx(100 * max(work_s) / whole_s, abs=0.6)
    gains_us = [2.0 * number * sum(node["kernel"] == number for node in story["nodes"]) for number in range(3)]  # above the floors
    assert f"would save most, at most {max(gains_us):.1f} µs" in page.get_by_test_id("verdict").text_content()


def test_a_link_has_the_bucket_that_its_operator_is_of(explorer: Explorer) -> None:
    buckets = [make_story(layers) | {"dims": {"batch": layers}} for layers in (1, 3)]
    answer = {"buckets": buckets}
    page = explorer.open(MODEL_PATH, prepare=lambda page: answer_story(page, answer))
    page.get_by_label("bucket").select_option(label="batch = 3")
    page.locator("[data-testid=operators] button").nth(2).click()
    name = page.get_by_test_id("node").locator(".mono").text_content()
    page.wait_for_function("() => location.search.includes('node=')")
    page.reload()
    page.wait_for_selector("[data-testid=node]")
    assert page.get_by_label("bucket").locator("option:checked").text_content() == "batch = 3"
    assert page.get_by_test_id("node").locator(".mono").text_content() == name
    again = explorer.open(MODEL_PATH + "?bucket=2&node=1", prepare=lambda page: answer_story(page, answer))
    assert again.get_by_test_id("node").count() == 0


IS_DRAWN_TO_SCALE = """() => {
  const drawing = document.querySelector('[data-testid=timeline]');
  return drawing.height === Math.round(drawing.clientHeight * devicePixelRatio);
}"""
FRAME = """() => document.querySelector('[data-testid=timeline]').toDataURL()"""


def test_a_profile_is_shown_beside_the_prediction(explorer: Explorer) -> None:
    story = make_story(3)
    page = explorer.open(MODEL_PATH, prepare=lambda page: answer_story(page, story))
    rows = page.get_by_test_id("timeline").bounding_box()["height"]
    given = {"name": "profile.json", "mimeType": "application/json"}
    page.get_by_test_id("profile").set_input_files(given | {"buffer": json.dumps(make_profile(make_story(2), 1.25)).encode()})
    assert "another plan" in page.get_by_test_id("profile-fault").text_content()
    damaged = make_profile(story, 1.25)
    damaged["steps"][0]["veu"] = 200000
    page.get_by_test_id("profile").set_input_files(given | {"buffer": json.dumps(damaged).encode()})
    page.wait_for_function("() => /4 cores/.test(document.querySelector('[data-testid=profile-fault]').textContent)")
    page.get_by_test_id("profile").set_input_files(given | {"buffer": json.dumps(make_profile(story, 1.25)).encode()})
    assert "20 % low" in page.get_by_test_id("measured").text_content()
    assert page.locator("[data-testid=operators] tbody tr", has_text="20 % low").count() == 3
    page.locator("[data-testid=operators] button").first.click()
    assert "predicted are 20 % low" in page.get_by_test_id("node").text_content()
    assert page.get_by_test_id("timeline").bounding_box()["height"] > 1.5 * rows
    page.wait_for_function(IS_DRAWN_TO_SCALE)
    marked = page.evaluate(FRAME)
    page.get_by_role("button", name="clear").click()
    page.wait_for_function(f"async (before) => await ({FRAME})() !== before", arg=marked)
    page.wait_for_function(IS_DRAWN_TO_SCALE)
    page.get_by_role("button", name="without").click()
    assert page.get_by_test_id("measured").count() == 0


def test_two_plans_are_compared(explorer: Explorer) -> None:
    one, other = make_story(3), make_story(3)
    other["seconds"] *= 1.5
    other["arena_bytes"] *= 2
    digest = "sha256:" + "b" * 64

    def answer(page: Any) -> None:
        answer_story(page, one)
        page.route(f"**/v1/models/*{'b' * 64}/story", lambda route: route.fulfill(json=other))

    page = explorer.open(MODEL_PATH, prepare=answer)
    page.get_by_test_id("compare").fill("nonsense")
    page.get_by_test_id("compare").press("Enter")
    assert "another" not in page.get_by_test_id("fault").text_content()
    assert "a compiled model" in page.get_by_test_id("fault").text_content()
    page.get_by_test_id("compare").fill(f"http://other/m/{digest}?node=1")
    page.get_by_test_id("compare").press("Enter")
    page.wait_for_selector("[data-testid=plan-differences]")
    assert "50 % more" in page.get_by_test_id("plan-verdict").text_content()
    assert "idle cores" in page.get_by_test_id("plan-differences").text_content()
    assert "256 KiB" in page.get_by_test_id("plan-figures").text_content()
    page.wait_for_function("() => location.search.includes('compare=')")
    page.reload()
    page.wait_for_selector("[data-testid=plan-differences]")


BOXES = """async () => {
  const drawing = document.querySelector('[data-testid=timeline]'), boxes = [], { fillRect } = CanvasRenderingContext2D.prototype;
  CanvasRenderingContext2D.prototype.fillRect = function (...at) { boxes[boxes.length - 1]++; fillRect.apply(this, at); };
  for (let i = 0; i < 60; i++) {
    boxes.push(0);
    drawing.dispatchEvent(new KeyboardEvent('keydown', { key: i < 6 ? 'w' : i % 40 < 20 ? 'd' : 'a' }));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  }
  return boxes;
}"""


def test_a_frame_of_a_large_model_draws_what_it_shows(explorer: Explorer) -> None:
    story = make_story(1250)  # 5,000 operators
    assert len(story["instructions"]) >= 20_000
    page = explorer.open(MODEL_PATH, prepare=lambda page: answer_story(page, story))
    boxes = page.evaluate(BOXES)
    assert sum(boxes) > 0
    assert max(boxes[6:]) < len(story["instructions"]) / 10


def test_operations_are_shown_as_they_happen(explorer: Explorer) -> None:
    page = explorer.open("/farm", ready="[data-testid=farm]")
    page.wait_for_selector("text=live")
    request = {"expression": "y[i] = x[i] * 3.5", "inputs": {"x": {"dtype": "float32", "shape": [977]}}, "target": "cpu-x86-avx2"}
    httpx.post(f"{explorer.address}/v1/kernels:compile", json=request, headers={"Prefer": "wait=60"}, timeout=90)
    row = page.locator("[data-testid=operations] tr", has_text="3.5")
    row.wait_for()
    page.wait_for_function("() => /3.5.*done/.test(document.querySelector('[data-testid=operations]').textContent)")
    row.get_by_role("button").focus()
    page.keyboard.press("Enter")
    page.get_by_role("link", name="open the kernel").wait_for()
    bad = GRAPH | {"nodes": [GRAPH["nodes"][0] | {"expression": PRODUCT + " + Q[i]"}, GRAPH["nodes"][1]]}
    body = {"model": {"graph": bad}, "target": "cpu-x86-avx2"}
    failed = httpx.post(f"{explorer.address}/v1/graphs:compile", json=body, headers={"Prefer": "wait=60"}, timeout=90).json()
    assert failed["error"]["code"] == "unsupported-model"
    page.get_by_role("button", name="failed", exact=True).click()
    page.locator("[data-testid=operations] tr", has_text="unsupported-model").get_by_role("button").click()
    assert failed["error"]["detail"] in page.locator(".failure").text_content()


def test_a_model_over_several_devices_has_no_link(explorer: Explorer) -> None:
    subgraphs: list[list[dict[str, str]]] = [[], [{"device": "a"}, {"device": "b"}]]
    operations = [
        make_operation(number, request={"model": "f" * 64, "target": "local"}, response={"digest": "sha256:ab", "subgraphs": each})
        for number, each in enumerate(subgraphs, 1)
    ]
    page = explorer.open("/farm", ready="[data-testid=operations]", prepare=lambda page: answer_farm(page, operations))
    buttons = page.locator("[data-testid=operations] button")
    buttons.nth(1).click()  # the newest is the first
    page.get_by_role("link", name="open the model").wait_for()
    buttons.nth(0).click()
    page.get_by_text("over several devices").wait_for()
    assert page.get_by_role("link", name="open the model").count() == 0


def open_file(explorer: Explorer, file: Path) -> Any:
    """Open a file without a network, and return the tab and the addresses that it asked for."""
    page = explorer.browser.new_context(offline=True).new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: asked.append(message.text) if message.type == "error" else None)
    page.goto(file.as_uri())
    page.wait_for_selector("[data-testid=estimate]")
    assert asked == [file.as_uri()]
    return page


def test_a_file_opens_from_disk_without_a_network(explorer: Explorer, tmp_path: Path) -> None:
    request = {
        "expression": PRODUCT,
        "inputs": {name: {"dtype": "float32", "shape": [64, 64]} for name in "AB"},
        "target": "nvidia-h200-sxm",
    }
    story = httpx.post(f"{explorer.address}/v1/kernels:explain", json=request, timeout=60).json()
    kernel, model = tmp_path / "kernel.html", tmp_path / "model.html"
    write_page(str(kernel), KERNEL, {"story": story, "source": "int main;"})
    write_page(str(model), MODEL, make_story(30))
    page = open_file(explorer, kernel)
    seconds = page.get_by_test_id("estimate").text_content()
    assert float(seconds.split()[0]) == pytest.approx(story["programs"][0]["seconds"] * 1e6, rel=0.01)
    page.get_by_test_id("program-1").click()
    assert page.get_by_test_id("program-1").get_attribute("aria-current") == "true"
    assert "int main;" in page.get_by_test_id("source").text_content()
    page = open_file(explorer, model)
    page.locator("[data-testid=operators] button").first.click()
    assert "MatMul" in page.get_by_test_id("node").text_content()
    assert page.get_by_test_id("kernel-link").count() == 0


MATMUL = "C[m, n] +=! A[m, k] * B[k, n]"
CONVOLUTION = "Y = conv2d(X, W, padding=1)"
TEN_CASES: tuple[tuple[str, str, dict[str, str]], ...] = (
    (MATMUL, "nvidia-h200-sxm", {"A": "bfloat16[4096,64]", "B": "bfloat16[64,4096]"}),
    (MATMUL, "nvidia-a100-sxm-80gb", {"A": "float32[1000,1000]", "B": "float32[1000,1000]"}),
    (MATMUL, "amd-mi300x", {"A": "float16[512,512]", "B": "float16[512,512]"}),
    (MATMUL, "cpu-x86-avx512", {"A": "float32[512,512]", "B": "float32[512,512]"}),
    (CONVOLUTION, "nvidia-h200-sxm", {"X": "float16[8,64,56,56]", "W": "float16[64,64,3,3]"}),
    (CONVOLUTION, "cpu-x86-avx2", {"X": "float32[1,64,56,56]", "W": "float32[64,64,3,3]"}),
    ("Y = attention(Q, K, V, causal=true)", "nvidia-a100-sxm-80gb", dict.fromkeys("QKV", "bfloat16[2,8,512,64]")),
    ("y[i, j] = exp(x[i, j])", "nvidia-h200-sxm", {"x": "float32[4096,4096]"}),
    ("y[i] +=! x[i, j]", "cpu-x86-avx2", {"x": "float32[3000,500]"}),
    ("y[i, j] = x[j, i]", "cpu-x86-avx512", {"x": "float32[1024,512]"}),
)


@pytest.mark.slow
def test_page_file_and_terminal_name_the_same_numbers(
    explorer: Explorer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain, "build_kernel", _find_no_compiler)
    for expression, target, inputs in TEN_CASES:
        file = tmp_path / "kernel.html"
        given = [word for name, kind in inputs.items() for word in ("--input", f"{name}={kind}")]
        assert main(["explain", expression, "--target", target, *given, "--html", str(file)]) == 0
        terminal = capsys.readouterr().out
        page, own = explorer.open(link(expression, target, inputs)), open_file(explorer, file)
        verdict = page.get_by_test_id("verdict").text_content()
        assert verdict == own.get_by_test_id("verdict").text_content()
        assert page.get_by_test_id("programs").text_content() == own.get_by_test_id("programs").text_content()
        seconds = page.get_by_test_id("estimate").text_content()
        (said,) = re.findall(r"^Estimate of the first: (.*), bound by (.*)$", terminal, re.MULTILINE)
        assert _seconds(said[0]) == pytest.approx(_seconds(seconds), rel=0.006)
        assert f"bound{said[1]}" in verdict
        for tab in (page, own):
            tab.close()


def _find_no_compiler(_: BuildRequest) -> NoReturn:
    """The terminal then says what the model says, as the page does."""
    raise ToolchainMissingError("no compiler")


def _seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]


def test_forty_injections_are_text_on_two_pages_in_a_file_and_in_a_notebook(explorer: Explorer, tmp_path: Path) -> None:
    story = make_story(3)
    page = explorer.open("/farm", ready="[data-testid=farm]")
    other = explorer.browser.new_page()
    for text in HOSTILE:
        page.unroute_all()
        answer_story(page, poison(story, text))
        page.goto(f"{explorer.address}{MODEL_PATH}?node=2")
        page.wait_for_selector("[data-testid=node]")
        assert text in page.get_by_test_id("node").text_content()
        check_shown_as_text(page)
        error = {"status": 422, "code": text, "detail": text, "errors": [{"message": text, "hint": text}]}
        operation = make_operation(1, error=error, request={"expression": text, "target": text}, name=f"operations/{text}")
        queues = [{"queue": text, "state": text, "operations": 1, "oldest_s": 1}]
        answer_farm(page, [operation], ended={text: 1}, queues=queues, workers={text: 1})
        page.goto(f"{explorer.address}/farm")
        page.locator("[data-testid=operations] button").first.click()
        assert text in page.locator(".failure").text_content()
        check_shown_as_text(page)
        file = tmp_path / "model.html"
        write_page(str(file), MODEL, poison(story, text))
        other.goto(file.as_uri())
        other.locator("[data-testid=operators] button").first.click()
        assert text in other.get_by_test_id("node").text_content()
        check_shown_as_text(other)
        drawn = from_json(ModelStory, {name: value for name, value in poison(story, text).items() if name != "dims"})
        other.set_content(make_card(text, text, [text], draw_timeline(drawn)) + RollerError(text, code=text)._repr_html_())
        assert text in other.locator("body").text_content()
        assert other.evaluate("typeof pwned") == "undefined"
        assert other.locator("body :is(script, iframe, img, object, embed, a, style)").count() == 0
