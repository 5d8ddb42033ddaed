"""One short string that is equal between two workers exactly when their KV caches mean the same."""

import json
from pathlib import Path
from typing import Any

import xxhash

_IGNORED = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"})
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_MAX_HEADER_BYTES = 100 << 20
_TENSOR_PARALLEL = 1


def model_fingerprint(folder: Path, config: dict[str, Any], dtype: str, block_size: int) -> str:
    """XXH3 (128 bits, hex) over the configuration, the weight files and the KV layout.

    Of each safetensors file: name, size, header, and 64 samples of 4 KiB spread over the data, so that a large model costs
    milliseconds. It tells models apart; it is no protection against a forger.
    """
    digest = xxhash.xxh3_128()
    kept = {name: value for name, value in config.items() if name not in _IGNORED}
    digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    digest.update(f"|{dtype}|block_size={block_size}|tp={_TENSOR_PARALLEL}".encode())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"|{path.name}|{size}|".encode())
        with path.open("rb") as file:
            header_bytes = min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES)
            digest.update(file.read(header_bytes))
            data = 8 + header_bytes
            for index in range(_SAMPLES):
                file.seek(data + (size - data) * index // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
