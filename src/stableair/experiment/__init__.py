"""Experiments: the immutable value, its presets, its records and the words of the command line."""

from stableair.experiment.experiment import SETTING_FIELDS, Experiment, allowed_values
from stableair.experiment.overrides import from_words, last_of_each, parse_overrides
from stableair.experiment.presets import IDEAL, PRESETS, preset
from stableair.experiment.records import ARGUMENTS, components_of_record, settings_of_record
from stableair.experiment.settings import (
    COMPONENT_SETTINGS,
    EXECUTION,
    NESTED_COMPONENTS,
    TYPES,
    check_known,
    dotted_keys,
    registry,
    takes_argument,
)

__all__ = [
    "ARGUMENTS",
    "COMPONENT_SETTINGS",
    "EXECUTION",
    "IDEAL",
    "NESTED_COMPONENTS",
    "PRESETS",
    "SETTING_FIELDS",
    "TYPES",
    "Experiment",
    "allowed_values",
    "check_known",
    "components_of_record",
    "dotted_keys",
    "from_words",
    "last_of_each",
    "parse_overrides",
    "preset",
    "registry",
    "settings_of_record",
    "takes_argument",
]  # fmt: skip
