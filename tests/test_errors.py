"""Errors keep their advice separate from their message."""

from stableair.errors import InputError


def test_new_message_keeps_the_advice_once():
    error = InputError("x is wrong", code="wrong", advice="use y")
    for text in (f"file: {error}", f"file: {error.message}"):
        copy = error.with_message(text)
        assert (copy.message, str(copy)) == ("file: x is wrong", "file: x is wrong; use y")
        assert copy.code == "wrong"


def test_new_message_without_advice():
    copy = InputError("x is wrong").with_message("y: x is wrong")
    assert (copy.message, str(copy)) == ("y: x is wrong", "y: x is wrong")
