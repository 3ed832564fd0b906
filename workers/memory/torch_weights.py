"""Share a model's weights between the workers of a host, through its memory service.

An image holds all tensors of a ModelWeights in the form in which steps read them: converted, fused, packed. Its head
says where each lies. The worker that writes an image loads the weights as it would without a service, copies them,
frees its own, and then maps the image as every other worker does.
"""

import ctypes
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from kvmesh.protocol.errors import EngineError, MeshError
from kvmesh.workers.engines.torch import weights as engine_weights
from kvmesh.workers.engines.torch.cache import TORCH_DTYPES
from kvmesh.workers.engines.torch.metrics import WEIGHTS, WEIGHTS_MOVED
from kvmesh.workers.engines.torch.weights import ModelWeights
from kvmesh.workers.memory.client import ImageLease, SharedMemory
from kvmesh.workers.memory.pages import MappedImage, address_of, map_image
from kvmesh.workers.weights_hash import WEIGHT_SUFFIXES
from kvmesh.workers.weights_service import WeightsInUse

log = logging.getLogger(__name__)

PATIENCE_S = 300.0  # for another worker that writes; then this one loads by itself
ALIGNMENT = 64  # of tensors
ENGINE = Path(engine_weights.__file__).parent  # its code lays the weights out
_HEAD = 16  # bytes before the description: a mark and its length
_MARK = b"kvmesh/1"
_PIECE_BYTES = 64 << 20  # written at once
_DTYPES = {**TORCH_DTYPES, "uint8": torch.uint8, "int8": torch.int8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_Count = Annotated[int, Meta(ge=0, le=1 << 48)]
_Shape = Annotated[tuple[_Count, ...], Meta(max_length=8)]


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """A contiguous tensor in an image."""

    offset: _Count  # from the first tensor's place on
    shape: _Shape
    dtype: str


def weights_key(folder: Path, dtype: str, kernels_name: str, random_weights: bool) -> bytes:
    """Return the fingerprint of all that the bytes of the weights depend on. Raise OSError.

    Files count by their place on disk and the time of their last change, which any change moves; config.json and the
    code of the engine and of this module, which lay the weights out, by their text.
    """
    digest = hashlib.blake2b(f"{dtype}\0{kernels_name}\0{random_weights}\0{torch.__version__}".encode(), digest_size=32)
    for code in [Path(__file__), *sorted(path for path in ENGINE.iterdir() if path.suffix in (".py", ".so"))]:
        digest.update(code.read_bytes())
    digest.update((folder / "config.json").read_bytes())
    if not random_weights:
        for path in sorted(folder.iterdir()):
            if path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json"):
                found = path.stat()
                place = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
                digest.update(f"{path.name}\0{place}\0".encode())
    return digest.digest()


def share_weights(
    socket_path: str, key_of: Callable[[], bytes], label: str, load: Callable[[], ModelWeights]
) -> WeightsInUse:
    """Return weights from the memory service, written there by this worker if by none before.

    `load` reads them as a worker without a service does. It is used so whenever the service fails, for any reason; the
    log has one line then. What `load` raises passes through.
    """
    key, lease = b"", None
    loading = _Loading(load)
    try:
        key = key_of()
        lease = ImageLease(socket_path)
        memory = lease.want(key, label, PATIENCE_S)
        source = "written" if memory is None else "mapped"
        if memory is None:
            memory = _write(lease, loading, lambda: key_of() == key)
        image = _mapped(memory, key)
        found = read_image(image.memory)
    except (OSError, MeshError, msgspec.DecodeError) as error:
        if lease is not None:
            lease.close()
        if loading.has_raised:
            raise
        log.warning("weights are loaded for this worker alone: %s", error)
        WEIGHTS.labels("own").inc()
        return WeightsInUse(loading.load())
    WEIGHTS.labels(source).inc()
    log.info("weights are shared: %s", source, extra={"address": hex(image.address), "bytes": memory.num_bytes})
    return WeightsInUse(found, lease, image)


class _Loading:
    """Tells an error of loading, which a worker has with or without a service, from one of the service."""

    def __init__(self, load: Callable[[], ModelWeights]) -> None:
        self._load = load
        self.has_raised = False

    def load(self) -> ModelWeights:
        self.has_raised = True
        found = self._load()
        self.has_raised = False
        return found


def _write(lease: ImageLease, loading: _Loading, is_unchanged: Callable[[], bool]) -> SharedMemory:
    """Load the weights and write them into memory of the service. Raise OSError or EngineError."""
    plan = ImagePlan()
    head = plan.describe(loading.load())
    if not is_unchanged():
        raise EngineError("the files of the weights changed while they were read")
    fd = lease.space(plan.first + plan.num_bytes)
    try:
        plan.write(fd, head)
    finally:
        os.close(fd)
    return lease.commit()


def _mapped(memory: SharedMemory, key: bytes) -> MappedImage:
    try:
        image = map_image(memory.fd, memory.num_bytes, address_of(key))
    finally:
        os.close(memory.fd)
    if image.has_moved:
        WEIGHTS_MOVED.inc()
        log.warning("weights are mapped at %#x: their own address is taken in this process", image.address)
    return image


class ImagePlan:
    """Decides where each tensor of a model lies in an image, and writes them there."""

    def __init__(self) -> None:
        self.num_bytes = 0  # of the tensors, from `first` on
        self.first = 0
        self._tensors: list[tuple[int, Tensor]] = []
        self._places: dict[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype], _Stored] = {}

    def describe(self, found: ModelWeights) -> bytes:
        """Return the head of the image. Raise EngineError for a tensor that cannot lie in one."""
        text = msgspec.msgpack.encode(found, enc_hook=self._store)
        self.first = _aligned(_HEAD + len(text))
        return _MARK + len(text).to_bytes(8, "little") + text

    def _store(self, value: Any) -> _Stored:
        if not isinstance(value, Tensor) or value.dtype not in _NAMES or value.layout != torch.strided:
            raise EngineError(f"a {type(value).__name__} cannot be shared between processes")
        known = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        if (stored := self._places.get(known)) is None:  # a tied matrix has two names
            stored = self._places[known] = _Stored(self.num_bytes, tuple(value.shape), _NAMES[value.dtype])
            self._tensors.append((self.num_bytes, value))
            self.num_bytes += _aligned(value.numel() * value.element_size())
        return stored

    def write(self, fd: int, head: bytes) -> None:
        """Write head and tensors. Memory of the tensors is freed as soon as it is written: they are useless after."""
        _write_all(fd, head, 0)
        remaining = Counter(tensor.untyped_storage().data_ptr() for _, tensor in self._tensors)
        while self._tensors:
            offset, tensor = self._tensors.pop()
            whole = tensor.contiguous()
            _write_all(fd, _bytes_of(whole), self.first + offset)
            storage = tensor.untyped_storage()
            remaining[storage.data_ptr()] -= 1
            if not remaining[storage.data_ptr()] and storage.resizable():
                storage.resize_(0)


def read_image(memory: Any) -> ModelWeights:
    """Return the weights in an image, without a copy. Raise EngineError or DecodeError for one that is damaged."""
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    mark, length = bytes(memory[: len(_MARK)]), int.from_bytes(bytes(memory[len(_MARK) : _HEAD]), "little")
    if mark != _MARK or _HEAD + length > len(whole):
        raise EngineError("an image of weights has no head")
    tensors = whole[_aligned(_HEAD + length) :]

    def tensor_of(kind: type, value: Any) -> Tensor:
        if kind is not Tensor:
            raise EngineError(f"an image of weights has a {kind.__name__}")
        stored = msgspec.convert(value, _Stored)
        dtype = _DTYPES.get(stored.dtype)
        if dtype is None or stored.offset % ALIGNMENT:
            raise EngineError(f"an image of weights has a tensor that cannot be: {stored}")
        end = stored.offset + prod(stored.shape) * dtype.itemsize
        if end > len(tensors):
            raise EngineError(f"an image of weights is too short for a tensor: {stored}")
        return tensors[stored.offset : end].view(dtype).view(stored.shape)

    return msgspec.msgpack.decode(bytes(memory[_HEAD : _HEAD + length]), type=ModelWeights, dec_hook=tensor_of)


def _bytes_of(tensor: Tensor) -> Any:
    """Return the memory of a contiguous tensor, which the caller keeps. torch's own views would pin its storage."""
    return (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _write_all(fd: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
    while view:
        written = os.pwrite(fd, view[:_PIECE_BYTES], offset)
        view, offset = view[written:], offset + written
