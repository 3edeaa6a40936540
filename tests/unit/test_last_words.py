"""An error that ended an engine says so, whatever its kind."""

from __future__ import annotations

import sys

import pytest

from executor.last_words import last_words
from protos.errors import OverloadedError, Severity, describe, from_data


@pytest.mark.parametrize("error", [OverloadedError("full"), KeyError("x"), SystemExit(3)])
def test_what_left_the_loop_is_of_the_engine(error: BaseException) -> None:
    """Guards: a request's error that escaped the loop, told as if one request had ended."""
    words = last_words(error)
    assert words.severity is Severity.ENGINE
    assert from_data(words).severity is Severity.ENGINE
    assert str(error) in words.message


def test_an_exception_that_cannot_be_printed_is_told_by_its_type() -> None:
    """Bug: a logits processor's exception whose `__str__` raised, put into the message of its own
    request's failure, ended the engine and everyone's requests."""

    class OddError(Exception):
        def __str__(self) -> str:
            sys.exit(4)

    assert last_words(OddError()).message == describe(OddError()) == "OddError"
    assert describe(KeyError()) == "KeyError"
    assert describe(ValueError("x")) == "ValueError: x"
    assert len(describe(ValueError("x" * 100_000))) < 5_000
