"""How one server of several is chosen: pure, deterministic, one small file each."""

from __future__ import annotations

from typing import Literal, assert_never

from router.policies.base import Candidate, Policy
from router.policies.least_loaded import LeastLoaded
from router.policies.round_robin import RoundRobin


def create_policy(name: Literal["round_robin", "least_loaded"]) -> Policy:
    match name:
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case _:
            assert_never(name)


__all__ = ["Candidate", "LeastLoaded", "Policy", "RoundRobin", "create_policy"]
