"""The fast engine: `accelerate` returns an equal simulation with a faster trainer.

Only `runner.py` imports this package. `selection.py` chooses the engine, `equivalence.py` shows that it computes what
the reference computes.
"""

from stableair.engine.selection import ENGINES, EngineChoice, accelerate, choose, reference_trainer
from stableair.engine.stacked import Unsupported, stacked_layer

__all__ = ["ENGINES", "EngineChoice", "Unsupported", "accelerate", "choose", "reference_trainer", "stacked_layer"]
