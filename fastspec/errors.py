"""Error types of the library. Each message names the value, what was expected, and the next step."""


class UnsupportedModel(ValueError):
    """A model, or a setting in its config, is not implemented. The message lists what is supported."""


class CheckpointError(ValueError):
    """A checkpoint is missing or damaged, or does not match its own config.

    The message names the file and the field.
    """


class UnsupportedOption(ValueError):
    """An argument or generation option is not supported."""


class InvalidLogits(RuntimeError):
    """The target's logits contain NaN or infinity, or allow no token. The message names prompts and positions.

    Attributes:
        output: GenerateOutput of the call. A sequence with invalid logits ends before the first such position. All
            other sequences are complete. None if tokens were streamed.
    """

    output: object = None


class OutOfPages(RuntimeError):
    """A request needs more pages than the KV cache has."""


class RankFailed(RuntimeError):
    """A process of a tensor-parallel group died, raised an error or hangs.

    The message names its rank and the cause. No generator of this group can continue: end all its processes and start
    them again.
    """
