"""Try guides before an engine of another project compiles them: such an engine has no limits, and cannot be stopped."""

import logging
from pathlib import Path

from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.messages import Guide
from kvmesh.workers.guide_checks import may_be_costly
from kvmesh.workers.guides import Guides, lazy_guides

log = logging.getLogger(__name__)


class GuideTrial:
    """Refuses guides that pass our limits of time and memory. What our compiler does not know, the engine may."""

    def __init__(self) -> None:
        self._guides: Guides | None = None
        self._is_off = False

    async def check(self, guide: Guide, model_path: str, tenant: str) -> None:
        """Raise InvalidRequestError for a guide that is too costly."""
        if self._is_off or not may_be_costly(guide):
            return
        tokenizer = Path(model_path) / "tokenizer.json"
        if self._guides is None:
            if not tokenizer.is_file():
                return
            self._guides = lazy_guides(tokenizer)
        try:
            await self._guides.check_cost(guide, tenant)
        except EngineError as error:  # without our compiler, the engine is on its own
            log.warning("guides are not tried before the engine compiles them: %s", error)
            self.close()

    def close(self) -> None:
        """End the processes, and try no more."""
        self._is_off = True
        if self._guides is not None:
            self._guides.close()
