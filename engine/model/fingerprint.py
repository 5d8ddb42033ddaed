"""One short string that is equal between two workers exactly when their KV caches mean the same, block sizes apart."""

import json
from pathlib import Path
from typing import Any

import xxhash

from proto.compatible import join_fields

_IGNORED = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"})
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")
_ROPE_CHARS_MAX = 120
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_MAX_HEADER_BYTES = 100 << 20


def model_fingerprint(
    folder: Path, config: dict[str, Any], dtype: str, shape: tuple[int, int, int], weights: str = "float32"
) -> str:
    """The fields of `proto.compatible`: XXH3 of the configuration (`model`), of tokenizer.json and of the weight files
    (`revision`, with the format that a worker keeps them in, if it is another), dtype and shape (layers, KV heads, size of a
    head) of the KV, and the rotary embedding.

    Of each safetensors file: name, size, header, and 64 samples of 4 KiB spread over the data, so that a large model costs
    milliseconds. It tells models apart; it is no protection against a forger.
    """
    kept = {name: value for name, value in config.items() if name not in _IGNORED}
    rope = _json({name: kept.pop(name) for name in _ROPE if kept.get(name)})
    return join_fields(
        {
            "model": f"{config.get('model_type', '')} {xxhash.xxh3_64_hexdigest(_json(kept).encode())}",
            "tokenizer": _file_digest(folder / "tokenizer.json"),
            "revision": _weights_digest(folder) + ("" if weights == "float32" else f" {weights}"),
            "dtype": dtype,
            **dict(zip(("layers", "kv_heads", "head_dim"), shape, strict=True)),
            "rope": rope if len(rope) <= _ROPE_CHARS_MAX else xxhash.xxh3_64_hexdigest(rope.encode()),
        }
    )


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _file_digest(path: Path) -> str:
    return xxhash.xxh3_64_hexdigest(path.read_bytes()) if path.exists() else ""


def _weights_digest(folder: Path) -> str:
    digest = xxhash.xxh3_128()
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
