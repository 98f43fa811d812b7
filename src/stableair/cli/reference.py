"""The reference commands: list, theory, air."""

import inspect
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stableair.cli.options import Force, Plugin, load_plugins, out_option
from stableair.errors import InputError
from stableair.experiment import COMPONENT_SETTINGS, NESTED_COMPONENTS, PRESETS, SETTING_FIELDS, registry
from stableair.spec import Entry
from stableair.validation import choice, closest_match, positive, type_name

if TYPE_CHECKING:
    from stableair.paper.theorem import Check

PICTURES = "limit", "inversion", "bursts", "field", "markov", "block", "ar", "waveform", "antennas", "digital"
MAX_WIDTH = 70  # characters of a signature; after a longer signature, the description starts in the next line
# The component setting or nested component of each KIND of `stableair list`.
IRREGULAR = {"data": "data", "local": "local", "basis": "bases"}
KINDS = {IRREGULAR.get(kind, f"{kind}s"): kind for kind in COMPONENT_SETTINGS | NESTED_COMPONENTS}
PLURALS = {singular: plural for plural, singular in KINDS.items()} | {"preset": "presets", "setting": "settings"}

# The Args section of a Google-style docstring, and an argument in it with its description.
ARGS = re.compile(r"^Args:\n((?:[ ]{4}.*\n?)+)", re.MULTILINE)
ARGUMENT = re.compile(r"^[ ]{4}\**(\w+): (.*(?:\n[ ]{5,}.*)*)", re.MULTILINE)


def list_components(
    kind: Annotated[
        str | None,
        typer.Argument(
            help=f"{', '.join(KINDS)}, presets, settings, one setting such as rounds, one component such as mac, or "
            "one argument such as noise.tau (default: all)."
        ),
    ] = None,
    plugin: Plugin = None,
) -> None:
    """List components, presets and settings, each with its signature or type and a one-line description.

    The list of one kind of component also describes the arguments.
    """
    load_plugins(plugin)
    lists = [*KINDS, "presets", "settings"]
    if kind is None:
        for each in lists:
            print_rows(each, component_rows(each, arguments=False))
    elif (plural := PLURALS.get(kind, kind)) in lists:
        print_rows(plural, component_rows(plural))
    elif kind in SETTING_FIELDS:
        print(f"{typed_setting(kind)}\n  {describe_setting(kind)}")
    elif found := matching_components(kind):
        for plural, rows in found.items():
            print_rows(plural, rows)
    else:
        names = [*lists, *SETTING_FIELDS, *(entry.name for one in KINDS.values() for entry in registry(one))]
        text = f"{kind!r} is no kind, setting, component or argument; {closest_match(kind, names)}"
        raise InputError(f"{text}allowed kinds: {', '.join(lists)}", code="unknown-value", name="kind", value=kind)


def print_rows(title: str, rows: list[tuple[str, str]]) -> None:
    """Print a table with a title and two columns."""
    width = max((len(name) for name, _ in rows if len(name) <= MAX_WIDTH), default=0)
    print(title)
    for name, text in rows:
        space = "\n" + " " * (width + 4) if len(name) > MAX_WIDTH else "  "
        print(f"  {name:<{width}}{space}{text}".rstrip())


def matching_components(name: str) -> dict[str, list[tuple[str, str]]]:
    """Return the rows of the components with this name, such as "mac", or with an argument, such as "noise.tau".

    Args:
        name: The name of a component, or a dotted key.

    Returns:
        The two columns of `stableair list`, by the plural of the kind.
    """
    setting, _, argument = name.partition(".")
    found: dict[str, list[tuple[str, str]]] = {}
    for plural, singular in KINDS.items():
        for entry in registry(singular):
            arguments = describe_arguments(entry)
            if entry.name == name:
                found.setdefault(plural, []).append(_row(entry, arguments))
            elif singular == setting and argument in entry.parameters:
                found.setdefault(plural, []).append(_row(entry, {argument: arguments.get(argument, "")}))
    return found


def component_rows(kind: str, arguments: bool = True) -> list[tuple[str, str]]:
    """Return the two columns of `stableair list KIND`: name with signature, and description.

    Args:
        kind: Plural of a kind of component, "presets" or "settings".
        arguments: Whether to describe the arguments of each component.
    """
    if kind == "presets":
        return [(name, " ".join(f"{key}={v!r}" for key, v in settings.items())) for name, settings in PRESETS.items()]
    if kind == "settings":
        return [(typed_setting(name), describe_setting(name)) for name in SETTING_FIELDS]
    return [_row(entry, describe_arguments(entry) if arguments else {}) for entry in registry(KINDS[kind])]


def _row(entry: Entry, arguments: dict[str, str]) -> tuple[str, str]:
    """Return the signature of a component; and its summary, with a line for each of these arguments."""
    lines = [f"      {name}: {text}".rstrip() for name, text in arguments.items()]
    return entry.typed_signature, "\n".join([entry.summary, *lines])


def describe_arguments(entry: Entry) -> dict[str, str]:
    """Return the descriptions of a component's arguments by their names, from the Args section of its docstring."""
    section = ARGS.search(inspect.getdoc(entry.factory) or "")
    return {name: " ".join(text.split()) for name, text in ARGUMENT.findall(section[1])} if section else {}


def typed_setting(name: str) -> str:
    """Return a setting with its allowed values and its default: `payload: gradient | delta = gradient`."""
    field = SETTING_FIELDS[name]
    kind = type_name(field.type)
    if name in COMPONENT_SETTINGS:
        kind = "spec"
    elif restricted := field.metadata["allowed"]:
        kind = f"{kind}, {restricted.words}"
    return f"{name}: {kind} = {field.default}"


def describe_setting(name: str) -> str:
    """Return the description of a setting; for a component setting also the names of the components."""
    help = str(SETTING_FIELDS[name].metadata["help"])
    if name not in COMPONENT_SETTINGS:
        return help
    return f"{help} One of {', '.join(entry.name for entry in registry(name))}."


def theory(
    alpha: Annotated[float, typer.Option(help="Tail index of the interference, in [0.5, 2].")] = 1.5,
    tau: Annotated[float, typer.Option(help="Scale of the interference.")] = 0.1,
    C: Annotated[float, typer.Option("--C", help="Clipping threshold.")] = 1.0,
    eta: Annotated[float, typer.Option(help="Step size.")] = 0.03,
    L: Annotated[float, typer.Option("--L", help="Smoothness of the objective.")] = 10.0,
    G: Annotated[float, typer.Option("--G", help="Bound on every client's gradient norm.")] = 0.5,
    d: Annotated[int, typer.Option("--d", help="Entries of the gradient.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(help="Communication rounds K.")] = 100,
    gap: Annotated[float, typer.Option(help="f(w_0) - f(w*).")] = 1.0,
    check: Annotated[
        bool, typer.Option("--check", help="Compare Theorem 1 with a simulation (a few seconds).")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this file: .png, .pdf or .svg.")] = None,
    force: Force = False,
) -> None:
    """Evaluate Lemma 1, Theorem 1 and the best threshold, as printed in the paper and corrected.

    Example: `stableair theory --alpha 1.5 --tau 0.1 --C 1`.
    p_C is the probability that an entry stays unclipped.
    """
    positive("tau", tau)
    if plot:
        from stableair.results.plot import check_picture

        check_picture(plot, force)
    if check:
        from stableair.paper import theorem

        checks = [theorem.check(*case) for case in theorem.CHECKS]
        print_checks(checks)
    else:
        from stableair.theory import FORMS, ValueWithNotes, best_threshold, bound, unclipped

        best = best_threshold(alpha)
        lines = [(f"p_C {form}", unclipped(C, alpha, tau, G, form)) for form in FORMS]
        most = unclipped(C + math.sqrt(2) * G, alpha, tau).value  # between C -+ sqrt2 G it depends on the gradient
        lines.append(("p_C at most", ValueWithNotes(most, ("the exact form is a lower bound",))))
        lines += [(f"bound {form}", bound(rounds, C, alpha, tau, eta, L, G, d, gap, form)) for form in FORMS[:2]]
        for name, (value, notes) in lines:
            print(f"{name:<16} {value:<12.6g} {'; '.join(notes)}".rstrip())
        print(f"{'C* weak signal':<16} {best * tau:<12.6g} C*/tau = {best:.4g}")
    if plot:
        from stableair.paper import theory_plots
        from stableair.results.plot import save

        print(save(theory_plots.checks(checks) if check else theory_plots.overview(alpha, tau, C, G), plot, force))


def print_checks(checks: list["Check"]) -> None:
    """Print a table of the checks of Theorem 1."""
    print("Theorem 1 on pseudo-Huber losses with L = G = 1: mean over the rounds of |grad f(w_k)|^2,")
    print("and its ratio to each bound")
    print("alpha   tau     C    eta    measured            / printed   / corrected")
    for row in checks:
        verdict = "  exceeds the printed bound" if row.measured > row.printed else ""
        print(
            f"{row.alpha:<5g} {row.tau:>5g} {row.C:>5g} {row.eta:>6g}    {row.measured:.5f} +- {row.error:.5f}"
            f"   {row.measured / row.printed:>9.3f}   {row.measured / row.corrected:>11.3f}{verdict}"
        )


def air(
    name: Annotated[str, typer.Argument(help=f"{', '.join(PICTURES)}.")],
    out: Annotated[Path | None, out_option("Picture to write: .png, .pdf or .svg (default: NAME.png).")] = None,
    force: Force = False,
) -> None:
    """Draw an illustration of a channel component: power, interference, fading, signals.

    Example: `stableair air bursts`.
    """
    from stableair.paper import air_plots, signal_plots
    from stableair.results.plot import save

    pictures = air_plots.PICTURES | signal_plots.PICTURES
    print(save(pictures[choice("picture", name, pictures)](), out or Path(f"{name}.png"), force))
