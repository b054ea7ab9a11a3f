"""The library's own error types. Each message says what was got, what was wanted, and the next step."""


class UnsupportedModel(ValueError):
    """A model, or a setting in its config, that the decoder does not implement. Lists what is supported."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or not what its own config says. Names the file and the field."""


class UnsupportedOption(ValueError):
    """An argument or a generation option that is outside the supported list."""


class InvalidLogits(RuntimeError):
    """The target's logits held a NaN or an infinity, or left no token possible. Names prompts and positions.

    Attributes:
        output: what the call has made, a GenerateOutput: the other rows are whole; the rows that failed end before the
            position that failed. None where rows were streamed.
    """

    output: object = None


class OutOfPages(RuntimeError):
    """The K/V cache has too few free pages for the rows that were asked for."""


class RankFailed(RuntimeError):
    """Another process of a tensor-parallel group died, raised or hangs. Names the rank and what is known of the cause.

    No generator of this group can go on: end all its processes and start them again.
    """
