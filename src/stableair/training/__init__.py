"""The clients' local training: batch order, augmentation, and the reference trainer."""

from stableair.training.local_training import LocalTraining, Trainer, payload_scale
from stableair.training.reference import Reference

__all__ = ["LocalTraining", "Reference", "Trainer", "payload_scale"]
