"""`python -m moecache` is `moecache`."""

import sys


def main() -> int:
    """Run the command line and return the exit code; 130 if its imports are interrupted."""
    try:
        from moecache.cli import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("moecache: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
