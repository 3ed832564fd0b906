"""Count under the names of OpenTelemetry's semantic conventions for generative AI, beside our own."""

import time
from functools import cache

from kvmesh.mesh.histogram import Distribution
from kvmesh.mesh.measure import bounded, histogram

PROVIDER = "kvmesh"
OPERATIONS = {"completions": "text_completion", "embeddings": "embeddings"}  # by endpoint; all others: chat
MOST_REMEMBERED = 1024


class GenAiMetrics:
    """The `gen_ai_*` metrics of a frontend. They are registered when this is made, once in a process."""

    def __init__(self) -> None:
        self._ttft = histogram("gen_ai_server_time_to_first_token_seconds")
        self._gap = histogram("gen_ai_server_time_per_output_token_seconds")
        self._duration = histogram("gen_ai_server_request_duration_seconds")
        self._tokens = histogram("gen_ai_client_token_usage_tokens")
        self._named: dict[tuple[str, str], tuple[str, str, str]] = {}

    def ended(self, endpoint: str, model: str, outcome: str, duration_s: float) -> None:
        """Count the end of a request."""
        self._duration.labels(*self._names(endpoint, model), "" if outcome == "ok" else outcome).observe(duration_s)

    def answered(self, endpoint: str, model: str, tokens: tuple[int, int], ttft_s: float | None, gap_s: float) -> None:
        """Count the tokens of prompts and answers, and the times of a request that has begun to be answered."""
        names = self._names(endpoint, model)
        for kind, count in zip(("input", "output"), tokens, strict=True):
            self._of_tokens(names, kind).observe(count)
        if ttft_s is not None:
            self._ttft.labels(*names).observe(ttft_s)
        if gap_s:
            self._gap.labels(*names).observe(gap_s)

    def exemplify(
        self,
        endpoint: str,
        model: str,
        outcome: str,
        trace_id: str,
        duration_s: float,
        ttft_s: float | None = None,
        gap_s: float = 0.0,
    ) -> None:
        """Let the histograms of times name the trace of a request that they have counted."""
        unix_s, names = time.time(), self._names(endpoint, model)
        self._duration.labels(*names, "" if outcome == "ok" else outcome).exemplify(duration_s, trace_id, unix_s)
        if ttft_s is not None:
            self._ttft.labels(*names).exemplify(ttft_s, trace_id, unix_s)
        if gap_s:
            self._gap.labels(*names).exemplify(gap_s, trace_id, unix_s)

    def _of_tokens(self, names: tuple[str, str, str], kind: str) -> Distribution:
        return self._tokens.labels(*names, kind)

    def _names(self, endpoint: str, model: str) -> tuple[str, str, str]:
        names = self._named.get((endpoint, model))
        if names is None:
            names = (OPERATIONS.get(endpoint, "chat"), PROVIDER, bounded("model", model) if model else "")
            if len(self._named) < MOST_REMEMBERED:
                self._named[endpoint, model] = names
        return names


@cache
def gen_ai_metrics() -> GenAiMetrics:
    """Return the metrics of this process, which are made at the first call."""
    return GenAiMetrics()
