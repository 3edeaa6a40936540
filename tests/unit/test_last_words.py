"""An error that ended an engine says so, whatever its kind."""

from __future__ import annotations

import pytest

from executor.last_words import last_words
from protos.errors import OverloadedError, Severity, from_data


@pytest.mark.parametrize("error", [OverloadedError("full"), KeyError("x"), SystemExit(3)])
def test_what_left_the_loop_is_of_the_engine(error: BaseException) -> None:
    """Guards: a request's error that escaped the loop, told as if one request had ended."""
    words = last_words(error)
    assert words.severity is Severity.ENGINE
    assert from_data(words).severity is Severity.ENGINE
    assert str(error) in words.message
