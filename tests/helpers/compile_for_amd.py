"""Compiles one launch of every kernel in plain Triton for an AMD GPU, gfx942; prints a JSON line each.

Nothing of this was ever run on one: a report of what the compiler takes. Kernels in Gluon name NVIDIA's instructions
and are left out. Triton 3.6 cannot translate the largest of unsigned numbers as a buffer atomic; they are off.

Usage: python -m tests.helpers.compile_for_amd
"""

from __future__ import annotations

import json
from functools import partial

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import TritonError

from tests.helpers import recorder
from tests.helpers.launches import all_calls
from tests.helpers.recorder import first_of_each

TARGET = GPUTarget("hip", "gfx942", 64)
PLAINEST = 80  # the architecture whose launches have nothing that came with a later one
FOR_NVIDIA = ("maxnreg", "launch_pdl")  # options
# which read and set flags of other GPUs by NVIDIA's instructions
IN_PTX = {"_one_shot_kernel", "_two_shot_kernel", "_gather_kernel", "_largest_kernel"}


def main() -> None:
    found = recorder.record(PLAINEST, partial(all_calls, PLAINEST))
    plain = [each for each in found if not each.kernel.is_gluon() and each.name not in IN_PTX]
    recorder.use(TARGET)
    knobs.amd.use_buffer_atomics = False
    for launch in first_of_each(plain, lambda each: each.name):
        report = {"kernel": launch.name, "compiled": True}
        try:
            report["shared"] = recorder.compiled(launch, FOR_NVIDIA).metadata.shared
        except (TritonError, RuntimeError, ValueError) as error:  # of its front end, its passes, its checks
            report |= {"compiled": False, "why": str(error)}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
