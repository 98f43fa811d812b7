"""Literal types shared by experiment settings and the modules that implement them.

This module does not import torch: the command line reads the types before torch is loaded.
"""

from typing import Literal

Blocks = Literal["tensor", "layer", "model"]
NormStats = Literal["clients", "recalibrated", "batch"]
PluginChange = Literal["refuse", "keep", "recompute"]  # of results whose plug-in has changed
Precision = Literal["fp32", "tf32", "bf16"]
