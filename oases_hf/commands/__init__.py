"""The subcommands of ``oases-hf``, but for ``verify``.

A module named as its command holds the options, and imports neither torch nor numpy; what they are for is in the
module beside it (``plan`` → ``planned``), imported when the command runs.
"""
