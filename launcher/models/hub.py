"""Models by name: `ORG/NAME` from the Hugging Face hub, safetensors, JSON and tokenizer files only. `ORG/NAME@REVISION` names
a commit, tag or branch; only a commit never changes. Each commit has a folder of its own."""

from pathlib import Path

from rich.console import Console

from proto.errors import CrossdockError

_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "tokenizer*")
_UNWANTED = ("original/*", "onnx/*", "consolidated*", "*/*.safetensors")
ETAG_TIMEOUT_S = 10.0


class ModelError(CrossdockError):
    """A model could not be made ready."""


def download(name: str, console: Console) -> Path:
    """Returns the folder with the files of `ORG/NAME` or `ORG/NAME@REVISION`; files that are there already are not fetched
    again. Raises `ModelError`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    repository, _, revision = name.partition("@")
    console.print(f"Looking for {name} on the Hugging Face hub …")
    try:
        folder = snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
            etag_timeout=ETAG_TIMEOUT_S,
        )
    except GatedRepoError:
        raise ModelError(f"--model: {name} wants its licence accepted; do so on its page and set HF_TOKEN") from None
    except RevisionNotFoundError:
        raise ModelError(f"--model: {repository} has no revision {revision} on the hub") from None
    except RepositoryNotFoundError:
        raise ModelError(f"--model: the hub has no {repository}, or HF_TOKEN does not give access to it") from None
    except Exception as error:  # noqa: BLE001  the hub's client lets through its HTTP library's errors, by version
        why = str(error).strip().splitlines()
        raise ModelError(
            f"--model: cannot fetch {name} from the hub ({why[0] if why else type(error).__name__}). Check the network,"
            " or pass a folder"
        ) from None
    path = Path(folder)
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise ModelError(f"--model: {name} has no config.json with safetensors; other formats are not read")
    return path
