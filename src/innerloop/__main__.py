"""``python -m innerloop``, the same as the ``innerloop`` command."""

import sys

from innerloop.cli import main

sys.exit(main())
