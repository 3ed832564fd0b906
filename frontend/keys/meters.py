"""Keep the meters of all limited keys, over changes of the file that they come from."""

import time
from collections.abc import Callable, Collection

from kvmesh.frontend.keys import metrics
from kvmesh.frontend.keys.budget import KeyLimits
from kvmesh.frontend.keys.meter import Meter
from kvmesh.frontend.keys.owned import Recalled
from kvmesh.frontend.keys.sharing import LimitSharing
from kvmesh.frontend.keys.usage import Usage, UsageLog
from kvmesh.protocol.errors import OverloadedError

MAX_HOLDERS = 20_000
TOKENS_NAME = "(tokens)"  # in metrics and the log; no key can be called so


class Meters:
    """Holds what the keys of this frontend have used, by the names of the keys."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, sharing: LimitSharing | None = None) -> None:
        """`sharing`: the other frontends that share the limits, if there are any."""
        self._sharing = sharing or LimitSharing(clock=clock)
        self._sharing.owned.recall = self._recall
        self._log = UsageLog()
        self._usages: dict[str, Usage] = {}
        self._meters: dict[str, Meter] = {}
        self._of_tokens = Usage(TOKENS_NAME, self._log)
        self._holders: dict[str, Meter] = {}  # of tokens

    def of(self, name: str, limits: KeyLimits) -> tuple[Usage, Meter | None]:
        """Return what counts the uses of a key, and what holds the key to its limits if it has any."""
        if (usage := self._usages.get(name)) is None:
            usage = self._usages[name] = Usage(name, self._log)
        if not limits:
            return usage, None
        if (meter := self._meters.get(name)) is None:
            meter = self._meters[name] = Meter(usage, limits, self._sharing)
        meter.set_limits(limits)
        return usage, meter

    def of_token(self, name: str, limits: KeyLimits) -> tuple[Usage, Meter | None]:
        """Return the same for the holder of tokens called `name`. Their uses are counted together, as there may be any
        number of them.

        Raise OverloadedError if too many are in use.
        """
        if not limits:
            return self._of_tokens, None
        if (meter := self._holders.get(name)) is None:
            if len(self._holders) >= MAX_HOLDERS:
                self._make_room()
            meter = self._holders[name] = Meter(self._of_tokens, limits, self._sharing, name)
        meter.set_limits(limits)
        return self._of_tokens, meter

    def _make_room(self) -> None:
        for name in [name for name, meter in self._holders.items() if meter.is_idle()]:
            del self._holders[name]
        if len(self._holders) >= MAX_HOLDERS:
            raise OverloadedError(f"{MAX_HOLDERS} holders of tokens are in use here", hint="try again later")

    def _recall(self, name: str) -> Recalled | None:
        meter = self._meters.get(name) or self._holders.get(name)
        return None if meter is None else meter.recall()

    def retain(self, names: Collection[str]) -> None:
        """Forget the keys that are not among these. The limits of one that comes back go on where they were."""
        for name in [name for name in self._usages if name not in names]:
            metrics.forget(name)
            del self._usages[name]
        for name in [name for name, meter in self._meters.items() if name not in names and meter.is_idle()]:
            del self._meters[name]

    def close(self) -> None:
        """Write the last lines of the usage log."""
        self._log.close()
