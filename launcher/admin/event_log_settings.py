"""Options of `crossdock replay` and `crossdock explain`."""

from typing import Literal

from pydantic import Field

from runtime.settings.types import JsonOption

_FILE = "Event log that a coordinator wrote with --event-log."


class ReplaySettings(JsonOption):
    """Execute an event log again and check that this coordinator decides the same, action by action.

    Status 0: all the same. 1: it decides differently, or the event log is damaged.
    """

    file: str = Field(min_length=1, description=_FILE, json_schema_extra={"argument": "FILE"})


class ExplainSettings(JsonOption):
    """Show why a request waited, and for which others; without REQUEST, list the requests whose clients waited longest, and
    those that did not finish. With --flips, show which workers changed their role, what the autopilot advised, and why.

    It replays the event log and looks on. REQUEST is the id in the answer, like chatcmpl-…, or its beginning.
    """

    file: str = Field(min_length=1, description=_FILE, json_schema_extra={"argument": "FILE"})
    request: str = Field("", max_length=64, description="Id of a request.", json_schema_extra={"argument": "REQUEST"})
    by: Literal["ttft", "duration", "gap", "queue"] = Field(
        "ttft",
        description="Without REQUEST: rank by the time to the first token, the whole duration, the longest pause within the"
        " answer, or the time in the queue.",
    )
    flips: bool = Field(False, description="Without REQUEST: show changes of role and the autopilot's advice instead.")
