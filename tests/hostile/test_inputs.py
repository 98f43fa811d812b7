"""Invalid values for every argument of every component and every setting, according to their signatures."""

import inspect
import itertools
import math
import signal
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import stableair as sa
from helpers.components import EXAMPLES
from stableair import models, nn, stable, streams, theory
from stableair.errors import ResourceError
from stableair.experiment import COMPONENT_SETTINGS, NESTED_COMPONENTS, PRESETS, TYPES, Experiment, registry
from stableair.paper import demo
from stableair.results.environment import environment
from stableair.spec import REGISTRIES

pytestmark = pytest.mark.slow  # errors and attacks of users; each test prints the number of its attempts

BAD = [
    None, True, -1, 0, 1.5, math.nan, math.inf, -math.inf, 10**30, 1e308, "", "x", "auto", "a" * 3000, (), (1, 2), [1],
    {"a": 1}, object(), b"x", np.float64(-1), np.array([1.0]), torch.ones(2), 1j, "__import__('os')", "\x00",
]  # fmt: skip
ALLOWED = (sa.InputError, ResourceError)  # some values ask for more memory than there is


def refused(call):
    """Whether the call is refused, in one line; any other error is a failure of the test."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except ALLOWED as error:
        assert "\n" not in str(error), error
        return True
    return False


@contextmanager
def at_most(seconds):
    """Raise TimeoutError if the context takes more than these seconds."""

    def interrupt(*_):
        raise TimeoutError

    handler = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def test_every_setting_accepts_or_refuses_every_value():
    tried = refusals = 0
    for key in TYPES:
        for value in BAD:
            tried += 1
            refusals += refused(lambda key=key, value=value: Experiment(**{key: value}))
            refusals += refused(lambda key=key, value=value: Experiment().with_(**{key: value}))
    print(f"\nsettings: {2 * tried} values, {refusals} refused in one line, no other error")


@pytest.mark.parametrize("field", [field for field in COMPONENT_SETTINGS if field != "data"])
def test_every_argument_of_every_component_accepts_or_refuses_every_value(field):
    tried = refusals = 0
    examples = {text.partition("(")[0]: text for text in EXAMPLES[registry(field).plural]}
    for entry in list(registry(field)):
        call = registry(field).one(examples[entry.name])
        for parameter in inspect.signature(entry.factory).parameters:
            for value in BAD:
                tried += 1
                refusals += refused(lambda call=call, parameter=parameter, value=value: call.with_(parameter, value)())
                key = f"{field}.{parameter}"
                base = Experiment(**{field: examples[entry.name]})
                refusals += refused(lambda base=base, key=key, value=value: base.with_(**{key: value}))
    print(f"\n{field}: {2 * tried} values, {refusals} refused in one line, no other error")


def test_numpy_numbers_are_numbers():
    e = Experiment().with_(**{"noise.tau": np.float64(0.5), "clients": np.int64(7), "lr": np.float32(0.5)})
    assert (e.noise, e.clients, e.lr) == ("sas(alpha=1.5, tau=0.5)", 7, 0.5)


TINY = Experiment(
    data="synthetic(samples=60, classes=3, shape=(1, 2, 2))", model="mlp(width=4)", clients=5, rounds=1, device="cpu",
    local_epochs=1,
)  # fmt: skip
MODULES = nn, stable, streams, theory, models


def public():
    """The public functions by their names, and the public methods of Experiment and Run."""
    for name in sa.__all__:
        if inspect.isfunction(found := getattr(sa, name)):
            yield name, found
    for module in MODULES:
        names = [name for name, member in vars(module).items() if getattr(member, "__module__", "") == module.__name__]
        for name in names:
            if (
                callable(function := getattr(module, name))
                and not inspect.isclass(function)
                and not name.startswith("_")
            ):
                yield f"{module.__name__.partition('.')[2]}.{name}", function
    for thing in (TINY, sa.run(TINY)):
        for name, _ in inspect.getmembers(type(thing), callable):
            if not name.startswith("_") or name == "__getitem__":
                yield f"{type(thing).__name__}.{name}", getattr(thing, name)


PUBLIC = dict(public())
EXPENSIVE = {"figure", "sweep", "search", "report", "compare"}  # each parameter gets a third of the values


@pytest.fixture(scope="module")
def valid_values(tmp_path_factory):
    """A valid value, fast to compute with, for each parameter of a public function, by name."""
    folder = sa.run(TINY, tmp_path_factory.mktemp("valid") / "run").folder
    sim, vector = sa.build(TINY), torch.tensor([0.2, 0.4, 0.1, 0.9], dtype=torch.float64)
    (plugin := folder.parent / "mine.py").write_text("")
    (written := folder.parent / "e.toml").write_text("rounds = 3\n")
    return {
        "alpha": 1.5, "tau": 0.1, "C": 1.0, "K": 1.0, "q": 0.9, "step": 1.0, "max_norm": 1.0, "G": 0.1, "L": 1.0,
        "eta": 0.1, "d": 10, "rounds": 1, "u": vector, "v": vector, "x": vector, "p": vector, "g": vector,
        "bits": torch.arange(4), "shape": (2, 3), "source": streams.generator(0, "a", 0), "device": "cpu", "n": 11,
        "sources": [streams.generator(0, "a", 0)], "seed": 0, "stream": "a", "index": 0, "rule": sa.mac(1.0),
        "rules": sa.mac(1.0), "layout": sim.layout, "parameters": [torch.nn.Parameter(vector)], "sim": sim,
        "state": sim.start, "experiment": TINY, "base": TINY, "spaces": {"receiver.C": "0.1:10:log"}, "folder": "new",
        "trials": 1, "resume": False, "runs": folder,
        "metadata": sa.RunMetadata(TINY, environment(torch.device("cpu"))),
        "name": "fig3c", "path": plugin, "metric": "test/loss", "out": "out.png", "text": "",
        "resource": "energy", "budget": 1e9,
        "record": TINY.to_record(), "settings": {}, "setting": "noise", "load.folder": folder, "recorded.rounds": [],
        "Experiment.read.path": written, "Experiment.from_json.text": "{}", "report.out": "out.html",
        "watch.folders": [folder], "watch.port": 0, "export.out": "out.csv",
        "figure.out": "figures", "plan": [TINY],
        "fill": lambda piece, start, source: piece.zero_(), "streams.in_pieces.out": vector, "each": 2,
        "uniforms": vector.view(2, 2),
        "compare.plan": {**TINY.to_dict(), "receiver": ["mac(C=1)", "none()"], "seeds": 1},
        "figure.settings": {key: value for key, value in TINY.to_dict().items() if key not in ("receiver", "evaluate")},
        "figure.thresholds": {"MAC": 1.0, "GNC": 1.0}, "search.folder": "search",
    }  # fmt: skip


def with_value(function, arguments, parameter, value):
    """Call a function with this value for one parameter; a generator is advanced three times."""
    if parameter.kind == parameter.VAR_POSITIONAL:
        out = function(*arguments.values(), value)
    else:
        out = function(
            **arguments | ({"x": value} if parameter.kind == parameter.VAR_KEYWORD else {parameter.name: value})
        )
    if inspect.isgenerator(out):
        list(itertools.islice(out, 3))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_function_accepts_or_refuses_every_value(name, valid_values, monkeypatch, tmp_path, registries):
    function, refusals, tried, failures = PUBLIC[name], 0, 0, []
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **_: file.write(b"a picture"))  # the slowest step
    monkeypatch.setitem(PRESETS, "demo", TINY.to_dict())
    monkeypatch.setattr(demo, "TUNING_ROUNDS", 1)
    parameters = inspect.signature(function).parameters.values()
    needed = [one.name for one in parameters if one.default is one.empty and one.kind == one.POSITIONAL_OR_KEYWORD]
    specific = {
        one.name: valid_values[f"{name}.{one.name}"] for one in parameters if f"{name}.{one.name}" in valid_values
    }
    arguments = {one: valid_values[one] for one in needed if one not in specific} | specific  # add new parameters to it
    for number, parameter in enumerate(parameters):
        for value in BAD[number % 3 :: 3] if name in EXPENSIVE else BAD:
            (folder := tmp_path / f"{tried}").mkdir()
            monkeypatch.chdir(folder)
            tried += 1
            try:
                with at_most(seconds=10):
                    refusals += refused(lambda p=parameter, v=value: with_value(function, arguments, p, v))
            except BaseException as error:
                failures.append((parameter.name, str(value)[:40], type(error).__name__, str(error)[:100]))
    print(f"\n{name}: {tried} values, {refusals} refused in one line, {len(failures)} failures")
    assert not failures, "\n".join(map(str, failures))


def test_every_kind_is_tried():
    assert {registry(field).plural for field in COMPONENT_SETTINGS | NESTED_COMPONENTS} == set(REGISTRIES) & set(
        EXAMPLES
    )
