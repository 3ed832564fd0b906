"""Grant leases of the budgets that this frontend owns. Pure: the time is an argument."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvmesh.frontend.keys.budget import Budget, KeyLimits, left_of
from kvmesh.frontend.keys.owners import Owners
from kvmesh.frontend.keys.window import slot_of
from kvmesh.protocol.errors import NoWorkerError, OverloadedError
from kvmesh.protocol.messages import MAX_BUDGET_RETURNS, BudgetAsk, BudgetGrant, BudgetUse

MAX_BUDGETS = 20_000
NEW_S = 2.0  # a budget is new for so long: the others tell what streams they have, and an earlier owner what it granted
CHANGE_S = 10.0  # after a change of the frontends there may be an owner that has not heard of it


class Recalled(NamedTuple):
    """Hold what a frontend knows of a key whose owner was lost."""

    used: tuple[int, int]  # requests and tokens in the last minute, as the owner said
    uses: Sequence[tuple[float, int, int]]  # here: how long ago, requests and tokens


class Owned:
    """The budgets of the keys that this frontend owns."""

    def __init__(self, owners: Owners, epoch: int) -> None:
        """`epoch`: tells the grants of this process from those of others."""
        self.epoch = epoch
        self._owners = owners
        self.recall: Callable[[str], Recalled | None] = lambda key: None
        self._budgets: dict[str, Budget] = {}
        self._made: dict[str, float] = {}
        self._held_back: dict[str, tuple[float, int, int]] = {}  # since when, requests and tokens

    def __len__(self) -> int:
        return len(self._budgets)

    def budget(self, now: float, key: str, limits: KeyLimits) -> Budget:
        """Return the budget of a key. Raise OverloadedError if there are too many.

        What the owner before had granted is not known if it was lost. As much is then taken to be used as was last
        heard from it, at the times when the key was used here; without such news everything, evenly. An owner that
        still lives hands over what it granted; until then there is no more than a fair part.
        """
        budget = self._budgets.get(key)
        if budget is None:
            self._make_room(now)
            budget = self._budgets[key] = Budget(limits)
            self._made[key] = now
            if (lost_at := self._owners.lost_at(now, key)) is not None:
                known = self.recall(key)
                requests, tokens = (limits.requests or 0, limits.tokens or 0) if known is None else known.used
                budget.assume_used(lost_at if known is None else now, requests, tokens, known.uses if known else ())
            elif self._owners.count > 1 and now - self._owners.changed_at < CHANGE_S:
                part = 1 - 1 / self._owners.count
                held = int((limits.requests or 0) * part), int((limits.tokens or 0) * part)
                budget.charge(now, *held)
                self._held_back[key] = now, *held
        elif budget.limits != limits:
            budget.set_limits(limits)
        if (held_back := self._held_back.get(key)) is not None and now - held_back[0] >= NEW_S:
            self._release(key, budget)
        return budget

    def _release(self, key: str, budget: Budget) -> None:
        """Let the rest of a new budget be used."""
        if (held_back := self._held_back.pop(key, None)) is not None:
            since, requests, tokens = held_back
            budget.give_back(slot_of(since), requests, tokens)

    def forget(self, key: str) -> Budget | None:
        """Return the budget of a key that another frontend owns now, if there was one here."""
        self._made.pop(key, None)
        self._held_back.pop(key, None)
        return self._budgets.pop(key, None)

    def to_hand_over(self, now: float) -> Iterator[BudgetAsk]:
        """Yield what the new owners of budgets have to know, and forget these budgets."""
        for key, budget in list(self._budgets.items()):
            owner = self._owners.owner(key)
            if owner in ("", self._owners.own):
                continue
            self._release(key, budget)
            self.forget(key)
            handed = tuple(BudgetUse(age_s=age_s, requests=r, tokens=t) for age_s, r, t in budget.uses(now))
            yield BudgetAsk(
                key=key,
                asker=self._owners.own,
                owner=owner,
                limit_requests=budget.limits.requests,
                limit_tokens=budget.limits.tokens,
                limit_streams=budget.limits.streams,
                handed=handed[-MAX_BUDGET_RETURNS:],
                streams=budget.held(self._owners.own),
                want_streams=budget.held(self._owners.own),
            )

    def answer(self, now: float, ask: BudgetAsk) -> BudgetGrant:
        """Return what `ask` gets. Raise OverloadedError, or NoWorkerError if another frontend is meant."""
        if ask.owner != self._owners.own:
            raise NoWorkerError(f"{ask.owner} is not here: this is {self._owners.own}")
        limits = KeyLimits(ask.limit_requests, ask.limit_tokens, ask.limit_streams)
        budget = self.budget(now, ask.key, limits)
        is_new = now - self._made[ask.key] < NEW_S
        if ask.handed:
            self._release(ask.key, budget)
            budget.take_over(now, [(use.age_s, use.requests, use.tokens) for use in ask.handed])
        if ask.epoch == self.epoch:
            for entry in ask.returned:
                budget.give_back(entry.slot, entry.requests, entry.tokens)
        budget.charge(now, 0, ask.debt_tokens)
        wanted = ask.want_streams
        if is_new and limits.streams is not None and self._owners.count > 1:
            wanted = min(wanted, max(1, limits.streams // self._owners.count))  # others have not told yet
        streams = budget.hold(now, ask.asker, ask.streams, wanted)
        requests, tokens, lacking, wait_s = self._portion(now, budget, ask)
        left = left_of(budget, now)
        return BudgetGrant(
            epoch=self.epoch,
            slot=slot_of(now),
            requests=requests,
            tokens=tokens,
            streams=streams,
            lacking=lacking,
            wait_s=wait_s,
            left_requests=left.requests,
            left_tokens=left.tokens,
            reset_requests_s=left.reset_requests_s,
            reset_tokens_s=left.reset_tokens_s,
        )

    def _portion(self, now: float, budget: Budget, ask: BudgetAsk) -> tuple[int, int, str, float]:
        """Take what is needed, and beyond that no more than a part of what is free: others ask too."""
        if not (ask.need_requests or ask.need_tokens):
            return 0, 0, "", 0.0
        share = 2 * self._owners.count
        requests = tokens = 0
        if budget.requests is not None:
            if ask.need_requests > (free := budget.requests.free(now)):
                return 0, 0, "requests", budget.requests.wait_s(now, ask.need_requests)
            requests = max(ask.need_requests, min(ask.want_requests, free // share))
        if budget.tokens is not None:
            if ask.need_tokens > (free := budget.tokens.free(now)):
                return 0, 0, "tokens", budget.tokens.wait_s(now, ask.need_tokens)
            tokens = max(ask.need_tokens, min(ask.want_tokens, free // share))
        budget.charge(now, requests, tokens)
        return requests, tokens, "", 0.0

    def _make_room(self, now: float) -> None:
        if len(self._budgets) < MAX_BUDGETS:
            return
        for key in [key for key, budget in self._budgets.items() if budget.is_idle(now)]:
            self.forget(key)
        if len(self._budgets) >= MAX_BUDGETS:
            raise OverloadedError(f"{MAX_BUDGETS} API keys are in use here", hint="run more frontends")
