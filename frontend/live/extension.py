"""The live page at /ui."""

from kvmesh.frontend.extension import FrontendExtension
from kvmesh.frontend.live.opening import prepare

EXTENSION = FrontendExtension(prepare=prepare)
