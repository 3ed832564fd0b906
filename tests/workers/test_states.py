"""The table of a worker's states: every order in every state, and every sequence of orders."""

import itertools
import random
from collections.abc import Iterable
from contextlib import suppress

import pytest

from kvmesh.protocol.errors import DrainingError, WrongStateError
from kvmesh.protocol.messages import Role
from kvmesh.workers.states import (
    CHANGES,
    TABLE,
    Begin,
    Nothing,
    OrderFirst,
    Wait,
    WorkerOrder,
    WorkerState,
    WorkerStates,
)

ORDERS = [order for order in WorkerOrder if order is not WorkerOrder.STOP]
ENDS = (WorkerState.STOPPING, WorkerState.FAILED)


class Model:
    """Hold the table's states against an engine that is awake or asleep."""

    def __init__(self) -> None:
        self.states = WorkerStates()
        self.is_awake = True

    def order(self, order: WorkerOrder) -> None:
        before, decision = self.states.state, None
        with suppress(WrongStateError, DrainingError):
            decision = self.states.order(order, Role.DECODE if order is WorkerOrder.TURN else None)
        assert isinstance(decision, Begin) or self.states.state is before
        if isinstance(decision, Wait):
            assert before in CHANGES, "there is something to wait for"
        self.check()

    def end_change(self, *, ok: bool) -> None:
        change = self.states.state
        if change not in CHANGES:
            return
        if ok:
            self.is_awake = {WorkerState.FALLING_ASLEEP: False, WorkerState.WAKING: True}.get(change, self.is_awake)
            self.states.done(change)
        else:
            self.states.failed(change)
        assert self.states.state not in CHANGES
        self.check()

    def check(self) -> None:
        states = self.states
        assert states.takes_requests == (states.refusal() is None) == (states.on_card == "")
        assert not (states.takes_requests and not self.is_awake), "a sleeping engine gets no request"
        assert not (states.engine_answers and not self.is_awake), "a sleeping engine is not tried"
        assert (states.state is WorkerState.ASLEEP) <= (not self.is_awake)
        assert (states.to_role is not None) == (states.state is WorkerState.TURNING)
        assert states.has_card or not states.takes_requests
        assert len(states.on_card) <= 32, "the card has no room for more"


def test_the_table_names_every_order_in_every_state() -> None:
    assert set(TABLE) == set(WorkerState)
    for state, decisions in TABLE.items():
        assert set(decisions) == set(WorkerOrder), state


@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_sequence_of_orders_keeps_card_and_engine_in_agreement(length: int) -> None:
    for orders in itertools.product(WorkerOrder, repeat=length):
        for ends in itertools.product((None, False, True), repeat=length):  # None: the change is still in progress
            model = Model()
            for order, ok in zip(orders, ends, strict=True):
                model.order(order)
                if ok is not None:
                    model.end_change(ok=ok)


def test_long_random_sequences_keep_card_and_engine_in_agreement() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(200):
        model = Model()
        for _ in range(50):
            model.order(rng.choice(ORDERS))
            if rng.random() < 0.7:
                model.end_change(ok=rng.random() < 0.8)


def reached(state: WorkerState, orders: Iterable[WorkerOrder]) -> WorkerStates:
    states = WorkerStates()
    states.state = state
    for order in orders:
        try:
            states.order(order, Role.DECODE)
        except WrongStateError:
            continue
        states.done(states.state)
    return states


@pytest.mark.parametrize("state", [state for state in WorkerState if state not in ENDS])
def test_wake_then_resume_leads_from_every_state_to_serving(state: WorkerState) -> None:
    states = WorkerStates()
    states.state = state
    states.done(state)
    assert reached(states.state, [WorkerOrder.WAKE, WorkerOrder.RESUME]).takes_requests


@pytest.mark.parametrize("state", WorkerState)
def test_a_stop_ends_every_state(state: WorkerState) -> None:
    states = WorkerStates()
    states.state = state
    states.order(WorkerOrder.STOP)
    states.done(state)
    states.failed(state)
    assert states.state is WorkerState.STOPPING
    for order in ORDERS:
        with pytest.raises(DrainingError, match="shutting down"):
            states.order(order)
    assert states.order(WorkerOrder.STOP) == Nothing("")


def test_a_refusal_says_which_order_comes_first() -> None:
    for state, order in itertools.product(set(WorkerState) - set(ENDS), ORDERS):
        states = WorkerStates()
        states.state = state
        if isinstance(TABLE[state][order], OrderFirst):
            with pytest.raises(WrongStateError, match=r"this worker is .*; (wake|resume|ask)"):
                states.order(order, Role.DECODE)


def test_a_failed_sleep_goes_back_to_the_state_before() -> None:
    for before in (WorkerState.SERVING, WorkerState.DRAINED):
        states = WorkerStates()
        states.state = before
        states.order(WorkerOrder.SLEEP)
        states.failed(WorkerState.FALLING_ASLEEP)
        assert states.state is before
