"""Which models the mesh serves, and what the frontend needs to know of each."""

import asyncio
import time
from dataclasses import dataclass, field

from frontend.errors import UnknownModelError
from frontend.templates import ChatTemplate
from frontend.tokenizer import Tokenizer
from protocol.errors import InvalidRequestError, NoWorkerError
from protocol.ids import WorkerId
from protocol.messages import Role, WorkerCard


@dataclass(frozen=True, slots=True)
class Model:
    """A served model, loaded."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    context_tokens: int
    block_size: int
    created: int  # unix seconds: when its first worker was seen

    def chat_template(self) -> ChatTemplate:
        if self.template is None:
            raise InvalidRequestError(
                f"the model {self.name!r} has no chat template", hint="use /v1/completions", param="model"
            )
        return self.template


@dataclass(slots=True)
class Served:
    """What the workers of one model agree on."""

    name: str
    model_path: str
    context_tokens: int
    block_size: int
    created: int
    roles: dict[WorkerId, Role] = field(default_factory=dict)
    loading: asyncio.Task[Model] | None = None  # also holds the loaded model

    @property
    def ready(self) -> bool:
        """A worker that only prefills cannot answer."""
        return any(role is not Role.PREFILL for role in self.roles.values())

    def agrees(self, card: WorkerCard) -> bool:
        return card.block_size == self.block_size and card.context_tokens == self.context_tokens

    def count(self) -> dict[str, int]:
        return {role.value: sum(1 for r in self.roles.values() if r is role) for role in Role}


class ModelRegistry:
    """Follows worker cards; loads a model's tokenizer and template once, in a thread.

    A model whose workers have all gone stays known, so that callers are told to come back (503) and not that
    there is no such model (404). Its facts are taken anew from the next worker.
    """

    def __init__(self) -> None:
        self._served: dict[str, Served] = {}
        self._model_of: dict[WorkerId, str] = {}

    def add(self, card: WorkerCard) -> None:
        """Take a worker in. Those of one model agree on what is kept here: router/members.py sees to it."""
        if self._model_of.get(card.worker_id, card.model) != card.model:
            self.remove(card.worker_id)
        served = self._served.get(card.model)
        if served is None or not served.agrees(card):
            served = self._served[card.model] = _first_seen(card, served)
        served.roles[card.worker_id] = card.role
        self._model_of[card.worker_id] = card.model

    def remove(self, worker_id: WorkerId) -> None:
        """A worker has gone. Unknown ones are no error."""
        name = self._model_of.pop(worker_id, None)
        if name is not None:
            self._served[name].roles.pop(worker_id, None)

    async def get(self, name: str) -> Model:
        """Raises UnknownModelError, NoWorkerError, ConfigError (the model's folder cannot be read)."""
        served = self.find(name)
        if not served.ready:
            raise NoWorkerError(f"no worker of the model {name!r} is ready", hint="try again later")
        task = self._load(served)
        if task.done():
            return task.result()
        return await asyncio.shield(task)  # the load goes on for others when this caller leaves

    def load_early(self, card: WorkerCard) -> None:
        """Load the model of a worker that has just joined, so that the first request need not wait for it."""
        if (served := self._served.get(card.model)) is not None:
            self._load(served)

    @staticmethod
    def _load(served: Served) -> asyncio.Task[Model]:
        """The load under way or done; a failed one is tried again."""
        if served.loading is None or _failed(served.loading):
            served.loading = asyncio.create_task(asyncio.to_thread(_load, served), name=f"load {served.name}")
        return served.loading

    def find(self, name: str) -> Served:
        """Raises UnknownModelError; NoWorkerError as long as none is known: we may have just been started."""
        if not self._served:
            raise NoWorkerError("no worker has joined yet", hint="try again later")
        if (served := self._served.get(name)) is None:
            names = ", ".join(served.name for served in self.ready()) or "none"
            raise UnknownModelError(
                f"the model {name!r} does not exist", hint=f"models served here: {names}", param="model"
            )
        return served

    def ready(self) -> list[Served]:
        return [served for served in self._served.values() if served.ready]

    def count(self) -> dict[str, dict[str, int]]:
        """Workers by model and role."""
        return {name: served.count() for name, served in self._served.items()}


def _first_seen(card: WorkerCard, before: Served | None) -> Served:
    created = before.created if before is not None else int(time.time())
    return Served(card.model, card.model_path, card.context_tokens, card.block_size, created)


def _failed(task: asyncio.Task[Model]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _load(served: Served) -> Model:
    tokenizer = Tokenizer.load(served.model_path)
    template = ChatTemplate.load(served.model_path)
    return Model(served.name, tokenizer, template, served.context_tokens, served.block_size, served.created)
