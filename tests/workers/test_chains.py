"""What a decode worker says of blocks that several attempts hold."""

from decode_worker.batch import RunningBatch
from decode_worker.chains import BlockChains
from decode_worker.progress import ProgressReport
from decode_worker.requests import AttemptTable
from engine.kv.allocator import BlockAllocator, BlockPool
from proto.codec import split_hashes
from proto.messages import Released
from proto.parts import Held, PrefixPart
from proto.progress import SharedPrefix
from tests.workers.test_batch import BLOCK, World, reserve


def said(w: World) -> dict[str, list[tuple[int, int]]]:
    found, w.table.prefixes = w.table.prefixes, []
    return {one.request_id: [(part.chain, part.blocks) for part in one.parts] for one in found}


def tables(w: World, *names: str) -> list[list[int]]:
    return [w.table.attempts[(name, 1)].sequences[0].blocks.table for name in names]


def test_shared_prefixes_are_reported_in_time() -> None:
    """Prefix parts that an attempt finds are reported at once, and those that it brings as soon as it runs."""
    w = World()
    w.run(reserve("a", 3 * BLOCK + 1, text=1))
    assert said(w) == {"a": [(1, 3)]}
    longer = reserve("b", 5 * BLOCK, text=1)
    blocks = w.receive(longer)
    assert said(w) == {"b": [(1, 3)]}
    w.commit(longer, blocks)
    assert said(w) == {"b": [(1, 3), (2, 2)]}
    w.run(reserve("c", 4 * BLOCK, text=1))
    assert said(w) == {"c": [(1, 3), (2, 1)]}
    w.run(reserve("d", 4 * BLOCK, text=2))
    w.run(reserve("e", 4 * BLOCK))
    assert said(w) == {"d": [(3, 4)]}, "without names, nothing is shared"


def test_equal_prompts_keep_one_copy() -> None:
    """Equal prompts that are received at the same time end up with one copy of their full blocks."""
    w = World()
    orders = [reserve(name, 4 * BLOCK + 2, text=1) for name in ("a", "b", "c")]
    received = [w.receive(order) for order in orders]
    assert w.table.allocator.held_count == 15
    for order, blocks in zip(orders, received, strict=True):
        w.commit(order, blocks)
    assert w.table.allocator.held_count == 4 + 3
    a, b, c = tables(w, "a", "b", "c")
    assert a[:4] == b[:4] == c[:4] and len({a[4], b[4], c[4]}) == 3
    assert said(w) == {"a": [(1, 4)], "b": [(1, 4)], "c": [(1, 4)]}
    for order in orders:
        w.table.close(w.table.attempts[(order.request_id, 1)], Released(order.request_id, 1))
    w.table.allocator.check_invariants()
    assert w.table.allocator.held_count == 0


def test_suspect_prefix_keeps_its_own_name() -> None:
    """Blocks of one name are the same blocks, also where others have come to stand for the same hashes since."""
    w = World()
    w.run(reserve("a", 3 * BLOCK, text=1))
    waits = reserve("b", 4 * BLOCK, text=1)
    blocks = w.receive(waits)
    w.table.allocator.forget(tables(w, "a")[0])
    w.run(reserve("c", 3 * BLOCK, text=1))
    assert said(w) == {"a": [(1, 3)], "b": [(1, 3)], "c": [(2, 3)]}
    w.commit(waits, blocks)
    assert said(w) == {} and tables(w, "b")[0][:3] == tables(w, "a")[0][:3] != tables(w, "c")[0][:3]
    w.run(reserve("d", 4 * BLOCK, text=1))
    assert said(w) == {"d": [(2, 3), (3, 1)]}


def test_registration_lists_held_attempts() -> None:
    """A registration lists each attempt with its tokens, choices and prefix parts."""
    w = World()
    w.run(reserve("a", 2 * BLOCK, max_tokens=9, text=1, resumed=3))
    w.step()
    w.receive(reserve("b", 3 * BLOCK, text=1, choices=2))
    assert w.table.held() == (
        Held("a", 1, 1, 1, 3, 2 * BLOCK, 5, 1, 0, (PrefixPart(1, 2),)),
        Held("b", 1, 1, 2, 0, 3 * BLOCK, 4, 1, None, (PrefixPart(1, 2),)),
    )


def test_progress_reports_prefixes_once() -> None:
    """A progress report names a shared prefix once, and the next one does not repeat it."""
    w = World()
    report = ProgressReport(w.table)
    w.run(reserve("a", 2 * BLOCK, max_tokens=50, text=1))
    w.batch.plan(w.stuck.append)
    first = report.due(1.0)
    assert first is not None and first.prefixes == (SharedPrefix("a", 1, (PrefixPart(1, 2),)),)
    again = report.due(2.0)
    assert again is not None and again.prefixes == ()


def test_disabled_cache_reports_no_prefixes() -> None:
    w = World()
    w.table = AttemptTable(BlockAllocator(60), BLOCK, RunningBatch[str](), prefix_cache=False)
    w.batch = w.table.batch
    for name in ("a", "b"):
        w.run(reserve(name, 2 * BLOCK, text=1))
    assert said(w) == {} and w.table.allocator.held_count == 4


def test_mixed_roles_share_prefix_names() -> None:
    """Blocks that the prefill role of a mixed worker has computed are shared by its decode role under a name."""
    pool = BlockPool(60)
    prefill, w = BlockAllocator(20, pool), World()
    w.table = AttemptTable(BlockAllocator(40, pool), BLOCK, RunningBatch[str]())
    w.batch = w.table.batch
    order = reserve("a", 4 * BLOCK + 1, text=1)
    hashes = split_hashes(order.block_hashes)
    computed = prefill.allocate(2)
    prefill.insert(hashes[:2], computed)
    w.run(order)
    assert tables(w, "a")[0][:2] == computed and said(w) == {"a": [(1, 2), (2, 2)]}
    w.run(reserve("b", 3 * BLOCK, text=1))
    assert said(w) == {"b": [(1, 2), (2, 1)]}


def test_prefix_name_ends_with_block_content() -> None:
    """The other role has put something else into a block that had a name."""
    chains = BlockChains()
    chains.name([b"a", b"b", b"c"], [1, 2, 3], [1, 2, 3])
    assert chains.parts([b"a", b"b", b"c"], [1, 2, 3]) == (PrefixPart(1, 3),)
    assert chains.parts([b"x", b"y"], [1, 2]) == () == chains.parts([b"b"], [2])
    chains.name([b"a", b"b"], [7, 2])
    assert chains.parts([b"a", b"b", b"c"], [7, 2, 3]) == (PrefixPart(2, 2),), "its third block follows another one"
    assert chains.parts([b"a"], [1]) == (PrefixPart(1, 1),)
