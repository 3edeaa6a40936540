"""The fleet, the policies and admission: pure, so tested as plain values."""

from __future__ import annotations

import msgspec
import pytest

from protos.errors import DuplicateRequestError, OverloadedError, ServerUnavailableError
from protos.messages import KvLayout, Load, ModelInfo, ModelLimits, ServerInfo
from router.admission import Admission
from router.fleet import Fleet
from router.identity import RouterIdentity
from router.policies import Candidate, LeastLoaded, RoundRobin, create_policy
from router.servers import Role, incompatibilities

LAYOUT = KvLayout(
    dtype="float32",
    num_layers=1,
    num_kv_heads=1,
    head_dim=2,
    tokens_per_block=4,
    model_fingerprint="m",
)


def info(role: str, **changes: object) -> ServerInfo:
    base = ServerInfo(
        name=f"the {role} one",
        role=role,
        incarnation=1,
        version="1",
        model="m",
        layout=LAYOUT,
        transport="ucx",
        state="ready",
    )
    return msgspec.structs.replace(base, **changes)


def model(name: str = "m", prompt: int = 100, total: int = 120, vocab: int = 50) -> ModelInfo:
    limits = ModelLimits(
        model=name, vocab_size=vocab, max_prompt_tokens=prompt, max_total_tokens=total
    )
    return ModelInfo(limits=limits, dtype="float32", num_parameters=1, architecture="x")


def fleet(num_context: int = 1, num_generation: int = 2, *, needs_pairs: bool = True) -> Fleet:
    made = Fleet(
        [f"c{i}" for i in range(num_context)],
        [f"g{i}" for i in range(num_generation)],
        context_policy=create_policy("round_robin"),
        generation_policy=create_policy("least_loaded"),
        needs_pairs=needs_pairs,
    )
    for server in made.servers:
        made.observe(server.address, info(server.role.value), model())
    return made


def test_load_is_what_is_open_and_nothing_else() -> None:
    """Guards reservations: exact while open, zero at the end, though a server dies meanwhile."""
    made = fleet()
    first = made.select(Role.GENERATION, 10, partner="c0")
    second = made.select(Role.GENERATION, 5, partner="c0")
    third = made.select(Role.GENERATION, 5, partner="c0")
    assert [r.address for r in (first, second, third)] == ["g0", "g1", "g1"]
    assert made.server("g1").reserved_tokens == 10
    made.server_down("g1", "gone")
    made.check()
    for reservation in (second, first, third):
        made.release(reservation)
        made.check()
    assert [s.reserved_tokens for s in made.servers] == [0, 0, 0]
    with pytest.raises(AssertionError, match="released twice"):
        made.release(first)


def test_limits_are_the_least_of_every_pair() -> None:
    """Guards a prompt that one role takes and the other refuses."""
    made = fleet()
    made.observe("c0", info("context"), model(prompt=80, total=200))
    made.observe("g1", info("generation"), model(prompt=90, total=110, vocab=49))
    limits = made.limits()
    assert (limits.max_prompt_tokens, limits.max_total_tokens, limits.vocab_size) == (80, 110, 49)
    made.server_down("g1", "gone")
    assert made.limits().max_total_tokens == 120, "who is down limits nobody"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"transport": "inproc"}, "transport 'ucx' against 'inproc'"),
        ({"model": "n"}, "model 'm' against 'n'"),
        ({"layout": None}, "no KV layout"),
        (
            {"layout": msgspec.structs.replace(LAYOUT, model_fingerprint="n")},
            "model_fingerprint 'm' against 'n'",
        ),
        ({"layout": msgspec.structs.replace(LAYOUT, tp_size=2)}, "tp_size 1 against 2"),
    ],
)
def test_a_pair_that_does_not_fit_is_named_and_never_chosen(
    changes: dict[str, object], part: str
) -> None:
    """Guards KV that the other side would read as something else."""
    odd = info("generation", **changes)
    assert any(part in one for one in incompatibilities(info("context"), odd))
    made = fleet()
    made.observe("g0", odd, model())
    assert made.select(Role.GENERATION, 1, partner="c0").address == "g1"
    made.server_down("g1", "gone")
    with pytest.raises(ServerUnavailableError, match="cannot pair") as caught:
        made.limits()
    assert part in str(caught.value)
    made.check()


def test_a_router_that_lost_its_servers_is_not_starting() -> None:
    """Bug: a router whose only server had died after hours of service said `starting`."""
    router = RouterIdentity("r")
    assert router.info(fleet(num_generation=0), ()).state == "starting"
    made = fleet(num_generation=1)
    assert router.info(made, ()).state == "ready"
    made.server_down("g0", "connection refused")
    lost = router.info(made, ())
    assert lost.state == "unavailable"
    assert "connection refused" in lost.detail


def test_no_server_of_a_role_is_told_with_each_reason() -> None:
    """Guards the refusal's message."""
    made = fleet()
    made.server_down("g0", "connection refused")
    made.observe("g1", info("generation", state="starting", detail="loading"), None)
    with pytest.raises(ServerUnavailableError) as caught:
        made.limits()
    assert "no generation server" in str(caught.value)
    assert "the generation one (g0): connection refused" in str(caught.value)
    assert "(g1): starting: loading" in str(caught.value)
    made = fleet(needs_pairs=False)
    made.server_down("c0", "gone")
    assert made.limits().model == "m", "nobody needs a context server here"


def test_one_router_serves_one_model() -> None:
    """Guards against a request for one model that lands on another's pair."""
    made = fleet(num_context=2, num_generation=2)
    made.observe("c1", info("context", model="n"), model("n"))
    made.observe("g1", info("generation", model="n"), model("n"))
    assert {made.select(Role.CONTEXT, 1).address for _ in range(4)} == {"c0"}
    assert made.limits().model == "m"


def test_an_old_load_report_is_dropped() -> None:
    """Guards against reports that overtake each other."""
    made = fleet()
    made.report_load("g0", Load(num_running=3, sequence=5))
    made.report_load("g0", Load(num_running=1, sequence=4))
    assert made.server("g0").load.num_running == 3


def candidates(*loads: int) -> list[Candidate]:
    return [Candidate(arrival, load, 0) for arrival, load in enumerate(loads)]


def test_least_loaded_breaks_ties_by_arrival() -> None:
    """Guards determinism."""
    policy = LeastLoaded()
    assert policy.choose(candidates(4, 2, 2)) == 1
    assert policy.choose([Candidate(0, 2, 5), Candidate(1, 2, 1)]) == 1
    assert policy.choose(candidates(0, 0, 0)) == 0


def test_round_robin_goes_on_when_servers_come_and_go() -> None:
    """Guards against a position that shifts: the next one by arrival is next."""
    policy = RoundRobin()
    all_three = candidates(0, 0, 0)
    assert [policy.choose(all_three) for _ in range(4)] == [0, 1, 2, 0]
    without_second = [all_three[0], all_three[2]]
    assert policy.choose(without_second) == 1
    assert policy.choose(all_three) == 0


def test_admission_bounds_and_names() -> None:
    """Guards the bound, unique live ids, and minted ids that a client chose before."""
    admission = Admission(2, "r")
    assert admission.admit("r-1") == "r-1"
    with pytest.raises(DuplicateRequestError, match="'r-1'"):
        admission.admit("r-1")
    assert admission.admit("") == "r-2"
    with pytest.raises(OverloadedError, match="max_in_flight 2"):
        admission.admit("")
    admission.leave("r-1")
    assert admission.admit("r-1") == "r-1"
    admission.check()
    admission.close("closing")
    with pytest.raises(ServerUnavailableError, match="closing"):
        admission.admit("new")
