"""The process that owns a world and shares it: the world's end is the broker's business too.

The owner's executor is an ordinary one, with a lane of its own: it watches the engine's progress,
gives it up where it stands still, and ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from executor.attach.broker import Broker
from executor.config import EngineConfig
from executor.forms import choose_form
from executor.limits import ExecutorLimits
from executor.link import LinkUser
from executor.owned_link import OwnedLink
from executor.proxy import Proxy
from protos.errors import ConfigError, EngineDeadError

logger = logging.getLogger(__name__)


async def share_engine(
    config: EngineConfig,
    broker: Broker,
    *,
    name: str,
    limits: ExecutorLimits,
    progress: Callable[[str], None],
) -> Proxy:
    """Start the engine; once it is ready the broker lets frontends in, until the engine ends.

    Raises ConfigError or EngineDeadError; nothing is left of it then.
    """
    executor = msgspec.structs.replace(config.executor, postprocess_workers=0)
    config = msgspec.structs.replace(config, executor=executor)
    choice = choose_form(config)
    logger.info("executor of %s: %s, because %s", name, choice.what, choice.why)
    links: list[OwnedLink] = []

    def make_link(user: LinkUser) -> OwnedLink:
        assert choice.make_link is not None
        link = choice.make_link(config, name=name, limits=limits, user=user)
        if not isinstance(link, OwnedLink):
            raise ConfigError(
                f"executor.form is {link.form}, whose engine cannot be shared; use ipc",
                field="executor.form",
                value=link.form,
                limit="ipc or ray",
            )
        links.append(link)
        return link

    proxy = Proxy(make_link, tokenizer=None, limits=limits)
    await proxy.start(progress)
    (link,) = links
    link.on_other_lane_closed = lambda frontend_id, _why: broker.lane_closed(frontend_id)
    broker.serve(link.world)
    link.dead.add_done_callback(lambda dead: broker.world_ended(_cause(dead)))
    return proxy


def _cause(dead: asyncio.Future[EngineDeadError]) -> str:
    """Without who it was: every frontend says that in its own words."""
    head, mark, cause = dead.result().message.partition(" is dead: ")
    return cause if mark else head
