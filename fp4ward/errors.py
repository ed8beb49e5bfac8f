"""The one exception that users see: a sentence that says what, where and what to do."""


class UserError(Exception):
    """A fault in what the user gave (file, flag, prompt). The command line prints it without a stack trace.

    The message is one sentence: what was found, where (file, tensor, layer), what was expected, what to do.
    """
