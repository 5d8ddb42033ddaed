"""`python -m tools.lifecycle [PAGE]`: the diagram of a request's life cycle, made from `scheduler.lifecycle`.

With PAGE, the part of that page between the two markers is replaced.
"""

import sys
from pathlib import Path

from scheduler.lifecycle import TERMINAL, TRANSITIONS, RequestState, Trigger

BEGIN = "<!-- lifecycle: made by `python -m tools.lifecycle ARCHITECTURE.md`; a test fails when it is stale -->\n"
END = "<!-- lifecycle: end -->\n"
LIVE = frozenset(RequestState) - TERMINAL


def text() -> str:
    """A Mermaid diagram. Triggers that are the same in every live state follow it as sentences, which keeps it readable."""
    everywhere = {
        trigger: targets.pop() for trigger in Trigger if len(targets := _targets_in_every_live_state(trigger)) == 1
    }
    edges = [
        f"    {state.name} --> {following.name}: {trigger}"
        for (state, trigger), following in TRANSITIONS.items()
        if trigger not in everywhere
    ]
    sentences = [f"`{trigger}` leads to {state.name}" for trigger, state in everywhere.items()]
    diagram = ["```mermaid", "stateDiagram-v2", f"    [*] --> {RequestState.QUEUED.name}", *edges, "```"]
    return "\n".join([*diagram, "", f"From every live state {' and '.join(sentences)}.", ""])


def _targets_in_every_live_state(trigger: Trigger) -> set[RequestState]:
    """Returns the states to which the trigger leads; empty if some live state does not have it."""
    if any((state, trigger) not in TRANSITIONS for state in LIVE):
        return set()
    return {TRANSITIONS[state, trigger] for state in LIVE}


def replace(page: str) -> str:
    """The page with the present diagram. Raises `ValueError` if it lacks one of the markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}")
    return before + begin + text() + end + after


def main(arguments: list[str]) -> None:
    if arguments:
        page = Path(arguments[0])
        page.write_text(replace(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(text())


if __name__ == "__main__":
    main(sys.argv[1:])
