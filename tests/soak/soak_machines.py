"""The property machines of the executor, not derandomized: longer lives, ever new ones."""

from __future__ import annotations

import logging
import random
from typing import Any

import hypothesis
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.property.test_broker_machine import BrokerMachine
from tests.property.test_executor_faults import ExecutorMachine
from tests.property.test_ledger_machine import LedgerMachine
from tests.property.test_post_machine import PostMachine
from tests.property.test_world_machine import WorldMachine
from tests.support.fault_plays import PLAYS

MACHINES: dict[str, tuple[type[RuleBasedStateMachine], int, int]] = {
    "executor": (ExecutorMachine, 15, 50),
    "ledger": (LedgerMachine, 60, 80),
    "post": (PostMachine, 60, 90),
    "world": (WorldMachine, 120, 60),
    "broker": (BrokerMachine, 60, 80),
}
"""Each with its examples, and the steps of one, so that a round takes a few seconds."""


def run_machine(name: str, seed: int) -> None:
    """One round. Raises what the machine found; its note has the shortest steps to it."""
    base, num_examples, num_steps = MACHINES[name]
    more: dict[str, Any] = {}
    if base is ExecutorMachine:
        more["play"] = random.Random(seed).choice(list(PLAYS))
    machine = hypothesis.seed(seed)(type(base.__name__, (base,), more))
    chosen = settings(
        max_examples=num_examples,
        stateful_step_count=num_steps,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    logging.disable(logging.CRITICAL)  # every planted death is logged as an error
    try:
        run_state_machine_as_test(machine, settings=chosen)
    finally:
        logging.disable(logging.NOTSET)
