"""What the worker's loop sends of a step: one message a lane, whatever it has to say."""

from __future__ import annotations

from typing import Any

from executor.engine.seam import EngineFinish, EngineOutput, EngineRequest
from executor.inbox import Inbox
from executor.ledger import COUNTER_BITS
from executor.messages import Outputs, Submit, ToProxy
from executor.worker import Worker
from protos.errors import InvalidRequestError
from protos.messages import FinishReason, RequestType, SamplingParams, Usage
from protos.tokens import pack_token_ids

REFUSED = 99
"""The prompt's first token of a request that the engine does not take."""
LANES = (1, 2)
EACH = 5
Said = tuple[int, ToProxy]


class Control:
    """Of an engine to which nobody listens."""

    is_asleep = False

    def listen(self, *, stats: bool, kv_events: bool) -> None: ...


class Engine:
    """Each step gives a token to every request, and ends it with its third."""

    def __init__(self) -> None:
        self.control = Control()
        self.progress = 0
        self.num_tokens: dict[int, int] = {}

    def submit(self, request: EngineRequest) -> None:
        if request.prompt_token_ids == pack_token_ids((REFUSED,)):
            raise InvalidRequestError("refused")
        self.num_tokens[request.request_id] = 0

    def has_work(self) -> bool:
        return True

    def step(self) -> list[EngineOutput]:
        """Of the lanes by turns, so that no lane's outputs stand together."""
        by_turns = sorted(self.num_tokens, key=lambda client_id: client_id % (1 << COUNTER_BITS))
        return [self._output(client_id) for client_id in by_turns]

    def _output(self, client_id: int) -> EngineOutput:
        self.num_tokens[client_id] += 1
        finish = None
        if self.num_tokens[client_id] == 3:
            del self.num_tokens[client_id]
            finish = EngineFinish(reason=FinishReason.LENGTH, usage=Usage(completion_tokens=3))
        return EngineOutput(request_id=client_id, token_ids=(7,), finish=finish)


class Answers:
    """Notes every message. Stands where `Lanes` stands."""

    num_bad_frames = num_unsaid = 0

    def __init__(self) -> None:
        self.said: list[Said] = []

    def say(self, frontend_id: int, message: ToProxy) -> bool:
        self.said.append((frontend_id, message))
        return True

    def flush(self) -> bool:
        return True


def client_ids(frontend_id: int) -> list[int]:
    return [(frontend_id << COUNTER_BITS) + i for i in range(1, EACH + 1)]


def submit(client_id: int, first_token: int = 1) -> Submit:
    request = EngineRequest(
        request_id=client_id,
        request_type=RequestType.CONTEXT_AND_GENERATION,
        prompt_token_ids=pack_token_ids((first_token,)),
        sampling=SamplingParams(max_tokens=3, seed=1),
        deadline_s=30.0,
    )
    return Submit(request, external_id=f"x{client_id}")


def step(worker: Any, answers: Answers) -> dict[int, Outputs]:
    """The messages of one round; two for one lane are the bug."""
    answers.said.clear()
    worker._round()
    assert sorted(frontend_id for frontend_id, _ in answers.said) == list(LANES)
    return {lane: message for lane, message in answers.said if isinstance(message, Outputs)}


def test_a_step_says_all_of_a_lane_in_one_message() -> None:
    """Guards: a message for each output. The traffic is then of its requests and not of its
    steps, which nothing but a benchmark would tell."""
    inbox, answers = Inbox(64), Answers()
    engine: Any = Engine()
    worker = Worker(engine, inbox, answers, tombstones_max=64)  # type: ignore[arg-type]
    asked = {lane: client_ids(lane) for lane in LANES}
    refused = {lane: asked[lane][-1] + 1 for lane in LANES}
    for lane in LANES:
        inbox.put([(lane, submit(client_id)) for client_id in asked[lane]])
        inbox.put([(lane, submit(refused[lane], REFUSED))])
    for num_steps in (1, 2, 3):
        for lane, outputs in step(worker, answers).items():
            told = [output.request_id for output in outputs.outputs]
            if num_steps == 1:  # all that were taken, the one that was not, the first tokens
                assert list(outputs.accepted) == asked[lane]
                assert told == [refused[lane], *asked[lane]]
            else:
                assert outputs.accepted == ()
                assert told == asked[lane]
    assert engine.num_tokens == {}
    answers.said.clear()
    worker._round()
    assert answers.said == []
