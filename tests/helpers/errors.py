"""Errors by their code."""

import pytest

import stableair as sa


def refused(code, call, *args, **kwargs):
    """The error that a call raises, which must have this code and be one line."""
    with pytest.raises(sa.InputError) as caught:
        call(*args, **kwargs)
    assert (caught.value.code, "\n" in str(caught.value)) == (code, False), caught.value
    return caught.value
