"""The endpoint picker of a gateway: `kvmesh router --ext-proc-port`."""

from kvmesh.frontend.picker.service import serve
from kvmesh.router.extension import RouterExtension

EXTENSION = RouterExtension(serve=serve)
