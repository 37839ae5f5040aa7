"""Calls of many threads, done in few passes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

import pyarrow as pa

from headway.core.rollouts import lengths

Work = TypeVar("Work")
Result = TypeVar("Result")


class Together(Generic[Work, Result]):
    """A function of many pieces of work, called with one: what waits when the pass before it ends is done in the next,
    oldest first, until that is full.

    A pass that raises is tried again piece by piece, so that each caller gets what its own work raises.
    """

    def __init__(
        self, do: Callable[[Sequence[Work]], Sequence[Result]], size: Callable[[Work], int], room: int
    ) -> None:
        """`do`: the results in the order of the work. A pass takes pieces whose `size` is `room` together, or a single
        one that is larger."""
        self._do = do
        self._size = size
        self._room = room
        self._waiting: deque[_Piece[Work, Result]] = deque()
        self.turn = threading.Lock()
        """Held during a pass; also to be held by whoever changes what `do` reads."""

    def __call__(self, work: Work) -> Result:
        piece = _Piece[Work, Result](work, self._size(work))
        self._waiting.append(piece)
        while True:
            with self.turn:
                if not piece.is_done:
                    self._pass()
            if piece.is_done:
                return piece.result()

    def _pass(self) -> None:
        first = self._waiting.popleft()
        pieces, room = [first], self._room - first.size
        while self._waiting and self._waiting[0].size <= room:
            pieces.append(self._waiting.popleft())
            room -= pieces[-1].size
        try:
            results = self._do([piece.work for piece in pieces])
        except Exception as error:
            if len(pieces) == 1:
                first.end(None, error)
                return
            for piece in reversed(pieces):
                piece.size = self._room  # a pass of its own
                self._waiting.appendleft(piece)
            return
        for piece, result in zip(pieces, results, strict=True):
            piece.end(result, None)


class _Piece(Generic[Work, Result]):
    __slots__ = ("_error", "_result", "is_done", "size", "work")

    def __init__(self, work: Work, size: int) -> None:
        self.work = work
        self.size = size
        self.is_done = False
        self._result: Result | None = None
        self._error: Exception | None = None

    def end(self, result: Result | None, error: Exception | None) -> None:
        self._result, self._error, self.is_done = result, error, True

    def result(self) -> Result:
        if self._error is not None:
            raise self._error
        return cast(Result, self._result)


def num_tokens(table: pa.Table) -> int:
    """Of a group's table, once packed: its first prompt and all its responses."""
    return sum(lengths(table, "prompt_ids")[:1]) + sum(lengths(table, "response_ids"))
