"""What can go wrong, as types: each class carries the exit code that a caller or systemd sees.

A message reads "cannot X: cause; do Y".
"""

EXIT_OK = 0
EXIT_FINDINGS = 1  # the command worked and found something lost, corrupt, failed or refused
EXIT_USAGE = 2  # the command line itself is wrong


class HsError(Exception):
    """Base of every error that the product raises on purpose."""

    exit_code = EXIT_FINDINGS


class Transient(HsError):
    """The next try may cure it: nothing is lost by waiting."""

    exit_code = 75  # EX_TEMPFAIL


class Fatal(HsError):
    """A person must act first; trying again changes nothing."""

    exit_code = 70  # EX_SOFTWARE


class ConfigError(Fatal):
    """The configuration file, or a combination of its values, cannot be used."""

    exit_code = 78  # EX_CONFIG


class DataError(Fatal):
    """The data set, or a row of it, cannot be used."""

    exit_code = 65  # EX_DATAERR


class StoreError(Fatal):
    """The output folder, its manifest or the volume under it cannot be used."""

    exit_code = 73  # EX_CANTCREAT


class DiskFull(Transient):
    """Space ran out: pause, nothing is lost."""


class EngineError(Fatal):
    """The engine or its release cannot be used."""

    exit_code = 69  # EX_UNAVAILABLE
