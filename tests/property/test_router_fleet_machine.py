"""Fleet, policies and admission against plain models: any history, load is what is open."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protos.errors import DuplicateRequestError, OverloadedError, ServerUnavailableError
from protos.messages import KvLayout, ModelInfo, ModelLimits, ServerInfo
from router.admission import Admission
from router.fleet import Fleet
from router.policies import Candidate, create_policy
from router.servers import Reservation, Role

CONTEXT, GENERATION = ("c0", "c1"), ("g0", "g1", "g2")
LAYOUT = KvLayout(
    dtype="float32",
    num_layers=1,
    num_kv_heads=1,
    head_dim=2,
    tokens_per_block=4,
    model_fingerprint="m",
)
MODEL = ModelInfo(
    limits=ModelLimits(model="m", vocab_size=9, max_prompt_tokens=9, max_total_tokens=9),
    dtype="float32",
    num_parameters=1,
    architecture="x",
)
INFO = ServerInfo(
    name="one", role="", incarnation=1, version="1", model="m", layout=LAYOUT, state="ready"
)
ADDRESSES = st.sampled_from((*CONTEXT, *GENERATION))


def role_of(address: str) -> Role:
    return Role.CONTEXT if address in CONTEXT else Role.GENERATION


class FleetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(
            CONTEXT,
            GENERATION,
            context_policy=create_policy("round_robin"),
            generation_policy=create_policy("least_loaded"),
            needs_pairs=True,
        )
        self.up: dict[str, None] = {}
        self.open: list[Reservation] = []

    @rule(address=ADDRESSES, state=st.sampled_from(["ready", "starting", "stalled", "asleep"]))
    def observe(self, address: str, state: str) -> None:
        info = msgspec.structs.replace(INFO, role=role_of(address).value, state=state)
        is_up = self.fleet.observe(address, info, MODEL if state == "ready" else None)
        assert is_up == (state == "ready")
        self.up.pop(address, None)
        if is_up:
            self.up[address] = None

    @rule(address=ADDRESSES)
    def down(self, address: str) -> None:
        self.fleet.server_down(address, "gone")
        self.up.pop(address, None)

    @rule(role=st.sampled_from(list(Role)), tokens=st.integers(1, 100))
    def select(self, role: Role, tokens: int) -> None:
        roles_up = {role_of(address) for address in self.up}
        if len(roles_up) < 2:
            with pytest.raises(ServerUnavailableError):
                self.fleet.select(role, tokens)
            return
        reservation = self.fleet.select(role, tokens)
        assert reservation.address in self.up
        assert role_of(reservation.address) is role
        if role is Role.GENERATION:  # least loaded, ties by place
            loads = {a: self.load_of(a) for a in GENERATION if a in self.up}
            assert loads[reservation.address] == min(loads.values())
        self.open.append(reservation)

    @rule(choice=st.randoms(use_true_random=False))
    def release(self, choice: object) -> None:
        if self.open:
            index = choice.randrange(len(self.open))  # type: ignore[attr-defined]
            self.fleet.release(self.open.pop(index))

    def load_of(self, address: str) -> int:
        return sum(one.tokens for one in self.open if one.address == address)

    @invariant()
    def load_is_what_is_open(self) -> None:
        self.fleet.check()
        for server in self.fleet.servers:
            assert server.reserved_tokens == self.load_of(server.address)
        assert self.fleet.is_usable == (len({role_of(a) for a in self.up}) == 2)

    def teardown(self) -> None:
        for reservation in self.open:
            self.fleet.release(reservation)
        assert not any(s.reserved_tokens or s.num_reserved for s in self.fleet.servers)


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.integers(1, 6), st.integers(1, 40))
def test_round_robin_gives_everyone_the_same(num_servers: int, num_requests: int) -> None:
    policy = create_policy("round_robin")
    candidates = [Candidate(arrival, 0, 0) for arrival in range(num_servers)]
    chosen = [policy.choose(candidates) for _ in range(num_requests)]
    counts = [chosen.count(index) for index in range(num_servers)]
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["", "a", "b", "c"])), max_size=40))
def test_admission_pairs_up_and_never_mints_twice(steps: list[tuple[bool, str]]) -> None:
    admission = Admission(3, "r")
    live: list[str] = []
    minted: list[str] = []
    for comes, name in steps:
        if not comes:
            if live:
                admission.leave(live.pop(0))
        elif len(live) == 3:
            with pytest.raises(OverloadedError):
                admission.admit(name)
        elif name in live:
            with pytest.raises(DuplicateRequestError):
                admission.admit(name)
        else:
            chosen = admission.admit(name)
            live.append(chosen)
            minted += [] if name else [chosen]
        admission.check()
        assert admission.num_in_flight == len(live)
    assert len(set(minted)) == len(minted)
