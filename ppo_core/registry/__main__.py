"""`python -m ppo_core.registry > docs/metrics.md`."""

import sys

from ppo_core.registry.page import page

sys.stdout.write(page())
