"""Error for a CUDA device that has failed."""

from __future__ import annotations


def device_failed(error: RuntimeError) -> RuntimeError:
    """Converts an error that CUDA has reported to an error with advice. The caller raises it.

    CUDA may report an error in a later call than the call that caused it.
    """
    return RuntimeError(
        f"the CUDA device failed: {str(error).splitlines()[0]}. Nothing on it can go on in this process: start a new "
        "one. The work that failed may have been queued long before this call; CUDA_LAUNCH_BLOCKING=1 with "
        "graphs=False shows which"
    )
