"""Frames that are almost messages are refused as what they are."""

from tests.fuzz_frames import through_the_codec

FRAMES = 20_000
SEED = 6


def test_frames_that_are_almost_messages_are_refused_and_nothing_else_is_raised() -> None:
    counts = through_the_codec(FRAMES, SEED)
    assert counts["refused"] > FRAMES / 2 and counts["taken"] > FRAMES / 20, counts
