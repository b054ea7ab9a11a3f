"""Objects that hold threads, locks and device memory, and stay in the process that made them."""

from __future__ import annotations

from typing import ClassVar, NoReturn


class OfOneProcess:
    """Says in words that it is neither copied nor pickled.

    Attributes:
        instead: what to do, in words.
    """

    instead: ClassVar[str] = "make one in each process"

    def __reduce__(self) -> NoReturn:
        """Refuses.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled; {self.instead}")
