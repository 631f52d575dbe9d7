"""How fast, how long still. Times are seconds of the monotonic clock: a stepped wall clock changes nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 300.0  # long enough to smooth batches, short enough to notice a slow hour
MAX_MARKS = 4096


@dataclass(frozen=True, slots=True)
class Speed:
    """Per second, over `seconds`."""

    seconds: float
    samples: float
    tokens: float
    mbytes: float


@dataclass(slots=True)
class Meter:
    """What was done, summed, with marks of the recent past."""

    start: float
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    _marks: deque[tuple[float, int, int, int]] = field(default_factory=lambda: deque(maxlen=MAX_MARKS))

    def add(self, now: float, tokens: int, size: int) -> None:
        self.samples += 1
        self.tokens += tokens
        self.bytes += size
        if not self._marks or now - self._marks[-1][0] >= WINDOW_S / MAX_MARKS:
            self._marks.append((now, self.samples, self.tokens, self.bytes))

    def speed(self, now: float, window_s: float = WINDOW_S) -> Speed:
        """Over the last `window_s`, or since the start when that is shorter."""
        base = (self.start, 0, 0, 0)
        for mark in self._marks:
            if mark[0] > now - window_s:
                break
            base = mark
        seconds = max(now - max(base[0], now - window_s), 1e-9)
        return Speed(
            seconds,
            (self.samples - base[1]) / seconds,
            (self.tokens - base[2]) / seconds,
            (self.bytes - base[3]) / seconds / 1e6,
        )


def eta_s(speed: Speed, open_rows: int, open_tokens: int) -> float | None:
    """Seconds to the end: by tokens where they are known, since rows differ in length; None = no rate yet."""
    if open_rows == 0:
        return 0.0
    if speed.tokens > 0 and open_tokens > 0:
        return open_tokens / speed.tokens
    return open_rows / speed.samples if speed.samples > 0 else None


def span(seconds: float | None) -> str:
    """For people: 11 m 05 s, 3 h 07 m, 2 d 04 h, or "unknown"."""
    if seconds is None:
        return "unknown"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days} d {h:02d} h"
    return f"{h} h {m:02d} m" if h else f"{m} m {s:02d} s"
