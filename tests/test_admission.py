"""Admission: within slots and bytes always, work for the engine whenever something fits, nobody starved."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsdaemon.data.spool import Budget
from hsdaemon.work.admission import Admission, Queue, Ticket, TooLarge

SIZES = st.lists(st.integers(1, 100), min_size=1, max_size=60)


def drain_one(queue: Queue, which: int) -> None:
    queue.leave(queue.flying[which % len(queue.flying)])


@given(SIZES, st.integers(1, 8), st.integers(100, 300), st.lists(st.integers(0, 7), min_size=1), st.data())
def test_everybody_goes_within_slots_and_bytes(
    sizes: list[int], slots: int, room: int, leaving: list[int], data: st.DataObject
) -> None:
    queue = Queue(slots, Budget(room), patience=4)
    tickets = [Ticket(size, alone=data.draw(st.booleans())) for size in sizes]
    for ticket in tickets:
        queue.ask(ticket)
    gone: list[Ticket] = []
    for step in range(3 * len(tickets)):
        gone += queue.admit()
        assert len(queue.flying) <= slots
        assert sum(t.size for t in queue.flying) == queue.budget.claimed <= room
        if any(t.alone for t in queue.flying):
            assert len(queue.flying) == 1
        if not queue.flying:
            break
        drain_one(queue, leaving[step % len(leaving)])
    assert sorted(map(id, gone)) == sorted(map(id, tickets))
    assert queue.budget.claimed == 0


@given(st.integers(1, 10), st.integers(2, 8))
def test_a_long_row_waits_for_at_most_patience_short_ones(patience: int, slots: int) -> None:
    queue = Queue(slots, Budget(100), patience)
    running, long = Ticket(30), Ticket(100)
    queue.ask(running)
    queue.admit()
    queue.ask(long)
    passed = 0
    for _ in range(1000):
        queue.ask(Ticket(10))
        admitted = queue.admit()
        if long in admitted:
            break
        passed += len(admitted)
        drain_one(queue, -1 if len(queue.flying) > 1 else 0)
    assert long in queue.flying
    assert passed <= patience


def test_something_that_fits_is_never_left_out_while_the_oldest_still_has_patience() -> None:
    queue = Queue(4, Budget(100))
    for size in (60, 80, 30, 10):
        queue.ask(Ticket(size))
    assert [t.size for t in queue.admit()] == [60, 30, 10]
    assert [t.size for t in queue.waiting] == [80]


def test_sp_09_a_dump_larger_than_the_whole_spool_is_refused_not_waited_for() -> None:
    queue = Queue(4, Budget(64))
    with pytest.raises(TooLarge, match="100 bytes, the whole spool has 64"):
        queue.ask(Ticket(100))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 100), st.integers(1, 8))
def test_sp_03_what_a_small_tmpfs_cannot_hold_yet_is_neither_refused_nor_in_anybodys_way(
    sizes: list[int], room: int, slots: int
) -> None:
    queue = Queue(slots, Budget(room, most=100), patience=2)
    for size in sizes:
        queue.ask(Ticket(size))
    gone: list[int] = []
    while admitted := queue.admit():
        gone += [ticket.size for ticket in admitted]
        while queue.flying:
            drain_one(queue, 0)
    assert sorted(gone) == sorted(size for size in sizes if size <= room)
    assert [ticket.size for ticket in queue.waiting] == [size for size in sizes if size > room]
    queue.budget.total = 100
    assert not queue.waiting or queue.waiting[0] in queue.admit(), "the oldest first, once there is room for it"


def test_a_cancelled_wait_gives_its_place_to_the_next() -> None:
    async def scene() -> list[str]:
        admission = Admission(Queue(1, Budget(10)))
        order: list[str] = []

        async def row(name: str, hold: asyncio.Event) -> None:
            async with admission.admitted(10):
                order.append(name)
                await hold.wait()

        first, rest = asyncio.Event(), asyncio.Event()
        rest.set()
        tasks = [asyncio.create_task(row(name, first if name == "a" else rest)) for name in "abc"]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks[1].cancel()
        first.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert admission.queue.budget.claimed == 0
        return order

    assert asyncio.run(scene()) == ["a", "c"]
