"""What users import and type: `ppo.Client`, the `ppo` command line, and `ppo.local`, the platform on one machine."""

from ppo.client import Client

__all__ = ["Client"]
