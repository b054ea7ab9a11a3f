"""What runs around a step: building, memory, admission, scheduling, prefill, warm-up, calibration."""
