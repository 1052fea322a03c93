"""`python -m moecache` is `moecache`."""

import sys

from moecache.commands.ctrl_c import CTRL_C, EXIT_CODE, IS_COMMAND


def main() -> int:
    """Run the command line and return the exit code; 130 if its imports are interrupted."""
    CTRL_C.stay()
    code, has_returned = EXIT_CODE, False
    try:
        from moecache.cli import main as run

        code = run()
        # A script that calls this has an exit code of its own.
        has_returned = IS_COMMAND
    except KeyboardInterrupt:
        CTRL_C.tell()
    finally:
        CTRL_C.end(code, has_returned=has_returned)
    return code


if __name__ == "__main__":
    sys.exit(main())
