"""List the names of the surfaces, for programs that run them in other processes."""

PYTHON_NAMES = (
    "plane_frames",
    "mesh_messages",
    "cards",
    "kv_events",
    "index_snapshots",
    "token_lane",
    "packed_tokens",
    "http_requests",
    "api_bodies",
    "queries",
    "parsers",
    "chat_templates",
    "config_files",
    "config_flags",
    "guides",
    "schemas",
    "member_uris",
    "certificate_files",
    "key_files",
)
NATIVE = ("tokens", "payload", "snapshot", "index")
