"""roller_svc.torch.op: operators of torch from expressions."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")
import torch

import roller_svc
from roller_svc.errors import ArgumentError, ExprSyntaxError, InputError
from roller_svc.ir.options import SelectionMode
from roller_svc.torch import _Kernels

FAST = {"select": "model", "top_k": 1}
NARROW = torch.bfloat16


@pytest.fixture(scope="module")
def axpy():
    text = "y[i] = a[i] * 2 + b[i]; z[i] = y[i] * y[i]"
    return roller_svc.torch.op("roller_test::axpy", text, ["a", "b"], outputs=["y", "z"], **FAST)


def test_results_are_those_of_the_expression_for_each_shape(axpy):
    for extent in (3, 5):
        a, b = torch.randn(extent), torch.randn(extent)
        y, z = axpy(a, b)
        torch.testing.assert_close(y, a * 2 + b)
        torch.testing.assert_close(z, y * y)
    assert axpy(a.to(NARROW), b.to(NARROW))[0].dtype is NARROW


def test_torch_checks_the_operator(axpy):
    torch.library.opcheck(torch.ops.roller_test.axpy.default, (torch.randn(4), torch.randn(4)))


def test_tracers_keep_the_operator(axpy):
    class Module(torch.nn.Module):
        def forward(self, a, b):
            return axpy(a, b)[1] + 1

    a, b = torch.randn(4), torch.randn(4)
    program = torch.export.export(Module(), (a, b))
    assert "roller_test.axpy" in str(program.graph)
    expected = (a * 2 + b).square() + 1
    torch.testing.assert_close(program.module()(a, b), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(Module(), fullgraph=True, backend="aot_eager")(a, b), expected)


def test_one_result_is_a_tensor():
    double = roller_svc.torch.op("roller_test::double", "y[i] = x[i] * 2", ["x"], **FAST)
    x = torch.randn(4, requires_grad=True)
    torch.testing.assert_close(double(x.detach()), x.detach() * 2)
    assert double.__doc__ == "roller_test::double: y[i] = x[i] * 2"
    with pytest.raises(ArgumentError, match="argument 'x' has no elements"):
        double(torch.empty(0))


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [("plain", ["x"], "library::name"), ("a::b", "x", "list of names"), ("a::b", [], "list of"), ("a::b", ["x", "x"], "twice")],
)
def test_names_are_checked(name, inputs, message):
    with pytest.raises(ArgumentError, match=message):
        roller_svc.torch.op(name, "y[i] = x[i]", inputs)


@pytest.mark.parametrize(
    ("text", "message"),
    [("y[i = x[i]", "1:2 `[` is never closed"), ("y[i] = x[i] * s[", "1:16 `[` is never closed"),
     ("y[i) = x[i]", "1:4 `)` does not close the `[` before it")],
)  # fmt: skip
def test_brackets_are_checked(text, message):
    with pytest.raises(ExprSyntaxError) as caught:
        roller_svc.torch.op("roller_test::open", text, ["x", "s"])
    assert f"{caught.value.line}:{caught.value.column} {caught.value.message}" == message


def test_an_equal_definition_is_the_same_operator(axpy):
    text = "y[i] = a[i] * 2 + b[i]; z[i] = y[i] * y[i]"
    assert roller_svc.torch.op("roller_test::axpy", text, ("a", "b"), outputs=("y", "z"), **FAST) is axpy


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("roller_test::axpy", {"inputs": ["b", "a"]}, "computes 'y.*with other arguments"),
        ("roller_test::axpy", {"top_k": 2}, "computes 'y.*with other arguments"),
        ("aten::add", {}, "was registered by other code"),
    ],
)
def test_a_name_has_one_definition(axpy, name, change, message):
    given = {"inputs": ["a", "b"], "outputs": ["y", "z"], **FAST} | change
    with pytest.raises(ArgumentError, match=f"there is an operator {name!r}, which {message}") as caught:
        roller_svc.torch.op(name, "y[i] = a[i] * 2 + b[i]; z[i] = y[i] * y[i]", **given)
    assert (caught.value.code, "another name" in caught.value.hint) == ("operator-exists", True)
    assert len(axpy(torch.ones(3), torch.ones(3))) == 2


def test_options_are_equal_in_whatever_form_they_are_given():
    given = {"constants": ["w"], "select": "model", "tiles": {"split_k": 1}, "target": "cpu-x86-avx2"}
    same = {"constants": ("w",), "select": SelectionMode.MODEL, "tiles": {"split_k": 1}, "top_k": 10, "target": "CPU-x86-avx2"}
    first, second = (roller_svc.torch.op("roller_test::forms", "y[i] = x[i] * w[i]", ["x", "w"], **each) for each in (given, same))
    assert first is second
    with pytest.raises(ArgumentError, match="there is an operator 'roller_test::forms'"):
        roller_svc.torch.op("roller_test::forms", "y[i] = x[i]", ["x"], **FAST)


@pytest.mark.parametrize("options", [{"constant": ["x"]}, {"constants": ["w"]}, {"top_k": 0}])
def test_wrong_options_register_nothing(options):
    with pytest.raises(ArgumentError):
        roller_svc.torch.op("roller_test::unregistered", "y[i] = x[i]", ["x"], **options)
    assert not hasattr(torch.ops.roller_test, "unregistered")


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("name", "text"), [("axis", "y[i] = x[j] * s[]"), ("operands", "y = matmul(x, s)")])
def test_a_definition_that_no_call_compiled_is_replaced(name, text, traced):
    name = f"roller_test::{name}_{traced}"
    broken = roller_svc.torch.op(name, text, ["x", "s"], **FAST)
    x, s = torch.ones(3), torch.tensor(2.0)
    with pytest.raises(InputError):
        broken(x, s)
    right = roller_svc.torch.op(name, "y[i] = x[i] * s[]", ["x", "s"], **FAST)
    assert (right is broken, right.__doc__) == (True, f"{name}: y[i] = x[i] * s[]")
    if traced:
        with torch._subclasses.FakeTensorMode() as mode:
            assert right(mode.from_tensor(x), mode.from_tensor(s)).shape == (3,)
    else:
        assert right(x, s).tolist() == [2, 2, 2]
    with pytest.raises(ArgumentError, match="there is an operator"):
        roller_svc.torch.op(name, "y[i] = x[i] + s[]", ["x", "s"], **FAST)


@pytest.mark.parametrize(
    ("text", "inputs", "message", "hint"),
    [
        ("y[i] = x[i] * scale[]", ["x", "scle"], "1:15.*no tensor `scale`", "did you mean `scle`? the inputs are x, scle"),
        ("y = add(x, b); z[i] = y[i] * w[i]", ["x", "b"], "1:30.*no tensor `w`", "the inputs are x, b"),
        ('y = einsum("mk,kn->mn", A, B)', ["A", "C"], "1:28.*no tensor `B`", "the inputs are A, C"),
        ("y = softmax(X)", ["x"], "1:13.*no tensor `X`", "did you mean `x`? the inputs are x"),
    ],
)
def test_a_wrong_name_of_an_input_registers_nothing(text, inputs, message, hint):
    with pytest.raises(ArgumentError) as caught:
        roller_svc.torch.op("roller_test::misnamed", text, inputs)
    error = caught.value
    assert re.match(message, f"{error.line}:{error.column} {error.message}")
    assert (error.code, error.hint) == ("unknown-name", hint)
    assert not hasattr(torch.ops.roller_test, "misnamed")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("C[i = x[i]]", "1:5 syntax-error: `=` inside brackets"),
        ("y[i] = x[i] * * x[i]", "1:15 syntax-error: `\\*`: expected a value"),
        ("t = relu(x); y[i] = t[i] ^ 2", "1:26 xor-operator"),
        ("t = relu(x)\ny[i] == t[i]", "2:6 syntax-error: `==`"),
        ("y = relo(x)", "1:5 unknown-op"),
        ("y[i] = x[i", "1:9 unbalanced-bracket"),
        ("", "1:1 empty-program"),
    ],
)
def test_a_text_that_is_not_in_the_language_registers_nothing(text, message):
    with pytest.raises(InputError) as caught:
        roller_svc.torch.op("roller_test::mistyped", text, ["x"])
    error = caught.value
    assert re.match(message, f"{error.line}:{error.column} {error.code}: {error.message}")
    assert not hasattr(torch.ops.roller_test, "mistyped")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("compared", "t[i] = x[i] < 2; y[i] = t[i] + x[i].when([i < 2], 0.0)"),
        ("lines", "t = relu(x)\ny[i] = t[i] * x[i]"),
        ("alone", "softmax(x)"),
        ("equation", 'einsum("i,i->i", x, x)'),
        ("calls", "a = relu(x); b[i] = a[i] + 1; c = exp(b)\nd = relu(c)\ny[i] = d[i]"),
        ("reduced", "m[] >=! x[i]; y[i] = x[i] - m[]"),
    ],
)
def test_names_that_the_text_writes_are_known(name, text):
    assert callable(roller_svc.torch.op(f"roller_test::{name}", text, ["x"], **FAST))


def test_inputs_are_not_donated():
    with pytest.raises(ArgumentError, match="writes none of its inputs"):
        roller_svc.torch.op("roller_test::scattered", "g[a[n]] +=. x[n]", ["g", "a", "x"], donate=["g"])


def test_the_last_kernels_of_an_operator_are_kept(monkeypatch):
    monkeypatch.setattr(roller_svc.api, "MAX_CACHED_KERNELS", 2)
    built = []
    monkeypatch.setattr(roller_svc.api, "compile", lambda _, inputs, **__: built.append(inputs["x"][1][0]) or inputs)
    kernels = _Kernels("y[i] = x[i]", ("x",), None, "local", {})
    for extent in (1, 2, 1, 3, 1, 2):
        kernels.kernel([torch.empty(extent)])
    assert built == [1, 2, 3, 2]
