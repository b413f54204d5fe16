"""The command, and `python -m rollyard`: the rest is imported where Ctrl-C is already heard."""

import sys

STOPPED = 130  # as of `rollyard.cli`


def main() -> int:
    """Run one command; return the exit code."""
    try:
        from rollyard import cli

        return cli.main()
    except KeyboardInterrupt:
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())
