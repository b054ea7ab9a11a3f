"""Calls of every kernel's wrapper whose launches are compiled ahead of time, by group.

The calls stand in the modules named `..._launches`; what is made of them, in `recorder`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial

from tests.helpers import attention_launches as attention
from tests.helpers import portable_launches as portable
from tests.helpers import product_launches as products
from tests.helpers import step_launches as steps
from tests.helpers.expert_launches import mixtures
from tests.helpers.recorder import DTYPES, Calls, Launch, record

AT_ONCE = 3  # layers of a group of calls

GROUPS: dict[str, Callable[[int], Calls]] = {
    **{f"attention_{8 * size}_bits": partial(attention.attention, size) for size in DTYPES},
    **{f"short_{dim}": partial(attention.attention_short, dim, False) for dim in (64, 128)},
    **{f"short_{dim}_full": partial(attention.attention_short, dim, True) for dim in (64, 128)},
    "attention_long": attention.attention_long,
    "attention_prompt": attention.attention_prompt,
    "attention_cached_in_8_bits": attention.attention_cached_in_8_bits,
    "attention_ruled": attention.attention_ruled,
    "portable_whole": partial(portable.portables, portable.WHOLE),
    "portable_pieces": partial(portable.portables, portable.RAGGED[0]),
    "portable_single": partial(portable.portables, portable.RAGGED[1]),
    "recurrent": steps.recurrent,
    "experts": mixtures,
    "prompts": products.prompts,
    "steps": steps.steps,
    **{f"sampled_{vocab}": partial(steps.sampled, vocab) for vocab in steps.VOCABS},
    "sampled_otherwise": steps.sampled_otherwise,
    **{
        f"products_{start}": partial(products.products, slice(start, start + AT_ONCE))
        for start in range(0, len(products.LAYERS), AT_ONCE)
    },
    **{f"tails_{sizes[0]}": partial(products.tails, sizes) for sizes in products.LAYER_SIZES},
    "products_trees": products.trees,
    "products_fp16": products.products_in_fp16,
    "exchanges": steps.exchanges,
    "quantised": products.quantised,
    "quantised_wide": products.quantised_wide,
    "quantised_values": products.quantised_values,
}


def all_calls(arch: int) -> Iterator[tuple[str, Callable[[], object]]]:
    for group in GROUPS.values():
        yield from group(arch)


def _told(launch: Launch) -> str:
    constants = {name: str(value) for name, value in sorted(launch.arguments.items()) if name.isupper()}
    return f"{launch.call} {launch.name} {launch.grid} {constants} {sorted(launch.options.items(), key=str)}"


def main() -> None:
    """Prints what the calls launch on each of these architectures, also as a hash; compiles nothing."""
    for arch in map(int, sys.argv[1:]):
        found = record(arch, partial(all_calls, arch))
        told = hashlib.sha256("\n".join(map(_told, found)).encode()).hexdigest()
        print(json.dumps({"kernels": sorted({launch.name for launch in found}), "launches": told}))


if __name__ == "__main__":
    main()
