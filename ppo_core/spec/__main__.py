"""`python -m ppo_core.spec > docs/spec.md`."""

import sys

from ppo_core.spec.page import page

sys.stdout.write(page())
