from pathlib import Path

import numpy as np
import pytest

from stableair.errors import InputError
from stableair.validation import as_path, typed


@typed
def example(n: int, x: float = 1.0, name: str | Path | None = None, *more: int, log: bool = False) -> tuple:
    return n, x, name, more, log


def test_arguments_of_another_type_are_refused():
    assert example(1, 2, "a", 3, 4, log=True) == (1, 2, "a", (3, 4), True)
    assert example(np.int64(1), np.float32(2))[0] == 1
    for args in ((1.0,), (True,), ("1",), (1, "x"), (1, 1, 5), (1, 1, None, "x"), (None,)):
        with pytest.raises(InputError) as error:
            example(*args)
        assert error.value.code == "wrong-type"
    with pytest.raises(InputError) as error:
        example(1, log=1)
    assert (error.value.code, error.value.fields["name"]) == ("wrong-type", "log")
    with pytest.raises(TypeError):
        example()


@pytest.mark.parametrize("wrong", ["", " ", "a\0b", None, 3, "a" * 256, "a/" * 3000, "\ud800", b"x"])
def test_objects_other_than_paths_are_refused(wrong):
    with pytest.raises(InputError) as error:
        as_path("folder", wrong)
    assert error.value.code in ("wrong-type", "path-too-long")


def test_a_path_is_used_unchanged():
    assert as_path("folder", "a/b") == as_path("folder", Path("a/b")) == Path("a/b")
    assert as_path("folder", "a" * 255) == Path("a" * 255)
