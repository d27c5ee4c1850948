"""What users import and type: `ppo.client`, the `ppo` command line, and `ppo.local`, the platform on one machine."""
