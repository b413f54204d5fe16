"""What is written to terminals, with nothing in it that would drive them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from rollyard.texts import visible


class Screen(Console):
    """A console that shows control characters instead of sending them: causes quote users' code, and that a policy's texts."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As any console does it; all texts come by here, also those within tables and panels."""
        if isinstance(renderable, str):
            renderable = visible(renderable)
        elif isinstance(renderable, Text) and (shown := visible(renderable.plain)) != renderable.plain:
            renderable = renderable.copy()
            renderable.plain = shown
        return super().render(renderable, options)
