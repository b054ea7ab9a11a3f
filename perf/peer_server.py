"""The server of transformers on one device, without accelerate, which it asks for only to place a model there.

Usage: python -m perf.peer_server serve CHECKPOINT --device cuda ...
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.cli.transformers import main

_loaded = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]


def _placed(cls: type[PreTrainedModel], *sources: Any, device_map: Any = None, **options: Any) -> Any:
    """As `from_pretrained`, for a `device_map` that is one device."""
    model = _loaded(cls, *sources, **options)
    return model if device_map in (None, "auto") else model.to(device_map)


if __name__ == "__main__":
    PreTrainedModel.from_pretrained = classmethod(_placed)  # type: ignore[arg-type,assignment]
    main()
