"""API keys and tokens: who may call, for which models, and how much."""

from kvmesh.frontend.extension import FrontendExtension
from kvmesh.frontend.keys.opening import prepare

EXTENSION = FrontendExtension(settings=("api_keys_file", "jwt_keys"), prepare=prepare)
