"""Frames that are almost messages are refused as what they are."""

from tests.fuzz_frames import through_the_codec

FRAMES = 20_000
SEED = 6


def test_almost_messages_are_refused() -> None:
    """Mutated frames are decoded or refused with a protocol error, and no other error is raised."""
    counts = through_the_codec(FRAMES, SEED)
    assert counts["refused"] > FRAMES / 2 and counts["taken"] > FRAMES / 20, counts
