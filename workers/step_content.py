"""The content of a step engine's KV, and what the addresses of its blocks begin with."""

from kvmesh.kvcache.tiers.address import model_fingerprint
from kvmesh.protocol.messages import KvLayout
from kvmesh.workers.executor import ModelInfo
from kvmesh.workers.loaded_content import NOT_YET, KvContent, LoadedContent

PRINT_CHARS = 32  # of the fingerprint of a worker's KV, in hex, on its card


class StepContent:
    """Tracks what one step engine has loaded: call `begin` before the load, `loaded` after it."""

    def __init__(self, model: str, model_path: str, *, has_weights: bool, shares_prefixes: bool) -> None:
        self._model = model
        self._shares_prefixes = shares_prefixes
        self._loaded = LoadedContent(model_path, has_weights=has_weights)
        self._layout: KvLayout | None = None
        self._known: KvContent | None = None
        self._peers = b""
        self.begin = self._loaded.begin
        self.close = self._loaded.close
        self.wait = self._loaded.wait

    def loaded(self, model: ModelInfo) -> None:
        self._layout = model.layout
        self._loaded.loaded(f"{model.kv_settings} {model.layout.dtype}")

    def of_peers(self) -> bytes:
        """Return what the addresses begin with under which peers exchange blocks; b"" while the content is unknown."""
        if not self._peers and self._shares_prefixes and self._layout is not None and self._loaded.digest:
            self._peers = model_fingerprint(self._model, self._layout, self._loaded.digest)
        return self._peers

    def kv_content(self) -> KvContent:
        if self._known is None:
            if not self._loaded.digest:
                return NOT_YET
            self._known = KvContent(self._loaded.fingerprint, kv_print=self.of_peers().hex()[:PRINT_CHARS])
        return self._known
