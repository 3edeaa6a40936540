"""`python -m generation_server --config FILE`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from generation_server.config import GenerationServerConfig
from generation_server.service import GenerationRole
from serving.run import main as run_server


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 stopped as asked, 2 cannot start, 70 the engine died."""
    return run_server(GenerationRole, GenerationServerConfig, "generation_server", argv)


if __name__ == "__main__":
    sys.exit(main())
