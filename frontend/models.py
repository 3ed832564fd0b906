"""Know which models the mesh serves, and what the frontend needs to know of each."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from kvmesh.frontend.control_tokens import ControlTokens, control_tokens
from kvmesh.frontend.errors import UnknownModelError
from kvmesh.frontend.formats import AnswerFormat, answer_format
from kvmesh.frontend.model_files import ModelFolders
from kvmesh.frontend.templates import ChatTemplate
from kvmesh.frontend.tokenizer import CACHE_BYTES, Tokenizer
from kvmesh.frontend.tokenizing.backends import BackendName, require_backend
from kvmesh.mesh.lifecycle import settle
from kvmesh.protocol.errors import ConfigError, InvalidRequestError, MeshError, NoWorkerError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Feature, Role, WorkerCard
from kvmesh.protocol.model_files import ModelFile
from kvmesh.protocol.parsers import reasoning_parser_name, tool_parser_name

log = logging.getLogger(__name__)

MAX_NAMES_TOLD = 32  # in an error
UNKNOWN_PARSER = "this frontend does not know its --tool-parser or --reasoning-parser; the log has the name"
ONLY_PREFILLS = "it only prefills, and no worker of its model can decode"
SEE_HEALTH = "try again later; GET /health says why"
HELD_LOOK_S = 0.05
RETRY_S = 5.0  # between tries to load a model that cannot be loaded
RELOAD_S = 30.0  # ... while no request asks for it


@dataclass(frozen=True, slots=True)
class Model:
    """A served model, loaded."""

    name: str  # as callers call it
    tokenizer: Tokenizer
    template: ChatTemplate | None
    format: AnswerFormat
    context_tokens: int
    block_size: int
    created: int  # unix seconds: when its first worker was seen
    base: str = ""  # as workers call it
    lora: str | None = None  # the adapter of that model
    features: frozenset[Feature] = frozenset()
    control: ControlTokens | None = None  # kept out of the texts of a chat; None: texts may spell them

    def require(self, feature: Feature, param: str) -> None:
        """Raises InvalidRequestError that names the parameter which asks for it."""
        if feature not in self.features:
            raise InvalidRequestError(
                f"The parameter '{param}' is not supported by the engine of {self.name!r}",
                hint="leave it out",
                param=param,
            )

    def chat_template(self) -> ChatTemplate:
        if self.template is None:
            raise InvalidRequestError(
                f"the model {self.name!r} has no chat template", hint="use /v1/completions", param="model"
            )
        return self.template


class ModelFacts(NamedTuple):
    """Facts that loading a model takes, as its workers report them."""

    model_path: str  # counts only for workers that do not name the model's files
    model_files: tuple[ModelFile, ...]
    context_tokens: int
    block_size: int
    tool_parser: str
    reasoning_parser: str


@dataclass(slots=True)
class ServedModel:
    """Holds what the workers of one model agree on."""

    name: str
    facts: ModelFacts  # told by one of its workers, or the last one
    created: int
    cards: dict[WorkerId, WorkerCard] = field(default_factory=dict)
    features: frozenset[Feature] = frozenset()  # what all of its workers can do
    loras: frozenset[str] = frozenset()  # adapters that can be asked for; without a worker, those of the last one
    ready: bool = False  # one of its workers can answer: not one that only prefills
    loading: asyncio.Task[Model] | None = None  # also holds the loaded model
    retry_at: float = 0.0  # when a load that failed may be tried again
    problem: str = ""  # why this frontend can read the answers of none of its workers
    load_problem: str = ""  # why the latest load failed

    @property
    def can_answer(self) -> bool:
        """Return whether a worker can answer, and its tokenizer and template can be loaded as far as is known."""
        return self.ready and not self.load_problem and (self.loading is None or self.loading.done())

    def take_in(self, card: WorkerCard) -> None:
        self.cards[card.worker_id] = card
        self._compare()

    def let_go(self, worker_id: WorkerId) -> None:
        if self.cards.pop(worker_id, None) is not None and self.cards:
            self._compare()
        self.ready = self.ready and bool(self.cards)

    @property
    def is_loaded(self) -> bool:
        return self.loading is not None and self.loading.done() and not _failed(self.loading)

    def _compare(self) -> None:
        problems = [parser_problem(card) for card in self.cards.values()]
        told = [facts_of(card) for card, problem in zip(self.cards.values(), problems, strict=True) if not problem]
        self.problem = "" if told else problems[0]
        if told and self.facts not in told:  # all who said so have left, as when workers start again otherwise
            self.facts, self.loading, self.load_problem = told[0], None, ""
        self.features = frozenset(Feature).intersection(*[card.features for card in self.cards.values()])
        answering = [card for card in self.cards.values() if card.role is not Role.PREFILL]
        self.ready = bool(answering and told)
        if answering:
            self.loras = frozenset(name for card in answering for name in card.loras)

    def count(self) -> dict[str, int]:
        return {role.value: sum(1 for card in self.cards.values() if card.role is role) for role in Role}


class ModelRegistry:
    """Follows worker cards; loads a model's tokenizer and template once, in a thread.

    A model whose workers have all gone stays known, so that callers are told to come back (503) and not that
    there is no such model (404). Its facts are taken anew from another worker once all who told them have gone.
    """

    def __init__(
        self,
        tokenizer: BackendName = "auto",
        cache_bytes: int = CACHE_BYTES,
        now: Callable[[], float] = time.monotonic,
        folders: ModelFolders | None = None,
        *,
        control_tokens_in_text: bool = False,
    ) -> None:
        """Make an empty registry; `tokenizer` and `cache_bytes` are those of Tokenizer.load, for every model. Without
        `folders` each model's folder has to be here. `control_tokens_in_text`: texts of a chat may spell control
        tokens. Raise ConfigError if a package is missing."""
        require_backend(tokenizer)
        self._now = now
        self._tokenizer: BackendName = tokenizer
        self._cache_bytes = cache_bytes
        self._folders = folders
        self._control_tokens_in_text = control_tokens_in_text
        self._tokenizers: WeakValueDictionary[str, Tokenizer] = WeakValueDictionary()  # by sha256 of tokenizer.json
        self._tokenizer_lock = asyncio.Lock()  # models that share a tokenizer may be loaded at once
        self._hold_until = 0.0
        self.is_awaited: Callable[[str], bool] = lambda model: False  # one of its workers is being started again
        self._served: dict[str, ServedModel] = {}
        self._model_of: dict[WorkerId, str] = {}

    def add(self, card: WorkerCard) -> None:
        """Take a worker in. Those of one model agree on what is kept here: router/members.py sees to it."""
        if self._model_of.get(card.worker_id, card.model) != card.model:
            self.remove(card.worker_id)
        served = self._served.get(card.model)
        if served is None:
            served = self._served[card.model] = ServedModel(card.model, facts_of(card), created=int(time.time()))
        served.take_in(card)
        if problem := parser_problem(card):
            log.error("%s", problem)
        self._model_of[card.worker_id] = card.model

    def remove(self, worker_id: WorkerId) -> None:
        """A worker has gone. Unknown ones are no error."""
        name = self._model_of.pop(worker_id, None)
        if name is not None:
            self._served[name].let_go(worker_id)

    def hold_until(self, at_s: float) -> None:
        """Have requests wait for a worker until then: this frontend has just started, and may not know it yet."""
        self._hold_until = at_s

    async def get(self, name: str) -> Model:
        """Return the model, or the adapter, called `name`.

        A model without a worker is returned if it is loaded and one of its workers is awaited: the dispatcher waits.
        Raise UnknownModelError, NoWorkerError, or ConfigError if the model's folder cannot be read.
        """
        while not self._knows(name) and self._now() < self._hold_until:  # noqa: ASYNC110 - only after the start
            await asyncio.sleep(HELD_LOOK_S)
        task = self._load(served := self._find_usable(name))
        model = task.result() if task.done() else await asyncio.shield(task)  # others wait for it as well
        if name == model.name and served.features == model.features:
            return model
        return replace(model, name=name, lora=None if name == model.name else name, features=served.features)

    def _find_usable(self, name: str) -> ServedModel:
        """Return a model that is ready, or is loaded and will be ready again. Raise as `find_ready` does."""
        try:
            return self.find_ready(name)
        except NoWorkerError:
            served = self._served.get(name) or self._with_lora(name)
            if served is None or served.problem or not served.is_loaded or not self.is_awaited(served.name):
                raise
            return served

    def load_early(self, card: WorkerCard) -> None:
        """Load the model of a worker that has just joined, so that the first request need not wait for it."""
        if (served := self._served.get(card.model)) is not None and not served.problem:
            self._load(served)

    def _knows(self, name: str) -> bool:
        """Return whether a wait for workers changes nothing."""
        try:
            self.find_ready(name)
        except NoWorkerError:
            return False
        except MeshError:
            return True
        return True

    def _load(self, served: ServedModel) -> asyncio.Task[Model]:
        """The load under way or done. A failed one is tried again, but not by every request: it takes time and a core,
        and meanwhile the last failure is told."""
        if served.loading is None or (_failed(served.loading) and self._now() >= served.retry_at):
            loading = self._loaded(served)
            served.loading = asyncio.create_task(loading, name=f"load {served.name}")
            served.loading.add_done_callback(partial(self._on_loaded, served))
        return served.loading

    def _on_loaded(self, served: ServedModel, task: asyncio.Task[Model]) -> None:
        """Report a failed load in the log and in /health, because no request may have asked for the model yet."""
        served.retry_at = self._now() + RETRY_S
        if task.cancelled() or task is not served.loading:
            return
        error = task.exception()
        problem = "" if error is None else f"this frontend cannot load its tokenizer or chat template: {error}"
        if problem and problem != served.load_problem:
            log.error("%s failed: %s", task.get_name(), error)
        served.load_problem = problem
        if problem:  # a load balancer sends no request here, so that no request would try again
            task.get_loop().call_later(RELOAD_S, self._reload, served)

    def _reload(self, served: ServedModel) -> None:
        if served.load_problem and served.cards:
            self._load(served)

    async def _loaded(self, served: ServedModel) -> Model:
        facts = served.facts
        cards = [card for card in served.cards.values() if facts_of(card) == facts]
        if not cards:
            raise NoWorkerError(f"no worker of the model {served.name!r} is ready", hint="try again later")
        folder = Path(cards[0].model_path) if self._folders is None else await self._folders.find(cards)
        tokenizer = await self._tokenizer_of(folder, facts)
        model = await asyncio.to_thread(_load, served, facts, folder, tokenizer, self._control_tokens_in_text)
        settle()
        return model

    async def _tokenizer_of(self, folder: Path, facts: ModelFacts) -> Tokenizer:
        """Return the tokenizer of a folder. Models with the same tokenizer.json share one, with its cache."""
        sha256 = next((file.sha256 for file in facts.model_files if file.name == "tokenizer.json"), "")
        async with self._tokenizer_lock:
            if (known := self._tokenizers.get(sha256)) is not None:
                return known
            tokenizer = await asyncio.to_thread(Tokenizer.load, folder, self._tokenizer, self._cache_bytes)
            if sha256:
                self._tokenizers[sha256] = tokenizer
            return tokenizer

    def find(self, name: str) -> ServedModel:
        """Raises UnknownModelError; NoWorkerError as long as none is known: we may have just been started."""
        if not self._served:
            raise NoWorkerError("no worker has joined yet", hint=SEE_HEALTH)
        if (served := self._served.get(name) or self._with_lora(name)) is None:
            names = ", ".join([found for found, _ in islice(self.names(), MAX_NAMES_TOLD)]) or "none"
            raise UnknownModelError(
                f"the model {name!r} does not exist", hint=f"models served here: {names}", param="model"
            )
        return served

    def find_ready(self, name: str) -> ServedModel:
        """Raise NoWorkerError also if no worker of the model can answer."""
        served = self.find(name)
        if served.problem:
            raise NoWorkerError(served.problem)
        if not served.ready:
            raise NoWorkerError(f"no worker of the model {name!r} is ready", hint=SEE_HEALTH)
        return served

    def _with_lora(self, name: str) -> ServedModel | None:
        """Return a model with an adapter of that name, one that is ready if there is any."""
        having = [served for served in self._served.values() if name in served.loras]
        return next((served for served in having if served.ready), having[0] if having else None)

    def unusable(self) -> Iterator[tuple[WorkerId, str]]:
        """Yield the workers of models that are not ready, with the reason why each of them does not help."""
        for served in self._served.values():
            if served.ready and served.load_problem:
                for worker_id in served.cards:
                    yield worker_id, served.load_problem
            elif not served.ready:
                for card in served.cards.values():
                    yield card.worker_id, UNKNOWN_PARSER if parser_problem(card) else ONLY_PREFILLS

    def names(self) -> Iterator[tuple[str, ServedModel]]:
        """Yield what can be asked for: models that are ready, and their adapters. Each name comes once, as `find` reads
        it."""
        seen = set(self._served)
        for served in self.ready():
            yield served.name, served
            for lora in sorted(served.loras - seen):
                seen.add(lora)
                yield lora, served

    def ready(self) -> list[ServedModel]:
        return [served for served in self._served.values() if served.can_answer]

    def cards(self) -> list[WorkerCard]:
        """Return the cards of all workers that are known."""
        return [card for served in self._served.values() for card in served.cards.values()]

    def count(self) -> dict[str, dict[str, int]]:
        """Workers by model and role."""
        return {name: served.count() for name, served in self._served.items()}


def facts_of(card: WorkerCard) -> ModelFacts:
    return ModelFacts(
        "" if card.model_files else card.model_path,
        card.model_files,
        card.context_tokens,
        card.block_size,
        card.tool_parser,
        card.reasoning_parser,
    )


def parser_problem(card: WorkerCard) -> str:
    """Return why answers of this worker cannot be read; "" if they can."""
    try:
        tool_parser_name(card.tool_parser)
        reasoning_parser_name(card.reasoning_parser)
    except ConfigError as error:
        return f"the worker {card.name!r} of the model {card.model!r} cannot be used by this frontend: {error}"
    return ""


def _failed(task: asyncio.Task[Model]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _load(
    served: ServedModel, facts: ModelFacts, folder: Path, tokenizer: Tokenizer, control_tokens_in_text: bool
) -> Model:
    template = ChatTemplate.load(folder)
    source = template.source if template else ""
    return Model(
        name=served.name,
        tokenizer=tokenizer,
        template=template,
        format=answer_format(facts.tool_parser, facts.reasoning_parser, source),
        context_tokens=facts.context_tokens,
        block_size=facts.block_size,
        created=served.created,
        base=served.name,
        features=served.features,
        control=None if control_tokens_in_text else control_tokens(tokenizer, source),
    )
