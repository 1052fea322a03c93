"""`python -m moecache` is `moecache`."""

import sys

from moecache.cli import main

sys.exit(main())
