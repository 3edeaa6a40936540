"""One live request: the shell around its machine.

`run` is the request's whole life: prepare, then step by step an event in and its
effects out, until the machine is done. Whatever ends it early (`interrupt`, a
server that fell silent, a client that left) comes as an event too, by cancelling
the wait in which the task happens to be. Waiting for the client to take a chunk
holds back the next read: a slow client slows its own stream and nobody's memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc

from protos.errors import BatonError, RequestCancelledError, ServerUnavailableError
from protos.messages import GenerateChunk, GenerateRequest, RequestType
from router import signals as sig
from router.abandon import abandon
from router.dispatch import Dispatch, Effects, State
from router.leases import Renewal
from router.legs import OpenLeg, leg_failed
from router.prepare import Prepared, prepare
from router.servers import Role
from router.shared import Shared
from router.signals import Event, Leg

Interrupting = sig.Interrupt | sig.LegFailed
PREPARING = "preparing"
LIVE_STATES = (PREPARING, *(state.value for state in State if state is not State.DONE))
"""What `LiveRequest.state` can be while it lives."""


class LiveRequest:
    """Made and run in the call's own task."""

    def __init__(
        self,
        shared: Shared,
        request: GenerateRequest,
        *,
        deadline_s: float,
        received_s: float,
        write: Callable[[GenerateChunk], Awaitable[None]],
    ) -> None:
        """`request.external_id` is set. `received_s` is the loop's time."""
        self._shared = shared
        self._request = request
        self._deadline_s = deadline_s
        self._ends_s = received_s + deadline_s
        self._write = write
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None, "a request runs in a task"
        self._task = task
        self._machine: Dispatch | None = None
        self._prepared: Prepared | None = None
        self._leg: OpenLeg | None = None
        self._context_address = ""
        self._renewal: Renewal | None = None
        self._next: Event | None = None
        self._interrupt: Interrupting | None = None
        self._is_over = False
        self._has_client_left = False

    @property
    def state(self) -> str:
        return self._machine.state.value if self._machine else PREPARING

    async def run(self) -> None:
        """Returns when the last chunk is written.

        Raises the BatonError that the client shall see, or CancelledError where
        the client is gone.
        """
        timer = self._loop.call_at(
            self._ends_s, self.interrupt, sig.DeadlineExpired(self._deadline_s)
        )
        try:
            await self._prepare()
            error = await self._drive()
        finally:
            self._is_over = True
            timer.cancel()
            self._clean_up()
        if error is None:
            return
        if self._has_client_left and isinstance(error, RequestCancelledError):
            raise asyncio.CancelledError
        raise error

    def interrupt(self, event: Interrupting) -> None:
        """End the request early. The first interrupt counts."""
        if self._interrupt is None and not self._is_over:
            self._interrupt = event
            self._task.cancel()

    def server_silent(self, address: str, reason: str) -> None:
        """A server stopped answering; if our leg runs there it has failed."""
        leg = self._leg
        if leg is not None and leg.reservation.address == address:
            self.interrupt(leg.failed(ServerUnavailableError(reason)))

    def servers_changed(self) -> None:
        """Prefilling on for a generation server that is gone would only delay the bad news."""
        leg = self._leg
        if leg is None or leg.leg is not Leg.CONTEXT:
            return
        reason = self._shared.fleet.why_no_partner(leg.reservation.address)
        if reason:
            self.interrupt(sig.PartnersLost(reason))

    # --- the loop ----------------------------------------------------------------

    async def _prepare(self) -> None:
        try:
            self._prepared = await prepare(
                self._request, self._shared.fleet, self._shared.tokenizer
            )
        except asyncio.CancelledError:
            event = self._interrupted()
            if self._has_client_left:
                raise
            assert not isinstance(event, sig.LegFailed), "no leg ran yet"
            raise sig.interrupt_error(event) from None

    async def _drive(self) -> BatonError | None:
        machine = self._machine = self._new_machine()
        event: Event = sig.Started()
        while True:
            effects = machine.handle(event)
            terminal, early = await self._perform(effects)
            if machine.is_done:
                self._shared.count_late(machine.num_late)
                return terminal
            event = early or await self._next_event()

    def _new_machine(self) -> Dispatch:
        prepared = self._get_prepared()
        is_handed_over = self._shared.hands_over and prepared.max_tokens > 1
        return Dispatch(
            self._request.external_id,
            disagg_request_id=self._shared.mint_disagg_id() if is_handed_over else None,
            seed=prepared.seed,
        )

    async def _next_event(self) -> Event:
        if self._next is not None:
            event, self._next = self._next, None
            return event
        leg = self._leg
        assert leg is not None, "the machine waits, but no leg runs"
        try:
            event = await leg.next_event()
        except asyncio.CancelledError:
            return self._interrupted()
        if isinstance(event, sig.ContextFailed | sig.GenerationFailed | sig.WholeFailed) and (
            leg.has_lost_server or isinstance(event.error, ServerUnavailableError)
        ):  # the next request must not go there before somebody looked
            self._shared.suspect(leg.reservation.address, event.error.message)
        return event

    async def _perform(self, effects: Effects) -> tuple[BatonError | None, Event | None]:
        """Apply effects; returns the terminal error and what interrupted a write."""
        for effect in effects:
            match effect:
                case sig.Emit(chunk) | sig.Finish(chunk):
                    try:
                        await self._write(chunk)
                    except asyncio.CancelledError:
                        return None, self._interrupted()
                    except grpc.aio.BaseError:
                        self._has_client_left = True
                        return None, sig.ClientCancelled()
                case sig.Fail(error):
                    return error, None
                case _:
                    self._apply(effect)
        return None, None

    def _interrupted(self) -> Interrupting:
        """Why our wait was cancelled: by an interrupt of ours, or because the client left."""
        if self._interrupt is not None:
            self._task.uncancel()
            return self._interrupt
        self._has_client_left = True
        return sig.ClientCancelled()

    def _clean_up(self) -> None:
        """After a defect of ours, let go of what the machine still holds."""
        machine = self._machine
        if machine is not None and not machine.is_done:
            for effect in machine.handle(sig.Drained()):
                if not isinstance(effect, sig.Fail):
                    self._apply(effect)

    # --- effects ------------------------------------------------------------------

    def _apply(self, effect: sig.Effect) -> None:
        match effect:
            case sig.CallContext() | sig.CallGeneration() | sig.CallWhole():
                self._call(effect)
            case sig.CancelLeg():
                self._stop_leg()
            case sig.FreeReservation():
                self._free_leg()
            case sig.StartRenewing(lease):
                self._renewal = self._shared.leases.keep(self._context_address, lease)
            case sig.StopRenewing():
                if self._renewal is not None:
                    self._renewal.stop()
            case sig.ReleaseLease(lease):
                self._shared.leases.release(self._context_address, lease)
            case sig.Emit() | sig.Finish() | sig.Fail():
                raise AssertionError(f"{effect} is a write")

    def _call(self, effect: sig.CallContext | sig.CallGeneration | sig.CallWhole) -> None:
        prepared, fleet = self._get_prepared(), self._shared.fleet
        prompt, whole = len(prepared.prompt_token_ids), prepared.max_tokens
        try:
            match effect:
                case sig.CallContext():
                    leg, reservation = Leg.CONTEXT, fleet.select(Role.CONTEXT, prompt)
                    self._context_address = reservation.address
                case sig.CallGeneration():
                    leg = Leg.GENERATION
                    reservation = fleet.select(
                        Role.GENERATION, prompt + whole, partner=self._context_address
                    )
                case sig.CallWhole():
                    role = Role.CONTEXT if self._shared.hands_over else Role.GENERATION
                    leg, reservation = Leg.WHOLE, fleet.select(role, prompt + whole)
        except ServerUnavailableError as error:
            self._next = leg_failed(_LEG_OF[type(effect)], error)
            return
        label = fleet.server(reservation.address).label
        link = self._shared.links[reservation.address]
        self._leg = OpenLeg(leg, reservation, label, link, self._leg_request(effect))

    def _leg_request(
        self, effect: sig.CallContext | sig.CallGeneration | sig.CallWhole
    ) -> GenerateRequest:
        prepared = self._get_prepared()
        machine = self._machine
        assert machine is not None
        request_type, signed = RequestType.CONTEXT_AND_GENERATION, None
        if isinstance(effect, sig.CallContext):
            request_type = RequestType.CONTEXT_ONLY
        elif isinstance(effect, sig.CallGeneration):
            request_type, signed = RequestType.GENERATION_ONLY, effect.signed
        return GenerateRequest(
            external_id=self._shared.mint_leg_id(self._request.external_id),
            model=self._request.model,
            token_ids=prepared.prompt_token_ids,
            sampling=prepared.sampling,
            request_type=request_type,
            deadline_ms=max(1, round((self._ends_s - self._loop.time()) * 1000)),
            context_phase_params=signed,
            disagg_request_id=machine.disagg_request_id,
        )

    def _stop_leg(self) -> None:
        leg = self._leg
        if leg is None:
            return
        if leg.leg is not Leg.CONTEXT:
            leg.call.cancel()
            return
        leg.is_abandoned = True
        link, leases = self._shared.links[leg.reservation.address], self._shared.leases
        leases.spawn(abandon(leg, link, leases))

    def _free_leg(self) -> None:
        """The leg's stream has ended, by itself or by us. One that never opened held nothing."""
        leg, self._leg = self._leg, None
        if leg is not None:
            self._shared.fleet.release(leg.reservation)
            if leg.is_ended:
                self._shared.links.let_end(leg.call)
            elif not leg.is_abandoned:
                leg.call.cancel()

    def _get_prepared(self) -> Prepared:
        assert self._prepared is not None, "the request was prepared first"
        return self._prepared


_LEG_OF: dict[type, Leg] = {
    sig.CallContext: Leg.CONTEXT,
    sig.CallGeneration: Leg.GENERATION,
    sig.CallWhole: Leg.WHOLE,
}
