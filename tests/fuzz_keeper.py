"""Random messages from the coordinator and from workers to a gateway's stream keeper. See `fuzz_cores`."""

import random
from collections import deque
from typing import Any

from gateway.streams.keeper import StreamKeeper
from gateway.streams.prompt_scores import PromptScores
from gateway.streams.types import (
    ClientGone,
    Drain,
    Ended,
    LinkDown,
    LinkUp,
    Open,
    SendCancel,
    SendSubmit,
    Shutdown,
    StreamLimits,
    Tick,
    TokensReceived,
    Work,
    WorkerDown,
)
from gateway.text.block_hashes import BlockNames
from proto.codec import decode, pack_tokens, to_frames
from proto.errors import RemoteProtocolError
from proto.messages import Accepted, Interrupted, Rejected, Submit, TokenItem, Tokens
from proto.progress import PromptLogprobs
from proto.sampling import Sampling
from tests.gateway.keeper_world import work
from tests.random_messages import RandomMessages

STREAMS = ("s1", "s2", "s3", "s4")


class KeeperWorld:
    def __init__(self, seed: int) -> None:
        self.random = source = random.Random(seed)
        self.make = RandomMessages(
            source,
            {
                "request_id": (*STREAMS, "s1.c0", "s1.c1", "s2.c0"),
                "attempt": (1, 1, 1, 2, 2, 3),
                "choice": (0, 0, 0, 1, 2),
                "index": (0, 0, 1, 1, 2, 3, 4, 8),
                "tokens": ((1,), (1,), (1, 2), (3, 4, 5), ()),
                "start": (1, 2),
                "top": (0, 1, 2),
            },
        ).make
        self.keeper = StreamKeeper(
            StreamLimits(streams_max=source.choice([2, 100]), attempts_max=source.choice([2, 5]))
        )
        self.now = 100.0
        self.live: dict[str, Work] = {}
        self.submitted: deque[Submit] = deque(maxlen=8)
        self.trail: deque[Any] = deque(maxlen=4)
        self.feed(LinkUp(7))

    def step(self) -> None:
        source = self.random
        self.now += source.choice([0, 0, 0.001, 0.05, 0.6, 3]) if source.random() < 0.97 else 130
        chance = source.random()
        if chance < 0.1:
            self.open(source.choice(STREAMS))
        elif chance < 0.5:
            decoder = source.choice([0, 20, 21])
            items = tuple(self.item() for _ in range(source.choice([1, 1, 2, 4])))
            self.receive(Tokens(items), decoder)
        elif chance < 0.55:
            self.receive(self.make(PromptLogprobs), 0)
        elif chance < 0.85:
            self.receive(self.make(source.choice([Accepted, Accepted, Rejected, Interrupted]), **self.about()), 0)
        elif chance < 0.93:
            self.feed(Tick())
        else:
            events = [LinkUp(source.choice([7, 8])), LinkDown(), WorkerDown(source.choice([20, 21]))]
            events += [ClientGone(source.choice(STREAMS))]
            self.feed(Drain() if source.random() < 0.01 else source.choice(events))

    def end(self) -> None:
        self.feed(Drain())
        self.feed(Shutdown())
        assert not self.keeper.streams and not self.keeper.submissions and not self.live

    def about(self) -> dict[str, Any]:
        """Mostly of an attempt that was submitted lately."""
        if not self.submitted or self.random.random() < 0.3:
            return {}
        submit = self.random.choice(self.submitted)
        return {"request_id": submit.request_id, "attempt": submit.attempt}

    def item(self) -> TokenItem:
        about = self.about()
        submission = self.keeper.submissions.get(about.get("request_id", ""))
        if submission is not None and self.random.random() < 0.8:
            choice = self.random.choice(submission.choices)
            about |= {"choice": choice.index, "index": len(choice.tokens)}
        made: TokenItem = self.make(TokenItem, **about)
        return made

    def open(self, name: str) -> None:
        if name in self.live:
            return
        source = self.random
        sampling = Sampling(max_tokens=source.choice([1, 5, 40]), logprobs=source.choice([-1, -1, 1]))
        self.live[name] = work(
            name,
            stops=("3 ",),
            sampling=sampling,
            choices=source.choice([1, 1, 2, 3]),
            names=source.choice([None, BlockNames.of(pack_tokens((1, 2, 3)), 2, "group")]),
            deadline_ms=source.choice([0.0, 0.0, 50.0]),
            prompt_scores=source.choice([None, None, PromptScores(3, 1)]),
        )
        self.feed(Open(self.live[name]))

    def receive(self, message: Any, decoder: int) -> None:
        """As `gateway.backend` passes it on."""
        try:
            message, _ = decode(to_frames(message))
            if isinstance(message, Tokens):
                self.feed(TokensReceived(message.items, decoder))
            elif isinstance(message, PromptLogprobs):
                submission = self.keeper.submissions.get(message.request_id)
                scores = submission.stream.work.prompt_scores if submission is not None else None
                if scores is not None:
                    scores.take(message)
            else:
                self.feed(message)
        except RemoteProtocolError:
            return

    def feed(self, event: Any) -> None:
        self.trail.append(event)
        for action in self.keeper.handle(event, self.now):
            if isinstance(action, SendSubmit):
                decode(to_frames(action.submit, action.blob))
                self.submitted.append(action.submit)
            elif isinstance(action, SendCancel):
                decode(to_frames(action.cancel))
            elif isinstance(action, Ended):
                del self.live[action.stream_id]
        if isinstance(event, ClientGone):
            self.live.pop(event.stream_id, None)
        self.keeper.next_deadline()
        assert set(self.live) == set(self.keeper.streams)
        for submission in self.keeper.submissions.values():
            assert submission in submission.stream.submissions
            assert self.keeper.streams[submission.stream.id] is submission.stream
