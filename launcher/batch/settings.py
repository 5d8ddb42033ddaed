"""Options of `crossdock batch run`."""

from pydantic import Field

from runtime.settings.types import Options


class BatchRunSettings(Options):
    """Run a file of requests as a batch, and write their results to a file.

    Each line of FILE is a request in the form of OpenAI's batches. The cluster runs them in the lowest priority class, when it
    has capacity to spare. Ctrl-C leaves the batch running; --resume waits for it again.
    """

    file: str = Field(
        min_length=1,
        description="JSON lines: each has custom_id, method, url and body.",
        json_schema_extra={"argument": "FILE"},
    )
    url: str = Field("", description="Server, like http://127.0.0.1:8000; empty: the cluster running on this machine.")
    api_key: str = Field("", description="Key, where the server wants one.")
    output: str = Field(
        "",
        description="File for the results; empty: FILE with .results.jsonl in place of .jsonl. Requests that failed go to the"
        " same name with .errors.jsonl.",
    )
    resume: str = Field("", description="Id of a batch that was made of FILE: wait for it, and upload nothing.")
    cancel: bool = Field(False, description="On Ctrl-C, cancel the batch and write the results that it has.")
