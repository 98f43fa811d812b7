"""A callback made of functions."""

from stableair import Callback


class Hooks(Callback):
    """Call functions: start(engine), round(row), end(experiment, outcome)."""

    def __init__(self, start=lambda engine: None, round=lambda row: None, end=lambda experiment, outcome: None):
        self.on_start, self.on_round, self.on_end = start, round, end

    def start(self, experiment, engine):
        self.on_start(engine)

    def round(self, experiment, row):
        self.on_round(row)

    def end(self, experiment, outcome):
        self.on_end(experiment, outcome)
