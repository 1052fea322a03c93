"""`python -m moecache` is `moecache`."""

import sys


def main() -> int:
    """Run the command line and return the exit code; an interrupt of its imports is one of it."""
    try:
        from moecache.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("moecache: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
