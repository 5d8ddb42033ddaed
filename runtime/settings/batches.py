"""Options of gateways for files and batches."""

from typing import Final

from pydantic import Field

from runtime.settings.types import Options

BATCHES_OFF: Final = ("", "off")
"""Values of `batch_db` that name no file."""


class BatchOptions(Options):
    """What `/v1/files` and `/v1/batches` may take."""

    batch_db: str = Field(
        "",
        description="SQLite file for /v1/files and /v1/batches, on a local disk; gateways of one host that serve the same"
        " models may share it, and one of them runs the batches. Empty or off: neither is served.",
    )
    batch_lines_max: int = Field(
        32,
        ge=1,
        le=1024,
        description="Most requests of batches being answered at once. More keep a larger cluster busy.",
    )
    batch_file_mib: int = Field(
        64, ge=1, le=1024, description="Largest file in MiB that /v1/files takes; over it is 413."
    )
    batch_tenant_mib: int = Field(
        1024,
        ge=1,
        le=1 << 20,
        description="Most MiB of files and results of one tenant; each file and batch counts 16 KiB more. Over it, uploads and"
        " new batches get 403, and requests of batches that have not run get an error.",
    )
    batch_keep_days: int = Field(30, ge=1, le=3650, description="Days after which files and ended batches are deleted.")
