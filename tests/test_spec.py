import doctest
import inspect
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stableair as sa
from components import EXAMPLES
from stableair.channels.kinds import fading
from stableair.receivers import receiver
from stableair.spec import REGISTRIES, Registry, literal, load_plugin


def test_every_component_has_an_example_for_the_contract_tests():
    for plural, registry in REGISTRIES.items():
        assert {registry.one(text).entry.name for text in EXAMPLES[plural]} == set(registry.entries)
        assert all(entry.summary for entry in registry), "each component says in one line what it is"


@pytest.mark.parametrize("kind", REGISTRIES)
def test_every_component_shows_itself_in_a_doctest(kind):
    ours = [entry for entry in REGISTRIES[kind] if entry.factory.__module__.startswith("stableair.")]
    assert ours
    assert [entry.name for entry in ours if not doctested(entry.factory)] == []


def doctested(factory):
    """Whether one of its examples does something with it, by its own name or by that of a spec."""
    examples = doctest.DocTestParser().get_examples(factory.__doc__ or "")
    return any(factory.__name__ in example.source for example in examples) and any(e.want for e in examples)


def test_a_component_without_a_doctest_is_seen():
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
def test_what_is_written_is_read_back(value):
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
def test_literals(text, value):
    assert literal(text) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mca(C=1)", "did you mean 'mac'"),
        ("MAC(C=1)", "did you mean 'mac'"),
        ("xyzzy(C=1)", "allowed: mac, clip, gnc, "),
        ("mac()", "the signature is mac(C, gain=None, pilot=0)"),
        ("mac", "the signature is mac(C, gain=None, pilot=0)"),
        ("mac(c=1)", "has no argument 'c'; did you mean 'C'"),
        ("mac(1, 2, 3, 4)", "the signature is mac(C, gain=None, pilot=0)"),
        ("mac(C=1, C=2)", "given twice"),
        ("mac(**{'C': 1})", "is code"),
        ("mac(C=1", "not a spec"),
        ("", "not a spec"),
        ("mac(C=1); import os", "not a spec"),
        ("mac(C=1) + mac(C=2)", "is code"),
        ("mac(C=__import__('os').getcwd())", "is code"),
        ("mac(C=1+1)", "is code"),
        ("mac(C=[x for x in (1,)])", "is code"),
        ("mac(C=lambda: 1)", "is code"),
        ("mac(C=-'a')", "is code"),
        ("os.system('true')", "is code"),
        ("(lambda: 1)()", "is code"),
        ("mac(C=" + "(" * 200 + ")" * 200 + ")", ""),
        ("mac(C=" + "1" * 1000 + ")", "at most 500 characters"),
    ],
)
def test_a_bad_spec_is_one_line_that_helps(text, said):
    with pytest.raises(sa.InputError) as error:
        receiver.parse(text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["block(of=rayleigh(power=1))", "block(rayleigh(power=1), 5)"])
def test_a_spec_within_a_spec_is_told_to_stand_in_quotes(text):
    with pytest.raises(sa.InputError, match=r"stands in quotes: write of='rayleigh\(power=1\)'"):
        fading.one(text)
    assert fading.one("block(of='rayleigh(power=1)')").arguments["of"].startswith("rayleigh(")


def test_what_a_factory_refuses_is_said_with_the_spec():
    with pytest.raises(sa.InputError, match=r"receiver mac\(C=-1\): C must be positive: got -1"):
        receiver.one("mac(C=-1)")()


def test_what_would_help_is_handed_on(registries, tmp_path):
    def refuses():
        raise sa.InputError("no room", hint="folder")

    sa.receiver("refuses")(refuses)
    with pytest.raises(sa.InputError, match=r"receiver refuses\(\): no room") as error:
        receiver.one("refuses()")()
    assert error.value.hint == "folder"
    (tmp_path / "plugin.py").write_text("import stableair as sa\nraise sa.InputError('no room', hint='folder')\n")
    with pytest.raises(sa.InputError, match=r"plugin\.py: no room") as error:
        load_plugin(tmp_path / "plugin.py")
    assert error.value.hint == "folder"


def test_a_name_is_registered_once(registries):
    sa.receiver("soft")(lambda C: None)
    with pytest.raises(sa.InputError, match="'soft' is already registered"):
        sa.receiver("soft")(lambda C: None)
    with pytest.raises(sa.InputError, match="'mac' is already registered by"):
        sa.receiver("mac")(lambda C: None)
    with pytest.raises(sa.InputError, match="identifier"):
        sa.receiver("soft clip")


def test_all_decorators_are_offered_and_their_modules_too(registries):
    kinds = ["receiver", "noise", "fading", "partition", "model", "dataset", "server"]
    for name in [*kinds, "channel", "participation", "power", "basis", "quantizer", "aggregator"]:
        getattr(sa, name)("fresh")(lambda: None)
    assert all("fresh" in registry.entries for registry in registries.values())
    import stableair.receivers as module

    assert module.mac is sa.mac
    assert module.receiver is sa.receiver


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "from stableair.channel import noise",
            "'stableair.channel'; it is now in stableair.channels.kinds",
        ),
        ("import stableair.receiver", "it is now in stableair.receivers"),
        ("from stableair.data import Dataset", "; it is now in stableair.contracts"),
        ("from stableair.experiment import build", "; it is now in stableair.builder"),
        ("from stableair.record import load", "it is now in stableair.runner and stableair.results.run"),
        ("import stableair as sa; sa.hub", "has no attribute 'hub'; it is now in stableair.data.hub"),
        ("import stableair as sa; sa.receiver.mac", "'receiver' is the decorator that registers a receiver"),
    ],
)
def test_a_plugin_written_for_0_1_is_told_the_new_name(tmp_path, line, said):
    (tmp_path / "old.py").write_text(line + "\n")
    with pytest.raises(sa.InputError) as told:
        sa.load_plugin(tmp_path / "old.py")
    assert said in str(told.value)
    assert "\n" not in str(told.value)


def test_the_list_shows_types():
    shown = {entry.name: entry.typed_signature for entry in REGISTRIES["receivers"]}
    assert shown["mac"] == "mac(C: float | auto, gain: bool | None = None, pilot: int = 0)"
    assert shown["gnc"] == "gnc(max_norm: float, blocks: tensor | layer | model = model)"
    assert (
        "shape: tuple[int, int, int] = (1, 8, 8)"
        in {e.name: e.typed_signature for e in REGISTRIES["data"]}["synthetic"]
    )


@pytest.mark.slow
def test_a_type_checker_sees_the_signature_of_what_is_decorated(tmp_path, monkeypatch):
    mypy = pytest.importorskip("mypy.api")
    monkeypatch.setenv("MYPYPATH", str(Path(sa.__file__).parents[1]))
    (tmp_path / "user.py").write_text(
        "import stableair as sa\nimport stableair.receivers\nfrom stableair.servers import momentum, server\n"
        "reveal_type(sa.receivers.mac)\nreveal_type(momentum)\n"
        "@server('own')\ndef own(rate: float = 1.0) -> momentum:\n    return momentum(lr=rate)\nreveal_type(own)\n"
        "sa.receivers.mac(C='much')\nsa.receivers.receiver.mac\n"
    )
    words = ["--cache-dir", str(tmp_path / "cache"), "--ignore-missing-imports", "--follow-imports", "silent"]
    out, errors, _ = mypy.run([*words, str(tmp_path / "user.py")])
    assert not errors
    shown = [line.partition("Revealed type is ")[2] for line in out.splitlines() if "Revealed" in line]
    assert shown[0].startswith("\"def (C: float | Literal['auto'], gain: bool | None =, pilot: int =) -> ")
    assert shown[1:] == [
        '"def (lr: float | None =, beta: float =) -> stableair.servers.momentum"',
        '"def (rate: float =) -> stableair.servers.momentum"',
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
    ("text", "said"),
    [
        ("import no_such_module", "ModuleNotFoundError"),
        ("def broken(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import stableair as sa\n@sa.receiver('mac')\ndef mac(C): return None", "already registered"),
    ],
)
def test_a_bad_plugin_is_named(tmp_path, registries, text, said):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(sa.InputError, match=said) as error:
        load_plugin(tmp_path / "bad.py")
    assert "bad.py" in str(error.value)
    with pytest.raises(sa.InputError, match="no such file"):
        load_plugin(tmp_path / "missing.py")


def test_a_factory_may_hand_arguments_on(registries):
    open_to_all = Registry("thing", "test things")
    open_to_all("any")(lambda first, **others: (first, others))
    call = open_to_all.one("any(1, b=2, c=word)")
    assert call() == (1, {"b": 2, "c": "word"})
    assert str(call.with_("b", 3).with_("d", 4)) == "any(first=1, b=3, c=word, d=4)"
    assert str(call.full()) == str(call)
    assert open_to_all.one(str(call))() == call()
    REGISTRIES.pop("test things")
