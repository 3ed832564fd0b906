"""Read kv_transfer_params of vLLM strictly: only what is checked here may reach another server. Pure.

A vLLM server asserts, and its engine process ends, on parameters that ask for a pull without saying of what. So nothing
is passed on that was not checked here, and a caller's own parameters never are.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvmesh.protocol.errors import TransferError
from kvmesh.protocol.messages import UNREADABLE

ASK_FOR_OFFER: Mapping[str, bool] = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a prefill server is asked with."""

MAX_PARAMS_BYTES = 8 << 20
MAX_KEYS = 64

_Name = Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^[\x21-\x7e]+\Z")]
_Size = Annotated[int, Meta(ge=1, le=4096)]
_BlockId = Annotated[int, Meta(ge=0, le=0x7FFF_FFFF)]  # vLLM's engine ends on one beyond int32
_HOST = re.compile(r"[A-Za-z0-9_.:%\[\]-]{1,255}")


class PullParams(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters that every version needs to pull, and those that some add."""

    do_remote_prefill: bool
    do_remote_decode: bool = False
    remote_block_ids: Annotated[list[list[_BlockId] | _BlockId], Meta(min_length=1, max_length=1 << 20)]
    remote_engine_id: _Name
    remote_request_id: _Name
    remote_host: str
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    remote_num_tokens: Annotated[int, Meta(ge=0, le=1 << 32)] = 0  # old versions do not say
    tp_size: _Size = 1
    dcp_size: _Size = 1
    pp_size: _Size = 1
    remote_blocks_expiry_time: float | None = None
    transfer_mode: Literal["pull"] = "pull"
    remote_prefill_cached_tokens: Annotated[int, Meta(ge=0)] | None = None

    @property
    def block_groups(self) -> list[list[int]]:
        """Per group of layers. Old versions know no groups: theirs is one."""
        groups = [group for group in self.remote_block_ids if isinstance(group, list)]
        return groups or [[block for block in self.remote_block_ids if isinstance(block, int)]]

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of the largest group: the one that sees the whole prompt."""
        return max(map(len, self.block_groups))


def read_params(opaque: bytes) -> tuple[PullParams, dict[str, Any]]:
    """Read parameters from JSON. Return them, and all keys as they came, including those that this module does not
    know.

    Raise TransferError for an offer that is not complete, and for an unknown key with anything but a plain value.
    """
    if not 0 < len(opaque) <= MAX_PARAMS_BYTES:
        raise TransferError(f"kv_transfer_params of {len(opaque)} bytes; at most {MAX_PARAMS_BYTES} are accepted")
    try:
        params = msgspec.json.decode(opaque, type=dict[str, Any])
        pull = msgspec.convert(params, PullParams)
    except UNREADABLE as error:
        raise TransferError(
            f"unreadable kv_transfer_params: {error}", hint="run one version of vLLM everywhere"
        ) from error
    _check(pull, params)
    return pull, params


def _check(pull: PullParams, params: Mapping[str, Any]) -> None:
    if not pull.do_remote_prefill or pull.do_remote_decode:
        raise TransferError("kv_transfer_params that offer no blocks to a decode server")
    if not pull.num_blocks:
        raise TransferError("kv_transfer_params without a block")
    if not _HOST.fullmatch(pull.remote_host):
        raise TransferError(f"kv_transfer_params that name no host: {pull.remote_host[:80]!r}")
    if len(params) > MAX_KEYS:
        raise TransferError(f"kv_transfer_params with {len(params)} keys; at most {MAX_KEYS} are accepted")
    known = {*PullParams.__struct_fields__}
    for key, value in params.items():
        if key not in known and not isinstance(value, str | int | float | None):
            raise TransferError(f"kv_transfer_params with an unknown kind of value in {key[:80]!r}")
