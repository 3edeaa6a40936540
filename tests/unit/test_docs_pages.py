"""The pages under docs/ that are drawn from code say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import make_pages
from executor import ledger
from executor.ledger import Event, State

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", make_pages.PAGES)
def test_the_page_is_what_the_code_draws(name: str) -> None:
    """Run `scripts/docs` where this fails, and commit."""
    assert (DOCS / name).read_text() == make_pages.PAGES[name]()


def test_a_change_of_the_table_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a drift test that cannot fail."""
    before = make_pages.ledger_page()
    monkeypatch.setitem(ledger.TABLE, (State.REGISTERED, Event.FINISH), State.FINISHED)
    assert make_pages.ledger_page() != before
