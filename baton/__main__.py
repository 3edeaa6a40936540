"""`python -m baton`: the command line."""

from __future__ import annotations

from baton.cli import main

if __name__ == "__main__":
    main()
