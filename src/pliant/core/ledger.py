"""Which positions of an epoch are free, dealt, done.

Question  Which worker may work on which positions, and which positions are spent?
Holds     Every position below ``limit`` is in exactly one place: free, in one worker's hand, or taken by a
          settled ticket. A hand is a queue of micro-batches that are never split. A worker draws from its front,
          and only what is ``granted``, so the remainder can be taken back without asking the worker.
Source    ours; docs/design/0001-data.md. Property tests: tests/core/test_ledger.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from pliant.types import Span

MicroBatch = tuple[Span, ...]


def samples_of(spans: Sequence[Span]) -> int:
    """The number of positions in these spans."""
    samples = 0
    for start, stop in spans:
        samples += stop - start
    return samples


class Hand(msgspec.Struct, frozen=True):
    """One worker's dealt micro-batches, in the order in which it draws them."""

    queue: tuple[MicroBatch, ...] = ()
    granted: int = 0
    """micro-batches from the front that the worker may draw"""
    quotas: tuple[int, ...] = ()
    """fixed batch only: number of micro-batches in each coming contribution; their sum is ``granted``"""

    @property
    def granted_samples(self) -> int:
        """The number of samples in the granted micro-batches."""
        return sum(samples_of(micro_batch) for micro_batch in self.queue[: self.granted])


class Ledger(msgspec.Struct, frozen=True):
    """The state of one phase's positions."""

    limit: int
    cursor: int
    """positions from here on were never dealt"""
    returned: tuple[Span, ...]
    """positions that were dealt and taken back, in order"""
    hands: tuple[Hand, ...]

    @property
    def free(self) -> int:
        """The number of positions that are in no hand and not spent."""
        return self.limit - self.cursor + samples_of(self.returned)

    @property
    def remaining(self) -> int:
        """Positions that no settled ticket has taken yet."""
        return self.free + sum(samples_of(mb) for hand in self.hands for mb in hand.queue)

    @property
    def is_spent(self) -> bool:
        """Whether settled tickets have taken all positions."""
        return self.free == 0 and not any(hand.queue for hand in self.hands)


def opened(limit: int, members: int) -> Ledger:
    """A ledger with all positions free."""
    return Ledger(limit=limit, cursor=0, returned=(), hands=(Hand(),) * members)


def deal(ledger: Ledger, member: int, sizes: Sequence[int]) -> Ledger:
    """Move free positions to the end of ``member``'s hand, as micro-batches of ``sizes``; not granted yet."""
    pool = _Pool(ledger)
    hand = ledger.hands[member]
    hand = Hand(hand.queue + pool.taken(sizes), hand.granted, hand.quotas)
    return pool.ledger(_replaced(ledger.hands, member, hand))


def grant(ledger: Ledger, member: int, granted: int) -> Ledger:
    """Let ``member`` draw the first ``granted`` micro-batches of its hand; a grant is never withdrawn."""
    hand = ledger.hands[member]
    if not hand.granted <= granted <= len(hand.queue):
        raise ValueError(f"a grant only grows, up to the {len(hand.queue)} micro-batches in the hand")
    if granted == hand.granted:
        return ledger
    return _with_hand(ledger, member, Hand(hand.queue, granted, hand.quotas))


def promise(ledger: Ledger, shares: Sequence[Sequence[int]]) -> Ledger:
    """Fixed batch: deal and grant each member's share of one coming contribution, as micro-batches of these sizes."""
    pool = _Pool(ledger)
    hands: list[Hand] = []
    for hand, sizes in zip(ledger.hands, shares, strict=True):
        queue = hand.queue + pool.taken(sizes)
        hands.append(Hand(queue, len(queue), (*hand.quotas, len(sizes))))
    return pool.ledger(tuple(hands))


def take_back(ledger: Ledger) -> Ledger:
    """Return all positions that are dealt but not granted to the free ones: no worker can have started them."""
    spans = [span for hand in ledger.hands for mb in hand.queue[hand.granted :] for span in mb]
    if not spans:
        return ledger
    hands = tuple(replace(hand, queue=hand.queue[: hand.granted]) for hand in ledger.hands)
    return replace(ledger, hands=hands, returned=joined([*ledger.returned, *spans]))


def give_back(ledger: Ledger, member: int) -> Ledger:
    """Return the whole hand of ``member``, which draws no more, to the free positions."""
    spans = [span for mb in ledger.hands[member].queue for span in mb]
    if not spans:
        return _with_hand(ledger, member, Hand())
    return replace(_with_hand(ledger, member, Hand()), returned=joined([*ledger.returned, *spans]))


class Kept(msgspec.Struct, frozen=True):
    """What becomes of one hand of the old roster in a new one."""

    member: int
    """its index in the old roster"""
    skip: int
    """micro-batches at the front that are lost: they return to the pool"""
    keep: int
    """micro-batches after the lost ones that stay with their worker"""


def regrouped(ledger: Ledger, kept: Sequence[Kept | None], *, quotas: bool) -> Ledger:
    """The ledger of another roster: kept micro-batches stay (granted, one contribution), all others are free again.

    ``kept`` has one entry per member of the new roster; None stands for a new member.
    """
    hands: list[Hand] = []
    for entry in kept:
        queue: tuple[MicroBatch, ...] = ()
        if entry is not None:
            queue = ledger.hands[entry.member].queue[entry.skip : entry.skip + entry.keep]
        hands.append(Hand(queue, len(queue), (len(queue),) if quotas else ()))
    staying = {mb for hand in hands for mb in hand.queue}
    spans = [span for hand in ledger.hands for mb in hand.queue if mb not in staying for span in mb]
    return Ledger(ledger.limit, ledger.cursor, joined([*ledger.returned, *spans]), tuple(hands))


def unbounded(ledger: Ledger) -> Ledger:
    """The same hands without quotas: contributions are no longer bounded."""
    return replace(ledger, hands=tuple(Hand(hand.queue, hand.granted) for hand in ledger.hands))


def bounded(ledger: Ledger, at_most: int | None) -> Ledger:
    """Contributions bounded by quotas from now on: the first one is what is granted, the rest of each hand is free.

    ``at_most``: no worker has drawn more samples than this, so the first contribution needs no more.
    """
    hands: list[Hand] = []
    for hand in ledger.hands:
        count, samples = 0, 0
        while count < hand.granted:
            samples += samples_of(hand.queue[count])
            if count and at_most is not None and samples > at_most:
                break
            count += 1
        hands.append(Hand(hand.queue, count, (count,)))
    return take_back(replace(ledger, hands=tuple(hands)))


def collected(ledger: Ledger) -> Ledger:
    """All dealt positions are free again. Only valid if no worker has drawn any of them."""
    spans = [span for hand in ledger.hands for mb in hand.queue for span in mb]
    return Ledger(ledger.limit, ledger.cursor, joined([*ledger.returned, *spans]), (Hand(),) * len(ledger.hands))


def aligned(ledger: Ledger) -> Ledger:
    """Fixed batch: a member that has just begun gets a share of 0 in the contributions that are already dealt."""
    depth = max((len(hand.quotas) for hand in ledger.hands), default=0)
    if all(len(hand.quotas) == depth for hand in ledger.hands):
        return ledger
    hands = tuple(
        Hand(hand.queue, hand.granted, hand.quotas + (0,) * (depth - len(hand.quotas))) for hand in ledger.hands
    )
    return replace(ledger, hands=hands)


def first_only(ledger: Ledger) -> Ledger:
    """Fixed batch: take back what was promised beyond the contribution in progress; every member then has one quota."""
    hands: list[Hand] = []
    spans: list[Span] = []
    for hand in ledger.hands:
        first = hand.quotas[0] if hand.quotas else 0
        hands.append(Hand(hand.queue[:first], first, (first,)))
        spans += [span for mb in hand.queue[first:] for span in mb]
    return Ledger(ledger.limit, ledger.cursor, joined([*ledger.returned, *spans]), tuple(hands))


def add_to_first(ledger: Ledger, member: int, sizes: Sequence[int]) -> Ledger:
    """Fixed batch: let the contribution in progress, the only one dealt, grow by micro-batches of ``sizes``."""
    ledger = deal(ledger, member, sizes)
    queue = ledger.hands[member].queue
    return _with_hand(ledger, member, Hand(queue, len(queue), (len(queue),)))


def settle(ledger: Ledger, drawn: Sequence[int]) -> tuple[Ledger, tuple[tuple[Span, ...], ...]]:
    """Take the first ``drawn[m]`` micro-batches out of the hand of each member m: they are spent. Also return their
    spans."""
    hands: list[Hand] = []
    spent: list[tuple[Span, ...]] = []
    for hand, count in zip(ledger.hands, drawn, strict=True):
        if count > hand.granted:
            raise ValueError(f"{count} micro-batches drawn, {hand.granted} were granted")
        spent.append(joined([span for mb in hand.queue[:count] for span in mb]))
        hands.append(Hand(queue=hand.queue[count:], granted=hand.granted - count, quotas=hand.quotas[1:]))
    return replace(ledger, hands=tuple(hands)), tuple(spent)


def unspent(ledger: Ledger) -> tuple[Span, ...]:
    """All positions that no settled ticket has taken: a ``break`` cuts these."""
    spans = [span for hand in ledger.hands for mb in hand.queue for span in mb]
    spans += [*ledger.returned, (ledger.cursor, ledger.limit)]
    return joined([span for span in spans if span[0] < span[1]])


def joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The same positions in ascending order, neighbours merged."""
    if len(spans) < 2:
        return tuple(spans)
    result: list[Span] = []
    for start, stop in sorted(spans):
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)


class _Pool:
    """The free positions of a ledger while some of them are being dealt."""

    def __init__(self, ledger: Ledger) -> None:
        self._limit = ledger.limit
        self._cursor = ledger.cursor
        self._returned = list(ledger.returned)

    def taken(self, sizes: Sequence[int]) -> tuple[MicroBatch, ...]:
        """Micro-batches of these sizes. Positions that were dealt before and taken back come first."""
        return tuple([self._micro_batch(size) for size in sizes])

    def ledger(self, hands: tuple[Hand, ...]) -> Ledger:
        """The ledger with the positions that are left."""
        return Ledger(self._limit, self._cursor, tuple(self._returned), hands)

    def _micro_batch(self, size: int) -> MicroBatch:
        spans: list[Span] = []
        while size and self._returned:
            start, stop = self._returned.pop(0)
            taken = min(size, stop - start)
            spans.append((start, start + taken))
            if start + taken < stop:
                self._returned.insert(0, (start + taken, stop))
            size -= taken
        if size:
            start, self._cursor = self._cursor, self._cursor + size
            if self._cursor > self._limit:
                raise ValueError(f"{size} positions asked for, {self._limit - start} are free")
            spans.append((start, self._cursor))
        return joined(spans)


def _with_hand(ledger: Ledger, member: int, hand: Hand) -> Ledger:
    return Ledger(ledger.limit, ledger.cursor, ledger.returned, _replaced(ledger.hands, member, hand))


def _replaced(hands: tuple[Hand, ...], member: int, hand: Hand) -> tuple[Hand, ...]:
    return (*hands[:member], hand, *hands[member + 1 :])
