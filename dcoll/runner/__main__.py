"""`python -m dcoll.runner` is dcollrun."""

import sys

from dcoll.runner.cli import main

sys.exit(main())
