"""What broke a house rule when the rule came. These lists may only shrink: take out what keeps the rule now."""

from __future__ import annotations

# functions with more parameters than test_house allows, and how many at most
LONG_SIGNATURES = {
    "__init__": 27,
    "_end_kernel": 36,
    "_verify_kernel": 32,
    "attend": 17,
    "attend_op": 15,
    "expert_kernel": 29,
    "generate": 30,
    "plan": 15,
    "ring_kernel": 27,
    "settings_of": 13,
}
# files with figures of speed in docstrings
SPEEDS: dict[str, int] = {}
