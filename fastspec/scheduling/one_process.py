"""Objects that hold threads, locks and device memory, and stay in the process that made them."""

from __future__ import annotations

from typing import ClassVar, NoReturn


class OfOneProcess:
    """Refuses to be copied or pickled, and says what to do instead.

    Attributes:
        instead: what to do, for the error.
    """

    instead: ClassVar[str] = "make one in each process"

    def __reduce__(self) -> NoReturn:
        """Refuses.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled; {self.instead}")
