"""The fast engine: `accelerate` returns an equal simulation with a faster trainer.

Only `execution.py` and `bench.py` import this package. `selection.py` chooses the engine, `equivalence.py` verifies
that it computes the same as the reference.
"""

from stableair.engine.selection import ENGINES, EngineChoice, accelerate, choose, reference_trainer
from stableair.engine.stacked import Unsupported, stacked_layer

__all__ = ["ENGINES", "EngineChoice", "Unsupported", "accelerate", "choose", "reference_trainer", "stacked_layer"]
