"""Tell the weights of one model from those of another, for KV that outlives the process that computed it."""

from hashlib import blake2b
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLES, SAMPLE_BYTES = 32, 64 << 10  # of each file: training changes all of a file


def weights_print(model_path: str) -> bytes:
    """Return 32 bytes that change when a model's configuration or weights do; b"" if the folder has neither.

    Large files are sampled at places that their size gives. Raise OSError.
    """
    folder = Path(model_path)
    files = [path for path in folder.glob("*") if path.suffix in WEIGHT_SUFFIXES or path.name == "config.json"]
    if not files:
        return b""
    digest = blake2b(digest_size=32)
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
                if size <= SAMPLE_BYTES:
                    break
    return digest.digest()
