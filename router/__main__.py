"""`python -m router --config FILE`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from common.config import load_config
from common.process import (
    EXIT_CONFIG,
    EXIT_ENGINE_DEAD,
    die_with_parent,
    parse_options,
)
from protos.errors import BatonError, ConfigError
from router.config import RouterConfig
from router.run import run_router


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 stopped as asked, 2 cannot start, 70 a defect of ours."""
    options = parse_options("router", "The router of a Baton cluster.", argv)
    try:
        if options.die_with_parent:
            die_with_parent()
        config = load_config(options.config, RouterConfig)
        return asyncio.run(run_router(config, options))
    except ConfigError as error:
        sys.stderr.write(f"router: {error.message}\n")
        return EXIT_CONFIG
    except BatonError as error:
        sys.stderr.write(f"router: {error.message}\n")
        return EXIT_ENGINE_DEAD


if __name__ == "__main__":
    sys.exit(main())
