import doctest
import inspect
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stableair as sa
from helpers.components import EXAMPLES
from stableair.channels.registries import fading
from stableair.errors import ResourceError
from stableair.receivers import receiver
from stableair.spec import REGISTRIES, Registry, literal, load_plugin


def test_every_component_has_an_example_for_the_contract_tests():
    for plural, registry in REGISTRIES.items():
        assert {registry.one(text).entry.name for text in EXAMPLES[plural]} == set(registry.entries)
        assert all(entry.summary for entry in registry), "each component has a summary"


@pytest.mark.parametrize("kind", REGISTRIES)
def test_every_component_has_a_doctest(kind):
    ours = [entry for entry in REGISTRIES[kind] if entry.factory.__module__.startswith("stableair.")]
    assert ours
    assert [entry.name for entry in ours if not doctested(entry.factory)] == []


def doctested(factory):
    """Whether an example of the docstring uses the function, and an example has an output."""
    examples = doctest.DocTestParser().get_examples(factory.__doc__ or "")
    return any(factory.__name__ in example.source for example in examples) and any(e.want for e in examples)


def test_a_component_without_a_doctest_is_detected():
    def silent():
        """It says what it does."""

    def idle():
        """It shows another.

        >>> 1 + 1
        2
        """

    def shown():
        """It shows itself.

        >>> shown()
        'here'
        """

    assert [doctested(factory) for factory in (silent, idle, shown)] == [False, False, True]


def test_arguments_by_position_and_by_name_are_one_spec():
    assert str(receiver.one("mac(0.1)")) == str(receiver.one(" mac( C = 0.1 ) ")) == "mac(C=0.1)"
    assert str(receiver.one("mac(C=1.0)")) == "mac(C=1)"
    assert [str(call) for call in receiver.parse("mac(1) | clip(C=2) | none()")] == ["mac(C=1)", "clip(C=2)", "none()"]


VALUES = st.one_of(
    st.integers(-(10**12), 10**12), st.floats(allow_nan=False), st.booleans(), st.none(), st.text(max_size=20),
    st.lists(st.integers(), max_size=4).map(tuple),
)  # fmt: skip


@given(VALUES)
def test_a_written_record_is_read_back(value):
    registry = Registry("thing", "things")
    REGISTRIES.pop("things")
    registry("thing")(lambda x: x)
    text = str(registry.one("thing(x=0)").with_("x", value))
    assert registry.one(text).arguments["x"] == value
    assert str(registry.one(text)) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [("auto", "auto"), ("0.5", 0.5), ("-3", -3), ("inf", math.inf), ("True", True), ("(1, 2)", (1, 2)), ("a b", "a b"),
     ("f(1)", "f(1)"), ("none", None)],
)  # fmt: skip
def test_literals_are_parsed(text, value):
    assert literal(text) == value


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("mca(C=1)", "unknown-component"),
        ("MAC(C=1)", "unknown-component"),
        ("xyzzy(C=1)", "unknown-component"),
        ("mac()", "missing-argument"),
        ("mac", "missing-argument"),
        ("mac(1, 2, 3, 4)", "wrong-arguments"),
        ("mac(c=1)", "unknown-argument"),
        ("mac(C=1, C=2)", "duplicate-argument"),
        ("mac(**{'C': 1})", "code-in-spec"),
        ("mac(C=1", "not-a-spec"),
        ("", "not-a-spec"),
        ("mac(C=1); import os", "not-a-spec"),
        ("mac(C=1) + mac(C=2)", "code-in-spec"),
        ("mac(C=__import__('os').getcwd())", "code-in-spec"),
        ("mac(C=1+1)", "code-in-spec"),
        ("mac(C=[x for x in (1,)])", "code-in-spec"),
        ("mac(C=lambda: 1)", "code-in-spec"),
        ("mac(C=-'a')", "code-in-spec"),
        ("os.system('true')", "code-in-spec"),
        ("(lambda: 1)()", "code-in-spec"),
        ("mac(C=" + "(" * 200 + ")" * 200 + ")", "not-a-spec"),
        ("mac(C=" + "1" * 1000 + ")", "spec-too-long"),
        (3, "not-a-spec"),
    ],
)
def test_an_invalid_spec_is_refused_in_one_line(text, code):
    with pytest.raises(sa.InputError) as caught:
        receiver.parse(text)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mca(C=1)", "receiver 'mca' is unknown; did you mean 'mac'? allowed: mac, clip, gnc, "),
        (
            "mac(c=1)",
            "receiver 'mac(c=1)': mac has no argument 'c'; did you mean 'C'? allowed: C, gain, pilot; "
            "the signature is mac(C, gain=None, pilot=0)",
        ),
        (
            "mac()",
            "receiver mac needs C; the signature is mac(C, gain=None, pilot=0); write mac(C=VALUE)",
        ),
        ("mac(C=1", "receiver 'mac(C=1' is not a spec; write it as name(argument=1, other=2)"),
    ],
)
def test_the_text_of_errors(text, message):
    with pytest.raises(sa.InputError) as caught:
        receiver.parse(text)
    assert str(caught.value).startswith(message)


def test_the_fields_of_errors():
    with pytest.raises(sa.InputError) as caught:
        receiver.parse("mca(C=1)")
    assert caught.value.fields == {"kind": "receiver", "name": "mca", "allowed": list(receiver.entries)}
    with pytest.raises(sa.InputError) as caught:
        receiver.parse("mac(c=1)")
    assert caught.value.fields == {"component": "mac", "name": "c", "allowed": ["C", "gain", "pilot"]}


@pytest.mark.parametrize("text", ["block(of=rayleigh(power=1))", "block(rayleigh(power=1), 5)"])
def test_a_nested_spec_must_be_quoted(text):
    with pytest.raises(sa.InputError) as caught:
        fading.one(text)
    assert (caught.value.code, caught.value.fields["name"]) == ("unquoted-spec", "of")
    assert fading.one("block(of='rayleigh(power=1)')").arguments["of"].startswith("rayleigh(")


def test_an_error_of_a_factory_names_the_spec_and_keeps_its_code():
    with pytest.raises(sa.InputError) as caught:
        receiver.one("mac(C=-1)")()
    assert str(caught.value) == "receiver mac(C=-1): C must be positive: got -1"
    assert (caught.value.code, caught.value.fields["name"], caught.value.fields["value"]) == ("out-of-range", "C", -1)


def test_a_wrapped_error_keeps_its_class_code_and_hint(registries, tmp_path):
    def refuses():
        raise ResourceError("no room", code="no-room", hint="folder")

    sa.receiver("refuses")(refuses)
    lines = (
        "from stableair.errors import ResourceError",
        "raise ResourceError('no room', code='no-room', hint='folder')",
    )
    (plugin := tmp_path / "plugin.py").write_text("\n".join(lines))
    for call, text in (
        (receiver.one("refuses()"), "receiver refuses()"),
        (lambda: load_plugin(plugin), f"plug-in {plugin}"),
    ):
        with pytest.raises(ResourceError) as caught:
            call()
        assert (str(caught.value), caught.value.code, caught.value.hint) == (f"{text}: no room", "no-room", "folder")


def test_a_name_is_registered_once(registries):
    sa.receiver("soft")(lambda C: None)
    for name in ("soft", "mac"):
        with pytest.raises(sa.InputError) as caught:
            sa.receiver(name)(lambda C: None)
        assert (caught.value.code, caught.value.fields) == ("name-taken", {"name": name})
    with pytest.raises(sa.InputError) as caught:
        sa.receiver("soft clip")
    assert caught.value.code == "not-an-identifier"


def test_the_package_exports_all_decorators_and_their_modules(registries):
    kinds = ["receiver", "noise", "fading", "partition", "model", "dataset", "server"]
    for name in [*kinds, "channel", "participation", "power", "basis", "quantizer", "aggregator", "local", "lr_decay"]:
        getattr(sa, name)("fresh")(lambda: None)
    assert all("fresh" in registry.entries for registry in registries.values())
    import stableair.receivers as module

    assert module.mac is sa.mac
    assert module.receiver is sa.receiver


def test_the_list_shows_types():
    shown = {entry.name: entry.typed_signature for entry in REGISTRIES["receivers"]}
    assert shown["mac"] == "mac(C: float | auto, gain: bool | None = None, pilot: int = 0)"
    assert shown["gnc"] == "gnc(max_norm: float, blocks: tensor | layer | model = model)"
    assert (
        "shape: tuple[int, int, int] = (1, 8, 8)"
        in {e.name: e.typed_signature for e in REGISTRIES["data"]}["synthetic"]
    )


@pytest.mark.slow
def test_a_type_checker_sees_the_signature_of_a_decorated_function(tmp_path, monkeypatch):
    mypy = pytest.importorskip("mypy.api")
    monkeypatch.setenv("MYPYPATH", str(Path(sa.__file__).parents[1]))
    (tmp_path / "user.py").write_text(
        "import stableair as sa\nimport stableair.receivers\nfrom stableair.servers import momentum, server\n"
        "reveal_type(sa.receivers.mac)\nreveal_type(momentum)\n"
        "@server('own')\ndef own(rate: float = 1.0) -> sa.ServerRule:\n"
        "    return sa.ServerRule(lambda w, g, m: (w, m, {}))\n"
        "reveal_type(own)\n"
        "sa.receivers.mac(C='much')\nsa.receivers.receiver.mac\n"
    )
    words = ["--cache-dir", str(tmp_path / "cache"), "--ignore-missing-imports", "--follow-imports", "silent"]
    out, errors, _ = mypy.run([*words, str(tmp_path / "user.py")])
    assert not errors
    shown = [line.partition("Revealed type is ")[2] for line in out.splitlines() if "Revealed" in line]
    assert shown[0].startswith("\"def (C: float | Literal['auto'], gain: bool | None =, pilot: int =) -> ")
    assert shown[1:] == [
        '"def (lr: float | None =, beta: float =) -> stableair.contracts.ServerRule | '
        '(def (torch._tensor.Tensor, torch._tensor.Tensor) -> torch._tensor.Tensor)"',
        '"def (rate: float =) -> stableair.contracts.ServerRule"',
    ]
    wrong = [line.rpartition("[")[2] for line in out.splitlines() if ": error:" in line]
    assert wrong == ["arg-type]", "attr-defined]"], out


@pytest.mark.parametrize("kind", REGISTRIES)
def test_every_argument_of_every_component_has_a_type(kind):
    for entry in REGISTRIES[kind]:
        for parameter in inspect.signature(entry.factory).parameters.values():
            assert parameter.annotation is not parameter.empty, (entry.name, parameter.name)


def test_a_plugin_adds_a_component(tmp_path, registries, tiny):
    file = tmp_path / "half.py"
    file.write_text(
        "import stableair as sa\n"
        "@sa.receiver('half')\n"
        "def half(share=0.5):\n"
        "    '''Scale.'''\n"
        "    return lambda g: share * g\n"
    )
    load_plugin(file)
    changed = sa.run(tiny.with_(receiver="half(share=0.25)"))
    assert changed["clip/fraction"][0] == 1.0


@pytest.mark.parametrize(
    ("text", "code", "cause"),
    [
        ("import no_such_module", "plugin-failed", "ModuleNotFoundError"),
        ("def broken(:", "plugin-failed", "SyntaxError"),
        ("1 / 0", "plugin-failed", "ZeroDivisionError"),
        ("raise SystemExit(0)", "plugin-failed", "SystemExit"),
        ("import stableair as sa\n@sa.receiver('mac')\ndef mac(C): return None", "name-taken", "mac"),
    ],
)
def test_an_invalid_plugin_is_named(tmp_path, registries, text, code, cause):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(sa.InputError) as caught:
        load_plugin(tmp_path / "bad.py")
    assert caught.value.code == code
    assert "bad.py" in str(caught.value)
    assert cause in str(caught.value)
    with pytest.raises(sa.InputError) as caught:
        load_plugin(tmp_path / "missing.py")
    assert caught.value.code == "missing-file"


def test_a_factory_may_pass_its_arguments_to_another_factory(registries):
    open_to_all = Registry("thing", "test things")
    open_to_all("any")(lambda first, **others: (first, others))
    call = open_to_all.one("any(1, b=2, c=word)")
    assert call() == (1, {"b": 2, "c": "word"})
    assert str(call.with_("b", 3).with_("d", 4)) == "any(first=1, b=3, c=word, d=4)"
    assert str(call.full()) == str(call)
    assert open_to_all.one(str(call))() == call()
    REGISTRIES.pop("test things")
