"""The one error a user sees: what is wrong, where, and what to do."""

from __future__ import annotations


class UserError(Exception):
    """Bad input. The message names the field or file and the remedy; the command line exits with code 2."""
