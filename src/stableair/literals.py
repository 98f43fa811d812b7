"""Literal types shared by experiment settings and the modules that implement them.

This module does not import torch: the command line reads the types before torch is loaded.
"""

from typing import Literal

Band = Literal["std", "sem", "ci95"]  # standard deviation, standard error, 95 % confidence interval
Blocks = Literal["tensor", "layer", "model"]
NormStats = Literal["clients", "recalibrated", "batch"]
PluginChange = Literal["refuse", "keep", "recompute"]  # of results whose plug-in has changed
PlotStyle = Literal["screen", "paper", "dark"]
Precision = Literal["fp32", "tf32", "bf16"]
TableRow = Literal["run", "round"]  # the content of a row of a table
