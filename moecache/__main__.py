"""`python -m moecache` is `moecache`."""

import sys

from moecache.commands.ctrl_c import CTRL_C, EXIT_CODE


def main() -> int:
    """Run the command line and return the exit code; 130 if its imports are interrupted."""
    CTRL_C.stay()
    code = EXIT_CODE
    try:
        from moecache.cli import main as run

        code = run()
    except KeyboardInterrupt:
        CTRL_C.tell()
    finally:
        CTRL_C.end(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
