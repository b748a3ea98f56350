"""The one error a user meets: a sentence that says what was given, what is allowed and what to do."""

from __future__ import annotations


class SpardaError(Exception):
    """A mistake its maker can mend. The command line prints it as one sentence and exits with code 2."""
