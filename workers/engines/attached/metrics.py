"""The server's own metrics, under their own names, beside those of its worker."""

import logging
from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

MAX_CHARS = 4 << 20  # of one page of metrics: vLLM's has a few dozen KiB


class ServerMetrics(Collector):
    """The server's metrics as `told` last gave them.

    A server has metrics of its process and its Python too. They are left out: here they would be taken for ours.
    """

    def __init__(self, prefix: str) -> None:
        """The server's own metrics begin with `prefix`; with "" none are passed on."""
        self._prefix = prefix
        self._text = ""

    def told(self, text: str) -> None:
        self._text = text if len(text) <= MAX_CHARS else ""

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, on the thread of the scrape; none if they cannot be read, so that ours can still be
        scraped.
        """
        if not self._text or not self._prefix:
            return []
        try:
            families = list(text_string_to_metric_families(self._text))
        except Exception as error:  # the parser has no error of its own: it fails in many ways
            log.debug("the server's metrics cannot be read: %r", error)
            return []
        return [family for family in families if family.name.startswith(self._prefix)]
