"""The Ray form's link: this process owns the world, whose ranks are children of Ray actors.

All but the launcher is the IPC form's; status socket, leader socket and lane are on tcp, with
CURVE, since a rank may be on another host. `executor/world/ray_launcher.py` says how a death
is seen, and how soon.
"""

from __future__ import annotations

import logging

from executor.config import EngineConfig
from executor.owned_link import OwnedLink
from executor.world.launch import Launcher
from executor.world.ray_launcher import RayLauncher

logger = logging.getLogger(__name__)


class RayLink(OwnedLink):
    form = "ray"

    def make_launcher(self, config: EngineConfig) -> Launcher:
        num_ranks = config.executor.world.num_ranks
        logger.info(
            "world of %s: %d rank(s) by launcher ray, because executor.form is ray",
            self.name,
            num_ranks,
        )
        return RayLauncher(config, name=self.name, limits=self.limits)
