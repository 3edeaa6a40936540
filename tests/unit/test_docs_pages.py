"""The pages under docs/ that are drawn from code say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import make_pages
from docs.config_page import config_page
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


def test_every_key_of_every_file_has_its_meaning() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|.*\| (.*) \|$", config_page(), re.MULTILINE)
    assert len(rows) > 100
    assert [key for key, meaning in rows if not meaning.strip()] == []
    for key in ("engine.executor.world.launcher", "engine.health.stall_ms", "frontends"):
        assert key in dict(rows)


def test_the_page_of_faults_names_tests_that_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (DOCS / "faults.md").read_text())
    assert len(named) > 12
    for file, test in named:
        text = (DOCS.parent / file).read_text()
        assert not test or re.search(rf"^(async )?def {test}\(", text, re.MULTILINE), (file, test)


def test_the_page_of_faults_lists_every_planted_bug() -> None:
    text = (DOCS.parent / "tests/property/test_executor_planted.py").read_text()
    planted = re.findall(r"^@plant\ndef (\w+)", text, re.MULTILINE)
    assert len(planted) > 20
    page = (DOCS / "faults.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(planted)
