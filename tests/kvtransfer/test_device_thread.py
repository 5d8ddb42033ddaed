"""The thread that owns a device's NCCL operations: what it starts when, and what becomes of those that hang or fail."""

import threading

from kvtransfer.memory.device_thread import DeviceQueue, DeviceThread, Operation, TransferHandle


class Fake(Operation):
    def __init__(self, name: str, log: list[str], fails: str = "") -> None:
        self.name, self.log, self.fails = name, log, fails
        self.done = False

    def _note(self, what: str) -> None:
        self.log.append(f"{what} {self.name}")
        if self.fails == what:
            raise ValueError(f"cannot {what}")

    def launch(self) -> None:
        self._note("launch")

    def is_done(self, now: float) -> bool:
        if self.fails == "look":
            raise RuntimeError("NCCL says no")
        return self.done


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.rings = 0
        self.queue = DeviceQueue(lambda: self.now)

    def ask(self, name: str, fails: str = "") -> tuple[Fake, TransferHandle]:
        operation = Fake(name, self.log, fails)
        handle = TransferHandle(operation, 3.0, self._ring)
        self.queue.submit(handle)
        return operation, handle

    def _ring(self) -> None:
        self.rings += 1


def test_hanging_operation_blocks_no_other():
    """A hanging operation ends with a timeout error, and an operation started after it ends normally."""
    world = World()
    (_, hangs), (second, ends) = world.ask("a"), world.ask("b")
    assert world.queue.step()
    assert world.log == ["launch a", "launch b"] and hangs.launched and not hangs.ended
    second.done = True
    assert world.queue.step()
    assert ends.ended and not ends.error and not hangs.ended
    world.now = 3.0
    assert not world.queue.step()
    assert hangs.ended and "3 s" in hangs.error
    assert world.rings == 4


def test_timeout_counts_from_peers_begin():
    """The timeout of an operation that waits for its other end runs only from when that end has begun."""
    world = World()
    handle = TransferHandle(Fake("a", world.log), 3.0, world._ring, counts=False)
    world.queue.submit(handle)
    for now in (0.0, 100.0):
        world.now = now
        assert world.queue.step() and not handle.ended
    handle.counts = True
    assert world.queue.step() and not handle.ended
    world.now = 103.0
    assert not world.queue.step() and "3 s" in handle.error


def test_cancelled_operation_ends_at_once():
    """A cancelled operation is never launched, or is left to itself if it was launched already."""
    world = World()
    _, early = world.ask("early")
    early.cancel()
    world.queue.step()
    assert world.log == [] and early.ended and early.error
    _, late = world.ask("late")
    world.queue.step()
    late.cancel()
    assert not world.queue.step()
    assert world.log == ["launch late"] and late.error == "it was given up"


def test_failure_reaches_its_caller_only():
    """An error in launching or polling an operation is reported on its own handle, and others succeed."""
    world = World()
    failing = [world.ask(what, what)[1] for what in ("launch", "look")]
    good, handle = world.ask("good")
    world.queue.step()
    good.done = True
    assert not world.queue.step()
    assert [t.error for t in failing] == ["ValueError: cannot launch", "RuntimeError: NCCL says no"]
    assert handle.ended and not handle.error


def test_thread_notifies_begin_and_end():
    """The device thread notifies its caller when an operation has begun and when it has ended."""
    told: list[str] = []
    begun, ended = threading.Event(), threading.Event()
    operation = Fake("a", told)

    def notify() -> None:
        (ended if begun.is_set() else begun).set()

    handle = DeviceThread("nccl-test").submit(operation, 60.0, notify)
    assert begun.wait(20)
    operation.done = True
    assert ended.wait(20) and handle.ended and not handle.error
