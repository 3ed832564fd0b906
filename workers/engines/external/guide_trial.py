"""Try guides before an engine of another project compiles them: such an engine has no limits, and cannot be stopped."""

import logging
from pathlib import Path

from kvmesh.mesh.jobs.children import CannotPrepareError
from kvmesh.protocol.messages import Guide, GuideKind
from kvmesh.workers.guide_checks import may_be_costly
from kvmesh.workers.guide_messages import XgrammarForm
from kvmesh.workers.guides import Guides, trial_guides

log = logging.getLogger(__name__)


class GuideTrial:
    """Refuses guides that pass our limits of time and memory. What a library does not support, the engine may."""

    def __init__(self) -> None:
        self.xgrammar: XgrammarForm = ""  # set it before the first guide
        self._guides: Guides | None = None
        self._is_off = False

    async def check(self, guide: Guide, model_path: str, tenant: str) -> None:
        """Raise InvalidRequestError for a guide that is too costly."""
        if self._is_off or guide.kind is GuideKind.JSON or not (self.xgrammar or may_be_costly(guide)):
            return
        tokenizer = Path(model_path) / "tokenizer.json"
        if self._guides is None:
            if not tokenizer.is_file():
                return
            self._guides = trial_guides(tokenizer, self.xgrammar)
        try:
            await self._guides.check_cost(guide, tenant)
        except CannotPrepareError as error:  # without a compiler, the engine is on its own
            log.warning("guides are not tried before the engine compiles them: %s", error)
            self.close()

    def close(self) -> None:
        """End the processes, and try no more."""
        self._is_off = True
        if self._guides is not None:
            self._guides.close()
