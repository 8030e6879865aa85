"""What a worker has computed and the group has not settled.

Question  Which contribution is being filled, which one is in flight, and which lie outside the present phase?
Holds     In every open phase there is at most one of each. What is lost with a failed sum is the contribution in
          flight; what was accumulated since goes on. The time of an inner phase does not count in the outer one.
Source    ABS-SGD (Zhou et al. 2023); docs/protocol.md ("One round", "Unplanned change").
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pliant.core import tickets
from pliant.core.regrouping import Entry
from pliant.core.tickets import Ticket
from pliant.tensors.gradients import FlatGradients
from pliant.tensors.process_group.channel import Summation
from pliant.worker.contribution import Contribution
from pliant.worker.evaluation.outputs import Outputs


class InFlight:
    """A contribution that was handed in and is not settled yet."""

    def __init__(self, filled: FlatGradients | None, merged: Tensor | None, drawn: int) -> None:
        self.summation: Summation
        """from the moment it is handed in"""
        self.filled = filled
        self.merged = merged
        self.drawn = drawn
        """how many micro-batches it consists of"""
        self.point = tickets.NOWHERE
        """where they were computed"""
        self.gathered: tuple[list[Ticket], int] | None = None
        """the tickets and the union of their bitmaps, if they were gathered before the sum was started"""
        self.announced = False
        """only the ticket was sent yet, because this worker trains other parameters than were agreed on"""
        self.squares = 0.0
        """of an announced contribution: squared norm of its mean gradient, bitmap of gradients and buffers, weight"""
        self.bitmap = 0
        self.weight = 0.0
        self.leaving = False
        """whether its ticket said that this worker leaves"""
        self.closed = False
        """whether this worker, a follower, has taken part in the next exchange of the same group already"""
        self.postscript: Tensor | None = None
        """of a round that is summed in buckets: what the tickets could not say yet"""
        self.given = 0
        """how many buckets are being summed"""
        self.squared_norm = 0.0
        """of the buckets that are being summed"""

    @property
    def sums(self) -> list[Tensor]:
        """All tensors that are summed."""
        if self.filled is not None and self.postscript is not None:
            return [*self.filled.parts, *self.behind]
        return [*(self.filled.flats if self.filled else []), *self.behind]

    @property
    def behind(self) -> list[Tensor]:
        """The tensors that are summed after the gradients."""
        return [tensor for tensor in (self.merged, self.postscript) if tensor is not None]


class Contributions:
    """The contributions of one worker, in all open phases."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.contribution = Contribution(clock())
        """the one that is being accumulated"""
        self.flight: InFlight | None = None
        self._outside: list[tuple[Contribution, InFlight | None, float]] = []
        """the contributions of the phases around the present one, outermost first, and when each was put aside"""
        self.drawn_since_update = False
        """whether a micro-batch of the loop was drawn since ``step`` last returned True"""
        self.outputs = Outputs()
        """the outputs that the present ``evaluate`` has gathered"""
        self.sum_s = 0.0
        """seconds of the last summation"""
        self.cost_s = 0.0
        """seconds of settling, applying and looking ahead in the last round"""

    @property
    def in_flight(self) -> int:
        """How many contributions of this phase are not settled: 0 or 1."""
        return 1 if self.flight else 0

    @property
    def drawn(self) -> int:
        """How many micro-batches at the front of this worker's hand it has drawn already."""
        return self.contribution.micro_batches + (self.flight.drawn if self.flight else 0)

    @property
    def flights(self) -> list[InFlight]:
        """The contributions in flight, of all phases."""
        found = [self.flight, *(flight for _, flight, _ in self._outside)]
        return [flight for flight in found if flight is not None]

    def begin(self) -> None:
        """Start an empty contribution."""
        self.contribution = Contribution(self._clock())

    # -- phases

    def enter_phase(self) -> None:
        """Put the contributions of the outer phase aside."""
        self._outside.append((self.contribution, self.flight, self._clock()))
        self.contribution, self.flight = Contribution(self._clock()), None

    def leave_phase(self) -> None:
        """Go on with the contributions of the outer phase."""
        self.contribution, self.flight, since = self._outside.pop()
        self.contribution.start_s += self._clock() - since

    # -- eras

    def entry(self, *, active: bool) -> Entry:
        """How many micro-batches this worker loses and keeps, for each open phase from the outermost on."""
        if not active:
            return Entry(active=False)
        pairs = [(contribution, flight) for contribution, flight, _ in self._outside[1:]]
        if self._outside:
            pairs.append((self.contribution, self.flight))
        dropped = tuple(flight.drawn if flight else 0 for _, flight in pairs)
        points = tuple(flight.point if flight else tickets.NOWHERE for _, flight in pairs)
        return Entry(True, dropped, tuple(contribution.micro_batches for contribution, _ in pairs), points)

    def lose_flights(self, depth: int) -> None:
        """Drop what was in flight, and keep what was accumulated since, in the ``depth`` phases that go on."""
        self.flight = None
        self._outside = [(contribution, None, since) for contribution, _, since in self._outside]
        while len(self._outside) > depth:
            self.leave_phase()

    def forget(self, depth: int) -> None:
        """Drop everything that was computed; ``depth`` phases are open."""
        now = self._clock()
        self.outputs.forget()
        self.flight, self.contribution = None, Contribution(now)
        self._outside = [(Contribution(now), None, now) for _ in range(depth)]
