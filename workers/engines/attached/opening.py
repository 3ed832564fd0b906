"""Open the engine of a server that runs already."""

import os
from urllib.parse import urlsplit

from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.attached.asking import API_KEY
from kvmesh.workers.engines.attached.engine import AttachedEngine


def open_engine(config: WorkerConfig) -> AttachedEngine:
    """Raise ConfigError if the settings cannot be those of a server."""
    url = urlsplit(config.attach_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(
            f"--attach-url is {config.attach_url!r}, which is no server", hint="give it as http://host:port"
        )
    if config.attach_kv_replay and not config.attach_kv_events:
        raise ConfigError(
            "--attach-kv-replay without --attach-kv-events", hint="give both, or neither: then it is asked"
        )
    for endpoint in (config.attach_kv_events, config.attach_kv_replay):
        if endpoint and not endpoint.startswith(("tcp://", "ipc://")):
            raise ConfigError(f"KV events from {endpoint!r}", hint="give the ZMQ socket as tcp://host:port")
    return AttachedEngine(config, api_key=os.environ.get(API_KEY, ""))
