"""python -m pyxdev: the command `pyxdev`."""

import sys

from pyxdev.cli import main

sys.exit(main())
