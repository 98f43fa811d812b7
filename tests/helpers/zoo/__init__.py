"""Small models of many kinds, for inputs (m, 1, 4, 4) and 3 classes: name -> function that makes the module."""

from helpers.zoo import impure, pure  # noqa: F401 (their functions are entered into the tables)
from helpers.zoo.parts import IMPURE, PURE

ZOO = PURE | IMPURE
NOT_REPEATABLE = {  # their Python state is not in checkpoints and differs between ranks
    "counter_in_a_closure",
    "counter_in_a_dict",
    "counter_in_a_submodule",
    "counter_in_the_class",
    "entropy_of_the_system",
    "gradients_switched_in_forward",
    "late_switch",
    "private_numpy_generator",
    "private_python_generator",
    "private_torch_generator",
    "queue_of_activations",
    "warm_up_counter",
}
REPEATABLE = sorted(ZOO.keys() - NOT_REPEATABLE)
