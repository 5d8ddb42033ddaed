"""With how many tokens an answer is counted in decode, by what is known of its tenant."""

from scheduler.fairness.held_shares import HeldShares, HeldStream
from scheduler.request import Request
from scheduler.waiting.answer_lengths import PROVEN_ANSWERS, UNPROVEN_STREAMS, UNPROVEN_TOKENS, AnswerLengths
from tests.coordinator.world import submit

PATH = ("standard", "new", "")


def counted(lengths: AnswerLengths, shares: HeldShares) -> int:
    request = Request("a", 1, submit("a", 8, max_tokens=8192), b"", 0.0, 0.0, PATH)
    lengths.expect(request, shares)
    return request.expected_left + 1


def test_unknown_tenant_has_few_estimates() -> None:
    """A tenant without answers has few streams that are counted with a guess; once it is proven it has any number."""
    lengths, shares = AnswerLengths(400.0, overcommit=64.0), HeldShares()
    for number in range(UNPROVEN_STREAMS):
        assert counted(lengths, shares) == 400
        shares.add(PATH, 1, (str(number), 1), HeldStream(10, estimated=1))
    assert counted(lengths, shares) == UNPROVEN_TOKENS
    for _ in range(PROVEN_ANSWERS):
        lengths.learn(PATH, 900)
    assert 900 <= counted(lengths, shares) < 1000


def test_running_answers_raise_the_estimate() -> None:
    """An answer that outlives its estimate counts before it has ended."""
    lengths, shares = AnswerLengths(400.0, overcommit=64.0), HeldShares()
    lengths.outlived(PATH, 2000)
    assert counted(lengths, shares) == 2000
