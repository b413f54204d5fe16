"""What is written to terminals, with nothing in it that would drive them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from rollyard.texts import visible


class Screen(Console):
    """A console that shows control characters instead of sending them: causes quote users' code, and that a policy's texts.

    Its size can be held, since a terminal may become another one while something is drawn.
    """

    _held: ConsoleDimensions | None = None

    @property
    def size(self) -> ConsoleDimensions:
        return self._held or super().size

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._held = ConsoleDimensions(*new_size)

    def hold(self) -> ConsoleDimensions:
        """What the terminal has now is the size from now on."""
        self._held = None
        self._held = self.size
        return self._held

    def let_go(self) -> None:
        """The size is what the terminal has, at each moment."""
        self._held = None

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As any console does it; all texts come by here, also those within tables and panels."""
        if isinstance(renderable, str):
            renderable = visible(renderable)
        elif isinstance(renderable, Text) and (shown := visible(renderable.plain)) != renderable.plain:
            renderable = renderable.copy()
            renderable.plain = shown
        return super().render(renderable, options)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """While the block lasts, each warning of this process is one line on standard error, without the place in the code."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        told = Text.assemble(("warning:", "bold yellow"), " ", " ".join(str(message).split()))
        screen = Screen(stderr=True)
        with screen.capture() as shown:
            screen.print(told, soft_wrap=True, highlight=False)
        with suppress(OSError, AttributeError):  # nobody reads it any more, or there is no standard error
            sys.stderr.write(shown.get())  # a live panel has put itself in the way there, and stays below the line

    before = warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before
